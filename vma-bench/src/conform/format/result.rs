//! The `result` of a call.

use std::fmt;

use serde::Deserialize;

/// What a call came to, in the forms that the vectors have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::conform) enum Outcome {
    /// Success: an address relative to the arena, a byte, a number of a process, a count of bytes, or 0.
    Ok(i64),
    /// Failure, by symbol.
    Errno(String),
    /// Mapped, but outside the arena.
    Outside,
    /// The access got a signal.
    Signal {
        /// Its name.
        signal: String,
        /// `si_code`, without the prefix.
        code: String,
    },
    /// Read at or past the end of the file.
    Eof,
    /// Counters, in KiB.
    Stats(Counters),
}

/// What `stats` gives: the counters of `/proc/PID/status` as far as the case's mappings contribute, in KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::conform) struct Counters {
    /// Everything mapped.
    pub size: i64,
    /// Locked.
    pub locked: i64,
    /// Private, writable, no stack.
    pub data: i64,
    /// Growing down.
    pub stack: i64,
    /// `VmExe` and `VmLib` together.
    pub exec: i64,
}

impl Outcome {
    /// A signal of a fault.
    pub(in crate::conform) fn signal(signal: &str, code: &str) -> Outcome {
        Outcome::Signal {
            signal: signal.to_owned(),
            code: code.to_owned(),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Ok(value) => write!(f, "ok {value}"),
            Outcome::Errno(name) => f.write_str(name),
            Outcome::Outside => f.write_str("mapped outside the arena"),
            Outcome::Signal { signal, code } => write!(f, "{signal} {code}"),
            Outcome::Eof => f.write_str("end of file"),
            Outcome::Stats(c) => write!(
                f,
                "VmSize {} VmLck {} VmData {} VmStk {} VmExec {}",
                c.size, c.locked, c.data, c.stack, c.exec
            ),
        }
    }
}

/// `result` with the residency vector that mincore's has.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Raw")]
pub(super) struct Recorded {
    pub(super) outcome: Outcome,
    /// One `0` or `1` per page.
    pub(super) resident: Option<String>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    ok: Option<i64>,
    errno: Option<String>,
    outside: Option<bool>,
    signal: Option<String>,
    code: Option<String>,
    eof: Option<bool>,
    vec: Option<String>,
    #[serde(rename = "VmSize")]
    size: Option<i64>,
    #[serde(rename = "VmLck")]
    locked: Option<i64>,
    #[serde(rename = "VmData")]
    data: Option<i64>,
    #[serde(rename = "VmStk")]
    stack: Option<i64>,
    #[serde(rename = "VmExec")]
    exec: Option<i64>,
}

impl Raw {
    /// Takes the fields of one form out; what is left then doesn't belong to it.
    fn form(&mut self) -> Option<Outcome> {
        if let Some(value) = self.ok.take() {
            let Some(size) = self.size.take() else {
                return Some(Outcome::Ok(value));
            };
            return Some(Outcome::Stats(Counters {
                size,
                locked: self.locked.take()?,
                data: self.data.take()?,
                stack: self.stack.take()?,
                exec: self.exec.take()?,
            }));
        }
        if let Some(name) = self.errno.take() {
            return Some(Outcome::Errno(name));
        }
        if self.outside.take_if(|yes| *yes).is_some() {
            return Some(Outcome::Outside);
        }
        if self.eof.take_if(|yes| *yes).is_some() {
            return Some(Outcome::Eof);
        }
        Some(Outcome::Signal {
            signal: self.signal.take()?,
            code: self.code.take()?,
        })
    }
}

impl TryFrom<Raw> for Recorded {
    type Error = &'static str;

    fn try_from(mut raw: Raw) -> Result<Self, Self::Error> {
        let resident = raw.vec.take();
        match raw.form() {
            Some(outcome) if raw == Raw::default() => Ok(Recorded { outcome, resident }),
            _ => Err("the result has none of the known forms, or more than one"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_has_exactly_one_form() {
        let good = [
            r#"{"ok":-4096}"#,
            r#"{"errno":"EINVAL"}"#,
            r#"{"outside":true}"#,
            r#"{"eof":true}"#,
            r#"{"signal":"SIGBUS","code":"ADRERR"}"#,
            r#"{"ok":0,"vec":"01"}"#,
            r#"{"ok":0,"VmSize":4,"VmLck":0,"VmData":4,"VmStk":0,"VmExec":0}"#,
        ];
        let bad = [
            "{}",
            "0",
            "null",
            r#"{"ok":"0"}"#,
            r#"{"ok":0,"ok":0}"#,
            r#"{"ok":0,"errno":"EINVAL"}"#,
            r#"{"outside":false}"#,
            r#"{"eof":false}"#,
            r#"{"outside":true,"eof":true}"#,
            r#"{"signal":"SIGBUS"}"#,
            r#"{"code":"ADRERR"}"#,
            r#"{"ok":0,"code":"ADRERR"}"#,
            r#"{"ok":0,"VmSize":4}"#,
            r#"{"VmSize":4,"VmLck":0,"VmData":4,"VmStk":0,"VmExec":0}"#,
            r#"{"ok":0,"VmRSS":4}"#,
        ];
        for json in good {
            assert!(serde_json::from_str::<Recorded>(json).is_ok(), "{json}");
        }
        for json in bad {
            assert!(serde_json::from_str::<Recorded>(json).is_err(), "{json}");
        }
    }
}
