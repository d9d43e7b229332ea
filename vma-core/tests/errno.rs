//! Bad input: each kind gets its error, changes nothing, and never panics.

use std::sync::Arc;

use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FileKind, FileObject, LockAllFlags, LockFlags,
    MapFlags, MapRequest, MdweFlags, OpenFile, Prot, RemapFlags, RemapRequest, Seals, SpaceConfig,
    SpecialMapping, SyncFlags, VmaFlags,
};

const PAGE: u64 = 4096;
const TOP: u64 = 0x7fff_ffff_f000;
const AT: u64 = 0x10_0000_0000;
const RW: Prot = Prot::READ.union(Prot::WRITE);

/// Pages 0..4 rw, 4..6 free, 6..8 read-only shared file that can't be written, 8..10 sealed.
fn space() -> AddressSpace {
    let space = AddressSpace::new(SpaceConfig {
        ipc_lock: true,
        ..SpaceConfig::default()
    })
    .unwrap();
    space
        .map(&MapRequest::anonymous(4 * PAGE, RW).fixed(AT))
        .unwrap();
    let file = MapRequest::file(
        file(AccessMode::Read),
        0,
        2 * PAGE,
        Prot::READ,
        MapFlags::SHARED,
    );
    space.map(&file.fixed(AT + 6 * PAGE)).unwrap();
    space
        .map(&MapRequest::anonymous(2 * PAGE, Prot::READ).fixed(AT + 8 * PAGE))
        .unwrap();
    space.seal(AT + 8 * PAGE, 2 * PAGE, 0).unwrap();
    space
}

fn file(mode: AccessMode) -> Arc<OpenFile> {
    OpenFile::new(
        FileObject::builder(FileKind::Regular, "/f")
            .len(64 * PAGE)
            .build(),
        mode,
    )
}

/// Runs a call, and sees that a failed one has changed nothing.
fn refused<T, E>(
    space: &AddressSpace,
    call: impl FnOnce() -> Result<T, E>,
    errno: impl Fn(E) -> Errno,
) -> Errno {
    let before = (space.maps(), space.totals());
    let Err(error) = call() else {
        panic!("the call succeeded");
    };
    assert_eq!((space.maps(), space.totals()), before);
    space.check().unwrap();
    errno(error)
}

#[test]
fn mmap_refuses_each_bad_argument_with_its_error() {
    let space = space();
    let good = MapRequest::anonymous(PAGE, RW);
    let of_file = |mode, prot, flags| MapRequest::file(file(mode), 0, PAGE, prot, flags);
    let shared = MapFlags::SHARED;
    let unmappable = OpenFile::new(
        FileObject::builder(FileKind::Unmappable, "pipe").build(),
        AccessMode::Read,
    );
    let no_exec = OpenFile::new(
        FileObject::builder(FileKind::Regular, "/n")
            .no_exec(true)
            .build(),
        AccessMode::Read,
    );
    let append = OpenFile::new(
        FileObject::builder(FileKind::Regular, "/a")
            .append_only(true)
            .build(),
        AccessMode::ReadWrite,
    );
    let sealed = OpenFile::new(
        FileObject::builder(FileKind::Shmem, "m")
            .len(PAGE)
            .seals(Seals::WRITE)
            .build(),
        AccessMode::ReadWrite,
    );
    let kind = |flags| MapRequest {
        flags,
        ..good.clone()
    };
    let table = [
        (
            MapRequest {
                offset: 1,
                ..good.clone()
            },
            Errno::EINVAL,
        ),
        (
            MapRequest {
                len: 0,
                ..good.clone()
            },
            Errno::EINVAL,
        ),
        (
            MapRequest {
                len: u64::MAX,
                ..good.clone()
            },
            Errno::ENOMEM,
        ),
        (
            MapRequest {
                len: TOP + PAGE,
                ..good.clone()
            },
            Errno::ENOMEM,
        ),
        (
            MapRequest {
                len: 1 << 63,
                ..good.clone()
            },
            Errno::ENOMEM,
        ),
        (
            MapRequest {
                offset: u64::MAX - PAGE + 1,
                len: 1 << 60,
                ..good.clone()
            },
            Errno::ENOMEM,
        ),
        (good.clone().fixed(AT + 1), Errno::EINVAL),
        (good.clone().fixed(TOP), Errno::ENOMEM),
        (good.clone().fixed(TOP + PAGE), Errno::ENOMEM),
        (good.clone().fixed(u64::MAX - PAGE + 1), Errno::ENOMEM),
        (good.clone().fixed(u64::MAX), Errno::EPERM),
        (good.clone().fixed(0), Errno::EPERM),
        (
            MapRequest {
                flags: good.flags | MapFlags::FIXED_NOREPLACE,
                addr: AT,
                ..good.clone()
            },
            Errno::EEXIST,
        ),
        (good.clone().fixed(AT + 8 * PAGE), Errno::EPERM),
        (kind(MapFlags::ANONYMOUS), Errno::EINVAL),
        (
            kind(MapFlags::ANONYMOUS | MapFlags::SHARED_VALIDATE),
            Errno::EINVAL,
        ),
        (
            kind(MapFlags::ANONYMOUS | MapFlags::from_bits_retain(4)),
            Errno::EINVAL,
        ),
        (
            kind(MapFlags::ANONYMOUS | shared | MapFlags::GROWSDOWN),
            Errno::EINVAL,
        ),
        (
            kind(MapFlags::ANONYMOUS | MapFlags::DROPPABLE | MapFlags::LOCKED),
            Errno::EINVAL,
        ),
        (
            kind(MapFlags::ANONYMOUS | MapFlags::PRIVATE | MapFlags::HUGETLB),
            Errno::ENOMEM,
        ),
        (
            kind(
                MapFlags::ANONYMOUS
                    | MapFlags::PRIVATE
                    | MapFlags::HUGETLB
                    | MapFlags::from_bits_retain(7 << 26),
            ),
            Errno::EINVAL,
        ),
        (kind(MapFlags::PRIVATE), Errno::EBADF),
        (of_file(AccessMode::Read, RW, shared), Errno::EACCES),
        (
            of_file(AccessMode::Write, Prot::READ, MapFlags::PRIVATE),
            Errno::EACCES,
        ),
        (
            of_file(AccessMode::Write, Prot::WRITE, shared),
            Errno::EACCES,
        ),
        (
            of_file(AccessMode::ReadWrite, RW, MapFlags::empty()),
            Errno::EINVAL,
        ),
        (
            of_file(
                AccessMode::ReadWrite,
                RW,
                MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
            ),
            Errno::EOPNOTSUPP,
        ),
        (
            of_file(
                AccessMode::ReadWrite,
                RW,
                MapFlags::PRIVATE | MapFlags::GROWSDOWN,
            ),
            Errno::EINVAL,
        ),
        (
            MapRequest {
                offset: 0x7fff_ffff_ffff_f000,
                ..of_file(AccessMode::Read, Prot::READ, shared)
            },
            Errno::EOVERFLOW,
        ),
        (
            MapRequest {
                offset: u64::MAX - PAGE + 1,
                ..of_file(AccessMode::Read, Prot::READ, shared)
            },
            Errno::EOVERFLOW,
        ),
        (
            MapRequest::file(unmappable, 0, PAGE, Prot::READ, MapFlags::PRIVATE),
            Errno::ENODEV,
        ),
        (
            MapRequest::file(no_exec, 0, PAGE, Prot::READ | Prot::EXEC, MapFlags::PRIVATE),
            Errno::EPERM,
        ),
        (MapRequest::file(append, 0, PAGE, RW, shared), Errno::EACCES),
        (MapRequest::file(sealed, 0, PAGE, RW, shared), Errno::EPERM),
    ];
    for (request, errno) in table {
        let got = refused(&space, || space.map(&request), |error| error.errno());
        assert_eq!(got, errno, "{request:?}");
    }
}

#[test]
fn mmap_runs_into_each_limit_with_its_error() {
    let limited = |change: fn(&mut SpaceConfig), request: &MapRequest| {
        let space = space();
        space.configure(change).unwrap();
        refused(&space, || space.map(request), |error| error.errno())
    };
    let good = MapRequest::anonymous(PAGE, RW);
    let locked = MapRequest {
        flags: good.flags | MapFlags::LOCKED,
        ..good.clone()
    };
    assert_eq!(limited(|c| c.max_map_count = 2, &good), Errno::ENOMEM);
    assert_eq!(
        limited(|c| c.limits.address_space = 8 * PAGE, &good),
        Errno::ENOMEM
    );
    assert_eq!(limited(|c| c.limits.data = 4 * PAGE, &good), Errno::ENOMEM);
    assert_eq!(
        limited(
            |c| c.overcommit = vma_core::Overcommit::Heuristic { memory_pages: 0 },
            &good
        ),
        Errno::ENOMEM
    );
    let memlock =
        |bytes| move |c: &mut SpaceConfig| (c.ipc_lock, c.limits.memlock) = (false, bytes);
    let space = space();
    space.configure(memlock(0)).unwrap();
    assert_eq!(
        refused(&space, || space.map(&locked), |error| error.errno()),
        Errno::EPERM
    );
    space.configure(memlock(PAGE - 1)).unwrap();
    assert_eq!(
        refused(&space, || space.map(&locked), |error| error.errno()),
        Errno::EAGAIN
    );
    space.configure(memlock(PAGE)).unwrap();
    assert!(space.map(&locked).is_ok());
    space.set_mdwe(MdweFlags::REFUSE_EXEC_GAIN).unwrap();
    let both = MapRequest::anonymous(PAGE, RW | Prot::EXEC);
    assert_eq!(
        refused(&space, || space.map(&both), |error| error.errno()),
        Errno::EACCES
    );
}

/// Ranges that no call accepts, and what munmap, mprotect, madvise, mseal and msync say.
#[test]
fn bad_ranges_have_each_call_its_own_error() {
    let space = space();
    let table = [
        // (start, length, munmap, mprotect, madvise, mseal, msync)
        (
            AT + 1,
            PAGE,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::EINVAL,
        ),
        (
            AT,
            u64::MAX - PAGE + 1,
            Errno::EINVAL,
            Errno::ENOMEM,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::ENOMEM,
        ),
        (
            TOP + PAGE,
            PAGE,
            Errno::EINVAL,
            Errno::ENOMEM,
            Errno::ENOMEM,
            Errno::ENOMEM,
            Errno::ENOMEM,
        ),
        (
            u64::MAX - PAGE + 1,
            PAGE,
            Errno::EINVAL,
            Errno::ENOMEM,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::ENOMEM,
        ),
        (
            u64::MAX,
            1,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::EINVAL,
            Errno::EINVAL,
        ),
        (
            AT + 4 * PAGE,
            PAGE,
            Errno::EPERM,
            Errno::ENOMEM,
            Errno::ENOMEM,
            Errno::ENOMEM,
            Errno::ENOMEM,
        ),
    ];
    for (start, len, munmap, mprotect, madvise, mseal, msync) in table {
        if munmap != Errno::EPERM {
            assert_eq!(
                refused(&space, || space.unmap(start, len), |e| e.errno()),
                munmap,
                "munmap {start:#x}"
            );
        }
        assert_eq!(
            refused(&space, || space.protect(start, len, RW), |e| e.errno()),
            mprotect,
            "mprotect {start:#x}"
        );
        assert_eq!(
            refused(
                &space,
                || space.advise(start, len, Advice::RANDOM),
                |e| e.errno()
            ),
            madvise,
            "madvise {start:#x}"
        );
        assert_eq!(
            refused(&space, || space.seal(start, len, 0), |e| e.errno()),
            mseal,
            "mseal {start:#x}"
        );
        assert_eq!(
            refused(
                &space,
                || space.msync(start, len, SyncFlags::SYNC),
                |e| e.errno()
            ),
            msync,
            "msync {start:#x}"
        );
    }
    assert_eq!(
        refused(&space, || space.unmap(AT, 0), |e| e.errno()),
        Errno::EINVAL
    );
    // A length that rounds up to 0 is an error for some, and nothing to do for msync.
    assert_eq!(
        refused(&space, || space.seal(AT, u64::MAX, 0), |e| e.errno()),
        Errno::EINVAL
    );
    assert!(space.msync(AT, u64::MAX, SyncFlags::SYNC).is_ok());
    // Length 0 does nothing, even where nothing is mapped.
    for start in [AT, AT + 4 * PAGE] {
        assert!(space.protect(start, 0, RW).is_ok());
        assert!(space.advise(start, 0, Advice::RANDOM).is_ok());
        assert!(space.seal(start, 0, 0).is_ok());
        assert!(space.msync(start, 0, SyncFlags::SYNC).is_ok());
    }
}

#[test]
fn mprotect_refuses_each_bad_argument_with_its_error() {
    let space = space();
    let table = [
        (AT, PAGE, Prot::from_bits_retain(0x10), Errno::EINVAL),
        (AT, PAGE, Prot::GROWSDOWN | Prot::GROWSUP, Errno::EINVAL),
        (AT, PAGE, Prot::READ | Prot::GROWSDOWN, Errno::EINVAL),
        (AT, PAGE, Prot::READ | Prot::GROWSUP, Errno::EINVAL),
        (AT + 6 * PAGE, PAGE, RW, Errno::EACCES),
        (AT + 8 * PAGE, PAGE, Prot::READ, Errno::EPERM),
        (
            AT + 4 * PAGE,
            PAGE,
            Prot::READ | Prot::GROWSDOWN,
            Errno::ENOMEM,
        ),
    ];
    for (start, len, prot, errno) in table {
        assert_eq!(
            refused(&space, || space.protect(start, len, prot), |e| e.errno()),
            errno,
            "{prot:?}"
        );
    }
    space.configure(|c| c.max_map_count = 3).unwrap();
    assert_eq!(
        refused(
            &space,
            || space.protect(AT, PAGE, Prot::READ),
            |e| e.errno()
        ),
        Errno::ENOMEM
    );
    space
        .configure(|c| (c.max_map_count, c.limits.data) = (100, 3 * PAGE))
        .unwrap();
    space.protect(AT, 4 * PAGE, Prot::READ).unwrap();
    assert_eq!(
        refused(&space, || space.protect(AT, 4 * PAGE, RW), |e| e.errno()),
        Errno::ENOMEM
    );
    space.set_mdwe(MdweFlags::REFUSE_EXEC_GAIN).unwrap();
    let exec = Prot::READ | Prot::EXEC;
    assert_eq!(
        refused(&space, || space.protect(AT, PAGE, exec), |e| e.errno()),
        Errno::EACCES
    );
}

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
fn locking_refuses_each_bad_argument_with_its_error() {
    let space = space();
    let bad_flags = LockFlags::from_bits_retain(2);
    assert_eq!(
        refused(&space, || space.mlock2(AT, PAGE, bad_flags), |e| e.errno()),
        Errno::EINVAL
    );
    assert_eq!(
        refused(&space, || space.mlock(AT + 4 * PAGE, PAGE), |e| e.errno()),
        Errno::ENOMEM
    );
    assert_eq!(
        refused(&space, || space.munlock(AT + 4 * PAGE, PAGE), |e| e.errno()),
        Errno::ENOMEM
    );
    assert_eq!(
        refused(
            &space,
            || space.mlock(u64::MAX - PAGE + 1, 2 * PAGE),
            |e| e.errno()
        ),
        Errno::EINVAL
    );
    for flags in [0, 4, 8, 9] {
        let flags = LockAllFlags::from_bits_retain(flags);
        assert_eq!(
            refused(&space, || space.mlockall(flags), |e| e.errno()),
            Errno::EINVAL
        );
    }
    space
        .configure(|c| (c.ipc_lock, c.limits.memlock) = (false, 0))
        .unwrap();
    assert_eq!(
        refused(&space, || space.mlock(AT, PAGE), |e| e.errno()),
        Errno::EPERM
    );
    assert_eq!(
        refused(
            &space,
            || space.mlockall(LockAllFlags::CURRENT),
            |e| e.errno()
        ),
        Errno::EPERM
    );
    space.configure(|c| c.limits.memlock = PAGE).unwrap();
    assert_eq!(
        refused(&space, || space.mlock(AT, 2 * PAGE), |e| e.errno()),
        Errno::ENOMEM
    );
    assert_eq!(
        refused(
            &space,
            || space.mlockall(LockAllFlags::CURRENT),
            |e| e.errno()
        ),
        Errno::ENOMEM
    );
    // What is locked already isn't counted twice.
    assert!(space.mlock(AT, PAGE).is_ok() && space.mlock(AT, PAGE).is_ok());
}

#[test]
fn advice_that_does_not_fit_is_refused() {
    let space = space();
    let advise =
        |start, advice| refused(&space, || space.advise(start, PAGE, advice), |e| e.errno());
    for number in [5, 7, 26, 99, 100, 101, 104, -1, i32::MAX, i32::MIN] {
        assert_eq!(advise(AT, Advice(number)), Errno::EINVAL, "{number}");
    }
    assert_eq!(advise(AT, Advice::REMOVE), Errno::EINVAL);
    assert_eq!(advise(AT + 6 * PAGE, Advice::REMOVE), Errno::EACCES);
    assert_eq!(advise(AT + 6 * PAGE, Advice::FREE), Errno::EINVAL);
    assert_eq!(advise(AT + 6 * PAGE, Advice::WIPEONFORK), Errno::EINVAL);
    assert_eq!(advise(AT + 6 * PAGE, Advice::POPULATE_WRITE), Errno::EINVAL);
    assert_eq!(advise(AT + 8 * PAGE, Advice::DONTNEED), Errno::EPERM);
    assert_eq!(advise(AT, Advice::COLLAPSE), Errno::EINVAL);
    space.configure(|c| c.max_map_count = 3).unwrap();
    assert_eq!(advise(AT, Advice::RANDOM), Errno::EAGAIN);
    space.configure(|c| c.max_map_count = 100).unwrap();
    space.mlock(AT, PAGE).unwrap();
    for refused in [
        Advice::DONTNEED,
        Advice::FREE,
        Advice::COLD,
        Advice::PAGEOUT,
        Advice::GUARD_INSTALL,
    ] {
        assert_eq!(advise(AT, refused), Errno::EINVAL);
    }
    assert!(space.advise(AT, PAGE, Advice::DONTNEED_LOCKED).is_ok());
}

#[test]
fn msync_and_mincore_judge_flags_ranges_and_locks() {
    let space = space();
    let sync = |flags| {
        space
            .msync(AT, PAGE, SyncFlags::from_bits_retain(flags))
            .map_err(|e| e.errno())
    };
    assert_eq!(sync(8), Err(Errno::EINVAL));
    assert_eq!(sync(5), Err(Errno::EINVAL));
    assert_eq!(sync(4), Ok(()));
    space.mlock(AT, PAGE).unwrap();
    assert_eq!(sync(2), Err(Errno::EBUSY));
    let core = |start, len| space.mincore(start, len).map_err(|e| e.errno());
    assert_eq!(core(AT, 4 * PAGE), Ok(()));
    assert_eq!(core(AT + 1, PAGE), Err(Errno::EINVAL));
    assert_eq!(core(AT, 5 * PAGE), Err(Errno::ENOMEM));
    assert_eq!(core(AT, u64::MAX), Err(Errno::ENOMEM));
    assert_eq!(core(TOP, 2 * PAGE), Err(Errno::ENOMEM));
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

#[test]
fn touching_reports_the_signal() {
    let space = space();
    let touch = |addr, access| space.touch(addr, 1, access);
    assert!(touch(AT, Access::Write).is_ok());
    assert!(matches!(
        touch(AT + 4 * PAGE, Access::Read),
        Err(vma_core::FaultError::Unmapped(_))
    ));
    assert!(matches!(
        touch(AT + 6 * PAGE, Access::Write),
        Err(vma_core::FaultError::Denied { .. })
    ));
    assert!(matches!(
        touch(AT, Access::Execute),
        Err(vma_core::FaultError::Denied { .. })
    ));
    assert!(matches!(
        touch(u64::MAX, Access::Read),
        Err(vma_core::FaultError::Unmapped(_))
    ));
    let short = OpenFile::new(
        FileObject::builder(FileKind::Regular, "/s")
            .len(PAGE + 1)
            .build(),
        AccessMode::Read,
    );
    let at = space
        .map(&MapRequest::file(
            short,
            0,
            4 * PAGE,
            Prot::READ,
            MapFlags::PRIVATE,
        ))
        .unwrap();
    assert!(space.touch(at, 2 * PAGE, Access::Read).is_ok());
    let end = at + 2 * PAGE;
    assert_eq!(
        space.touch(at, 3 * PAGE, Access::Read),
        Err(vma_core::FaultError::BeyondEnd(end))
    );
}
