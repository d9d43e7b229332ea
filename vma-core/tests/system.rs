//! Spaces by number: their life, and who keeps them.
#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod owner;
mod watchdog;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use memory::{PAGE, RW, populate};
use owner::followed;
use vma_core::paged::{FrameAllocator, FramePool, NewFrame, Paged};
use vma_core::{
    AccessMode, AddressSpace, CreateError, Domain, Errno, FileKind, FileObject, MapFlags,
    MapRequest, OpenFile, Prot, RegisterError, SpaceConfig, SpaceHandle, System, SystemConfig,
};

const AT: u64 = 0x1000_0000;

fn small(id_limit: u32) -> System {
    System::new(SystemConfig {
        id_limit,
        ..SystemConfig::default()
    })
}

fn create(system: &System) -> SpaceHandle {
    system.create(SpaceConfig::default(), ()).unwrap()
}

fn map(space: &AddressSpace) {
    let request = MapRequest::anonymous(PAGE, Prot::READ).fixed(AT);
    space.map(&request).unwrap();
}

fn ids(system: &System) -> Vec<u32> {
    let reader = system.register();
    let guard = reader.pin();
    system.iter(0, &guard).map(|it| it.id().get()).collect()
}

fn map_file<B: vma_core::Backend>(space: &AddressSpace<B>, file: &Arc<OpenFile>, at: u64) {
    let request = MapRequest::file(file.clone(), 0, PAGE, RW, MapFlags::SHARED).fixed(at);
    space.map(&request).unwrap();
}

#[test]
fn numbers_go_round_and_are_used_again_late() {
    let system = small(5);
    let mut spaces: Vec<_> = (0..3).map(|_| create(&system)).collect();
    assert_eq!(ids(&system), [1, 2, 3]);
    assert!(spaces.remove(1).exit());
    let fourth = create(&system);
    assert_eq!(fourth.id().get(), 4, "not the one that has just come free");
    let again = create(&system);
    assert_eq!(again.id().get(), 2, "from the beginning");
    let full = system.create(SpaceConfig::default(), ()).unwrap_err();
    assert_eq!(
        full,
        CreateError::Register(RegisterError::Full { limit: 5 })
    );
    assert_eq!(full.errno(), Errno::EAGAIN);
    assert_eq!(ids(&system), [1, 2, 3, 4]);
    drop(fourth);
    assert_eq!(create(&system).id().get(), 4);
    assert_eq!(system.len(), 3);
}

#[test]
fn a_stale_number_finds_nothing_or_the_new_space() {
    let system = small(2);
    let reader = system.register();
    let old = create(&system);
    map(&old);
    let id = old.id();
    let kept = old.downgrade();
    let walk = reader.pin();
    let mut walking = system.iter(0, &walk);
    assert!(old.exit());
    assert!(system.find(id, &walk).is_none() && system.get(id, &walk).is_none());
    let new = create(&system);
    assert_eq!(new.id(), id);
    let found = system.find(id, &walk).unwrap();
    assert_eq!(found.maps(), "", "the old one had a mapping");
    assert_eq!(found.get().unwrap().id(), id);
    assert!(kept.upgrade().is_none(), "the old one doesn't come back");
    assert!(walking.all(|it| it.maps().is_empty()));
    drop(walking);
}

#[test]
fn handles_are_users_and_the_last_one_ends_the_space() {
    let system = System::default();
    let reader = system.register();
    let first = create(&system);
    let id = first.id();
    map(&first);
    let second = first.clone();
    let third = system.get(id, &reader.pin()).unwrap();
    let kept = first.downgrade();
    assert!(!first.exit());
    drop(second);
    let fourth = kept.upgrade().unwrap();
    drop(third);
    assert_eq!(fourth.totals().map_count, 1);
    assert_eq!(system.find(id, &reader.pin()).unwrap().id(), id);
    assert!(fourth.exit());
    assert!(kept.upgrade().is_none());
    assert!(system.is_empty());
    assert_eq!(kept.clone().id(), id);
}

#[test]
fn everything_has_gone_when_the_last_handle_has_sealed_mappings_too() {
    let pool = FramePool::default();
    let system = System::<Paged>::default();
    let backend = Paged::new(Arc::new(pool.clone()));
    let space = system.create(SpaceConfig::default(), backend).unwrap();
    let file = memory::file(4);
    let at = memory::map(&space, 8);
    populate(&space, at, 8, 1);
    memory::map_file(&space, &file, 4, MapFlags::SHARED);
    let private = memory::map_file(&space, &file, 4, MapFlags::PRIVATE);
    populate(&space, private, 4, 2);
    space.seal(at, 8 * PAGE, 0).unwrap();
    space.unmap(at, 8 * PAGE).unwrap_err();
    assert_eq!(pool.stats().used, 12);
    assert_eq!(
        (
            file.object().mapping_count(),
            file.object().writable_mappings()
        ),
        (2, 1)
    );
    // A guard keeps the record, and nothing but the record.
    let reader = system.register();
    let guard = reader.pin();
    let found = system.find(space.id(), &guard).unwrap();
    let line = found.iter(0).next().unwrap();
    assert!(space.exit());
    assert_eq!(pool.stats().used, 0);
    assert_eq!(
        (
            file.object().mapping_count(),
            file.object().writable_mappings()
        ),
        (0, 0)
    );
    assert!(system.is_empty());
    // It has emptied under the reader's eyes; what was found before is readable.
    assert!(!found.is_used() && found.get().is_none());
    assert_eq!(found.maps(), "");
    assert!(line.end() > line.start());
    drop(guard);
    system.domain().synchronize(None).unwrap();
    assert_eq!(system.domain().stats().pending_objects, 0);
}

#[test]
fn while_a_space_ends_nobody_finds_it_and_its_number_is_taken() {
    let system = small(3);
    let other = system.clone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = seen.clone();
    let file = followed(move |opened| {
        if !opened {
            let reader = other.register();
            let guard = reader.pin();
            let found = other.find(1, &guard).is_some() || other.get(1, &guard).is_some();
            let walked: Vec<u32> = other.iter(0, &guard).map(|it| it.id().get()).collect();
            let new = create(&other).id().get();
            heard
                .lock()
                .unwrap()
                .push((found, walked, new, other.len()));
        }
    });
    let space = create(&system);
    map_file(&space, &file, AT);
    assert_eq!(space.id().get(), 1);
    drop(space);
    // Two is the only number left while 1 ends; it goes at once.
    assert_eq!(*seen.lock().unwrap(), [(false, vec![], 2, 1)]);
    assert!(system.is_empty());
    assert_eq!(create(&system).id().get(), 1);
    // Retired records have the file, whose owner has the system.
    system.domain().synchronize(None).unwrap();
}

#[test]
fn a_hook_that_panics_keeps_nothing_from_ending() {
    let system = System::default();
    let closed = Arc::new(AtomicUsize::new(0));
    let count = closed.clone();
    let file = followed(move |opened| {
        if !opened {
            count.fetch_add(1, Ordering::Relaxed);
            panic!("the owner's");
        }
    });
    let space = create(&system);
    for at in 0..3 {
        map_file(&space, &file, AT + 2 * at * PAGE);
    }
    let kept = space.downgrade();
    let panic = catch_unwind(AssertUnwindSafe(|| drop(space))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"the owner's"));
    assert_eq!(closed.load(Ordering::Relaxed), 3, "each was told");
    assert_eq!(file.object().mapping_count(), 0);
    assert_eq!(file.object().writable_mappings(), 0);
    assert!(system.is_empty() && kept.upgrade().is_none());
    drop(kept);
    system.domain().synchronize(None).unwrap();
    assert_eq!(
        closed.load(Ordering::Relaxed),
        3,
        "nothing was left for later"
    );
}

#[test]
fn systems_do_not_meet() {
    let (one, two) = (System::default(), System::default());
    let (a, b) = (create(&one), create(&two));
    assert_eq!((a.id().get(), b.id().get()), (1, 1));
    map(&a);
    let (reader, other) = (one.register(), two.register());
    let guard = reader.pin();
    assert!(!one.find(1, &guard).unwrap().maps().is_empty());
    assert!(two.find(1, &other.pin()).unwrap().maps().is_empty());
    let mixed = catch_unwind(AssertUnwindSafe(|| two.find(1, &guard).is_some()));
    assert!(mixed.is_err(), "a guard of another domain");
    let strange = AddressSpace::with_backend(SpaceConfig::default(), one.domain(), ()).unwrap();
    let refused = two.adopt(strange).unwrap_err();
    assert_eq!(refused, RegisterError::OtherDomain);
    assert_eq!(refused.errno(), Errno::EINVAL);
    assert_eq!((one.len(), two.len()), (1, 1));
    let own = AddressSpace::with_backend(SpaceConfig::default(), one.domain(), ()).unwrap();
    map(&own);
    assert_eq!(one.adopt(own).unwrap().totals().map_count, 1);
}

#[test]
fn the_maps_of_all_spaces_are_printed_while_all_their_locks_are_held() {
    let system = System::default();
    let spaces: Vec<_> = (0..3).map(|_| create(&system)).collect();
    for (space, pages) in spaces.iter().zip(1..) {
        let request = MapRequest::anonymous(pages * PAGE, RW).fixed(AT);
        space.map(&request).unwrap();
        space.set_brk(AT, AT + PAGE);
        let stack = MapRequest::anonymous(PAGE, RW).fixed(2 * AT);
        space.map(&stack).unwrap();
        space.set_stack(2 * AT);
        let object = FileObject::builder(FileKind::Regular, "/bin/sh").build();
        let file = OpenFile::new(object, AccessMode::Read);
        let request = MapRequest::file(file, 0, PAGE, Prot::READ, MapFlags::PRIVATE);
        space.map(&request.fixed(3 * AT)).unwrap();
    }
    let expected: Vec<String> = spaces.iter().map(|space| space.maps()).collect();
    assert!(expected[0].contains("[heap]") && expected[0].contains("[stack]"));
    let mut sorted: Vec<_> = spaces.iter().collect();
    sorted.sort_by_key(|space| std::ptr::from_ref(space.space()).addr());
    let locks: Vec<_> = sorted.iter().map(|space| space.write()).collect();
    let printed: Vec<String> = thread::scope(|scope| {
        let print = || {
            let reader = system.register();
            let guard = reader.pin();
            system
                .iter(0, &guard)
                .map(vma_core::SpaceRef::maps)
                .collect()
        };
        scope.spawn(print).join().unwrap()
    });
    assert_eq!(printed, expected);
    drop(locks);
    let child = spaces[0].dup().unwrap();
    let reader = system.register();
    let guard = reader.pin();
    assert_eq!(
        system.find(child.id(), &guard).unwrap().maps(),
        child.maps()
    );
}

/// Nobody has an allocator any more when the last handle to its spaces and the last reader have gone.
struct Allocator(FramePool);

impl FrameAllocator for Allocator {
    fn allocate(&self) -> Option<NewFrame> {
        self.0.allocate()
    }
}

#[test]
fn the_memory_of_a_system_goes_with_its_last_handle_whoever_looks() {
    let frames = Arc::new(Allocator(FramePool::default()));
    let space = |system: &System<Paged>| {
        let backend = Paged::new(frames.clone());
        let space = system.create(SpaceConfig::default(), backend).unwrap();
        let at = memory::map(&space, 3);
        populate(&space, at, 3, 1);
        space
    };
    let system = System::default();
    let (one, two) = (space(&system), space(&system));
    let child = one.dup().unwrap();
    drop(system);
    let kept = two.downgrade();
    drop((one, two));
    assert_eq!(child.system().len(), 1);
    drop(child);
    drop(kept);
    assert_eq!(Arc::strong_count(&frames), 1, "no reader");

    let system = System::default();
    let only = space(&system);
    let reader = system.register();
    let guard = reader.pin();
    drop((system, only));
    assert!(Arc::strong_count(&frames) > 1, "a reader looks");
    drop(guard);
    drop(reader);
    assert_eq!(Arc::strong_count(&frames), 1, "the last one frees");
    assert_eq!(frames.0.stats().used, 0);
}

#[test]
fn a_space_can_live_without_a_system() {
    let space = AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), ());
    map(&space.unwrap());
}

#[test]
fn a_walk_sees_those_that_stay_once_and_in_order() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let system = System::new(SystemConfig {
        id_limit: 64,
        ..SystemConfig::default()
    });
    let stay: Vec<_> = (0..10).map(|_| create(&system)).collect();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut churn = Vec::new();
            for turn in 0.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                if churn.len() < 20 {
                    churn.push(create(&system));
                }
                if turn % 3 == 0 {
                    drop(churn.swap_remove(turn % churn.len()));
                }
            }
        });
        let reader = system.register();
        for _ in 0..2000 {
            let guard = reader.pin();
            let seen: Vec<_> = system.iter(0, &guard).map(vma_core::SpaceRef::id).collect();
            assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
            for space in &stay {
                assert!(seen.contains(&space.id()));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop(stay);
    assert!(system.is_empty());
}
