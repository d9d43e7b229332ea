//! Files: what has a name, what has contents, and what was opened.
//!
//! Linux's own division. An *inode* is the contents; a *dentry* is a name of them, which follows renames and is shown
//! with ` (deleted)` when it is gone; a *description* (`struct file`) is what one `open` made: mappings merge only
//! within one description.

use std::collections::HashMap;

use crate::replay::maps::MapLine;

/// Index of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InodeId(pub usize);

/// Index of a dentry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DentryId(pub usize);

/// Index of an open file description.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DescriptionId(pub usize);

/// What mapping a file does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A file with pages.
    Regular,
    /// `/dev/zero`: private mappings are anonymous memory with a file, shared ones are new objects.
    DevZero,
    /// The object behind shared anonymous memory.
    SharedAnon,
    /// A memfd.
    Memfd,
    /// A System V segment.
    SysV,
    /// The ring of `io_setup`.
    Aio,
    /// An `io_uring`.
    Uring,
    /// A pipe, a socket, a directory: can't be mapped.
    Unmappable,
}

/// A device number and an inode number, as maps show them.
pub type DevIno = ((u32, u32), u64);

#[derive(Debug, Clone, Default)]
struct Inode {
    /// As a snapshot showed it; the log itself doesn't.
    known_as: Option<DevIno>,
}

#[derive(Debug, Clone)]
struct Dentry {
    path: String,
    deleted: bool,
    inode: InodeId,
}

/// What one `open` made.
#[derive(Debug, Clone, Copy)]
pub struct Description {
    dentry: DentryId,
    /// What mapping it does.
    pub kind: FileKind,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
}

/// All files.
#[derive(Debug, Clone, Default)]
pub struct Files {
    inodes: Vec<Inode>,
    dentries: Vec<Dentry>,
    descriptions: Vec<Description>,
    by_path: HashMap<String, DentryId>,
}

impl Files {
    /// Opens the file at `path`; one that isn't known yet comes to be. `deleted`: it has no name any more.
    pub fn open(
        &mut self,
        path: &str,
        deleted: bool,
        readable: bool,
        writable: bool,
    ) -> DescriptionId {
        let kind = kind_of(path);
        let shared_name = path.starts_with('/') && !path.starts_with("/memfd:") && !deleted;
        let dentry = match self.by_path.get(path).filter(|_| shared_name) {
            Some(&dentry) => dentry,
            None => self.new_dentry(path, deleted || path.starts_with("/memfd:"), shared_name),
        };
        self.describe(Description {
            dentry,
            kind,
            readable,
            writable,
        })
    }

    /// Makes an object that has no name in the file system, such as `/dev/zero (deleted)`.
    pub fn nameless(&mut self, path: &str, kind: FileKind) -> DescriptionId {
        let deleted = kind != FileKind::Uring;
        let dentry = self.new_dentry(path, deleted, false);
        self.describe(Description {
            dentry,
            kind,
            readable: true,
            writable: true,
        })
    }

    /// A second description of the file of `of`.
    pub fn reopen(&mut self, of: DescriptionId, writable: bool) -> DescriptionId {
        let description = Description {
            writable,
            ..self.descriptions[of.0]
        };
        self.describe(description)
    }

    /// The description behind a mapping that a map shows (a program's segments after an execve).
    pub fn of_map_line(&mut self, line: &MapLine) -> DescriptionId {
        let (path, deleted) = match line.name.strip_suffix(" (deleted)") {
            Some(path) => (path, true),
            None => (line.name.as_str(), false),
        };
        let writable = line.may(b's') && line.may(b'w');
        let id = self.open(path, deleted, true, writable);
        let inode = self.inode(id);
        self.inodes[inode.0]
            .known_as
            .get_or_insert((line.dev, line.inode));
        id
    }

    fn new_dentry(&mut self, path: &str, deleted: bool, findable: bool) -> DentryId {
        let inode = InodeId(self.inodes.len());
        self.inodes.push(Inode::default());
        let id = DentryId(self.dentries.len());
        self.dentries.push(Dentry {
            path: path.to_owned(),
            deleted,
            inode,
        });
        if findable {
            self.by_path.insert(path.to_owned(), id);
        }
        id
    }

    fn describe(&mut self, description: Description) -> DescriptionId {
        self.descriptions.push(description);
        DescriptionId(self.descriptions.len() - 1)
    }

    /// The description itself.
    pub fn get(&self, id: DescriptionId) -> &Description {
        &self.descriptions[id.0]
    }

    /// The contents behind a description.
    pub fn inode(&self, id: DescriptionId) -> InodeId {
        self.dentries[self.get(id).dentry.0].inode
    }

    /// The path of a description now, and whether it is gone.
    pub fn path(&self, id: DescriptionId) -> (&str, bool) {
        let dentry = &self.dentries[self.get(id).dentry.0];
        (&dentry.path, dentry.deleted)
    }

    /// The name as maps show it now.
    pub fn shown_name(&self, id: DescriptionId) -> String {
        let (path, deleted) = self.path(id);
        if deleted {
            format!("{path} (deleted)")
        } else {
            path.to_owned()
        }
    }

    /// Device and inode, if a snapshot has shown them.
    pub fn known_as(&self, inode: InodeId) -> Option<DevIno> {
        self.inodes[inode.0].known_as
    }

    /// Keeps what a snapshot shows for an inode.
    pub fn learn(&mut self, inode: InodeId, shown: DevIno) {
        self.inodes[inode.0].known_as.get_or_insert(shown);
    }

    /// Keeps what a snapshot shows of a name that changed by a call that isn't logged.
    pub fn learn_deleted(&mut self, id: DescriptionId) {
        let dentry = self.get(id).dentry;
        self.forget(dentry);
    }

    /// rename(2): the name moves, what was there loses its own. A folder takes everything below it along.
    pub fn rename(&mut self, from: &str, to: &str) {
        if from == to {
            return;
        }
        if self.same_inode(from, to) {
            return;
        }
        if let Some(&gone) = self.by_path.get(to) {
            self.forget(gone);
        }
        let below = format!("{from}/");
        let moved: Vec<(String, DentryId)> = self
            .by_path
            .iter()
            .filter(|(path, _)| *path == from || path.starts_with(&below))
            .map(|(path, &id)| (path.clone(), id))
            .collect();
        for (old, id) in moved {
            self.by_path.remove(&old);
            let new = format!("{to}{}", &old[from.len()..]);
            self.dentries[id.0].path.clone_from(&new);
            self.by_path.insert(new, id);
        }
    }

    /// `renameat2(RENAME_EXCHANGE)` of two files.
    pub fn exchange(&mut self, a: &str, b: &str) {
        let (at_a, at_b) = (self.by_path.remove(a), self.by_path.remove(b));
        for (id, path) in [(at_a, b), (at_b, a)] {
            if let Some(id) = id {
                path.clone_into(&mut self.dentries[id.0].path);
                self.by_path.insert(path.to_owned(), id);
            }
        }
    }

    /// Two names of one inode: rename(2) does nothing.
    fn same_inode(&self, a: &str, b: &str) -> bool {
        let inode = |path| self.by_path.get(path).map(|id| self.dentries[id.0].inode);
        inode(a).is_some() && inode(a) == inode(b)
    }

    /// link(2): a second name for the file at `from`.
    pub fn link(&mut self, from: &str, to: &str) {
        let Some(&old) = self.by_path.get(from) else {
            return;
        };
        let inode = self.dentries[old.0].inode;
        let id = DentryId(self.dentries.len());
        self.dentries.push(Dentry {
            path: to.to_owned(),
            deleted: false,
            inode,
        });
        self.by_path.insert(to.to_owned(), id);
    }

    /// unlink(2).
    pub fn unlink(&mut self, path: &str) {
        if let Some(&id) = self.by_path.get(path) {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: DentryId) {
        let dentry = &mut self.dentries[id.0];
        dentry.deleted = true;
        if self.by_path.get(&dentry.path) == Some(&id) {
            self.by_path.remove(&dentry.path);
        }
    }
}

fn kind_of(path: &str) -> FileKind {
    if path == "/dev/zero" {
        FileKind::DevZero
    } else if path.starts_with("/memfd:") {
        FileKind::Memfd
    } else if path.starts_with("/SYSV") {
        FileKind::SysV
    } else if path == "anon_inode:[io_uring]" {
        FileKind::Uring
    } else if path == "/[aio]" {
        FileKind::Aio
    } else if path.starts_with('/') && path != "/dev/null" {
        FileKind::Regular
    } else {
        FileKind::Unmappable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(files: &mut Files, path: &str) -> DescriptionId {
        files.open(path, false, true, true)
    }

    #[test]
    fn two_opens_are_two_descriptions_of_one_inode() {
        let mut f = Files::default();
        let (a, b) = (open(&mut f, "/a"), open(&mut f, "/a"));
        assert_ne!(a, b);
        assert_eq!(f.inode(a), f.inode(b));
    }

    #[test]
    fn names_follow_renames_and_unlinks() {
        let mut f = Files::default();
        let (a, b, c) = (
            open(&mut f, "/d/a"),
            open(&mut f, "/d/b"),
            open(&mut f, "/d/c"),
        );
        f.rename("/d/a", "/d/b");
        assert_eq!(
            (f.shown_name(a), f.shown_name(b)),
            ("/d/b".into(), "/d/b (deleted)".into())
        );
        f.rename("/d", "/e");
        assert_eq!(
            (f.shown_name(a), f.shown_name(c)),
            ("/e/b".into(), "/e/c".into())
        );
        f.unlink("/e/c");
        let fresh = open(&mut f, "/e/c");
        assert_eq!(
            (f.shown_name(c), f.shown_name(fresh)),
            ("/e/c (deleted)".into(), "/e/c".into())
        );
        assert_ne!(f.inode(c), f.inode(fresh));
    }

    #[test]
    fn a_linked_file_keeps_its_inode_and_each_name_its_own_fate() {
        let mut f = Files::default();
        let a = open(&mut f, "/a");
        f.link("/a", "/b");
        f.unlink("/a");
        let b = open(&mut f, "/b");
        assert_eq!(f.shown_name(a), "/a (deleted)");
        assert_eq!(f.shown_name(b), "/b");
        assert_eq!(f.inode(a), f.inode(b));
    }

    #[test]
    fn exchanged_names_are_exchanged() {
        let mut f = Files::default();
        let (a, b) = (open(&mut f, "/a"), open(&mut f, "/b"));
        f.exchange("/a", "/b");
        assert_eq!(
            (f.shown_name(a), f.shown_name(b)),
            ("/b".into(), "/a".into())
        );
    }
}
