//! Memory behind `MAP_HUGETLB`: contents, fork, exhaustion, and the pool's numbers, as Linux 6.18 answered them.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod memory;

use std::sync::Barrier;

use memory::{LEAF, PAGE, RW, space_with};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AddressSpace, Advice, FaultError, HugePool, MapFlags, MapRequest, Prot, RemapFlags,
    RemapRequest, SpaceConfig,
};

const M: u64 = 2 << 20;
const BASE: u64 = 0x100_0000_0000;
const PRIVATE: MapFlags = MapFlags::PRIVATE;
const SHARED: MapFlags = MapFlags::SHARED;

fn space(pool: &HugePool) -> AddressSpace<Paged> {
    let config = SpaceConfig {
        hugetlb: Some(pool.clone()),
        ..SpaceConfig::default()
    };
    space_with(&FramePool::default(), config)
}

/// `pages` huge pages at `BASE`.
fn map(space: &AddressSpace<Paged>, pages: u64, flags: MapFlags) {
    let request = MapRequest {
        addr: BASE,
        flags: flags | MapFlags::ANONYMOUS | MapFlags::HUGETLB | MapFlags::FIXED,
        ..MapRequest::anonymous(pages * M, RW)
    };
    space.map(&request).unwrap();
}

/// Free and reserved.
fn counts(pool: &HugePool) -> (u64, u64) {
    let stats = pool.stats();
    (stats.free, stats.reserved)
}

/// Huge pages that are present.
#[track_caller]
fn present(space: &AddressSpace<Paged>) -> u64 {
    let resident = space.backend().resident();
    assert_eq!(resident, space.backend().recount());
    assert_eq!(resident.total(), 0, "they are counted apart");
    assert_eq!(resident.huge % 512, 0);
    resident.huge / 512
}

fn load(space: &AddressSpace<Paged>, addr: u64) -> Result<u8, FaultError> {
    space.accessor().load_u8(addr)
}

fn store(space: &AddressSpace<Paged>, addr: u64, value: u8) -> Result<(), FaultError> {
    space.accessor().store_u8(addr, value)
}

#[test]
fn a_first_access_takes_a_page_as_a_whole() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 4, PRIVATE);
    assert_eq!(counts(&pool), (8, 4));
    store(&space, BASE + 5 * PAGE, 7).unwrap();
    // A load as well: there is no huge page of zeros.
    assert_eq!(load(&space, BASE + 2 * M + 9), Ok(0));
    assert_eq!((counts(&pool), present(&space)), ((6, 2), 2));
    let mut bytes = vec![1; M as usize];
    space.accessor().read(BASE, &mut bytes).unwrap();
    let stored = (5 * PAGE) as usize;
    assert_eq!(
        (bytes[stored], bytes.iter().filter(|b| **b != 0).count()),
        (7, 1)
    );
    let mut there = [9; 4 * 512];
    space.mincore(BASE, 4 * M, &mut there).unwrap();
    let sums: Vec<_> = there
        .chunks(512)
        .map(|page| page.iter().map(|b| u32::from(*b)).sum::<u32>())
        .collect();
    assert_eq!(sums, [512, 0, 512, 0]);
    // In place of anything smaller.
    space.unmap(BASE - PAGE, M + PAGE).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((7, 2), 1));
    space.unmap(BASE, 8 * M).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((8, 0), 0));
}

#[test]
fn a_pin_of_a_part_keeps_the_whole_page() {
    let pool = HugePool::new(1);
    let space = space(&pool);
    map(&space, 1, PRIVATE);
    let mut cpu = space.accessor();
    let pin = cpu.pin_page(BASE + 77 * PAGE, Access::Write).unwrap();
    drop(cpu);
    drop(space);
    assert_eq!(counts(&pool), (0, 0));
    drop(pin);
    assert_eq!(counts(&pool), (1, 0));
}

#[test]
fn beyond_the_pool_there_is_sigbus() {
    let pool = HugePool::new(2);
    let space = space(&pool);
    map(&space, 3, PRIVATE | MapFlags::NORESERVE);
    assert_eq!(counts(&pool), (2, 0));
    store(&space, BASE, 1).unwrap();
    store(&space, BASE + M, 1).unwrap();
    let third = BASE + 2 * M;
    let sigbus = Err(FaultError::NoHugePage(third));
    assert_eq!(load(&space, third).map(|_| ()), sigbus);
    assert_eq!(store(&space, third, 1), sigbus);
    space.advise(BASE, M, Advice::DONTNEED).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((1, 0), 1));
    assert_eq!(store(&space, third, 1), Ok(()));
    drop(space);
    assert_eq!(counts(&pool), (2, 0));
    // What others have reserved isn't free.
    let (one, other) = (self::space(&pool), self::space(&pool));
    map(&one, 2, PRIVATE);
    map(&other, 1, SHARED | MapFlags::NORESERVE);
    assert_eq!(load(&other, BASE), Err(FaultError::NoHugePage(BASE)));
    assert_eq!(store(&one, BASE, 1), Ok(()));
    drop((one, other));
    assert_eq!(counts(&pool), (2, 0));
}

#[test]
fn pages_of_1_gib_are_sigbus() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    let size = MapFlags::from_bits_retain(30 << 26);
    let flags = PRIVATE | MapFlags::ANONYMOUS | MapFlags::HUGETLB | MapFlags::NORESERVE;
    let request = MapRequest {
        flags: flags | size,
        ..MapRequest::anonymous(1, RW)
    };
    let addr = space.map(&request).unwrap();
    assert_eq!(load(&space, addr), Err(FaultError::NoHugePage(addr)));
}

#[test]
fn populating_and_locking_make_pages_present() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 2, PRIVATE | MapFlags::POPULATE);
    assert_eq!((counts(&pool), present(&space)), ((6, 0), 2));
    map(&space, 1, PRIVATE | MapFlags::LOCKED);
    assert_eq!((counts(&pool), present(&space)), ((6, 0), 2));
    space.unmap(BASE, 2 * M).unwrap();
    map(
        &space,
        9,
        PRIVATE | MapFlags::POPULATE | MapFlags::NORESERVE,
    );
    assert_eq!((counts(&pool), present(&space)), ((0, 0), 8));
    space.unmap(BASE, 9 * M).unwrap();
    map(&space, 2, PRIVATE);
    space.mlock(BASE + PAGE, PAGE).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((7, 1), 1));
}

#[test]
fn discarded_private_pages_are_reserved_again() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 2, PRIVATE);
    store(&space, BASE, 1).unwrap();
    store(&space, BASE + M, 2).unwrap();
    assert_eq!(counts(&pool), (6, 0));
    // Nothing smaller than a page goes.
    space.advise(BASE, PAGE, Advice::DONTNEED).unwrap();
    assert_eq!((load(&space, BASE), present(&space)), (Ok(1), 2));
    space.advise(BASE, M + PAGE, Advice::DONTNEED).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((7, 1), 1));
    assert_eq!((load(&space, BASE), load(&space, BASE + M)), (Ok(0), Ok(2)));
    assert_eq!(counts(&pool), (6, 0));
    drop(space);
    assert_eq!(counts(&pool), (8, 0));
}

#[test]
fn shared_pages_are_the_file_s() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 2, SHARED);
    store(&space, BASE, 1).unwrap();
    store(&space, BASE + M, 2).unwrap();
    assert_eq!(counts(&pool), (6, 0));
    space.advise(BASE, M, Advice::DONTNEED).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((6, 0), 1));
    assert_eq!((load(&space, BASE), load(&space, BASE + M)), (Ok(1), Ok(2)));
    // A hole isn't reserved again.
    space.advise(BASE, M, Advice::REMOVE).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((7, 0), 1));
    assert_eq!(load(&space, BASE), Ok(0));
    assert_eq!(counts(&pool), (6, 0));
    // Parts of pages become zeros.
    store(&space, BASE, 6).unwrap();
    store(&space, BASE + 2 * PAGE, 5).unwrap();
    space.advise(BASE + PAGE, 2 * PAGE, Advice::REMOVE).unwrap();
    assert_eq!(
        (load(&space, BASE), load(&space, BASE + 2 * PAGE)),
        (Ok(6), Ok(0))
    );
    assert_eq!(counts(&pool), (6, 0));
    store(&space, BASE + M + 2 * PAGE, 8).unwrap();
    space
        .advise(BASE + PAGE, 2 * M - PAGE, Advice::REMOVE)
        .unwrap();
    assert_eq!(counts(&pool), (7, 0));
    assert_eq!(load(&space, BASE + M + 2 * PAGE), Ok(0));
    // Pages stay with the file, not with the part of it that is mapped.
    space.unmap(BASE, M).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((6, 0), 1));
    space.unmap(BASE + M, M).unwrap();
    assert_eq!((counts(&pool), present(&space)), ((8, 0), 0));
}

#[test]
fn a_child_shares_shared_pages() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 2, SHARED);
    store(&space, BASE, 1).unwrap();
    let child = space.dup().unwrap();
    assert_eq!(present(&child), 0, "it finds them by itself");
    store(&child, BASE, 8).unwrap();
    store(&child, BASE + M, 9).unwrap();
    assert_eq!((load(&space, BASE), load(&space, BASE + M)), (Ok(8), Ok(9)));
    drop(space);
    assert_eq!(counts(&pool), (6, 0));
    drop(child);
    assert_eq!(counts(&pool), (8, 0));
}

#[test]
fn a_child_s_stores_copy_whole_pages_that_nobody_has_reserved() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 4, PRIVATE);
    store(&space, BASE, 1).unwrap();
    store(&space, BASE + PAGE, 3).unwrap();
    assert_eq!(load(&space, BASE + M), Ok(0));
    let child = space.dup().unwrap();
    assert_eq!((counts(&pool), present(&child)), ((6, 2), 2));
    store(&child, BASE, 9).unwrap();
    store(&child, BASE + M, 9).unwrap();
    assert_eq!(counts(&pool), (4, 2));
    assert_eq!(
        (load(&child, BASE + PAGE), load(&space, BASE)),
        (Ok(3), Ok(1))
    );
    assert_eq!(load(&child, BASE + 3 * M), Ok(0));
    assert_eq!(counts(&pool), (3, 2));
    drop(child);
    assert_eq!(counts(&pool), (6, 2));
    // The pages are the parent's alone again: no copy.
    store(&space, BASE, 2).unwrap();
    assert_eq!(counts(&pool), (6, 2));
    assert_eq!((load(&space, BASE), load(&space, BASE + M)), (Ok(2), Ok(0)));
    drop(space);
    assert_eq!(counts(&pool), (8, 0));
}

#[test]
fn a_child_outlives_its_parent() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 2, PRIVATE);
    store(&space, BASE, 1).unwrap();
    let child = space.dup().unwrap();
    space.unmap(BASE, 2 * M).unwrap();
    assert_eq!(counts(&pool), (7, 0));
    assert_eq!(load(&child, BASE), Ok(1));
    store(&child, BASE, 3).unwrap();
    assert_eq!(counts(&pool), (7, 0));
    drop(space);
    drop(child);
    assert_eq!(counts(&pool), (8, 0));
}

#[test]
fn a_parent_s_store_takes_a_free_page_first() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 2, PRIVATE);
    store(&space, BASE, 1).unwrap();
    let child = space.dup().unwrap();
    store(&space, BASE, 4).unwrap();
    assert_eq!(counts(&pool), (6, 1));
    assert_eq!((load(&child, BASE), load(&space, BASE)), (Ok(1), Ok(4)));
    drop(child);
    assert_eq!(counts(&pool), (7, 1));
    space.advise(BASE, M, Advice::DONTNEED).unwrap();
    assert_eq!(counts(&pool), (8, 2));
    drop(space);
    assert_eq!(counts(&pool), (8, 0));
}

/// With the pool exhausted a child's store is an error, and a parent's takes the page away from the child.
#[test]
fn a_parent_comes_before_its_children() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 8, PRIVATE);
    store(&space, BASE, 1).unwrap();
    store(&space, BASE + M, 2).unwrap();
    let child = space.dup().unwrap();
    let sigbus = |addr| Err(FaultError::NoHugePage(addr));
    assert_eq!(load(&child, BASE), Ok(1));
    assert_eq!(store(&child, BASE, 9), sigbus(BASE));
    assert_eq!(load(&child, BASE + 3 * M).map(|_| ()), sigbus(BASE + 3 * M));
    assert_eq!(counts(&pool), (6, 6));
    store(&space, BASE, 5).unwrap();
    assert_eq!((counts(&pool), present(&child)), ((6, 6), 1));
    assert_eq!(load(&child, BASE).map(|_| ()), sigbus(BASE));
    assert_eq!(load(&child, BASE + M), Ok(2));
    // It stays without, pool or no pool.
    space.unmap(BASE + 4 * M, 4 * M).unwrap();
    assert_eq!(counts(&pool), (6, 2));
    assert_eq!(load(&child, BASE).map(|_| ()), sigbus(BASE));
    assert_eq!(store(&child, BASE + M, 7), Ok(()));
    assert_eq!((load(&space, BASE), load(&space, BASE + M)), (Ok(5), Ok(2)));
    drop((space, child));
    assert_eq!(counts(&pool), (8, 0));
}

#[test]
fn a_child_keeps_copies_of_its_own_when_its_parent_needs_pages() {
    let pool = HugePool::new(3);
    let space = space(&pool);
    map(&space, 2, PRIVATE);
    store(&space, BASE, 1).unwrap();
    store(&space, BASE + M, 2).unwrap();
    let child = space.dup().unwrap();
    store(&child, BASE, 9).unwrap();
    assert_eq!(counts(&pool), (0, 0));
    store(&space, BASE, 4).unwrap();
    store(&space, BASE + M, 5).unwrap();
    assert_eq!(load(&child, BASE), Ok(9));
    assert_eq!(
        load(&child, BASE + M),
        Err(FaultError::NoHugePage(BASE + M))
    );
}

#[test]
fn pinned_pages_stay_the_parent_s_as_a_whole() {
    let pool = HugePool::new(4);
    let space = space(&pool);
    map(&space, 1, PRIVATE);
    store(&space, BASE + 3 * PAGE, 1).unwrap();
    let mut cpu = space.accessor();
    let pins = [3, 8].map(|page| cpu.pin_page(BASE + page * PAGE, Access::Write).unwrap());
    let child = space.dup().unwrap();
    assert_eq!(counts(&pool), (2, 0));
    store(&space, BASE + 3 * PAGE, 2).unwrap();
    assert_eq!(counts(&pool), (2, 0), "no copy");
    assert_eq!(load(&child, BASE + 3 * PAGE), Ok(1));
    store(&child, BASE, 2).unwrap();
    assert_eq!((counts(&pool), present(&child)), ((2, 0), 1));
    drop(pins);
    drop(cpu);
    drop((space, child));
    assert_eq!(counts(&pool), (4, 0));
    // Without a page for the copy there is no child, and nothing has changed.
    let space = self::space(&pool);
    map(&space, 4, PRIVATE);
    store(&space, BASE, 1).unwrap();
    let mut cpu = space.accessor();
    let pin = cpu.pin_page(BASE, Access::Write).unwrap();
    assert!(space.dup().is_err());
    assert_eq!(counts(&pool), (3, 3));
    store(&space, BASE, 6).unwrap();
    assert_eq!((load(&space, BASE), counts(&pool)), (Ok(6), (3, 3)));
    drop(pin);
    drop(cpu);
    drop(space);
    assert_eq!(counts(&pool), (4, 0));
}

/// Of several pinned pages too: those that the failing dup didn't come to stay what the pins show.
#[test]
fn pins_hold_after_a_dup_that_fails() {
    let pool = HugePool::new(2);
    let space = space(&pool);
    map(&space, 2, PRIVATE);
    let mut cpu = space.accessor();
    let pins = [0, M].map(|at| cpu.pin_page(BASE + at, Access::Write).unwrap());
    assert!(space.dup().is_err());
    for (at, pin) in [0, M].into_iter().zip(&pins) {
        cpu.store_u8(BASE + at, 7).unwrap();
        let mut seen = [0];
        pin.read(0, &mut seen);
        assert_eq!(seen, [7]);
    }
}

#[test]
fn mremap_moves_pages_and_their_reservations() {
    let pool = HugePool::new(8);
    let space = space(&pool);
    map(&space, 2, PRIVATE);
    store(&space, BASE + PAGE, 7).unwrap();
    let to = BASE + 16 * M;
    let remap = |addr, len, to| {
        let request = RemapRequest {
            addr,
            old_len: len,
            new_len: len,
            flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
            new_addr: to,
        };
        space.remap(&request).unwrap()
    };
    remap(BASE, 2 * M, to);
    assert_eq!((load(&space, to + PAGE), counts(&pool)), (Ok(7), (7, 1)));
    assert!(load(&space, BASE + PAGE).is_err());
    remap(to + M, PAGE, BASE);
    assert_eq!(load(&space, BASE), Ok(0));
    assert_eq!((counts(&pool), present(&space)), ((6, 0), 2));
    space.unmap(BASE, 32 * M).unwrap();
    assert_eq!(counts(&pool), (8, 0));
}

#[test]
fn a_page_read_first_is_the_one_stored_to_later() {
    let pool = HugePool::new(1);
    let space = space(&pool);
    let request = MapRequest {
        flags: PRIVATE | MapFlags::ANONYMOUS | MapFlags::HUGETLB,
        ..MapRequest::anonymous(M, Prot::READ)
    };
    let addr = space.map(&request).unwrap();
    assert_eq!(load(&space, addr), Ok(0));
    assert_eq!(counts(&pool), (0, 0));
    space.protect(addr, M, RW).unwrap();
    assert_eq!(store(&space, addr, 1), Ok(()));
    // A child gets what was only read as well.
    let child = space.dup().unwrap();
    assert_eq!(load(&child, addr), Ok(1));
}

#[test]
fn a_fixed_mapping_takes_the_pages_of_what_it_replaces() {
    let pool = HugePool::new(2);
    let space = space(&pool);
    map(&space, 2, PRIVATE);
    store(&space, BASE, 1).unwrap();
    map(&space, 2, PRIVATE);
    assert_eq!(counts(&pool), (2, 2));
    assert_eq!(load(&space, BASE), Ok(0));
    store(&space, BASE + M, 1).unwrap();
    assert_eq!(counts(&pool), (0, 0));
}

/// What an earlier call under the same lock has unmapped can be reserved again.
#[test]
fn calls_of_one_guard_find_each_other_s_pages() {
    let pool = HugePool::new(2);
    let space = space(&pool);
    map(&space, 2, PRIVATE | MapFlags::POPULATE);
    let mut guard = space.write();
    guard.unmap(BASE, 2 * M).unwrap();
    let request = MapRequest {
        flags: SHARED | MapFlags::ANONYMOUS | MapFlags::HUGETLB,
        ..MapRequest::anonymous(2 * M, RW)
    };
    let addr = guard.map(&request).unwrap();
    drop(guard);
    assert_eq!(counts(&pool), (2, 2));
    assert_eq!(store(&space, addr, 1), Ok(()));
}

/// Many threads at the same pages: each page is taken once, and nothing that was stored is lost.
#[test]
fn faults_of_several_threads_take_each_page_once() {
    for flags in [PRIVATE, SHARED, PRIVATE | MapFlags::NORESERVE] {
        let pool = HugePool::new(4);
        let space = space(&pool);
        map(&space, 4, flags);
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (space, barrier) = (&space, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let mut cpu = space.accessor();
                    for page in 0..4 {
                        cpu.store_u8(BASE + page * M + thread, 1).unwrap();
                    }
                });
            }
        });
        for at in 0..16 {
            assert_eq!(load(&space, BASE + at / 4 * M + at % 4), Ok(1));
        }
        assert_eq!((counts(&pool), present(&space)), ((0, 0), 4));
        drop(space);
        assert_eq!(counts(&pool), (4, 0));
    }
}

/// A fault that finds the last shared mapping gone leaves nothing in the file.
#[test]
fn a_fault_beside_the_last_unmap_gives_its_page_back() {
    let pool = HugePool::new(2);
    let space = space(&pool);
    for _ in 0..100 {
        map(&space, 1, SHARED);
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                let _ = store(&space, BASE, 1);
            });
            barrier.wait();
            space.unmap(BASE, M).unwrap();
        });
        assert_eq!(counts(&pool), (2, 0));
    }
}

/// Stores, discards, forks and moves at once; in the end the pool is as it was.
#[test]
fn calls_and_faults_at_once_leave_the_pool_as_it_was() {
    let pool = HugePool::new(24);
    let space = space(&pool);
    map(&space, 4, PRIVATE);
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let space = &space;
            scope.spawn(move || {
                let mut cpu = space.accessor();
                for round in 0..400_u64 {
                    let addr = BASE + (round % 4) * M + thread * PAGE;
                    // Nothing may be mapped, and the pool may be empty.
                    let _ = cpu.store_u8(addr, round as u8);
                }
            });
        }
        for round in 0..60 {
            match round % 4 {
                0 => space.advise(BASE + M, 2 * M, Advice::DONTNEED).unwrap(),
                1 => {
                    let child = space.dup().unwrap();
                    let _ = store(&child, BASE, 1);
                }
                2 => {
                    space.unmap(BASE + 2 * M, M).unwrap();
                    let request = MapRequest {
                        addr: BASE + 2 * M,
                        flags: PRIVATE | MapFlags::ANONYMOUS | MapFlags::HUGETLB | MapFlags::FIXED,
                        ..MapRequest::anonymous(M, RW)
                    };
                    space.map(&request).unwrap();
                }
                _ => space.protect(BASE, M, RW).unwrap(),
            }
        }
    });
    present(&space);
    drop(space);
    assert_eq!(counts(&pool), (24, 0));
    assert_eq!(LEAF, M);
}
