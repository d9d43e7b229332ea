//! What calls do to pages.

use std::fmt;
use std::ops::Range;

use smallvec::SmallVec;
use vma_rcu::sync::atomic::{AtomicUsize, Ordering};
use vma_rcu::sync::{Mutex, planted};

use super::entry::{Entry, Kind};
use super::table::{Detached, Hole, LEAF_BYTES, NoMemory, Plan, Spares, Tables, index};
use super::{FileUnmap, Inherited, PAGE, PageChange, Paged, State};
use crate::error::PublishError;

impl From<NoMemory> for PublishError {
    fn from(NoMemory: NoMemory) -> Self {
        PublishError::NoMemory
    }
}

/// What a call has taken out of the tables and not let go of yet.
#[derive(Default)]
pub struct Taken {
    detached: Detached,
    /// For moves to where something is taken out first, tables included.
    spares: Spares,
    /// In `State::owed`.
    ticket: Option<u64>,
    /// Translations may be in use that no longer hold.
    pending: bool,
}

impl fmt::Debug for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taken")
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

/// Ranges whose old translations are in use, because calls that have published still have to wait for the accesses. Who puts
/// something else there, or takes pages from a file that may be among them, waits for the accesses as well.
#[derive(Default)]
pub(super) struct Owed {
    /// Entries of `ranges`. Added to before the publish, so that who finds the mapping gone finds this; taken from, with release,
    /// after the shootdown. Loads acquire. Model: `a_new_mapping_waits_for_accesses_that_an_earlier_call_owes`.
    count: AtomicUsize,
    ranges: Mutex<Ranges>,
}

#[derive(Default)]
struct Ranges {
    next: u64,
    list: SmallVec<[(u64, Range<u64>); 2]>,
}

impl Owed {
    pub(super) fn is_any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    fn overlaps(&self, range: &Range<u64>) -> bool {
        let ranges = self.ranges.lock();
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        ranges.list.iter().any(|(_, other)| overlaps(other))
    }

    /// One ticket for some ranges.
    fn enter(&self, new: impl Iterator<Item = Range<u64>>) -> Result<u64, NoMemory> {
        let mut ranges = self.ranges.lock();
        let ticket = ranges.next;
        ranges.next += 1;
        for range in new {
            ranges.list.try_reserve(1).map_err(|_| NoMemory)?;
            ranges.list.push((ticket, range));
        }
        self.count.store(ranges.list.len(), Ordering::Release);
        Ok(ticket)
    }

    fn leave(&self, ticket: u64) {
        let mut ranges = self.ranges.lock();
        ranges.list.retain(|(other, _)| *other != ticket);
        self.count.store(ranges.list.len(), Ordering::Release);
    }
}

/// Whose old pages may be in use until the call returns.
fn outdated(change: &PageChange) -> Option<Range<u64>> {
    match *change {
        PageChange::Zap { start, end } => Some(start..end),
        PageChange::Move { from, len, .. } => Some(from..from + len),
        _ => None,
    }
}

/// Does what can fail of changes: tables that entries are put into, tables that aren't shared, room for what is taken out.
/// Tables stay if the change isn't made after all.
pub(super) fn prepare(
    state: &State,
    changes: &[PageChange],
    mapped: &[Range<u64>],
) -> Result<Taken, NoMemory> {
    let tables = &state.tables;
    let mut taken = Taken::default();
    if state.owed.is_any() && !planted("no_look_at_owed") {
        let mut ranges = changes.iter().map(range_of).chain(mapped.iter().cloned());
        taken.pending = ranges.any(|range| state.owed.overlaps(&range));
    }
    for change in changes {
        match *change {
            PageChange::Zap { start, end } => {
                tables.prepare_detach(start, end, &mut taken.detached)?;
            }
            PageChange::Discard { start, end } | PageChange::Unguard { start, end } => {
                tables.own_range(start, end)?;
            }
            PageChange::Guard { start, end } => {
                leaves(start, end).try_for_each(|at| tables.own_leaf(at).map(|_| ()))?;
            }
            PageChange::Move { from, to, len } => {
                tables.own_range(from, from + len)?;
                let target = to..to + len;
                let is_zapped = changes.iter().any(|change| {
                    matches!(change, PageChange::Zap { start, end } if *start < target.end && target.start < *end)
                });
                for_targets(tables, from, to, len, |at| {
                    if is_zapped {
                        tables.make_spares(at, &mut taken.spares)
                    } else {
                        tables.own_leaf(at).map(|_| ())
                    }
                })?;
            }
            PageChange::Protect { .. } => {}
        }
    }
    if changes.iter().any(|change| outdated(change).is_some()) {
        taken.ticket = Some(state.owed.enter(changes.iter().filter_map(outdated))?);
    }
    Ok(taken)
}

/// Where a change is at work.
fn range_of(change: &PageChange) -> Range<u64> {
    match *change {
        PageChange::Zap { start, end }
        | PageChange::Discard { start, end }
        | PageChange::Protect { start, end }
        | PageChange::Guard { start, end }
        | PageChange::Unguard { start, end } => start..end,
        PageChange::Move { to, len, .. } => to..to + len,
    }
}

/// The leaves of a range, by an address in each.
fn leaves(start: u64, end: u64) -> impl Iterator<Item = u64> {
    let next = move |at: &u64| Some((at / LEAF_BYTES + 1) * LEAF_BYTES).filter(|at| *at < end);
    std::iter::successors(Some(start).filter(|at| *at < end), next)
}

/// Does `f` to the leaves that the leaves of `from` are moved into.
fn for_targets(
    tables: &Tables,
    from: u64,
    to: u64,
    len: u64,
    mut f: impl FnMut(u64) -> Result<(), NoMemory>,
) -> Result<(), NoMemory> {
    let mut result = Ok(());
    tables.for_each(from, from + len, |_, at, range| {
        let target = at - from + to;
        let end = target + (range.len() * PAGE) as u64;
        if result.is_ok() {
            result = leaves(target, end).try_for_each(&mut f);
        }
    });
    result
}

/// See [`Backend::commit`](super::super::Backend::commit).
pub(super) fn commit(
    state: &State,
    changes: &[PageChange],
    taken: &mut Taken,
    hole: &dyn Fn(u64, u64) -> (u64, u64),
) {
    for change in changes {
        match *change {
            PageChange::Zap { start, end } => {
                let (low, high) = clipped(changes, start..end, hole(start, end));
                let hole = Hole {
                    low,
                    start,
                    end,
                    high,
                };
                let mut make_room = |detached: &mut Detached| let_go(state, detached);
                state
                    .tables
                    .detach(hole, &mut taken.detached, &mut make_room);
            }
            PageChange::Discard { start, end } => {
                take(state, start, end, &mut taken.detached, |entry| {
                    !entry.is_guard()
                });
            }
            PageChange::Unguard { start, end } => {
                take(state, start, end, &mut taken.detached, Entry::is_guard);
            }
            PageChange::Guard { start, end } => {
                exchange(state, start, end, Entry::GUARD, &mut taken.detached, |_| {
                    true
                });
            }
            PageChange::Move { from, to, len } => {
                taken.pending |= move_pages(&state.tables, from, to, len, &mut taken.spares);
            }
            PageChange::Protect { .. } => taken.pending = true,
        }
    }
    taken.pending |= !taken.detached.is_empty();
}

/// What is free around a range, less what pages are moved from or to by the same call.
fn clipped(changes: &[PageChange], range: Range<u64>, hole: (u64, u64)) -> (u64, u64) {
    let (mut low, mut high) = hole;
    for change in changes {
        let PageChange::Move { from, to, len } = *change else {
            continue;
        };
        for start in [from, to] {
            let end = start + len;
            if start < range.start {
                low = low.max(end.min(range.start));
            }
            if end > range.end {
                high = high.min(start.max(range.end));
            }
        }
    }
    (low, high)
}

/// See [`Backend::finish`](super::super::Backend::finish).
pub(super) fn finish(state: &State, mut taken: Taken) {
    if taken.pending {
        let_go(state, &mut taken.detached);
    }
    if let Some(ticket) = taken.ticket {
        state.owed.leave(ticket);
    }
}

/// Waits for the accesses that may still use what was taken out, and lets go of it.
fn let_go(state: &State, detached: &mut Detached) {
    if !planted("no_shootdown_of_zap") {
        state.shootdown.invalidate();
    }
    state.tables.let_go(detached);
}

/// Takes out the entries of a range that `which` says.
fn take(
    state: &State,
    start: u64,
    end: u64,
    detached: &mut Detached,
    which: impl Fn(Entry) -> bool,
) {
    exchange(state, start, end, Entry::NONE, detached, which);
}

/// The same, with something else in their place. Where it takes more than there is memory to note, it lets go of a part.
fn exchange(
    state: &State,
    start: u64,
    end: u64,
    new: Entry,
    detached: &mut Detached,
    which: impl Fn(Entry) -> bool,
) {
    state.tables.for_each(start, end, |seen, at, mut range| {
        // What calls change was made the space's own. Files have nothing in tables that are shared, nor had in those that the space
        // has left since: what is there is another's. Model: `a_file_takes_nothing_from_a_table_that_was_left`.
        if seen.is_shared {
            return;
        }
        let is_ours = || state.tables.owns(at, seen.leaf) || planted("no_look_at_owner");
        loop {
            // Without memory there is room for a few.
            let _ = detached.reserve_entries(range.len());
            detached.exchange(seen.leaf, &mut range, new, is_ours, &which);
            if range.is_empty() {
                return;
            }
            let_go(state, detached);
        }
    });
}

/// Moves entries; the tables that they go into are there. Whether there were any.
fn move_pages(tables: &Tables, from: u64, to: u64, len: u64, spares: &mut Spares) -> bool {
    let mut moved = false;
    tables.for_each(from, from + len, |source, at, range| {
        for (i, index_from) in range.enumerate() {
            let target = at - from + to + (i * PAGE) as u64;
            // Nobody else locks two leaves of a space: their order doesn't matter.
            let old = source.leaf.lock().replace(index_from, Entry::NONE);
            if old.is_none() {
                continue;
            }
            moved = true;
            // There are tables, or spare ones, by `prepare`; were there none, the page would be lost, and not leaked.
            let target_leaf = tables.own_leaf_with(target, spares);
            let there = target_leaf.map_or(old, |leaf| leaf.lock().replace(index(target), old));
            debug_assert!(there.is_none(), "nothing is where pages are moved to");
            // SAFETY: F2: just taken out.
            drop(unsafe { there.take() });
        }
    });
    moved
}

/// See [`Backend::unmap_file`](super::super::Backend::unmap_file).
pub(super) fn unmap_file(state: &State, unmap: &FileUnmap<'_>) {
    let mut detached = Detached::default();
    let copies = unmap.copies;
    take(state, unmap.start, unmap.end, &mut detached, |entry| {
        entry.head().is_some() && (copies || entry.kind() != Kind::Anon)
    });
    if !detached.is_empty() {
        let_go(state, &mut detached);
    }
}

/// See [`Backend::unmap_removed`](super::super::Backend::unmap_removed).
pub(super) fn unmap_removed(state: &State, start: u64, end: u64) {
    let mut detached = Detached::default();
    take(state, start, end, &mut detached, Entry::is_removed);
    if !detached.is_empty() {
        let_go(state, &mut detached);
    }
}

/// See [`Backend::dup_pages`](super::super::Backend::dup_pages).
pub(super) fn dup(parent: &Paged, child: &Paged, ranges: &[Inherited]) -> Result<(), NoMemory> {
    let (from, to) = (parent.state(), child.state());
    // Faults under way have put in their pages; others wait.
    let _closed = (!planted("no_fault_lock")).then(|| from.faults.write());
    let mut plan = Plan::new(ranges, from.pins.is_any());
    let result = from.tables.share(&to.tables, &mut plan);
    // Even when it failed: what was marked as shared isn't stored to any more.
    if !planted("no_shootdown_of_dup") {
        from.shootdown.invalidate();
    }
    let copied = plan.pinned().iter().map(|at| copy_pinned(parent, to, *at));
    let copied = copied.fold(Ok(()), Result::and);
    result.and(copied)
}

/// A pinned page stays the parent's, the child gets a copy (C17).
fn copy_pinned(parent: &Paged, child: &State, at: u64) -> Result<(), NoMemory> {
    let Some(from) = parent.state().tables.leaf(at) else {
        return Ok(());
    };
    let entry = from.leaf.lock().entry(index(at));
    // SAFETY: F2: nobody takes private pages out while the parent is copied, but its files, of what no pin keeps.
    let Some(page) = (unsafe { entry.share() }) else {
        return Ok(());
    };
    let copy = parent.frames.allocate().map(|mut new| {
        page.bytes().copy_to(&mut new);
        Entry::of(new.filled(), Kind::Anon, true)
    });
    let mut leaf = from.leaf.lock();
    if leaf.entry(index(at)) == entry {
        leaf.replace(index(at), entry.owned());
    }
    drop(leaf);
    let copy = copy.ok_or(NoMemory)?;
    let gone = child.tables.own_leaf(at)?.lock().replace(index(at), copy);
    // SAFETY: F2: just taken out of tables that nobody uses yet.
    drop(unsafe { gone.take() });
    Ok(())
}
