//! The files of a case.

use std::{collections::HashMap, sync::Arc};

use vma_core::{AccessMode, FileIoError, FileKind, FileObject, OpenFile, Seals};

use super::format::{FileSpec, Mode, PAGE};

/// Open files by id, and the names of the objects behind mappings.
#[derive(Debug, Default)]
pub(super) struct Files {
    open: HashMap<String, Arc<OpenFile>>,
    /// Each object once, under its first name, which is the lowest.
    objects: Vec<(Arc<FileObject>, Arc<str>)>,
}

/// A failure of a call on a descriptor, by symbol.
pub(super) type FileResult<T> = Result<T, &'static str>;

/// The largest file of a case, in bytes.
const LARGEST: u64 = 64 << 20;

fn access(mode: Mode) -> AccessMode {
    match mode {
        Mode::ReadWrite => AccessMode::ReadWrite,
        Mode::Read => AccessMode::Read,
        Mode::Write => AccessMode::Write,
    }
}

impl Files {
    /// Makes the files that a case begins with.
    ///
    /// # Errors
    /// The library refuses their content: in words.
    pub(super) fn new(specs: &[FileSpec]) -> Result<Files, String> {
        let mut files = Files::default();
        for spec in specs {
            let memfd = FileObject::builder(FileKind::Shmem, &spec.id).len(spec.len);
            let object = if spec.sealable {
                memfd.seals(Seals::empty()).build()
            } else {
                memfd.build()
            };
            if spec.len > LARGEST {
                return Err(format!(
                    "a file of {} bytes is too large to be filled",
                    spec.len
                ));
            }
            let number: u64 = spec.id[1..].parse().unwrap_or_default();
            for page in 0..spec.len.div_ceil(PAGE) {
                let byte = (17 * (number + 1) + page) as u8;
                let count = PAGE.min(spec.len - page * PAGE) as usize;
                object
                    .write_at(page * PAGE, &vec![byte; count])
                    .map_err(|e| e.to_string())?;
            }
            files.adopt(&object, &spec.id);
            files
                .open
                .insert(spec.id.clone(), OpenFile::new(object, access(spec.mode)));
        }
        Ok(files)
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
        self.get(id)?.truncate(len).map_err(name)
    }

    /// fallocate(2) with `FALLOC_FL_PUNCH_HOLE`, which keeps the length.
    pub(super) fn punch_hole(&self, id: &str, off: u64, len: u64) -> FileResult<()> {
        self.get(id)?.punch_hole(off, len).map_err(name)
    }

    /// pwrite(2) of one byte: the file grows if it has to.
    pub(super) fn write_byte(&self, id: &str, off: u64, byte: u8) -> FileResult<()> {
        self.get(id)?.write_at(off, &[byte]).map_err(name)
    }

    /// pread(2) of one byte, if there is one.
    pub(super) fn read_byte(&self, id: &str, off: u64) -> FileResult<Option<u8>> {
        let mut byte = [0];
        let count = self.get(id)?.read_at(off, &mut byte).map_err(name)?;
        Ok((count > 0).then_some(byte[0]))
    }
}

fn name(error: FileIoError) -> &'static str {
    error.errno().name()
}
