//! Small numbers for threads: each live thread that asks has one that no other live thread has.
//!
//! A number goes back when its thread exits and is given to the next one that asks, so that numbers stay as small as the
//! most threads that ever lived at once. What a thread wrote under its number is seen by the next one: the
//! registry's lock lies between.

/// A number that is nobody's, for threads whose locals are gone already; beyond any counter.
#[cfg(not(any(loom, shuttle)))]
const NOBODY: usize = usize::MAX - 1;

#[cfg(not(any(loom, shuttle)))]
mod imp {
    use std::cell::Cell;

    use parking_lot::Mutex;

    use super::NOBODY;

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

    /// Gives the number back at the thread's end.
    struct Lease(usize);

    impl Lease {
        fn take() -> Self {
            let mut registry = REGISTRY.lock();
            Lease(registry.free.pop().unwrap_or_else(|| {
                registry.next += 1;
                registry.next - 1
            }))
        }
    }

    impl Drop for Lease {
        fn drop(&mut self) {
            SEAT.set(NOBODY);
            REGISTRY.lock().free.push(self.0);
        }
    }

    /// The calling thread's number, or one that is nobody's.
    #[inline(always)]
    pub(in crate::percpu_rwsem) fn seat() -> usize {
        SEAT.get()
    }

    /// Gives the calling thread a number, if it has none; whether it had none.
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
        static SEAT: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::percpu_rwsem) fn seat() -> usize {
        SEAT.with(|seat| *seat)
    }

    pub(in crate::percpu_rwsem) fn assign() -> bool {
        false
    }
}

pub(super) use imp::{assign, seat};

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    fn seat() -> usize {
        super::assign();
        super::seat()
    }

    #[test]
    fn a_number_is_its_threads_and_goes_to_the_next_one() {
        let mine = seat();
        assert_eq!(seat(), mine);
        let mut most = mine;
        for _ in 0..200 {
            let theirs = std::thread::spawn(seat).join().unwrap();
            assert_ne!(theirs, mine);
            most = most.max(theirs);
        }
        // Other tests of this process run beside.
        assert!(most < 150, "{most}");
    }
}
