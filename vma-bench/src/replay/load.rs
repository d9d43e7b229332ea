//! A log with its recorded maps, from files.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use super::{
    engine::Recorded,
    error::ReplayError,
    input::{beside, read_text},
    maps::{self, Moment, Snapshot},
    strace::log::Log,
};

/// A log with what was recorded of it.
#[derive(Debug)]
pub struct Case {
    /// The file of the log, for messages.
    pub path: PathBuf,
    /// The log.
    pub log: Log,
    /// The maps.
    pub recorded: Recorded,
}

/// The text of a file with its path, for messages.
#[derive(Debug)]
pub struct Text {
    /// The path.
    pub path: PathBuf,
    /// The contents.
    pub text: String,
}

impl Text {
    /// Reads a file, plain or gzip.
    ///
    /// # Errors
    /// As [`read_text`].
    pub fn read(path: &Path) -> Result<Self, ReplayError> {
        Ok(Self {
            path: path.to_path_buf(),
            text: read_text(path)?,
        })
    }
}

/// Everything that belongs to a log, as text.
#[derive(Debug)]
pub struct Texts {
    /// The log.
    pub trace: Text,
    /// The map after the first execve.
    pub start: Text,
    /// The map at the end.
    pub end: Option<Text>,
    /// `smaps` at the end.
    pub flags: Option<Text>,
    /// All other maps.
    pub more: Option<Text>,
}

/// Reads a log and the maps beside it; `start` and `end` in place of what lies beside it.
///
/// # Errors
/// A file that isn't there or can't be used.
pub fn files(trace: &Path, start: Option<&Path>, end: Option<&Path>) -> Result<Case, ReplayError> {
    let log = Text::read(trace)?;
    let start = start
        .map(Path::to_path_buf)
        .or_else(|| beside(trace, "start.maps"))
        .ok_or_else(|| {
            ReplayError::file(
                trace,
                "no start map: NAME.start.maps isn't beside it and --start isn't given",
            )
        })?;
    let optional = |kind: &str| beside(trace, kind).map(|p| Text::read(&p)).transpose();
    let given_end = end.map(Text::read).transpose()?;
    let texts = Texts {
        trace: log,
        start: Text::read(&start)?,
        // Flags that belong to another end than the given one say nothing about it.
        flags: if given_end.is_some() {
            None
        } else {
            optional("end.smaps")?
        },
        end: if given_end.is_some() {
            given_end
        } else {
            optional("end.maps")?
        },
        more: optional("more.maps")?,
    };
    case(&texts)
}

/// Parses the texts of a case.
///
/// # Errors
/// The first thing that is wrong with one of them.
pub fn case(texts: &Texts) -> Result<Case, ReplayError> {
    let log = Log::parse(&texts.trace.path, &texts.trace.text)?;
    let Some(pid) = log.calls.first().map(|c| c.pid) else {
        return Err(ReplayError::file(&texts.trace.path, "no call in it"));
    };
    let mut snapshots = HashMap::new();
    let mut add = |pid: u32, snapshot: Snapshot, path: &Path| {
        let line = snapshot.line;
        match snapshots.insert((pid, snapshot.moment), snapshot) {
            None => Ok(()),
            Some(_) => Err(ReplayError::line(
                path,
                line,
                "a second map of the same moment",
            )),
        }
    };
    let whole = |text: &Text, moment| -> Result<Snapshot, ReplayError> {
        let map = maps::parse_map(&text.path, &text.text)?;
        Ok(Snapshot {
            pid: None,
            moment,
            map,
            line: 1,
        })
    };
    add(
        pid,
        whole(&texts.start, Moment::Exec(1))?,
        &texts.start.path,
    )?;
    if let Some(end) = &texts.end {
        add(pid, whole(end, Moment::End)?, &end.path)?;
    }
    if let Some(more) = &texts.more {
        for snapshot in maps::parse_sections(&more.path, &more.text)? {
            add(snapshot.pid.unwrap_or(pid), snapshot, &more.path)?;
        }
    }
    if !snapshots
        .keys()
        .any(|(_, moment)| !matches!(moment, Moment::Exec(_)))
    {
        return Err(ReplayError::file(
            &texts.trace.path,
            "nothing to compare with: neither NAME.end.maps nor NAME.more.maps is beside it and --end isn't given",
        ));
    }
    let flags = texts
        .flags
        .as_ref()
        .map(|t| maps::parse_flags(&t.path, &t.text))
        .transpose()?;
    Ok(Case {
        path: texts.trace.path.clone(),
        log,
        recorded: Recorded { snapshots, flags },
    })
}
