//! The three strengths of reading, downgrade, and giving up.
#![allow(clippy::unwrap_used, reason = "tests may")]

mod watchdog;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use vma_core::{
    AddressSpace, Busy, CancelToken, Errno, GaveUp, MapError, MapRequest, Prot, ProtectError,
    UnmapError, Wait,
};

const PAGE: u64 = 4096;
const BASE: u64 = 0x1000_0000;
const SOON: Duration = Duration::from_millis(20);

fn map(space: &AddressSpace, page: u64, pages: u64, prot: Prot) {
    let request = MapRequest::anonymous(pages * PAGE, prot).fixed(BASE + page * PAGE);
    space.map(&request).unwrap();
}

fn at(page: u64) -> u64 {
    BASE + page * PAGE
}

#[test]
fn a_locked_mapping_holds_up_only_the_calls_that_replace_it() {
    let space = AddressSpace::default();
    for page in [0, 10, 20] {
        map(&space, page, 4, Prot::READ);
    }
    let token = CancelToken::new();
    token.cancel();
    let killed = || space.write_with(Wait::killable(&token)).unwrap();
    thread::scope(|scope| {
        let (is_locked, when_locked) = mpsc::channel();
        let (let_go, when_let_go) = mpsc::channel::<()>();
        let holder = scope.spawn({
            let space = &space;
            move || {
                let reader = space.register();
                let locked = space.lock_vma(at(11), &reader.pin()).unwrap().unwrap();
                assert_eq!(locked.vma().start(), at(10));
                is_locked.send(()).unwrap();
                when_let_go.recv().unwrap();
            }
        });
        when_locked.recv().unwrap();
        // Elsewhere, free space beside it included (another protection: nothing to merge).
        killed().unmap(at(0), PAGE).unwrap();
        killed().protect(at(20), PAGE, Prot::empty()).unwrap();
        killed()
            .map(&MapRequest::anonymous(PAGE, Prot::empty()).fixed(at(14)))
            .unwrap();
        let before = space.read().maps();
        // What is in it or takes it in: each fails with EINTR, and nothing has changed.
        let unmap = killed().unmap(at(10), PAGE).unwrap_err();
        assert_eq!(unmap.errno(), Errno::EINTR);
        let protect = killed().protect(at(12), PAGE, Prot::empty()).unwrap_err();
        assert_eq!(protect.errno(), Errno::EINTR);
        let join = killed().map(&MapRequest::anonymous(PAGE, Prot::READ).fixed(at(9)));
        assert_eq!(join.unwrap_err().errno(), Errno::EINTR);
        let over = killed().map(&MapRequest::anonymous(PAGE, Prot::empty()).fixed(at(13)));
        assert_eq!(over.unwrap_err().errno(), Errno::EINTR);
        let advise = killed().advise(at(10), PAGE, vma_core::Advice::DONTFORK);
        assert_eq!(advise.unwrap_err().errno(), Errno::EINTR);
        assert_eq!(space.read().maps(), before);
        space.check().unwrap();
        let_go.send(()).unwrap();
        holder.join().unwrap();
    });
    killed().unmap(at(10), PAGE).unwrap();
}

#[test]
fn who_finds_a_mapping_busy_can_wait_for_the_call() {
    let space = AddressSpace::default();
    map(&space, 0, 4, Prot::READ);
    let reader = space.register();
    let locked = space.lock_vma(at(0), &reader.pin()).unwrap().unwrap();
    thread::scope(|scope| {
        let call = scope.spawn(|| space.protect(at(0), 4 * PAGE, Prot::empty()));
        let other = scope.spawn(|| {
            let reader = space.register();
            while space.lock_vma(at(0), &reader.pin()).is_ok() {
                thread::yield_now();
            }
            assert_eq!(space.lock_vma(at(0), &reader.pin()).unwrap_err(), Busy);
            let timed_out = space.lock_vma_with(at(0), &reader, Wait::at_most(SOON));
            assert_eq!(timed_out.unwrap_err(), GaveUp::TimedOut);
            let found = space.lock_vma_with(at(0), &reader, Wait::forever());
            found.unwrap().unwrap().vma().flags()
        });
        thread::sleep(2 * SOON);
        assert!(!call.is_finished() && !other.is_finished());
        drop(locked);
        call.join().unwrap().unwrap();
        let flags = other.join().unwrap();
        assert!(!flags.contains(vma_core::VmaFlags::READ));
    });
    assert!(space.lock_vma(at(100), &reader.pin()).unwrap().is_none());
}

#[test]
fn a_downgrade_keeps_the_layout_and_the_hooks_wait() {
    let space = AddressSpace::default();
    map(&space, 0, 4, Prot::READ);
    let mut exclusive = space.write();
    exclusive.unmap(at(1), PAGE).unwrap();
    let shared = exclusive.downgrade();
    let text = shared.maps();
    thread::scope(|scope| {
        let reader = scope.spawn(|| space.totals());
        assert_eq!(reader.join().unwrap().map_count, 2);
        let writer = scope.spawn(|| space.unmap(at(0), PAGE));
        thread::sleep(SOON);
        assert!(!writer.is_finished());
        assert_eq!(shared.maps(), text);
        drop(shared);
        writer.join().unwrap().unwrap();
    });
    assert_eq!(space.totals().map_count, 1);
}

#[test]
fn a_wait_for_either_side_can_be_given_up() {
    let space = AddressSpace::default();
    let token = CancelToken::new();
    let held = space.write();
    thread::scope(|scope| {
        let read = scope.spawn(|| space.read_with(Wait::killable(&token)).err());
        let write = scope.spawn(|| space.write_with(Wait::killable(&token)).err());
        thread::sleep(SOON);
        token.cancel();
        assert_eq!(read.join().unwrap(), Some(GaveUp::Cancelled));
        assert_eq!(write.join().unwrap(), Some(GaveUp::Cancelled));
        let tried = scope.spawn(|| space.try_read().is_none() && space.try_write().is_none());
        assert!(tried.join().unwrap());
    });
    drop(held);
    assert!(space.try_read().is_some() && space.try_write().is_some());
}

#[cfg(debug_assertions)]
#[test]
fn a_wrong_lock_order_is_caught() {
    fn refused(f: impl FnOnce()) -> bool {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
        result.is_err_and(|panic| {
            panic
                .downcast_ref::<String>()
                .is_some_and(|text| text.contains("lock order"))
        })
    }
    let spaces = [AddressSpace::default(), AddressSpace::default()];
    map(&spaces[0], 0, 1, Prot::READ);
    let reader = spaces[0].register();
    let locked = spaces[0].lock_vma(at(0), &reader.pin()).unwrap();
    assert!(
        refused(|| drop(spaces[0].read())),
        "a space after a mapping"
    );
    assert!(refused(|| drop(spaces[1].write())));
    drop(locked);
    let second = spaces[1].read();
    assert!(
        refused(|| drop(spaces[0].read())),
        "the higher address first"
    );
    assert!(refused(|| drop(spaces[1].write())), "twice");
    drop(second);
    let first = spaces[0].write();
    drop(spaces[1].write());
    drop(first);
}

/// Page 0 of each block of 16 is never unmapped.
const BLOCKS: u64 = 16;

/// One reader of the stress: lookups, mapping locks, maps.
fn read_along(space: &AddressSpace, seed: u64, stop: &AtomicBool, locks: &AtomicU64) {
    let reader = space.register();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    while !stop.load(Ordering::Relaxed) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let addr = at(state % BLOCKS * 16);
        match state >> 60 {
            0 => {
                let maps = space.read().maps();
                assert!(maps.lines().count() >= BLOCKS as usize);
            }
            1..4 => {
                let wait = Wait::at_most(Duration::from_micros(50));
                if let Ok(locked) = space.lock_vma_with(addr, &reader, wait) {
                    let locked = locked.expect("never unmapped");
                    let guard = reader.pin();
                    let found = space.find(addr, &guard).unwrap();
                    assert_eq!(found.range(), locked.vma().range());
                    assert_eq!(found.flags(), locked.vma().flags());
                    locks.fetch_add(1, Ordering::Relaxed);
                }
            }
            _ => {
                let guard = reader.pin();
                let found = space.find(addr, &guard).expect("never unmapped");
                assert!(found.start() <= addr && addr < found.end());
            }
        }
    }
}

/// Lookups, mapping locks, maps, writers, downgrades and cancellations at once: C1, C2, C11.
#[test]
fn stress() {
    let seconds = std::env::var("VMA_STRESS_SECONDS").map_or(1, |s| s.parse().unwrap());
    let _watchdog = watchdog::watch(Duration::from_secs(seconds + 60));
    let until = Instant::now() + Duration::from_secs(seconds);
    let space = AddressSpace::default();
    let (done, gave_up, locks) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    for block in 0..BLOCKS {
        map(&space, block * 16, 4, Prot::READ);
    }
    thread::scope(|scope| {
        for seed in 1..=4_u64 {
            let (space, stop, locks) = (&space, &stop, &locks);
            scope.spawn(move || read_along(space, seed, stop, locks));
        }
        for seed in 5..=8_u64 {
            let (space, done, gave_up) = (&space, &done, &gave_up);
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                while Instant::now() < until {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let page = state % BLOCKS * 16;
                    let wait = if (state >> 40).is_multiple_of(4) {
                        Wait::at_most(Duration::from_nanos(state >> 44 & 0xfff))
                    } else {
                        Wait::forever()
                    };
                    let Ok(mut guard) = space.write_with(wait) else {
                        gave_up.fetch_add(1, Ordering::Relaxed);
                        continue;
                    };
                    let before = guard.totals();
                    let prot = [Prot::READ, Prot::empty()][(state >> 32 & 1) as usize];
                    let result = match state >> 50 & 3 {
                        0 => guard
                            .unmap(at(page + 1), 8 * PAGE)
                            .map_err(UnmapError::errno),
                        1 => guard
                            .protect(at(page), PAGE, prot)
                            .map_err(ProtectError::errno),
                        _ => {
                            let request = MapRequest::anonymous(3 * PAGE, prot);
                            let request = request.fixed(at(page + 1));
                            guard.map(&request).map(drop).map_err(MapError::errno)
                        }
                    };
                    match result {
                        Ok(()) => done.fetch_add(1, Ordering::Relaxed),
                        Err(errno) => {
                            assert_eq!(errno, Errno::EINTR);
                            assert_eq!(guard.totals(), before);
                            gave_up.fetch_add(1, Ordering::Relaxed)
                        }
                    };
                    if state >> 56 & 1 == 0 {
                        let shared = guard.downgrade();
                        assert!(shared.maps().lines().count() >= BLOCKS as usize);
                    }
                }
            });
        }
        while Instant::now() < until {
            thread::sleep(SOON);
        }
        stop.store(true, Ordering::Relaxed);
    });
    space.check().unwrap();
    assert!(done.load(Ordering::Relaxed) > 10 && locks.load(Ordering::Relaxed) > 10);
}

#[test]
fn an_observer_hears_of_waits_and_holds() {
    let times = std::sync::Arc::new(vma_core::LockTimes::default());
    let space = AddressSpace::default().with_lock_observer(times.clone());
    map(&space, 0, 4, Prot::READ);
    assert_eq!(times.held(true).count, 1);
    times.reset();
    let mut writer = space.write();
    writer.unmap(at(1), PAGE).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| drop(space.read()));
        thread::sleep(SOON);
        drop(writer);
        waits.join().unwrap();
    });
    assert!(times.held(true).longest >= SOON);
    assert!(times.held(true).total < 2 * times.held(true).longest);
    assert_eq!(times.waited(false).count, 1);
    times.reset();
    // The exclusive part of a hold that is downgraded, then the shared part.
    let shared = space.write().downgrade();
    assert_eq!((times.held(true).count, times.held(false).count), (1, 0));
    thread::sleep(SOON);
    drop(shared);
    let (exclusive, shared) = (times.held(true), times.held(false));
    assert!(shared.longest >= SOON && exclusive.longest < shared.longest);
    // Lookups don't take the lock, and a copy has no observer.
    times.reset();
    let reader = space.register();
    assert!(space.find(at(0), &reader.pin()).is_some());
    assert_eq!(times.waited(false), vma_core::LockTime::default());
    let child = space.dup().unwrap();
    times.reset();
    child.unmap(at(0), PAGE).unwrap();
    assert_eq!(times.waited(true).count, 0);
}
