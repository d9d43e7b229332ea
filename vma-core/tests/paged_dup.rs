//! What the child of a fork has, and what both do to it.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod memory;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use memory::{PAGE, RW, check, file, map, map_at, map_file, populate, space};
use vma_core::paged::{Accessor, DeviceFrames, FramePool, InsertError, PAGE as FRAME, Paged};
use vma_core::{
    Access, AddressSpace, Advice, Domain, Errno, FaultError, MapFlags, Prot, RemapFlags,
    RemapRequest, SpaceConfig, SpecialMapping, UnmapError, VmaFlags,
};

fn byte(cpu: &mut Accessor<'_>, addr: u64) -> u8 {
    cpu.load_u8(addr).unwrap()
}

#[test]
fn what_a_child_shares_costs_neither_frames_nor_tables() {
    let pool = FramePool::default();
    let parent = space(&pool);
    let at = 1 << 40;
    map_at(&parent, at, 4096);
    populate(&parent, at, 4096, 1);
    let tables = parent.backend().table_bytes();
    let child = parent.dup().unwrap();
    assert_eq!(pool.stats().used, 4096);
    assert_eq!(parent.backend().table_bytes(), tables);
    assert!(child.backend().table_bytes() < 2 * FRAME);
    // Both have all of it resident, as on Linux.
    assert_eq!(child.backend().resident().anon, 4096);
    // A store takes one frame, whoever makes it.
    let (mut mine, mut its) = (parent.accessor(), child.accessor());
    its.store_u8(at + 5 * PAGE, 2).unwrap();
    mine.store_u8(at + 6 * PAGE, 3).unwrap();
    assert_eq!(pool.stats().used, 4098);
    assert_eq!(
        [5, 6, 7].map(|page| byte(&mut mine, at + page * PAGE)),
        [1, 3, 1]
    );
    assert_eq!(
        [5, 6, 7].map(|page| byte(&mut its, at + page * PAGE)),
        [2, 1, 1]
    );
    drop(its);
    drop(child);
    // What only one has is stored to as it is.
    mine.store_u8(at + 5 * PAGE, 4).unwrap();
    assert_eq!(pool.stats().used, 4096);
    check(&parent);
    drop(mine);
    drop(parent);
    assert_eq!(pool.stats().used, 0);
}

/// Tables that go as a whole aren't made the space's own first; those that stay are.
#[test]
fn unmapping_all_that_shared_tables_map_needs_no_tables() {
    let (at, pages) = (1 << 40, 700);
    let tables = {
        let space = space(&FramePool::default());
        map_at(&space, at, pages);
        populate(&space, at, pages, 1);
        space.backend().table_bytes()
    };
    let pool = FramePool::default();
    let backend = Paged::new(Arc::new(pool.clone())).with_table_limit(tables);
    let config = SpaceConfig::default();
    let parent = AddressSpace::with_backend(config, &Domain::default(), backend).unwrap();
    map_at(&parent, at, pages);
    populate(&parent, at, pages, 1);
    let child = parent.dup().unwrap();
    let errno = |done: Result<(), UnmapError>| done.map_err(UnmapError::errno);
    let part = parent.unmap(at + PAGE, (pages - 1) * PAGE);
    assert_eq!(errno(part), Err(Errno::ENOMEM));
    assert_eq!(parent.backend().resident().anon, pages);
    assert_eq!(errno(parent.unmap(at, pages * PAGE)), Ok(()));
    assert_eq!(parent.backend().resident().anon, 0);
    assert_eq!(child.backend().resident().anon, pages);
    check(&parent);
    drop(child);
    assert_eq!(pool.stats().used, 0);
}

#[test]
fn a_parent_that_goes_first_leaves_the_child_everything() {
    let pool = FramePool::default();
    let parent = space(&pool);
    let at = map(&parent, 1000);
    populate(&parent, at, 1000, 1);
    let child = parent.dup().unwrap();
    let grandchild = child.dup().unwrap();
    drop(parent);
    let mut its = grandchild.accessor();
    its.store_u8(at, 2).unwrap();
    drop(child);
    for page in 1..1000 {
        assert_eq!(byte(&mut its, at + page * PAGE), 1);
        its.store_u8(at + page * PAGE, 3).unwrap();
    }
    assert_eq!(pool.stats().used, 1000);
    check(&grandchild);
}

/// Each call, in the parent or in the child, leaves the other one's pages alone.
#[test]
fn calls_of_one_leave_the_other_alone() {
    type Call = fn(&vma_core::AddressSpace<vma_core::paged::Paged>, u64);
    let calls: [(&str, Call); 8] = [
        ("unmap", |space, at| {
            space.unmap(at + 3 * PAGE, 700 * PAGE).unwrap();
        }),
        ("map over", |space, at| map_at(space, at + 511 * PAGE, 600)),
        ("discard", |space, at| {
            let len = 600 * PAGE;
            space
                .advise(at + 100 * PAGE, len, Advice::DONTNEED)
                .unwrap();
        }),
        ("guard", |space, at| {
            let len = 600 * PAGE;
            let done = space.advise(at + 100 * PAGE, len, Advice::GUARD_INSTALL);
            done.unwrap();
        }),
        ("move", |space, at| {
            let request = RemapRequest {
                addr: at + 5 * PAGE,
                old_len: 600 * PAGE,
                new_len: 600 * PAGE,
                flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                new_addr: at + (1 << 30),
            };
            space.remap(&request).unwrap();
        }),
        ("protect", |space, at| {
            space.protect(at, 900 * PAGE, Prot::READ).unwrap();
        }),
        ("store", |space, at| populate(space, at, 1024, 9)),
        ("another child", |space, at| {
            let another = space.dup().unwrap();
            populate(&another, at, 1024, 9);
        }),
    ];
    for (name, call) in calls {
        for in_child in [false, true] {
            let pool = FramePool::default();
            let parent = space(&pool);
            let at = 1 << 40;
            map_at(&parent, at, 1024);
            populate(&parent, at, 1024, 1);
            let child = parent.dup().unwrap();
            let (changed, other) = if in_child {
                (&child, &parent)
            } else {
                (&parent, &child)
            };
            call(changed, at);
            let mut cpu = other.accessor();
            for page in 0..1024 {
                assert_eq!(byte(&mut cpu, at + page * PAGE), 1, "{name}");
            }
            check(&parent);
            check(&child);
            // What it can still reach hasn't changed by itself.
            for page in 0..1024 {
                cpu.store_u8(at + page * PAGE, 5).unwrap();
            }
            let mut cpu = changed.accessor();
            for page in 0..1024 {
                assert_ne!(cpu.load_u8(at + page * PAGE), Ok(5), "{name}");
            }
        }
    }
}

#[test]
fn a_child_has_nothing_of_what_is_not_for_it() {
    let pool = FramePool::default();
    let parent = space(&pool);
    let at = 1 << 40;
    map_at(&parent, at, 1536);
    populate(&parent, at, 1536, 1);
    parent
        .advise(at + 10 * PAGE, 600 * PAGE, Advice::DONTFORK)
        .unwrap();
    parent
        .advise(at + 1000 * PAGE, 100 * PAGE, Advice::WIPEONFORK)
        .unwrap();
    parent
        .advise(at + 1200 * PAGE, PAGE, Advice::GUARD_INSTALL)
        .unwrap();
    let child = parent.dup().unwrap();
    check(&child);
    let mut cpu = child.accessor();
    for page in 0..1536 {
        let addr = at + page * PAGE;
        let expected = match page {
            10..610 | 1200 => Err(FaultError::Unmapped(addr)),
            1000..1100 => Ok(0),
            _ => Ok(1),
        };
        assert_eq!(cpu.load_u8(addr), expected, "{page}");
    }
}

/// C17: the holder of a pin sees the parent's stores, whichever came first, and the child has a copy.
#[test]
fn a_pinned_page_stays_the_parents() {
    for access in [Access::Read, Access::Write] {
        for pin_first in [true, false] {
            let pool = FramePool::default();
            let parent = space(&pool);
            let at = map(&parent, 2);
            populate(&parent, at, 2, 1);
            let mut cpu = parent.accessor();
            let early = pin_first.then(|| cpu.pin_page(at, access).unwrap());
            let child = parent.dup().unwrap();
            let pin = early.unwrap_or_else(|| cpu.pin_page(at, access).unwrap());
            cpu.store_u8(at, 2).unwrap();
            let mut seen = [0];
            pin.read(0, &mut seen);
            assert_eq!(seen, [2]);
            if let Some(bytes) = pin.writable() {
                bytes.write(1, &[3]);
                assert_eq!(byte(&mut cpu, at + 1), 3);
            }
            let mut its = child.accessor();
            assert_eq!(byte(&mut its, at), 1);
            assert_eq!(byte(&mut its, at + PAGE), 1);
            its.store_u8(at, 4).unwrap();
            pin.read(0, &mut seen);
            assert_eq!(seen, [2]);
            drop((pin, its));
            drop(child);
            // Without pins everything is shared again.
            let used = pool.stats().used;
            let child = parent.dup().unwrap();
            assert_eq!(pool.stats().used, used);
            drop(child);
        }
    }
}

/// A pin that is only read has the page that stores will go to, not the one of zeros, nor the file's.
#[test]
fn a_pin_for_loads_has_the_mappings_own_page() {
    let pool = FramePool::default();
    let space = space(&pool);
    let file = file(1);
    for at in [
        map(&space, 1),
        map_file(&space, &file, 1, MapFlags::PRIVATE),
    ] {
        let mut cpu = space.accessor();
        cpu.load_u8(at).unwrap();
        let pin = cpu.pin_page(at, Access::Read).unwrap();
        cpu.store_u8(at, 77).unwrap();
        let mut seen = [0];
        pin.read(0, &mut seen);
        assert_eq!(seen, [77]);
    }
    // Of a mapping that can't be stored to as well; it isn't writable by that.
    let at = map_file(&space, &file, 1, MapFlags::PRIVATE);
    space.protect(at, PAGE, Prot::READ).unwrap();
    let mut cpu = space.accessor();
    let pin = cpu.pin_page(at, Access::Read).unwrap();
    assert!(pin.writable().is_none());
    assert!(cpu.pin_page(at, Access::Write).is_err());
    space.protect(at, PAGE, RW).unwrap();
    cpu.store_u8(at, 78).unwrap();
    let mut seen = [0];
    pin.read(0, &mut seen);
    assert_eq!(seen, [78]);
}

/// A load brings in what the file has at hand around it, as far as the mapping goes.
#[test]
fn loads_bring_in_the_pages_around() {
    let pool = FramePool::default();
    let space = space(&pool);
    let file = file(64);
    let at = map_file(&space, &file, 40, MapFlags::SHARED);
    let base = at.next_multiple_of(16 * PAGE);
    let mut cpu = space.accessor();
    cpu.load_u8(base + 3 * PAGE).unwrap();
    assert_eq!(space.backend().resident().shmem, 16);
    // A store brings in its page alone.
    cpu.store_u8(base + 17 * PAGE, 9).unwrap();
    assert_eq!(space.backend().resident().shmem, 17);
    for page in 0..40 {
        let shown = byte(&mut cpu, at + page * PAGE);
        let stored = at + page * PAGE == base + 17 * PAGE;
        assert_eq!(shown, if stored { 9 } else { page as u8 + 1 });
    }
    file.truncate(8 * PAGE).unwrap();
    assert_eq!(space.backend().resident().shmem, 8);
    check(&space);
}

/// Frames of a device are found where they were put, in children too, and are never counted or given back.
#[test]
fn frames_of_the_embedders_are_mapped_and_left_alone() {
    // Aligned to a page within.
    let memory: Arc<[AtomicU8]> = (0..4 * FRAME).map(|_| AtomicU8::new(0)).collect();
    let skipped = memory.as_ptr().align_offset(FRAME);
    let device = &memory[skipped..];
    for (page, byte) in device.iter().step_by(FRAME).enumerate().take(3) {
        byte.store(page as u8 + 1, Ordering::Relaxed);
    }
    let start = NonNull::new(device.as_ptr().cast_mut().cast::<u8>()).unwrap();
    #[allow(unsafe_code, reason = "the embedder's promise")]
    // SAFETY: F4: the handles keep it; accessed atomically.
    let frames = unsafe { DeviceFrames::new(start, 3, Arc::clone(&memory)) };
    let pool = FramePool::default();
    let space = space(&pool);
    let rw = VmaFlags::READ | VmaFlags::WRITE | VmaFlags::MAYREAD | VmaFlags::MAYWRITE;
    let shared = rw | VmaFlags::SHARED | VmaFlags::MAYSHARE;
    let (at, private) = (1 << 30, 1 << 31);
    for (start, flags) in [(at, shared), (private, rw)] {
        let mapping = SpecialMapping {
            name: Some("device".into()),
            ..SpecialMapping::anonymous(start, start + 4 * PAGE, flags | VmaFlags::PFNMAP)
        };
        space.insert_special(&mapping).unwrap();
        space.insert_frames(start, &frames, 0, 3).unwrap();
    }
    let again = space.insert_frames(at + PAGE, &frames, 0, 1);
    assert_eq!(again, Err(InsertError::Occupied(at + PAGE)));
    let beyond = space.insert_frames(at + 3 * PAGE, &frames, 0, 2);
    assert_eq!(beyond, Err(InsertError::Unmapped(at + 4 * PAGE)));
    assert!(space.insert_frames(at, &frames, 2, 2).is_err());
    let plain = map(&space, 1);
    assert!(matches!(
        space.insert_frames(plain, &frames, 0, 1),
        Err(InsertError::NotForFrames(_))
    ));
    let mut cpu = space.accessor();
    cpu.store_u8(at + PAGE, 50).unwrap();
    assert_eq!(device[FRAME].load(Ordering::Relaxed), 50);
    // A store to a private mapping goes to a copy.
    cpu.store_u8(private + 2 * PAGE, 60).unwrap();
    assert_eq!(device[2 * FRAME].load(Ordering::Relaxed), 3);
    assert_eq!(space.backend().resident().anon, 1);
    assert_eq!(
        cpu.pin_page(at, Access::Read).map(|_| ()),
        Err(FaultError::Unpinnable(at))
    );
    let child = space.dup().unwrap();
    let mut its = child.accessor();
    for (page, expected) in [(0, 1), (1, 50), (2, 3)] {
        assert_eq!(byte(&mut its, at + page * PAGE), expected);
    }
    assert_eq!(byte(&mut its, private + 2 * PAGE), 60);
    // The one that was put in before the mapping ended stays.
    assert_eq!(byte(&mut cpu, at + 3 * PAGE), 1);
    drop(cpu);
    space.unmap(at, 4 * PAGE).unwrap();
    drop(space);
    assert_eq!(byte(&mut its, at + PAGE), 50);
    let unset = child.insert_frames(private + 3 * PAGE, &frames, 0, 0);
    assert_eq!(unset, Ok(()));
    let empty = private + 3 * PAGE;
    assert_eq!(its.load_u8(empty), Err(FaultError::NoFrame(empty)));
    // The last space lets go of the handle.
    drop((its, frames));
    assert_eq!(Arc::strong_count(&memory), 2);
    drop(child);
    assert_eq!(Arc::strong_count(&memory), 1);
}
