//! Pins for signal handlers.
//!
//! crossbeam's pin can't be interrupted half-way by another pin of the same handle, and every 128th one
//! runs deferred work, which frees. A handler therefore marks a slot of its own. Whoever frees looks at
//! the slots after the epochs have let a batch go, and waits for the handlers that it finds active.
//!
//! ```text
//! handler                               whoever frees
//! -------                               -------------
//! sequence := odd     (relaxed)         objects were unlinked
//! fence(SeqCst)                         fence(SeqCst)
//! root load, search                     sequence load: odd -> wait until it changed
//! ```
//!
//! Either the handler's loads see the objects unlinked, or the freeing side sees the odd sequence: the
//! store-load pair on both sides is what the two fences are for.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, compiler_fence, fence};
use crate::sync::{Arc, planted};

/// One registered handler context of one thread.
#[derive(Debug, Default)]
pub(crate) struct SignalSlot {
    /// Nesting of pins on this slot. Written by its own thread alone (handlers nest, they don't race):
    /// relaxed.
    depth: AtomicUsize,
    /// Odd while pinned. Written by its own thread; the odd store is ordered before the search by the
    /// `SeqCst` fence in [`enter`](Self::enter), which pairs with the one in
    /// [`Blockers::note`]; the even store is a release, which pairs with the acquire loads of [`Blockers`], so
    /// that the handler's reads come before the free. Model: `a_signal_pin_holds_back_the_free`.
    sequence: AtomicU64,
}

impl SignalSlot {
    /// Safe to interrupt at any instruction by another `enter` .. `leave` of the same thread: the depth
    /// goes up first, so that the inner `leave` doesn't end the outer pin, and the inner store leaves
    /// the very value that the outer one is about to store.
    pub(crate) fn enter(&self) {
        let depth = self.depth.load(Ordering::Relaxed);
        self.depth.store(depth + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence | 1, Ordering::Relaxed);
        if !planted("no_signal_fence") {
            fence(Ordering::SeqCst);
        }
    }

    /// The reader is gone, and with it every guard: one that was forgotten holds nothing back any more.
    pub(crate) fn abandon(&self) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        if sequence & 1 == 1 {
            self.sequence.store(sequence + 1, Ordering::Release);
        }
    }

    /// The depth goes down first: an interruption between the two steps then ends its own pin, and the
    /// second step finds or repeats the even value.
    pub(crate) fn leave(&self) {
        let depth = self.depth.load(Ordering::Relaxed) - 1;
        // The handler's reads before it; a handler in between sees to itself.
        compiler_fence(Ordering::SeqCst);
        self.depth.store(depth, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        if depth == 0 {
            let sequence = self.sequence.load(Ordering::Relaxed);
            if sequence & 1 == 1 {
                self.sequence.store(sequence + 1, Ordering::Release);
            }
        }
    }
}

/// The handlers that were active when a batch was first looked at.
#[derive(Debug, Default)]
pub(crate) struct Blockers(Vec<(Arc<SignalSlot>, u64)>);

impl Blockers {
    /// Notes the slots that are active now. Objects that were unlinked before this call are out of reach
    /// of every handler that isn't noted.
    pub(crate) fn note(slots: &[Arc<SignalSlot>]) -> Self {
        fence(Ordering::SeqCst);
        let active = |slot: &Arc<SignalSlot>| {
            let sequence = slot.sequence.load(Ordering::Acquire);
            (sequence & 1 == 1).then(|| (Arc::clone(slot), sequence))
        };
        Blockers(slots.iter().filter_map(active).collect())
    }

    /// Forgets those that have left since; true when none is left.
    pub(crate) fn refresh(&mut self) -> bool {
        self.0
            .retain(|(slot, sequence)| slot.sequence.load(Ordering::Acquire) == *sequence);
        self.0.is_empty()
    }
}
