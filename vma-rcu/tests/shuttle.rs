//! Larger scenarios than loom's, in random schedules: `.ci/shuttle`. Orderings are all taken as sequentially consistent here.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shuttle::thread;
use vma_rcu::percpu_rwsem::PercpuRwSemaphore;
use vma_rcu::reclaim::Domain;
use vma_rcu::rwsem::RwSemaphore;
use vma_rcu::tree::{Busy, RangeTree, Record};
use vma_rcu::wait::{CancelToken, Wait};

/// Schedules per scenario.
fn rounds() -> usize {
    std::env::var("VMA_SHUTTLE_ROUNDS").map_or(10_000, |n| n.parse().unwrap())
}

/// Two words that only a writer may see differ. A step between its two halves lets others run.
#[derive(Default)]
struct Pair(AtomicU64, AtomicU64);

impl Pair {
    fn check(&self) -> u64 {
        let first = self.0.load(Ordering::Relaxed);
        thread::yield_now();
        assert_eq!(first, self.1.load(Ordering::Relaxed));
        first
    }

    fn change(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn readers_writers_downgrades_and_cancellations() {
    shuttle::check_random(
        || {
            let lock = Arc::new(RwSemaphore::new(Pair::default()));
            let token = CancelToken::new();
            let threads: Vec<_> = (0..5)
                .map(|i| {
                    let (lock, token) = (Arc::clone(&lock), token.clone());
                    thread::spawn(move || {
                        for _ in 0..2 {
                            match i {
                                0 => {
                                    let guard = lock.write();
                                    guard.change();
                                    let count = guard.check();
                                    assert_eq!(guard.downgrade().check(), count);
                                }
                                1 => {
                                    if let Ok(guard) = lock.write_with(Wait::killable(&token)) {
                                        guard.change();
                                    }
                                }
                                2 => {
                                    if let Ok(guard) = lock.read_with(Wait::killable(&token)) {
                                        guard.check();
                                    }
                                }
                                _ => drop(lock.read().check()),
                            }
                        }
                    })
                })
                .collect();
            token.cancel();
            for thread in threads {
                thread.join().unwrap();
            }
            assert!(!lock.is_contended() && lock.try_write().is_some());
        },
        rounds(),
    );
}

#[test]
fn percpu_readers_writers_and_guards_that_move() {
    shuttle::check_random(
        || {
            let lock: &'static PercpuRwSemaphore<Pair> = Box::leak(Box::default());
            let token = CancelToken::new();
            let given = lock.read();
            let mut threads = vec![thread::spawn(move || {
                given.check();
                drop(given);
            })];
            for i in 0..5 {
                let token = token.clone();
                threads.push(thread::spawn(move || {
                    for _ in 0..2 {
                        match i {
                            0 => lock.write().change(),
                            1 => {
                                if let Ok(guard) = lock.write_with(Wait::killable(&token)) {
                                    guard.change();
                                }
                            }
                            2 => {
                                if let Some(guard) = lock.try_write() {
                                    guard.change();
                                }
                            }
                            _ => drop(lock.read().check()),
                        }
                    }
                }));
            }
            token.cancel();
            for thread in threads {
                thread.join().unwrap();
            }
            assert!(lock.is_fast() && lock.try_write().is_some());
            // SAFETY: made above; all threads that knew it are gone.
            drop(unsafe { Box::from_raw(std::ptr::from_ref(lock).cast_mut()) });
        },
        rounds(),
    );
}

/// Long enough for a writer to replace and free something.
fn linger() {
    for _ in 0..60 {
        thread::yield_now();
    }
}

/// Says where it is, as long as it lives.
#[derive(Debug)]
struct Stamp(u64, AtomicU64);

impl Record for Stamp {}

impl Drop for Stamp {
    fn drop(&mut self) {
        self.1.store(1, Ordering::Relaxed);
    }
}

#[test]
fn lookups_locks_and_iterations_beside_a_writer_that_frees() {
    shuttle::check_random(
        || {
            let domain = Domain::default();
            let (tree, mut writer) = RangeTree::new(&domain);
            let entry = |i: u64, n: u64| (i * 10..i * 10 + n, Stamp(i * 10, AtomicU64::new(0)));
            tree.build(&mut writer, (0..8).map(|i| entry(i, 10)))
                .unwrap();
            let tree = Arc::new(tree);
            let readers: Vec<_> = (0..3)
                .map(|n| {
                    let tree = Arc::clone(&tree);
                    thread::spawn(move || {
                        let reader = tree.domain().register();
                        for i in 0..4 {
                            let at = (i * 5 + n) % 8 * 10;
                            let guard = reader.pin();
                            let found = tree.find(at, &guard).expect("replaced, never missing");
                            assert_eq!(found.value.0, at);
                            linger();
                            assert_eq!(found.value.1.load(Ordering::Relaxed), 0, "freed");
                            let starts = tree.iter(0, &guard).map(|e| e.start);
                            assert!(starts.eq((0..8).map(|i| i * 10)));
                            drop(guard);
                            // The pin ends with this line.
                            let locked = tree.lock(at, &reader.pin());
                            match locked {
                                Ok(locked) => {
                                    let locked = locked.expect("replaced, never missing");
                                    linger();
                                    assert_eq!(locked.value().1.load(Ordering::Relaxed), 0);
                                }
                                Err(Busy) => {}
                            }
                        }
                    })
                })
                .collect();
            for i in 0..8 {
                let at = i * 3 % 8;
                let mut edit = tree.write(&mut writer);
                edit.splice(at * 10..at * 10 + 10, [entry(at, 9 - i % 2)])
                    .unwrap();
                edit.prepare().unwrap().commit();
                domain.collect();
            }
            for reader in readers {
                reader.join().unwrap();
            }
            tree.locked(&writer).check().unwrap();
            domain.synchronize(None).unwrap();
            assert_eq!(domain.stats().pending_objects, 0);
        },
        rounds(),
    );
}

#[test]
fn a_lock_keeps_its_entry_without_a_pin() {
    shuttle::check_random(
        || {
            let domain = Domain::default();
            let (tree, mut writer) = RangeTree::new(&domain);
            let entry = |i: u64, n: u64| (i * 10..i * 10 + n, Stamp(i * 10, AtomicU64::new(0)));
            tree.build(&mut writer, (0..3).map(|i| entry(i, 10)))
                .unwrap();
            let tree = Arc::new(tree);
            let readers: Vec<_> = (0..2)
                .map(|n| {
                    let tree = Arc::clone(&tree);
                    thread::spawn(move || {
                        let reader = tree.domain().register();
                        let locked = tree.lock(n * 10, &reader.pin());
                        if let Ok(locked) = locked {
                            let locked = locked.expect("replaced, never missing");
                            linger();
                            assert_eq!(locked.value().1.load(Ordering::Relaxed), 0, "freed");
                        }
                    })
                })
                .collect();
            for n in 0..6 {
                let mut edit = tree.write(&mut writer);
                let at = n % 3;
                edit.splice(at * 10..at * 10 + 10, [entry(at, 9 - n % 2)])
                    .unwrap();
                edit.prepare().unwrap().commit();
                domain.collect();
            }
            for reader in readers {
                reader.join().unwrap();
            }
        },
        rounds(),
    );
}
