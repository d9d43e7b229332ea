//! Rows X of others' bugs: forks, and calls that meet. Those of places (X2, X3), identities (X14) and hooks (X9) stand beside what they
//! are about; so do children's locks and merges (X12, X13), and errors (X18). Lookups in signal handlers (X16) and entries that go while
//! they are read (X17) are `vma-rcu`'s.
#![allow(clippy::unwrap_used, reason = "tests may")]

mod memory;
mod watchdog;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

use memory::{PAGE, RW, map, map_at, populate, space};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AccessMode, AddressSpace, FileKind, FileObject, MapFlags, MapRequest, OpenFile, Prot,
    SpaceConfig, SpaceRef, System, VmaRef,
};

const ROUNDS: usize = 200;
const LIMIT: Duration = Duration::from_mins(1);

/// While one thread unmaps a populated range, another maps a page with `request` until it lies in there, and stores to it; the page is
/// still there when both are through.
fn takes_a_place_that_comes_free(request: impl Fn(u64) -> MapRequest + Sync) {
    let _watchdog = watchdog::watch(LIMIT);
    let pool = FramePool::default();
    for round in 0..ROUNDS {
        let space = space(&pool);
        let at = map(&space, 64);
        populate(&space, at, 64, 1);
        let start = Barrier::new(2);
        let new = thread::scope(|scope| {
            let mapping = scope.spawn(|| {
                let mut cpu = space.accessor();
                start.wait();
                loop {
                    match space.map(&request(at)) {
                        Ok(new) if (at..at + 64 * PAGE).contains(&new) => {
                            assert_eq!(cpu.load_u8(new), Ok(0), "somebody else's page");
                            cpu.store_u8(new, 2).unwrap();
                            return new;
                        }
                        Ok(elsewhere) => space.unmap(elsewhere, PAGE).unwrap(),
                        Err(_) => thread::yield_now(),
                    }
                }
            });
            start.wait();
            space.unmap(at, 64 * PAGE).unwrap();
            mapping.join().unwrap()
        });
        assert_eq!(space.accessor().load_u8(new), Ok(2), "round {round}");
        let read = space.read();
        assert_eq!(read.find(new).unwrap().range().start, new);
    }
}

/// [X1] A place is given away as soon as it's free, and not a moment before.
#[test]
fn an_unmap_leaves_what_is_mapped_where_it_was() {
    takes_a_place_that_comes_free(|_| MapRequest::anonymous(PAGE, RW));
}

/// [X4] The same in the middle of the range, while its pages are still going.
#[test]
fn a_zap_touches_nothing_of_a_later_mapping() {
    takes_a_place_that_comes_free(|at| MapRequest {
        addr: at + 33 * PAGE,
        flags: MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED_NOREPLACE,
        ..MapRequest::anonymous(PAGE, RW)
    });
}

/// [X5] A call that changes rights brings nothing back that another has unmapped meanwhile, nor its rights to what has come there.
#[test]
fn rights_are_changed_of_what_is_there() {
    let _watchdog = watchdog::watch(LIMIT);
    let space = space(&FramePool::default());
    let at = map(&space, 8);
    populate(&space, at, 8, 1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Up to the hole, if there is one.
                let _ = space.protect(at, 8 * PAGE, Prot::READ);
                let _ = space.protect(at, 8 * PAGE, RW);
            }
        });
        let mut cpu = space.accessor();
        for _ in 0..ROUNDS {
            space.unmap(at + 3 * PAGE, PAGE).unwrap();
            assert!(space.read().find(at + 3 * PAGE).is_none());
            assert!(cpu.load_u8(at + 3 * PAGE).is_err());
            map_at(&space, at + 3 * PAGE, 1);
            assert_eq!(cpu.load_u8(at + 3 * PAGE), Ok(0));
            assert_eq!(cpu.load_u8(at + 2 * PAGE), Ok(1));
        }
        space.unmap(at + 3 * PAGE, PAGE).unwrap();
        for _ in 0..ROUNDS {
            thread::yield_now();
            assert!(space.read().find(at + 3 * PAGE).is_none());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// [X6] Whoever holds a lock of the parent's at the time, the child's are free.
#[test]
fn a_child_can_be_used_at_once() {
    let _watchdog = watchdog::watch(LIMIT);
    let parent = space(&FramePool::default());
    let at = map(&parent, 4);
    populate(&parent, at, 4, 1);
    let (holds, held) = mpsc::channel();
    let (ends, end) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let (parent, at) = (&parent, at);
        scope.spawn(move || {
            let guard = parent.write();
            let reader = parent.register();
            let kept = parent.lock_vma(at, &reader.pin()).unwrap().unwrap();
            holds.send(()).unwrap();
            end.recv().unwrap();
            drop(guard);
            end.recv().unwrap();
            drop(kept);
        });
        held.recv().unwrap();
        let forking = scope.spawn(move || parent.dup().unwrap());
        ends.send(()).unwrap();
        let child = forking.join().unwrap();
        child.protect(at, PAGE, Prot::READ).unwrap();
        child.unmap(at + PAGE, PAGE).unwrap();
        child.accessor().store_u8(at + 2 * PAGE, 2).unwrap();
        assert_eq!(parent.accessor().load_u8(at + 2 * PAGE), Ok(1));
        ends.send(()).unwrap();
    });
}

/// [X7] The break of a child is the end of its heap, of one instant of the parent's.
#[test]
fn a_child_has_the_heap_of_one_instant() {
    let _watchdog = watchdog::watch(LIMIT);
    let parent = space(&FramePool::default());
    let start = 0x100_0000;
    parent.set_brk(start, start);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut cpu = parent.accessor();
            for pages in (1..32).cycle() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let end = start + pages * PAGE;
                assert_eq!(parent.brk(end), end);
                cpu.store_u8(end - PAGE, pages as u8).unwrap();
            }
        });
        for _ in 0..ROUNDS {
            let child = parent.dup().unwrap();
            let end = child.brk(0);
            let read = child.read();
            let heap = read.iter(start).next().map(VmaRef::range);
            assert_eq!(heap.map_or(start, |heap| heap.end), end);
            assert!(heap.is_none_or(|heap| heap.start == start));
            drop(read);
            assert_eq!(child.brk(end + PAGE), end + PAGE);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// [X8] Who prints maps of all spaces waits for nobody who changes heaps or files, nor they for it.
#[test]
fn maps_are_printed_beside_heaps_and_files_that_change() {
    let _watchdog = watchdog::watch(LIMIT);
    let system = System::default();
    let handle = system.create(SpaceConfig::default(), ()).unwrap();
    let object = FileObject::builder(FileKind::Regular, "/f").len(8 * PAGE);
    let file = OpenFile::new(object.build(), AccessMode::ReadWrite);
    let request = MapRequest::file(file.clone(), 0, 8 * PAGE, RW, MapFlags::SHARED);
    handle.map(&request).unwrap();
    let start = 0x100_0000;
    handle.set_brk(start, start);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for pages in (1..8).cycle() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                handle.brk(start + pages * PAGE);
                file.truncate(pages * PAGE).unwrap();
            }
        });
        let reader = system.register();
        // Nobody who holds the lock is in the way.
        let held = system.create(SpaceConfig::default(), ()).unwrap();
        let write = held.write();
        for _ in 0..ROUNDS {
            let guard = reader.pin();
            let maps: Vec<String> = system.iter(0, &guard).map(SpaceRef::maps).collect();
            assert_eq!(maps.len(), 2);
            assert!(maps[0].contains("/f"));
        }
        drop(write);
        stop.store(true, Ordering::Relaxed);
    });
}

/// [X10] What a parent maps where it has unmapped is its own: the child has the old pages; a child of the child as well.
#[test]
fn a_child_keeps_what_its_parent_replaces() {
    let parent = space(&FramePool::default());
    let at = map(&parent, 2);
    populate(&parent, at, 2, 1);
    let child = parent.dup().unwrap();
    let grandchild = child.dup().unwrap();
    parent.unmap(at, 2 * PAGE).unwrap();
    map_at(&parent, at, 2);
    populate(&parent, at, 2, 2);
    let loads = |space: &AddressSpace<Paged>| space.accessor().load_u8(at + PAGE);
    assert_eq!(
        [&parent, &child, &grandchild].map(loads),
        [Ok(2), Ok(1), Ok(1)]
    );
}

/// [X11] A pinned page stays the parent's: who has the pin sees its stores, and the child has a copy.
#[test]
fn a_pin_is_the_parents() {
    let parent = space(&FramePool::default());
    let at = map(&parent, 1);
    let mut cpu = parent.accessor();
    cpu.store_u8(at, 1).unwrap();
    let pin = cpu.pin_page(at, Access::Write).unwrap();
    let child = parent.dup().unwrap();
    cpu.store_u8(at, 2).unwrap();
    let mut seen = [0];
    pin.read(0, &mut seen);
    assert_eq!(seen, [2]);
    assert_eq!(child.accessor().load_u8(at), Ok(1));
}

/// [X15] A walk goes upwards, and meets no page twice, whatever happens meanwhile.
#[test]
fn a_walk_goes_upwards() {
    let _watchdog = watchdog::watch(LIMIT);
    let space = AddressSpace::default();
    let at = space.map(&MapRequest::anonymous(64 * PAGE, RW)).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for page in (0..64).cycle() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let addr = at + page * PAGE;
                match page % 3 {
                    0 => space.protect(addr, PAGE, Prot::READ).unwrap(),
                    1 => space.unmap(addr, PAGE).unwrap(),
                    _ => {
                        let request = MapRequest::anonymous(3 * PAGE, RW).fixed(addr - 2 * PAGE);
                        space.map(&request).unwrap();
                    }
                }
            }
        });
        let reader = space.register();
        for _ in 0..20 * ROUNDS {
            let guard = reader.pin();
            let mut last = 0;
            for vma in space.iter(0, &guard) {
                assert!(vma.start() >= last && vma.start() < vma.end());
                last = vma.end();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
