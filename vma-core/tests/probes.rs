//! A probe is where its byte is mapped, whatever comes first, and nowhere once it is unregistered (C10).
#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod probed;

use std::sync::Arc;

use memory::RW;
use probed::{AT, BYTE, Log, PAGE, Places, RX, assert_exact, create, file, id, register, text};
use vma_core::paged::Paged;
use vma_core::{
    AccessMode, AddressSpace, CancelToken, Errno, FileKind, FileObject, GaveUp, MapFlags,
    MapRequest, OpenFile, Probe, ProbeError, ProbeSite, Prot, RemapFlags, RemapRequest,
    SpaceConfig, SpaceHandle, System, Wait,
};

#[test]
fn it_is_in_what_is_mapped_before_and_after_and_nowhere_when_unregistered() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let (one, two) = (create(&system), create(&system));
    one.map(&text(&file, 0, 8, AT)).unwrap();
    // Not this byte.
    two.map(&text(&file, 3, 5, AT)).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    assert_eq!(log.places(), Places::from([(id(&one), AT + BYTE)]));
    two.map(&text(&file, 2, 1, AT + 16 * PAGE)).unwrap();
    let second = (id(&two), AT + 16 * PAGE + BYTE % PAGE);
    assert_eq!(log.places(), Places::from([(id(&one), AT + BYTE), second]));
    assert_exact([&one, &two], &handle, &log);
    handle.unregister();
    assert_eq!(log.calls(), (2, 2));
    one.map(&text(&file, 0, 8, AT + 32 * PAGE)).unwrap();
    two.unmap(AT + 16 * PAGE, PAGE).unwrap();
    assert_eq!(log.calls(), (2, 2));
}

#[test]
fn splits_merges_and_rights_leave_it_alone() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    for prot in [Prot::READ, Prot::empty(), RX, RX] {
        space.protect(AT + 2 * PAGE, PAGE, prot).unwrap();
        space
            .protect(AT + 4 * PAGE, PAGE, prot | Prot::WRITE)
            .unwrap();
        assert_exact([&space], &handle, &log);
    }
    space.unmap(AT, PAGE).unwrap();
    space.unmap(AT + 3 * PAGE, 5 * PAGE).unwrap();
    // Grows into what is there.
    space.map(&text(&file, 3, 1, AT + 3 * PAGE)).unwrap();
    assert_eq!(space.totals().map_count, 1);
    assert_exact([&space], &handle, &log);
    assert_eq!(log.calls(), (1, 0));
    space.unmap(AT + 2 * PAGE, PAGE).unwrap();
    assert_eq!(log.calls(), (1, 1));
    drop(handle);
    assert_eq!(log.calls(), (1, 1));
}

#[test]
fn a_mapping_may_merge_in_what_has_it() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    let handle = register(&system, &file, BYTE, &log);
    space.map(&text(&file, 0, 2, AT)).unwrap();
    space.map(&text(&file, 3, 2, AT + 3 * PAGE)).unwrap();
    assert_eq!(log.calls(), (0, 0));
    space.map(&text(&file, 2, 1, AT + 2 * PAGE)).unwrap();
    assert_eq!(space.totals().map_count, 1);
    assert_exact([&space], &handle, &log);
    assert_eq!(log.calls(), (1, 0));
}

#[test]
fn it_moves_with_its_mapping() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    let to = AT + 64 * PAGE;
    let request = |addr, old, new, to| RemapRequest {
        addr,
        old_len: old * PAGE,
        new_len: new * PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: to,
    };
    space.remap(&request(AT, 4, 4, to)).unwrap();
    assert_eq!(log.places(), Places::from([(id(&space), to + BYTE)]));
    assert_exact([&space], &handle, &log);
    // Back, so that the parts merge, over another place of the same byte.
    space.map(&text(&file, 0, 4, AT)).unwrap();
    space.remap(&request(to, 4, 4, AT)).unwrap();
    assert_eq!(space.totals().map_count, 1);
    assert_exact([&space], &handle, &log);
    // Less than there is, and then more.
    space.remap(&request(AT, 8, 2, to)).unwrap();
    assert_exact([&space], &handle, &log);
    assert!(log.places().is_empty());
    space.remap(&request(to, 2, 3, AT)).unwrap();
    assert_exact([&space], &handle, &log);
    assert_eq!(log.places().len(), 1);
}

#[test]
fn what_is_mapped_over_it_takes_it_away() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    // The same.
    space.map(&text(&file, 0, 8, AT)).unwrap();
    assert_eq!(log.calls(), (1, 0));
    // The same, where it isn't concerned, and back.
    let shared = MapRequest {
        flags: MapFlags::SHARED | MapFlags::FIXED,
        ..text(&file, 0, 8, AT)
    };
    space.map(&shared).unwrap();
    assert_eq!(log.calls(), (1, 1));
    space.map(&text(&file, 0, 8, AT)).unwrap();
    assert_eq!(log.calls(), (2, 1));
    // Another part, and other memory.
    space.map(&text(&file, 1, 7, AT)).unwrap();
    assert_exact([&space], &handle, &log);
    assert_eq!(log.calls(), (3, 2));
    space
        .map(&MapRequest::anonymous(8 * PAGE, RX).fixed(AT))
        .unwrap();
    assert_eq!(log.calls(), (3, 3));
}

#[test]
fn calls_on_one_guard_are_seen_when_it_is_let_go_of() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    let handle = register(&system, &file, BYTE, &log);
    let mut guard = space.write();
    guard.map(&text(&file, 0, 8, AT)).unwrap();
    guard.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    guard.unmap(AT, 8 * PAGE).unwrap();
    assert_eq!(log.calls(), (0, 0));
    let guard = guard.downgrade();
    assert_eq!(log.calls(), (0, 0));
    drop(guard);
    assert_eq!(log.calls(), (1, 0));
    assert_exact([&space], &handle, &log);
}

#[test]
fn several_may_be_at_one_place() {
    let (system, file) = (System::default(), file(8));
    let space = create(&system);
    let logs: Vec<_> = (0..4).map(|_| Log::new()).collect();
    let bytes = [BYTE, BYTE, BYTE + 1, 3 * PAGE - 1];
    space.map(&text(&file, 2, 1, AT)).unwrap();
    let mut handles: Vec<_> = bytes
        .iter()
        .zip(&logs)
        .map(|(byte, log)| Some(register(&system, &file, *byte, log)))
        .collect();
    space.map(&text(&file, 1, 4, AT + 8 * PAGE)).unwrap();
    for gone in [1, 3, 0, 2] {
        for (handle, log) in handles.iter().zip(&logs) {
            if let Some(handle) = handle {
                assert_exact([&space], handle, log);
                assert_eq!(log.calls(), (2, 0));
            }
        }
        drop(handles[gone].take());
        assert_eq!(logs[gone].calls(), (2, 2));
    }
}

#[test]
fn systems_and_files_do_not_meet() {
    let (here, there) = (System::default(), System::default());
    let (file, other) = (file(8), file(8));
    let (ours, theirs, nobodys) = (create(&here), create(&there), AddressSpace::default());
    let paged = System::<Paged>::default();
    let of_pages = paged
        .create(SpaceConfig::default(), Paged::default())
        .unwrap();
    for space in [ours.space(), theirs.space(), &nobodys] {
        space.map(&text(&file, 0, 8, AT)).unwrap();
        space.map(&text(&other, 0, 8, AT + 8 * PAGE)).unwrap();
    }
    of_pages.map(&text(&file, 0, 8, AT)).unwrap();
    let logs = [Log::new(), Log::new(), Log::new()];
    let one = register(&here, &file, BYTE, &logs[0]);
    let two = register(&there, &file, BYTE, &logs[1]);
    let three = register(&paged, &file, BYTE, &logs[2]);
    for space in [ours.space(), theirs.space(), &nobodys] {
        space.map(&text(&file, 0, 8, AT + 16 * PAGE)).unwrap();
    }
    assert_exact([&ours], &one, &logs[0]);
    assert_exact([&theirs], &two, &logs[1]);
    assert_exact([&of_pages], &three, &logs[2]);
    drop(one);
    assert_exact([&theirs], &two, &logs[1]);
    drop(nobodys);
    drop(theirs);
    assert_eq!(logs[1].calls(), (2, 2));
}

#[test]
fn private_mappings_that_may_execute_have_it() {
    let system = System::default();
    let space = create(&system);
    let builder = || FileObject::builder(FileKind::Regular, "f").len(8 * PAGE);
    let open = |object| OpenFile::new(object, AccessMode::ReadWrite);
    let (plain, data) = (
        open(builder().build()),
        open(builder().no_exec(true).build()),
    );
    let logs = [Log::new(), Log::new()];
    let one = register(&system, &plain, BYTE, &logs[0]);
    let two = register(&system, &data, BYTE, &logs[1]);
    let kinds = [
        (MapFlags::PRIVATE, RX),
        (MapFlags::PRIVATE, RW),
        (MapFlags::PRIVATE, Prot::empty()),
        (MapFlags::SHARED, RX),
        (MapFlags::SHARED, RW),
    ];
    for (at, (flags, prot)) in (AT..).step_by(8 * PAGE as usize).zip(kinds) {
        let request = |file: &Arc<OpenFile>, at| {
            MapRequest::file(file.clone(), 0, 8 * PAGE, prot, flags).fixed(at)
        };
        space.map(&request(&plain, at)).unwrap();
        let _ = space.map(&request(&data, at + 128 * PAGE));
    }
    assert_eq!(
        log_addrs(&logs[0]),
        [0, 8, 16].map(|page| AT + page * PAGE + BYTE)
    );
    assert_exact([&space], &one, &logs[0]);
    assert_exact([&space], &two, &logs[1]);
    assert!(logs[1].places().is_empty());
}

fn log_addrs(log: &Log) -> Vec<u64> {
    log.places().iter().map(|(_, addr)| *addr).collect()
}

/// Copies are as good as the file's pages, unless a probe asks.
#[test]
fn a_private_copy_that_was_overwritten_has_it_unless_the_probe_looks() {
    struct Originals(Log);
    impl Probe<Paged> for Originals {
        fn concerns(&self, site: &ProbeSite<'_, Paged>) -> bool {
            !site.is_copied()
        }
        fn install(&self, site: &ProbeSite<'_, Paged>) -> Result<(), Errno> {
            self.0.note(site, true);
            Ok(())
        }
        fn remove(&self, site: &ProbeSite<'_, Paged>) {
            self.0.note(site, false);
        }
    }
    let system = System::<Paged>::default();
    let create = || {
        system
            .create(SpaceConfig::default(), Paged::default())
            .unwrap()
    };
    let file = memory::file(4);
    let map = |space: &SpaceHandle<Paged>, at| {
        let request = MapRequest {
            prot: Prot::all(),
            ..text(&file, 0, 4, at)
        };
        space.map(&request).unwrap();
    };
    let (untouched, read, written) = (create(), create(), create());
    for space in [&untouched, &read, &written] {
        map(space, AT);
    }
    read.accessor().load_u8(AT + BYTE).unwrap();
    memory::populate(&written, AT + 2 * PAGE, 1, 9);
    let (all, originals) = (Log::new(), Arc::new(Originals(Log::default())));
    let one = register(&system, &file, BYTE, &all);
    let two = register(&system, &file, BYTE, &originals);
    assert_exact([&untouched, &read, &written], &one, &all);
    assert_exact([&untouched, &read], &two, &originals.0);
    // A child's copy is its parent's.
    let child = written.dup().unwrap();
    assert_exact([&untouched, &read, &written, &child], &one, &all);
    // One that comes later stays watched.
    memory::populate(&read, AT + 2 * PAGE, 1, 9);
    child.unmap(AT, 4 * PAGE).unwrap();
    map(&child, AT);
    assert_exact([&untouched, &read, &child], &two, &originals.0);
}

#[test]
fn spaces_with_other_pages_have_it() {
    let (system, file, log) = (System::default(), file(64), Log::new());
    let config = SpaceConfig {
        page_size: 16384,
        task_size: 1 << 40,
        ..SpaceConfig::default()
    };
    let large = system.create(config, ()).unwrap();
    let small = create(&system);
    let byte = 21 * PAGE + 5;
    large.map(&text(&file, 16, 16, AT)).unwrap();
    let handle = register(&system, &file, byte, &log);
    small.map(&text(&file, 20, 8, AT)).unwrap();
    large.map(&text(&file, 20, 4, AT + 64 * PAGE)).unwrap();
    assert_exact([&large, &small], &handle, &log);
    assert_eq!(log.places().len(), 3);
}

#[test]
fn what_cannot_be_registered_says_so() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let try_it = |object: &Arc<FileObject>, offset, wait| {
        let error = system.register_probe(object, offset, log.clone(), wait);
        error.map(drop).unwrap_err()
    };
    let end = 8 * PAGE;
    let error = try_it(file.object(), end + 1, Wait::forever());
    let beyond = ProbeError::BeyondEnd {
        offset: end + 1,
        len: end,
    };
    assert_eq!((error, error.errno()), (beyond, Errno::EINVAL));
    for kind in [FileKind::Device, FileKind::DevZero, FileKind::Unmappable] {
        let object = FileObject::builder(kind, "f").len(end).build();
        let error = try_it(&object, 0, Wait::forever());
        assert_eq!(
            (error, error.errno()),
            (ProbeError::Unsupported(kind), Errno::EIO)
        );
    }
    let token = CancelToken::new();
    token.cancel();
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let error = try_it(file.object(), BYTE, Wait::killable(&token));
    assert_eq!(
        (error, error.errno()),
        (ProbeError::GaveUp(GaveUp::Cancelled), Errno::EINTR)
    );
    assert_eq!(log.calls(), (0, 0));
}
