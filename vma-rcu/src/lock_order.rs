//! A lock order that debug builds enforce.
//!
//! Each lock of a program has a [`Level`]. A thread that asks for a lock while it holds one of a higher level, or of the same
//! level and not a lower address, could wait in a circle with another thread; in a debug build it panics instead, at the
//! first time, whether or not somebody is in its way. A release build does nothing.
//!
//! ```
//! use vma_rcu::lock_order::Level;
//!
//! const SPACE: Level = Level::new(1, "space");
//! const FILE: Level = Level::new(2, "file");
//! let space = SPACE.acquire(0x1000);
//! let file = FILE.acquire(0x10);
//! # drop((space, file));
//! ```

use std::marker::PhantomData;

/// A place in the order: outermost locks have the lowest rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    rank: u8,
    name: &'static str,
    /// A level whose locks nobody waits for who holds one of this.
    apart: Option<u8>,
}

/// A lock that this thread holds, or waits for. Keep it beside the lock's guard; it stays with its thread.
#[derive(Debug)]
#[must_use = "the lock counts as held as long as this lives"]
pub struct Held {
    #[cfg(debug_assertions)]
    lock: imp::Lock,
    not_send: PhantomData<*const ()>,
}

impl Level {
    /// A level of this rank; the name is for messages.
    pub const fn new(rank: u8, name: &'static str) -> Self {
        Level {
            rank,
            name,
            apart: None,
        }
    }

    /// The same, for locks with which nobody may wait for one of `other`, which is of a higher rank: of the two a thread sleeps on
    /// one, and has the other without waiting or not at all.
    #[must_use]
    pub const fn apart_from(mut self, other: Level) -> Self {
        self.apart = Some(other.rank);
        self
    }

    /// Call it before waiting for the lock at `address`.
    ///
    /// # Panics
    ///
    /// In debug builds, when the thread holds a lock of a higher level, or of this level and not a lower address, or of one that is to be
    /// [apart](Self::apart_from) from this.
    #[inline]
    pub fn acquire(self, address: usize) -> Held {
        #[cfg(debug_assertions)]
        imp::check(self, address);
        self.note(address)
    }

    /// Call it after a lock was had without waiting, which is allowed in any order.
    #[inline]
    pub fn acquired(self, address: usize) -> Held {
        self.note(address)
    }

    #[inline]
    fn note(self, address: usize) -> Held {
        #[cfg(debug_assertions)]
        imp::push((self, address));
        #[cfg(not(debug_assertions))]
        let _ = address;
        Held {
            #[cfg(debug_assertions)]
            lock: (self, address),
            not_send: PhantomData,
        }
    }
}

#[cfg(debug_assertions)]
impl Drop for Held {
    fn drop(&mut self) {
        imp::pop(self.lock);
    }
}

#[cfg(debug_assertions)]
mod imp {
    use std::cell::RefCell;

    use super::Level;

    pub(super) type Lock = (Level, usize);

    thread_local! {
        static HELD: RefCell<Vec<Lock>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn check(level: Level, address: usize) {
        let wrong = HELD.try_with(|held| {
            let held = held.borrow();
            held.iter()
                .find(|(other, at)| {
                    (other.rank, *at) >= (level.rank, address) || other.apart == Some(level.rank)
                })
                .copied()
        });
        if let Ok(Some((other, at))) = wrong {
            panic!(
                "lock order: {} at {address:#x} (rank {}) was asked for by a thread that holds {} at {at:#x} (rank {}); \
                 take lower ranks first, and within a rank lower addresses, and don't sleep on one of two that are to be apart",
                level.name, level.rank, other.name, other.rank
            );
        }
    }

    pub(super) fn push(lock: Lock) {
        // A thread that is ending has nothing left to go wrong.
        let _ = HELD.try_with(|held| held.borrow_mut().push(lock));
    }

    pub(super) fn pop(lock: Lock) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(i) = held.iter().rposition(|other| *other == lock) {
                held.remove(i);
            }
        });
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::Level;

    const OUTER: Level = Level::new(1, "outer");
    const INNER: Level = Level::new(2, "inner");

    fn refused(f: impl FnOnce() + std::panic::UnwindSafe) -> bool {
        std::panic::catch_unwind(f).is_err_and(|panic| {
            panic
                .downcast_ref::<String>()
                .is_some_and(|text| text.contains("lock order"))
        })
    }

    #[test]
    fn a_wrong_order_is_caught() {
        assert!(refused(|| {
            let _inner = INNER.acquire(1);
            drop(OUTER.acquire(2));
        }));
        assert!(refused(|| {
            let _high = INNER.acquire(2);
            drop(INNER.acquire(1));
        }));
        assert!(refused(|| {
            let _once = INNER.acquire(1);
            drop(INNER.acquire(1));
        }));
        // What was refused, and what unwound, isn't held.
        drop(OUTER.acquire(9));
    }

    #[test]
    fn of_two_levels_that_are_apart_one_is_had_without_waiting() {
        const APART: Level = Level::new(0, "apart").apart_from(OUTER);
        assert!(refused(|| {
            let _apart = APART.acquire(1);
            drop(OUTER.acquire(2));
        }));
        assert!(refused(|| {
            let _outer = OUTER.acquire(2);
            drop(APART.acquire(1));
        }));
        let apart = APART.acquire(1);
        let tried = OUTER.acquired(2);
        // What is below either.
        drop(INNER.acquire(3));
        drop((apart, tried));
        let outer = OUTER.acquire(2);
        drop((APART.acquired(1), outer));
    }

    #[test]
    fn the_right_order_and_locks_without_waiting_are_not() {
        let outer = OUTER.acquire(9);
        let low = INNER.acquire(1);
        let high = INNER.acquire(2);
        drop(low);
        let tried = OUTER.acquired(1);
        drop((high, outer, tried));
        drop(OUTER.acquire(1));
    }
}
