//! The two sides of the lock, and publishing.

use std::sync::Arc;
use std::{fmt, iter, mem};

use vma_rcu::lock_order::Held;
use vma_rcu::rwsem;
use vma_rcu::wait::Wait;

use super::draft::{Changes, Draft, Followed, HookEvent, Piece};
use super::{AddressSpace, Inner};
use crate::accounting::Totals;
use crate::backend::{self, Backend};
use crate::error::PublishError;
use crate::limits::SpaceConfig;

/// The layout is stable while this lives.
pub struct ReadGuard<'s, B: Backend = ()> {
    pub(super) space: &'s AddressSpace<B>,
    /// `None` only inside `drop`.
    inner: Option<rwsem::ReadGuard<'s, Inner>>,
    held: Option<Held>,
    /// What a downgraded guard has still to do.
    after: After,
}

impl<'s, B: Backend> ReadGuard<'s, B> {
    pub(super) fn new(
        space: &'s AddressSpace<B>,
        inner: rwsem::ReadGuard<'s, Inner>,
        held: Held,
    ) -> Self {
        ReadGuard {
            space,
            inner: Some(inner),
            held: Some(held),
            after: After::default(),
        }
    }

    pub(super) fn inner(&self) -> &Inner {
        match &self.inner {
            Some(inner) => inner,
            None => unreachable!("only drop takes the lock guard out"),
        }
    }
}

impl<B: Backend> Drop for ReadGuard<'_, B> {
    fn drop(&mut self) {
        drop(self.inner.take());
        drop(self.held.take());
        self.after.run(self.space);
    }
}

impl<B: Backend> fmt::Debug for ReadGuard<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadGuard")
            .field("totals", &self.inner().totals)
            .finish_non_exhaustive()
    }
}

/// The exclusive side: all calls that change the layout, one after the other with nobody between.
///
/// Files and owners' hooks are let go of after the guard.
pub struct WriteGuard<'s, B: Backend = ()> {
    pub(super) space: &'s AddressSpace<B>,
    /// `None` only inside `drop` and `downgrade`, as is `held`.
    pub(super) inner: Option<rwsem::WriteGuard<'s, Inner>>,
    pub(super) held: Option<Held>,
    /// How long calls wait for the readers of single mappings.
    pub(super) wait: Wait<'s>,
    pub(super) after: After,
    /// Set when too much retired memory is pending: nothing can be published then.
    pub(super) refused: Option<PublishError>,
}

impl<B: Backend> fmt::Debug for WriteGuard<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteGuard").finish_non_exhaustive()
    }
}

/// What waits until the lock is let go.
#[derive(Default)]
pub(super) struct After {
    changed: bool,
    /// Few spaces have any.
    work: Option<Box<Work>>,
}

#[derive(Default)]
struct Work {
    hooks: Vec<HookEvent>,
    zaps: Vec<(u64, u64)>,
}

impl After {
    /// Owners are told when the lock has been let go.
    pub(super) fn tell(&mut self, hooks: Vec<HookEvent>) {
        if !hooks.is_empty() {
            self.changed = true;
            self.work.get_or_insert_default().hooks.extend(hooks);
        }
    }

    fn zap(&mut self, ranges: impl Iterator<Item = (u64, u64)>) {
        let mut ranges = ranges.peekable();
        if ranges.peek().is_some() {
            self.work.get_or_insert_default().zaps.extend(ranges);
        }
    }

    /// Does it, with no lock held.
    #[inline]
    fn run<B: Backend>(&mut self, space: &AddressSpace<B>) {
        if !mem::take(&mut self.changed) {
            return;
        }
        if let Some(work) = self.work.take() {
            work.run(space);
        }
        space.tree.domain().collect();
    }
}

impl Work {
    #[cold]
    fn run<B: Backend>(self, space: &AddressSpace<B>) {
        for (start, end) in self.zaps {
            space.backend.zap(start, end);
        }
        // Opened before closed, so that an owner who counts doesn't see none in between.
        for event in self.hooks.iter().filter(|event| event.opened) {
            event.hooks.opened(event.range);
        }
        for event in self.hooks.iter().filter(|event| !event.opened) {
            event.hooks.closed(event.range);
        }
    }
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

    pub(super) fn config(&self) -> &Arc<SpaceConfig> {
        &self.inner().config
    }

    /// What a call changes: nothing, yet.
    #[inline]
    pub(super) fn changes(&self) -> Changes {
        Changes::new(self.inner().totals)
    }

    /// Starts planning; `changes` takes what is planned, for [`commit`](Self::commit).
    #[inline]
    pub(super) fn draft<'a>(
        &'a self,
        config: &'a SpaceConfig,
        changes: &'a mut Changes,
    ) -> Draft<'a> {
        let inner = self.inner();
        let view = self.space.tree.locked(&inner.writer);
        Draft::new(view, &inner.guarded, config, changes)
    }

    /// Prepares and publishes, once. On an error nothing has changed.
    pub(super) fn commit(&mut self, changes: &mut Changes) -> Result<(), PublishError> {
        let space: &'s AddressSpace<B> = self.space;
        if changes.windows.is_empty() {
            self.inner_mut().totals = changes.totals;
            return Ok(());
        }
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        let wait = self.wait;
        let told = if B::ACTIVE {
            Some(prepare_backend(&space.backend, changes)?)
        } else {
            None
        };
        let inner = self.inner_mut();
        let guard_edits = changes.guards.then(|| Inner::guard_edits(&changes.windows));
        let mut transaction = space.tree.write(&mut inner.writer);
        for window in &mut changes.windows {
            // Popped in ascending order: cheaper than draining where there is one, as nearly always.
            window.pieces.reverse();
            let entries = iter::from_fn(|| {
                let Piece { start, end, vma } = window.pieces.pop()?;
                Some((start..end, vma))
            });
            transaction
                .splice(window.start..window.end, entries)
                .map_err(|_| PublishError::NoMemory)?;
        }
        let prepared = transaction.prepare().map_err(|_| PublishError::NoMemory)?;
        drop(prepared.commit_with(wait).map_err(PublishError::GaveUp)?);
        if let Some(edits) = guard_edits {
            inner.apply_guard_edits(edits);
        }
        inner.totals = changes.totals;
        inner.stats.add(changes.stats);
        inner.stats.publishes += 1;
        self.after.changed = true;
        if let Some(followed) = changes.followed.take() {
            self.follow(*followed);
        }
        if let Some(told) = told {
            for (start, end, pieces) in told {
                space.backend.commit(start, end, &pieces);
                self.after.zap(holes(start, end, &pieces));
            }
        }
        Ok(())
    }

    #[cold]
    fn follow(&mut self, followed: Followed) {
        for (file, delta) in followed.writable {
            file.count_writable(delta);
        }
        self.after.tell(followed.hooks);
    }

    /// As [`AddressSpace::totals`].
    pub fn totals(&self) -> Totals {
        self.inner().totals
    }

    /// Keeps the layout as the calls have left it, and lets readers in; no writer comes in between. Who waited
    /// before goes first, so that a waiting writer keeps later readers out: see [`vma_rcu::rwsem`].
    ///
    /// Owners' hooks and zaps of what was unmapped wait until the new guard is dropped.
    #[must_use]
    pub fn downgrade(mut self) -> ReadGuard<'s, B> {
        let (Some(inner), Some(held)) = (self.inner.take(), self.held.take()) else {
            unreachable!("only drop takes the lock guard out")
        };
        let mut guard = ReadGuard::new(self.space, inner.downgrade(), held);
        guard.after = mem::take(&mut self.after);
        guard
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

fn prepare_backend<B: Backend>(backend: &B, changes: &Changes) -> Result<Told, PublishError> {
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
        drop(self.inner.take());
        drop(self.held.take());
        self.after.run(self.space);
    }
}
