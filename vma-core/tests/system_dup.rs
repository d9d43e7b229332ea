//! fork(2) between the parent's lock and the dup semaphore.
#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod owner;
mod watchdog;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use memory::{PAGE, RW, populate};
use owner::followed;
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AddressSpace, CancelToken, DupError, Errno, ForkError, GaveUp, LockTimes, MapFlags,
    MapRequest, OpenFile, Overcommit, RegisterError, SpaceConfig, SpaceHandle, System,
    SystemConfig, Wait,
};

const SOON: Duration = Duration::from_millis(30);
const AT: u64 = 0x1000_0000;

fn system(change: impl FnOnce(&mut SystemConfig)) -> System {
    let mut config = SystemConfig::default();
    change(&mut config);
    System::new(config)
}

fn create(system: &System) -> SpaceHandle {
    system.create(SpaceConfig::default(), ()).unwrap()
}

/// Keeps a space's lock in another thread until it is dropped.
struct Busy {
    stop: mpsc::Sender<()>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Busy {
    fn new(space: &SpaceHandle) -> Self {
        let space = space.clone();
        let (stop, stopped) = mpsc::channel();
        let (begin, started) = mpsc::channel();
        let thread = thread::spawn(move || {
            let guard = space.write();
            begin.send(()).unwrap();
            let _ = stopped.recv();
            drop(guard);
        });
        started.recv().unwrap();
        Busy {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        self.thread.take().unwrap().join().unwrap();
    }
}

fn map_file(space: &AddressSpace, file: &Arc<OpenFile>) {
    let request = MapRequest::file(file.clone(), 0, PAGE, RW, MapFlags::SHARED).fixed(AT);
    space.map(&request).unwrap();
}

#[test]
fn a_child_is_a_space_of_its_own_in_the_same_system() {
    let pool = FramePool::default();
    let system = System::<Paged>::default();
    let backend = Paged::new(Arc::new(pool.clone()));
    let parent = system.create(SpaceConfig::default(), backend).unwrap();
    let at = memory::map(&parent, 2);
    populate(&parent, at, 2, 7);
    let child = parent.dup().unwrap();
    assert_eq!(child.id().get(), 2);
    assert_eq!(child.maps(), parent.maps());
    assert_eq!(child.accessor().load_u8(at), Ok(7));
    populate(&parent, at, 1, 8);
    assert_eq!(child.accessor().load_u8(at), Ok(7));
    let reader = system.register();
    let guard = reader.pin();
    assert_eq!(system.find(2, &guard).unwrap().maps(), child.maps());
    assert!(child.system().get(1, &guard).is_some());
    drop(parent);
    assert_eq!(child.accessor().load_u8(at + PAGE), Ok(7));
    drop(guard);
    drop(child);
    assert_eq!(pool.stats().used, 0);
}

#[test]
fn a_dup_that_waits_for_a_busy_parent_is_in_nobodys_way() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let system = System::default();
    let (parent, other) = (create(&system), create(&system));
    let busy = Busy::new(&parent);
    thread::scope(|scope| {
        let dup = scope.spawn(|| parent.dup().unwrap().id());
        thread::sleep(SOON);
        for _ in 0..3 {
            drop(system.quiesce_dups(Wait::forever()).unwrap());
            other.dup().unwrap();
        }
        assert!(!dup.is_finished());
        drop(busy);
        dup.join().unwrap();
    });
}

#[test]
fn a_dup_that_waits_for_a_registration_leaves_its_parent_free() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let system = System::default();
    let parent = create(&system);
    let quiesced = system.quiesce_dups(Wait::forever()).unwrap();
    thread::scope(|scope| {
        let dup = scope.spawn(|| parent.dup().unwrap().id());
        thread::sleep(SOON);
        let mapped = scope.spawn(|| parent.map(&MapRequest::anonymous(PAGE, RW)).is_ok());
        assert!(mapped.join().unwrap());
        assert!(!dup.is_finished());
        assert_eq!(system.len(), 1);
        drop(quiesced);
        dup.join().unwrap();
    });
}

/// The same parent, the old order: who registers waits for the parent, and every other fork for who registers.
#[test]
fn in_nested_order_everybody_waits_for_a_busy_parent() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let system = system(|config| config.nested_dup = true);
    let (parent, other) = (create(&system), create(&system));
    other.dup().unwrap();
    let busy = Busy::new(&parent);
    thread::scope(|scope| {
        let dup = scope.spawn(|| parent.dup().unwrap().id());
        thread::sleep(SOON);
        let quiesce = scope.spawn(|| drop(system.quiesce_dups(Wait::forever()).unwrap()));
        thread::sleep(SOON);
        let victim = scope.spawn(|| other.dup().unwrap().id());
        thread::sleep(SOON);
        assert!(!dup.is_finished() && !quiesce.is_finished() && !victim.is_finished());
        drop(busy);
    });
}

#[test]
fn either_wait_of_a_dup_can_be_given_up_and_nothing_is_left() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let file = followed(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    for nested_dup in [false, true] {
        let system = system(|config| config.nested_dup = nested_dup);
        let parent = create(&system);
        map_file(&parent, &file);
        opened.store(0, Ordering::Relaxed);
        let check = |error: ForkError, reason: GaveUp| {
            assert_eq!(error, ForkError::GaveUp(reason));
            assert_eq!(error.errno(), Errno::EINTR);
            assert_eq!((system.len(), file.object().mapping_count()), (1, 1));
            assert_eq!(opened.load(Ordering::Relaxed), 0);
        };
        let cancel_later = |token: &CancelToken| {
            let token = token.clone();
            thread::spawn(move || {
                thread::sleep(SOON);
                token.cancel();
            })
        };
        let busy = Busy::new(&parent);
        let late = parent.dup_with(Wait::at_most(SOON)).unwrap_err();
        check(late, GaveUp::TimedOut);
        let token = CancelToken::new();
        let cancelling = cancel_later(&token);
        let cancelled = parent.dup_with(Wait::killable(&token)).unwrap_err();
        check(cancelled, GaveUp::Cancelled);
        cancelling.join().unwrap();
        drop(busy);
        let second = CancelToken::new();
        thread::scope(|scope| {
            let quiesced = system.quiesce_dups(Wait::forever()).unwrap();
            let dup = scope.spawn(|| parent.dup_with(Wait::at_most(SOON)).unwrap_err());
            check(dup.join().unwrap(), GaveUp::TimedOut);
            let cancelling = cancel_later(&second);
            let dup = scope.spawn(|| parent.dup_with(Wait::killable(&second)).unwrap_err());
            check(dup.join().unwrap(), GaveUp::Cancelled);
            cancelling.join().unwrap();
            drop(quiesced);
        });
        // Both locks are free again.
        drop(system.quiesce_dups(Wait::at_most(SOON)).unwrap());
        parent.dup_with(Wait::at_most(SOON)).unwrap();
    }
}

#[test]
fn a_quiesce_can_be_given_up() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let system = System::default();
    let first = system.quiesce_dups(Wait::forever()).unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| system.quiesce_dups(Wait::at_most(SOON)).err());
        assert_eq!(second.join().unwrap(), Some(GaveUp::TimedOut));
    });
    drop(first);
    create(&system).dup().unwrap();
}

#[test]
fn a_dup_that_fails_has_left_the_indexes_before_its_parent_is_free() {
    let told = Arc::new(AtomicUsize::new(0));
    let count = told.clone();
    let file = followed(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let system = System::default();
    let config = SpaceConfig {
        overcommit: Overcommit::Never { limit_pages: 4 },
        ..SpaceConfig::default()
    };
    let parent = system.create(config, ()).unwrap();
    map_file(&parent, &file);
    parent.map(&MapRequest::anonymous(4 * PAGE, RW)).unwrap();
    parent
        .configure(|config| config.overcommit = Overcommit::Never { limit_pages: 3 })
        .unwrap();
    told.store(0, Ordering::Relaxed);
    let error = parent.dup().unwrap_err();
    assert!(
        matches!(error, ForkError::Dup(DupError::Limit(_))),
        "{error}"
    );
    assert_eq!(error.errno(), Errno::ENOMEM);
    assert_eq!((system.len(), file.object().mapping_count()), (1, 1));
    assert_eq!(told.load(Ordering::Relaxed), 0);
    assert!(parent.try_write().is_some());
    drop(system.quiesce_dups(Wait::at_most(SOON)).unwrap());
}

/// The child of a pinned page needs a copy of it: by then its mappings are in the index.
#[test]
fn a_dup_without_memory_for_pages_leaves_nothing() {
    let pool = FramePool::new(5);
    let system = System::<Paged>::default();
    let backend = Paged::new(Arc::new(pool.clone()));
    let parent = system.create(SpaceConfig::default(), backend).unwrap();
    let file = memory::file(4);
    let at = memory::map_file(&parent, &file, 4, MapFlags::PRIVATE);
    populate(&parent, at, 4, 1);
    let own = memory::map(&parent, 1);
    let mut cpu = parent.accessor();
    let pin = cpu.pin_page(own, Access::Write).unwrap();
    for _ in 0..3 {
        assert_eq!(parent.dup().unwrap_err().errno(), Errno::ENOMEM);
        assert_eq!((system.len(), file.object().mapping_count()), (1, 1));
        assert!(parent.try_write().is_some());
        drop(system.quiesce_dups(Wait::at_most(SOON)).unwrap());
        memory::check(&parent);
    }
    drop(pin);
    drop(parent.dup().unwrap());
    drop(cpu);
    drop(parent);
    assert_eq!((pool.stats().used, file.object().mapping_count()), (0, 0));
}

#[test]
fn a_child_that_finds_no_number_ends_as_a_space_does() {
    let count = Arc::new(AtomicU64::new(0));
    let told = count.clone();
    let file = followed(move |opened| {
        told.fetch_add(if opened { 1 } else { 1 << 32 }, Ordering::Relaxed);
    });
    let system = system(|config| config.id_limit = 2);
    let parent = create(&system);
    map_file(&parent, &file);
    count.store(0, Ordering::Relaxed);
    let error = parent.dup().unwrap_err();
    assert_eq!(error, ForkError::Register(RegisterError::Full { limit: 2 }));
    assert_eq!(error.errno(), Errno::EAGAIN);
    assert_eq!(
        count.load(Ordering::Relaxed),
        (1 << 32) + 1,
        "opened, closed"
    );
    assert_eq!((system.len(), file.object().mapping_count()), (1, 1));
}

#[test]
fn owners_are_told_with_neither_lock_held_and_before_anybody_finds_the_child() {
    let system = System::default();
    let inside = system.clone();
    let seen = Arc::new(AtomicUsize::new(0));
    let heard = seen.clone();
    let file = followed(move |opened| {
        if opened && inside.len() == 1 {
            drop(inside.quiesce_dups(Wait::at_most(SOON)).unwrap());
            let reader = inside.register();
            let parent = inside.get(1, &reader.pin()).unwrap();
            assert!(parent.try_write().is_some());
            assert_eq!(inside.len(), 1);
            heard.fetch_add(1, Ordering::Relaxed);
        }
    });
    let parent = create(&system);
    map_file(&parent, &file);
    seen.store(0, Ordering::Relaxed);
    parent.dup().unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    drop(parent);
    // Retired records have the file, whose owner has the system.
    system.domain().synchronize(None).unwrap();
}

#[test]
fn an_owner_that_panics_at_a_dup_leaves_both_locks_and_the_system_usable() {
    let armed = Arc::new(AtomicBool::new(false));
    let panics = armed.clone();
    let file = followed(move |opened| {
        assert!(!opened || !panics.load(Ordering::Relaxed), "the owner's");
    });
    let system = System::default();
    let parent = create(&system);
    map_file(&parent, &file);
    armed.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| parent.dup().is_ok())).is_err());
    armed.store(false, Ordering::Relaxed);
    assert_eq!((system.len(), file.object().mapping_count()), (1, 1));
    drop(system.quiesce_dups(Wait::at_most(SOON)).unwrap());
    parent.dup().unwrap();
}

/// Registrations in a row and a parent that is never free for longer than an instant: each dup ends all the same.
#[test]
fn no_dup_is_overtaken_for_ever() {
    let _watchdog = watchdog::watch(Duration::from_secs(100));
    let system = System::default();
    let parent = create(&system);
    let stop = AtomicBool::new(false);
    let registrations = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let quiesced = system.quiesce_dups(Wait::forever()).unwrap();
                    thread::sleep(Duration::from_micros(200));
                    drop(quiesced);
                    registrations.fetch_add(1, Ordering::Relaxed);
                }
            });
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let guard = parent.write();
                    thread::sleep(Duration::from_micros(200));
                    drop(guard);
                }
            });
        }
        let until = Instant::now() + Duration::from_millis(500);
        let mut dups = 0;
        while Instant::now() < until || dups == 0 {
            parent.dup().unwrap();
            dups += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(registrations.load(Ordering::Relaxed) > 0);
}

#[test]
fn waits_for_the_semaphore_and_holds_of_it_are_heard_of() {
    let times = Arc::new(LockTimes::default());
    let observer = times.clone();
    let system = system(|config| config.dup_observer = Some(observer));
    let parent = create(&system);
    parent.dup().unwrap();
    // Tried, not waited for.
    assert_eq!((times.waited(false).count, times.held(false).count), (0, 1));
    let quiesced = system.quiesce_dups(Wait::forever()).unwrap();
    thread::scope(|scope| {
        let dup = scope.spawn(|| parent.dup().unwrap().id());
        thread::sleep(SOON);
        drop(quiesced);
        dup.join().unwrap();
    });
    assert!(times.waited(false).longest >= SOON / 2);
    assert!(times.held(true).longest >= SOON);
    assert_eq!((times.waited(true).count, times.held(true).count), (1, 1));
}

#[cfg(debug_assertions)]
#[test]
fn sleeping_on_one_of_the_two_locks_with_the_other_held_is_caught() {
    fn refused(f: impl FnOnce()) -> bool {
        let result = catch_unwind(AssertUnwindSafe(f));
        result.is_err_and(|panic| {
            panic
                .downcast_ref::<String>()
                .is_some_and(|text| text.contains("lock order"))
        })
    }
    let system = System::default();
    let (one, two) = (create(&system), create(&system));
    let quiesced = system.quiesce_dups(Wait::forever()).unwrap();
    assert!(refused(|| drop(one.write())));
    assert!(refused(|| drop(one.read())));
    // Without waiting.
    drop(one.try_write().unwrap());
    drop(one.try_read().unwrap());
    assert!(refused(|| drop(one.dup())), "nor this");
    drop(quiesced);
    let (first, second) = if std::ptr::from_ref(one.space()) < std::ptr::from_ref(two.space()) {
        (&one, &two)
    } else {
        (&two, &one)
    };
    let held = first.write();
    assert!(refused(|| drop(system.quiesce_dups(Wait::forever()))));
    drop(second.write());
    drop(held);
    drop(one.dup().unwrap());
}
