//! Files of vectors: found, read, parsed.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{bundled::BUNDLED, format::Case};
use crate::replay::{
    error::ReplayError,
    input::{read_text, text_of},
};

/// Unusable input: the file, the line, the reason.
pub type InputError = ReplayError;

/// A file of vectors, parsed.
#[derive(Debug)]
pub struct Suite {
    /// The file.
    pub path: PathBuf,
    /// The cases, each with its line, from 1.
    pub(super) cases: Vec<(u64, Case)>,
}

/// Which cases are wanted.
#[derive(Debug, Default, Clone, Copy)]
pub struct Filter<'a> {
    /// Of this family.
    pub family: Option<&'a str>,
    /// Of this name, or with this tail or number in it.
    pub case: Option<&'a str>,
}

impl Suite {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// A line isn't a case, or there is none.
    pub fn parse(path: &Path, text: &str) -> Result<Suite, InputError> {
        let mut cases = Vec::new();
        for (line, number) in text.lines().zip(1..) {
            let case = Case::parse(line).map_err(|why| InputError::line(path, number, why))?;
            cases.push((number, case));
        }
        if cases.is_empty() {
            return Err(InputError::file(path, "there are no cases in it"));
        }
        Ok(Suite {
            path: path.to_path_buf(),
            cases,
        })
    }

    /// Number of cases.
    pub fn len(&self) -> usize {
        self.cases.len()
    }

    /// Whether no case is left.
    pub fn is_empty(&self) -> bool {
        self.cases.is_empty()
    }

    /// Keeps the wanted cases.
    pub fn retain(&mut self, wanted: Filter<'_>) {
        self.cases.retain(|(_, case)| {
            wanted.family.is_none_or(|family| case.family == family)
                && wanted.case.is_none_or(|name| case.is_named(name))
        });
    }
}

/// Reads the files, and those in the folders, that are named; without any, the bundled ones.
///
/// # Errors
/// A file can't be read, a line isn't a case, a folder has no vectors.
pub fn load(paths: &[PathBuf]) -> Result<Vec<Suite>, InputError> {
    if paths.is_empty() {
        return BUNDLED.iter().map(|file| bundled(file.0, file.1)).collect();
    }
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(vectors_in(path)?);
        } else {
            files.push(path.clone());
        }
    }
    files
        .iter()
        .map(|path| Suite::parse(path, &read_text(path)?))
        .collect()
}

/// A bundled file, under the name that it has without compression.
fn bundled(name: &str, bytes: &[u8]) -> Result<Suite, InputError> {
    let path = Path::new(name);
    Suite::parse(path, &text_of(path, bytes.to_vec())?)
}

/// The `*.jsonl` and `*.jsonl.gz` of a folder, by name.
fn vectors_in(folder: &Path) -> Result<Vec<PathBuf>, InputError> {
    let read_error = |source| InputError::Read {
        path: folder.to_path_buf(),
        source,
    };
    let entries: io::Result<Vec<PathBuf>> =
        fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let is_vectors = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".jsonl") || name.ends_with(".jsonl.gz")
    };
    let mut files: Vec<PathBuf> = entries
        .map_err(read_error)?
        .into_iter()
        .filter(is_vectors)
        .collect();
    files.sort();
    if files.is_empty() {
        let why = "there is no *.jsonl or *.jsonl.gz in this folder";
        return Err(InputError::file(folder, why));
    }
    Ok(files)
}
