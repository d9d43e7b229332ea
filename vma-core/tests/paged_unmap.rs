//! Unmapping: what is gone when, and who waits for whom.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod memory;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use memory::{LEAF, PAGE, check, map, map_at, map_file, populate, space, space_with};
use vma_core::paged::{Frame, FrameAllocator, FramePool, NewFrame, Paged};
use vma_core::{
    Access, AddressSpace, CancelToken, Domain, Errno, FaultError, MapFlags, RemapFlags,
    RemapRequest, SpaceConfig, SpecialMapping, UnmapError, VmaFlags, Wait,
};

type Unmap = fn(&AddressSpace<Paged>, u64, u64) -> Result<(), UnmapError>;

/// In three ways, all with the same result.
const WAYS: [(&str, Unmap); 3] = [
    ("exclusively", AddressSpace::unmap_exclusively),
    ("downgraded", AddressSpace::unmap_downgraded),
    ("detached", AddressSpace::unmap),
];

#[test]
fn every_way_frees_what_was_there_and_nothing_else() {
    // From and to within a leaf, at its borders, over several, over a directory's border.
    let ranges = [
        (0, 1),
        (3, 7),
        (0, 512),
        (1, 512),
        (511, 514),
        (512, 1536),
        (100, 1700),
        (0, 2048),
        (262_144 - 600, 262_144 + 700),
    ];
    for (name, unmap) in WAYS {
        for (from, to) in ranges {
            let pool = FramePool::default();
            let space = space(&pool);
            let base = 1 << 40;
            // A page on either side, and every third page of the range.
            let mut pages: Vec<u64> = (from..to).step_by(3).collect();
            map_at(&space, base, to + 10);
            pages.push(to - 1);
            let kept: Vec<u64> = [from.checked_sub(1), Some(to)]
                .iter()
                .flatten()
                .map(|page| base + page * PAGE)
                .collect();
            let mut cpu = space.accessor();
            for page in &pages {
                cpu.store_u8(base + page * PAGE, 1).unwrap();
            }
            for at in &kept {
                cpu.store_u8(*at, 2).unwrap();
            }
            let used = pool.stats().used;
            unmap(&space, base + from * PAGE, (to - from) * PAGE).unwrap();
            let gone = used - pool.stats().used;
            pages.dedup();
            assert_eq!(gone, pages.len(), "{name}: {from}..{to}");
            check(&space);
            for page in pages {
                let at = base + page * PAGE;
                assert_eq!(cpu.load_u8(at), Err(FaultError::Unmapped(at)), "{name}");
            }
            for at in &kept {
                assert_eq!(cpu.load_u8(*at), Ok(2), "{name}: {from}..{to}");
            }
            // What is mapped there next is empty.
            map_at(&space, base + from * PAGE, to - from);
            assert_eq!(cpu.load_u8(base + from * PAGE), Ok(0), "{name}");
        }
    }
}

/// R1's details, the same in every way.
#[test]
fn what_cannot_be_unmapped_is_an_error_and_stays() {
    let end = SpaceConfig::default().task_size;
    for (name, unmap) in WAYS {
        let pool = FramePool::default();
        let config = SpaceConfig {
            max_map_count: 3,
            ..SpaceConfig::default()
        };
        let space = space_with(&pool, config);
        let at = 1 << 40;
        map_at(&space, at, 9);
        populate(&space, at, 9, 1);
        let errno = |addr, len| unmap(&space, addr, len).map_err(UnmapError::errno);
        for (addr, len) in [
            (at + 1, PAGE),
            (at, 0),
            (at, u64::MAX),
            (end + PAGE, PAGE),
            (end - PAGE, 2 * PAGE),
        ] {
            assert_eq!(
                errno(addr, len),
                Err(Errno::EINVAL),
                "{name} {addr:#x} {len:#x}"
            );
        }
        // Nothing is mapped there.
        assert_eq!(errno(at - 8 * PAGE, 8 * PAGE), Ok(()));
        // Rounded up; one mapping above the limit is let pass, no hole beyond it.
        assert_eq!(errno(at + PAGE, 1), Ok(()));
        assert_eq!(errno(at + 3 * PAGE, PAGE), Ok(()));
        assert_eq!(errno(at + 5 * PAGE, PAGE), Err(Errno::ENOMEM), "{name}");
        assert_eq!(pool.stats().used, 7);
        assert_eq!(errno(at + 8 * PAGE, PAGE), Ok(()));
        assert_eq!(pool.stats().used, 6);
        check(&space);
    }
}

/// Whoever waits for the lock may give up, and then nothing has changed (C11).
#[test]
fn an_unmap_that_waits_can_be_interrupted() {
    let pool = FramePool::default();
    let space = space(&pool);
    let at = map(&space, 1);
    populate(&space, at, 1, 1);
    let token = CancelToken::new();
    let layout = space.read();
    thread::scope(|scope| {
        let unmapping = scope.spawn(|| {
            let guard = space.write_with(Wait::killable(&token));
            guard.map(|mut guard| guard.unmap(at, PAGE)).map_err(|_| ())
        });
        thread::sleep(std::time::Duration::from_millis(5));
        assert!(!unmapping.is_finished());
        token.cancel();
        assert_eq!(unmapping.join().unwrap(), Err(()));
    });
    drop(layout);
    assert_eq!(space.accessor().load_u8(at), Ok(1));
}

#[test]
fn a_guard_for_several_calls_lets_go_at_its_end_or_when_it_is_told() {
    let pool = FramePool::default();
    let space = space(&pool);
    let at = map(&space, 4);
    populate(&space, at, 4, 1);
    let mut guard = space.write();
    guard.unmap(at, PAGE).unwrap();
    assert_eq!(pool.stats().used, 4);
    guard.finish();
    assert_eq!(pool.stats().used, 3);
    guard.unmap(at + PAGE, PAGE).unwrap();
    guard.unmap(at + 2 * PAGE, PAGE).unwrap();
    drop(guard);
    assert_eq!(pool.stats().used, 1);
    let mut guard = space.write();
    guard.unmap(at + 3 * PAGE, PAGE).unwrap();
    let mut guard = guard.downgrade();
    assert!(space.try_read().is_some() && space.try_write().is_none());
    assert_eq!(pool.stats().used, 1);
    guard.finish();
    assert_eq!(pool.stats().used, 0);
}

/// R1's first two steps: mappings of some kinds keep the lock.
#[test]
fn mappings_of_chosen_kinds_are_unmapped_exclusively() {
    for (exclusive, is_kept) in [
        (VmaFlags::HUGETLB | VmaFlags::PFNMAP, true),
        (VmaFlags::HUGETLB, false),
        (VmaFlags::empty(), false),
    ] {
        let pool = FramePool::default();
        let space = space_with(
            &pool,
            SpaceConfig {
                exclusive_unmap: exclusive,
                ..SpaceConfig::default()
            },
        );
        let plain = map(&space, 1);
        populate(&space, plain, 1, 1);
        let flags = VmaFlags::READ | VmaFlags::WRITE | VmaFlags::PFNMAP;
        let at = 1 << 30;
        space
            .insert_special(&SpecialMapping::anonymous(at, at + PAGE, flags))
            .unwrap();
        let mut guard = space.write();
        guard.unmap(plain, PAGE).unwrap();
        assert_eq!(pool.stats().used, 1, "others don't");
        guard.unmap(at, PAGE).unwrap();
        assert_eq!(pool.stats().used, usize::from(!is_kept));
    }
}

/// Frames that come back only when the test says so.
struct Slow {
    /// A frame is on its way back.
    reached: AtomicUsize,
    let_go: AtomicBool,
    limit: usize,
    out: AtomicUsize,
}

/// What a frame of [`Slow`] is given back to.
struct Held(Arc<Slow>);

impl FrameAllocator for Held {
    fn allocate(&self) -> Option<NewFrame> {
        let slow = &self.0;
        let fits = |out: usize| (out < slow.limit).then_some(out + 1);
        slow.out
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, fits)
            .ok()?;
        Some(own::frame(Arc::clone(slow)))
    }
}

impl Slow {
    fn world(limit: usize) -> (Arc<Slow>, AddressSpace<Paged>) {
        let slow = Arc::new(Slow {
            reached: AtomicUsize::new(0),
            let_go: AtomicBool::new(false),
            limit,
            out: AtomicUsize::new(0),
        });
        let backend = Paged::new(Arc::new(Held(Arc::clone(&slow))));
        let space = AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), backend);
        (slow, space.unwrap())
    }

    /// Until a frame is on its way back.
    fn wait(&self) {
        while self.reached.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
    }
}

/// Frames of the test's own, given back when they may.
#[allow(unsafe_code, reason = "an allocator of frames")]
mod own {
    use std::ptr::NonNull;

    use super::{Arc, Frame, NewFrame, Ordering, Slow, thread};
    use vma_core::paged::{FrameHead, PAGE};

    #[repr(align(4096))]
    struct Page(#[expect(dead_code, reason = "memory")] [u8; PAGE]);

    struct Owner {
        memory: NonNull<Page>,
        slow: Arc<Slow>,
    }

    pub(super) fn frame(slow: Arc<Slow>) -> NewFrame {
        unsafe fn release(head: NonNull<FrameHead>) {
            // SAFETY: made of a box below; this is called once.
            let head = unsafe { Box::from_raw(head.as_ptr()) };
            let owner = head.owner().cast_mut().cast::<Owner>();
            // SAFETY: as above.
            let owner = unsafe { Box::from_raw(owner) };
            let slow = &owner.slow;
            slow.reached.fetch_add(1, Ordering::AcqRel);
            while !slow.let_go.load(Ordering::Acquire) {
                thread::yield_now();
            }
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(owner.memory.as_ptr()) });
            slow.out.fetch_sub(1, Ordering::AcqRel);
        }
        let memory = NonNull::from(Box::leak(Box::new(Page([0; PAGE]))));
        let owner = Box::into_raw(Box::new(Owner { memory, slow }));
        let owner = owner.cast::<()>().cast_const();
        // SAFETY: F1: a page of its own; `release` may be called from any thread.
        let head = unsafe { FrameHead::new(memory.cast(), owner, release) };
        let head = NonNull::from(Box::leak(Box::new(head)));
        // SAFETY: a new head, its first reference.
        let frame = unsafe { Frame::first(head) };
        // SAFETY: the only reference.
        unsafe { NewFrame::new(frame, true) }
    }
}

/// C15: while old pages are on their way back, others map elsewhere, and in the same place too; the new pages stay.
#[test]
fn nobody_waits_for_pages_on_their_way_back() {
    let (slow, space) = Slow::world(usize::MAX);
    let at = 1 << 40;
    map_at(&space, at, 1024);
    populate(&space, at, 1024, 1);
    thread::scope(|scope| {
        let unmapping = scope.spawn(|| space.unmap(at, 1024 * PAGE));
        slow.wait();
        // The lock is free in mid-zap.
        map_at(&space, at + 4096 * PAGE, 1);
        populate(&space, at + 4096 * PAGE, 1, 3);
        map_at(&space, at, 1024);
        let mut cpu = space.accessor();
        assert_eq!(cpu.load_u8(at), Ok(0));
        populate(&space, at, 1024, 2);
        assert!(!unmapping.is_finished());
        slow.let_go.store(true, Ordering::Release);
        unmapping.join().unwrap().unwrap();
        for page in 0..1024 {
            assert_eq!(cpu.load_u8(at + page * PAGE), Ok(2));
        }
        assert_eq!(cpu.load_u8(at + 4096 * PAGE), Ok(3));
    });
    assert_eq!(space.backend().resident().anon, 1025);
    check(&space);
}

/// The same with the layout kept: readers come in, writers don't.
#[test]
fn a_downgraded_unmap_lets_readers_in_and_no_writer() {
    let (slow, space) = Slow::world(usize::MAX);
    let at = map(&space, 8);
    populate(&space, at, 8, 1);
    thread::scope(|scope| {
        let unmapping = scope.spawn(|| space.unmap_downgraded(at, 8 * PAGE));
        slow.wait();
        assert!(space.try_read().is_some());
        assert!(space.try_write().is_none());
        // A fault in the range finds no mapping (C4).
        let touched = space.touch(at, 1, Access::Read);
        assert_eq!(touched, Err(FaultError::Unmapped(at)));
        slow.let_go.store(true, Ordering::Release);
        unmapping.join().unwrap().unwrap();
    });
    assert!(space.try_write().is_some());
}

/// Hazard 4: an allocation at the limit waits for frames on their way back.
#[test]
fn an_allocation_waits_for_frames_on_their_way_back() {
    let (slow, space) = Slow::world(4);
    let at = map(&space, 4);
    populate(&space, at, 4, 1);
    let other = map(&space, 1);
    let mut cpu = space.accessor();
    assert_eq!(
        cpu.store_u8(other, 1),
        Err(FaultError::OutOfMemory(other)),
        "nothing is on its way"
    );
    thread::scope(|scope| {
        let unmapping = scope.spawn(|| space.unmap(at, 4 * PAGE));
        slow.wait();
        let storing = scope.spawn(|| space.accessor().store_u8(other, 1));
        thread::sleep(std::time::Duration::from_millis(10));
        slow.let_go.store(true, Ordering::Release);
        storing.join().unwrap().unwrap();
        unmapping.join().unwrap().unwrap();
    });
}

/// Tables of the destination go and come in one call.
#[test]
fn pages_move_onto_mapped_ranges_of_any_size() {
    for (len, over) in [(3, 3), (512, 512), (1024, 1500), (700, 512)] {
        for shift in [0, 5] {
            let pool = FramePool::default();
            let space = space(&pool);
            let (from, to) = (1 << 40, (1 << 41) + shift * PAGE);
            map_at(&space, from, len);
            map_at(&space, to, over);
            populate(&space, from, len, 7);
            populate(&space, to, over, 9);
            let request = RemapRequest {
                addr: from,
                old_len: len * PAGE,
                new_len: len * PAGE,
                flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                new_addr: to,
            };
            space.remap(&request).unwrap();
            let mut cpu = space.accessor();
            for page in 0..len.max(over) {
                let expected = if page < len { 7 } else { 9 };
                assert_eq!(cpu.load_u8(to + page * PAGE), Ok(expected), "{len} {over}");
            }
            assert_eq!(pool.stats().used as u64, len.max(over));
            check(&space);
        }
    }
}

/// Where both ends are aligned alike, tables move, shared ones too, and nothing is copied.
#[test]
fn whole_tables_move_with_their_pages() {
    let pool = FramePool::default();
    let space = space(&pool);
    let (from, to) = (1 << 40, (1 << 41) + LEAF);
    let pages = 262_144 + 3 * 512 + 5;
    for start in [from + LEAF, to + LEAF] {
        map_at(&space, start, pages);
    }
    for page in (0..pages).step_by(1000) {
        populate(&space, from + LEAF + page * PAGE, 1, 7);
        populate(&space, to + LEAF + page * PAGE, 1, 9);
    }
    let used = pool.stats().used;
    let child = space.dup().unwrap();
    let tables = space.backend().table_bytes();
    let request = RemapRequest {
        addr: from + LEAF,
        old_len: pages * PAGE,
        new_len: pages * PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: to + LEAF,
    };
    space.remap(&request).unwrap();
    assert_eq!(pool.stats().used, used);
    // The way there, on both sides, and what is at the ends.
    assert!(space.backend().table_bytes() < tables + 10 * 4400);
    let (mut cpu, mut its) = (space.accessor(), child.accessor());
    for page in (0..pages).step_by(1000) {
        let offset = LEAF + page * PAGE;
        assert_eq!(cpu.load_u8(to + offset), Ok(7));
        let unmapped = Err(FaultError::Unmapped(from + offset));
        assert_eq!(cpu.load_u8(from + offset), unmapped);
        assert_eq!(its.load_u8(from + offset), Ok(7));
        assert_eq!(its.load_u8(to + offset), Ok(9));
        cpu.store_u8(to + offset, 8).unwrap();
        assert_eq!(its.load_u8(from + offset), Ok(7));
    }
    check(&space);
    check(&child);
    drop((cpu, its));
    drop(child);
    drop(space);
    assert_eq!(pool.stats().used, 0);
}

/// A file lets go of pages while a call that has unmapped them is still on its way.
#[test]
fn truncation_of_what_is_being_unmapped_frees_each_page_once() {
    for _ in 0..200 {
        let pool = FramePool::default();
        let space = space(&pool);
        let file = memory::file(8);
        let at = map_file(&space, &file, 8, MapFlags::SHARED);
        let mut cpu = space.accessor();
        for page in 0..8 {
            assert_eq!(cpu.load_u8(at + page * PAGE), Ok(page as u8 + 1));
        }
        thread::scope(|scope| {
            scope.spawn(|| space.unmap(at, 8 * PAGE).unwrap());
            file.truncate(0).unwrap();
        });
        assert_eq!(space.backend().resident().total(), 0);
        check(&space);
    }
}

#[test]
fn tables_of_a_hole_go_as_a_whole() {
    let pool = FramePool::default();
    let space = space(&pool);
    let empty = space.backend().table_bytes();
    let at = 1 << 40;
    map_at(&space, at, 4 * 512);
    populate(&space, at, 4 * 512, 1);
    // Piece by piece, the last one takes the tables along.
    for part in [1, 3, 0, 2] {
        space.unmap(at + part * LEAF + PAGE, LEAF - PAGE).unwrap();
    }
    assert_eq!(pool.stats().used, 4);
    for part in [2, 0, 3, 1] {
        space.unmap(at + part * LEAF, PAGE).unwrap();
    }
    assert_eq!(pool.stats().used, 0);
    assert_eq!(space.backend().table_bytes(), empty);
}
