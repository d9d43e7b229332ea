//! The page cache's lock: one for readers and writers, or one that models see.

#[cfg(not(loom))]
pub(super) use parking_lot::RwLock as Lock;

/// Everybody excludes everybody, which leaves out nothing that the other kind allows and that matters: readers change nothing.
#[cfg(loom)]
#[derive(Debug, Default)]
pub(super) struct Lock<T>(vma_rcu::sync::Mutex<T>);

#[cfg(loom)]
impl<T> Lock<T> {
    pub(super) fn read(&self) -> vma_rcu::sync::MutexGuard<'_, T> {
        self.0.lock()
    }

    pub(super) fn write(&self) -> vma_rcu::sync::MutexGuard<'_, T> {
        self.0.lock()
    }
}
