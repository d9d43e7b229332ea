//! What the tests of bad input share.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test uses its part, and tests may panic"
)]

use std::sync::Arc;

use vma_core::{
    AccessMode, AddressSpace, Errno, FileKind, FileObject, MapFlags, MapRequest, OpenFile, Prot,
    SpaceConfig,
};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const TOP: u64 = 0x7fff_ffff_f000;
pub(crate) const AT: u64 = 0x10_0000_0000;
pub(crate) const RW: Prot = Prot::READ.union(Prot::WRITE);

/// Pages 0..4 rw, 4..6 free, 6..8 read-only shared file that can't be written, 8..10 sealed.
pub(crate) fn space() -> AddressSpace {
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

pub(crate) fn file(mode: AccessMode) -> Arc<OpenFile> {
    OpenFile::new(
        FileObject::builder(FileKind::Regular, "/f")
            .len(64 * PAGE)
            .build(),
        mode,
    )
}

/// Runs a call, and sees that a failed one has changed nothing.
pub(crate) fn refused<T, E>(
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
