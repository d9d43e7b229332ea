//! The two sides of the lock, and publishing.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::{fmt, iter, mem, thread};

use vma_rcu::lock_order::Held;
use vma_rcu::rwsem;
use vma_rcu::tree::View;
use vma_rcu::wait::Wait;

use super::draft::{Changes, Draft, Followed, HookEvent, Piece, Window, settle_huge};
use super::files::{FileEdits, Linked};
use super::gate::{Gates, fence_before_tables};
use super::maps::Marks;
use super::observe::Observed;
use super::probes::ProbedPart;
use super::{AddressSpace, Inner};
use crate::accounting::Totals;
use crate::addr::VmRange;
use crate::backend::{Backend, PageChange};
use crate::error::PublishError;
use crate::events::{Announced, Context, MonitorEvent, Started};
use crate::limits::SpaceConfig;
use crate::vma::Vma;
use smallvec::SmallVec;

/// The layout is stable while this lives.
pub struct ReadGuard<'s, B: Backend = ()> {
    pub(super) space: &'s AddressSpace<B>,
    /// `None` only inside `drop`.
    inner: Option<rwsem::ReadGuard<'s, Inner, Observed>>,
    held: Option<Held>,
    /// What a downgraded guard has still to do.
    after: After<B>,
    /// How long monitors are waited for then.
    wait: Wait<'s>,
}

impl<'s, B: Backend> ReadGuard<'s, B> {
    pub(super) fn new(
        space: &'s AddressSpace<B>,
        inner: rwsem::ReadGuard<'s, Inner, Observed>,
        held: Held,
    ) -> Self {
        ReadGuard {
            space,
            inner: Some(inner),
            held: Some(held),
            after: After::default(),
            wait: Wait::forever(),
        }
    }

    pub(super) fn inner(&self) -> &Inner {
        match &self.inner {
            Some(inner) => inner,
            None => unreachable!("only drop takes the lock guard out"),
        }
    }
}

impl<B: Backend> ReadGuard<'_, B> {
    /// As [`WriteGuard::finish`]: for what was done before the downgrade.
    pub fn finish(&mut self) {
        self.after.finish(self.space);
    }
}

impl<B: Backend> Drop for ReadGuard<'_, B> {
    fn drop(&mut self) {
        drop(self.inner.take());
        drop(self.held.take());
        self.after.run(self.space, self.wait);
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
    pub(super) inner: Option<rwsem::WriteGuard<'s, Inner, Observed>>,
    pub(super) held: Option<Held>,
    /// How long calls wait for the readers of single mappings.
    pub(super) wait: Wait<'s>,
    pub(super) after: After<B>,
    /// Set when too much retired memory is pending: nothing can be published then.
    pub(super) refused: Option<PublishError>,
    /// It's for one call, which may leave work for when the lock has been let go.
    pub(super) once: bool,
    /// There are notifiers.
    pub(super) notifies: bool,
}

impl<B: Backend> fmt::Debug for WriteGuard<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteGuard").finish_non_exhaustive()
    }
}

/// What waits until the lock is let go.
pub(super) struct After<B: Backend> {
    changed: bool,
    /// What calls have taken out.
    taken: SmallVec<[B::Taken; 1]>,
    /// A call found nothing to change: others may have done it, and not be through.
    settle: bool,
    /// Few spaces have any.
    work: Option<Box<Work>>,
}

impl<B: Backend> Default for After<B> {
    #[inline]
    fn default() -> Self {
        After {
            changed: false,
            taken: SmallVec::new(),
            settle: false,
            work: None,
        }
    }
}

#[derive(Default)]
struct Work {
    /// What notifiers were told of.
    started: Vec<Started>,
    /// What monitors are to be told.
    told: Vec<Announced>,
    hooks: Vec<HookEvent>,
    /// Ranges to be made present.
    populate: Vec<(u64, u64)>,
    /// What is still in the indexes of files, of each call's.
    unlink: SmallVec<[FileEdits; 1]>,
    /// Files that are let go of with no lock held.
    unlinked: SmallVec<[FileEdits; 1]>,
    /// Where probes have to look.
    probed: Vec<ProbedPart>,
}

impl<B: Backend> After<B> {
    /// Owners are told when the lock has been let go.
    pub(super) fn tell(&mut self, hooks: Vec<HookEvent>) {
        if !hooks.is_empty() {
            self.changed = true;
            self.work.get_or_insert_default().hooks.extend(hooks);
        }
    }

    /// Notifiers are told of the end when pages are gone.
    pub(super) fn end_later(&mut self, started: Started) {
        self.changed = true;
        self.work.get_or_insert_default().started.push(started);
    }

    /// Monitors hear of it, and read it, when the lock has been let go.
    pub(super) fn tell_monitors(&mut self, told: Vec<(Arc<Context>, MonitorEvent)>) {
        let announced = told.into_iter();
        self.deliver_later(announced.map(|(monitor, event)| monitor.announce(event)));
    }

    /// The same, of what has been announced.
    pub(super) fn deliver_later(&mut self, announced: impl IntoIterator<Item = Announced>) {
        self.changed = true;
        let work = self.work.get_or_insert_default();
        work.told.extend(announced);
    }

    /// Whether notifiers have been told of a range.
    pub(super) fn is_announced(&self, range: VmRange) -> bool {
        let mut started = self.work.iter().flat_map(|work| &work.started);
        started.any(|started| started.covers(range))
    }

    /// A range is to be made present when the lock has been let go.
    pub(super) fn populate(&mut self, start: u64, end: u64) {
        self.changed = true;
        let work = self.work.get_or_insert_default();
        work.populate.push((start, end));
    }

    /// Probes look there when the lock has been let go.
    pub(super) fn settle_probes(&mut self, probed: Vec<ProbedPart>) {
        if !probed.is_empty() {
            self.work.get_or_insert_default().probed.extend(probed);
        }
    }

    /// What a call has removed from files leaves their indexes when its pages are gone.
    fn unlink_later(&mut self, edits: FileEdits) {
        if edits.removes() {
            self.work.get_or_insert_default().unlink.push(edits);
        }
    }

    /// The pages of what was unmapped go, and nobody uses them any more.
    pub(super) fn finish(&mut self, space: &AddressSpace<B>) {
        for taken in self.taken.drain(..) {
            space.core.backend.finish(taken);
        }
        if mem::take(&mut self.settle) {
            space.core.backend.settle();
        }
        if let Some(work) = &mut self.work {
            work.unlink(space);
        }
    }

    /// Does it, with no lock held.
    #[inline]
    fn run(&mut self, space: &AddressSpace<B>, wait: Wait<'_>) {
        if !mem::take(&mut self.changed) {
            return;
        }
        self.finish(space);
        if let Some(work) = self.work.take() {
            work.run(space, wait);
        }
        space.core.tree.domain().collect();
    }
}

impl Work {
    fn unlink<B: Backend>(&mut self, space: &AddressSpace<B>) {
        for mut edits in self.unlink.drain(..) {
            edits.unlink(&space.core);
            self.unlinked.push(edits);
        }
    }

    fn run<B: Backend>(self, space: &AddressSpace<B>, wait: Wait<'_>) {
        // One owner's panic doesn't keep the others from hearing.
        let mut first = None;
        for started in self.started {
            match started.end() {
                Some(panic) if first.is_some() => discard(panic),
                panic => first = first.or(panic),
            }
        }
        space.settle_probes_at(&self.probed, &mut first);
        let mut tell = |event: &HookEvent| {
            let told = catch_unwind(AssertUnwindSafe(|| {
                if event.opened {
                    event.hooks.opened(event.range);
                } else {
                    event.hooks.closed(event.range);
                }
            }));
            if let Err(panic) = told {
                first.get_or_insert(panic);
            }
        };
        // Opened before closed, so that an owner who counts doesn't see none in between.
        self.hooks.iter().filter(|it| it.opened).for_each(&mut tell);
        self.hooks
            .iter()
            .filter(|it| !it.opened)
            .for_each(&mut tell);
        for announced in self.told {
            announced.deliver(wait);
        }
        for (start, end) in self.populate {
            // What can't be had is passed over.
            let _ = space.populate(start, end, true);
        }
        if let Some(panic) = first {
            rethrow(panic);
        }
    }
}

/// Drops what a panic carries, whose destructor may panic as well.
pub(crate) fn discard(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        mem::forget(again);
    }
}

/// Goes on with a panic that was held up, unless there is one under way already.
pub(crate) fn rethrow(panic: Box<dyn Any + Send>) {
    if thread::panicking() {
        discard(panic);
    } else {
        resume_unwind(panic);
    }
}

/// What calls on a guard have left to be done, with the lock let go of already: it's done when this is dropped.
pub(crate) struct Unfinished<'s, B: Backend> {
    space: &'s AddressSpace<B>,
    wait: Wait<'s>,
    after: After<B>,
}

impl<B: Backend> Drop for Unfinished<'_, B> {
    fn drop(&mut self) {
        self.after.run(self.space, self.wait);
    }
}

impl<'s, B: Backend> WriteGuard<'s, B> {
    /// How long what comes after the lock may wait.
    pub(crate) fn wait_as(&mut self, wait: Wait<'s>) {
        self.wait = wait;
    }

    /// Lets the lock go, and leaves for later what is done without it.
    pub(crate) fn release(mut self) -> Unfinished<'s, B> {
        drop(self.inner.take());
        drop(self.held.take());
        Unfinished {
            space: self.space,
            wait: self.wait,
            after: mem::take(&mut self.after),
        }
    }

    /// Heap or stack is elsewhere: for those who print the layout without the lock.
    pub(super) fn mark(&self) {
        self.space.landmarks.follow(Marks::of(self.inner()));
    }

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
        Changes::new(
            self.inner().totals,
            B::ACTIVE || self.notifies,
            self.space.core.attention.is_expected(),
        )
    }

    /// Starts planning; `changes` takes what is planned, for [`commit`](Self::commit).
    #[inline]
    pub(super) fn draft<'a>(
        &'a self,
        config: &'a SpaceConfig,
        changes: &'a mut Changes,
    ) -> Draft<'a> {
        let inner = self.inner();
        let view = self.space.core.tree.locked(&inner.writer);
        Draft::new(view, &inner.guarded, config, changes)
    }

    /// Prepares and publishes, once. On an error nothing has changed.
    pub(super) fn commit(&mut self, changes: &mut Changes) -> Result<(), PublishError> {
        if self.notifies {
            self.notify_changes(changes);
        }
        self.commit_changes(changes)?;
        if !changes.told.is_empty() {
            self.after.tell_monitors(mem::take(&mut changes.told));
        }
        Ok(())
    }

    fn commit_changes(&mut self, changes: &mut Changes) -> Result<(), PublishError> {
        if B::ACTIVE && !(changes.windows.is_empty() && changes.pages.is_empty()) {
            self.commit_with_pages(changes)
        } else {
            if B::ACTIVE {
                // What it asks for holds when it returns, whoever did it (C3).
                self.after.settle = true;
                self.after.changed = true;
            }
            if let Some(followed) = self.publish(changes)? {
                self.follow(*followed);
            }
            Ok(())
        }
    }

    /// The same for a backend that has something behind mappings.
    ///
    /// ```text
    /// gates of what pages are moved from: closed     faults in there wait for this call
    /// prepare                                         can fail: the gates are opened
    /// publish, with the gates of the new pieces closed
    /// commit of the backend                           old pages are out of the tables
    /// gates of the new pieces: opened
    /// ```
    ///
    /// Nobody uses the old pages any more when they are let go of: when the guard is dropped, with no lock held, but where
    /// something asks for it earlier.
    fn commit_with_pages(&mut self, changes: &mut Changes) -> Result<(), PublishError> {
        let space = self.space;
        let core = &space.core;
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        let mut mapped = SmallVec::<[_; 2]>::new();
        let mut windows = SmallVec::<[_; 2]>::new();
        for window in &changes.windows {
            let mut is_gated = false;
            for piece in &window.pieces {
                let affected = |change: &PageChange| touches(change, piece.start, piece.end);
                let gated = changes.pages.iter().any(affected);
                piece.vma.set_gated(gated);
                is_gated |= gated;
                mapped.push(piece.start..piece.end);
            }
            if is_gated {
                windows.push((window.start, window.end));
            }
        }
        let sources: SmallVec<[_; 2]> = changes.pages.iter().filter_map(source).collect();
        Gates::new(core.tree.locked(&self.inner().writer), &sources).close();
        let view = core.tree.locked(&self.inner().writer);
        let may_hold = |start, end| core.backend.may_hold(start, end);
        let holes = holes(view, &changes.windows, &changes.pages, may_hold);
        let prepared = core.backend.prepare(&changes.pages, &holes, &mapped);
        let published = prepared.and_then(|taken| match self.publish(changes) {
            Ok(followed) => Ok((taken, followed)),
            Err(error) => {
                if let Some(taken) = taken {
                    core.backend.finish(taken);
                }
                Err(error)
            }
        });
        let view = core.tree.locked(&self.inner().writer);
        let (mut taken, followed) = match published {
            Ok(published) => published,
            Err(error) => {
                drop(Gates::new(view, &sources));
                return Err(error);
            }
        };
        debug_assert!(
            iter::zip(&holes, self::holes(view, &[], &changes.pages, |_, _| true))
                .all(|(hole, now)| now.start <= hole.start && hole.end <= now.end),
            "as foreseen"
        );
        let gates = Gates::new(view, &windows);
        if let Some(taken) = &mut taken {
            fence_before_tables();
            core.backend.commit(&changes.pages, &holes, taken);
        }
        for change in &changes.pages {
            if let PageChange::Move { to, len, .. } = *change {
                core.recheck_files(view, to, to + len);
            }
        }
        drop(gates);
        self.after.changed = true;
        self.after.taken.extend(taken);
        if changes.gone.intersects(self.config().exclusive_unmap) {
            self.after.finish(space);
        }
        if let Some(followed) = followed {
            self.follow(*followed);
        }
        Ok(())
    }

    /// What it returns is to be told when the pages are gone.
    fn publish(&mut self, changes: &mut Changes) -> Result<Option<Box<Followed>>, PublishError> {
        let space: &'s AddressSpace<B> = self.space;
        if changes.windows.is_empty() {
            self.inner_mut().totals = changes.totals;
            return Ok(None);
        }
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        let wait = self.wait;
        let linked = match &mut changes.followed {
            Some(followed) => {
                let hold = self.config().publish_under_index_lock;
                Some(followed.files.link(&space.core, hold)?)
            }
            None => None,
        };
        let inner = self.inner_mut();
        let guard_edits = changes.guards.then(|| Inner::guard_edits(&changes.windows));
        let mut transaction = space.core.tree.write(&mut inner.writer);
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
        let replaced = prepared.commit_with(wait).map_err(PublishError::GaveUp)?;
        linked.into_iter().for_each(Linked::keep);
        drop(replaced);
        if let Some(edits) = guard_edits {
            inner.apply_guard_edits(edits);
        }
        inner.totals = changes.totals;
        inner.stats.add(changes.stats);
        inner.stats.publishes += 1;
        self.after.changed = true;
        Ok(changes.followed.take())
    }

    #[inline(never)]
    fn follow(&mut self, followed: Followed) {
        if self.space.core.probes.is_in_system() {
            self.after.settle_probes(followed.files.probed());
        }
        self.after.unlink_later(followed.files);
        for (file, delta) in followed.writable {
            file.count_writable(delta);
        }
        settle_huge(&followed.huge);
        self.after.tell(followed.hooks);
    }

    /// As [`AddressSpace::totals`].
    pub fn totals(&self) -> Totals {
        self.inner().totals
    }

    /// Waits until nobody uses the pages that the calls so far have taken away, and lets go of them. Otherwise that's done when the
    /// guard is dropped.
    pub fn finish(&mut self) {
        self.after.finish(self.space);
    }

    /// Keeps the layout as the calls have left it, and lets readers in; no writer comes in between. Who waited
    /// before goes first, so that a waiting writer keeps later readers out: see [`vma_rcu::rwsem`].
    ///
    /// Owners' hooks wait until the new guard is dropped.
    #[must_use]
    pub fn downgrade(mut self) -> ReadGuard<'s, B> {
        let (Some(inner), Some(held)) = (self.inner.take(), self.held.take()) else {
            unreachable!("only drop takes the lock guard out")
        };
        let mut guard = ReadGuard::new(self.space, inner.downgrade(), held);
        guard.after = mem::take(&mut self.after);
        guard.wait = self.wait;
        guard
    }
}

/// Whether a change is at work on pages between two addresses.
fn touches(change: &PageChange, start: u64, end: u64) -> bool {
    let overlaps = |from: u64, to: u64| from < end && to > start;
    match *change {
        PageChange::Move { from, to, len } => overlaps(from, from + len) || overlaps(to, to + len),
        PageChange::Zap { start, end } => overlaps(start, end),
        // These leave the mapping what it was, or take away what may be used until the call returns.
        PageChange::Discard { .. }
        | PageChange::Protect { .. }
        | PageChange::Guard { .. }
        | PageChange::Unguard { .. } => false,
    }
}

/// Where pages are moved from.
fn source(change: &PageChange) -> Option<(u64, u64)> {
    match *change {
        PageChange::Move { from, len, .. } => Some((from, from + len)),
        _ => None,
    }
}

/// What will be free around each range that is unmapped, itself included, when the windows are published. Not looked for where nothing is held.
fn holes(
    view: View<'_, Vma>,
    windows: &[Window],
    changes: &[PageChange],
    may_hold: impl Fn(u64, u64) -> bool,
) -> SmallVec<[Range<u64>; 2]> {
    let hole = |change: &PageChange| match *change {
        PageChange::Zap { start, end } if !may_hold(start, end) => Some(start..end),
        PageChange::Zap { start, end } => {
            Some(free_below(view, windows, start)..free_above(view, windows, end))
        }
        _ => None,
    };
    changes.iter().filter_map(hole).collect()
}

/// The end of the last mapping below an address that is going to be there, or the address.
fn free_below(view: View<'_, Vma>, windows: &[Window], addr: u64) -> u64 {
    let mut at = addr;
    let staying = loop {
        // What windows cover is replaced by their pieces.
        if let Some(window) = windows.iter().find(|window| reaches_below(window, at)) {
            at = window.start;
        }
        let (below, above) = view.neighbours(at);
        if above.is_some_and(|entry| entry.start < at) {
            break at;
        }
        match below {
            None => break 0,
            Some(entry)
                if windows
                    .iter()
                    .any(|window| reaches_below(window, entry.end)) =>
            {
                at = entry.end;
            }
            Some(entry) => break entry.end,
        }
    };
    let pieces = windows.iter().flat_map(|window| &window.pieces);
    let ends = pieces.filter(|piece| piece.start < addr);
    ends.map(|piece| piece.end.min(addr))
        .fold(staying, u64::max)
}

fn reaches_below(window: &Window, addr: u64) -> bool {
    window.start < addr && addr <= window.end
}

/// The start of the first mapping above an address that is going to be there, or the address.
fn free_above(view: View<'_, Vma>, windows: &[Window], addr: u64) -> u64 {
    let reaches_above = |at| move |window: &&Window| window.start <= at && at < window.end;
    let mut at = addr;
    let staying = loop {
        if let Some(window) = windows.iter().find(reaches_above(at)) {
            at = window.end;
        }
        match view.find_next(at) {
            None => break u64::MAX,
            Some(entry)
                if windows
                    .iter()
                    .any(|window| reaches_above(entry.start)(&window)) =>
            {
                at = entry.start;
            }
            Some(entry) => break entry.start.max(at),
        }
    };
    let pieces = windows.iter().flat_map(|window| &window.pieces);
    let starts = pieces.filter(|piece| piece.end > addr);
    starts
        .map(|piece| piece.start.max(addr))
        .fold(staying, u64::min)
}

impl<B: Backend> Drop for WriteGuard<'_, B> {
    fn drop(&mut self) {
        drop(self.inner.take());
        drop(self.held.take());
        self.after.run(self.space, self.wait);
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;
    use crate::backend::paged::{Accessor, Paged};
    use crate::{Advice, Domain, MapFlags, MapRequest, Prot};

    const PAGE: u64 = 4096;
    const RW: Prot = Prot::READ.union(Prot::WRITE);

    fn space() -> AddressSpace<Paged> {
        let config = SpaceConfig::default();
        AddressSpace::with_backend(config, &Domain::default(), Paged::default()).unwrap()
    }

    /// Makes a call, and what is left of it when it has let the lock go.
    fn begin(
        space: &AddressSpace<Paged>,
        call: impl FnOnce(&mut WriteGuard<'_, Paged>),
    ) -> After<Paged> {
        let mut guard = space.write();
        call(&mut guard);
        mem::take(&mut guard.after)
    }

    /// While one call has still to wait for accesses, another of the same page comes, and returns: the old page is out of use then.
    #[track_caller]
    fn overtakes(
        first: impl FnOnce(&mut WriteGuard<'_, Paged>, u64),
        second: impl FnOnce(&AddressSpace<Paged>, u64),
        check: impl FnOnce(&mut Accessor<'_>, u64),
    ) {
        let space = space();
        let addr = space.map(&MapRequest::anonymous(2 * PAGE, RW)).unwrap();
        let mut cpu = space.accessor();
        cpu.store_u8(addr, 1).unwrap();
        cpu.store_u8(addr + PAGE, 1).unwrap();
        let mut after = begin(&space, |guard| first(guard, addr));
        second(&space, addr);
        check(&mut cpu, addr);
        after.run(&space, Wait::forever());
    }

    fn discard(guard: &mut WriteGuard<'_, Paged>, addr: u64) {
        guard.advise(addr, PAGE, Advice::DONTNEED).unwrap();
    }

    fn map(space: &AddressSpace<Paged>, addr: u64) {
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
        let request = MapRequest {
            addr,
            flags,
            ..MapRequest::anonymous(PAGE, RW)
        };
        space.map(&request).unwrap();
    }

    #[test]
    fn an_unmap_after_another_returns_when_the_pages_are_out_of_use() {
        overtakes(
            |guard, addr| guard.unmap(addr, PAGE).unwrap(),
            |space, addr| space.unmap(addr, PAGE).unwrap(),
            |cpu, addr| assert!(cpu.load_u8(addr).is_err()),
        );
    }

    #[test]
    fn a_protect_after_another_returns_when_the_rights_are_out_of_use() {
        overtakes(
            |guard, addr| guard.protect(addr, PAGE, Prot::READ).unwrap(),
            |space, addr| space.protect(addr, PAGE, Prot::READ).unwrap(),
            |cpu, addr| assert!(cpu.store_u8(addr, 2).is_err()),
        );
    }

    #[test]
    fn an_unmap_after_a_discard_returns_when_the_page_is_out_of_use() {
        overtakes(
            discard,
            |space, addr| space.unmap(addr, PAGE).unwrap(),
            |cpu, addr| assert!(cpu.load_u8(addr).is_err()),
        );
    }

    #[test]
    fn a_map_after_a_discard_returns_when_the_page_is_out_of_use() {
        overtakes(discard, map, |cpu, addr| {
            assert_eq!(cpu.load_u8(addr), Ok(0));
        });
    }

    #[test]
    fn a_map_over_guard_pages_returns_when_what_was_there_is_out_of_use() {
        overtakes(
            |guard, addr| guard.advise(addr, PAGE, Advice::GUARD_INSTALL).unwrap(),
            map,
            |cpu, addr| assert_eq!(cpu.load_u8(addr), Ok(0)),
        );
    }
}
