//! Models of the semaphores. See `loom.rs` for how they are run.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;
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
