//! The text that `strace -f` writes, parsed.
//!
//! Four layers, each a file: [`mod@line`] tells what a line is (a call, the rest of a call, a signal, an exit); [`log`] puts
//! `<unfinished ...>` and `<... resumed>` together; [`value`] parses one argument; [`decode`] turns a name with
//! arguments into a [`call::Call`], with the constants of [`symbols`].

pub mod call;
pub mod decode;
pub mod line;
pub mod log;
pub mod symbols;
pub mod value;
