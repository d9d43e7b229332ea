//! The library's files for the descriptions of the model.

use std::{cell::RefCell, collections::HashMap, rc::Rc, sync::Arc};

use vma_core::{AccessMode, FileKind as Kind, FileObject, MappingHooks, OpenFile, VmaFlags};

use crate::replay::{
    model::files::{DescriptionId, FileKind, InodeId},
    op::OpFile,
};

/// The files of all spaces of a replay: the same description is the same [`OpenFile`] everywhere.
#[derive(Debug, Clone, Default)]
pub struct OpenFiles(Rc<RefCell<Table>>);

#[derive(Debug, Default)]
struct Table {
    objects: HashMap<InodeId, Arc<FileObject>>,
    by_id: HashMap<DescriptionId, Arc<OpenFile>>,
    /// By address of the open file; the file is kept, so that the address stays its own.
    ids: HashMap<usize, Known>,
}

#[derive(Debug)]
struct Known {
    id: DescriptionId,
    kind: FileKind,
    _kept: Arc<OpenFile>,
}

/// System V segments follow the removal of each of their mappings.
struct Segment;

impl MappingHooks for Segment {
    fn has_close(&self) -> bool {
        true
    }
}

impl OpenFiles {
    /// The library's file for what a call maps.
    pub fn get(&self, file: OpFile) -> Option<Arc<OpenFile>> {
        let OpFile::Open {
            id,
            inode,
            kind,
            readable,
            writable,
        } = file
        else {
            return None;
        };
        let mut table = self.0.borrow_mut();
        if let Some(open) = table.by_id.get(&id) {
            return Some(open.clone());
        }
        let object = table
            .objects
            .entry(inode)
            .or_insert_with(|| object(kind))
            .clone();
        let mode = match (readable, writable) {
            (true, true) => AccessMode::ReadWrite,
            (false, true) => AccessMode::Write,
            _ => AccessMode::Read,
        };
        let open = OpenFile::new(object, mode);
        table.by_id.insert(id, open.clone());
        table.ids.insert(
            address(&open),
            Known {
                id,
                kind,
                _kept: open.clone(),
            },
        );
        Some(open)
    }

    /// Says which description a file is that the library made itself (shared anonymous memory).
    pub fn bind(&self, open: &Arc<OpenFile>, id: DescriptionId) {
        let known = || Known {
            id,
            kind: FileKind::SharedAnon,
            _kept: open.clone(),
        };
        self.0
            .borrow_mut()
            .ids
            .entry(address(open))
            .or_insert_with(known);
    }

    /// The description of a file of the library.
    pub fn id_of(&self, open: &Arc<OpenFile>) -> Option<DescriptionId> {
        self.0
            .borrow()
            .ids
            .get(&address(open))
            .map(|known| known.id)
    }

    /// Whether it is a System V segment.
    pub fn is_segment(&self, open: &Arc<OpenFile>) -> bool {
        self.0
            .borrow()
            .ids
            .get(&address(open))
            .is_some_and(|known| known.kind == FileKind::SysV)
    }
}

fn address(open: &Arc<OpenFile>) -> usize {
    Arc::as_ptr(open).addr()
}

/// Bytes: longer than anything that is mapped. The log doesn't tell the lengths of files, and no map depends on them.
const LONGEST: u64 = 1 << 62;

fn object(kind: FileKind) -> Arc<FileObject> {
    let build = |kind| FileObject::builder(kind, "").len(LONGEST);
    match kind {
        // The file systems of the recording machine align large mappings.
        FileKind::Regular => build(Kind::Regular).huge_aligned(true).build(),
        FileKind::DevZero => build(Kind::DevZero).build(),
        FileKind::SharedAnon | FileKind::Memfd => build(Kind::Shmem).build(),
        FileKind::SysV => build(Kind::Shmem).hooks(Arc::new(Segment)).build(),
        FileKind::Aio => build(Kind::Device)
            .no_exec(true)
            .mmap_flags(VmaFlags::DONTEXPAND)
            .build(),
        FileKind::Uring => build(Kind::Device)
            .no_exec(true)
            .mmap_flags(VmaFlags::DONTEXPAND | VmaFlags::MIXEDMAP)
            .build(),
        FileKind::Unmappable => build(Kind::Unmappable).build(),
    }
}
