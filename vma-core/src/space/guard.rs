//! The two sides of the lock, and publishing.

use std::fmt;
use std::sync::Arc;

use parking_lot::{RwLockReadGuard, RwLockWriteGuard};

use super::draft::{Changes, Draft, HookEvent, Piece};
use super::{AddressSpace, Inner};
use crate::accounting::Totals;
use crate::backend::{self, Backend};
use crate::error::NoMemory;
use crate::limits::SpaceConfig;

/// The layout is stable while this lives.
pub struct ReadGuard<'s, B: Backend = ()> {
    pub(super) space: &'s AddressSpace<B>,
    pub(super) inner: RwLockReadGuard<'s, Inner>,
}

impl<B: Backend> fmt::Debug for ReadGuard<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadGuard")
            .field("totals", &self.inner.totals)
            .finish_non_exhaustive()
    }
}

/// The exclusive side: all calls that change the layout, one after the other with nobody between.
///
/// Files and owners' hooks are let go of after the guard.
pub struct WriteGuard<'s, B: Backend = ()> {
    pub(super) space: &'s AddressSpace<B>,
    /// `None` only inside `drop`.
    pub(super) inner: Option<RwLockWriteGuard<'s, Inner>>,
    pub(super) after: After,
    /// Set when too much retired memory is pending: nothing can be published then.
    pub(super) refused: Option<NoMemory>,
}

impl<B: Backend> fmt::Debug for WriteGuard<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteGuard").finish_non_exhaustive()
    }
}

/// What waits until the lock is let go.
#[derive(Default)]
pub(super) struct After {
    pub(super) hooks: Vec<HookEvent>,
    zaps: Vec<(u64, u64)>,
    pub(super) changed: bool,
}

impl<'s, B: Backend> WriteGuard<'s, B> {
    pub(super) fn inner(&self) -> &Inner {
        match &self.inner {
            Some(inner) => inner,
            None => unreachable!("only drop takes the lock guard out"),
        }
    }

    pub(super) fn inner_mut(&mut self) -> &mut Inner {
        match &mut self.inner {
            Some(inner) => inner,
            None => unreachable!("only drop takes the lock guard out"),
        }
    }

    /// Loaded once per call.
    pub(super) fn config(&self) -> arc_swap::Guard<Arc<SpaceConfig>> {
        self.space.config.load()
    }

    /// Starts planning.
    pub(super) fn draft<'a>(&'a self, config: &'a SpaceConfig) -> Draft<'a> {
        let inner = self.inner();
        Draft::new(
            self.space.tree.locked(&inner.writer),
            &inner.guarded,
            config,
            inner.totals,
        )
    }

    /// Prepares and publishes. On an error nothing has changed.
    pub(super) fn commit(&mut self, mut changes: Changes) -> Result<(), NoMemory> {
        let space: &'s AddressSpace<B> = self.space;
        if changes.windows.is_empty() {
            self.inner_mut().totals = changes.totals;
            return Ok(());
        }
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        let told = if B::ACTIVE {
            prepare_backend(&space.backend, &changes)?
        } else {
            Vec::new()
        };
        let inner = self.inner_mut();
        let guard_edits = if changes.guards {
            Inner::guard_edits(&changes.windows)
        } else {
            Vec::new()
        };
        let mut transaction = space.tree.write(&mut inner.writer);
        for window in &mut changes.windows {
            let entries = window
                .pieces
                .drain(..)
                .map(|Piece { start, end, vma }| (start..end, vma));
            transaction
                .splice(window.start..window.end, entries)
                .map_err(|_| NoMemory::Records)?;
        }
        let prepared = transaction.prepare().map_err(|_| NoMemory::Records)?;
        drop(prepared.commit());
        for edit in guard_edits {
            inner.apply_guard_edit(edit);
        }
        inner.totals = changes.totals;
        inner.stats.add(changes.stats);
        inner.stats.publishes += 1;
        for (file, delta) in changes.writable {
            file.count_writable(delta);
        }
        self.after.changed = true;
        if !changes.hooks.is_empty() {
            self.after.hooks.extend(changes.hooks);
        }
        for (start, end, pieces) in told {
            space.backend.commit(start, end, &pieces);
            self.after.zaps.extend(holes(start, end, &pieces));
        }
        Ok(())
    }

    /// As [`AddressSpace::totals`].
    pub fn totals(&self) -> Totals {
        self.inner().totals
    }
}

/// The parts of a window that hold nothing any more.
fn holes(start: u64, end: u64, pieces: &[backend::Piece]) -> impl Iterator<Item = (u64, u64)> {
    let starts = pieces.iter().map(|piece| piece.start).chain([end]);
    let ends = [start]
        .into_iter()
        .chain(pieces.iter().map(|piece| piece.end));
    ends.zip(starts).filter(|(from, to)| from < to)
}

type Told = Vec<(u64, u64, Vec<backend::Piece>)>;

fn prepare_backend<B: Backend>(backend: &B, changes: &Changes) -> Result<Told, NoMemory> {
    let mut told = Told::new();
    for window in &changes.windows {
        let pieces: Vec<_> = window
            .pieces
            .iter()
            .map(|piece| backend::Piece {
                start: piece.start,
                end: piece.end,
                flags: piece.vma.flags(),
            })
            .collect();
        backend.prepare(window.start, window.end, &pieces)?;
        told.push((window.start, window.end, pieces));
    }
    Ok(told)
}

impl<B: Backend> Drop for WriteGuard<'_, B> {
    fn drop(&mut self) {
        let after = std::mem::take(&mut self.after);
        drop(self.inner.take());
        if !after.changed {
            return;
        }
        for (start, end) in after.zaps {
            self.space.backend.zap(start, end);
        }
        // Opened before closed, so that an owner who counts doesn't see none in between.
        for event in after.hooks.iter().filter(|event| event.opened) {
            event.hooks.opened(event.range);
        }
        for event in after.hooks.iter().filter(|event| !event.opened) {
            event.hooks.closed(event.range);
        }
        self.space.tree.domain().collect();
    }
}
