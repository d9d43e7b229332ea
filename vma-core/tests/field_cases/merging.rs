//! Rows S12 to S15: what becomes one mapping and what doesn't.

use vma_core::{Access, AccessMode, AddressSpace, Advice, LockFlags, MapFlags, OpenFile};

use crate::common::{PAGE, RW};
use crate::{R, addr, fresh, layout, map, map_file, map_shared, object, protect};

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
    for order in [[0, 2], [2, 0]] {
        let space = fresh();
        for at in order {
            map_shared(&space, at, 2);
        }
        assert_eq!(space.totals().map_count, 2);
    }
}

/// Every way to mark a page and to unmark it.
type Mark = fn(&AddressSpace, u64);

fn advise(space: &AddressSpace, at: u64, advice: Advice) {
    space.advise(at, PAGE, advice).unwrap();
}

const MARKS: [(Mark, Mark); 9] = [
    (
        |space, at| advise(space, at, Advice::DONTFORK),
        |space, at| advise(space, at, Advice::DOFORK),
    ),
    (
        |space, at| advise(space, at, Advice::RANDOM),
        |space, at| advise(space, at, Advice::NORMAL),
    ),
    (
        |space, at| advise(space, at, Advice::SEQUENTIAL),
        |space, at| advise(space, at, Advice::NORMAL),
    ),
    (
        |space, at| advise(space, at, Advice::DONTDUMP),
        |space, at| advise(space, at, Advice::DODUMP),
    ),
    (
        |space, at| advise(space, at, Advice::WIPEONFORK),
        |space, at| advise(space, at, Advice::KEEPONFORK),
    ),
    (
        |space, at| advise(space, at, Advice::MERGEABLE),
        |space, at| advise(space, at, Advice::UNMERGEABLE),
    ),
    (
        |space, at| space.mlock(at, PAGE).unwrap(),
        |space, at| space.munlock(at, PAGE).unwrap(),
    ),
    (
        |space, at| space.mlock2(at, PAGE, LockFlags::ONFAULT).unwrap(),
        |space, at| space.munlock(at, PAGE).unwrap(),
    ),
    (
        |space, at| space.protect(at, PAGE, RW).unwrap(),
        |space, at| space.protect(at, PAGE, R).unwrap(),
    ),
];

/// [S14] Flags of all kinds split, and merge when they are taken back, wherever the page is.
#[test]
fn flags_that_are_taken_back_merge_again() {
    for (number, (mark, unmark)) in MARKS.into_iter().enumerate() {
        for at in 0..4 {
            let space = fresh();
            map(&space, 0, 4, R);
            mark(&space, addr(at));
            let parts = if at == 0 || at == 3 { 2 } else { 3 };
            assert_eq!(space.totals().map_count, parts, "mark {number}, page {at}");
            unmark(&space, addr(at));
            assert_eq!(layout(&space), "0-4 r--p", "mark {number}, page {at}");
            assert_eq!(space.totals().locked_vm(), 0);
        }
    }
}

/// A huge-page wish isn't taken back by its opposite.
#[test]
fn huge_page_advice_leaves_a_mark_either_way() {
    let space = fresh();
    map(&space, 0, 3, R);
    advise(&space, addr(1), Advice::HUGEPAGE);
    advise(&space, addr(1), Advice::NOHUGEPAGE);
    assert_eq!(space.totals().map_count, 3);
}

/// [S15] Neighbours that were written separately don't become one by what comes between; others do. The one between goes to the left.
#[test]
fn two_histories_cannot_be_joined() {
    for between in 1..4 {
        for (left, right) in [(true, true), (true, false), (false, true), (false, false)] {
            for read_only in [false, true] {
                let space = fresh();
                let high = 1 + between;
                map(&space, 0, 1, RW);
                map(&space, high, 1, RW);
                for (at, write) in [(0, left), (high, right)] {
                    let access = if write { Access::Write } else { Access::Read };
                    space.touch(addr(at), 1, access).unwrap();
                }
                if read_only {
                    // Made the same later, which merges by the same rule.
                    map(&space, 1, between, R);
                    protect(&space, 1, between, RW).unwrap();
                } else {
                    map(&space, 1, between, RW);
                }
                let expected = if left && right {
                    format!("0-{high} rw-p, {high}-{} rw-p", high + 1)
                } else {
                    format!("0-{} rw-p", high + 1)
                };
                assert_eq!(layout(&space), expected, "{left} {right} {read_only}");
            }
        }
    }
}

/// [S15] Written once after it was split by protection, memory has one history; split by advice, two.
#[test]
fn history_is_shared_over_borders_of_protection_alone() {
    for (by_advice, parts) in [(false, 1), (true, 2)] {
        let space = fresh();
        map(&space, 0, 4, RW);
        if by_advice {
            space.advise(addr(2), 2 * PAGE, Advice::DONTFORK).unwrap();
        } else {
            protect(&space, 2, 2, RW.union(vma_core::Prot::EXEC)).unwrap();
        }
        space.touch(addr(0), 4 * PAGE, Access::Write).unwrap();
        if by_advice {
            space.advise(addr(2), 2 * PAGE, Advice::DOFORK).unwrap();
        } else {
            protect(&space, 2, 2, RW).unwrap();
        }
        assert_eq!(space.totals().map_count, parts);
    }
}

/// Guard pages give anonymous memory a history, and mappings of files none.
#[test]
fn guard_pages_are_history_to_anonymous_memory_only() {
    let file = OpenFile::new(object(4), AccessMode::ReadWrite);
    for kind in 0..4 {
        let space = fresh();
        match kind {
            0 => map(&space, 0, 3, RW),
            1 => map_shared(&space, 0, 3),
            2 => drop(map_file(&space, &file, (0, 3), RW, MapFlags::PRIVATE, 0)),
            _ => drop(map_file(&space, &file, (0, 3), RW, MapFlags::SHARED, 0)),
        }
        advise(&space, addr(1), Advice::DONTFORK);
        space
            .advise(addr(0), 3 * PAGE, Advice::GUARD_INSTALL)
            .unwrap();
        advise(&space, addr(1), Advice::DOFORK);
        let parts = if kind == 0 { 3 } else { 1 };
        assert_eq!(space.totals().map_count, parts, "kind {kind}");
    }
}
