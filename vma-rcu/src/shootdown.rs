//! Waiting until nobody uses an old translation: what a TLB shootdown is for hardware.
//!
//! A thread that caches translations marks itself *in access* around each use of one, on a cache line of its own, with
//! the generation that its cache is of. Whoever has changed what translations are made from raises the generation, makes
//! all threads execute a barrier, and waits for those that are in access under an older one.
//!
//! ```text
//! accessor                                 who changes something
//! --------                                 ---------------------
//! mark := own generation                   change
//! light barrier                            generation := generation + 1 =: new
//! generation load; it isn't the own:       heavy barrier
//!     mark := 0; drop the cache;           for each mark:
//!     own := generation; again                 wait until it is 0, or at least new
//! look up, or use the cache; access
//! mark := 0
//! ```
//!
//! **S1** When [`Shootdown::invalidate`] returns, every access that used something from before the change has ended, and
//! later ones find their cache outdated: store, barrier, load on both sides, so that either the accessor sees the
//! new generation or its mark is seen. Where the platform has `membarrier` the accessor's barrier costs nothing. A mark of the
//! new generation, or of a later one, says as much as 0: its thread has dropped its cache since, outside any access.
//!
//! An accessor between its marks waits for nothing: no lock, no fault, no code of a user's. So the wait is as long as an access,
//! or as its thread is kept from running.
//!
//! ```
//! use vma_rcu::shootdown::Shootdown;
//!
//! let shootdown = Shootdown::default();
//! let mut accessor = shootdown.register();
//! assert!(accessor.enter().is_some());
//! shootdown.invalidate();
//! assert!(accessor.enter().is_none(), "until the cache has been dropped");
//! accessor.renew();
//! assert!(accessor.enter().is_some());
//! ```

use std::fmt;
use std::hint::cold_path;

use crate::barrier::Barrier;
use crate::sync::atomic::{AtomicU64, Ordering, compiler_fence};
use crate::sync::{Arc, Mutex, planted};

/// From one generation to the next: the lowest bit is for [`FENCED`].
const STEP: u64 = 2;
/// In an accessor's own generation, where it needs a fence before it looks at the shared one: then the two are never equal,
/// and what follows if they aren't sees to it. Newer than without it, older than the next.
const FENCED: u64 = 1;

/// An accessor's mark, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Mark(
    /// The generation under which its thread is in access, or 0. Stored to by its thread alone, with release when it leaves;
    /// load-acquire by who waits: what the access did comes before. That it enters before what follows is the barrier's doing. Model:
    /// `an_access_is_over_when_invalidate_returns`. With release when it enters as well, because who waits may miss the 0 and see a
    /// later generation: that's by argument alone, as in the model the fence of an outdated entry says the same.
    AtomicU64,
);

/// What a set of accessors share.
pub struct Shootdown {
    /// A multiple of [`STEP`]. Added to with release after a change; load-acquire by accessors, which then see the change.
    /// Model as above.
    generation: AtomicU64,
    barrier: Barrier,
    marks: Mutex<Vec<Arc<Mark>>>,
}

impl Default for Shootdown {
    fn default() -> Self {
        Shootdown {
            generation: AtomicU64::new(STEP),
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
            generation: self.current(),
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
        // Several may run at once, up to the lock: each waits for its own.
        let order = if planted("relaxed_raise") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        let new = self.generation.fetch_add(STEP, order) + STEP;
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
            if !mark.is_past(new) && !planted("no_wait_for_marks") {
                wait_for(mark, new);
            }
        }
    }

    /// [`invalidate`](Self::invalidate), unless the accessor that has this [`id`](Accessing::id) is the only one: it isn't in access,
    /// and what it has cached is its own business.
    ///
    /// # Panics
    ///
    /// As there.
    pub fn invalidate_others(&self, id: AccessorId) {
        {
            // One that is registered later has cached nothing, and sees the change.
            let marks = self.marks.lock();
            if let [only] = &**marks
                && std::ptr::eq(&raw const **only, id.0)
            {
                return;
            }
        }
        self.invalidate();
    }

    /// The generation, as accessors keep it.
    fn current(&self) -> u64 {
        let generation = self.generation.load(Ordering::Acquire);
        match self.barrier {
            Barrier::Asymmetric => generation,
            Barrier::Symmetric => generation | FENCED,
        }
    }

    fn unregister(&self, mark: &Arc<Mark>) {
        let mut marks = self.marks.lock();
        if let Some(index) = marks.iter().position(|other| Arc::ptr_eq(other, mark)) {
            marks.swap_remove(index);
        }
    }
}

impl Mark {
    /// Whether its thread is in no access of before a generation.
    fn is_past(&self, generation: u64) -> bool {
        let seen = self.0.load(Ordering::Acquire);
        // The one before it, with the bit of those that need a fence.
        let oldest = generation - u64::from(planted("fenced_is_new")) * (STEP - FENCED);
        seen == 0 || seen >= oldest
    }
}

/// Until the mark is past. An access is short: its thread is running, or will be.
#[cold]
fn wait_for(mark: &Mark, generation: u64) {
    let mut turns = 0_u32;
    while !mark.is_past(generation) {
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

/// Which accessor of a [`Shootdown`] it is, as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessorId(*const Mark);

/// The right to be in access, for one thread at a time.
#[derive(Debug)]
pub struct Accessing<'s> {
    shootdown: &'s Shootdown,
    mark: Arc<Mark>,
    /// The one that its owner's cache is of, at the newest. As [`Shootdown::current`] has it.
    generation: u64,
}

impl Accessing<'_> {
    /// In access until the result is dropped; until then the thread may wait for nothing. `None` if something has changed: what
    /// has been cached is outdated, and so it stays until [`renew`](Self::renew) is called.
    #[inline(always)]
    pub fn enter(&mut self) -> Option<InAccess<'_>> {
        // Read once: the compiler doesn't know across the barrier that nobody else writes them.
        let (mark, own) = (&*self.mark, self.generation);
        mark.0.store(own, Ordering::Release);
        compiler_fence(Ordering::SeqCst);
        let generation = self.shootdown.generation.load(Ordering::Acquire);
        let access = InAccess { mark };
        if generation != own {
            cold_path();
            if !self.is_current_behind_a_fence() {
                return None;
            }
        }
        Some(access)
    }

    /// Whether it was just the fence that was missing.
    #[inline(never)]
    fn is_current_behind_a_fence(&self) -> bool {
        if self.generation & FENCED == 0 {
            return false;
        }
        self.shootdown.barrier.light();
        self.shootdown.current() == self.generation
    }

    /// For [`Shootdown::invalidate_others`].
    pub fn id(&self) -> AccessorId {
        AccessorId(&raw const *self.mark)
    }

    /// For who has dropped everything that was cached.
    pub fn renew(&mut self) {
        self.generation = self.shootdown.current();
    }
}

/// A thread in access.
#[derive(Debug)]
#[must_use = "the access is over when this is dropped"]
pub struct InAccess<'a> {
    mark: &'a Mark,
}

impl Drop for InAccess<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let order = if planted("relaxed_leave") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        self.mark.0.store(0, order);
    }
}

impl Drop for Accessing<'_> {
    fn drop(&mut self) {
        self.shootdown.unregister(&self.mark);
    }
}
