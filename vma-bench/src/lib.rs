//! The parts of the command `vma-bench`, as a library so that tests and criterion benches share them.
//!
//! * [`replay`]: the recorded memory calls of real programs go in, the layout that the kernel had comes out.
//! * [`conform`]: golden vectors, recorded calls of a kernel, with every call checked.
//! * [`peers`]: the library measured beside what one would use instead.
//! * [`host`]: the same work on the running kernel. [`paper`]: results that others have published.
//! * [`cli`]: the command line. [`report`]: what the commands print with.
#![deny(unsafe_code)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, reason = "a test that fails shows where")
)]

pub mod cli;
pub mod conform;
pub mod host;
pub mod paper;
pub mod peers;
pub mod replay;
pub mod report;
