//! Rows S1 to S11 and S16: mapping, unmapping, changing protection.

use vma_core::{
    AccessMode, AddressSpace, Advice, Errno, MapFlags, MapRequest, OpenFile, Prot, SpaceConfig,
};

use crate::common::{PAGE, RW, TOP};
use crate::{NONE, R, RX, addr, fresh, layout, map, map_file, object, pieces, protect};

/// [S1, S10] Whatever part of a mapping changes, the rest keeps its protection; [S2] undone piece by piece or at once, it's one
/// again.
#[test]
fn changing_part_of_a_mapping_leaves_the_rest() {
    for (prot, perms) in [
        (R, "r--p"),
        (NONE, "---p"),
        (RX, "r-xp"),
        (Prot::WRITE, "-w-p"),
    ] {
        for from in 0..5 {
            for to in from + 1..=5 {
                let space = fresh();
                map(&space, 0, 5, RW);
                protect(&space, from, to - from, prot).unwrap();
                let expected = [(0, from, "rw-p"), (from, to, perms), (to, 5, "rw-p")];
                assert_eq!(layout(&space), pieces(&expected));
                protect(&space, 0, 5, RW).unwrap();
                assert_eq!(layout(&space), "0-5 rw-p");
            }
        }
    }
}

/// [S2] Merging while walking: every page has its own protection, then a range over any of the borders gets one.
#[test]
fn one_change_over_many_mappings_joins_them() {
    for from in 0..6 {
        for to in from + 1..=6 {
            let space = fresh();
            map(&space, 0, 6, RW);
            for page in (1..6).step_by(2) {
                protect(&space, page, 1, R).unwrap();
            }
            protect(&space, from, to - from, RX).unwrap();
            let mut expected: Vec<(u64, u64, &str)> = Vec::new();
            for page in 0..6 {
                let perms = match page {
                    _ if (from..to).contains(&page) => "r-xp",
                    _ if page % 2 == 1 => "r--p",
                    _ => "rw-p",
                };
                match expected.last_mut() {
                    Some((_, end, last)) if *last == perms => *end = page + 1,
                    _ => expected.push((page, page + 1, perms)),
                }
            }
            assert_eq!(layout(&space), pieces(&expected), "{from}..{to}");
        }
    }
}

/// What refuses mprotect(2).
#[derive(Clone, Copy, Debug)]
enum Obstacle {
    ReadOnlyFile,
    Sealed,
    Hole,
}

/// [S3] The mappings before the one that may not change are changed, wherever it is; the others aren't.
#[test]
fn a_refused_change_keeps_its_prefix() {
    for (obstacle, errno) in [
        (Obstacle::ReadOnlyFile, Errno::EACCES),
        (Obstacle::Sealed, Errno::EPERM),
        (Obstacle::Hole, Errno::ENOMEM),
    ] {
        for at in 0..4 {
            let space = fresh();
            map(&space, 0, 4, R);
            let perms = match obstacle {
                Obstacle::ReadOnlyFile => {
                    let file = OpenFile::new(object(4), AccessMode::Read);
                    map_file(&space, &file, (at, 1), R, MapFlags::SHARED, 0).unwrap();
                    "r--s"
                }
                Obstacle::Sealed => {
                    space.seal(addr(at), PAGE, 0).unwrap();
                    "r--p"
                }
                Obstacle::Hole => {
                    space.unmap(addr(at), PAGE).unwrap();
                    ""
                }
            };
            assert_eq!(protect(&space, 0, 4, RW), Err(errno), "{obstacle:?}");
            let mut expected = vec![(0, at, "rw-p"), (at, at + 1, perms), (at + 1, 4, "r--p")];
            if perms.is_empty() {
                expected.remove(1);
            }
            assert_eq!(layout(&space), pieces(&expected), "{obstacle:?} at {at}");
        }
    }
}

/// [S4, X18] A mapping that is refused, for whatever reason, leaves what it would have replaced.
#[test]
fn a_refused_mapping_replaces_nothing() {
    let (shared, private) = (MapFlags::SHARED, MapFlags::PRIVATE);
    let cases = [
        (AccessMode::Read, RW, shared, Errno::EACCES),
        (AccessMode::Write, R, shared, Errno::EACCES),
        (AccessMode::Write, R, private, Errno::EACCES),
        (AccessMode::ReadWrite, R, MapFlags::empty(), Errno::EINVAL),
        (
            AccessMode::ReadWrite,
            R,
            private | MapFlags::GROWSDOWN,
            Errno::EINVAL,
        ),
        (
            AccessMode::ReadWrite,
            R,
            MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
            Errno::EOPNOTSUPP,
        ),
    ];
    for (mode, prot, flags, errno) in cases {
        for at in 0..3 {
            let space = fresh();
            map(&space, 0, 4, RW);
            let file = OpenFile::new(object(4), mode);
            let got = map_file(&space, &file, (at, 2), prot, flags, 0);
            assert_eq!(got, Err(errno), "{mode:?} {prot:?} {flags:?}");
            assert_eq!(layout(&space), "0-4 rw-p");
        }
    }
}

/// [S5] A hint that is taken wholly or in part is dropped, one that is free is rounded down and taken.
#[test]
fn hints_are_rounded_down_and_dropped_where_taken() {
    for at in 0..8 {
        for unaligned in [0, 1, PAGE - 1] {
            let space = fresh();
            map(&space, 4, 1, RW);
            let hint = MapRequest {
                addr: addr(at) + unaligned,
                ..MapRequest::anonymous(2 * PAGE, R)
            };
            let got = space.map(&hint).unwrap();
            let is_free = at + 2 <= 4 || at > 4;
            assert_eq!(got == addr(at), is_free, "page {at}");
            assert!(is_free || got > addr(100));
            assert_eq!(space.find_page(4), "rw-p", "what was there is intact");
        }
    }
}

/// [S6] What a length of 0 means to each call, on mapped and on unmapped memory.
#[test]
fn nothing_is_an_error_to_some_calls_and_none_to_others() {
    for at in [addr(0), addr(50)] {
        let space = fresh();
        map(&space, 0, 1, RW);
        let mmap = space.map(&MapRequest::anonymous(0, RW).fixed(at));
        assert_eq!(mmap.map_err(|error| error.errno()), Err(Errno::EINVAL));
        let munmap = space.unmap(at, 0);
        assert_eq!(munmap.map_err(|error| error.errno()), Err(Errno::EINVAL));
        assert_eq!(
            space.protect(at, 0, R).map_err(|error| error.errno()),
            Ok(())
        );
        for advice in [Advice::NORMAL, Advice::DONTNEED, Advice::DONTFORK] {
            assert!(space.advise(at, 0, advice).is_ok());
        }
        assert!(space.mlock(at, 0).is_ok() && space.munlock(at, 0).is_ok());
        assert!(space.seal(at, 0, 0).is_ok());
        assert_eq!(layout(&space), "0-1 rw-p");
    }
}

/// [S7] Ranges that reach or pass the top.
#[test]
fn ranges_that_wrap_around_are_refused() {
    let space = fresh();
    map(&space, 0, 1, RW);
    let (whole, page) = (0_u64.wrapping_sub(PAGE), PAGE);
    let top = whole;
    let unmap = |at, len| space.unmap(at, len).map_err(|error| error.errno());
    for pages in 1..4 {
        let request = MapRequest::anonymous(pages * page, RW).fixed(top);
        assert_eq!(
            space.map(&request).map_err(|error| error.errno()),
            Err(Errno::ENOMEM)
        );
        assert_eq!(unmap(top, pages * page), Err(Errno::EINVAL));
    }
    for len in [whole, whole - page, 1 << 63, TOP + 1] {
        assert_eq!(unmap(addr(0), len), Err(Errno::EINVAL), "{len:#x}");
    }
    let advice = space.advise(addr(0), whole, Advice::NORMAL);
    assert_eq!(advice.map_err(|error| error.errno()), Err(Errno::EINVAL));
    let change = space.protect(addr(0), whole, R);
    assert_eq!(change.map_err(|error| error.errno()), Err(Errno::ENOMEM));
    assert_eq!(layout(&space), "0-1 rw-p");
}

/// [S8] Lengths round up to whole pages, in every call.
#[test]
fn lengths_round_up_to_pages() {
    for (len, pages) in [
        (1, 1),
        (PAGE - 1, 1),
        (PAGE, 1),
        (PAGE + 1, 2),
        (0x1a34, 2),
        (2 * PAGE, 2),
    ] {
        let space = fresh();
        space
            .map(&MapRequest::anonymous(len + 3 * PAGE, RW).fixed(addr(0)))
            .unwrap();
        assert_eq!(layout(&space), pieces(&[(0, pages + 3, "rw-p")]));
        space.protect(addr(0), len, R).unwrap();
        assert_eq!(
            layout(&space),
            pieces(&[(0, pages, "r--p"), (pages, pages + 3, "rw-p")])
        );
        space.unmap(addr(0), len).unwrap();
        assert_eq!(layout(&space), pieces(&[(pages, pages + 3, "rw-p")]));
    }
}

/// [S9] A start that isn't aligned changes nothing, not even the pages behind it.
#[test]
fn an_unaligned_start_changes_nothing() {
    for byte in [1, 0x800, PAGE - 1] {
        let space = fresh();
        map(&space, 0, 3, RW);
        let at = addr(1) + byte;
        let errnos = [
            space.unmap(at, PAGE).map_err(|error| error.errno()),
            space.protect(at, PAGE, R).map_err(|error| error.errno()),
            space
                .advise(at, PAGE, Advice::DONTFORK)
                .map_err(|error| error.errno()),
            space.seal(at, PAGE, 0).map_err(|error| error.errno()),
            space
                .map(&MapRequest::anonymous(PAGE, R).fixed(at))
                .map(drop)
                .map_err(|error| error.errno()),
        ];
        assert_eq!(errnos, [Err(Errno::EINVAL); 5]);
        assert_eq!(layout(&space), "0-3 rw-p");
    }
}

/// [S11] The kind of a mapping is one of four numbers, not two flags.
#[test]
fn a_mapping_is_of_exactly_one_kind() {
    let file = OpenFile::new(object(4), AccessMode::ReadWrite);
    for kind in 0..16 {
        let space = fresh();
        let flags = MapFlags::from_bits_retain(kind);
        let of_file = map_file(&space, &file, (0, 1), R, flags, 0);
        assert_eq!(of_file.is_ok(), matches!(kind, 1..=3), "file, {kind}");
        let anonymous = MapRequest {
            flags: flags | MapFlags::ANONYMOUS,
            ..MapRequest::anonymous(PAGE, R)
        };
        let anonymous = space.map(&anonymous.fixed(addr(2)));
        assert_eq!(
            anonymous.is_ok(),
            matches!(kind, 1 | 2 | 8),
            "anonymous, {kind}"
        );
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
    for pages in [1, 3] {
        for start in [0, TOP - pages * PAGE] {
            let request = MapRequest::anonymous(pages * PAGE, R).fixed(start);
            space.map(&request).unwrap();
            let guard = reader.pin();
            for at in [start, start + pages * PAGE - 1] {
                let found = space.find(at, &guard).unwrap();
                assert_eq!((found.start(), found.end()), (start, start + pages * PAGE));
            }
            drop(guard);
            space.protect(start, pages * PAGE, NONE).unwrap();
            space.unmap(start, pages * PAGE).unwrap();
            assert_eq!(space.totals().map_count, 0);
        }
    }
}

trait FindPage {
    /// Permissions of a page, as maps shows them.
    fn find_page(&self, page: u64) -> String;
}

impl FindPage for AddressSpace {
    fn find_page(&self, page: u64) -> String {
        let guard = self.read();
        let perms = guard.find(addr(page)).unwrap().flags().perms();
        perms.map(char::from).iter().collect()
    }
}
