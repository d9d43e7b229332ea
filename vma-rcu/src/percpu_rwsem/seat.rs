//! Seats: each live thread that asks has one that no other live thread has. A seat is where its counter lies in every
//! semaphore, in bytes.
//!
//! **L3** A seat is a multiple of a counter's size and one live thread's, or beyond the counters of every semaphore and nobody's.
//!
//! A seat goes back when its thread exits and is given to the next one that asks, so that seats stay as few as the
//! most threads that ever lived at once. What a thread wrote under its seat is seen by the next one: the
//! registry's lock lies between.

use super::Counter;

/// From one seat to the next.
const STRIDE: usize = size_of::<Counter>();

/// A seat that is nobody's, for threads whose locals are gone already; beyond any counter.
#[cfg(not(any(loom, shuttle)))]
const NOBODY: usize = usize::MAX - 1;

#[cfg(not(any(loom, shuttle)))]
mod imp {
    use std::cell::Cell;

    use parking_lot::Mutex;

    use super::{NOBODY, STRIDE};

    struct Registry {
        free: Vec<usize>,
        next: usize,
    }

    static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
        free: Vec::new(),
        next: 0,
    });

    /// Not asked yet: nobody's as well.
    const NONE: usize = NOBODY - 1;

    thread_local! {
        /// Without a destructor, so that to read it is one load.
        static SEAT: Cell<usize> = const { Cell::new(NONE) };
        static LEASE: Lease = Lease::take();
    }

    /// Gives the seat back at the thread's end.
    struct Lease(usize);

    impl Lease {
        fn take() -> Self {
            let mut registry = REGISTRY.lock();
            Lease(registry.free.pop().unwrap_or_else(|| {
                let seat = registry.next;
                registry.next += STRIDE;
                seat
            }))
        }
    }

    impl Drop for Lease {
        fn drop(&mut self) {
            SEAT.set(NOBODY);
            REGISTRY.lock().free.push(self.0);
        }
    }

    /// The calling thread's seat, or one that is nobody's.
    #[inline(always)]
    pub(in crate::percpu_rwsem) fn own() -> usize {
        SEAT.get()
    }

    /// Gives the calling thread a seat, if it has none; whether it had none.
    pub(in crate::percpu_rwsem) fn assign() -> bool {
        if SEAT.get() != NONE {
            return false;
        }
        SEAT.set(LEASE.try_with(|lease| lease.0).unwrap_or(NOBODY));
        true
    }
}

#[cfg(any(loom, shuttle))]
mod imp {
    #[cfg(loom)]
    use loom as model;
    #[cfg(shuttle)]
    use shuttle as model;

    use model::sync::atomic::{AtomicUsize, Ordering};

    model::lazy_static! {
        static ref NEXT: AtomicUsize = AtomicUsize::new(0);
    }

    model::thread_local! {
        static SEAT: usize = NEXT.fetch_add(super::STRIDE, Ordering::Relaxed);
    }

    pub(in crate::percpu_rwsem) fn own() -> usize {
        SEAT.with(|seat| *seat)
    }

    pub(in crate::percpu_rwsem) fn assign() -> bool {
        false
    }
}

pub(super) use imp::{assign, own};

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    fn seat() -> usize {
        super::assign();
        super::own()
    }

    #[test]
    fn a_seat_is_its_threads_and_goes_to_the_next_one() {
        let mine = seat();
        assert_eq!(seat(), mine);
        let mut most = mine;
        for _ in 0..200 {
            let theirs = std::thread::spawn(seat).join().unwrap();
            assert_ne!(theirs, mine);
            most = most.max(theirs);
        }
        // Other tests of this process run beside.
        assert!(most / super::STRIDE < 150, "{most}");
    }
}
