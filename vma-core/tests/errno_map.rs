//! Bad input to mmap: each kind gets its error, changes nothing, and never panics.
#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::too_many_lines,
    reason = "one shape for errors of many types, and tables"
)]

mod common;

use common::{AT, PAGE, RW, TOP, file, refused, space};
use vma_core::{
    AccessMode, Errno, FileKind, FileObject, MapFlags, MapRequest, MdweFlags, OpenFile, Prot,
    Seals, SpaceConfig,
};

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
