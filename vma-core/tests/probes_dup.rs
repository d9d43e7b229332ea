//! Probes and spaces that come and go: dups, those that fail, and exits (C10).
#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod probed;
mod watchdog;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use memory::RW;
use probed::{AT, BYTE, Log, PAGE, asking, assert_exact, create, file, id, register, scan, text};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AccessMode, AddressSpace, Errno, FileKind, FileObject, ForkError, MapRequest,
    MappingHooks, OpenFile, Overcommit, Prot, RegisterError, SpaceConfig, System, SystemConfig,
    VmRange, Wait,
};

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

/// An owner's hook is called when both locks have been let go of, and before the child has a number.
#[test]
fn a_registration_finds_a_child_that_has_no_number_yet() {
    struct Registers(Mutex<Option<Box<dyn FnOnce() + Send>>>);
    impl MappingHooks for Registers {
        fn opened(&self, _: VmRange) {
            let armed = self.0.lock().unwrap().take();
            if let Some(register) = armed {
                register();
            }
        }
    }
    let (system, file, log) = (System::default(), file(8), Log::new());
    let hooks = Arc::new(Registers(Mutex::new(None)));
    let followed = FileObject::builder(FileKind::Shmem, "followed")
        .len(PAGE)
        .hooks(hooks.clone())
        .build();
    let followed = OpenFile::new(followed, AccessMode::ReadWrite);
    let parent = create(&system);
    parent.map(&text(&file, 0, 8, AT)).unwrap();
    parent.map(&text(&followed, 0, 1, AT + 8 * PAGE)).unwrap();
    let handle = Arc::new(Mutex::new(None));
    let (inside, probed_file, told, kept) = (
        system.clone(),
        file.clone(),
        log.clone(),
        Arc::clone(&handle),
    );
    *hooks.0.lock().unwrap() = Some(Box::new(move || {
        let registered = register(&inside, &probed_file, BYTE, &told);
        assert_eq!((inside.len(), told.calls()), (1, (2, 0)));
        *kept.lock().unwrap() = Some(registered);
    }));
    let child = parent.dup().unwrap();
    let handle = handle.lock().unwrap().take().unwrap();
    assert_exact([&parent, &child], &handle, &log);
    assert_eq!(log.calls(), (2, 0));
}

/// The child is in the file's index by then, and not in the system.
#[test]
fn a_dup_without_memory_for_pages_leaves_no_trace() {
    let pool = FramePool::new(6);
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
    let pin = cpu.pin_page(own, Access::Write).unwrap();
    let pin_too = cpu.pin_page(AT, Access::Write).unwrap();
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
