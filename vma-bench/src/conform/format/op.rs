//! A call of a case: who makes it, what it is, what it gave.

use std::fmt;

use serde::{Deserialize, de::value::MapDeserializer};
use serde_json::Value;

use super::{
    PAGE,
    fields::Fields,
    result::{Outcome, Recorded},
    word::{At, Word},
};

/// One element of `ops`.
#[derive(Debug, Clone)]
pub(in crate::conform) struct Op {
    /// The process that makes the call.
    pub process: u64,
    /// The call.
    pub call: Call,
    /// The call in words, for messages.
    pub text: String,
    /// What it gave.
    pub outcome: Outcome,
    /// Which pages mincore found resident, a digit each.
    pub resident: Option<String>,
    /// Count and hash of the layout after the call; `None`: the layout is the one from before.
    pub layout: Option<LayoutMark>,
}

/// What is recorded of the layout after a call that changed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::conform) struct LayoutMark {
    /// Mappings in the arena.
    pub count: usize,
    /// FNV-1a of their lines.
    pub hash: u32,
}

impl fmt::Display for LayoutMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mappings with hash {:08x}", self.count, self.hash)
    }
}

/// The calls, with their arguments as given to the system call.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
#[rustfmt::skip]
pub(in crate::conform) enum Call {
    Mmap { addr: At, len: Word, prot: Word, flags: Word, file: Option<String>, off: Option<Word> },
    Munmap { addr: At, len: Word },
    Mprotect { addr: At, len: Word, prot: Word },
    Mremap { addr: At, old_len: Word, new_len: Word, flags: Word, new_addr: Option<At> },
    Madvise { addr: At, len: Word, advice: Word },
    Mlock { addr: At, len: Word },
    Munlock { addr: At, len: Word },
    Mlock2 { addr: At, len: Word, flags: Word },
    Mlockall { flags: Word },
    // With braces: fields that don't belong here are refused only then.
    Munlockall {},
    Msync { addr: At, len: Word, flags: Word },
    Mincore { addr: At, len: Word },
    Brk { addr: At },
    Write { addr: At, val: u8 },
    Read { addr: At },
    Fork { child: u64 },
    Exit {},
    Ftruncate { file: String, len: Word },
    PunchHole { file: String, off: Word, len: Word },
    FileWrite { file: String, off: Word, val: u8 },
    FileRead { file: String, off: Word },
    Mseal { addr: At, len: Word, flags: Word },
    RemapFilePages { addr: At, len: Word, prot: Word, pgoff: Word, flags: Word },
    ProcessMadvise { vec: Vec<Piece>, advice: Word, flags: Word },
    Mdwe { flags: Word },
    FileSeal { file: String, seals: Word },
    DupFd { file: String, new: String },
    Reopen { file: String, new: String, mode: Mode },
    Stats {},
}

/// A range of `process_madvise`.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::conform) struct Piece {
    /// Its start.
    pub addr: At,
    /// Bytes.
    pub len: Word,
}

/// How a descriptor is open.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(in crate::conform) enum Mode {
    #[serde(rename = "rw")]
    ReadWrite,
    #[serde(rename = "r")]
    Read,
    #[serde(rename = "w")]
    Write,
}

impl Call {
    /// The file that the call names.
    pub(super) fn file(&self) -> Option<&str> {
        match self {
            Call::Mmap { file, .. } => file.as_deref(),
            Call::Ftruncate { file, .. }
            | Call::PunchHole { file, .. }
            | Call::FileWrite { file, .. }
            | Call::FileRead { file, .. }
            | Call::FileSeal { file, .. }
            | Call::DupFd { file, .. }
            | Call::Reopen { file, .. } => Some(file),
            _ => None,
        }
    }
}

/// A field that is there, in its type.
fn typed<T: for<'de> Deserialize<'de>>(
    name: &str,
    value: Option<Value>,
) -> Result<Option<T>, String> {
    value
        .map(|value| T::deserialize(value).map_err(|e| format!("`{name}`: {e}")))
        .transpose()
}

impl TryFrom<Fields> for Op {
    type Error = String;

    fn try_from(mut fields: Fields) -> Result<Op, String> {
        let process = typed("p", fields.take("p"))?.unwrap_or(0);
        let count = typed::<usize>("n", fields.take("n"))?;
        let hash = typed::<String>("h", fields.take("h"))?;
        let recorded: Recorded =
            typed("result", fields.take("result"))?.ok_or("missing field `result`")?;
        let text = fields.text();
        let call = Call::deserialize(MapDeserializer::new(fields.0.into_iter()))
            .map_err(|e: serde_json::Error| e.to_string())?;
        let op = Op {
            process,
            layout: layout_mark(count, hash.as_deref())?,
            resident: recorded.resident,
            outcome: recorded.outcome,
            call,
            text,
        };
        op.check()?;
        Ok(op)
    }
}

fn layout_mark(count: Option<usize>, hash: Option<&str>) -> Result<Option<LayoutMark>, String> {
    match (count, hash) {
        (None, None) => Ok(None),
        (Some(count), Some(text)) => {
            let digits = text.len() == 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
            digits
                .then(|| u32::from_str_radix(text, 16).ok())
                .flatten()
                .map(|hash| Some(LayoutMark { count, hash }))
                .ok_or_else(|| format!("`h`: {text:?} isn't a hash of 8 hex digits"))
        }
        _ => Err("`n` and `h` only go together".to_owned()),
    }
}

/// Ranges that `process_madvise` of a case has at most.
const MAX_PIECES: usize = 4;

impl Op {
    /// What holds between the fields of a call.
    fn check(&self) -> Result<(), String> {
        let resident = self.resident.as_deref();
        match (&self.call, &self.outcome) {
            (Call::Mincore { len, .. }, Outcome::Ok(_)) => {
                let pages = len.0.div_ceil(PAGE);
                let digit_each = |vec: &str| {
                    vec.len() as u64 == pages && vec.bytes().all(|b| matches!(b, b'0' | b'1'))
                };
                let fits = resident.is_none_or(digit_each);
                fits.then_some(()).ok_or_else(|| {
                    format!("`vec` isn't one digit 0 or 1 for each of {pages} pages")
                })
            }
            _ if resident.is_some() => Err("`vec` belongs to mincore that succeeds".to_owned()),
            (Call::Stats {}, Outcome::Stats(_)) => Ok(()),
            (Call::Stats {}, _) => Err("stats gives counters".to_owned()),
            (_, Outcome::Stats(_)) => Err("counters belong to stats".to_owned()),
            (Call::ProcessMadvise { vec, .. }, _) if vec.len() > MAX_PIECES => Err(format!(
                "`vec` has {} ranges, {MAX_PIECES} are allowed",
                vec.len()
            )),
            (Call::Fork { .. }, Outcome::Ok(_)) if self.layout.is_none() => {
                Err("a fork has `n` and `h` of the child".to_owned())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(json: &str) -> Result<Op, String> {
        let fields = serde_json::from_str::<Fields>(json).map_err(|e| e.to_string())?;
        Op::try_from(fields)
    }

    #[test]
    fn a_call_is_told_in_the_order_of_its_fields() {
        let op = op(r#"{"op":"mmap","addr":"0x0","len":4096,"prot":1,"flags":34,"p":2,"result":{"ok":0},"n":1,"h":"0000000f"}"#)
            .unwrap();
        assert_eq!(op.text, "mmap addr=0x0 len=4096 prot=1 flags=34");
        assert_eq!(op.process, 2);
        assert_eq!(op.layout, Some(LayoutMark { count: 1, hash: 15 }));
    }

    #[test]
    fn what_does_not_belong_to_a_call_is_refused() {
        for (json, why) in [
            (
                r#"{"op":"frob","result":{"ok":0}}"#,
                "unknown variant `frob`",
            ),
            (r#"{"addr":0,"result":{"ok":0}}"#, "missing field `op`"),
            (r#"{"op":"brk","result":{"ok":0}}"#, "missing field `addr`"),
            (r#"{"op":"brk","addr":0}"#, "missing field `result`"),
            (
                r#"{"op":"brk","addr":0,"len":1,"result":{"ok":0}}"#,
                "unknown field `len`",
            ),
            (
                r#"{"op":"exit","addr":0,"result":{"ok":0}}"#,
                "unknown field `addr`",
            ),
            (
                r#"{"op":"stats","extra":0,"result":{"ok":0}}"#,
                "unknown field `extra`",
            ),
            (
                r#"{"op":"stats","result":{"ok":0}}"#,
                "stats gives counters",
            ),
            (
                r#"{"op":"brk","addr":0,"addr":1,"result":{"ok":0}}"#,
                "duplicate field `addr`",
            ),
            (
                r#"{"op":"brk","addr":0.5,"result":{"ok":0}}"#,
                "floating point",
            ),
            (
                r#"{"op":"write","addr":0,"val":256,"result":{"ok":0}}"#,
                "256",
            ),
            (
                r#"{"op":"brk","addr":0,"n":1,"result":{"ok":0}}"#,
                "only go together",
            ),
            (
                r#"{"op":"brk","addr":0,"n":1,"h":"123","result":{"ok":0}}"#,
                "8 hex digits",
            ),
            (
                r#"{"op":"brk","addr":0,"n":-1,"h":"811c9dc5","result":{"ok":0}}"#,
                "`n`",
            ),
            (r#"{"op":"brk","addr":0,"p":-1,"result":{"ok":0}}"#, "`p`"),
            (
                r#"{"op":"brk","addr":0,"result":{"ok":0,"vec":"1"}}"#,
                "belongs to mincore",
            ),
            (
                r#"{"op":"mincore","addr":0,"len":8192,"result":{"ok":0,"vec":"1"}}"#,
                "2 pages",
            ),
            (
                r#"{"op":"fork","child":1,"result":{"ok":1}}"#,
                "of the child",
            ),
            (
                r#"{"op":"reopen","file":"f0","new":"f1","mode":"x","result":{"ok":0}}"#,
                "unknown variant `x`",
            ),
            ("[]", "an object"),
        ] {
            let e = op(json).unwrap_err();
            assert!(e.contains(why), "{json}: {e}");
        }
    }
}
