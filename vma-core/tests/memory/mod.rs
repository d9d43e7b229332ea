//! Spaces with memory behind them, for tests.

#![allow(dead_code, reason = "each test uses a part")]

use std::sync::Arc;

use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, Domain, FileBackend, FileKind, FileObject, MapFlags, MapRequest,
    MemFile, OpenFile, Prot, SpaceConfig,
};

pub(crate) const PAGE: u64 = 4096;
/// What a leaf table maps.
pub(crate) const LEAF: u64 = 512 * PAGE;
pub(crate) const RW: Prot = Prot::READ.union(Prot::WRITE);

pub(crate) fn space(pool: &FramePool) -> AddressSpace<Paged> {
    space_with(pool, SpaceConfig::default())
}

pub(crate) fn space_with(pool: &FramePool, config: SpaceConfig) -> AddressSpace<Paged> {
    let backend = Paged::new(Arc::new(pool.clone()));
    AddressSpace::with_backend(config, &Domain::default(), backend).unwrap()
}

pub(crate) fn map(space: &AddressSpace<Paged>, pages: u64) -> u64 {
    space.map(&MapRequest::anonymous(pages * PAGE, RW)).unwrap()
}

pub(crate) fn map_at(space: &AddressSpace<Paged>, addr: u64, pages: u64) {
    let request = MapRequest {
        addr,
        flags: MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED,
        ..MapRequest::anonymous(pages * PAGE, RW)
    };
    space.map(&request).unwrap();
}

pub(crate) fn map_file(
    space: &AddressSpace<Paged>,
    file: &Arc<OpenFile>,
    pages: u64,
    flags: MapFlags,
) -> u64 {
    let request = MapRequest {
        flags,
        file: Some(file.clone()),
        ..MapRequest::anonymous(pages * PAGE, RW)
    };
    space.map(&request).unwrap()
}

/// A file in which each byte of a page is the page's number and one.
pub(crate) fn file(pages: u64) -> Arc<OpenFile> {
    let object = FileObject::builder(FileKind::Shmem, "f")
        .len(pages * PAGE)
        .build();
    for page in 0..pages {
        let byte = page as u8 + 1;
        object
            .write_at(page * PAGE, &[byte; PAGE as usize])
            .unwrap();
    }
    OpenFile::new(object, AccessMode::ReadWrite)
}

/// An object with a backend.
pub(crate) fn backed_by(backend: Arc<dyn FileBackend>, len: u64) -> Arc<FileObject> {
    FileObject::builder(FileKind::Regular, "f")
        .len(len)
        .backend(backend)
        .build()
}

/// The file of [`file`], in a backend.
pub(crate) fn backed(pages: u64) -> (Arc<MemFile>, Arc<OpenFile>) {
    let bytes: Vec<u8> = (0..pages * PAGE).map(|at| (at / PAGE) as u8 + 1).collect();
    let memory = Arc::new(MemFile::new(&bytes));
    let object = backed_by(memory.clone(), pages * PAGE);
    (memory, OpenFile::new(object, AccessMode::ReadWrite))
}

/// Stores to each page.
pub(crate) fn populate(space: &AddressSpace<Paged>, addr: u64, pages: u64, byte: u8) {
    let mut cpu = space.accessor();
    for page in 0..pages {
        cpu.store_u8(addr + page * PAGE, byte).unwrap();
    }
}

/// Counters are what a recount says, and so is the pool.
#[track_caller]
pub(crate) fn check(space: &AddressSpace<Paged>) {
    assert_eq!(space.backend().resident(), space.backend().recount());
}
