//! What a backend is told.

#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Mutex;

use vma_core::{AddressSpace, Backend, Domain, MapRequest, Piece, Prot, PublishError, SpaceConfig};

#[derive(Default)]
struct Recorder {
    zapped: Mutex<Vec<(u64, u64)>>,
}

impl Backend for Recorder {
    fn prepare(&self, _: u64, _: u64, _: &[Piece]) -> Result<(), PublishError> {
        Ok(())
    }

    fn commit(&self, _: u64, _: u64, _: &[Piece]) {}

    fn zap(&self, start: u64, end: u64) {
        self.zapped.lock().unwrap().push((start, end));
    }
}

/// Splitting a mapping rewrites its whole window, but only what is unmapped loses its pages.
#[test]
fn only_what_is_no_longer_mapped_is_zapped() {
    let backend = Recorder::default();
    let space =
        AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), backend).unwrap();
    let zapped = || std::mem::take(&mut *space.backend().zapped.lock().unwrap());
    let page = 4096;
    let at = space
        .map(&MapRequest::anonymous(5 * page, Prot::READ))
        .unwrap();
    space
        .protect(at + page, page, Prot::READ | Prot::WRITE)
        .unwrap();
    assert_eq!(zapped(), []);
    space.unmap(at + 3 * page, page).unwrap();
    assert_eq!(zapped(), [(at + 3 * page, at + 4 * page)]);
    space.unmap(at, 5 * page).unwrap();
    let all = zapped();
    assert!(
        all.iter().any(|(start, end)| *start <= at && *end > at),
        "{all:x?}"
    );
}
