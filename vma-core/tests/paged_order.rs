//! Calls that have taken pages and have yet to wait for accesses, and who comes before they do; calls that fail half-way; ranges
//! that are larger than what is in them.

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;

use memory::{PAGE, check, file, map, map_file, space};
use vma_core::paged::FramePool;
use vma_core::{Access, Advice, MapFlags};

/// C7: also when the mapping has let go of the page before the file does, and hasn't waited for accesses.
#[test]
fn truncation_waits_for_accesses_to_pages_that_were_discarded() {
    for advice in [Advice::DONTNEED, Advice::GUARD_INSTALL] {
        let pool = FramePool::default();
        let space = space(&pool);
        let file = file(1);
        let addr = map_file(&space, &file, 1, MapFlags::SHARED);
        let mut cpu = space.accessor();
        assert_eq!(cpu.load_u8(addr), Ok(1));
        let mut guard = space.write();
        guard.advise(addr, PAGE, advice).unwrap();
        file.truncate(0).unwrap();
        assert!(cpu.load_u8(addr).is_err(), "{advice:?}: the old page");
        drop(guard);
    }
}

/// A dup that finds no memory for pages has changed no file's count of mappings.
#[test]
fn a_dup_that_fails_leaves_files_as_they_were() {
    let pool = FramePool::new(1);
    let space = space(&pool);
    let file = file(1);
    map_file(&space, &file, 1, MapFlags::SHARED);
    let addr = map(&space, 1);
    let mut cpu = space.accessor();
    cpu.store_u8(addr, 1).unwrap();
    // The child would need a page of its own.
    let pinned = cpu.pin_page(addr, Access::Write).unwrap();
    assert_eq!(file.object().writable_mappings(), 1);
    assert!(space.dup().is_err());
    assert_eq!(file.object().writable_mappings(), 1);
    drop(pinned);
    let child = space.dup().unwrap();
    assert_eq!(file.object().writable_mappings(), 2);
    drop(child);
    assert_eq!(file.object().writable_mappings(), 1);
}

/// A hole takes as long as there are pages in it.
#[test]
fn a_hole_as_large_as_a_file_can_be() {
    let file = file(3);
    file.truncate(i64::MAX as u64).unwrap();
    let huge = i64::MAX as u64 - PAGE;
    file.punch_hole(PAGE / 2, huge).unwrap();
    let mut bytes = [9; 3 * PAGE as usize];
    file.read_at(0, &mut bytes).unwrap();
    let half = PAGE as usize / 2;
    assert!(bytes[..half].iter().all(|byte| *byte == 1));
    assert!(bytes[half..].iter().all(|byte| *byte == 0));
}

/// The same guard's calls have taken out what is needed.
#[test]
fn calls_on_a_guard_have_the_frames_that_it_has_taken_out() {
    let pool = FramePool::new(8);
    let space = space(&pool);
    let (old, new) = (map(&space, 4), map(&space, 8));
    let mut guard = space.write();
    guard.touch(old, 4 * PAGE, Access::Write).unwrap();
    guard.unmap(old, 4 * PAGE).unwrap();
    guard.touch(new, 8 * PAGE, Access::Write).unwrap();
    drop(guard);
    check(&space);
}
