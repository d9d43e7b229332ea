//! Why a replay couldn't be done at all (exit status 2): the file, the line, the reason.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Unusable input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A file can't be opened or read, damaged compression included.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system or the decompressor says.
        source: io::Error,
    },
    /// A line of a file doesn't have the form that it must have.
    #[error("{}:{line}: {why}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A file as a whole lacks what is needed.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is missing.
        why: String,
    },
}

impl ReplayError {
    /// An error about one line of `path`.
    pub fn line(path: &Path, line: u64, why: impl Into<String>) -> Self {
        Self::Line {
            path: path.to_path_buf(),
            line,
            why: why.into(),
        }
    }

    /// An error about `path` as a whole.
    pub fn file(path: &Path, why: impl Into<String>) -> Self {
        Self::File {
            path: path.to_path_buf(),
            why: why.into(),
        }
    }
}
