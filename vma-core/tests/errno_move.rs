//! Bad input to mremap, `remap_file_pages`, brk and to the embedder's own calls.
#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::too_many_lines,
    reason = "one shape for errors of many types, and tables"
)]

mod common;

use common::{AT, PAGE, TOP, refused, space};
use vma_core::{
    AddressSpace, Errno, MapFlags, Prot, RemapFlags, RemapRequest, SpaceConfig, SpecialMapping,
    VmaFlags,
};

#[test]
fn mremap_refuses_each_bad_argument_with_its_error() {
    let space = space();
    let (may, fixed, keep) = (
        RemapFlags::MAYMOVE,
        RemapFlags::FIXED,
        RemapFlags::DONTUNMAP,
    );
    let request = |addr, old_pages: u64, new_pages: u64, flags, new_addr| RemapRequest {
        addr,
        old_len: old_pages * PAGE,
        new_len: new_pages * PAGE,
        flags,
        new_addr,
    };
    let to = AT + 100 * PAGE;
    let good = request(AT, 4, 4, may | fixed, to);
    let table = [
        (
            RemapRequest {
                flags: RemapFlags::from_bits_retain(8),
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                addr: AT + 1,
                ..good
            },
            Errno::EINVAL,
        ),
        (RemapRequest { new_len: 0, ..good }, Errno::EINVAL),
        (
            RemapRequest {
                new_len: u64::MAX - PAGE + 1,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                new_len: 1 << 47,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                new_len: u64::MAX,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                flags: fixed,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                flags: keep,
                ..good
            },
            Errno::EINVAL,
        ),
        (request(AT, 4, 5, may | keep, to), Errno::EINVAL),
        (
            RemapRequest {
                new_addr: to + 1,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                new_addr: TOP,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                new_addr: u64::MAX - PAGE + 1,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                new_addr: AT + PAGE,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                old_len: u64::MAX - PAGE,
                new_len: PAGE,
                ..good
            },
            Errno::EINVAL,
        ),
        (
            RemapRequest {
                new_addr: 0,
                ..good
            },
            Errno::EPERM,
        ),
        (request(AT + 4 * PAGE, 1, 1, may, 0), Errno::EFAULT),
        (request(TOP, 1, 1, may, 0), Errno::EFAULT),
        (request(u64::MAX - PAGE + 1, 1, 2, may, 0), Errno::EFAULT),
        (request(AT, 5, 6, may, 0), Errno::EFAULT),
        (request(AT, 1, 2, RemapFlags::empty(), 0), Errno::ENOMEM),
        (request(AT, 0, 1, may, 0), Errno::EINVAL),
        (
            request(AT + 6 * PAGE, 0, 1, RemapFlags::empty(), 0),
            Errno::ENOMEM,
        ),
        (request(AT + 8 * PAGE, 1, 2, may, 0), Errno::EPERM),
        (request(AT, 1, 1, may | fixed, AT + 8 * PAGE), Errno::EPERM),
        (request(AT, 1 << 30, 1 << 31, may, 0), Errno::EFAULT),
    ];
    for (request, errno) in table {
        assert_eq!(
            refused(&space, || space.remap(&request), |e| e.errno()),
            errno,
            "{request:?}"
        );
    }
    let grow = request(AT, 4, 7, may, 0);
    let limited = |change: fn(&mut SpaceConfig)| {
        space.configure(change).unwrap();
        let got = refused(&space, || space.remap(&grow), |e| e.errno());
        space
            .configure(|c| {
                *c = SpaceConfig {
                    ipc_lock: true,
                    mmap_base: c.mmap_base,
                    ..SpaceConfig::default()
                }
            })
            .unwrap();
        got
    };
    assert_eq!(
        limited(|c| c.limits.address_space = 9 * PAGE),
        Errno::ENOMEM
    );
    assert_eq!(limited(|c| c.limits.data = 5 * PAGE), Errno::ENOMEM);
    // Three mappings exist: with 4 slots below the limit a move is allowed, with 3 it isn't.
    assert_eq!(limited(|c| c.max_map_count = 6), Errno::ENOMEM);
    space.mlock(AT, 4 * PAGE).unwrap();
    assert_eq!(
        limited(|c| (c.ipc_lock, c.limits.memlock) = (false, 6 * PAGE)),
        Errno::EAGAIN
    );
}

#[test]
fn remap_file_pages_wants_one_shared_mapping() {
    let space = space();
    let none = MapFlags::empty();
    let call = |start, len, prot, pgoff| {
        refused(
            &space,
            || space.remap_file_pages(start, len, prot, pgoff, none),
            |e| e.errno(),
        )
    };
    assert_eq!(call(AT, PAGE, Prot::empty(), 0), Errno::EINVAL);
    assert_eq!(call(AT, PAGE, Prot::READ, 0), Errno::EINVAL);
    assert_eq!(call(AT, 0, Prot::empty(), 0), Errno::EINVAL);
    assert_eq!(call(AT, u64::MAX, Prot::empty(), 0), Errno::EINVAL);
    assert_eq!(call(AT, PAGE, Prot::empty(), u64::MAX), Errno::EINVAL);
    assert_eq!(
        call(u64::MAX - PAGE + 1, PAGE, Prot::empty(), 0),
        Errno::EINVAL
    );
}

#[test]
fn brk_that_cannot_move_returns_the_old_break() {
    let space = space();
    let heap = AT - (1 << 20);
    space.set_brk(heap, heap);
    assert_eq!(space.brk(0), heap);
    assert_eq!(space.brk(heap + 100), heap + 100);
    for impossible in [
        0,
        heap - 1,
        AT,
        AT + PAGE,
        TOP + PAGE,
        u64::MAX,
        u64::MAX - PAGE,
    ] {
        assert_eq!(
            refused(&space, || space.try_brk(impossible), |e| e.errno()),
            Errno::ENOMEM
        );
        assert_eq!(space.brk(impossible), heap + 100);
    }
    // One page has to stay free below the next mapping.
    assert_eq!(space.brk(AT - PAGE + 1), heap + 100);
    assert_eq!(space.brk(AT - PAGE), AT - PAGE);
}

#[test]
fn embedders_mappings_and_configurations_are_checked_too() {
    let space = space();
    let flags = VmaFlags::READ | VmaFlags::MAYREAD;
    let table = [
        (AT, AT, Errno::EINVAL),
        (AT + PAGE, AT, Errno::EINVAL),
        (AT + 1, AT + PAGE, Errno::EINVAL),
        (AT, AT + 1, Errno::EINVAL),
        (TOP, TOP + PAGE, Errno::EINVAL),
        (u64::MAX - PAGE + 1, u64::MAX, Errno::EINVAL),
        (0, u64::MAX, Errno::EINVAL),
        (AT + 3 * PAGE, AT + 5 * PAGE, Errno::EEXIST),
    ];
    for (start, end, errno) in table {
        let mapping = SpecialMapping::anonymous(start, end, flags);
        assert_eq!(
            refused(&space, || space.insert_special(&mapping), |e| e.errno()),
            errno
        );
    }
    assert!(space.configure(|c| c.page_size = 8192).is_err());
    assert!(space.configure(|c| c.task_size = 1 << 40).is_err());
    assert!(space.configure(|c| c.mmap_base = Some(5)).is_err());
    assert!(
        AddressSpace::new(SpaceConfig {
            page_size: 0,
            ..SpaceConfig::default()
        })
        .is_err()
    );
}

#[test]
fn names_of_memory_are_checked() {
    let space = space();
    let name = |text: &str| space.set_name(AT, PAGE, Some(text)).map_err(|e| e.errno());
    assert_eq!(name("x"), Err(Errno::EINVAL), "not built in by default");
    space.configure(|c| c.anon_names = true).unwrap();
    for bad in ["a[b", "a]b", "a\\b", "a$b", "a`b", "a\nb", &"x".repeat(80)] {
        assert_eq!(name(bad), Err(Errno::EINVAL), "{bad:?}");
    }
    assert_eq!(name(&"x".repeat(79)), Ok(()));
    assert_eq!(
        space
            .set_name(AT + 6 * PAGE, PAGE, Some("x"))
            .map_err(|e| e.errno()),
        Err(Errno::EBADF)
    );
    assert_eq!(
        space
            .set_name(AT + 4 * PAGE, PAGE, Some("x"))
            .map_err(|e| e.errno()),
        Err(Errno::ENOMEM)
    );
    assert_eq!(
        space
            .set_name(AT, u64::MAX, Some("x"))
            .map_err(|e| e.errno()),
        Err(Errno::EINVAL)
    );
    assert!(space.maps().contains(&format!("[anon:{}]", "x".repeat(79))));
    space.set_name(AT, PAGE, None).unwrap();
    assert_eq!(
        space.totals().map_count,
        3,
        "equal neighbours are one again"
    );
}
