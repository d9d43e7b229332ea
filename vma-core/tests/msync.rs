//! msync(2): what is written back, what isn't, and which error comes first.

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;

use std::sync::Arc;

use memory::{PAGE, RW, backed, map_at, map_file, space};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, Errno, FileIoError, FileKind, FileObject, MapFlags, MapRequest,
    MemFile, MemFileCall, OpenFile, Prot, SyncError, SyncFlags,
};

const AT: u64 = 0x4000_0000;

fn map_fixed(space: &AddressSpace<Paged>, at: u64, file: &Arc<OpenFile>, flags: MapFlags) {
    let request = MapRequest {
        addr: at,
        flags: flags | MapFlags::FIXED,
        file: Some(file.clone()),
        ..MapRequest::anonymous(PAGE, RW)
    };
    space.map(&request).unwrap();
}

fn byte(memory: &MemFile, at: u64) -> u8 {
    memory.bytes()[at as usize]
}

#[test]
fn sync_writes_shared_file_mappings_of_the_range_and_nothing_else() {
    let (memory, file) = backed(4);
    let (also, other) = backed(1);
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, 4, MapFlags::SHARED);
    let private = map_file(&space, &other, 1, MapFlags::PRIVATE);
    let mut cpu = space.accessor();
    for page in 0..4 {
        cpu.store_u8(at + page * PAGE, 50).unwrap();
    }
    cpu.store_u8(private, 60).unwrap();
    other.write_at(1, &[61]).unwrap();
    for flags in [SyncFlags::ASYNC, SyncFlags::INVALIDATE, SyncFlags::empty()] {
        space.msync(at, 4 * PAGE, flags).unwrap();
    }
    assert_eq!(memory.calls(MemFileCall::Write), 0);
    assert_eq!(file.object().dirty_pages(), 4, "as in Linux");
    space.msync(at + PAGE, PAGE + 1, SyncFlags::SYNC).unwrap();
    let bytes = [0, 1, 2, 3].map(|page| byte(&memory, page * PAGE));
    assert_eq!(bytes, [1, 50, 50, 4]);
    assert_eq!(memory.calls(MemFileCall::Sync), 1);
    space.msync(private, PAGE, SyncFlags::SYNC).unwrap();
    assert_eq!(also.calls(MemFileCall::Write), 0, "not a shared mapping");
    // By a guard too.
    space.read().msync(at, 4 * PAGE, SyncFlags::SYNC).unwrap();
    assert_eq!([byte(&memory, 0), byte(&memory, 3 * PAGE)], [50, 50]);
}

#[test]
fn holes_are_reported_after_the_rest_was_synced() {
    let files = [backed(1), backed(1)];
    let space = space(&FramePool::default());
    let mut cpu = space.accessor();
    for (place, (_, file)) in files.iter().enumerate() {
        let at = AT + 2 * PAGE * place as u64;
        map_fixed(&space, at, file, MapFlags::SHARED);
        cpu.store_u8(at, 50).unwrap();
    }
    let result = space.msync(AT, 3 * PAGE, SyncFlags::SYNC);
    assert_eq!(result, Err(SyncError::Unmapped(AT + PAGE)));
    assert_eq!(
        files.each_ref().map(|(memory, _)| byte(memory, 0)),
        [50, 50]
    );
    let result = space.msync(AT, 4 * PAGE, SyncFlags::SYNC);
    assert_eq!(result.unwrap_err().errno(), Errno::ENOMEM);
}

#[test]
fn an_error_of_a_file_ends_the_call_and_is_reported_once() {
    let files = [backed(1), backed(1)];
    let space = space(&FramePool::default());
    let mut cpu = space.accessor();
    for (place, (_, file)) in files.iter().enumerate() {
        let at = AT + 2 * PAGE * place as u64;
        map_fixed(&space, at, file, MapFlags::SHARED);
        cpu.store_u8(at, 50).unwrap();
    }
    files[0].0.fail_next(MemFileCall::Write, Errno::EIO);
    let result = space.msync(AT, 3 * PAGE, SyncFlags::SYNC);
    let error = SyncError::File {
        addr: AT,
        error: FileIoError::WriteFailed(Errno::EIO),
    };
    assert_eq!(result, Err(error));
    assert_eq!(error.errno(), Errno::EIO);
    assert_eq!(byte(&files[1].0, 0), 1, "it hasn't come there");
    // The hole is what is left.
    let result = space.msync(AT, 3 * PAGE, SyncFlags::SYNC);
    assert_eq!(result, Err(SyncError::Unmapped(AT + PAGE)));
    assert_eq!(
        files.each_ref().map(|(memory, _)| byte(memory, 0)),
        [50, 50]
    );
    // Somebody else's failure is reported by the next msync, also of a clean page.
    cpu.store_u8(AT, 51).unwrap();
    files[0].0.fail_next(MemFileCall::Write, Errno::ENOSPC);
    assert!(files[0].1.object().sync().is_err());
    let result = space.msync(AT, PAGE, SyncFlags::SYNC);
    assert_eq!(result.unwrap_err().errno(), Errno::ENOSPC);
    assert_eq!(space.msync(AT, PAGE, SyncFlags::SYNC), Ok(()));
}

#[test]
fn a_locked_mapping_is_not_invalidated_but_what_comes_before_is_synced() {
    let (memory, file) = backed(1);
    let space = space(&FramePool::default());
    map_fixed(&space, AT, &file, MapFlags::SHARED);
    map_at(&space, AT + PAGE, 1);
    space.mlock(AT + PAGE, PAGE).unwrap();
    space.accessor().store_u8(AT, 50).unwrap();
    let flags = SyncFlags::SYNC | SyncFlags::INVALIDATE;
    let result = space.msync(AT, 2 * PAGE, flags);
    assert_eq!(result.unwrap_err().errno(), Errno::EBUSY);
    assert_eq!(byte(&memory, 0), 50);
}

#[test]
fn what_has_nothing_behind_it_is_synced_at_once_and_a_device_cannot_be() {
    let space = space(&FramePool::default());
    let open = |kind| {
        let object = FileObject::builder(kind, "f").len(PAGE).build();
        OpenFile::new(object, AccessMode::ReadWrite)
    };
    let results = [FileKind::Shmem, FileKind::Regular, FileKind::Device].map(|kind| {
        let file = open(kind);
        map_fixed(&space, AT, &file, MapFlags::SHARED);
        space.msync(AT, PAGE, SyncFlags::ASYNC).unwrap();
        space.msync(AT, PAGE, SyncFlags::SYNC)
    });
    let device = SyncError::File {
        addr: AT,
        error: FileIoError::CannotSync,
    };
    // As Linux says of the rings of io_uring, for instance.
    assert_eq!(results, [Ok(()), Ok(()), Err(device)]);
    assert_eq!(device.errno(), Errno::EINVAL);
    assert_eq!(
        open(FileKind::Unmappable).sync(),
        Err(FileIoError::CannotSync)
    );
}

/// The layout may change while a file is written to, by another thread or by what is called.
#[test]
fn no_lock_of_the_space_is_held_while_a_file_is_written_to() {
    use std::sync::OnceLock;
    #[derive(Debug, Default)]
    struct Unmapping {
        memory: MemFile,
        /// Weakly: the space has the file.
        space: OnceLock<std::sync::Weak<AddressSpace<Paged>>>,
    }
    impl vma_core::FileBackend for Unmapping {
        fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
            self.memory.read(offset, into)
        }
        fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
            let space = self.space.get().unwrap().upgrade().unwrap();
            space.unmap(AT, PAGE).unwrap();
            assert!(space.protect(AT + PAGE, PAGE, Prot::READ).is_ok());
            self.memory.write(offset, from)
        }
        fn set_len(&self, len: u64) -> Result<(), Errno> {
            self.memory.set_len(len)
        }
        fn punch_hole(&self, offset: u64, len: u64) -> Result<(), Errno> {
            self.memory.punch_hole(offset, len)
        }
        fn sync(&self) -> Result<(), Errno> {
            self.memory.sync()
        }
    }
    let unmapping = Arc::new(Unmapping::default());
    let file = OpenFile::new(
        memory::backed_by(unmapping.clone(), PAGE),
        AccessMode::ReadWrite,
    );
    let space = Arc::new(space(&FramePool::default()));
    unmapping.space.set(Arc::downgrade(&space)).unwrap();
    map_fixed(&space, AT, &file, MapFlags::SHARED);
    map_at(&space, AT + PAGE, 1);
    space.accessor().store_u8(AT, 50).unwrap();
    space.msync(AT, 2 * PAGE, SyncFlags::SYNC).unwrap();
    assert_eq!(byte(&unmapping.memory, 0), 50);
}
