//! Frames that calls are about to let go of: an allocation that finds none waits for them (hazard 4).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long an allocation waits. Who has taken frames out may hold a guard for several calls.
const PATIENCE: Duration = Duration::from_millis(100);

/// Calls of a family of spaces that have taken frames out and not let go of them yet.
#[derive(Default)]
pub(super) struct Pending {
    calls: Mutex<usize>,
    done: Condvar,
}

/// One such call, until it's dropped.
pub(super) struct Announced(Arc<Pending>);

impl fmt::Debug for Announced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Announced").finish_non_exhaustive()
    }
}

impl Pending {
    pub(super) fn announce(self: &Arc<Self>) -> Announced {
        *self.calls.lock() += 1;
        Announced(Arc::clone(self))
    }

    /// Tries again when a call is done, as long as there is one.
    pub(super) fn until_some<R>(&self, mut allocate: impl FnMut() -> Option<R>) -> Option<R> {
        allocate().or_else(|| self.wait(allocate))
    }

    #[cold]
    fn wait<R>(&self, mut allocate: impl FnMut() -> Option<R>) -> Option<R> {
        let deadline = Instant::now() + PATIENCE;
        let mut calls = self.calls.lock();
        loop {
            // Under the lock: a call that is done after this has yet to wake us.
            if let Some(new) = allocate() {
                return Some(new);
            }
            if *calls == 0 || self.done.wait_until(&mut calls, deadline).timed_out() {
                return None;
            }
        }
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        *self.0.calls.lock() -= 1;
        self.0.done.notify_all();
    }
}
