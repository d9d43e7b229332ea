//! Rows L1 to L6: limits and totals.

use vma_core::{
    AccessMode, AddressSpace, Errno, MapFlags, MapRequest, OpenFile, RemapFlags, Totals,
};

use crate::common::{PAGE, RW};
use crate::{FIXED, R, addr, fresh, layout, map, map_file, object, pieces, protect, remap};

fn limit_address_space(space: &AddressSpace, pages: u64) {
    space
        .configure(|config| config.limits.address_space = pages * PAGE)
        .unwrap();
}

fn map_fixed(space: &AddressSpace, at: u64, pages: u64) -> Result<(), Errno> {
    let request = MapRequest::anonymous(pages * PAGE, R).fixed(addr(at));
    space.map(&request).map(drop).map_err(|error| error.errno())
}

/// [L1] At the limit of the address space what replaces counts only by what it adds, however the two overlap.
#[test]
fn the_address_space_limit_counts_what_is_added() {
    for room in 0..4 {
        for at in 0..12 {
            for pages in 1..8 {
                let space = fresh();
                map(&space, 0, 8, RW);
                limit_address_space(&space, 8 + room);
                let replaced = 8_u64.saturating_sub(at).min(pages);
                let got = map_fixed(&space, at, pages);
                if pages - replaced <= room {
                    assert_eq!(got, Ok(()), "{room} {at} {pages}");
                    assert_eq!(space.totals().total, 8 + pages - replaced);
                } else {
                    assert_eq!(got, Err(Errno::ENOMEM));
                    // The edges have been split for nothing, and stay so.
                    let cuts = [at, at + pages]
                        .into_iter()
                        .filter(|cut| (1..8).contains(cut));
                    let mut expected = vec![(0, 8, "rw-p")];
                    for cut in cuts {
                        let (start, _, perms) = expected.pop().unwrap();
                        expected.extend([(start, cut, perms), (cut, 8, perms)]);
                    }
                    assert_eq!(layout(&space), pieces(&expected));
                }
            }
        }
    }
    let space = fresh();
    map(&space, 0, 8, RW);
    limit_address_space(&space, 8);
    let anywhere = space.map(&MapRequest::anonymous(1, R));
    assert_eq!(anywhere.map_err(|error| error.errno()), Err(Errno::ENOMEM));
}

/// [L2] What needs no more than there is works even beyond the limit.
#[test]
fn moving_and_shrinking_work_beyond_the_limit() {
    for limit in [0, 4, 8] {
        let space = fresh();
        map(&space, 0, 8, RW);
        limit_address_space(&space, limit);
        assert_eq!(remap(&space, 0, 8, 8, FIXED, addr(100)), Ok(100));
        assert_eq!(remap(&space, 100, 8, 4, RemapFlags::empty(), 0), Ok(100));
        assert_eq!(remap(&space, 100, 4, 2, FIXED, addr(50)), Ok(50));
        protect(&space, 50, 1, R).unwrap();
        space.unmap(addr(50), PAGE).unwrap();
        assert_eq!(layout(&space), "51-52 rw-p");
    }
}

/// [L3] A move that grows is judged before its destination makes room.
#[test]
fn a_growing_move_counts_without_what_it_replaces() {
    for growth in 1..3 {
        for room in 0..3 {
            let space = fresh();
            map(&space, 0, 4, RW);
            map(&space, 10, 6, R);
            limit_address_space(&space, 10 + room);
            let got = remap(&space, 0, 4, 4 + growth, FIXED, addr(10));
            if growth <= room {
                assert_eq!(got, Ok(10));
            } else {
                assert_eq!(got, Err(Errno::ENOMEM));
                assert_eq!(layout(&space), "0-4 rw-p, 10-16 r--p");
            }
        }
    }
}

/// [L4] Data is what is private and writable, however it became so.
#[test]
fn the_data_limit_counts_private_writable_memory() {
    let limited = || {
        let space = fresh();
        space
            .configure(|config| config.limits.data = 4 * PAGE)
            .unwrap();
        space
    };
    let file = OpenFile::new(object(16), AccessMode::ReadWrite);
    for pages in 1..8 {
        let fits = if pages <= 4 {
            Ok(())
        } else {
            Err(Errno::ENOMEM)
        };
        let space = limited();
        let request = MapRequest::anonymous(pages * PAGE, RW).fixed(addr(0));
        assert_eq!(
            space.map(&request).map(drop).map_err(|error| error.errno()),
            fits
        );
        let space = limited();
        let private = map_file(&space, &file, (0, pages), RW, MapFlags::PRIVATE, 0);
        assert_eq!(private.map(drop), fits);
        // Read-only memory counts when it becomes writable.
        let space = limited();
        map(&space, 0, 8, R);
        assert_eq!(protect(&space, 0, pages, RW), fits);
        assert_eq!(space.totals().data, if fits.is_ok() { pages } else { 0 });
        // Shared memory doesn't, nor do stacks.
        let space = limited();
        assert!(map_file(&space, &file, (0, pages), RW, MapFlags::SHARED, 0).is_ok());
        let mut stack = MapRequest::anonymous(pages * PAGE, RW);
        stack.flags |= MapFlags::GROWSDOWN;
        assert!(space.map(&stack.fixed(addr(20))).is_ok());
        assert_eq!(space.totals().data, 0);
    }
}

/// [L5] A hole ends mlock and munlock; what lies before is changed, what lies behind isn't.
#[test]
fn locking_over_a_hole_changes_what_lies_before() {
    for before in 0..4 {
        let space = fresh();
        if before > 0 {
            map(&space, 0, before, R);
        }
        map(&space, before + 1, 2, R);
        let range = (addr(0), (before + 3) * PAGE);
        let locked = space.mlock(range.0, range.1).map_err(|error| error.errno());
        assert_eq!(locked, Err(Errno::ENOMEM));
        assert_eq!(space.totals().locked_vm(), before);
        space.mlock(addr(before + 1), 2 * PAGE).unwrap();
        let unlocked = space
            .munlock(range.0, range.1)
            .map_err(|error| error.errno());
        assert_eq!(unlocked, Err(Errno::ENOMEM));
        assert_eq!(space.totals().locked_vm(), 2);
    }
}

/// Totals by adding up what maps shows.
fn added_up(space: &AddressSpace) -> (u64, u64) {
    let entries = space.maps_entries();
    let pages = entries.iter().map(|entry| (entry.end - entry.start) / PAGE);
    (entries.len() as u64, pages.sum())
}

/// [L6] However a mapping is cut, replaced or moved, and whatever happens to its file, the totals are those of what is left.
/// (`calls_model` recounts all totals after all calls.)
#[test]
fn totals_are_those_of_what_is_left() {
    let object = object(16);
    let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
    for from in 0..8 {
        for to in from + 1..=8 {
            let space = fresh();
            map_file(&space, &file, (0, 8), RW, MapFlags::PRIVATE, 0).unwrap();
            space.mlock(addr(0), 8 * PAGE).unwrap();
            space.unmap(addr(from), (to - from) * PAGE).unwrap();
            let left = 8 - (to - from);
            let check = |totals: Totals| {
                assert_eq!(
                    (totals.total, totals.data, totals.locked_vm()),
                    (left, left, left)
                );
                assert_eq!((totals.map_count, totals.total), added_up(&space));
            };
            check(space.totals());
            object.set_len(PAGE).unwrap();
            check(space.totals());
            map(&space, from, 1, R);
            assert_eq!(
                (space.totals().map_count, space.totals().total),
                added_up(&space)
            );
            space.unmap(addr(0), 8 * PAGE).unwrap();
            assert_eq!(space.totals(), Totals::default());
            object.set_len(16 * PAGE).unwrap();
        }
    }
}
