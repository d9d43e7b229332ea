//! Situations that other address-space managers got wrong, each with the outcome that Linux has. The names in
//! brackets are rows of the project's list of field cases.
#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::unwrap_used,
    reason = "one shape for errors of many types; a test may panic"
)]

mod common;

use std::sync::Arc;

use common::{AT, PAGE, RW, TOP};
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FaultError, FileKind, FileObject,
    LockAllFlags, MapFlags, MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig,
    VmaFlags,
};

const R: Prot = Prot::READ;

fn addr(page: u64) -> u64 {
    AT + page * PAGE
}

fn fresh() -> AddressSpace {
    AddressSpace::new(SpaceConfig {
        ipc_lock: true,
        ..SpaceConfig::default()
    })
    .unwrap()
}

fn map(space: &AddressSpace, at: u64, pages: u64, prot: Prot) {
    space
        .map(&MapRequest::anonymous(pages * PAGE, prot).fixed(addr(at)))
        .unwrap();
}

fn object(pages: u64) -> Arc<FileObject> {
    FileObject::builder(FileKind::Regular, "/f")
        .len(pages * PAGE)
        .build()
}

fn map_file(
    space: &AddressSpace,
    file: &Arc<OpenFile>,
    (at, pages): (u64, u64),
    prot: Prot,
    flags: MapFlags,
    offset: u64,
) -> Result<u64, Errno> {
    let request = MapRequest::file(file.clone(), offset * PAGE, pages * PAGE, prot, flags);
    space
        .map(&request.fixed(addr(at)))
        .map_err(|error| error.errno())
}

/// `"0-2 rw-p, 2-4 r--p"`: page numbers relative to the base.
fn layout(space: &AddressSpace) -> String {
    space.check().unwrap();
    let entries = space.maps_entries();
    let line = |entry: &vma_core::MapsEntry| {
        let perms: String = entry.flags.perms().map(char::from).iter().collect();
        format!(
            "{}-{} {perms}",
            (entry.start - AT) / PAGE,
            (entry.end - AT) / PAGE
        )
    };
    entries.iter().map(line).collect::<Vec<_>>().join(", ")
}

fn remap(
    space: &AddressSpace,
    at: u64,
    old: u64,
    new: u64,
    flags: RemapFlags,
    to: u64,
) -> Result<u64, Errno> {
    let request = RemapRequest {
        addr: addr(at),
        old_len: old * PAGE,
        new_len: new * PAGE,
        flags,
        new_addr: to,
    };
    space
        .remap(&request)
        .map(|addr| (addr - AT) / PAGE)
        .map_err(|error| error.errno())
}

/// [S1, S10] Whatever part of a mapping changes, the rest keeps its protection.
#[test]
fn changing_part_of_a_mapping_leaves_the_rest() {
    for from in 0..5 {
        for to in from + 1..=5 {
            let space = fresh();
            map(&space, 0, 5, RW);
            space.protect(addr(from), (to - from) * PAGE, R).unwrap();
            let mut want = Vec::new();
            if from > 0 {
                want.push(format!("0-{from} rw-p"));
            }
            want.push(format!("{from}-{to} r--p"));
            if to < 5 {
                want.push(format!("{to}-5 rw-p"));
            }
            assert_eq!(layout(&space), want.join(", "));
            // [S2] And undone it's one again.
            space.protect(addr(0), 5 * PAGE, RW).unwrap();
            assert_eq!(layout(&space), "0-5 rw-p");
        }
    }
}

/// [S3] The mappings before the one that may not change are changed.
#[test]
fn a_refused_change_keeps_its_prefix() {
    let space = fresh();
    map(&space, 0, 1, R);
    let file = OpenFile::new(object(4), AccessMode::Read);
    map_file(&space, &file, (1, 1), R, MapFlags::SHARED, 0).unwrap();
    map(&space, 2, 1, R);
    let error = space.protect(addr(0), 3 * PAGE, RW).unwrap_err();
    assert_eq!(error.errno(), Errno::EACCES);
    assert_eq!(layout(&space), "0-1 rw-p, 1-2 r--s, 2-3 r--p");
}

/// [S4, X18] A refused mapping leaves what it would have replaced.
#[test]
fn a_refused_mapping_replaces_nothing() {
    let space = fresh();
    map(&space, 0, 4, RW);
    let file = OpenFile::new(object(4), AccessMode::Read);
    let got = map_file(&space, &file, (0, 2), RW, MapFlags::SHARED, 0);
    assert_eq!(
        (got, layout(&space).as_str()),
        (Err(Errno::EACCES), "0-4 rw-p")
    );
}

/// [S5] A hint that is taken, or unaligned.
#[test]
fn hints_are_rounded_down_and_dropped_where_taken() {
    let space = fresh();
    map(&space, 0, 1, RW);
    let hint = |at| {
        space
            .map(&MapRequest {
                addr: at,
                ..MapRequest::anonymous(PAGE, R)
            })
            .unwrap()
    };
    assert!(hint(addr(0)) > addr(100));
    assert_eq!(hint(addr(8) + 123), addr(8));
}

/// [S6, S7, S8, S9, S11] are in the errno tables; the length of munmap rounds up.
#[test]
fn lengths_round_up_to_pages() {
    let space = fresh();
    map(&space, 0, 3, RW);
    space.unmap(addr(0), 0x1a34).unwrap();
    assert_eq!(layout(&space), "2-3 rw-p");
}

/// [S12, S13] What merges and what doesn't, for every way to be nearly equal.
#[test]
fn file_mappings_merge_only_when_everything_goes_on() {
    let object = object(64);
    let one = OpenFile::new(object.clone(), AccessMode::ReadWrite);
    let reopened = OpenFile::new(object, AccessMode::ReadWrite);
    let (shared, private) = (MapFlags::SHARED, MapFlags::PRIVATE);
    let cases = [
        // (first offset, second file, second flags, second offset, mappings)
        (4, &one, shared, 6, 1),
        (4, &one, shared, 0, 2),
        (4, &one, shared, 5, 2),
        (4, &one, private, 6, 2),
        (4, &reopened, shared, 6, 2),
    ];
    for (offset, file, flags, second, count) in cases {
        for lower_first in [true, false] {
            let space = fresh();
            let low = || map_file(&space, &one, (0, 2), R, shared, offset).unwrap();
            let high = || map_file(&space, file, (2, 2), R, flags, second).unwrap();
            if lower_first {
                low();
                high();
            } else {
                high();
                low();
            }
            assert_eq!(
                space.totals().map_count,
                count,
                "{offset} {flags:?} {second} {lower_first}"
            );
        }
    }
    // Two shared anonymous mappings are two objects.
    let space = fresh();
    for at in [0, 2] {
        let flags = MapFlags::SHARED | MapFlags::ANONYMOUS;
        let request = MapRequest {
            flags,
            ..MapRequest::anonymous(2 * PAGE, RW)
        };
        space.map(&request.fixed(addr(at))).unwrap();
    }
    assert_eq!(space.totals().map_count, 2);
}

/// [S14] Flags of all kinds split, and merge when undone.
#[test]
fn flags_that_are_taken_back_merge_again() {
    let advice = [
        (Advice::DONTFORK, Advice::DOFORK),
        (Advice::RANDOM, Advice::NORMAL),
        (Advice::SEQUENTIAL, Advice::NORMAL),
        (Advice::DONTDUMP, Advice::DODUMP),
        (Advice::WIPEONFORK, Advice::KEEPONFORK),
        (Advice::MERGEABLE, Advice::UNMERGEABLE),
    ];
    for (set, clear) in advice {
        let space = fresh();
        map(&space, 0, 3, RW);
        space.advise(addr(1), PAGE, set).unwrap();
        assert_eq!(space.totals().map_count, 3, "{set:?}");
        space.advise(addr(1), PAGE, clear).unwrap();
        assert_eq!(space.totals().map_count, 1, "{clear:?}");
    }
    let space = fresh();
    map(&space, 0, 3, R);
    space.mlock(addr(1), PAGE).unwrap();
    assert_eq!(
        (space.totals().map_count, space.totals().locked_vm()),
        (3, 1)
    );
    space.munlock(addr(1), PAGE).unwrap();
    assert_eq!(
        (space.totals().map_count, space.totals().locked_vm()),
        (1, 0)
    );
}

/// [S15] Neighbours that were written separately don't become one; unwritten ones do.
#[test]
fn two_histories_cannot_be_joined() {
    for (left, right, want) in [
        (true, true, "0-2 rw-p, 2-3 rw-p"),
        (true, false, "0-3 rw-p"),
        (false, true, "0-3 rw-p"),
        (false, false, "0-3 rw-p"),
    ] {
        let space = fresh();
        map(&space, 0, 1, RW);
        map(&space, 2, 1, RW);
        for (at, write) in [(0, left), (2, right)] {
            let access = if write { Access::Write } else { Access::Read };
            space.touch(addr(at), 1, access).unwrap();
        }
        map(&space, 1, 1, RW);
        assert_eq!(layout(&space), want);
    }
}

/// [S16] Nothing is special about the lowest and the highest page.
#[test]
fn the_first_and_the_last_page_are_found() {
    let space = AddressSpace::new(SpaceConfig {
        raw_io: true,
        ..SpaceConfig::default()
    })
    .unwrap();
    let reader = space.register();
    for page in [0, TOP - PAGE] {
        space
            .map(&MapRequest::anonymous(PAGE, R).fixed(page))
            .unwrap();
        let guard = reader.pin();
        let found = space.find(page, &guard).unwrap();
        assert_eq!((found.start(), found.end()), (page, page + PAGE));
    }
}

/// [M1, M2, M3] Growing.
#[test]
fn growing_takes_free_space_behind_or_moves() {
    let space = fresh();
    map(&space, 0, 2, RW);
    assert_eq!(
        remap(&space, 0, 1, 2, RemapFlags::empty(), 0),
        Err(Errno::ENOMEM)
    );
    assert_eq!(layout(&space), "0-2 rw-p");
    let moved = remap(&space, 0, 1, 2, RemapFlags::MAYMOVE, 0).unwrap();
    assert!(moved > 2);
    assert!(
        space
            .maps_entries()
            .iter()
            .any(|entry| (entry.start, entry.end) == (addr(1), addr(2)))
    );
    let space = fresh();
    map(&space, 0, 1, RW);
    assert_eq!(remap(&space, 0, 1, 4, RemapFlags::empty(), 0), Ok(0));
    assert_eq!(layout(&space), "0-4 rw-p");
    let bytes = RemapRequest {
        addr: addr(0),
        old_len: 3 * PAGE + 1,
        new_len: 4 * PAGE + 1,
        flags: RemapFlags::empty(),
        new_addr: 0,
    };
    space.remap(&bytes).unwrap();
    assert_eq!(layout(&space), "0-5 rw-p");
}

/// [M5, M8] Ranges over several mappings: shrinking may, growing may not.
#[test]
fn only_shrinking_spans_mappings() {
    let space = fresh();
    map(&space, 0, 2, RW);
    map(&space, 2, 2, R);
    assert_eq!(
        remap(&space, 0, 4, 6, RemapFlags::MAYMOVE, 0),
        Err(Errno::EFAULT)
    );
    assert_eq!(remap(&space, 0, 8, 1, RemapFlags::empty(), 0), Ok(0));
    assert_eq!(layout(&space), "0-1 rw-p");
    map(&space, 0, 8, RW);
    let fixed = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    assert_eq!(remap(&space, 0, 8, 6, fixed, addr(20)), Ok(20));
    assert_eq!(layout(&space), "20-26 rw-p");
}

/// [M6] An invalid source leaves the destination.
#[test]
fn a_refused_move_keeps_the_destination() {
    let space = fresh();
    map(&space, 10, 2, R);
    let fixed = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    assert_eq!(remap(&space, 0, 2, 2, fixed, addr(10)), Err(Errno::EFAULT));
    map(&space, 0, 2, RW);
    space
        .configure(|config| config.limits.address_space = 4 * PAGE)
        .unwrap();
    assert_eq!(remap(&space, 0, 2, 3, fixed, addr(10)), Err(Errno::ENOMEM));
    assert_eq!(layout(&space), "0-2 rw-p, 10-12 r--p");
}

/// [M7] What stays behind was never written.
#[test]
fn a_source_that_stays_loses_its_history() {
    let space = fresh();
    map(&space, 0, 2, RW);
    space.touch(addr(0), 1, Access::Write).unwrap();
    let keep = RemapFlags::MAYMOVE | RemapFlags::DONTUNMAP;
    remap(&space, 0, 2, 2, keep, addr(50)).unwrap();
    let entries = space.maps_entries();
    assert!(entries[0].anon.is_none() && !entries[1].anon.is_none());
    let file = OpenFile::new(object(4), AccessMode::ReadWrite);
    map_file(&space, &file, (20, 2), RW, MapFlags::SHARED, 0).unwrap();
    assert!(remap(&space, 20, 2, 2, keep, addr(60)).is_ok());
}

/// [L1, L2, L3] At the limit of the address space: what replaces counts only by what it adds.
#[test]
fn the_address_space_limit_counts_what_is_added() {
    let space = fresh();
    map(&space, 0, 8, RW);
    space
        .configure(|config| config.limits.address_space = 8 * PAGE)
        .unwrap();
    let fixed = |pages| {
        let request = MapRequest::anonymous(pages * PAGE, R).fixed(addr(0));
        space.map(&request).map_err(|error| error.errno())
    };
    assert_eq!(
        space
            .map(&MapRequest::anonymous(1, R))
            .map_err(|error| error.errno()),
        Err(Errno::ENOMEM)
    );
    assert!(fixed(8).is_ok());
    assert_eq!(fixed(9), Err(Errno::ENOMEM));
    assert_eq!(layout(&space), "0-8 r--p");
    space
        .configure(|config| config.limits.address_space = 0)
        .unwrap();
    let move_flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    assert_eq!(remap(&space, 0, 8, 8, move_flags, addr(100)), Ok(100));
    assert_eq!(remap(&space, 100, 8, 4, RemapFlags::empty(), 0), Ok(100));
}

/// [L4] Data is what is private and writable.
#[test]
fn the_data_limit_counts_private_writable_memory() {
    let space = fresh();
    space
        .configure(|config| config.limits.data = 4 * PAGE)
        .unwrap();
    let anonymous = |pages, prot| space.map(&MapRequest::anonymous(pages * PAGE, prot));
    assert_eq!(
        anonymous(8, RW).map_err(|error| error.errno()),
        Err(Errno::ENOMEM)
    );
    let at = anonymous(8, R).unwrap();
    assert_eq!(
        space
            .protect(at, 8 * PAGE, RW)
            .map_err(|error| error.errno()),
        Err(Errno::ENOMEM)
    );
    assert!(space.protect(at, 4 * PAGE, RW).is_ok());
    let shared = MapRequest {
        flags: MapFlags::SHARED | MapFlags::ANONYMOUS,
        ..MapRequest::anonymous(8 * PAGE, RW)
    };
    assert!(space.map(&shared).is_ok());
}

/// [L5] A hole ends mlock; what lies before is locked.
#[test]
fn locking_over_a_hole_locks_what_lies_before() {
    let space = fresh();
    map(&space, 0, 2, R);
    map(&space, 4, 2, R);
    assert_eq!(
        space
            .mlock(addr(0), 6 * PAGE)
            .map_err(|error| error.errno()),
        Err(Errno::ENOMEM)
    );
    assert_eq!(space.totals().locked_vm(), 2);
}

/// [B1] The break may move inside a page; a failed growth returns the old one.
#[test]
fn the_break_moves_by_bytes_and_stays_on_failure() {
    let space = fresh();
    space.set_brk(addr(0), addr(0));
    assert_eq!(space.brk(addr(2) + 5), addr(2) + 5);
    assert_eq!(layout(&space), "0-3 rw-p");
    assert_eq!(space.brk(addr(2) + 1), addr(2) + 1);
    assert_eq!(layout(&space), "0-3 rw-p");
    assert_eq!(space.brk(addr(2)), addr(2));
    assert_eq!(layout(&space), "0-2 rw-p");
    assert_eq!(space.brk(TOP + PAGE), addr(2));
    assert!(space.maps().trim_end().ends_with("[heap]"));
}

/// [B2] A hole is reported after both sides were advised.
#[test]
fn advice_passes_over_holes() {
    let space = fresh();
    map(&space, 0, 2, RW);
    map(&space, 4, 2, RW);
    assert_eq!(
        space
            .advise(addr(0), 6 * PAGE, Advice::DONTFORK)
            .map_err(|e| e.errno()),
        Err(Errno::ENOMEM)
    );
    assert_eq!(layout(&space.dup().unwrap()), "");
}

/// [B4] As far as it needs no contents: beyond the end of the file there is nothing.
#[test]
fn a_file_that_shrinks_takes_its_pages_along() {
    let object = object(4);
    let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
    for flags in [MapFlags::SHARED, MapFlags::PRIVATE] {
        object.set_len(4 * PAGE).unwrap();
        let space = fresh();
        map_file(&space, &file, (0, 4), RW, flags, 0).unwrap();
        space.touch(addr(0), 4 * PAGE, Access::Write).unwrap();
        object.set_len(PAGE + 1).unwrap();
        assert!(space.touch(addr(1), 1, Access::Read).is_ok());
        assert_eq!(
            space.touch(addr(2), 1, Access::Read),
            Err(FaultError::BeyondEnd(addr(2)))
        );
    }
}

/// [X12, X13] The child: unlocked, and its inherited history joins nothing new.
#[test]
fn a_child_is_unlocked_and_keeps_its_history_apart() {
    let space = fresh();
    map(&space, 0, 3, RW);
    space.touch(addr(0), 3 * PAGE, Access::Write).unwrap();
    space
        .mlockall(LockAllFlags::CURRENT | LockAllFlags::FUTURE)
        .unwrap();
    let child = space.dup().unwrap();
    assert_eq!(child.totals().locked_vm(), 0);
    child
        .map(&MapRequest::anonymous(PAGE, RW).fixed(addr(10)))
        .unwrap();
    assert_eq!(child.totals().locked_vm(), 0, "nor is what it maps itself");
    child.unmap(addr(10), PAGE).unwrap();
    map(&child, 1, 1, RW);
    assert_eq!(layout(&child), "0-1 rw-p, 1-2 rw-p, 2-3 rw-p");
    for space in [&child, &space] {
        let before = layout(space);
        space.protect(addr(0), PAGE, R).unwrap();
        space.protect(addr(0), PAGE, RW).unwrap();
        assert_eq!(layout(space), before);
    }
}

/// [P6] Aligning huge mappings doesn't waste the space that is left.
#[test]
fn huge_alignment_leaves_room_that_is_used() {
    let space = fresh();
    let big = space.map(&MapRequest::anonymous(0x11ff_f000, RW)).unwrap();
    space.unmap(big, 0x1a0_1000).unwrap();
    let next = space.map(&MapRequest::anonymous(0x1000_1000, RW)).unwrap();
    assert_eq!(
        next + 0x1000_1000,
        big + 0x1a0_1000,
        "just below what is left"
    );
    let aligned = space.map(&MapRequest::anonymous(4 << 20, R)).unwrap();
    assert_eq!(aligned % (2 << 20), 0);
}

/// [P7] Page by page in any direction: one mapping.
#[test]
fn mappings_made_page_by_page_are_one() {
    let space = fresh();
    for _ in 0..1000 {
        space.map(&MapRequest::anonymous(PAGE, RW)).unwrap();
    }
    for page in 0..1000 {
        map(&space, page, 1, R);
    }
    assert_eq!(space.totals().map_count, 2);
    assert_eq!(space.totals().total, 2000);
}

/// One more mapping than the limit says can exist, and unmapping never fails by it but for holes.
#[test]
fn the_limit_on_mappings_is_off_by_one() {
    let space = fresh();
    space.configure(|config| config.max_map_count = 3).unwrap();
    for i in 0..4 {
        map(&space, 4 * i, 3, if i % 2 == 0 { R } else { RW });
    }
    assert_eq!(space.totals().map_count, 4);
    assert_eq!(
        space
            .map(&MapRequest::anonymous(PAGE, R))
            .map_err(|e| e.errno()),
        Err(Errno::ENOMEM)
    );
    assert_eq!(
        space.unmap(addr(1), PAGE).map_err(|e| e.errno()),
        Err(Errno::ENOMEM)
    );
    space.unmap(addr(2), 3 * PAGE).unwrap();
    assert_eq!(layout(&space), "0-2 r--p, 5-7 rw-p, 8-11 r--p, 12-15 rw-p");
    assert!(
        space
            .maps_entries()
            .iter()
            .all(|entry| entry.flags.contains(VmaFlags::MAYREAD))
    );
}

/// Droppable memory can't be locked: with locking as the default it's made without, and merges with nothing.
#[test]
fn droppable_memory_is_not_locked_by_default() {
    let space = fresh();
    let request = |at| {
        let flags = MapFlags::DROPPABLE | MapFlags::ANONYMOUS;
        MapRequest {
            flags,
            ..MapRequest::anonymous(PAGE, RW)
        }
        .fixed(addr(at))
    };
    space.map(&request(0)).unwrap();
    space.mlockall(LockAllFlags::FUTURE).unwrap();
    space.map(&request(1)).unwrap();
    assert_eq!(layout(&space), "0-1 rw-p, 1-2 rw-p");
    assert_eq!(space.totals().locked_vm(), 0);
}
