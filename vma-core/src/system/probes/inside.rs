//! Whether a thread is in a probe's callback: then it waits for no other callback.

use std::cell::Cell;

#[cfg(loom)]
use loom::thread_local;

thread_local! {
    static DEPTH: Cell<u32> = Cell::default();
}

/// The thread is in a callback until this is dropped.
pub(super) struct Inside(());

impl Inside {
    pub(super) fn enter() -> Self {
        // A thread that is ending makes no calls that are told apart by this.
        let _ = DEPTH.try_with(|depth| depth.set(depth.get() + 1));
        Inside(())
    }

    pub(super) fn is_inside() -> bool {
        DEPTH.try_with(|depth| depth.get() > 0).unwrap_or(false)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = DEPTH.try_with(|depth| depth.set(depth.get() - 1));
    }
}
