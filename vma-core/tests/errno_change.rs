//! Bad input to the calls that change what is mapped, and to those that only look.
#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::too_many_lines,
    reason = "one shape for errors of many types, and tables"
)]

mod common;

use common::{AT, PAGE, RW, TOP, refused, space};
use vma_core::{
    Access, AccessMode, Advice, Errno, FileKind, FileObject, LockAllFlags, LockFlags, MapFlags,
    MapRequest, MdweFlags, OpenFile, Prot, SyncFlags,
};

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
    let core = |start, len| {
        let mut pages = [9; 5];
        space
            .mincore(start, len, &mut pages)
            .map(|()| pages)
            .map_err(|e| e.errno())
    };
    assert_eq!(core(AT, 4 * PAGE), Ok([0, 0, 0, 0, 9]));
    assert_eq!(core(AT + 1, PAGE), Err(Errno::EINVAL));
    assert_eq!(core(AT, 5 * PAGE), Err(Errno::ENOMEM));
    assert_eq!(core(AT, u64::MAX), Err(Errno::ENOMEM));
    assert_eq!(core(TOP, 2 * PAGE), Err(Errno::ENOMEM));
    let short = space.mincore(AT, 4 * PAGE, &mut [0; 3]);
    assert_eq!(short.map_err(|e| e.errno()), Err(Errno::EFAULT));
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
