//! The per-CPU reader-writer semaphore: exclusion, order, threads that come and go, guards that move.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vma_rcu::percpu_rwsem::{PercpuRwSemaphore, ReadGuard};
use vma_rcu::wait::{CancelToken, GaveUp, Wait};

const SOON: Duration = Duration::from_millis(20);

/// Each way in which readers can be counted.
fn kinds() -> [PercpuRwSemaphore<u64>; 4] {
    [
        PercpuRwSemaphore::new(0),
        PercpuRwSemaphore::with_counters(0, 1),
        PercpuRwSemaphore::with_counters(0, 0),
        PercpuRwSemaphore::with_fences(0, 64),
    ]
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    for lock in kinds() {
        let (a, b) = (lock.read(), lock.try_read().unwrap());
        assert!(lock.try_write().is_none());
        assert!(lock.is_fast(), "a try that failed leaves nothing");
        drop((a, b));
        let w = lock.write();
        assert!(lock.try_read().is_none() && lock.try_write().is_none());
        assert_eq!(
            lock.read_with(Wait::at_most(SOON)).err(),
            Some(GaveUp::TimedOut)
        );
        assert_eq!(
            lock.write_with(Wait::at_most(SOON)).err(),
            Some(GaveUp::TimedOut)
        );
        drop(w);
        assert!(lock.is_fast());
        assert_eq!(format!("{lock:?}"), "PercpuRwSemaphore { value: 0, .. }");
    }
}

#[test]
fn a_guard_may_be_dropped_by_another_thread() {
    fn send<T: Send>() {}
    send::<ReadGuard<'_, u64>>();
    for lock in kinds() {
        for _ in 0..100 {
            let mine = lock.read();
            let theirs = thread::scope(|scope| scope.spawn(|| lock.read()).join().unwrap());
            assert!(lock.try_write().is_none());
            thread::scope(|scope| {
                scope.spawn(move || drop(mine));
            });
            assert!(lock.try_write().is_none());
            drop(theirs);
            *lock.try_write().unwrap() += 1;
        }
        assert_eq!(*lock.read(), 100);
    }
}

#[test]
fn a_writer_waits_for_readers_and_keeps_later_ones_out() {
    for lock in kinds() {
        let held = lock.read();
        thread::scope(|scope| {
            let writer = scope.spawn(|| *lock.write() += 1);
            while lock.is_fast() {
                thread::yield_now();
            }
            let reader = scope.spawn(|| *lock.read());
            thread::sleep(SOON);
            assert!(!writer.is_finished() && !reader.is_finished());
            drop(held);
            assert_eq!(reader.join().unwrap(), 1, "behind the writer");
        });
        assert!(lock.is_fast());
    }
}

#[test]
fn a_writer_that_gives_up_lets_the_queue_in() {
    for lock in kinds() {
        let token = CancelToken::new();
        let held = lock.read();
        thread::scope(|scope| {
            let writer = scope.spawn(|| lock.write_with(Wait::killable(&token)).err());
            while lock.is_fast() {
                thread::yield_now();
            }
            let readers: Vec<_> = (0..3).map(|_| scope.spawn(|| *lock.read())).collect();
            thread::sleep(SOON);
            token.cancel();
            assert_eq!(writer.join().unwrap(), Some(GaveUp::Cancelled));
            for reader in readers {
                assert_eq!(reader.join().unwrap(), 0);
            }
        });
        drop(held);
        assert!(lock.is_fast() && lock.try_write().is_some());
    }
}

#[test]
fn what_waits_is_let_in_first_come_first_served() {
    let lock = PercpuRwSemaphore::new(());
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

#[test]
fn threads_that_come_and_go_and_more_threads_than_counters() {
    for lock in kinds() {
        for _ in 0..20 {
            thread::scope(|scope| {
                for _ in 0..80 {
                    scope.spawn(|| assert!(*lock.read() < 1000));
                }
                *lock.write() += 1;
            });
        }
        assert_eq!(*lock.read(), 20);
    }
}

/// The real barrier, which models can't see: two plain words that only a writer may see differ.
#[test]
fn litmus_and_stress() {
    let seconds = std::env::var("VMA_STRESS_SECONDS").map_or(1, |s| s.parse().unwrap());
    for lock in [
        PercpuRwSemaphore::new((0_u64, 0_u64)),
        PercpuRwSemaphore::with_counters((0, 0), 2),
        PercpuRwSemaphore::with_fences((0, 0), 64),
    ] {
        let until = Instant::now() + Duration::from_secs(seconds);
        let stop = AtomicBool::new(false);
        let (reads, writes) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut n = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let pair = lock.read();
                        assert_eq!(pair.0, pair.1);
                        drop(pair);
                        n += 1;
                    }
                    reads.fetch_add(n, Ordering::Relaxed);
                });
            }
            while Instant::now() < until {
                let mut pair = lock.write();
                pair.0 += 1;
                for _ in 0..20 {
                    std::hint::spin_loop();
                }
                pair.1 += 1;
                drop(pair);
                writes.fetch_add(1, Ordering::Relaxed);
                if let Ok(pair) = lock.write_with(Wait::at_most(Duration::from_micros(1))) {
                    assert_eq!(pair.0, pair.1);
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(reads.load(Ordering::Relaxed) > 0 && writes.load(Ordering::Relaxed) > 10);
        assert!(lock.is_fast());
    }
}
