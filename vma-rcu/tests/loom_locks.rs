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

/// Two readers that waited are in at the same time: the first waits for the second.
#[test]
fn readers_behind_a_writer_enter_together() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let writer = lock.write();
        let second = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.read().get())
        };
        let first = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                let guard = lock.read();
                assert_eq!(guard.get(), 1);
                assert_eq!(second.join().unwrap(), 1);
            })
        };
        writer.add(1);
        drop(writer);
        first.join().unwrap();
        assert!(!lock.is_contended() && lock.try_write().is_some());
    });
}
/// A reader that waited enters while the downgraded guard is held.
#[test]
fn a_downgrade_lets_waiting_readers_in() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let writer = lock.write();
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.read().get())
        };
        writer.add(1);
        let kept = writer.downgrade();
        assert_eq!(reader.join().unwrap(), 1);
        drop(kept);
        assert!(lock.try_write().is_some());
    });
}
/// A reader may be let in at the very instant at which it gives up.
#[test]
fn let_in_while_giving_up() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let token = CancelToken::new();
        let writer = lock.write();
        let patient = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.read().get())
        };
        let hasty = {
            let (lock, token) = (Arc::clone(&lock), token.clone());
            thread::spawn(move || lock.read_with(Wait::killable(&token)).map(|g| g.get()))
        };
        drop(writer);
        token.cancel();
        patient.join().unwrap();
        let _ = hasty.join().unwrap();
        assert!(!lock.is_contended() && lock.try_write().is_some());
    });
}
/// The same for the per-CPU semaphore.
#[test]
fn percpu_let_in_while_giving_up() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let token = CancelToken::new();
        let writer = lock.write();
        let patient = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.read().get())
        };
        let hasty = {
            let (lock, token) = (Arc::clone(&lock), token.clone());
            thread::spawn(move || {
                lock.write_with(Wait::killable(&token))
                    .map(|g| g.add(1))
                    .err()
            })
        };
        drop(writer);
        token.cancel();
        patient.join().unwrap();
        let _ = hasty.join().unwrap();
        assert!(lock.is_fast() && lock.try_write().is_some());
    });
}
/// A guard is dropped by another thread while its owner takes and drops one of its own.
#[test]
fn percpu_a_foreign_drop_beside_the_owner() {
    model(3, || {
        let held: &'static PercpuRwSemaphore<Watched> = Box::leak(Box::default());
        let guard = held.read();
        let writer = thread::spawn(move || held.write().add(1));
        let dropper = thread::spawn(move || {
            guard.get();
            drop(guard)
        });
        if let Some(guard) = held.try_read() {
            assert!(guard.get() <= 1);
        }
        writer.join().unwrap();
        dropper.join().unwrap();
        assert!(held.is_fast() && held.try_write().is_some());
        drop(unsafe { Box::from_raw(std::ptr::from_ref(held).cast_mut()) });
    });
}
/// Without counters of their own, all readers share one.
#[test]
fn percpu_shared_counter() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::with_counters(Watched::default(), 0));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let lock = Arc::clone(&lock);
                thread::spawn(move || {
                    if let Some(guard) = lock.try_read() {
                        assert!(guard.get() <= 1);
                    }
                })
            })
            .collect();
        lock.write().add(1);
        for r in readers {
            r.join().unwrap();
        }
        assert!(lock.is_fast() && lock.try_write().is_some());
    });
}
/// A try that fails lets in whoever has queued meanwhile.
#[test]
fn percpu_a_writer_that_only_tries() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let lock = Arc::clone(&lock);
                thread::spawn(move || assert!(lock.read().get() <= 1))
            })
            .collect();
        if let Some(w) = lock.try_write() {
            w.add(1);
        }
        for r in readers {
            r.join().unwrap();
        }
        assert!(lock.is_fast() && lock.try_write().is_some());
    });
}
/// H: deadlines
/// Waits that end at once, beside a holder (a model has no clock: each deadline has passed).
#[test]
fn deadlines() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let over = Wait::until(std::time::Instant::now());
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || assert!(lock.read().get() <= 2))
        };
        let w2 = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.write().add(1))
        };
        if let Ok(w) = lock.write_with(over) {
            w.add(1);
        }
        reader.join().unwrap();
        w2.join().unwrap();
        assert!(lock.is_fast() && lock.try_write().is_some());
    });
}
/// I: the last of two readers hands over
/// What a reader did comes before what the writer does that it lets in.
#[test]
fn the_last_reader_lets_a_writer_in() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let a = lock.read();
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || assert!(lock.read().get() <= 1))
        };
        let writer = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.write().add(1))
        };
        a.get();
        drop(a);
        reader.join().unwrap();
        writer.join().unwrap();
        assert!(!lock.is_contended() && lock.try_write().is_some());
    });
}
/// J: somebody who gives up hands over for a writer that has left
/// Who gives up lets in those behind it.
#[test]
fn who_gives_up_hands_over() {
    model(3, || {
        let lock = Arc::new(RwSemaphore::new(Watched::default()));
        let w = lock.write();
        let reader = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || assert!(lock.read().get() <= 1))
        };
        let hasty = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                let _ = lock
                    .write_with(Wait::until(std::time::Instant::now()))
                    .map(|g| g.get());
            })
        };
        w.add(1);
        drop(w);
        reader.join().unwrap();
        hasty.join().unwrap();
        assert!(!lock.is_contended() && lock.try_write().is_some());
    });
}

/// K: a step back beside a guard of the same counter
/// A reader that steps back, on the counter of a guard that is held.
#[test]
fn percpu_a_step_back_beside_a_guard_of_the_same_thread() {
    model(3, || {
        let held: &'static PercpuRwSemaphore<Watched> = Box::leak(Box::default());
        let guard = held.read();
        let writer = thread::spawn(move || held.write().add(1));
        drop(held.try_read());
        assert_eq!(guard.get(), 0);
        drop(guard);
        writer.join().unwrap();
        assert!(held.is_fast() && held.try_write().is_some());
        drop(unsafe { Box::from_raw(std::ptr::from_ref(held).cast_mut()) });
    });
}

/// L: writers that are held off
/// The one that holds writers off is overtaken by those alone that were there before.
#[test]
fn percpu_who_holds_writers_off_is_not_overtaken() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let writer = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                for _ in 0..3 {
                    lock.write().add(1);
                }
            })
        };
        let held_off = lock.hold_off_writers();
        let mut failed = 0;
        while lock.try_read().is_none() {
            failed += 1;
            assert!(lock.read().get() <= 3);
        }
        // One that has left may still be seen in, before one that is about to come in.
        assert!(failed <= 1, "overtaken {failed} times");
        drop(held_off);
        writer.join().unwrap();
        assert_eq!(lock.read().get(), 3);
        assert!(lock.is_fast());
    });
}

/// A writer that was held off comes in, or gives up, when nobody holds it off any more; one that only tries doesn't come in before.
#[test]
fn percpu_writers_that_were_held_off_come_in() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let token = CancelToken::new();
        let held_off = lock.hold_off_writers();
        let patient = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.write().add(1))
        };
        let hasty = {
            let (lock, token) = (Arc::clone(&lock), token.clone());
            thread::spawn(move || {
                let came_in = lock.write_with(Wait::killable(&token)).map(|g| g.add(1));
                u64::from(came_in.is_ok())
            })
        };
        assert!(lock.try_write().is_none());
        assert_eq!(lock.read().get(), 0);
        drop(held_off);
        token.cancel();
        patient.join().unwrap();
        let came_in = hasty.join().unwrap();
        assert_eq!(lock.read().get(), 1 + came_in);
        assert!(lock.is_fast() && lock.try_write().is_some());
    });
}

/// Two hold writers off, and the last one lets them in.
#[test]
fn percpu_two_hold_a_writer_off() {
    model(3, || {
        let lock = Arc::new(PercpuRwSemaphore::new(Watched::default()));
        let writer = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.write().add(1))
        };
        let other = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || drop(lock.hold_off_writers()))
        };
        drop(lock.hold_off_writers());
        other.join().unwrap();
        writer.join().unwrap();
        assert!(lock.is_fast() && lock.try_write().is_some());
    });
}
