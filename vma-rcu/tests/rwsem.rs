//! The reader-writer semaphore: exclusion, order, downgrade, giving up.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vma_rcu::rwsem::{LockStatistics, ReadGuard, RwSemaphore, WriteGuard};
use vma_rcu::wait::{CancelToken, GaveUp, Wait};

const SOON: Duration = Duration::from_millis(20);

/// Waits until somebody is in the queue.
fn until_contended<T, S: LockStatistics>(lock: &RwSemaphore<T, S>) {
    while !lock.is_contended() {
        thread::yield_now();
    }
}

#[test]
fn guards_are_send_where_the_value_is() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<ReadGuard<'_, u64>>();
    send::<WriteGuard<'_, u64>>();
    sync::<WriteGuard<'_, u64>>();
    sync::<RwSemaphore<u64>>();
    let lock = RwSemaphore::new(1);
    let (reader, other) = (lock.read(), lock.read());
    thread::scope(|scope| {
        scope.spawn(move || drop(reader));
    });
    drop(other);
    let writer = lock.try_write().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || drop(writer));
    });
    assert!(lock.try_write().is_some());
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let lock = RwSemaphore::new(0);
    let a = lock.read();
    let b = lock.try_read().unwrap();
    assert!(lock.try_write().is_none());
    drop((a, b));
    let w = lock.write();
    assert!(lock.try_read().is_none() && lock.try_write().is_none());
    drop(w);
    assert!(!lock.is_contended());
    assert_eq!(format!("{lock:?}"), "RwSemaphore { value: 0, .. }");
}

#[test]
fn a_deadline_and_a_token_end_a_wait_and_leave_the_lock_as_it_was() {
    let lock = RwSemaphore::new(0);
    let token = CancelToken::new();
    let held = lock.write();
    let start = Instant::now();
    assert_eq!(
        lock.read_with(Wait::at_most(SOON)).err(),
        Some(GaveUp::TimedOut)
    );
    assert!(start.elapsed() >= SOON);
    thread::scope(|scope| {
        let waits = [
            scope.spawn(|| lock.write_with(Wait::killable(&token)).err()),
            scope.spawn(|| lock.read_with(Wait::killable(&token)).err()),
        ];
        until_contended(&lock);
        token.cancel();
        for wait in waits {
            assert_eq!(wait.join().unwrap(), Some(GaveUp::Cancelled));
        }
    });
    assert!(!lock.is_contended());
    drop(held);
    // A free lock is entered whatever the token says.
    assert!(lock.write_with(Wait::killable(&token)).is_ok());
    assert!(lock.try_read().is_some());
}

#[test]
fn a_waiting_writer_keeps_new_readers_out_and_they_enter_when_it_gives_up() {
    let lock = RwSemaphore::new(0);
    let token = CancelToken::new();
    let held = lock.read();
    thread::scope(|scope| {
        let writer = scope.spawn(|| lock.write_with(Wait::killable(&token)).err());
        until_contended(&lock);
        assert!(lock.try_read().is_none());
        let readers: Vec<_> = (0..3).map(|_| scope.spawn(|| *lock.read())).collect();
        thread::sleep(SOON);
        assert!(readers.iter().all(|reader| !reader.is_finished()));
        token.cancel();
        assert_eq!(writer.join().unwrap(), Some(GaveUp::Cancelled));
        for reader in readers {
            assert_eq!(reader.join().unwrap(), 0);
        }
    });
    drop(held);
}

#[test]
fn a_downgrade_lets_readers_at_the_front_in_and_no_writer() {
    let lock = RwSemaphore::new(0);
    let mut writer = lock.write();
    thread::scope(|scope| {
        let reader = scope.spawn(|| *lock.read());
        until_contended(&lock);
        *writer = 1;
        let kept = writer.downgrade();
        assert_eq!(reader.join().unwrap(), 1);
        let second = scope.spawn(|| *lock.write() = 2);
        until_contended(&lock);
        thread::sleep(SOON);
        assert_eq!(*kept, 1);
        // Behind a waiting writer nobody enters, although the lock is only shared.
        assert!(lock.try_read().is_none());
        drop(kept);
        second.join().unwrap();
    });
    assert_eq!(*lock.read(), 2);
}

#[test]
fn nobody_waits_for_ever_behind_a_busy_writer() {
    let lock = RwSemaphore::new(0_u64);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                *lock.write() += 1;
            }
        });
        for _ in 0..200 {
            let before = *lock.read();
            *lock.write() += 1;
            assert!(*lock.read() > before);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn what_waits_is_let_in_first_come_first_served() {
    let lock = RwSemaphore::new(());
    let order = Mutex::new(Vec::new());
    let held = lock.write();
    thread::scope(|scope| {
        for i in 0..6 {
            let (lock, order) = (&lock, &order);
            let (here, is_here) = std::sync::mpsc::channel();
            scope.spawn(move || {
                here.send(()).unwrap();
                if i % 3 == 2 {
                    let _guard = lock.write();
                    order.lock().unwrap().push(i);
                } else {
                    let _guard = lock.read();
                    order.lock().unwrap().push(i);
                }
            });
            is_here.recv().unwrap();
            thread::sleep(SOON);
        }
        drop(held);
    });
    let mut order = order.into_inner().unwrap();
    order[..2].sort_unstable();
    order[3..5].sort_unstable();
    assert_eq!(order, [0, 1, 2, 3, 4, 5]);
}

#[derive(Default)]
struct Times {
    waited: AtomicUsize,
    held_ns: AtomicU64,
}

impl LockStatistics for Times {
    fn waited(&self, _: bool, _: Duration) {
        self.waited.fetch_add(1, Ordering::Relaxed);
    }

    fn held(&self, exclusive: bool, time: Duration) {
        if exclusive {
            self.held_ns
                .fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        }
    }
}

#[test]
fn statistics_hear_of_waits_and_holds() {
    let lock = RwSemaphore::with_statistics(0, Times::default());
    let writer = lock.write();
    thread::sleep(SOON);
    let reader = writer.downgrade();
    let held = lock.statistics().held_ns.load(Ordering::Relaxed);
    assert!(u128::from(held) >= SOON.as_nanos(), "{held}");
    thread::sleep(SOON);
    drop(reader);
    assert_eq!(lock.statistics().waited.load(Ordering::Relaxed), 1);
    assert_eq!(lock.statistics().held_ns.load(Ordering::Relaxed), held);
}

#[test]
fn a_panic_under_the_lock_lets_it_go() {
    let lock = Arc::new(RwSemaphore::new(0));
    let other = Arc::clone(&lock);
    let result = thread::spawn(move || {
        let _guard = other.write();
        panic!("under the lock");
    })
    .join();
    assert!(result.is_err());
    assert!(lock.try_write().is_some());
}

/// Two plain words that only a writer may see differ.
#[test]
fn stress_with_downgrades_and_cancellations() {
    let seconds = std::env::var("VMA_STRESS_SECONDS").map_or(1, |s| s.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(seconds);
    let lock = RwSemaphore::new((0_u64, 0_u64));
    let (gave_up, entered) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 1..=4_u64 {
            let (lock, gave_up, entered) = (&lock, &gave_up, &entered);
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                while Instant::now() < until {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let wait = match state % 4 {
                        0 => Wait::at_most(Duration::from_nanos(state >> 8 & 0xffff)),
                        _ => Wait::forever(),
                    };
                    let count = if (state >> 4).is_multiple_of(4) {
                        lock.write_with(wait).map(|mut pair| {
                            pair.0 += 1;
                            std::hint::spin_loop();
                            pair.1 += 1;
                            if state & 64 == 0 {
                                let kept = pair.downgrade();
                                assert_eq!(kept.0, kept.1);
                            }
                        })
                    } else {
                        lock.read_with(wait).map(|pair| assert_eq!(pair.0, pair.1))
                    };
                    let counter = if count.is_ok() { entered } else { gave_up };
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(!lock.is_contended() && lock.try_write().is_some());
    assert!(entered.load(Ordering::Relaxed) > 100);
}

/// Measures while it's told to.
#[derive(Default)]
struct Switched {
    on: AtomicBool,
    heard: AtomicU64,
}

impl LockStatistics for Switched {
    fn is_active(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    fn waited(&self, _: bool, _: Duration) {
        self.heard.fetch_add(1, Ordering::Relaxed);
    }

    fn held(&self, _: bool, _: Duration) {
        self.heard.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn statistics_that_are_off_hear_nothing() {
    let lock = RwSemaphore::with_statistics(0, Switched::default());
    let heard = || lock.statistics().heard.load(Ordering::Relaxed);
    let switch = |on| lock.statistics().on.store(on, Ordering::Relaxed);
    drop(lock.write().downgrade());
    drop(lock.read());
    assert_eq!(heard(), 0);
    let begun_off = lock.write();
    switch(true);
    drop(begun_off);
    assert_eq!(heard(), 0, "a hold whose beginning isn't known");
    drop(lock.write());
    assert_eq!(heard(), 2);
    switch(false);
    drop(lock.read());
    assert_eq!(heard(), 2);
}
