//! Probes are where their byte is mapped, whatever comes first, and nowhere once they are unregistered (C10).
#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod probed;
mod watchdog;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use memory::RW;
use probed::{Log, PAGE, Places, RX, assert_exact, file, register, scan, text};
use vma_core::paged::Paged;
use vma_core::{
    AddressSpace, CancelToken, Errno, FileKind, FileObject, ForkError, GaveUp, MapFlags,
    MapRequest, OpenFile, Overcommit, Probe, ProbeError, ProbeHandle, ProbeSite, Prot,
    RegisterError, RemapFlags, RemapRequest, SpaceConfig, SpaceHandle, SpaceId, System,
    SystemConfig, Wait,
};

const AT: u64 = 0x1000_0000;
/// In the third page.
const BYTE: u64 = 2 * PAGE + 0x123;

fn create(system: &System) -> SpaceHandle {
    system.create(SpaceConfig::default(), ()).unwrap()
}

fn id(space: &SpaceHandle) -> SpaceId {
    space.space().id()
}

/// A probe of closures.
struct With<C, I, R> {
    concerns: C,
    install: I,
    remove: R,
}

impl<C, I, R> Probe for With<C, I, R>
where
    C: Fn(&ProbeSite<'_>) -> bool + Send + Sync + 'static,
    I: Fn(&ProbeSite<'_>) -> Result<(), Errno> + Send + Sync + 'static,
    R: Fn(&ProbeSite<'_>) + Send + Sync + 'static,
{
    fn concerns(&self, site: &ProbeSite<'_>) -> bool {
        (self.concerns)(site)
    }

    fn install(&self, site: &ProbeSite<'_>) -> Result<(), Errno> {
        (self.install)(site)
    }

    fn remove(&self, site: &ProbeSite<'_>) {
        (self.remove)(site);
    }
}

/// Logs after asking `install`.
fn asking(
    log: &Arc<Log>,
    install: impl Fn(&ProbeSite<'_>) -> Result<(), Errno> + Send + Sync + 'static,
) -> Arc<impl Probe> {
    let (comes, goes) = (log.clone(), log.clone());
    Arc::new(With {
        concerns: |_: &ProbeSite<'_>| true,
        install: move |site: &ProbeSite<'_>| {
            install(site)?;
            comes.note(site, true);
            Ok(())
        },
        remove: move |site: &ProbeSite<'_>| goes.note(site, false),
    })
}

fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

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
fn a_child_has_it_before_anybody_finds_the_child() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let parent = create(&system);
    parent.map(&text(&file, 0, 8, AT)).unwrap();
    let found = Arc::new(AtomicUsize::new(0));
    let (inside, seen) = (system.clone(), found.clone());
    let probe = asking(&log, move |_| {
        seen.store(inside.len(), Ordering::Relaxed);
        // Neither lock is held.
        drop(inside.quiesce_dups(Wait::at_most(Duration::ZERO)).unwrap());
        let reader = inside.register();
        let parent = inside.get(1, &reader.pin()).unwrap();
        assert!(parent.try_write().is_some());
        Ok(())
    });
    let handle = register(&system, &file, BYTE, &probe);
    let child = parent.dup().unwrap();
    assert_eq!(found.load(Ordering::Relaxed), 1);
    assert_exact([&parent, &child], &handle, &log);
    child.unmap(AT, 8 * PAGE).unwrap();
    assert_exact([&parent, &child], &handle, &log);
    let grandchild = child.dup().unwrap();
    assert_exact([&parent, &child, &grandchild], &handle, &log);
    drop(handle);
    assert_eq!(log.calls(), (2, 2));
    // Nobody's.
    drop(parent.dup().unwrap());
    assert_eq!(log.calls(), (2, 2));
}

#[test]
fn a_copy_of_a_space_that_is_in_no_system_has_none_until_it_is_taken_in() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let parent = create(&system);
    parent.map(&text(&file, 0, 8, AT)).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    let copies = [
        parent.space().dup().unwrap(),
        parent.space().checkpoint().unwrap(),
    ];
    for copy in copies {
        copy.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
        assert_exact([&parent], &handle, &log);
        let copy = system.adopt(copy).unwrap();
        assert_exact([&parent, &copy], &handle, &log);
        assert_eq!(log.places().len(), 3);
    }
    assert_exact([&parent], &handle, &log);
}

#[test]
fn an_exit_removes_it() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    space.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    space.seal(AT, PAGE, 0).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    assert!(space.exit());
    assert_eq!(log.calls(), (2, 2));
    assert_eq!(handle.sites(), Some(Vec::new()));
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    drop(system);
    drop(space);
    assert_eq!(log.calls(), (3, 3));
    drop(handle);
    assert_eq!(Arc::strong_count(&log), 1);
}

#[test]
fn a_dup_that_fails_leaves_no_trace() {
    let (file, log) = (file(8), Log::new());
    let system = System::new(SystemConfig {
        id_limit: 2,
        ..SystemConfig::default()
    });
    let space = AddressSpace::with_backend(
        SpaceConfig {
            overcommit: Overcommit::Never { limit_pages: 4 },
            ..SpaceConfig::default()
        },
        system.domain(),
        (),
    )
    .unwrap();
    let parent = system.adopt(space).unwrap();
    parent.map(&text(&file, 0, 8, AT)).unwrap();
    parent.map(&MapRequest::anonymous(4 * PAGE, RW)).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    parent
        .configure(|config| config.overcommit = Overcommit::Never { limit_pages: 3 })
        .unwrap();
    assert!(matches!(parent.dup(), Err(ForkError::Dup(_))));
    assert_eq!(log.calls(), (1, 0), "it was never a space");
    parent
        .configure(|config| config.overcommit = Overcommit::Always)
        .unwrap();
    let error = parent.dup().unwrap_err();
    assert_eq!(error, ForkError::Register(RegisterError::Full { limit: 2 }));
    assert_eq!(log.calls(), (2, 1));
    assert_exact([&parent], &handle, &log);
}

/// The child is in the file's index by then, and not in the system.
#[test]
fn a_dup_without_memory_for_pages_leaves_no_trace() {
    let pool = vma_core::paged::FramePool::new(6);
    let system = System::<Paged>::default();
    let backend = Paged::new(Arc::new(pool));
    let parent = system.create(SpaceConfig::default(), backend).unwrap();
    let (file, log) = (file(4), Log::new());
    let request = MapRequest {
        prot: Prot::all(),
        ..text(&file, 0, 4, AT)
    };
    parent.map(&request).unwrap();
    memory::populate(&parent, AT, 4, 1);
    let own = memory::map(&parent, 1);
    let mut cpu = parent.accessor();
    let pin = cpu.pin_page(own, vma_core::Access::Write).unwrap();
    let pin_too = cpu.pin_page(AT, vma_core::Access::Write).unwrap();
    let handle = register(&system, &file, BYTE, &log);
    while let Ok(child) = parent.dup() {
        // Until there is no page left for a child's copy.
        memory::map(&parent, 1);
        let at = memory::map(&parent, 1);
        memory::populate(&parent, at, 1, 1);
        drop(child);
    }
    let before = log.calls();
    assert_eq!(parent.dup().unwrap_err().errno(), Errno::ENOMEM);
    assert_eq!(log.calls(), before);
    assert_exact([&parent], &handle, &log);
    drop((pin, pin_too));
}

#[test]
fn an_installation_that_fails_fails_the_registration_and_unwinds_it() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let spaces: Vec<_> = (0..5).map(|_| create(&system)).collect();
    for space in &spaces {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let bad = id(&spaces[2]);
    let probe = asking(&log, move |site| {
        if site.space() == bad {
            return Err(Errno::EFAULT);
        }
        Ok(())
    });
    let try_it = || system.register_probe(file.object(), BYTE, probe.clone(), Wait::forever());
    let error = try_it().unwrap_err();
    let refused = ProbeError::Refused {
        space: bad,
        addr: AT + BYTE,
        errno: Errno::EFAULT,
    };
    assert_eq!((error, error.errno()), (refused, Errno::EFAULT));
    let (installed, removed) = log.calls();
    assert!(log.places().is_empty() && installed == removed);
    // Nobody looks for it any more.
    spaces[0].map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    assert_eq!(log.calls(), (installed, removed));
    spaces[2].unmap(AT, 8 * PAGE).unwrap();
    let handle = try_it().unwrap();
    assert_exact(&spaces, &handle, &log);
    // Later it's left out.
    spaces[2].map(&text(&file, 0, 8, AT)).unwrap();
    assert_eq!((log.places().len(), handle.failures()), (5, 1));
    let child = spaces[2].dup().unwrap();
    assert_eq!((log.places().len(), handle.failures()), (6, 1));
    drop(child);
    spaces[2].unmap(AT, 8 * PAGE).unwrap();
    drop(handle);
    assert!(log.places().is_empty());
}

#[test]
fn a_panic_in_a_registration_goes_on_when_the_probe_is_nowhere() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let spaces: Vec<_> = (0..3).map(|_| create(&system)).collect();
    for space in &spaces {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let calls = AtomicUsize::new(0);
    let probe = asking(&log, move |_| {
        assert_ne!(calls.fetch_add(1, Ordering::Relaxed), 1, "the second");
        Ok(())
    });
    let try_it = || register(&system, &file, BYTE, &probe);
    assert!(panics(|| drop(try_it())));
    assert_eq!(log.calls(), (1, 1));
    drop(system.quiesce_dups(Wait::forever()).unwrap());
    let handle = try_it();
    assert_exact(&spaces, &handle, &log);
}

#[test]
fn a_panic_in_a_call_goes_on_when_all_is_done() {
    let (system, file) = (System::default(), file(8));
    let space = create(&system);
    let armed = Arc::new(AtomicUsize::new(0));
    // Before and after it, whatever the order.
    let logs = [Log::new(), Log::new()];
    let first = register(&system, &file, BYTE, &logs[0]);
    let log = Log::new();
    let (one, two) = (armed.clone(), armed.clone());
    let (comes, goes) = (log.clone(), log.clone());
    let probe = Arc::new(With {
        concerns: |_: &ProbeSite<'_>| true,
        install: move |site: &ProbeSite<'_>| {
            assert_ne!(one.load(Ordering::Relaxed), 1, "armed");
            comes.note(site, true);
            Ok(())
        },
        remove: move |site: &ProbeSite<'_>| {
            goes.note(site, false);
            assert_ne!(two.load(Ordering::Relaxed), 2, "armed");
        },
    });
    let handle = register(&system, &file, BYTE, &probe);
    let last = register(&system, &file, BYTE + 1, &logs[1]);

    armed.store(1, Ordering::Relaxed);
    assert!(panics(|| {
        let _ = space.map(&text(&file, 0, 8, AT));
    }));
    assert_eq!(space.totals().map_count, 1);
    assert_eq!((log.calls(), handle.failures()), ((0, 0), 1));
    assert_exact([&space], &first, &logs[0]);
    assert_exact([&space], &last, &logs[1]);
    assert!(panics(|| drop(space.dup())));
    assert_eq!(system.len(), 1);
    assert_exact([&space], &first, &logs[0]);
    armed.store(0, Ordering::Relaxed);
    let child = space.dup().unwrap();
    assert_exact([&space, &child], &last, &logs[1]);
    assert_eq!(log.places(), Places::from([(id(&child), AT + BYTE)]));

    armed.store(2, Ordering::Relaxed);
    assert!(panics(|| {
        child.exit();
    }));
    assert_eq!((system.len(), log.calls()), (1, (1, 1)));
    assert_exact([&space], &last, &logs[1]);
    armed.store(0, Ordering::Relaxed);
    space.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    space.map(&text(&file, 0, 8, AT + 16 * PAGE)).unwrap();
    armed.store(2, Ordering::Relaxed);
    assert!(panics(|| space.unmap(AT + 8 * PAGE, PAGE * 8).unwrap()));
    assert!(panics(|| handle.unregister()));
    assert_eq!(log.calls(), (3, 3));
    drop(system.quiesce_dups(Wait::forever()).unwrap());
    assert!(space.try_write().is_some());
}

#[test]
fn a_filter_says_which_spaces_it_concerns() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let (one, two) = (create(&system), create(&system));
    for space in [&one, &two] {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let (only, comes, goes) = (id(&one), log.clone(), log.clone());
    let probe = Arc::new(With {
        concerns: move |site: &ProbeSite<'_>| site.space() == only,
        install: move |site: &ProbeSite<'_>| {
            comes.note(site, true);
            Ok(())
        },
        remove: move |site: &ProbeSite<'_>| goes.note(site, false),
    });
    let handle = register(&system, &file, BYTE, &probe);
    two.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    let child = one.dup().unwrap();
    assert_exact([&one], &handle, &log);
    drop((child, one, two));
    assert_eq!((log.calls(), handle.failures()), ((1, 1), 0));
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
    let (file, other) = (file(8), probed::file(8));
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
    let open = |object| OpenFile::new(object, vma_core::AccessMode::ReadWrite);
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

#[test]
fn a_registration_can_be_given_up_between_two_installations() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let spaces: Vec<_> = (0..3).map(|_| create(&system)).collect();
    for space in &spaces {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let token = CancelToken::new();
    let cancel = token.clone();
    let probe = asking(&log, move |_| {
        cancel.cancel();
        Ok(())
    });
    let wait = Wait::killable(&token);
    let result = system.register_probe(file.object(), BYTE, probe, wait);
    assert_eq!(
        result.map(drop).unwrap_err(),
        ProbeError::GaveUp(GaveUp::Cancelled)
    );
    assert_eq!(log.calls(), (1, 1));
}

/// A callback that makes calls, once, and not for what those bring.
struct Reenters<F> {
    log: Arc<Log>,
    f: F,
    armed: Mutex<bool>,
    at_remove: bool,
}

impl<F: Fn(&ProbeSite<'_>) + Send + Sync + 'static> Reenters<F> {
    fn new(log: &Arc<Log>, at_remove: bool, f: F) -> Arc<Self> {
        Arc::new(Reenters {
            log: log.clone(),
            f,
            armed: Mutex::new(true),
            at_remove,
        })
    }

    fn act(&self, site: &ProbeSite<'_>) {
        let armed = std::mem::take(&mut *self.armed.lock().unwrap());
        if armed {
            (self.f)(site);
        }
    }
}

impl<F: Fn(&ProbeSite<'_>) + Send + Sync + 'static> Probe for Reenters<F> {
    fn install(&self, site: &ProbeSite<'_>) -> Result<(), Errno> {
        if !self.at_remove {
            self.act(site);
        }
        self.log.note(site, true);
        Ok(())
    }

    fn remove(&self, site: &ProbeSite<'_>) {
        self.log.note(site, false);
        if self.at_remove {
            self.act(site);
        }
    }
}

#[test]
fn a_callback_may_make_calls_on_its_space() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    for at_remove in [false, true] {
        let (system, file, log) = (System::default(), file(8), Log::new());
        let space = create(&system);
        let (inside, text_file) = (space.clone(), file.clone());
        let child = Arc::new(Mutex::new(None));
        let kept = child.clone();
        let probe = Reenters::new(&log, at_remove, move |_| {
            inside.map(&text(&text_file, 0, 8, AT + 8 * PAGE)).unwrap();
            inside.map(&text(&text_file, 0, 8, AT + 16 * PAGE)).unwrap();
            inside.unmap(AT + 8 * PAGE, 8 * PAGE).unwrap();
            *kept.lock().unwrap() = Some(inside.dup().unwrap());
            // Its own.
            inside.unmap(AT, 8 * PAGE).unwrap();
        });
        let handle = register(&system, &file, BYTE, &probe);
        space.map(&text(&file, 0, 8, AT)).unwrap();
        if at_remove {
            space.unmap(AT, 8 * PAGE).unwrap();
        }
        let child = child.lock().unwrap().take().unwrap();
        assert_exact([&space, &child], &handle, &log);
        assert!(log.places().contains(&(id(&child), AT + 16 * PAGE + BYTE)));
        drop(child);
        assert_exact([&space], &handle, &log);
        space.unmap(AT, 32 * PAGE).unwrap();
        assert!(log.places().is_empty());
        // The probe has a handle to the space, which has one to the system.
        drop(handle);
        drop(probe);
        assert_eq!(Arc::strong_count(&log), 1);
    }
}

#[test]
fn a_callback_may_end_its_space() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let last = Mutex::new(Some(space));
    let probe = Reenters::new(&log, false, move |_| drop(last.lock().unwrap().take()));
    let handle = register(&system, &file, BYTE, &probe);
    assert_eq!((system.len(), log.calls()), (0, (1, 1)));
    assert_eq!(handle.sites(), Some(Vec::new()));
}

#[test]
fn a_callback_may_drop_probes_its_own_too_and_register_none() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    for at_remove in [false, true] {
        let (system, file) = (System::default(), file(8));
        let (log, other_log) = (Log::new(), Log::new());
        let space = create(&system);
        space.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
        let handles: Arc<Mutex<Vec<ProbeHandle>>> = Arc::default();
        let (inside, inside_file, own) = (system.clone(), file.clone(), handles.clone());
        let probe = Reenters::new(&log, at_remove, move |_| {
            let mut own = own.lock().unwrap();
            if own.is_empty() {
                return;
            }
            let refused =
                inside.register_probe(inside_file.object(), BYTE, Log::new(), Wait::forever());
            let error = refused.map(drop).unwrap_err();
            assert_eq!(
                (error, error.errno()),
                (ProbeError::InCallback, Errno::EBUSY)
            );
            // Nobody is told where it is, since it is being changed.
            assert_eq!(own[0].sites(), None);
            assert!(own[1].sites().is_some());
            own.drain(..).for_each(ProbeHandle::unregister);
        });
        *probe.armed.lock().unwrap() = false;
        let mine = register(&system, &file, BYTE, &probe);
        let other = register(&system, &file, BYTE, &other_log);
        handles.lock().unwrap().extend([mine, other]);
        *probe.armed.lock().unwrap() = true;
        space.map(&text(&file, 0, 8, AT)).unwrap();
        if at_remove {
            space.unmap(AT, 8 * PAGE).unwrap();
        }
        assert!(handles.lock().unwrap().is_empty());
        assert!(log.places().is_empty() && other_log.places().is_empty());
        drop(probe);
        assert_eq!(
            (Arc::strong_count(&log), Arc::strong_count(&other_log)),
            (1, 1)
        );
    }
}

/// Two callbacks that each make a call on the other's space: neither waits for the other.
#[test]
fn callbacks_of_two_probes_wait_for_nobody() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, files) = (System::default(), [file(8), file(8)]);
    let spaces = [create(&system), create(&system)];
    let logs = [Log::new(), Log::new()];
    let meet = Arc::new(std::sync::Barrier::new(2));
    let handles = [0, 1].map(|who: usize| {
        let (other, text_file) = (spaces[1 - who].clone(), files[1 - who].clone());
        let meet = meet.clone();
        let probe = Reenters::new(&logs[who], false, move |_| {
            meet.wait();
            other
                .map(&text(&text_file, 0, 8, AT + (1 + who as u64) * 8 * PAGE))
                .unwrap();
        });
        register(&system, &files[who], BYTE, &probe)
    });
    thread::scope(|scope| {
        for (space, file) in spaces.iter().zip(&files) {
            scope.spawn(|| space.map(&text(file, 0, 8, AT)).unwrap());
        }
    });
    for (handle, log) in handles.iter().zip(&logs) {
        assert_exact(&spaces, handle, log);
        assert_eq!(log.places().len(), 2);
    }
    drop(handles);
}

/// Who unregisters waits for the callback of a call that is under way, and then it's nowhere.
#[test]
fn an_unregistration_waits_for_callbacks() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    let (begin, begun) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let probe = asking(&log, move |_| {
        begin.send(()).unwrap();
        ended.lock().unwrap().recv().unwrap();
        Ok(())
    });
    let handle = register(&system, &file, BYTE, &probe);
    thread::scope(|scope| {
        let map = scope.spawn(|| space.map(&text(&file, 0, 8, AT)).unwrap());
        begun.recv().unwrap();
        // The mapping is there, and no lock is held.
        assert_eq!(space.totals().map_count, 1);
        let unregister = scope.spawn(|| handle.unregister());
        thread::sleep(Duration::from_millis(30));
        assert!(!unregister.is_finished());
        end.send(()).unwrap();
        unregister.join().unwrap();
        assert_eq!(log.calls(), (1, 1));
        map.join().unwrap();
    });
    space.unmap(AT, 8 * PAGE).unwrap();
    assert_eq!(log.calls(), (1, 1));
}

/// A mapping that goes while it is being installed there takes it away afterwards.
#[test]
fn an_unmap_beside_an_installation_removes_it() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let (begin, begun) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let probe = asking(&log, move |_| {
        begin.send(()).unwrap();
        ended.lock().unwrap().recv().unwrap();
        Ok(())
    });
    thread::scope(|scope| {
        let registration = scope.spawn(|| register(&system, &file, BYTE, &probe));
        begun.recv().unwrap();
        // Dups don't wait for it.
        let child = create(&system).dup().unwrap();
        let unmap = scope.spawn(|| space.unmap(AT, 8 * PAGE).unwrap());
        while space.totals().map_count > 0 {
            thread::yield_now();
        }
        assert!(!unmap.is_finished());
        end.send(()).unwrap();
        unmap.join().unwrap();
        assert_eq!(log.calls(), (1, 1));
        drop(child);
        let handle = registration.join().unwrap();
        assert_exact([&space], &handle, &log);
    });
}

/// A registration that comes while a dup is under way finds the child, or the child sees it; it waits for the dup.
#[test]
fn a_registration_beside_dups_is_in_all_children() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file) = (System::default(), file(8));
    let parent = create(&system);
    for page in 0..200 {
        let at = AT + 16 * page * PAGE;
        parent.map(&text(&file, 0, 8, at)).unwrap();
    }
    let born = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let dups: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        drop(parent.dup().unwrap());
                        born.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for _ in 0..60 {
            let log = Log::new();
            let handle = register(&system, &file, BYTE, &log);
            let child = parent.dup().unwrap();
            let (one, two) = (id(&parent), id(&child));
            let of = |which| log.places().iter().filter(|(id, _)| *id == which).count();
            assert_eq!((of(one), of(two)), (200, 200));
            drop(child);
            drop(handle);
            let (installed, removed) = log.calls();
            assert!(installed == removed && log.places().is_empty());
        }
        stop.store(true, Ordering::Relaxed);
        for dup in dups {
            dup.join().unwrap();
        }
    });
    assert!(born.load(Ordering::Relaxed) > 0);
    assert_eq!(scan([&parent], file.object(), BYTE).len(), 200);
}

#[cfg(debug_assertions)]
#[test]
fn a_registration_with_a_lock_held_is_caught() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let (one, two) = (create(&system), create(&system));
    let caught = |f: &dyn Fn()| {
        let result = catch_unwind(AssertUnwindSafe(f));
        result.is_err_and(|panic| {
            panic
                .downcast_ref::<String>()
                .is_some_and(|text| text.contains("lock order"))
        })
    };
    let try_it = || drop(register(&system, &file, BYTE, &log));
    one.map(&text(&file, 0, 8, AT)).unwrap();
    let quiesced = system.quiesce_dups(Wait::forever()).unwrap();
    assert!(caught(&try_it));
    drop(quiesced);
    let guard = one.write();
    assert!(caught(&try_it));
    drop(guard);
    let handle = register(&system, &file, BYTE, &log);
    let (first, second) = if std::ptr::from_ref(one.space()) < std::ptr::from_ref(two.space()) {
        (&one, &two)
    } else {
        (&two, &one)
    };
    let guard = first.write();
    assert!(caught(&|| {
        second.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    }));
    drop(guard);
    drop(handle);
}
