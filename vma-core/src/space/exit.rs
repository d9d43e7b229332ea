//! The end of a space, with the space still there: Linux's `exit_mmap()`.

use std::sync::Arc;

use super::draft::Draft;
use super::{AddressSpace, VmaRef, WriteGuard, notify};
use crate::backend::Backend;
use crate::error::PublishError;
use crate::events::InvalidationReason;

impl<B: Backend> WriteGuard<'_, B> {
    /// Takes away what lies wholly inside a range, sealed or not.
    fn clear(&mut self, start: u64, end: u64) -> Result<(), PublishError> {
        let config = Arc::clone(self.config());
        let mut changes = self.changes();
        let mut draft: Draft<'_> = self.draft(&config, &mut changes);
        draft.remove(start, end);
        // Nobody is left who could wait.
        changes.told.clear();
        self.commit(&mut changes)
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Unmaps everything, what is sealed as well. When it returns pages, entries in files' indexes and charges are gone, and owners have
    /// been told.
    ///
    /// It waits for nobody's permission: neither limits nor retired memory keep it from that. Where there is no memory for the
    /// bookkeeping mappings stay, and go when the space is dropped.
    ///
    /// # Panics
    /// When an owner's hook does. All others have been told, and everything is gone.
    ///
    /// Source: `exit_mmap()` in mm/mmap.c, which doesn't ask `can_modify_mm()` either.
    pub(crate) fn exit(&self) {
        let mut guard = self.write_to(notify::everything, InvalidationReason::Release);
        guard.refused = None;
        let limit = guard.config().task_size;
        if guard.clear(0, limit).is_ok() {
            self.core.notifiers.clear();
            return;
        }
        // One by one takes less memory at a time.
        let first = |guard: &WriteGuard<'_, B>| guard.iter(0).next().map(VmaRef::range);
        while let Some(range) = first(&guard) {
            if guard.clear(range.start, range.end).is_err() {
                return;
            }
        }
    }
}
