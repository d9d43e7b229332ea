//! What running vectors found.

use std::{fmt, ops::AddAssign};

use serde::Serialize;

/// What was compared beside results of calls and layouts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// Bytes that were read, through a mapping or a descriptor.
    pub byte_values: u64,
    /// Which pages mincore calls resident.
    pub mincore_vectors: u64,
}

impl AddAssign for Compared {
    fn add_assign(&mut self, other: Self) {
        self.byte_values += other.byte_values;
        self.mincore_vectors += other.mincore_vectors;
    }
}

/// How a case failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Name of the case.
    pub case: String,
    /// Its family.
    pub family: String,
    /// Index of the call in `ops`, from 0; `None`: at the end.
    pub op: Option<usize>,
    /// The process that made the call.
    pub process: Option<u64>,
    /// The call with its arguments.
    pub call: Option<String>,
    /// Which check failed: `result`, `resident pages`, `layout`, `VmFlags` or `structure`.
    pub what: &'static str,
    /// What the kernel gave.
    pub expected: String,
    /// What the library gave.
    pub got: String,
    /// Layouts as a unified diff: the kernel's and the library's where the kernel's is recorded, else before and after the call.
    pub diff: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, ", self.case)?;
        match (self.op, &self.call) {
            (Some(op), Some(call)) => {
                write!(f, "op {op}")?;
                if let Some(process) = self.process.filter(|process| *process != 0) {
                    write!(f, " of process {process}")?;
                }
                writeln!(f, ": {call}")?;
            }
            _ => writeln!(f, "after the last op")?,
        }
        writeln!(f, "  {} expected: {}", self.what, self.expected)?;
        writeln!(f, "  {} got:      {}", self.what, self.got)?;
        f.write_str(&self.diff)
    }
}

/// What a file of vectors came to.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct FileReport {
    /// The file.
    pub file: String,
    /// Cases in which every check held.
    pub passed: u64,
    /// Calls of these cases; those after a failure are not made.
    pub calls: u64,
    /// Other comparisons, in all cases.
    pub compared: Compared,
    /// The cases that failed, in the order of the file.
    pub failures: Vec<Failure>,
}

impl FileReport {
    /// Cases run.
    pub fn cases(&self) -> u64 {
        self.passed + self.failed()
    }

    /// Cases that failed.
    pub fn failed(&self) -> u64 {
        self.failures.len() as u64
    }
}
