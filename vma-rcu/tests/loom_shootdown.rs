//! Models of the shootdown. See `loom.rs` for how they are run.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use vma_rcu::shootdown::{Accessing, Shootdown};

/// Two frames, and which of them is mapped.
struct Memory {
    frames: [UnsafeCell<u64>; 2],
    mapped: AtomicUsize,
    shootdown: Shootdown,
}

// SAFETY: what the models are about; loom reports concurrent access.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Memory {
            frames: [UnsafeCell::new(1), UnsafeCell::new(2)],
            mapped: AtomicUsize::new(0),
            shootdown: Shootdown::default(),
        })
    }

    /// One load, through what is cached if that may be used still.
    fn load(&self, accessing: &mut Accessing<'_>, cache: &mut Option<usize>) -> u64 {
        loop {
            let Some(access) = accessing.enter() else {
                *cache = None;
                accessing.renew();
                continue;
            };
            let frame = *cache.get_or_insert_with(|| self.mapped.load(Ordering::Relaxed));
            // SAFETY: loom reports a concurrent write.
            let value = self.frames[frame].with(|value| unsafe { *value });
            drop(access);
            return value;
        }
    }

    /// Maps the other frame, and uses the old one for something else.
    fn replace(&self) {
        self.mapped.store(1, Ordering::Relaxed);
        self.shootdown.invalidate();
        // SAFETY: nobody else is there, or loom reports it.
        self.frames[0].with_mut(|value| unsafe { *value = 99 });
    }
}

fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(f);
}

#[test]
fn an_access_is_over_when_invalidate_returns() {
    model(4, || {
        let memory = Memory::new();
        let accessor = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                let mut accessing = memory.shootdown.register();
                let mut cache = None;
                // The second one may use what the first one cached.
                [0; 2].map(|_| memory.load(&mut accessing, &mut cache))
            })
        };
        memory.replace();
        let seen = accessor.join().unwrap();
        assert!(seen.iter().all(|value| [1, 2].contains(value)), "{seen:?}");
        assert!(seen[0] <= seen[1], "{seen:?}");
    });
}

#[test]
fn two_invalidations_at_once_both_wait() {
    model(3, || {
        let memory = Memory::new();
        let accessor = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                let mut accessing = memory.shootdown.register();
                memory.load(&mut accessing, &mut None)
            })
        };
        let other = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || memory.shootdown.invalidate())
        };
        memory.replace();
        other.join().unwrap();
        assert!([1, 2].contains(&accessor.join().unwrap()));
    });
}
