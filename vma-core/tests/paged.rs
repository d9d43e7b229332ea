//! Memory behind mappings: what loads and stores find, and when.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod memory;

use memory::{PAGE, RW, file, map, map_file, space};

use vma_core::paged::{Accessor, FramePool};
use vma_core::{Access, Advice, FaultError, MapFlags, Prot, RemapFlags, RemapRequest};

fn pool() -> FramePool {
    FramePool::default()
}

fn byte(cpu: &mut Accessor<'_>, addr: u64) -> u8 {
    cpu.load_u8(addr).unwrap()
}

#[test]
fn memory_is_zero_until_it_is_written_and_after_it_was_discarded() {
    let pool = pool();
    let space = space(&pool);
    let at = map(&space, 4);
    let mut cpu = space.accessor();
    assert_eq!(cpu.load_u64(at + 8).unwrap(), 0);
    assert_eq!(
        space.backend().resident().anon,
        0,
        "the page of zeros isn't counted"
    );
    cpu.store_u64(at + 8, 77).unwrap();
    assert_eq!(cpu.load_u64(at + 8).unwrap(), 77);
    assert_eq!(space.backend().resident().anon, 1);
    let mut pages = [9; 4];
    space.mincore(at, 4 * PAGE, &mut pages).unwrap();
    assert_eq!(pages, [1, 0, 0, 0]);
    space.advise(at, PAGE, Advice::DONTNEED).unwrap();
    assert_eq!(cpu.load_u64(at + 8).unwrap(), 0);
    space.unmap(at, PAGE).unwrap();
    assert_eq!(cpu.load_u8(at), Err(FaultError::Unmapped(at)));
    assert_eq!(cpu.store_u8(at + 5, 1), Err(FaultError::Unmapped(at + 5)));
    cpu.fill(at + PAGE, 3 * PAGE, 9).unwrap();
    let mut bytes = [0; 300];
    cpu.read(at + 2 * PAGE - 100, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 300]);
    let error = cpu.read(at + 4 * PAGE - 100, &mut bytes).unwrap_err();
    assert_eq!(
        (error.done, error.fault),
        (100, FaultError::Unmapped(at + 4 * PAGE))
    );
    assert_eq!(space.backend().resident(), space.backend().recount());
    drop(cpu);
    drop(space);
    assert_eq!(pool.stats().used, 0, "every frame is back");
}

#[test]
fn rights_are_those_of_the_mapping_at_once() {
    let pool = pool();
    let space = space(&pool);
    let at = map(&space, 2);
    let mut cpu = space.accessor();
    cpu.store_u32(at, 5).unwrap();
    space.protect(at, PAGE, Prot::READ).unwrap();
    assert!(matches!(
        cpu.store_u32(at, 6),
        Err(FaultError::Denied {
            access: Access::Write,
            ..
        })
    ));
    assert_eq!(cpu.load_u32(at).unwrap(), 5);
    space.protect(at, PAGE, Prot::empty()).unwrap();
    assert!(matches!(cpu.load_u32(at), Err(FaultError::Denied { .. })));
    space.protect(at, PAGE, RW).unwrap();
    assert_eq!(cpu.load_u32(at).unwrap(), 5);
}

#[test]
fn a_private_mapping_copies_and_a_shared_one_writes_the_file() {
    let pool = pool();
    let space = space(&pool);
    let file = file(3);
    let private = map_file(&space, &file, 3, MapFlags::PRIVATE);
    let shared = map_file(&space, &file, 3, MapFlags::SHARED);
    let mut cpu = space.accessor();
    assert_eq!(byte(&mut cpu, private + PAGE), 2);
    cpu.store_u8(shared + PAGE, 50).unwrap();
    assert_eq!(
        byte(&mut cpu, private + PAGE),
        50,
        "not written yet: the file's page"
    );
    cpu.store_u8(private + PAGE + 1, 60).unwrap();
    cpu.store_u8(shared + PAGE, 51).unwrap();
    assert_eq!(byte(&mut cpu, private + PAGE), 50, "a copy");
    let mut bytes = [0; 2];
    file.read_at(PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [51, 2]);
    file.write_at(2 * PAGE, &[90]).unwrap();
    assert_eq!(byte(&mut cpu, shared + 2 * PAGE), 90);
    let resident = space.backend().resident();
    // Loads have brought in the pages around: all of the shared one's, and the other two of the private one's.
    assert_eq!((resident.anon, resident.shmem), (1, 5));
    assert_eq!(resident, space.backend().recount());
}

/// Truncation takes private copies too, a hole leaves them; both reach all spaces.
#[test]
fn truncation_and_holes_reach_every_mapping() {
    let pool = pool();
    let (one, other) = (space(&pool), space(&pool));
    let file = file(4);
    let at = map_file(&one, &file, 4, MapFlags::SHARED);
    let copy = map_file(&other, &file, 4, MapFlags::PRIVATE);
    let (mut a, mut b) = (one.accessor(), other.accessor());
    for page in 0..4 {
        a.load_u8(at + page * PAGE).unwrap();
        b.store_u8(copy + page * PAGE, 100).unwrap();
    }
    file.punch_hole(PAGE / 2, PAGE).unwrap();
    file.punch_hole(PAGE, PAGE).unwrap();
    assert_eq!(byte(&mut a, at), 1);
    assert_eq!(
        byte(&mut a, at + PAGE / 2),
        0,
        "the rest of a page is zeroed"
    );
    assert_eq!(byte(&mut a, at + PAGE), 0);
    assert_eq!(byte(&mut b, copy + PAGE), 100, "a private copy stays");
    file.truncate(2 * PAGE + 100).unwrap();
    assert_eq!(
        a.load_u8(at + 3 * PAGE),
        Err(FaultError::BeyondEnd(at + 3 * PAGE))
    );
    assert_eq!(
        b.load_u8(copy + 3 * PAGE),
        Err(FaultError::BeyondEnd(copy + 3 * PAGE))
    );
    assert_eq!(byte(&mut a, at + 2 * PAGE + 99), 3);
    assert_eq!(byte(&mut a, at + 2 * PAGE + 100), 0);
    file.truncate(4 * PAGE).unwrap();
    assert_eq!(byte(&mut b, copy + 3 * PAGE), 0, "the copy is gone");
    assert_eq!(byte(&mut b, copy + 2 * PAGE), 100);
}

#[test]
fn pages_move_with_their_mapping() {
    let pool = pool();
    let space = space(&pool);
    let at = map(&space, 600);
    let mut cpu = space.accessor();
    for page in 0..600 {
        cpu.store_u64(at + page * PAGE, page).unwrap();
    }
    let request = RemapRequest {
        addr: at,
        old_len: 600 * PAGE,
        new_len: 1000 * PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::DONTUNMAP,
        new_addr: 0,
    };
    let moved = space
        .remap(&RemapRequest {
            new_len: 600 * PAGE,
            ..request
        })
        .unwrap();
    for page in 0..600 {
        assert_eq!(cpu.load_u64(moved + page * PAGE).unwrap(), page);
        assert_eq!(cpu.load_u64(at + page * PAGE).unwrap(), 0);
    }
    let resident = space.backend().resident();
    assert_eq!((resident.anon, resident), (600, space.backend().recount()));
}

#[test]
fn a_guard_page_is_no_mapping_until_it_is_removed() {
    let pool = pool();
    let space = space(&pool);
    let at = map(&space, 3);
    let mut cpu = space.accessor();
    cpu.fill(at, 3 * PAGE, 4).unwrap();
    space
        .advise(at + PAGE, PAGE, Advice::GUARD_INSTALL)
        .unwrap();
    assert_eq!(cpu.load_u8(at + PAGE), Err(FaultError::Unmapped(at + PAGE)));
    space.advise(at, 3 * PAGE, Advice::DONTNEED).unwrap();
    assert_eq!(byte(&mut cpu, at), 0);
    assert_eq!(
        cpu.store_u8(at + PAGE, 1),
        Err(FaultError::Unmapped(at + PAGE))
    );
    assert!(space.advise(at, 3 * PAGE, Advice::POPULATE_WRITE).is_err());
    space.advise(at, 3 * PAGE, Advice::GUARD_REMOVE).unwrap();
    assert_eq!(byte(&mut cpu, at + PAGE), 0);
}

/// Also where a first store would give the mapping an identity, and where a call asks.
#[test]
fn a_guard_page_of_a_file_stops_a_first_store() {
    let pool = pool();
    let space = space(&pool);
    let at = map_file(&space, &file(2), 2, MapFlags::PRIVATE);
    space.advise(at, PAGE, Advice::GUARD_INSTALL).unwrap();
    let mut cpu = space.accessor();
    assert_eq!(cpu.store_u8(at, 1), Err(FaultError::Unmapped(at)));
    let touched = space.touch(at, 1, Access::Write);
    assert_eq!(touched, Err(FaultError::Unmapped(at)));
    cpu.store_u8(at + PAGE, 1).unwrap();
}

#[test]
fn a_child_has_what_the_parent_had_and_each_its_own_from_then_on() {
    let pool = pool();
    let parent = space(&pool);
    let at = map(&parent, 3);
    let mut cpu = parent.accessor();
    cpu.fill(at, 2 * PAGE, 1).unwrap();
    let child = parent.dup().unwrap();
    let mut theirs = child.accessor();
    cpu.store_u8(at, 2).unwrap();
    theirs.store_u8(at + PAGE, 3).unwrap();
    assert_eq!((byte(&mut cpu, at), byte(&mut theirs, at)), (2, 1));
    assert_eq!(
        (byte(&mut cpu, at + PAGE), byte(&mut theirs, at + PAGE)),
        (1, 3)
    );
    drop(theirs);
    drop(child);
    let used = pool.stats().used;
    cpu.store_u8(at + PAGE, 9).unwrap();
    assert_eq!(pool.stats().used, used, "the last owner keeps its page");
    assert_eq!(byte(&mut cpu, at + PAGE), 9);
}

#[test]
fn a_pinned_page_stays() {
    let pool = pool();
    let space = space(&pool);
    let at = map(&space, 1);
    let mut cpu = space.accessor();
    cpu.store_u8(at, 5).unwrap();
    let pinned = cpu.pin_page(at, Access::Write).unwrap();
    cpu.store_u8(at, 6).unwrap();
    space.unmap(at, PAGE).unwrap();
    let mut bytes = [0];
    pinned.read(0, &mut bytes);
    assert_eq!(bytes, [6]);
    assert_eq!(pool.stats().used, 1);
    drop(pinned);
    assert_eq!(pool.stats().used, 0);
}

#[test]
fn atomic_operations_want_alignment_and_find_what_is_there() {
    let pool = pool();
    let space = space(&pool);
    let at = map(&space, 2);
    let mut cpu = space.accessor();
    assert_eq!(cpu.fetch_add_u32(at, 5).unwrap(), 0);
    assert_eq!(cpu.compare_exchange_u32(at, 5, 7).unwrap(), Ok(5));
    assert_eq!(cpu.compare_exchange_u32(at, 5, 8).unwrap(), Err(7));
    assert_eq!(cpu.swap_u16(at, 1).unwrap(), 7);
    assert_eq!(
        cpu.fetch_add_u64(at + 4, 1),
        Err(FaultError::Unaligned(at + 4))
    );
    // Across a page, byte by byte.
    cpu.store_u64(at + PAGE - 3, 0x0102_0304_0506_0708).unwrap();
    assert_eq!(cpu.load_u64(at + PAGE - 3).unwrap(), 0x0102_0304_0506_0708);
    cpu.write(at + 100, b"hello\0x").unwrap();
    assert_eq!(cpu.read_c_string(at + 100, 50).unwrap(), b"hello");
    assert_eq!(cpu.read_c_string(at + 100, 3).unwrap(), b"hel");
    cpu.copy(at + 100, at + PAGE - 2, 5).unwrap();
    assert_eq!(cpu.read_c_string(at + PAGE - 2, 5).unwrap(), b"hello");
}

/// No frame is left: an error, and the next try works.
#[test]
fn running_out_of_frames_is_an_error() {
    let pool = FramePool::new(4);
    let space = space(&pool);
    let at = map(&space, 8);
    let mut cpu = space.accessor();
    let error = cpu.fill(at, 8 * PAGE, 1).unwrap_err();
    assert_eq!(
        (error.done, error.fault),
        (4 * PAGE, FaultError::OutOfMemory(at + 4 * PAGE))
    );
    space.advise(at, 4 * PAGE, Advice::DONTNEED).unwrap();
    cpu.fill(at + 4 * PAGE, 4 * PAGE, 1).unwrap();
}
