//! Descriptor tables and the current folder.

use std::collections::BTreeMap;

use super::files::DescriptionId;
use crate::replay::strace::call::PathArg;

/// What a descriptor number stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fd {
    /// The description.
    pub description: DescriptionId,
    /// Closed by execve.
    pub cloexec: bool,
}

/// The descriptors of a process.
#[derive(Debug, Clone, Default)]
pub struct FdTable {
    entries: BTreeMap<i32, Fd>,
}

impl FdTable {
    /// The descriptor `fd`.
    pub fn get(&self, fd: i32) -> Option<Fd> {
        self.entries.get(&fd).copied()
    }

    /// Sets `fd`, closing what it was.
    pub fn set(&mut self, fd: i32, description: DescriptionId, cloexec: bool) {
        self.entries.insert(
            fd,
            Fd {
                description,
                cloexec,
            },
        );
    }

    /// close(2).
    pub fn close(&mut self, fd: i32) {
        self.entries.remove(&fd);
    }

    /// `close_range(2)`: closes or marks all descriptors from `first` to `last`.
    pub fn close_range(&mut self, first: u64, last: u64, cloexec: bool) {
        let inside = |fd: i32| u64::try_from(fd).is_ok_and(|fd| first <= fd && fd <= last);
        if cloexec {
            self.entries
                .iter_mut()
                .filter(|(fd, _)| inside(**fd))
                .for_each(|(_, e)| e.cloexec = true);
        } else {
            self.entries.retain(|&fd, _| !inside(fd));
        }
    }

    /// What execve does.
    pub fn exec(&mut self) {
        self.entries.retain(|_, e| !e.cloexec);
    }
}

/// The absolute path that `arg` means in the folder `cwd`; `None` where the folder isn't known.
///
/// Lexical: `.` and `..` are resolved, symbolic links aren't.
pub fn resolve(arg: &PathArg, cwd: Option<&str>) -> Option<String> {
    if arg.path.is_empty() {
        return None;
    }
    if arg.path.starts_with('/') {
        return Some(normal(&arg.path));
    }
    let dir = arg.dir.as_ref().and_then(|d| d.path.as_deref()).or(cwd)?;
    Some(normal(&format!("{dir}/{}", arg.path)))
}

fn normal(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::strace::call::FdArg;

    #[test]
    fn close_range_closes_or_marks() {
        let mut t = FdTable::default();
        for fd in 0..6 {
            t.set(fd, DescriptionId(0), false);
        }
        t.close_range(4, u64::MAX, false);
        t.close_range(2, 2, true);
        t.exec();
        let left: Vec<i32> = t.entries.keys().copied().collect();
        assert_eq!(left, [0, 1, 3]);
    }

    #[test]
    fn paths_are_resolved_against_the_folder() {
        let arg = |dir: Option<&str>, path: &str| PathArg {
            dir: dir.map(|d| FdArg {
                fd: -100,
                path: Some(d.into()),
                deleted: false,
            }),
            path: path.into(),
        };
        for (arg, cwd, full) in [
            (arg(None, "/a/./b/../c"), None, Some("/a/c")),
            (arg(None, "x"), Some("/a"), Some("/a/x")),
            (arg(None, "x"), None, None),
            (arg(Some("/d"), "../x"), Some("/a"), Some("/x")),
            (arg(None, ""), Some("/a"), None),
        ] {
            assert_eq!(resolve(&arg, cwd).as_deref(), full);
        }
    }
}
