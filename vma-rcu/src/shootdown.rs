//! Waiting until nobody uses an old translation: what a TLB shootdown is for hardware.
//!
//! A thread that caches translations marks itself *in access* around each use of one, on a cache line of its own. Whoever
//! has changed what translations are made from raises the generation, makes all threads execute a barrier, and waits
//! for those that are in access.
//!
//! ```text
//! accessor                                 who changes something
//! --------                                 ---------------------
//! mark := odd                              change
//! light barrier                            generation := generation + 1
//! generation load; it grew: drop cache     heavy barrier
//! look up, or use the cache; access        for each mark that is odd: wait until it changes
//! mark := even
//! ```
//!
//! **S1** When [`Shootdown::invalidate`] returns, every access that used something from before the change has ended, and
//! later ones find their cache outdated: store, barrier, load on both sides, so that either the accessor sees the
//! new generation or its mark is seen. Where the platform has `membarrier` the accessor's barrier costs nothing.
//!
//! An accessor between its marks waits for nothing: no lock, no fault, no code of a user's. So the wait is as long as an access,
//! or as its thread is kept from running.
//!
//! ```
//! use vma_rcu::shootdown::Shootdown;
//!
//! let shootdown = Shootdown::default();
//! let mut accessor = shootdown.register();
//! let first = accessor.enter().generation();
//! shootdown.invalidate();
//! assert_ne!(accessor.enter().generation(), first);
//! ```

use std::fmt;

use crate::barrier::Barrier;
use crate::sync::atomic::{AtomicU64, Ordering, compiler_fence};
use crate::sync::{Arc, Mutex, planted};

/// An accessor's mark, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Mark(
    /// Odd while its thread is in access. Stored to by its thread alone, with release when it leaves and when it enters
    /// (who waits may miss the even number and see the next odd one); load-acquire by who waits: what the access did comes
    /// before. That it enters before what follows is the barrier's doing. Model:
    /// `an_access_is_over_when_invalidate_returns`.
    AtomicU64,
);

/// What a set of accessors share.
pub struct Shootdown {
    /// Store-release after a change; load-acquire by accessors, which then see the change. Model as above.
    generation: AtomicU64,
    barrier: Barrier,
    marks: Mutex<Vec<Arc<Mark>>>,
}

impl Default for Shootdown {
    fn default() -> Self {
        Shootdown {
            generation: AtomicU64::new(1),
            barrier: Barrier::detect(),
            marks: Mutex::new(Vec::new()),
        }
    }
}

impl fmt::Debug for Shootdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shootdown")
            .field("generation", &self.generation)
            .field("accessors", &self.marks.lock().len())
            .finish_non_exhaustive()
    }
}

impl Shootdown {
    /// One more accessor. Allocates.
    pub fn register(&self) -> Accessing<'_> {
        let mark = Arc::new(Mark::default());
        self.marks.lock().push(Arc::clone(&mark));
        Accessing {
            shootdown: self,
            mark,
            sequence: 0,
        }
    }

    /// Waits until every access that began before the call has ended; later ones see a new generation.
    ///
    /// Not for a thread that is in access itself: it would wait for itself. Calls exclude each other.
    ///
    /// # Panics
    ///
    /// When the kernel takes `membarrier` away from a process that has used it.
    pub fn invalidate(&self) {
        // Several may run at once where the lock is needed last; the number only has to change.
        self.generation.fetch_add(1, Ordering::Release);
        let marks = self.marks.lock();
        if marks.is_empty() {
            return;
        }
        if !planted("no_heavy_barrier") {
            assert!(
                self.barrier.heavy(),
                "membarrier was there when it was asked for, and is gone now"
            );
        }
        for mark in marks.iter() {
            let seen = mark.0.load(Ordering::Acquire);
            if seen % 2 == 1 && !planted("no_wait_for_marks") {
                wait_for(&mark.0, seen);
            }
        }
    }

    fn unregister(&self, mark: &Arc<Mark>) {
        let mut marks = self.marks.lock();
        if let Some(index) = marks.iter().position(|other| Arc::ptr_eq(other, mark)) {
            marks.swap_remove(index);
        }
    }
}

/// Until the mark is no longer what it was. An access is short: its thread is running, or will be.
#[cold]
fn wait_for(mark: &AtomicU64, seen: u64) {
    let mut turns = 0_u32;
    while mark.load(Ordering::Acquire) == seen {
        #[cfg(loom)]
        loom::thread::yield_now();
        #[cfg(shuttle)]
        shuttle::thread::yield_now();
        #[cfg(not(any(loom, shuttle)))]
        match turns {
            0..64 => std::hint::spin_loop(),
            64..256 => std::thread::yield_now(),
            _ => std::thread::sleep(std::time::Duration::from_micros(50)),
        }
        turns = turns.saturating_add(1);
    }
}

/// The right to be in access, for one thread at a time.
#[derive(Debug)]
pub struct Accessing<'s> {
    shootdown: &'s Shootdown,
    mark: Arc<Mark>,
    sequence: u64,
}

impl Accessing<'_> {
    /// In access until the result is dropped; until then the thread may wait for nothing.
    #[inline(always)]
    pub fn enter(&mut self) -> InAccess<'_> {
        let order = if planted("relaxed_enter") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        let entered = self.sequence + 1;
        self.mark.0.store(entered, order);
        match self.shootdown.barrier {
            // Said apart from `light`, so that the frequent case is compiled to nothing.
            Barrier::Asymmetric => compiler_fence(Ordering::SeqCst),
            Barrier::Symmetric => self.shootdown.barrier.light(),
        }
        InAccess {
            generation: self.shootdown.generation.load(Ordering::Acquire),
            mark: &self.mark,
            entered,
            sequence: &mut self.sequence,
        }
    }
}

/// A thread in access.
#[derive(Debug)]
#[must_use = "the access is over when this is dropped"]
pub struct InAccess<'a> {
    generation: u64,
    mark: &'a Mark,
    entered: u64,
    /// Once per access, because the next one waits for it.
    sequence: &'a mut u64,
}

impl InAccess<'_> {
    /// Whatever was cached under another generation is outdated.
    #[inline(always)]
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

impl Drop for InAccess<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let order = if planted("relaxed_leave") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        *self.sequence = self.entered + 1;
        self.mark.0.store(self.entered + 1, order);
    }
}

impl Drop for Accessing<'_> {
    fn drop(&mut self) {
        self.shootdown.unregister(&self.mark);
    }
}
