//! What others got wrong between files and their mappings (rows F of the project's list of field cases), each generalised to its kind.

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod scan;

use std::ops::Range;
use std::sync::Arc;

use memory::{PAGE, RW, file, map_at, map_file, space, space_with};
use scan::assert_exact;
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AddressSpace, FaultError, MapFlags, OpenFile, Prot, RemapFlags, RemapRequest,
    SpaceConfig,
};

fn pages_of(file: &OpenFile, pages: Range<u64>) -> Vec<(u64, u64)> {
    let found = file.object().mappings(pages);
    found
        .iter()
        .map(|mapping| (mapping.pages.start, mapping.pages.end))
        .collect()
}

/// [F1] A page that several mappings show, pieces of one that was split among them, is out of all of them when its frame goes.
#[test]
fn a_page_that_goes_is_out_of_every_piece_that_showed_it() {
    let pool = FramePool::default();
    let space = space(&pool);
    let file = file(8);
    let whole = map_file(&space, &file, 8, MapFlags::SHARED);
    let again = map_file(&space, &file, 8, MapFlags::SHARED);
    let private = map_file(&space, &file, 8, MapFlags::PRIVATE);
    // Pieces of one page each, of different rights.
    for page in (0..8).step_by(2) {
        space
            .protect(whole + page * PAGE, PAGE, Prot::READ)
            .unwrap();
    }
    let mut cpu = space.accessor();
    let everywhere: Vec<u64> = [whole, again, private]
        .into_iter()
        .flat_map(|at| (0..8).map(move |page| at + page * PAGE))
        .collect();
    for addr in &everywhere {
        cpu.load_u8(*addr).unwrap();
    }
    file.object().punch_hole(0, 8 * PAGE).unwrap();
    assert_eq!(file.object().resident_pages(), 0);
    let space_shows = space.backend().resident();
    assert_eq!(space_shows, space.backend().recount());
    for addr in &everywhere {
        assert_eq!(cpu.load_u8(*addr), Ok(0), "{addr:#x}");
    }
    file.truncate(3 * PAGE).unwrap();
    for addr in everywhere {
        let result = cpu.load_u8(addr);
        let base = [whole, again, private]
            .into_iter()
            .filter(|at| *at <= addr)
            .max()
            .unwrap();
        match (addr - base) / PAGE {
            0..3 => assert_eq!(result, Ok(0)),
            _ => assert_eq!(result, Err(FaultError::BeyondEnd(addr))),
        }
    }
}

/// [F2, F7] Pieces come in any order; what is found is in the file's order, and exactly what is still mapped.
#[test]
fn what_is_left_of_two_mappings_of_one_range_is_what_is_found() {
    let pool = FramePool::default();
    let space = space(&pool);
    let file = file(8);
    let second = map_file(&space, &file, 8, MapFlags::SHARED);
    let first = map_file(&space, &file, 4, MapFlags::SHARED);
    space.unmap(second, 4 * PAGE).unwrap();
    assert_eq!(pages_of(&file, 0..8), [(0, 4), (4, 8)]);
    assert_eq!(pages_of(&file, 2..4), [(0, 4)]);
    space.unmap(first + PAGE, 2 * PAGE).unwrap();
    assert_eq!(pages_of(&file, 0..8), [(0, 1), (3, 4), (4, 8)]);
    assert_eq!(pages_of(&file, 1..3), []);
}

/// [F3] A split adds an entry for each piece, a merge takes them back, and so often that a count that drifted would show.
#[test]
fn splits_and_merges_keep_one_entry_per_mapping() {
    let pool = FramePool::default();
    let spaces = [space(&pool)];
    let file = file(8);
    let at = map_file(&spaces[0], &file, 8, MapFlags::SHARED);
    for _ in 0..100 {
        spaces[0]
            .protect(at + 2 * PAGE, 3 * PAGE, Prot::READ)
            .unwrap();
        assert_eq!(file.object().mapping_count(), 3);
        assert_exact(file.object(), &spaces);
        spaces[0].protect(at + 2 * PAGE, 3 * PAGE, RW).unwrap();
        assert_eq!(file.object().mapping_count(), 1);
        assert_exact(file.object(), &spaces);
    }
    assert_eq!(file.object().writable_mappings(), 1);
}

/// [F4] What moves away, and what moves here, is truncated: the index knows both places while pages are on their way.
#[test]
fn what_was_moved_is_truncated_where_it_is() {
    let pool = FramePool::default();
    let space = space(&pool);
    let file = file(8);
    let from = map_file(&space, &file, 8, MapFlags::SHARED);
    memory::populate(&space, from, 8, 7);
    let to = 0x20_0000_0000;
    space
        .remap(&RemapRequest {
            addr: from + 2 * PAGE,
            old_len: 4 * PAGE,
            new_len: 4 * PAGE,
            flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
            new_addr: to,
        })
        .unwrap();
    file.truncate(4 * PAGE).unwrap();
    let mut cpu = space.accessor();
    assert_eq!((cpu.load_u8(to), cpu.load_u8(to + PAGE)), (Ok(7), Ok(7)));
    for addr in [to + 2 * PAGE, to + 3 * PAGE, from + 6 * PAGE] {
        assert_eq!(cpu.load_u8(addr), Err(FaultError::BeyondEnd(addr)));
    }
    assert_eq!(cpu.load_u8(from), Ok(7));
}

/// [F5] Spaces that go while a file is truncated are neither waited for nor brought back.
#[test]
fn truncation_passes_over_spaces_that_are_going() {
    let pool = FramePool::default();
    let file = file(8);
    for _ in 0..20 {
        file.truncate(8 * PAGE).unwrap();
        let spaces: Vec<_> = (0..20).map(|_| space(&pool)).collect();
        let addresses: Vec<u64> = spaces
            .iter()
            .map(|space| {
                let at = map_file(space, &file, 8, MapFlags::SHARED);
                memory::populate(space, at, 8, 1);
                at
            })
            .collect();
        let (stay, go): (Vec<_>, Vec<_>) = spaces
            .into_iter()
            .enumerate()
            .partition(|(number, _)| number % 2 == 0);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(go));
            file.truncate(PAGE).unwrap();
        });
        assert_eq!(file.object().mapping_count(), stay.len());
        for (number, space) in &stay {
            let addr = addresses[*number] + PAGE;
            assert_eq!(
                space.accessor().load_u8(addr),
                Err(FaultError::BeyondEnd(addr))
            );
        }
    }
    drop(file);
    assert_eq!(pool.stats().used, 0);
}

/// [F6] A child whose copy fails has been in the index, complete, and isn't any more; the parent is as it was.
#[test]
fn a_fork_that_fails_leaves_no_entry() {
    let pool = FramePool::new(40);
    let spaces = [space(&pool)];
    let file = file(8);
    let at = map_file(&spaces[0], &file, 8, MapFlags::PRIVATE);
    memory::populate(&spaces[0], at, 8, 1);
    // Pinned pages are copied at once, for which there are no frames.
    let mut cpu = spaces[0].accessor();
    let pins: Vec<_> = (0..8)
        .map(|page| cpu.pin_page(at + page * PAGE, Access::Write).unwrap())
        .collect();
    let mut filler = Vec::new();
    let more = memory::map(&spaces[0], 64);
    for page in 0..64 {
        if cpu.store_u8(more + page * PAGE, 1).is_err() {
            break;
        }
        filler.push(page);
    }
    assert!(spaces[0].dup().is_err());
    assert_exact(file.object(), &spaces);
    assert_eq!(file.object().mapping_count(), 1);
    drop(pins);
    spaces[0].unmap(more, 64 * PAGE).unwrap();
    let child = spaces[0].dup().unwrap();
    assert_eq!(file.object().mapping_count(), 2);
    drop(child);
    assert_exact(file.object(), &spaces);
}

/// A space's own lock isn't taken by what starts from a file (C7).
#[test]
fn truncation_needs_no_space_to_be_unlocked() {
    let pool = FramePool::default();
    let space = space(&pool);
    let file = file(8);
    let at = map_file(&space, &file, 8, MapFlags::SHARED);
    memory::populate(&space, at, 8, 1);
    let mut cpu = space.accessor();
    let guard = space.write();
    std::thread::scope(|scope| {
        scope.spawn(|| file.truncate(PAGE).unwrap());
    });
    assert_eq!(
        cpu.load_u8(at + PAGE),
        Err(FaultError::BeyondEnd(at + PAGE))
    );
    drop(guard);
}

/// A mapping that a call has taken away, and whose pages it still has, is found: truncation waits for them.
#[test]
fn a_mapping_is_indexed_until_its_pages_are_gone() {
    let pool = FramePool::default();
    let space = space(&pool);
    let file = file(8);
    let at = map_file(&space, &file, 8, MapFlags::SHARED);
    let mut guard = space.write();
    guard.unmap(at, 8 * PAGE).unwrap();
    assert_eq!(file.object().mapping_count(), 1);
    guard.finish();
    assert_eq!(file.object().mapping_count(), 0);
    drop(guard);
}

/// Publishing under the index's lock, for comparison, changes nothing else.
#[test]
fn publishing_under_the_index_lock_gives_the_same() {
    let pool = FramePool::default();
    let config = SpaceConfig {
        publish_under_index_lock: true,
        ..SpaceConfig::default()
    };
    let spaces: [AddressSpace<Paged>; 1] = [space_with(&pool, config)];
    let files = [file(8), file(8)];
    let at = map_file(&spaces[0], &files[0], 8, MapFlags::SHARED);
    let over = map_file(&spaces[0], &files[1], 8, MapFlags::PRIVATE);
    spaces[0].protect(at + PAGE, PAGE, Prot::READ).unwrap();
    spaces[0]
        .remap(&RemapRequest {
            addr: at,
            old_len: PAGE,
            new_len: PAGE,
            flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
            new_addr: over + PAGE,
        })
        .unwrap();
    map_at(&spaces[0], over + 4 * PAGE, 1);
    let child = spaces[0].dup().unwrap();
    let [parent] = spaces;
    let both = [parent, child];
    for file in &files {
        assert_exact(file.object(), &both);
    }
    drop(both);
    let left = |file: &Arc<OpenFile>| file.object().mapping_count();
    assert_eq!(files.iter().map(left).sum::<usize>(), 0);
}
