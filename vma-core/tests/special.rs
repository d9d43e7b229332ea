//! Mappings that the embedder makes, and owners that follow theirs.
#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::unwrap_used,
    reason = "one shape for errors of many types; a test may panic"
)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use common::{AT, PAGE, RW};
use vma_core::{
    AccessMode, AddressSpace, Errno, FileKind, FileObject, MapFlags, MapRequest, MappingHooks,
    OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig, SpecialMapping, VmRange, VmaFlags,
};

/// Counts as System V shared memory counts its attachments.
#[derive(Default)]
struct Attached {
    count: AtomicI64,
    reached_zero: AtomicU64,
}

impl MappingHooks for Attached {
    fn has_close(&self) -> bool {
        true
    }

    fn opened(&self, _: VmRange) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn closed(&self, _: VmRange) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.reached_zero.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn segment() -> (Arc<Attached>, Arc<OpenFile>) {
    let attached = Arc::new(Attached::default());
    let object = FileObject::builder(FileKind::Shmem, "/SYSV00000000 (deleted)")
        .len(8 * PAGE)
        .hooks(attached.clone())
        .build();
    (attached, OpenFile::new(object, AccessMode::ReadWrite))
}

#[test]
fn an_owner_counts_as_many_mappings_as_there_are() {
    let (attached, file) = segment();
    let count = || attached.count.load(Ordering::SeqCst);
    let space = AddressSpace::default();
    let request = MapRequest::file(file, 0, 8 * PAGE, RW, MapFlags::SHARED).fixed(AT);
    space.map(&request).unwrap();
    assert_eq!(count(), 1);
    space.protect(AT + 2 * PAGE, PAGE, Prot::READ).unwrap();
    assert_eq!(count(), 3);
    // Equal again, but a mapping whose removal is followed isn't merged away.
    space.protect(AT + 2 * PAGE, PAGE, RW).unwrap();
    assert_eq!((count(), space.totals().map_count), (3, 3));
    let child = space.dup().unwrap();
    assert_eq!(count(), 6);
    drop(child);
    assert_eq!(count(), 3);
    space.unmap(AT + PAGE, PAGE).unwrap();
    assert_eq!((count(), space.totals().map_count), (3, 3));
    let moved = RemapRequest {
        addr: AT,
        old_len: PAGE,
        new_len: PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: AT + 100 * PAGE,
    };
    space.remap(&moved).unwrap();
    assert_eq!(
        (count(), attached.reached_zero.load(Ordering::SeqCst)),
        (3, 0)
    );
    space.unmap(AT, 200 * PAGE).unwrap();
    assert_eq!(
        (count(), attached.reached_zero.load(Ordering::SeqCst)),
        (0, 1)
    );
}

/// Neighbours with a close hook: the left one may grow, the right one may not go.
#[test]
fn a_followed_mapping_grows_but_is_not_merged_away() {
    let (attached, file) = segment();
    let space = AddressSpace::default();
    let part = |at: u64| {
        MapRequest::file(file.clone(), at * PAGE, PAGE, RW, MapFlags::SHARED).fixed(AT + at * PAGE)
    };
    space.map(&part(0)).unwrap();
    space.map(&part(2)).unwrap();
    space.map(&part(1)).unwrap();
    let borders: Vec<_> = space
        .maps_entries()
        .iter()
        .map(|entry| (entry.start - AT) / PAGE)
        .collect();
    assert_eq!(borders, [0, 2]);
    assert_eq!(attached.count.load(Ordering::SeqCst), 2);
    space.check().unwrap();
}

/// Refuses to be split, as `[vdso]` does.
struct Whole;

impl MappingHooks for Whole {
    fn may_split(&self, _: VmRange, _: u64) -> bool {
        false
    }
}

#[test]
fn a_mapping_that_refuses_a_split_moves_and_goes_as_a_whole() {
    let space = AddressSpace::default();
    let flags = VmaFlags::READ | VmaFlags::EXEC | VmaFlags::MAY | VmaFlags::DONTEXPAND;
    let mut vdso = SpecialMapping::anonymous(AT, AT + 2 * PAGE, flags);
    vdso.name = Some(Arc::from("[vdso]"));
    vdso.hooks = Some(Arc::new(Whole));
    space.insert_special(&vdso).unwrap();
    assert!(space.maps().ends_with("[vdso]\n"));
    let before = space.maps();
    let einval = Err(Errno::EINVAL);
    assert_eq!(space.unmap(AT, PAGE).map_err(|e| e.errno()), einval);
    assert_eq!(
        space
            .protect(AT + PAGE, PAGE, Prot::READ)
            .map_err(|e| e.errno()),
        einval
    );
    let half = RemapRequest {
        addr: AT,
        old_len: PAGE,
        new_len: PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: AT + 10 * PAGE,
    };
    assert_eq!(
        space.remap(&half).map_err(|e| e.errno()),
        Err(Errno::EINVAL)
    );
    assert_eq!(space.maps(), before);
    let whole = RemapRequest {
        old_len: 2 * PAGE,
        new_len: 2 * PAGE,
        ..half
    };
    assert_eq!(space.remap(&whole), Ok(AT + 10 * PAGE));
    let grow = RemapRequest {
        addr: AT + 10 * PAGE,
        old_len: 2 * PAGE,
        new_len: 3 * PAGE,
        flags: RemapFlags::MAYMOVE,
        new_addr: 0,
    };
    assert_eq!(
        space.remap(&grow).map_err(|e| e.errno()),
        Err(Errno::EFAULT)
    );
    // Locking it is a no-op.
    space.mlock(AT + 10 * PAGE, PAGE).unwrap();
    assert_eq!(space.totals().locked_vm(), 0);
    space.unmap(AT + 10 * PAGE, 2 * PAGE).unwrap();
    assert_eq!(space.maps(), "");
}

/// An owner may call into the space from its hooks: no lock is held (X9).
#[test]
fn hooks_run_without_the_lock() {
    struct Reenter {
        space: std::sync::OnceLock<std::sync::Weak<AddressSpace>>,
        done: AtomicBool,
    }
    impl MappingHooks for Reenter {
        fn closed(&self, range: VmRange) {
            if let Some(space) = self.space.get().and_then(std::sync::Weak::upgrade) {
                assert!(space.read().find(range.start).is_none());
                space
                    .map(&MapRequest::anonymous(PAGE, Prot::READ).fixed(range.start))
                    .unwrap();
                self.done.store(true, Ordering::SeqCst);
            }
        }
    }
    let hooks = Arc::new(Reenter {
        space: std::sync::OnceLock::new(),
        done: AtomicBool::new(false),
    });
    let space = Arc::new(AddressSpace::default());
    hooks.space.set(Arc::downgrade(&space)).unwrap();
    let object = FileObject::builder(FileKind::Device, "/dev/x")
        .hooks(hooks.clone())
        .build();
    let file = OpenFile::new(object, AccessMode::ReadWrite);
    space
        .map(&MapRequest::file(file, 0, PAGE, RW, MapFlags::SHARED).fixed(AT))
        .unwrap();
    space.unmap(AT, PAGE).unwrap();
    assert!(hooks.done.load(Ordering::SeqCst));
    assert!(space.read().find(AT).is_some());
}

#[test]
fn heap_and_stack_are_named_by_where_they_lie() {
    let space = AddressSpace::default();
    space.set_brk(AT, AT);
    space.brk(AT + 3 * PAGE);
    space.protect(AT + PAGE, PAGE, Prot::READ).unwrap();
    let stack =
        VmaFlags::READ | VmaFlags::WRITE | VmaFlags::MAY | VmaFlags::GROWSDOWN | VmaFlags::ACCOUNT;
    space
        .insert_special(&SpecialMapping::anonymous(
            AT + 1000 * PAGE,
            AT + 1010 * PAGE,
            stack,
        ))
        .unwrap();
    space.set_stack(AT + 1009 * PAGE);
    space.expand_stack(AT + 999 * PAGE + 5).unwrap();
    let entries = space.maps_entries();
    let names: Vec<_> = entries.iter().map(|entry| entry.name.to_string()).collect();
    assert_eq!(names, ["[heap]", "[heap]", "[heap]", "[stack]"]);
    assert_eq!(entries[3].start, AT + 999 * PAGE);
    assert_eq!(space.totals().stack, 11);
    space.check().unwrap();
}

/// The text has the columns of the kernel's.
#[test]
fn maps_is_in_the_kernels_form() {
    let space = AddressSpace::default();
    let object = FileObject::builder(FileKind::Regular, "/usr/lib/a b\nc.so")
        .inode(0xfe, 1, 4711)
        .len(PAGE)
        .build();
    let file = OpenFile::new(object.clone(), AccessMode::Read);
    space
        .map(
            &MapRequest::file(file, PAGE, PAGE, Prot::READ, MapFlags::PRIVATE)
                .fixed(0x7fff_f7fd_0000),
        )
        .unwrap();
    let text = "7ffff7fd0000-7ffff7fd1000 r--p 00001000 fe:01 4711                       /usr/lib/a b\\012c.so\n";
    assert_eq!(space.maps(), text);
    object.set_name("/x (deleted)");
    assert!(space.maps().ends_with(" /x (deleted)\n"));
}

/// What a driver adds to its mappings: they don't merge, and aren't locked.
#[test]
fn flags_of_the_files_own_are_added() {
    let object = FileObject::builder(FileKind::Device, "anon_inode:[io_uring]")
        .mmap_flags(VmaFlags::DONTEXPAND | VmaFlags::MIXEDMAP)
        .build();
    let file = OpenFile::new(object, AccessMode::ReadWrite);
    let space = AddressSpace::new(SpaceConfig {
        ipc_lock: true,
        ..SpaceConfig::default()
    })
    .unwrap();
    for i in 0..2 {
        let flags = MapFlags::SHARED | MapFlags::LOCKED;
        space
            .map(&MapRequest::file(file.clone(), i * PAGE, PAGE, RW, flags).fixed(AT + i * PAGE))
            .unwrap();
    }
    assert_eq!(
        (space.totals().map_count, space.totals().locked_vm()),
        (2, 0)
    );
    let codes: Vec<_> = space.maps_entries()[0].flags.codes().collect();
    assert_eq!(codes.join(" "), "rd wr sh mr mw me ms de mm");
}
