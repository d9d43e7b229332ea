//! Rows of other kinds that need no contents: children (X12, X13), placement and size (P6, P7), the limit on mappings.

use vma_core::{Access, Errno, LockAllFlags, MapFlags, MapRequest, VmaFlags};

use crate::common::{PAGE, RW};
use crate::{R, addr, fresh, layout, map};

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
