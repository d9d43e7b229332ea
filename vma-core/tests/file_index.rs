//! The reverse index of a file is what a scan of all spaces finds: after every call, whatever it did, and in the end.

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod scan;

use std::sync::Arc;
use std::time::Duration;

use memory::{PAGE, RW};
use proptest::prelude::*;
use scan::assert_exact;
use vma_core::paged::FramePool;
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Backend, Errno, FileKind, FileObject, MapFlags,
    MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig, Wait,
};

const AT: u64 = 0x10_0000_0000;
/// Pages that calls play in.
const ARENA: u64 = 24;
const SPACES: usize = 3;

fn addr(page: u64) -> u64 {
    AT + page * PAGE
}

fn file(pages: u64) -> Arc<OpenFile> {
    let object = FileObject::builder(FileKind::Shmem, "f")
        .len(pages * PAGE)
        .build();
    OpenFile::new(object, AccessMode::ReadWrite)
}

fn request(
    file: &Arc<OpenFile>,
    at: u64,
    pages: u64,
    offset: u64,
    shared: bool,
    prot: Prot,
) -> MapRequest {
    let kind = if shared {
        MapFlags::SHARED
    } else {
        MapFlags::PRIVATE
    };
    MapRequest {
        addr: addr(at),
        flags: kind | MapFlags::FIXED,
        file: Some(file.clone()),
        offset: offset * PAGE,
        ..MapRequest::anonymous(pages * PAGE, prot)
    }
}

#[derive(Clone, Debug)]
enum Call {
    Map {
        file: usize,
        offset: u64,
        shared: bool,
        write: bool,
    },
    Anonymous,
    Unmap,
    Protect {
        write: bool,
    },
    Move {
        to: u64,
        keep: bool,
    },
    Resize {
        pages: u64,
    },
    Nonlinear {
        offset: u64,
    },
    Fork {
        into: usize,
        not_this: bool,
    },
    Exit,
    Touch {
        write: bool,
    },
    Batch {
        to: u64,
    },
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        6 => (0..2usize, 0..8u64, any::<bool>(), any::<bool>())
            .prop_map(|(file, offset, shared, write)| Call::Map { file, offset, shared, write }),
        1 => Just(Call::Anonymous),
        3 => Just(Call::Unmap),
        4 => any::<bool>().prop_map(|write| Call::Protect { write }),
        3 => (0..ARENA, any::<bool>()).prop_map(|(to, keep)| Call::Move { to, keep }),
        2 => (1..8u64).prop_map(|pages| Call::Resize { pages }),
        1 => (0..8u64).prop_map(|offset| Call::Nonlinear { offset }),
        1 => (0..SPACES, any::<bool>()).prop_map(|(into, not_this)| Call::Fork { into, not_this }),
        1 => Just(Call::Exit),
        3 => any::<bool>().prop_map(|write| Call::Touch { write }),
        1 => (0..ARENA).prop_map(|to| Call::Batch { to }),
    ]
}

/// Makes a call; errors are as good as success here.
fn make<B: Backend>(
    spaces: &mut [AddressSpace<B>],
    files: &[Arc<OpenFile>],
    fresh: &dyn Fn() -> AddressSpace<B>,
    who: usize,
    (at, pages): (u64, u64),
    call: &Call,
) {
    let space = &spaces[who];
    let (from, len) = (addr(at), pages * PAGE);
    let prot = |write| if write { RW } else { Prot::READ };
    match *call {
        Call::Map {
            file,
            offset,
            shared,
            write,
        } => {
            let request = request(&files[file], at, pages, offset, shared, prot(write));
            let _ = space.map(&request);
        }
        Call::Anonymous => {
            let _ = space.map(&MapRequest::anonymous(len, RW).fixed(from));
        }
        Call::Unmap => {
            let _ = space.unmap(from, len);
        }
        Call::Protect { write } => {
            let _ = space.protect(from, len, prot(write));
        }
        Call::Move { to, keep } => {
            let keeping = if keep {
                RemapFlags::DONTUNMAP
            } else {
                RemapFlags::empty()
            };
            let _ = space.remap(&RemapRequest {
                addr: from,
                old_len: len,
                new_len: len,
                flags: RemapFlags::MAYMOVE | RemapFlags::FIXED | keeping,
                new_addr: addr(to),
            });
        }
        Call::Resize { pages } => {
            let _ = space.remap(&RemapRequest {
                addr: from,
                old_len: len,
                new_len: pages * PAGE,
                flags: RemapFlags::MAYMOVE,
                new_addr: 0,
            });
        }
        Call::Nonlinear { offset } => {
            let none = Prot::empty();
            let _ = space.remap_file_pages(from, len, none, offset, MapFlags::empty());
        }
        Call::Fork { into, not_this } => {
            if not_this {
                let _ = space.advise(from, len, Advice::DONTFORK);
            }
            spaces[into] = space.dup().unwrap();
        }
        Call::Exit => spaces[who] = fresh(),
        Call::Touch { write } => {
            let access = if write { Access::Write } else { Access::Read };
            let _ = space.touch(from, len, access);
        }
        Call::Batch { to } => {
            let mut guard = space.write();
            let _ = guard.unmap(from, len);
            let _ = guard.map(&request(&files[0], at, pages, 0, true, RW));
            let _ = guard.unmap(from, PAGE);
            let _ = guard.map(&request(&files[0], at, pages, 0, true, RW));
            let _ = guard.map(&request(&files[1], to, pages, 3, false, RW));
        }
    }
}

fn follows<B: Backend>(
    fresh: &dyn Fn() -> AddressSpace<B>,
    calls: &[(usize, (u64, u64), Call)],
) -> Result<(), TestCaseError> {
    let files = [file(12), file(64)];
    let mut spaces: Vec<_> = (0..SPACES).map(|_| fresh()).collect();
    for (who, range, call) in calls {
        make(&mut spaces, &files, fresh, *who, *range, call);
        for file in &files {
            scan::exact(file.object(), &spaces).map_err(|error| {
                TestCaseError::fail(format!("after {call:?} at {range:?} in {who}: {error}"))
            })?;
        }
    }
    drop(spaces);
    for file in &files {
        prop_assert_eq!(file.object().mapping_count(), 0);
        prop_assert_eq!(file.object().writable_mappings(), 0);
    }
    Ok(())
}

fn calls() -> impl Strategy<Value = Vec<(usize, (u64, u64), Call)>> {
    let range = (0..ARENA, 1..10u64);
    proptest::collection::vec((0..SPACES, range, call()), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn the_index_is_what_a_scan_finds_after_every_call(calls in calls()) {
        follows(&|| AddressSpace::new(SpaceConfig::default()).unwrap(), &calls)?;
    }

    #[test]
    fn the_same_with_memory_behind_it(calls in calls()) {
        let pool = FramePool::default();
        follows(&|| memory::space(&pool), &calls)?;
        prop_assert_eq!(pool.stats().used, 0);
    }
}

/// What can't be published leaves no trace.
#[test]
fn a_call_that_fails_leaves_the_index_as_it_was() {
    let config = SpaceConfig {
        max_map_count: 3,
        ..SpaceConfig::default()
    };
    let space = AddressSpace::new(config).unwrap();
    let file = file(12);
    let spaces = [space];
    for at in [0, 2, 4, 6] {
        let _ = spaces[0].map(&request(&file, at, 1, at, true, RW));
    }
    let before = file.object().mappings(0..u64::MAX);
    spaces[0]
        .map(&request(&file, 10, 1, 0, true, RW))
        .unwrap_err();
    assert_eq!(file.object().mappings(0..u64::MAX), before);
    assert_exact(file.object(), &spaces);
}

/// One that has entered what comes, and gives up on who keeps what goes.
#[test]
fn a_call_that_gives_up_leaves_the_index_as_it_was() {
    let file = file(12);
    let spaces = [AddressSpace::new(SpaceConfig::default()).unwrap()];
    let [space] = &spaces;
    space.map(&request(&file, 0, 2, 0, true, RW)).unwrap();
    let before = file.object().mappings(0..u64::MAX);
    let reader = space.register();
    let kept = space.lock_vma(addr(0), &reader.pin()).unwrap().unwrap();
    let error = std::thread::scope(|scope| {
        let replacing = scope.spawn(|| {
            let soon = Wait::at_most(Duration::from_millis(20));
            let mut guard = space.write_with(soon).unwrap();
            guard.map(&request(&file, 0, 2, 6, true, RW)).unwrap_err()
        });
        replacing.join().unwrap()
    });
    assert_eq!(error.errno(), Errno::EINTR);
    drop(kept);
    assert_eq!(file.object().mappings(0..u64::MAX), before);
    assert_exact(file.object(), &spaces);
}

/// A query finds what shows a page of the range, in order of the file, whatever the order they came in.
#[test]
fn mappings_are_found_by_page_in_order_of_the_file() {
    let space = AddressSpace::new(SpaceConfig::default()).unwrap();
    let file = file(64);
    for page in (0..20).rev() {
        space
            .map(&request(&file, 2 * page, 1, page, true, RW))
            .unwrap();
    }
    space
        .map(&request(&file, 50, 20, 0, false, Prot::READ))
        .unwrap();
    let firsts = |pages| {
        let found = file.object().mappings(pages);
        found
            .iter()
            .map(|mapping| (mapping.pages.start, mapping.pages.end))
            .collect::<Vec<_>>()
    };
    assert_eq!(firsts(5..7), [(0, 20), (5, 6), (6, 7)]);
    assert_eq!(firsts(20..64), []);
    assert_eq!(firsts(7..7), []);
    assert_eq!(file.object().mapping_count(), 21);
    let mapping = &file.object().mappings(5..6)[1];
    assert_eq!((mapping.space, mapping.range.start), (space.id(), addr(10)));
}

/// What a copy of a space shows is its own.
#[test]
fn a_checkpoint_is_in_the_index_until_it_goes() {
    let space = AddressSpace::new(SpaceConfig::default()).unwrap();
    let file = file(4);
    space.map(&request(&file, 0, 4, 0, true, RW)).unwrap();
    let copy = space.checkpoint().unwrap();
    assert_eq!(file.object().mapping_count(), 2);
    assert_ne!(space.id(), copy.id());
    let spaces = [space, copy];
    assert_exact(file.object(), &spaces);
    drop(spaces);
    assert_eq!(file.object().mapping_count(), 0);
}
