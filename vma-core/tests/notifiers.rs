//! Notifiers hear of what goes before it goes, with no lock held, and once more when it's gone.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod memory;
mod random;
mod watchdog;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use memory::{PAGE, RW, file, map, map_at, map_file, populate, space};
use random::stress_time;
use vma_core::paged::{Accessor, FramePool, Paged};
use vma_core::{
    Access, AddressSpace, Advice, Invalidation, InvalidationReason as Reason, MapFlags, MapRequest,
    Notifier, NotifierRegistration, Prot, RemapFlags, RemapRequest, SpaceConfig, System,
    SystemConfig, VmRange, Wait,
};

const ALL: VmRange = VmRange {
    start: 0,
    end: u64::MAX,
};

fn at(start: u64, pages: u64) -> VmRange {
    VmRange {
        start,
        end: start + pages * PAGE,
    }
}

/// Notes what it hears; starts are `true`.
#[derive(Default)]
struct Log(Mutex<Vec<(bool, VmRange, Reason)>>);

impl Notifier for Log {
    fn invalidate_start(&self, it: &Invalidation) {
        self.0.lock().unwrap().push((true, it.range, it.reason));
    }

    fn invalidate_end(&self, it: &Invalidation) {
        self.0.lock().unwrap().push((false, it.range, it.reason));
    }
}

impl Log {
    fn take(&self) -> Vec<(bool, VmRange, Reason)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// What has started since the last time, each of which has ended.
    #[track_caller]
    fn pairs(&self) -> Vec<(VmRange, Reason)> {
        let all = self.take();
        let of = |start| {
            let mut of: Vec<_> = all
                .iter()
                .filter(|event| event.0 == start)
                .map(|event| (event.1, event.2))
                .collect();
            of.sort_by_key(|event| event.0.start);
            of
        };
        assert_eq!(of(true), of(false), "{all:?}");
        of(true)
    }
}

fn logged(pool: &FramePool) -> (AddressSpace<Paged>, Arc<Log>, NotifierRegistration) {
    let space = space(pool);
    let log = Arc::new(Log::default());
    let registration = space.register_notifier(ALL, log.clone());
    (space, log, registration)
}

#[test]
fn each_call_that_takes_something_away_is_heard_of() {
    let pool = FramePool::default();
    let (space, log, _registration) = logged(&pool);
    let addr = map(&space, 8);
    populate(&space, addr, 8, 1);
    assert_eq!(log.pairs(), [], "what only adds is none");

    space.protect(addr, PAGE, Prot::READ).unwrap();
    assert_eq!(log.pairs(), [(at(addr, 1), Reason::ProtectVma)]);
    space
        .advise(addr + PAGE, 2 * PAGE, Advice::DONTNEED)
        .unwrap();
    assert_eq!(log.pairs(), [(at(addr + PAGE, 2), Reason::Clear)]);
    space
        .advise(addr + PAGE, PAGE, Advice::GUARD_INSTALL)
        .unwrap();
    assert_eq!(log.pairs(), [(at(addr + PAGE, 1), Reason::Clear)]);
    space
        .advise(addr + PAGE, PAGE, Advice::GUARD_REMOVE)
        .unwrap();
    space.advise(addr, PAGE, Advice::WILLNEED).unwrap();
    assert_eq!(log.pairs(), []);
    map_at(&space, addr + 2 * PAGE, 1);
    assert_eq!(log.pairs(), [(at(addr + 2 * PAGE, 1), Reason::Unmap)]);
    let child = space.dup().unwrap();
    assert_eq!(log.pairs(), [(ALL, Reason::ProtectPage)]);
    child.unmap(addr, PAGE).unwrap();
    assert_eq!(log.pairs(), [], "a child's are its own");
    space.unmap(addr + 3 * PAGE, PAGE).unwrap();
    assert_eq!(log.pairs(), [(at(addr + 3 * PAGE, 1), Reason::Unmap)]);
    space.unmap_downgraded(addr, PAGE).unwrap();
    space.unmap_exclusively(addr + PAGE, PAGE).unwrap();
    assert_eq!(log.pairs().len(), 2);
    drop(space);
    assert_eq!(log.pairs(), [(ALL, Reason::Release)]);
}

#[test]
fn moves_are_heard_of_at_both_ends() {
    let pool = FramePool::default();
    let (space, log, _registration) = logged(&pool);
    let from = map(&space, 4);
    let to = map(&space, 4);
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    space
        .remap(&RemapRequest {
            addr: from,
            old_len: PAGE,
            new_len: PAGE,
            flags,
            new_addr: to,
        })
        .unwrap();
    let heard = log.pairs();
    for page in [from, to] {
        let is_told =
            |event: &(VmRange, Reason)| event.0.contains(page) && event.1 == Reason::Unmap;
        assert!(heard.iter().any(is_told), "{heard:x?}");
    }
}

#[test]
fn a_heap_that_shrinks_is_heard_of_as_far_as_it_does() {
    let pool = FramePool::default();
    let (space, log, _registration) = logged(&pool);
    let start = 0x1000_0000;
    space.set_brk(start, start);
    assert_eq!(space.brk(start + 8 * PAGE), start + 8 * PAGE);
    assert_eq!(space.brk(0), start + 8 * PAGE);
    assert_eq!(log.pairs(), []);
    assert_eq!(space.brk(start + 3 * PAGE + 1), start + 3 * PAGE + 1);
    assert_eq!(log.pairs(), [(at(start + 4 * PAGE, 4), Reason::Unmap)]);
}

#[test]
fn a_notifier_hears_of_its_range_alone() {
    let pool = FramePool::default();
    let space = space(&pool);
    let addr = map(&space, 8);
    let log = Arc::new(Log::default());
    let registration = space.register_notifier(at(addr + 2 * PAGE, 2), log.clone());
    space.unmap(addr, 2 * PAGE).unwrap();
    space.unmap(addr + 4 * PAGE, 4 * PAGE).unwrap();
    assert_eq!(log.pairs(), []);
    space.unmap(addr, 3 * PAGE).unwrap();
    assert_eq!(log.pairs(), [(at(addr, 3), Reason::Unmap)]);
    registration.unregister();
    space.unmap(addr, 8 * PAGE).unwrap();
    assert_eq!(log.pairs(), []);
    assert_eq!(Arc::strong_count(&log), 1);
}

#[test]
fn a_copy_in_place_of_a_page_that_is_shown_is_heard_of() {
    let pool = FramePool::default();
    let (space, log, _registration) = logged(&pool);
    let addr = map(&space, 4);
    let mut cpu = space.accessor();
    // The page of zeros first, then a page of its own.
    cpu.load_u8(addr).unwrap();
    assert_eq!(log.pairs(), []);
    cpu.store_u8(addr, 1).unwrap();
    assert_eq!(log.pairs(), [(at(addr, 1), Reason::Clear)]);
    cpu.store_u8(addr, 2).unwrap();
    let child = space.dup().unwrap();
    log.pairs();
    cpu.store_u8(addr, 3).unwrap();
    assert_eq!(log.pairs(), [(at(addr, 1), Reason::Clear)]);
    assert_eq!(child.accessor().load_u8(addr), Ok(2));
    // A file's page by a private copy, with the space's lock held.
    let shown = map_file(&space, &file(2), 2, MapFlags::PRIVATE);
    space.touch(shown, 2 * PAGE, Access::Read).unwrap();
    assert_eq!(log.pairs(), []);
    space.touch(shown, 2 * PAGE, Access::Write).unwrap();
    assert_eq!(log.pairs(), [(at(shown, 2), Reason::Clear)]);
    assert_eq!(cpu.load_u8(shown), Ok(1));
    // By a guard that keeps the lock.
    let more = map_file(&space, &file(1), 1, MapFlags::PRIVATE);
    space.touch(more, PAGE, Access::Read).unwrap();
    space.write().touch(more, PAGE, Access::Write).unwrap();
    assert_eq!(log.pairs(), [(at(more, 1), Reason::Clear)]);
}

#[test]
fn a_file_that_lets_go_of_pages_is_heard_of_in_each_space() {
    let pool = FramePool::default();
    let (space, log, _registration) = logged(&pool);
    let (other, others_log, _others) = logged(&pool);
    let file = file(4);
    let shared = map_file(&space, &file, 4, MapFlags::SHARED);
    let private = map_file(&other, &file, 4, MapFlags::PRIVATE);
    file.object().punch_hole(PAGE, PAGE).unwrap();
    assert_eq!(log.pairs(), [(at(shared + PAGE, 1), Reason::Clear)]);
    assert_eq!(others_log.pairs(), [(at(private + PAGE, 1), Reason::Clear)]);
    file.truncate(2 * PAGE).unwrap();
    assert_eq!(log.pairs(), [(at(shared + 2 * PAGE, 2), Reason::Clear)]);
    assert_eq!(others_log.pairs().len(), 1);
}

/// A page table of the embedder's: what pages hold.
#[derive(Default)]
struct Shadow(Mutex<HashMap<u64, u64>>);

impl Notifier for Shadow {
    fn invalidate_start(&self, gone: &Invalidation) {
        let mut kept = self.0.lock().unwrap();
        kept.retain(|page, _| !gone.range.contains(*page));
    }
}

/// At start the old page is still there; at end it's gone, and nobody has its frame.
#[test]
fn the_start_comes_before_and_the_end_after() {
    struct Look {
        space: Weak<AddressSpace<Paged>>,
        pool: FramePool,
        seen: Mutex<Vec<(Option<u8>, usize)>>,
    }
    impl Look {
        fn look(&self, at: u64) {
            let space = self.space.upgrade().unwrap();
            let byte = space.accessor().load_u8(at).ok();
            let used = self.pool.stats().used;
            self.seen.lock().unwrap().push((byte, used));
        }
    }
    impl Notifier for Look {
        fn invalidate_start(&self, it: &Invalidation) {
            self.look(it.range.start);
        }
        fn invalidate_end(&self, it: &Invalidation) {
            self.look(it.range.start);
        }
    }
    let pool = FramePool::default();
    let space = Arc::new(space(&pool));
    let addr = map(&space, 1);
    populate(&space, addr, 1, 7);
    let look = Arc::new(Look {
        space: Arc::downgrade(&space),
        pool: pool.clone(),
        seen: Mutex::default(),
    });
    let _registration = space.register_notifier(ALL, look.clone());
    space.unmap(addr, PAGE).unwrap();
    assert_eq!(*look.seen.lock().unwrap(), [(Some(7), 1), (None, 0)]);
}

/// Everything that the documentation says a callback may do.
#[test]
fn a_callback_may_call_whatever_it_likes() {
    struct Busy {
        space: OnceLock<Weak<AddressSpace<Paged>>>,
        own: Mutex<Option<NotifierRegistration>>,
        others: Mutex<Vec<NotifierRegistration>>,
        depth: AtomicU32,
        scratch: u64,
        heard: AtomicU32,
    }
    impl Notifier for Busy {
        fn invalidate_start(&self, it: &Invalidation) {
            self.heard.fetch_add(1, Ordering::Relaxed);
            if self.depth.fetch_add(1, Ordering::Relaxed) > 0 {
                return;
            }
            let space = self.space.get().unwrap().upgrade().unwrap();
            // Looking up, with and without the lock.
            assert!(!space.maps().is_empty());
            let _ = space.read().find(it.range.start);
            // Guest memory that has to be made present, and that isn't there.
            let mut cpu = space.accessor();
            cpu.store_u8(self.scratch, 1).unwrap();
            assert!(cpu.load_u8(0x1000).is_err());
            // Calls that call back.
            space.unmap(self.scratch, PAGE).unwrap();
            map_at(&space, self.scratch, 1);
            space.write().unmap(self.scratch, PAGE).unwrap();
            map_at(&space, self.scratch, 1);
            drop(space.dup().unwrap());
            // Registering, and unregistering itself.
            let log = Arc::new(Log::default());
            let registration = space.register_notifier(ALL, log);
            self.others.lock().unwrap().push(registration);
            drop(self.own.lock().unwrap().take());
        }

        fn invalidate_end(&self, _: &Invalidation) {
            self.depth.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let space = Arc::new(space(&pool));
    let (addr, scratch) = (map(&space, 4), map(&space, 1));
    let busy = Arc::new(Busy {
        space: OnceLock::new(),
        own: Mutex::default(),
        others: Mutex::default(),
        depth: AtomicU32::new(0),
        scratch,
        heard: AtomicU32::new(0),
    });
    busy.space.set(Arc::downgrade(&space)).unwrap();
    let calls: [&dyn Fn(); 5] = [
        &|| space.unmap(addr, PAGE).unwrap(),
        &|| map_at(&space, addr, 1),
        &|| space.protect(addr, PAGE, Prot::READ).unwrap(),
        &|| space.advise(addr + PAGE, PAGE, Advice::DONTNEED).unwrap(),
        &|| drop(space.dup().unwrap()),
    ];
    for call in calls {
        let registration = space.register_notifier(ALL, busy.clone());
        *busy.own.lock().unwrap() = Some(registration);
        busy.heard.store(0, Ordering::Relaxed);
        call();
        assert_eq!(busy.depth.load(Ordering::Relaxed), 0, "it hears of ends");
        assert!(
            busy.heard.load(Ordering::Relaxed) > 1,
            "and of its own calls"
        );
        assert!(busy.own.lock().unwrap().is_none());
    }
    space.check().unwrap();
}

/// Between a call's start and its lock, or beside what takes no lock.
#[test]
fn one_that_comes_while_something_is_under_way_hears_of_it() {
    struct Registers {
        space: OnceLock<Weak<AddressSpace<Paged>>>,
        new: Mutex<Vec<(Arc<Log>, NotifierRegistration)>>,
    }
    impl Notifier for Registers {
        fn invalidate_start(&self, _: &Invalidation) {
            let space = self.space.get().unwrap().upgrade().unwrap();
            let mut new = self.new.lock().unwrap();
            if new.is_empty() {
                let log = Arc::new(Log::default());
                let registration = space.register_notifier(ALL, log.clone());
                new.push((log, registration));
            }
        }
    }
    let pool = FramePool::default();
    let space = Arc::new(space(&pool));
    let addr = map(&space, 4);
    let registers = Arc::new(Registers {
        space: OnceLock::new(),
        new: Mutex::default(),
    });
    registers.space.set(Arc::downgrade(&space)).unwrap();
    let _registration = space.register_notifier(ALL, registers.clone());
    let file = file(2);
    let shown = map_file(&space, &file, 2, MapFlags::SHARED);
    space.accessor().load_u8(addr).unwrap();
    let calls: [(&dyn Fn(), VmRange); 5] = [
        (
            &|| space.unmap(addr + PAGE, PAGE).unwrap(),
            at(addr + PAGE, 1),
        ),
        (&|| drop(space.dup().unwrap()), ALL),
        (&|| file.object().punch_hole(0, PAGE).unwrap(), at(shown, 1)),
        (
            &|| space.touch(addr, 1, Access::Write).unwrap(),
            at(addr, 1),
        ),
        (
            &|| {
                space.accessor().load_u8(addr + 2 * PAGE).unwrap();
                space.accessor().store_u8(addr + 2 * PAGE, 1).unwrap();
            },
            at(addr + 2 * PAGE, 1),
        ),
    ];
    for (call, range) in calls {
        call();
        let (log, registration) = registers.new.lock().unwrap().pop().unwrap();
        let heard = log.pairs();
        let covers = |one: &(VmRange, Reason)| one.0.contains(range.start);
        assert!(heard.iter().any(covers), "{range:?}: {heard:?}");
        drop(registration);
    }
}

/// A guard that the embedder holds: nothing is called back if it has announced the range.
#[test]
fn calls_on_an_announced_guard_call_nothing_back() {
    struct NoLock(Weak<AddressSpace<Paged>>, AtomicU32);
    impl Notifier for NoLock {
        fn invalidate_start(&self, _: &Invalidation) {
            let space = self.0.upgrade().unwrap();
            assert!(space.try_write().is_some(), "the lock is held");
            self.1.fetch_add(1, Ordering::Relaxed);
        }
        fn invalidate_end(&self, it: &Invalidation) {
            self.invalidate_start(it);
        }
    }
    let pool = FramePool::default();
    let space = Arc::new(space(&pool));
    let addr = map(&space, 4);
    let no_lock = Arc::new(NoLock(Arc::downgrade(&space), AtomicU32::new(0)));
    let _registration = space.register_notifier(ALL, no_lock.clone());
    let mut guard = space.write_announced(at(addr, 4), Wait::forever()).unwrap();
    guard.unmap(addr, PAGE).unwrap();
    guard.protect(addr + PAGE, PAGE, Prot::READ).unwrap();
    assert_eq!(no_lock.1.load(Ordering::Relaxed), 1);
    drop(guard);
    assert_eq!(no_lock.1.load(Ordering::Relaxed), 2);
    // All other calls, as they are.
    space.unmap(addr + PAGE, PAGE).unwrap();
    space.protect(addr + 2 * PAGE, PAGE, Prot::READ).unwrap();
    space
        .advise(addr + 2 * PAGE, PAGE, Advice::DONTNEED)
        .unwrap();
    map_at(&space, addr + 2 * PAGE, 1);
    drop(space.dup().unwrap());
    assert_eq!(no_lock.1.load(Ordering::Relaxed), 12);
}

#[test]
fn a_guard_that_nothing_was_announced_for_calls_back_under_its_lock() {
    let pool = FramePool::default();
    let (space, log, _registration) = logged(&pool);
    let addr = map(&space, 4);
    let mut guard = space.write();
    guard.unmap(addr, PAGE).unwrap();
    assert_eq!(log.take(), [(true, at(addr, 1), Reason::Unmap)]);
    drop(guard);
    assert_eq!(log.take(), [(false, at(addr, 1), Reason::Unmap)]);
    // Without memory behind it as well.
    let space = AddressSpace::default();
    let addr = space.map(&MapRequest::anonymous(PAGE, RW)).unwrap();
    let _registration = space.register_notifier(ALL, log.clone());
    space.write().unmap(addr, PAGE).unwrap();
    assert_eq!(log.pairs(), [(at(addr, 1), Reason::Unmap)]);
}

#[test]
fn a_panic_in_a_callback_is_the_calls_when_it_is_complete() {
    struct Bad(AtomicBool);
    impl Notifier for Bad {
        fn invalidate_start(&self, _: &Invalidation) {
            assert!(!self.0.load(Ordering::Relaxed), "start");
        }
        fn invalidate_end(&self, _: &Invalidation) {
            assert!(!self.0.load(Ordering::Relaxed), "end");
        }
    }
    let pool = FramePool::default();
    let space = space(&pool);
    let addr = map(&space, 4);
    let bad = Arc::new(Bad(AtomicBool::new(true)));
    let log = Arc::new(Log::default());
    let _registrations = (
        space.register_notifier(ALL, bad.clone()),
        space.register_notifier(ALL, log.clone()),
    );
    let panics = |call: &dyn Fn()| catch_unwind(AssertUnwindSafe(call)).is_err();
    assert!(panics(&|| space.unmap(addr, PAGE).unwrap()));
    assert_eq!(log.pairs(), [(at(addr, 1), Reason::Unmap)]);
    assert!(panics(&|| {
        space.write().unmap(addr + PAGE, PAGE).unwrap();
    }));
    assert_eq!(log.pairs(), [(at(addr + PAGE, 1), Reason::Unmap)]);
    assert!(panics(&|| drop(space.dup())));
    let mut cpu = space.accessor();
    cpu.load_u8(addr + 2 * PAGE).unwrap();
    assert!(panics(&|| {
        let _ = space.touch(addr + 2 * PAGE, 1, Access::Write);
    }));
    bad.0.store(false, Ordering::Relaxed);
    space.check().unwrap();
    assert_eq!(space.totals().total, 2, "what was called for has been done");
    cpu.store_u8(addr + 2 * PAGE, 1).unwrap();
    space.unmap(addr, 4 * PAGE).unwrap();
}

#[test]
fn a_space_of_a_system_is_heard_of_at_its_forks_and_its_end() {
    let system = System::<Paged>::new(SystemConfig::default());
    let pool = FramePool::default();
    let backend = Paged::new(Arc::new(pool.clone()));
    let space = AddressSpace::with_backend(SpaceConfig::default(), system.domain(), backend);
    let handle = system.adopt(space.unwrap()).unwrap();
    let log = Arc::new(Log::default());
    let registration = handle.register_notifier(ALL, log.clone());
    let child = handle.dup().unwrap();
    assert_eq!(log.pairs(), [(ALL, Reason::ProtectPage)]);
    assert!(handle.exit());
    assert_eq!(log.pairs(), [(ALL, Reason::Release)]);
    assert_eq!(Arc::strong_count(&log), 1, "it's let go of");
    drop((registration, child));
}

#[test]
fn what_is_translated_beside_an_invalidation_isnt_kept() {
    let pool = FramePool::default();
    let (space, _log, registration) = logged(&pool);
    let addr = map(&space, 64);
    let page = at(addr, 1);
    let sequence = registration.read_begin(page);
    assert!(!registration.read_retry(page, sequence));
    space.unmap(addr + PAGE, PAGE).unwrap();
    assert!(!registration.read_retry(page, sequence), "elsewhere");
    space.unmap(addr, PAGE).unwrap();
    assert!(registration.read_retry(page, sequence), "between");
    let guard = space.write_announced(at(addr, 2), Wait::forever()).unwrap();
    assert!(registration.is_invalidating(page));
    let sequence = registration.read_begin(page);
    assert!(registration.read_retry(page, sequence), "meanwhile");
    drop(guard);
    assert!(!registration.is_invalidating(page));
    assert!(
        registration.read_retry(page, sequence),
        "it began before the end"
    );
    // More than are remembered.
    let sequence = registration.read_begin(page);
    for other in 2..64 {
        space.unmap(addr + other * PAGE, PAGE).unwrap();
    }
    assert!(registration.read_retry(page, sequence), "nobody knows");
}

/// A shadow never shows what a call that has returned has taken away.
#[test]
fn a_shadow_shows_nothing_old() {
    const BUSY: u64 = 0;
    let _watchdog = watchdog::watch(stress_time() + Duration::from_mins(2));
    let pool = FramePool::default();
    let space = space(&pool);
    let pages = 4;
    let addr = map(&space, pages);
    let shadow = Arc::new(Shadow::default());
    let registration = space.register_notifier(ALL, shadow.clone());
    // What a page holds: twice a number that is stored there, and 1 more when it has been taken away again.
    let holds: Vec<AtomicU64> = (0..pages).map(|_| AtomicU64::new(1)).collect();
    let shown = AtomicU64::new(0);
    let end = Instant::now() + stress_time();
    let translate = |turn: u64, cpu: &mut Accessor<'_>| {
        let page = turn % pages;
        let start = addr + page * PAGE;
        let sequence = registration.read_begin(at(start, 1));
        if let Ok(number) = cpu.load_u64(start) {
            let mut kept = shadow.0.lock().unwrap();
            if !registration.read_retry(at(start, 1), sequence) {
                kept.insert(start, number);
            }
        }
        let holds = &holds[page as usize];
        let before = holds.load(Ordering::SeqCst);
        let kept = shadow.0.lock().unwrap().get(&start).copied();
        let after = holds.load(Ordering::SeqCst);
        // A store to a page that stays isn't heard of.
        if let Some(number) = kept
            && before == after
            && before % 2 == 1
        {
            assert_eq!(number, 0, "an old page is shown");
            shown.fetch_add(1, Ordering::Relaxed);
        }
    };
    let change = |turn: u64, cpu: &mut Accessor<'_>| {
        let page = turn % pages;
        let start = addr + page * PAGE;
        let holds = &holds[page as usize];
        holds.store(BUSY, Ordering::SeqCst);
        cpu.store_u64(start, turn).unwrap();
        holds.store(2 * turn, Ordering::SeqCst);
        thread::yield_now();
        holds.store(BUSY, Ordering::SeqCst);
        match turn / pages % 3 {
            0 => {
                space.unmap(start, PAGE).unwrap();
                map_at(&space, start, 1);
            }
            1 => space.advise(start, PAGE, Advice::DONTNEED).unwrap(),
            _ => map_at(&space, start, 1),
        }
        holds.store(2 * turn + 1, Ordering::SeqCst);
        thread::yield_now();
    };
    thread::scope(|scope| {
        let run = |f: &dyn Fn(u64, &mut Accessor<'_>)| {
            let mut cpu = space.accessor();
            let mut turn = 0;
            while Instant::now() < end {
                turn += 1;
                f(turn, &mut cpu);
            }
        };
        scope.spawn(move || run(&translate));
        scope.spawn(move || run(&translate));
        run(&change);
    });
    assert!(shown.load(Ordering::Relaxed) > 0);
}
