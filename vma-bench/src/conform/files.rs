//! The files of a case. What a file system does for pread, pwrite, ftruncate and fallocate, as far as it shows in results
//! and lengths, is the embedder's part and so stands here; lengths and seals themselves are the library's.

use std::{collections::HashMap, sync::Arc};

use vma_core::{AccessMode, FileKind, FileObject, OpenFile, Seals};

use super::format::{FileSpec, Mode};

/// Open files by id, and the names of the objects behind mappings.
#[derive(Debug, Default)]
pub(super) struct Files {
    open: HashMap<String, Arc<OpenFile>>,
    /// Each object once, under its first name, which is the lowest.
    objects: Vec<(Arc<FileObject>, Arc<str>)>,
}

/// A failure of a call on a descriptor, by symbol.
pub(super) type FileResult<T> = Result<T, &'static str>;

const NO_WRITING: Seals = Seals::WRITE.union(Seals::FUTURE_WRITE);

fn access(mode: Mode) -> AccessMode {
    match mode {
        Mode::ReadWrite => AccessMode::ReadWrite,
        Mode::Read => AccessMode::Read,
        Mode::Write => AccessMode::Write,
    }
}

/// An offset or a length as the system call takes it, as a signed number.
fn not_negative(value: u64) -> FileResult<u64> {
    i64::try_from(value).map(|_| value).map_err(|_| "EINVAL")
}

impl Files {
    /// Makes the files that a case begins with.
    pub(super) fn new(specs: &[FileSpec]) -> Files {
        let mut files = Files::default();
        for spec in specs {
            let memfd = FileObject::builder(FileKind::Shmem, &spec.id).len(spec.len);
            let object = if spec.sealable {
                memfd.seals(Seals::empty()).build()
            } else {
                memfd.build()
            };
            files.adopt(&object, &spec.id);
            files
                .open
                .insert(spec.id.clone(), OpenFile::new(object, access(spec.mode)));
        }
        files
    }

    /// The open file of an id, if there is one.
    pub(super) fn get(&self, id: &str) -> FileResult<&Arc<OpenFile>> {
        self.open.get(id).ok_or("EBADF")
    }

    /// Gives an object a name unless it has one.
    pub(super) fn adopt(&mut self, object: &Arc<FileObject>, name: &str) {
        if !self
            .objects
            .iter()
            .any(|(known, _)| Arc::ptr_eq(known, object))
        {
            self.objects.push((object.clone(), Arc::from(name)));
        }
    }

    /// The name of an object; a name that no vector has, if it should be none of the case's.
    pub(super) fn name_of(&self, object: &Arc<FileObject>) -> Arc<str> {
        self.objects
            .iter()
            .find(|(known, _)| Arc::ptr_eq(known, object))
            .map_or_else(|| Arc::from("?"), |(_, name)| name.clone())
    }

    /// `dup(2)`: the same open file.
    pub(super) fn dup(&mut self, id: &str, new: &str) -> FileResult<()> {
        let open = self.get(id)?.clone();
        self.open.insert(new.to_owned(), open);
        Ok(())
    }

    /// Another open file of the same object.
    pub(super) fn reopen(&mut self, id: &str, new: &str, mode: Mode) -> FileResult<()> {
        let object = self.get(id)?.object().clone();
        self.open
            .insert(new.to_owned(), OpenFile::new(object, access(mode)));
        Ok(())
    }

    /// ftruncate(2).
    pub(super) fn truncate(&self, id: &str, len: u64) -> FileResult<()> {
        not_negative(len)?;
        let file = self.get(id)?;
        if !file.is_writable() {
            return Err("EINVAL");
        }
        file.object().set_len(len).map_err(|e| e.errno().name())
    }

    /// fallocate(2) with `FALLOC_FL_PUNCH_HOLE`, which keeps the length.
    pub(super) fn punch_hole(&self, id: &str, off: u64, len: u64) -> FileResult<()> {
        not_negative(off)?;
        if not_negative(len)? == 0 {
            return Err("EINVAL");
        }
        let file = self.get(id)?;
        if !file.is_writable() {
            return Err("EBADF");
        }
        if file.object().current_seals().intersects(NO_WRITING) {
            return Err("EPERM");
        }
        Ok(())
    }

    /// pwrite(2) of one byte: the file grows if it has to.
    pub(super) fn write_byte(&self, id: &str, off: u64) -> FileResult<()> {
        not_negative(off)?;
        let file = self.get(id)?;
        if !file.is_writable() {
            return Err("EBADF");
        }
        if file.object().current_seals().intersects(NO_WRITING) {
            return Err("EPERM");
        }
        if off >= file.object().len() {
            return file.object().set_len(off + 1).map_err(|e| e.errno().name());
        }
        Ok(())
    }

    /// pread(2) of one byte: whether there is one.
    pub(super) fn read_byte(&self, id: &str, off: u64) -> FileResult<bool> {
        not_negative(off)?;
        let file = self.get(id)?;
        if !file.is_readable() {
            return Err("EBADF");
        }
        Ok(off < file.object().len())
    }
}
