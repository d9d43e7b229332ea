//! Models of the semaphores. See `loom.rs` for how they are run.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;
use vma_rcu::percpu_rwsem::PercpuRwSemaphore;
use vma_rcu::rwsem::RwSemaphore;
use vma_rcu::wait::{CancelToken, GaveUp, Wait};

fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(f);
}

/// A number whose every access loom checks.
#[derive(Default)]
struct Watched(UnsafeCell<u64>);

// SAFETY: what the models are about; loom reports concurrent access.
unsafe impl Sync for Watched {}

impl Watched {
    fn get(&self) -> u64 {
        // SAFETY: loom reports a concurrent write.
        self.0.with(|value| unsafe { *value })
    }

    fn add(&self, n: u64) {
        // SAFETY: loom reports any concurrent access.
        self.0.with_mut(|value| unsafe { *value += n });
    }
}

#[test]
fn writers_and_readers_exclude_each_other() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let threads: Vec<_> = (0..2)
            .map(|i| {
                let lock = Arc::clone(&lock);
                thread::spawn(move || {
                    if i == 0 {
                        lock.write().add(1);
                    } else {
                        assert!(lock.read().get() <= 2);
                    }
                })
            })
            .collect();
        lock.write().add(1);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(lock.read().get(), 2);
        assert!(!lock.is_contended());
    });
}

#[test]
fn a_downgrade_lets_no_writer_in_between() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let writer = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.write().add(10))
        };
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.read().get())
        };
        let guard = lock.write();
        guard.add(1);
        let before = guard.get();
        let kept = guard.downgrade();
        assert_eq!(kept.get(), before);
        drop(kept);
        writer.join().unwrap();
        assert!(reader.join().unwrap() <= 11);
        assert_eq!(lock.read().get(), 11);
    });
}

/// A reader behind a writer that gives up enters beside the reader that is in.
#[test]
fn a_cancelled_wait_ends_and_leaves_the_lock_as_it_was() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let token = CancelToken::new();
        let held = lock.read();
        let writer = {
            let (lock, token) = (Arc::clone(&lock), token.clone());
            thread::spawn(move || lock.write_with(Wait::killable(&token)).err())
        };
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.read().get())
        };
        token.cancel();
        assert_eq!(writer.join().unwrap(), Some(GaveUp::Cancelled));
        assert_eq!(reader.join().unwrap(), 0);
        drop(held);
        assert!(!lock.is_contended() && lock.try_write().is_some());
    });
}

#[test]
fn percpu_writers_and_readers_exclude_each_other() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || assert!(lock.read().get() <= 2))
        };
        let writer = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.write().add(1))
        };
        lock.write().add(1);
        reader.join().unwrap();
        writer.join().unwrap();
        assert_eq!(lock.read().get(), 2);
    });
}

/// One thread reads on the fast path while another writes: what `blocked` and the barriers alone order.
#[test]
fn percpu_readers_are_back_on_the_fast_path() {
    model(4, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                for _ in 0..2 {
                    if let Some(guard) = lock.try_read() {
                        assert!(guard.get() <= 1);
                    }
                }
            })
        };
        lock.write().add(1);
        assert!(lock.is_fast(), "no writer is left");
        reader.join().unwrap();
    });
}

/// A guard that another thread drops, beside a writer; then a writer that gives up, and one that only tries.
#[test]
fn percpu_guards_move_and_writers_give_up() {
    model(3, || {
        let token = CancelToken::new();
        let held: &'static PercpuRwSemaphore<Watched> = Box::leak(Box::default());
        let guard = held.read();
        let writer = {
            let token = token.clone();
            thread::spawn(move || match held.write_with(Wait::killable(&token)) {
                Ok(value) => value.add(1),
                Err(reason) => assert_eq!(reason, GaveUp::Cancelled),
            })
        };
        let dropper = thread::spawn(move || {
            assert_eq!(guard.get(), 0);
            drop(guard);
        });
        token.cancel();
        writer.join().unwrap();
        dropper.join().unwrap();
        assert!(held.is_fast() && held.try_write().is_some());
        // SAFETY: made above, and all threads that knew it are gone.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(held).cast_mut()) });
    });
}
