//! Waiting for the end of something that takes long and that nobody holds a lock for.

use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// Something that is being done to pages: others wait for its end.
#[derive(Default)]
pub(crate) struct Busy {
    over: Mutex<bool>,
    ended: Condvar,
}

impl fmt::Debug for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Busy")
            .field("over", &*self.over.lock())
            .finish_non_exhaustive()
    }
}

impl Busy {
    /// Waits until it is over.
    pub(super) fn wait(&self) {
        let mut over = self.over.lock();
        while !*over {
            self.ended.wait(&mut over);
        }
    }
}

/// It's over when this is dropped, also by a panic.
#[derive(Debug, Default)]
pub(super) struct Until(Arc<Busy>);

impl Until {
    pub(super) fn busy(&self) -> &Arc<Busy> {
        &self.0
    }

    pub(super) fn is(&self, busy: &Arc<Busy>) -> bool {
        Arc::ptr_eq(&self.0, busy)
    }
}

impl Drop for Until {
    fn drop(&mut self) {
        *self.0.over.lock() = true;
        self.0.ended.notify_all();
    }
}
