//! Pins: what a reader writes, and nobody else.
//!
//! Each registered reader has a slot with a sequence number that is odd while it is pinned. Whoever wants to
//! free something unlinks it, looks at all slots, and waits until those that were odd have changed.
//!
//! ```text
//! reader                                whoever frees
//! ------                                -------------
//! sequence := odd                       objects were unlinked
//! fence(SeqCst)                         fence(SeqCst)
//! root load, search                     sequence load: odd -> wait until it has changed
//! sequence := even  (release)           (acquire) free
//! ```
//!
//! Either the reader's loads see the objects unlinked, or the freeing side sees the odd sequence: the
//! store-load pair on both sides is what the two fences are for.
//!
//! A pin is a handful of instructions on the thread's own cache line. There is nothing that it has to do now
//! and then, and a signal handler may interrupt it anywhere with a pin of its own on the same slot.

use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, compiler_fence, fence};
#[cfg(any(loom, not(target_arch = "x86_64")))]
use crate::sync::planted;

/// One registered reader. Two cache lines, because some processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Slot {
    /// Nesting of pins on this slot. Written by its own thread alone (handlers nest, they don't race):
    /// relaxed.
    depth: AtomicUsize,
    /// Odd while pinned. Written by its own thread. A store that makes it odd is ordered before the search by
    /// the `SeqCst` fence in [`enter`](Self::enter), which pairs with the one in [`Blockers::note`]. Every
    /// store is a release, and pairs with the acquire loads of [`Blockers`], so that the reader's loads come
    /// before the free, even if what is seen is a later pin. Models: `a_pin_holds_back_the_free`,
    /// `a_later_pin_does_not_hide_the_end_of_an_earlier_one`.
    sequence: AtomicU64,
}

impl Slot {
    /// Safe to interrupt at any instruction by another `enter` .. `leave` of the same thread: the depth
    /// goes up first, so that the inner `leave` doesn't end the outer pin. Whether to mark is not asked of the depth,
    /// which what is interrupted may have raised without having marked yet. The outer pin then stores the very value that
    /// the inner one has left.
    #[inline]
    pub(crate) fn enter(&self) {
        let depth = self.depth.load(Ordering::Relaxed);
        self.depth.store(depth + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        self.mark();
    }

    /// Makes the sequence odd, before every later load. An odd one may be that of an interrupted pin which hasn't
    /// come to its fence: hence the fence each time.
    #[cfg(any(loom, not(target_arch = "x86_64")))]
    #[inline]
    fn mark(&self) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        let order = if planted("relaxed_pin") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        self.sequence.store(sequence | 1, order);
        if !planted("no_pin_fence") {
            fence(Ordering::SeqCst);
        }
    }

    /// Makes the sequence odd, before every later load. On x86-64 a locked exchange is the fence as well, at
    /// half the cost of a store and `mfence` (the language's memory model doesn't promise that; the processor's does,
    /// and the compiler fence keeps later loads behind). An odd sequence has its fence behind it.
    #[cfg(all(not(loom), target_arch = "x86_64"))]
    #[inline]
    fn mark(&self) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        if sequence & 1 == 0 {
            self.sequence.swap(sequence + 1, Ordering::SeqCst);
        }
        compiler_fence(Ordering::SeqCst);
    }

    /// The depth goes down first: an interruption between the two steps then ends its own pin, and the
    /// second step finds an even value, or stores one that is older than what several interruptions have left. A period
    /// that noted one of those may then wait for one more pin; none ends early.
    #[inline]
    pub(crate) fn leave(&self) {
        let depth = self.depth.load(Ordering::Relaxed) - 1;
        // The reader's loads before it; a handler in between sees to itself.
        compiler_fence(Ordering::SeqCst);
        self.depth.store(depth, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        if depth == 0 {
            self.clear();
        }
    }

    /// The reader is gone, and with it every guard: one that was forgotten holds nothing back any more.
    pub(crate) fn abandon(&self) {
        self.clear();
    }

    #[inline]
    fn clear(&self) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        if sequence & 1 == 1 {
            self.sequence.store(sequence + 1, Ordering::Release);
        }
    }
}

/// The readers that were pinned when a grace period began.
#[derive(Debug, Default)]
pub(crate) struct Blockers(Vec<(Arc<Slot>, u64)>);

impl Blockers {
    /// Makes room for `slots` slots.
    pub(crate) fn reserve(&mut self, slots: usize) {
        self.0.reserve(slots);
    }

    /// None is left of those that were noted.
    #[cfg(not(loom))]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Notes the slots that are pinned now. What was unlinked before this call is out of reach of every reader that
    /// isn't noted.
    pub(crate) fn note(&mut self, slots: &[Arc<Slot>]) {
        fence(Ordering::SeqCst);
        self.0.clear();
        for slot in slots {
            let sequence = slot.sequence.load(Ordering::Acquire);
            if sequence & 1 == 1 {
                self.0.push((Arc::clone(slot), sequence));
            }
        }
    }

    /// Forgets those that have unpinned since; true when none is left.
    pub(crate) fn refresh(&mut self) -> bool {
        self.0
            .retain(|(slot, sequence)| slot.sequence.load(Ordering::Acquire) == *sequence);
        self.0.is_empty()
    }
}
