//! Rows M1 to M8: mremap(2).

use vma_core::{Access, AccessMode, Errno, MapFlags, OpenFile, RemapFlags, RemapRequest, VmaFlags};

use crate::common::{PAGE, RW};
use crate::{
    FIXED, KEEP, R, RX, addr, fresh, layout, map, map_file, map_shared, object, pieces, remap,
};

/// [M1] Where the next page is taken growing needs another place; the neighbour, merged or not, is left alone.
#[test]
fn growing_into_a_neighbour_fails_or_moves() {
    for neighbour in [RW, R, RX] {
        for grown in 2..5 {
            let space = fresh();
            map(&space, 0, 1, RW);
            map(&space, 1, 1, neighbour);
            let before = layout(&space);
            let stays = remap(&space, 0, 1, grown, RemapFlags::empty(), 0);
            assert_eq!((stays, layout(&space)), (Err(Errno::ENOMEM), before));
            let moved = remap(&space, 0, 1, grown, RemapFlags::MAYMOVE, 0).unwrap();
            assert!(moved > grown);
            let guard = space.read();
            assert!(guard.find(addr(0)).is_none());
            assert_eq!(guard.find(addr(1)).unwrap().range().len(), PAGE);
            assert_eq!(guard.find(addr(moved)).unwrap().range().len(), grown * PAGE);
        }
    }
}

/// [M2] Into free space it grows where it is, and becomes one with what it reaches.
#[test]
fn growing_into_free_space_stays_in_place() {
    for flags in [RemapFlags::empty(), RemapFlags::MAYMOVE] {
        for grown in 2..=4 {
            let space = fresh();
            map(&space, 0, 1, RW);
            map(&space, 4, 1, RW);
            assert_eq!(remap(&space, 0, 1, grown, flags, 0), Ok(0));
            let expected = if grown == 4 {
                pieces(&[(0, 5, "rw-p")])
            } else {
                pieces(&[(0, grown, "rw-p"), (4, 5, "rw-p")])
            };
            assert_eq!(layout(&space), expected);
        }
    }
}

/// [M3] Sizes round up to pages, both of them.
#[test]
fn sizes_are_rounded_up() {
    for (old, new, pages) in [
        (1, PAGE + 1, 2),
        (1, 1, 1),
        (PAGE, 1, 1),
        (PAGE - 1, 2 * PAGE, 2),
        (1, 2 * PAGE + 1, 3),
    ] {
        let space = fresh();
        map(&space, 0, 1, RW);
        let request = RemapRequest {
            addr: addr(0),
            old_len: old,
            new_len: new,
            flags: RemapFlags::empty(),
            new_addr: 0,
        };
        assert_eq!(space.remap(&request).unwrap(), addr(0));
        assert_eq!(
            layout(&space),
            pieces(&[(0, pages, "rw-p")]),
            "{old} to {new}"
        );
    }
}

/// [M4] Arguments that make no sense are all `EINVAL`, whatever is mapped.
#[test]
fn impossible_arguments_are_invalid() {
    let huge = [0, 0_u64.wrapping_sub(PAGE), 1 << 47, u64::MAX];
    let request = |at, new_len, flags, to| RemapRequest {
        addr: at,
        old_len: PAGE,
        new_len,
        flags,
        new_addr: to,
    };
    let move_only = RemapFlags::FIXED;
    let unknown = RemapFlags::from_bits_retain(8);
    let mut requests: Vec<RemapRequest> = huge
        .into_iter()
        .map(|len| request(addr(0), len, RemapFlags::MAYMOVE, 0))
        .collect();
    requests.extend([
        request(addr(0), PAGE, unknown, 0),
        request(addr(0), PAGE, move_only, addr(9)),
        request(addr(0), PAGE, RemapFlags::DONTUNMAP, addr(9)),
        request(addr(0), 2 * PAGE, KEEP, addr(9)),
        request(addr(0) + 1, PAGE, RemapFlags::MAYMOVE, 0),
        request(addr(0), PAGE, FIXED, addr(9) + 1),
        request(addr(0), PAGE, FIXED, addr(0)),
        request(addr(0), PAGE, FIXED, 1 << 47),
    ]);
    for request in requests {
        for mapped in [true, false] {
            let space = fresh();
            if mapped {
                map(&space, 0, 2, RW);
            }
            let before = layout(&space);
            let got = space.remap(&request).map_err(|error| error.errno());
            assert_eq!(got, Err(Errno::EINVAL), "{request:x?}");
            assert_eq!(layout(&space), before);
        }
    }
}

/// [M5] Over several mappings: shrinking in place may, growing and resizing into another place may not.
#[test]
fn only_shrinking_spans_mappings() {
    for old in 3..=6 {
        let build = || {
            let space = fresh();
            map(&space, 0, 2, RW);
            map(&space, 2, 2, R);
            map(&space, 5, 1, RW);
            space
        };
        for (new, flags) in [
            (old + 1, RemapFlags::empty()),
            (old + 4, RemapFlags::MAYMOVE),
            (old + 1, FIXED),
        ] {
            let space = build();
            let before = layout(&space);
            assert_eq!(
                remap(&space, 0, old, new, flags, addr(20)),
                Err(Errno::EFAULT)
            );
            assert_eq!(layout(&space), before);
        }
        for new in 1..old {
            let space = build();
            assert_eq!(remap(&space, 0, old, new, RemapFlags::MAYMOVE, 0), Ok(0));
            let left = |from: u64, to: u64, perms| {
                // Nothing is left of what lies in the tail.
                [
                    (from, to.min(new).max(from), perms),
                    (from.max(old).min(to), to, perms),
                ]
            };
            let mut expected = Vec::new();
            for (from, to, perms) in [(0, 2, "rw-p"), (2, 4, "r--p"), (5, 6, "rw-p")] {
                expected.extend(left(from, to, perms));
            }
            assert_eq!(layout(&space), pieces(&expected), "{old} to {new}");
        }
    }
}

/// [M6] What refuses a move to a given place leaves what is there: the source is looked at first.
#[test]
fn a_refused_move_keeps_the_destination() {
    for (old, new) in [(2, 2), (2, 3), (3, 2)] {
        let space = fresh();
        map(&space, 10, 2, R);
        assert_eq!(
            remap(&space, 0, old, new, FIXED, addr(10)),
            Err(Errno::EFAULT)
        );
        assert_eq!(layout(&space), "10-12 r--p");
    }
    for growth in 1..3 {
        let space = fresh();
        map(&space, 10, 2, R);
        map(&space, 0, 2, RW);
        space
            .configure(|config| config.limits.address_space = 4 * PAGE)
            .unwrap();
        assert_eq!(
            remap(&space, 0, 2, 2 + growth, FIXED, addr(10)),
            Err(Errno::ENOMEM)
        );
        assert_eq!(layout(&space), "0-2 rw-p, 10-12 r--p");
    }
    for sealed in [0, 10] {
        let space = fresh();
        map(&space, 0, 2, RW);
        map(&space, 10, 2, R);
        space.seal(addr(sealed), PAGE, 0).unwrap();
        let before = layout(&space);
        assert_eq!(remap(&space, 0, 2, 2, FIXED, addr(10)), Err(Errno::EPERM));
        assert_eq!(remap(&space, 0, 2, 1, FIXED, addr(10)), Err(Errno::EPERM));
        assert_eq!(layout(&space), before);
    }
}

/// [M7] What stays behind was never written; every kind of mapping may stay behind.
#[test]
fn a_source_that_stays_loses_its_history() {
    for written in [false, true] {
        let space = fresh();
        map(&space, 0, 2, RW);
        if written {
            space.touch(addr(0), 1, Access::Write).unwrap();
        }
        assert_eq!(remap(&space, 0, 2, 2, KEEP, addr(50)), Ok(50));
        let entries = space.maps_entries();
        assert!(entries[0].anon.is_none());
        assert_eq!(entries[1].anon.is_none(), !written);
    }
    let space = fresh();
    let file = OpenFile::new(object(4), AccessMode::ReadWrite);
    for (number, flags) in [MapFlags::SHARED, MapFlags::PRIVATE]
        .into_iter()
        .enumerate()
    {
        let at = 20 * (1 + number as u64);
        map_file(&space, &file, (at, 2), RW, flags, 0).unwrap();
        assert_eq!(remap(&space, at, 2, 2, KEEP, addr(at + 9)), Ok(at + 9));
    }
    map_shared(&space, 60, 2);
    assert_eq!(
        remap(&space, 60, 2, 2, KEEP | RemapFlags::FIXED, addr(70)),
        Ok(70)
    );
    assert_eq!(
        layout(&space),
        "20-22 rw-s, 29-31 rw-s, 40-42 rw-p, 49-51 rw-p, 60-62 rw-s, 70-72 rw-s"
    );
}

/// [M7] Without `MREMAP_FIXED` the address is a wish, which has to be a possible one all the same.
#[test]
fn where_a_copy_goes_is_a_wish() {
    let space = fresh();
    map(&space, 0, 2, RW);
    map(&space, 20, 1, R);
    assert_eq!(
        remap(&space, 0, 2, 2, KEEP, addr(20) + 1),
        Err(Errno::EINVAL)
    );
    assert_eq!(
        remap(&space, 0, 2, 2, KEEP, u64::MAX - PAGE),
        Err(Errno::EINVAL)
    );
    assert!(
        remap(&space, 0, 2, 2, KEEP, addr(19)).unwrap() > 100,
        "taken"
    );
    assert_eq!(remap(&space, 0, 2, 2, KEEP, addr(30)), Ok(30));
    assert_eq!(&layout(&space)[..32], "0-2 rw-p, 20-21 r--p, 30-32 rw-p");
}

/// [M8] Part of a mapping moves and shrinks at once: the tail is gone, the rest of the mapping isn't.
#[test]
fn part_of_a_mapping_moves_and_shrinks() {
    for from in 0..3 {
        for old in 2..=8 {
            for new in 1..old {
                let space = fresh();
                map(&space, 0, 10, RW);
                assert_eq!(remap(&space, from, old, new, FIXED, addr(20)), Ok(20));
                let expected = [
                    (0, from, "rw-p"),
                    ((from + old).min(10), 10, "rw-p"),
                    (20, 20 + new, "rw-p"),
                ];
                assert_eq!(layout(&space), pieces(&expected), "{from} {old} {new}");
            }
        }
    }
}

/// Each mapping of a range moves with its flags; holes keep their distance and what lies under them stays.
#[test]
fn several_mappings_move_together() {
    for hole in 0..3 {
        let space = fresh();
        map(&space, 0, 2, RW);
        map(&space, 2 + hole, 2, R);
        space.mlock(addr(2 + hole), 2 * PAGE).unwrap();
        map(&space, 20, 4 + hole, RX);
        assert_eq!(
            remap(&space, 0, 4 + hole, 4 + hole, FIXED, addr(20)),
            Ok(20)
        );
        let expected = [
            (20, 22, "rw-p"),
            (22, 22 + hole, "r-xp"),
            (22 + hole, 24 + hole, "r--p"),
        ];
        assert_eq!(layout(&space), pieces(&expected));
        let locked = space
            .maps_entries()
            .into_iter()
            .filter(|entry| entry.flags.contains(VmaFlags::LOCKED));
        assert_eq!(
            locked.map(|entry| entry.start).collect::<Vec<_>>(),
            [addr(22 + hole)]
        );
    }
}
