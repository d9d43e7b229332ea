//! Random sequences of calls against a naive model that knows single pages only, with the structural checker
//! after each call. `rangemap` is a second oracle for what is mapped how.
#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::unwrap_used,
    reason = "one shape for errors of many types; a test may panic"
)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use rangemap::RangeMap;
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FileKind, FileObject, MapFlags, MapRequest,
    OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig, VmaFlags,
};

const PAGE: u64 = 4096;
const BASE: u64 = 0x10_0000_0000;
/// Pages of the arena that the calls play in.
const ARENA: u64 = 48;

/// What the model knows of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    prot: u64,
    locked: bool,
    random: bool,
    sealed: bool,
    /// Page of the file, for file mappings.
    of_file: Option<u64>,
}

#[derive(Clone, Debug)]
enum Call {
    Map {
        at: u64,
        pages: u64,
        prot: u64,
        file: bool,
        offset: u64,
    },
    Unmap {
        at: u64,
        pages: u64,
    },
    Protect {
        at: u64,
        pages: u64,
        prot: u64,
    },
    Lock {
        at: u64,
        pages: u64,
        on: bool,
    },
    Random {
        at: u64,
        pages: u64,
        on: bool,
    },
    Move {
        at: u64,
        pages: u64,
        to: u64,
    },
    Resize {
        at: u64,
        from: u64,
        to: u64,
    },
    Seal {
        at: u64,
        pages: u64,
    },
    Touch {
        at: u64,
        write: bool,
    },
    Place {
        pages: u64,
        prot: u64,
    },
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..ARENA, 1..12u64).prop_map(|(at, pages)| (at, pages.min(ARENA - at)))
}

fn call() -> impl Strategy<Value = Call> {
    let prot = 0..8u64;
    prop_oneof![
        6 => (range(), prot.clone(), any::<bool>(), 0..8u64)
            .prop_map(|((at, pages), prot, file, offset)| Call::Map { at, pages, prot, file, offset }),
        4 => range().prop_map(|(at, pages)| Call::Unmap { at, pages }),
        5 => (range(), prot.clone()).prop_map(|((at, pages), prot)| Call::Protect { at, pages, prot }),
        2 => (range(), any::<bool>()).prop_map(|((at, pages), on)| Call::Lock { at, pages, on }),
        2 => (range(), any::<bool>()).prop_map(|((at, pages), on)| Call::Random { at, pages, on }),
        3 => (range(), 0..ARENA).prop_map(|((at, pages), to)| Call::Move { at, pages, to }),
        3 => (0..ARENA, 1..8u64, 1..8u64).prop_map(|(at, from, to)| Call::Resize { at, from, to }),
        1 => (0..ARENA, 1..3u64).prop_map(|(at, pages)| Call::Seal { at, pages }),
        4 => (0..ARENA, any::<bool>()).prop_map(|(at, write)| Call::Touch { at, write }),
        1 => (1..5u64, prot).prop_map(|(pages, prot)| Call::Place { pages, prot }),
    ]
}

#[derive(Default)]
struct Model {
    pages: BTreeMap<u64, Page>,
}

impl Model {
    fn any_sealed(&self, at: u64, pages: u64) -> bool {
        self.pages
            .range(at..at + pages)
            .any(|(_, page)| page.sealed)
    }

    /// Applies `change` page by page up to the first hole or refusal; the errno of what stopped it.
    fn walk(
        &mut self,
        at: u64,
        pages: u64,
        mut change: impl FnMut(&mut Page) -> Option<Errno>,
    ) -> Option<Errno> {
        for number in at..at + pages {
            match self.pages.get_mut(&number) {
                None => return Some(Errno::ENOMEM),
                Some(page) => {
                    if let Some(errno) = change(page) {
                        return Some(errno);
                    }
                }
            }
        }
        None
    }

    fn expect(&mut self, call: &Call) -> Option<Errno> {
        match *call {
            Call::Map {
                at,
                pages,
                prot,
                file,
                offset,
            } => {
                if self.any_sealed(at, pages) {
                    return Some(Errno::EPERM);
                }
                for i in 0..pages {
                    let of_file = file.then_some(offset + i);
                    let page = Page {
                        prot,
                        locked: false,
                        random: false,
                        sealed: false,
                        of_file,
                    };
                    self.pages.insert(at + i, page);
                }
                None
            }
            Call::Unmap { at, pages } => {
                if self.any_sealed(at, pages) {
                    return Some(Errno::EPERM);
                }
                self.pages
                    .retain(|number, _| !(at..at + pages).contains(number));
                None
            }
            Call::Protect { at, pages, prot } => self.walk(at, pages, |page| {
                if page.sealed {
                    return Some(Errno::EPERM);
                }
                page.prot = prot;
                None
            }),
            Call::Lock { at, pages, on } => {
                let result = self.walk(at, pages, |page| {
                    page.locked = on;
                    None
                });
                // Pages without access can't be made present, which is reported once all are marked.
                let absent = |page: &Page| page.prot == 0;
                let unreachable = on
                    && self
                        .pages
                        .range(at..at + pages)
                        .any(|(_, page)| absent(page));
                result.or(unreachable.then_some(Errno::ENOMEM))
            }
            Call::Random { at, pages, on } => {
                // Holes are passed over, and reported in the end.
                let hole = (at..at + pages).any(|number| !self.pages.contains_key(&number));
                for (_, page) in self.pages.range_mut(at..at + pages) {
                    page.random = on;
                }
                hole.then_some(Errno::ENOMEM)
            }
            Call::Seal { at, pages } => {
                if (at..at + pages).any(|number| !self.pages.contains_key(&number)) {
                    return Some(Errno::ENOMEM);
                }
                self.walk(at, pages, |page| {
                    page.sealed = true;
                    None
                })
            }
            Call::Move { at, pages, to } => self.expect_move(at, pages, to),
            Call::Touch { .. } | Call::Resize { .. } | Call::Place { .. } => None,
        }
    }

    /// mremap with a fixed destination and equal lengths: all pages keep their distance.
    fn expect_move(&mut self, at: u64, pages: u64, to: u64) -> Option<Errno> {
        if at < to + pages && to < at + pages {
            return Some(Errno::EINVAL);
        }
        if !self.pages.contains_key(&at) {
            return Some(Errno::EFAULT);
        }
        // With seals in play VMAs decide how far it gets; the caller keeps such moves out.
        let moved: Vec<_> = self
            .pages
            .range(at..at + pages)
            .map(|(number, page)| (*number, *page))
            .collect();
        for (number, page) in moved {
            self.pages.remove(&number);
            self.pages.insert(number - at + to, page);
        }
        None
    }
}

fn prot_of(flags: VmaFlags) -> u64 {
    (flags & VmaFlags::ACCESS).bits()
}

/// What the space says of each page of the arena.
fn observe(space: &AddressSpace) -> BTreeMap<u64, Page> {
    let mut pages = BTreeMap::new();
    for entry in space.maps_entries() {
        for number in (entry.start - BASE) / PAGE..(entry.end - BASE) / PAGE {
            let inside = number - (entry.start - BASE) / PAGE;
            let page = Page {
                prot: prot_of(entry.flags),
                locked: entry.flags.contains(VmaFlags::LOCKED),
                random: entry.flags.contains(VmaFlags::RAND_READ),
                sealed: entry.flags.contains(VmaFlags::SEALED),
                of_file: entry.file.as_ref().map(|_| entry.offset / PAGE + inside),
            };
            pages.insert(number, page);
        }
    }
    pages
}

fn perms_by_rangemap(pages: &BTreeMap<u64, Page>) -> RangeMap<u64, u64> {
    let mut map = RangeMap::new();
    for (number, page) in pages {
        map.insert(*number..*number + 1, page.prot);
    }
    map
}

fn apply(space: &AddressSpace, file: &std::sync::Arc<OpenFile>, call: &Call) -> Result<(), Errno> {
    let addr = |page: u64| BASE + page * PAGE;
    match *call {
        Call::Map {
            at,
            pages,
            prot,
            file: of_file,
            offset,
        } => {
            let mut request =
                MapRequest::anonymous(pages * PAGE, Prot::from_bits_retain(prot)).fixed(addr(at));
            if of_file {
                request.flags -= MapFlags::ANONYMOUS;
                request.file = Some(file.clone());
                request.offset = offset * PAGE;
            }
            space
                .map(&request)
                .map(|_| ())
                .map_err(|error| error.errno())
        }
        Call::Unmap { at, pages } => space
            .unmap(addr(at), pages * PAGE)
            .map_err(|error| error.errno()),
        Call::Protect { at, pages, prot } => space
            .protect(addr(at), pages * PAGE, Prot::from_bits_retain(prot))
            .map_err(|error| error.errno()),
        Call::Lock {
            at,
            pages,
            on: true,
        } => space
            .mlock(addr(at), pages * PAGE)
            .map_err(|error| error.errno()),
        Call::Lock {
            at,
            pages,
            on: false,
        } => space
            .munlock(addr(at), pages * PAGE)
            .map_err(|error| error.errno()),
        Call::Random { at, pages, on } => {
            let advice = if on { Advice::RANDOM } else { Advice::NORMAL };
            space
                .advise(addr(at), pages * PAGE, advice)
                .map_err(|error| error.errno())
        }
        Call::Move { at, pages, to } => space
            .remap(&RemapRequest {
                addr: addr(at),
                old_len: pages * PAGE,
                new_len: pages * PAGE,
                flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                new_addr: addr(to),
            })
            .map(|_| ())
            .map_err(|error| error.errno()),
        Call::Resize { at, from, to } => space
            .remap(&RemapRequest {
                addr: addr(at),
                old_len: from * PAGE,
                new_len: to * PAGE,
                flags: RemapFlags::empty(),
                new_addr: 0,
            })
            .map(|_| ())
            .map_err(|error| error.errno()),
        Call::Seal { at, pages } => space
            .seal(addr(at), pages * PAGE, 0)
            .map_err(|error| error.errno()),
        Call::Touch { at, write } => {
            let access = if write { Access::Write } else { Access::Read };
            // Faults change identities, not pages.
            let _ = space.touch(addr(at), 1, access);
            Ok(())
        }
        Call::Place { pages, prot } => {
            // Far above the arena, and gone again.
            let request = MapRequest::anonymous(pages * PAGE, Prot::from_bits_retain(prot));
            let addr = space.map(&request).map_err(|error| error.errno())?;
            space
                .unmap(addr, pages * PAGE)
                .map_err(|error| error.errno())
        }
    }
}

/// Whether the model can say what a call does: seals make the outcome of moves depend on VMA borders.
fn predictable(model: &Model, call: &Call) -> bool {
    match *call {
        Call::Move { at, pages, to } => {
            to + pages <= ARENA && !model.any_sealed(at, pages) && !model.any_sealed(to, pages)
        }
        _ => true,
    }
}

/// A destination's pages are gone before the source arrives, but only where a source page arrives.
fn clear_destination(model: &mut Model, call: &Call) {
    if let Call::Move { at, pages, to } = *call
        && !(at < to + pages && to < at + pages)
        && model.pages.contains_key(&at)
    {
        let arriving: Vec<u64> = model
            .pages
            .range(at..at + pages)
            .map(|(number, _)| number - at + to)
            .collect();
        for number in arriving {
            model.pages.remove(&number);
        }
    }
}

fn run(calls: &[Call]) {
    let config = SpaceConfig {
        ipc_lock: true,
        ..SpaceConfig::default()
    };
    let space = AddressSpace::new(config).unwrap();
    let object = FileObject::builder(FileKind::Regular, "/f")
        .len(1 << 20)
        .build();
    let file = OpenFile::new(object, AccessMode::ReadWrite);
    let mut model = Model::default();
    for (i, call) in calls.iter().enumerate() {
        if !predictable(&model, call) {
            continue;
        }
        clear_destination(&mut model, call);
        let expected = model.expect(call);
        let got = apply(&space, &file, call);
        space
            .check()
            .unwrap_or_else(|error| panic!("{error} after call {i}, {call:?}"));
        let seen = observe(&space);
        if let Call::Resize { at, from, to } = *call {
            check_resize(&model, &seen, at, from, to, got);
            model.pages = seen;
            continue;
        }
        assert_eq!(got.err(), expected, "call {i}, {call:?}");
        assert_eq!(seen, model.pages, "after call {i}, {call:?}");
        assert_eq!(perms_by_rangemap(&seen), perms_by_rangemap(&model.pages));
    }
}

/// Growing in place adds pages behind, shrinking takes them away; nothing else changes.
fn check_resize(
    model: &Model,
    seen: &BTreeMap<u64, Page>,
    at: u64,
    from: u64,
    to: u64,
    got: Result<(), Errno>,
) {
    let outside = |number: &u64| !(at + from.min(to)..at + from.max(to)).contains(number);
    let old: Vec<_> = model
        .pages
        .iter()
        .filter(|(number, _)| outside(number))
        .collect();
    let new: Vec<_> = seen.iter().filter(|(number, _)| outside(number)).collect();
    assert_eq!(old, new);
    let between =
        |pages: &BTreeMap<u64, Page>| pages.keys().filter(|number| !outside(number)).count() as u64;
    match got {
        Ok(()) if to > from => assert_eq!(between(seen), to - from),
        Ok(()) => assert_eq!(between(seen), 0),
        Err(_) => assert_eq!(seen, &model.pages),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_page_is_as_the_naive_model_has_it(calls in prop::collection::vec(call(), 1..60)) {
        run(&calls);
    }

    #[test]
    fn a_checkpoint_is_the_same_in_everything(calls in prop::collection::vec(call(), 1..40), more in prop::collection::vec(call(), 1..20)) {
        let config = SpaceConfig { ipc_lock: true, ..SpaceConfig::default() };
        let space = AddressSpace::new(config).unwrap();
        let object = FileObject::builder(FileKind::Regular, "/f").len(1 << 20).build();
        let file = OpenFile::new(object, AccessMode::ReadWrite);
        for call in &calls {
            let _ = apply(&space, &file, call);
        }
        let copy = space.checkpoint().unwrap();
        for call in &more {
            prop_assert_eq!(apply(&space, &file, call), apply(&copy, &file, call));
            prop_assert_eq!(space.maps(), copy.maps());
            prop_assert_eq!(space.totals(), copy.totals());
        }
    }
}

/// A million calls; run on demand.
#[test]
#[ignore = "takes a minute"]
fn every_page_is_as_the_naive_model_has_it_for_long() {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 1000,
        ..ProptestConfig::default()
    });
    runner
        .run(&prop::collection::vec(call(), 1000..1001), |calls| {
            run(&calls);
            Ok(())
        })
        .unwrap();
}
