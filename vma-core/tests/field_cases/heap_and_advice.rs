//! Rows B1 to B5: brk(2), madvise(2), msync(2), and files that end.

use std::sync::Arc;

use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FaultError, MapFlags, OpenFile, SyncFlags,
    VmaFlags,
};

use crate::common::{PAGE, RW, TOP};
use crate::{R, addr, fresh, layout, map, map_file, map_shared, object, pieces};

/// [B1] The break is a number of bytes, the heap is pages; a failed call returns the old break.
#[test]
fn the_break_moves_by_bytes_and_stays_on_failure() {
    let space = fresh();
    space.set_brk(addr(0), addr(0));
    let mut last = addr(0);
    for bytes in [
        1,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        5 * PAGE + 7,
        5 * PAGE + 1,
        5 * PAGE,
        2,
        1,
        0,
        3 * PAGE,
    ] {
        last = space.brk(addr(0) + bytes);
        assert_eq!(last, addr(0) + bytes);
        assert_eq!(layout(&space), pieces(&[(0, bytes.div_ceil(PAGE), "rw-p")]));
        for impossible in [addr(0) - 1, 0, TOP + PAGE, u64::MAX] {
            assert_eq!(space.brk(impossible), last, "{impossible:#x}");
        }
    }
    assert!(space.maps().trim_end().ends_with("[heap]"));
    map(&space, 5, 1, R);
    assert_eq!(
        space.brk(addr(5)),
        last,
        "a page has to stay free below what follows"
    );
    assert_eq!(space.brk(addr(4)), addr(4));
    space.seal(addr(3), PAGE, 0).unwrap();
    assert_eq!(space.brk(addr(2)), addr(4), "sealed memory doesn't go");
}

/// [B2] Advice that is kept passes over holes, wherever they are, and reports them in the end.
#[test]
fn advice_passes_over_holes() {
    let kept = [
        (Advice::DONTFORK, VmaFlags::DONTCOPY),
        (Advice::WIPEONFORK, VmaFlags::WIPEONFORK),
        (Advice::DONTDUMP, VmaFlags::DONTDUMP),
        (Advice::RANDOM, VmaFlags::RAND_READ),
        (Advice::NOHUGEPAGE, VmaFlags::NOHUGEPAGE),
    ];
    for (advice, flag) in kept {
        for hole in 0..5 {
            let space = fresh();
            map(&space, 0, 5, RW);
            space.unmap(addr(hole), PAGE).unwrap();
            let got = space.advise(addr(0), 5 * PAGE, advice);
            assert_eq!(got.map_err(|error| error.errno()), Err(Errno::ENOMEM));
            assert!(
                space
                    .maps_entries()
                    .iter()
                    .all(|entry| entry.flags.contains(flag))
            );
            if advice == Advice::DONTFORK {
                assert_eq!(layout(&space.dup().unwrap()), "");
            }
        }
    }
}

/// [B2] An advice that a mapping refuses stops there: what lies before keeps it, what lies behind doesn't get it.
#[test]
fn advice_stops_where_it_is_refused() {
    for at in 0..3 {
        let space = fresh();
        map(&space, 0, 3, RW);
        map_shared(&space, at, 1);
        let got = space.advise(addr(0), 3 * PAGE, Advice::WIPEONFORK);
        assert_eq!(got.map_err(|error| error.errno()), Err(Errno::EINVAL));
        let marked = |entry: &vma_core::MapsEntry| entry.flags.contains(VmaFlags::WIPEONFORK);
        let pages: u64 = space
            .maps_entries()
            .iter()
            .filter(|entry| marked(entry))
            .map(|entry| (entry.end - entry.start) / PAGE)
            .sum();
        assert_eq!(pages, at);
    }
}

/// Maps pages 0 and 1.
type Make = fn(&AddressSpace, &Arc<OpenFile>);

/// [B3] Only private anonymous memory can be wiped in children, and there it has no history.
#[test]
fn only_private_anonymous_memory_is_wiped_in_children() {
    let file = OpenFile::new(object(4), AccessMode::ReadWrite);
    let kinds: [(Make, Result<(), Errno>); 4] = [
        (|space, _| map(space, 0, 2, RW), Ok(())),
        (|space, _| map_shared(space, 0, 2), Err(Errno::EINVAL)),
        (
            |space, file| {
                map_file(space, file, (0, 2), RW, MapFlags::PRIVATE, 0).unwrap();
            },
            Err(Errno::EINVAL),
        ),
        (
            |space, file| {
                map_file(space, file, (0, 2), RW, MapFlags::SHARED, 0).unwrap();
            },
            Err(Errno::EINVAL),
        ),
    ];
    for (make, expected) in kinds {
        for page in 0..2 {
            let space = fresh();
            make(&space, &file);
            space.touch(addr(0), 2 * PAGE, Access::Write).unwrap();
            let got = space.advise(addr(page), PAGE, Advice::WIPEONFORK);
            assert_eq!(got.map_err(|error| error.errno()), expected);
            let child = space.dup().unwrap();
            assert_eq!(layout(&child), layout(&space));
            if expected.is_ok() {
                let guard = child.read();
                assert!(guard.find(addr(page)).unwrap().anon().is_none());
                assert!(!guard.find(addr(1 - page)).unwrap().anon().is_none());
            }
        }
    }
}

/// [B4] As far as it needs no contents: beyond the last page of the file there is nothing, however it's mapped, until it grows again.
#[test]
fn a_file_that_shrinks_takes_its_pages_along() {
    for flags in [MapFlags::SHARED, MapFlags::PRIVATE] {
        for offset in 0..3 {
            let object = object(4);
            let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
            let space = fresh();
            map_file(&space, &file, (0, 6), RW, flags, offset).unwrap();
            for len in [
                4 * PAGE,
                4 * PAGE - 1,
                PAGE + 1,
                PAGE,
                1,
                0,
                2 * PAGE,
                9 * PAGE,
            ] {
                object.set_len(len).unwrap();
                for page in 0..6 {
                    let expected = if (page + offset) * PAGE < len {
                        Ok(())
                    } else {
                        Err(FaultError::BeyondEnd(addr(page)))
                    };
                    for access in [Access::Read, Access::Write] {
                        assert_eq!(space.touch(addr(page), 1, access), expected, "{len:#x}");
                    }
                }
                assert_eq!(space.totals().map_count, 1, "the mapping stays");
            }
        }
    }
}

/// [B5] msync and mincore report a hole wherever it is; two ways of syncing at once are none.
#[test]
fn holes_are_reported_by_msync_and_mincore() {
    for hole in 0..4 {
        let space = fresh();
        map(&space, 0, 4, RW);
        assert!(space.mincore(addr(0), 4 * PAGE, &mut [0; 4]).is_ok());
        space.unmap(addr(hole), PAGE).unwrap();
        for flags in [
            SyncFlags::SYNC,
            SyncFlags::ASYNC,
            SyncFlags::INVALIDATE,
            SyncFlags::empty(),
        ] {
            let got = space.msync(addr(0), 4 * PAGE, flags);
            assert_eq!(got.map_err(|error| error.errno()), Err(Errno::ENOMEM));
        }
        let got = space.mincore(addr(0), 4 * PAGE, &mut [0; 4]);
        assert_eq!(got.map_err(|error| error.errno()), Err(Errno::ENOMEM));
        let both = space.msync(addr(0), PAGE, SyncFlags::SYNC | SyncFlags::ASYNC);
        assert_eq!(both.map_err(|error| error.errno()), Err(Errno::EINVAL));
    }
}
