//! What a backend is told.

#![allow(clippy::unwrap_used, reason = "tests may")]

use std::ops::Range;
use std::sync::Mutex;

use vma_core::{
    AddressSpace, Backend, ConfigError, Domain, Fault, FaultError, Faulted, FileUnmap, Inherited,
    MapFlags, MapRequest, PageChange, Prot, PublishError, RemapFlags, RemapRequest, SpaceConfig,
    Vma,
};

const PAGE: u64 = 4096;

#[derive(Default)]
struct Recorder {
    changes: Mutex<Vec<PageChange>>,
    refuse: Mutex<bool>,
}

impl Backend for Recorder {
    type Taken = ();

    fn attach(&self, _: &Domain, _: &SpaceConfig) -> Result<(), ConfigError> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &[PageChange],
        _holes: &[Range<u64>],
        _mapped: &[Range<u64>],
    ) -> Result<Option<()>, PublishError> {
        if *self.refuse.lock().unwrap() {
            return Err(PublishError::NoMemory);
        }
        Ok(Some(()))
    }

    fn commit(&self, changes: &[PageChange], _holes: &[Range<u64>], (): &mut ()) {
        self.changes.lock().unwrap().extend(changes);
    }

    fn finish(&self, (): ()) {}

    fn fault(&self, _: &Fault<'_>) -> Result<Faulted, FaultError> {
        Ok(Faulted::Done)
    }

    fn is_resident(&self, _: u64, _: &Vma, _: u64) -> bool {
        false
    }

    fn dup(&self) -> Result<Self, PublishError> {
        Ok(Recorder::default())
    }

    fn dup_pages(&self, _: &Self, _: &[Inherited]) -> Result<(), PublishError> {
        Ok(())
    }

    fn unmap_file(&self, _: &FileUnmap<'_>) {}

    fn unmap_removed(&self, _: u64, _: u64) {}

    fn settle(&self) {}
}

fn space() -> AddressSpace<Recorder> {
    let backend = Recorder::default();
    AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), backend).unwrap()
}

fn told(space: &AddressSpace<Recorder>) -> Vec<PageChange> {
    std::mem::take(&mut *space.backend().changes.lock().unwrap())
}

/// Splitting a mapping rewrites its whole window, but only what is unmapped loses its pages.
#[test]
fn only_what_is_no_longer_mapped_is_zapped() {
    let space = space();
    let at = space
        .map(&MapRequest::anonymous(5 * PAGE, Prot::READ))
        .unwrap();
    assert_eq!(told(&space), []);
    let both = Prot::READ | Prot::WRITE;
    space.protect(at + PAGE, PAGE, both).unwrap();
    let (start, end) = (at + PAGE, at + 2 * PAGE);
    assert_eq!(told(&space), [PageChange::Protect { start, end }]);
    space.unmap(at + 3 * PAGE, PAGE).unwrap();
    let (start, end) = (at + 3 * PAGE, at + 4 * PAGE);
    assert_eq!(told(&space), [PageChange::Zap { start, end }]);
    let over = MapRequest {
        addr: at,
        flags: MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED,
        ..MapRequest::anonymous(2 * PAGE, both)
    };
    space.map(&over).unwrap();
    let (start, end) = (at, at + 2 * PAGE);
    assert_eq!(told(&space), [PageChange::Zap { start, end }]);
}

/// Pages move before what is left of the source goes, and after what was at the destination.
#[test]
fn pages_move_in_the_order_of_the_call() {
    let space = space();
    let at = space
        .map(&MapRequest::anonymous(8 * PAGE, Prot::READ))
        .unwrap();
    let (from, to, len) = (at, at + 4 * PAGE, 2 * PAGE);
    let request = RemapRequest {
        addr: from,
        old_len: len,
        new_len: len,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: to,
    };
    space.remap(&request).unwrap();
    let zap = |start: u64| PageChange::Zap {
        start,
        end: start + len,
    };
    let moved = PageChange::Move { from, to, len };
    assert_eq!(told(&space), [zap(to), moved, zap(from)]);
}

/// A backend that can't prepare makes the call fail, and nothing has changed.
#[test]
fn a_call_that_cannot_be_prepared_changes_nothing() {
    let space = space();
    let at = space
        .map(&MapRequest::anonymous(4 * PAGE, Prot::READ))
        .unwrap();
    let before = (space.totals(), space.stats());
    *space.backend().refuse.lock().unwrap() = true;
    assert!(space.unmap(at, PAGE).is_err());
    assert!(space.protect(at, PAGE, Prot::empty()).is_err());
    assert_eq!((space.totals(), space.stats()), before);
    assert_eq!(told(&space), []);
}
