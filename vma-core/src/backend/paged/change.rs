//! What calls do to pages.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use vma_rcu::sync::atomic::{AtomicUsize, Ordering};
use vma_rcu::sync::{Mutex, planted};

use super::entry::{Entry, Kind};
use super::frame::Frame;
use super::huge;
use super::pending::{Announced, Pending};
use super::table::{Detached, Hole, LEAF_BYTES, NoMemory, Plan, Relocation, index};
use super::{FileUnmap, Inherited, PAGE, PageChange, Paged, State};
use crate::error::PublishError;

impl From<NoMemory> for PublishError {
    fn from(NoMemory: NoMemory) -> Self {
        PublishError::NoMemory
    }
}

/// What a call has taken out of the tables and not let go of yet.
///
/// One, behind a pointer: it's handed on several times.
pub struct Taken(Vec<Out>);

#[derive(Default)]
struct Out {
    detached: Detached,
    /// In order.
    relocations: SmallVec<[Relocation; 1]>,
    /// In `State::owed`.
    ticket: Option<u64>,
    /// Translations may be in use that no longer hold.
    pending: bool,
    /// Dropped last, when the frames are free.
    announced: Option<Announced>,
}

impl Taken {
    fn try_new() -> Result<Self, NoMemory> {
        let mut one = Vec::new();
        one.try_reserve_exact(1).map_err(|_| NoMemory)?;
        one.push(Out::default());
        Ok(Taken(one))
    }

    fn get_mut(&mut self) -> &mut Out {
        match self.0.first_mut() {
            Some(out) => out,
            None => unreachable!("there is one"),
        }
    }

    pub(super) fn announce(&mut self, pending: &Arc<Pending>) {
        self.get_mut().announced = Some(pending.announce());
    }
}

impl fmt::Debug for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taken")
            .field("pending", &self.0.iter().any(|out| out.pending))
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
    fn enter(&self, new: impl Iterator<Item = Range<u64>> + Clone) -> Result<u64, NoMemory> {
        let mut ranges = self.ranges.lock();
        let ticket = ranges.next;
        let count = new.clone().count();
        ranges.list.try_reserve(count).map_err(|_| NoMemory)?;
        ranges.next += 1;
        ranges.list.extend(new.map(|range| (ticket, range)));
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
        PageChange::Move { from, len, .. } => Some(from..from + len),
        PageChange::Zap { start, end }
        | PageChange::Discard { start, end }
        | PageChange::Guard { start, end }
        | PageChange::Protect { start, end } => Some(start..end),
        // Guard pages have no translations.
        PageChange::Unguard { .. } => None,
    }
}

/// Does what can fail of changes: tables that entries are put into, tables that aren't shared, room for what is taken out.
/// Tables stay if the change isn't made after all. `None`: nothing is to be done about them.
pub(super) fn prepare(
    state: &State,
    changes: &[PageChange],
    holes: &[Range<u64>],
    mapped: &[Range<u64>],
) -> Result<Option<Taken>, NoMemory> {
    let mut pending = false;
    if state.owed.is_any() && !planted("no_look_at_owed") {
        let mut ranges = changes.iter().map(range_of).chain(mapped.iter().cloned());
        pending = ranges.any(|range| state.owed.overlaps(&range));
    }
    if changes.is_empty() && !pending {
        return Ok(None);
    }
    let mut holes = holes.iter();
    let tables = &state.tables;
    let mut one = Taken::try_new()?;
    let taken = one.get_mut();
    taken.pending = pending;
    for change in changes {
        match *change {
            PageChange::Zap { start, end } => {
                let hole = clipped(changes, start..end, holes.next());
                tables.prepare_detach(hole, &mut taken.detached)?;
            }
            PageChange::Discard { start, end } | PageChange::Unguard { start, end } => {
                tables.own_range(start, end)?;
            }
            PageChange::Guard { start, end } => {
                leaves(start, end).try_for_each(|at| tables.own_leaf(at).map(|_| ()))?;
            }
            PageChange::Move { from, to, len } => {
                let (end, zapped) = (to + len, changes.iter().filter_map(zapped));
                let is_zapped = { zapped }.any(|zap| zap.start < end && to < zap.end);
                let mut relocation = Relocation::new(from, to, len);
                tables.prepare_relocation(&mut relocation, is_zapped, &mut taken.detached)?;
                taken.relocations.try_reserve(1).map_err(|_| NoMemory)?;
                taken.relocations.push(relocation);
            }
            PageChange::Protect { .. } => {}
        }
    }
    if changes.iter().any(|change| outdated(change).is_some()) {
        taken.ticket = Some(state.owed.enter(changes.iter().filter_map(outdated))?);
    }
    Ok(Some(one))
}

/// Whether frames may go with it. What a move finds in its way maps nothing.
pub(super) fn takes_frames(change: &PageChange) -> bool {
    match change {
        PageChange::Zap { .. } | PageChange::Discard { .. } | PageChange::Guard { .. } => true,
        PageChange::Move { .. } | PageChange::Protect { .. } | PageChange::Unguard { .. } => false,
    }
}

fn zapped(change: &PageChange) -> Option<Range<u64>> {
    match *change {
        PageChange::Zap { start, end } => Some(start..end),
        _ => None,
    }
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

/// See [`Backend::commit`](super::super::Backend::commit).
pub(super) fn commit(
    state: &State,
    changes: &[PageChange],
    holes: &[Range<u64>],
    taken: &mut Taken,
) {
    let mut holes = holes.iter();
    let taken = taken.get_mut();
    let mut relocations = taken.relocations.iter_mut();
    for change in changes {
        match *change {
            PageChange::Zap { start, end } => {
                let hole = clipped(changes, start..end, holes.next());
                let mut make_room = |detached: &mut Detached| let_go(state, detached);
                state
                    .tables
                    .detach(hole, &mut taken.detached, &mut make_room);
            }
            PageChange::Discard { start, end } => {
                take(state, start, end, &mut taken.detached, |_, entry| {
                    !entry.is_guard()
                });
            }
            PageChange::Unguard { start, end } => {
                take(state, start, end, &mut taken.detached, |_, entry| {
                    entry.is_guard()
                });
            }
            PageChange::Guard { start, end } => {
                let detached = &mut taken.detached;
                exchange(state, start, end, Entry::GUARD, detached, |_, _| true);
            }
            PageChange::Move { .. } => {
                let Some(relocation) = relocations.next() else {
                    continue;
                };
                let tables = &state.tables;
                taken.pending |= tables.relocate(relocation, &mut taken.detached);
            }
            PageChange::Protect { .. } => taken.pending = true,
        }
    }
    taken.pending |= !taken.detached.is_empty();
}

/// What is free around a range, less what pages are moved from or to by the same call.
fn clipped(changes: &[PageChange], range: Range<u64>, hole: Option<&Range<u64>>) -> Hole {
    let Range {
        start: mut low,
        end: mut high,
    } = hole.unwrap_or(&range).clone();
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
    Hole {
        low,
        start: range.start,
        end: range.end,
        high,
    }
}

/// See [`Backend::finish`](super::super::Backend::finish).
pub(super) fn finish(state: &State, mut taken: Taken) {
    let taken = taken.get_mut();
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

/// Takes out the entries of a range that `which` says, by address.
fn take(
    state: &State,
    start: u64,
    end: u64,
    detached: &mut Detached,
    which: impl Fn(u64, Entry) -> bool,
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
    which: impl Fn(u64, Entry) -> bool,
) {
    state.tables.for_each(start, end, |seen, at, mut range| {
        // What calls change was made the space's own. Files have nothing in tables that are shared, nor had in those that the space
        // has left since: what is there is another's. Model: `a_file_takes_nothing_from_a_table_that_was_left`.
        if seen.is_shared {
            return;
        }
        let is_ours = || state.tables.owns(at, seen.leaf) || planted("no_look_at_owner");
        let first = range.start;
        let which = |index: usize, entry| which(at + ((index - first) * PAGE) as u64, entry);
        loop {
            detached.make_room(range.len());
            detached.exchange(seen.leaf, &mut range, new, is_ours, which);
            if range.is_empty() {
                return;
            }
            let_go(state, detached);
        }
    });
}

/// See [`Backend::unmap_file`](super::super::Backend::unmap_file).
pub(super) fn unmap_file(state: &State, unmap: &FileUnmap<'_>) {
    let copies = unmap.copies;
    take_now(state, unmap.start, unmap.end, |at, entry| {
        let is_shown = entry.head().is_some() && (copies || !entry.is_private());
        is_shown && (unmap.is_shown)(at)
    });
}

/// See [`Backend::unmap_huge`](super::super::Backend::unmap_huge).
pub(super) fn unmap_huge(state: &State, start: u64, end: u64, part: &Frame) -> bool {
    take_now(state, start, end, |_, entry| huge::shows(entry, part))
}

/// See [`Backend::unmap_removed`](super::super::Backend::unmap_removed).
pub(super) fn unmap_removed(state: &State, start: u64, end: u64) {
    if !planted("no_look_back") {
        take_now(state, start, end, |_, entry| entry.is_removed());
    }
}

/// See [`Backend::protect_file`](super::super::Backend::protect_file).
pub(super) fn protect_file(state: &State, unmap: &FileUnmap<'_>) -> usize {
    protect(state, unmap.start, unmap.end, |at, entry| {
        entry.is_owned() && !entry.is_private() && (unmap.is_shown)(at)
    })
}

/// See [`Backend::protected`](super::super::Backend::protected).
pub(super) fn protected(state: &State, entries: usize) {
    if entries == 0 {
        settle(state);
    } else if !planted("no_shootdown_of_clean") {
        state.shootdown.invalidate();
    }
}

/// See [`Backend::settle`](super::super::Backend::settle).
pub(super) fn settle(state: &State) {
    if state.owed.is_any() {
        state.shootdown.invalidate();
    }
}

/// See [`Backend::protect_clean`](super::super::Backend::protect_clean).
pub(super) fn protect_clean(state: &State, start: u64, end: u64) {
    protect(state, start, end, |_, entry| entry.is_owned_and_clean());
}

/// See [`Backend::monitor_protect`](super::super::Backend::monitor_protect).
pub(super) fn monitor_protect(
    state: &State,
    start: u64,
    end: u64,
    on: bool,
) -> Result<(), NoMemory> {
    state.tables.own_range(start, end)?;
    let mut changed = false;
    state.tables.for_each(start, end, |seen, _, range| {
        let mut leaf = seen.leaf.lock();
        for index in range {
            let entry = leaf.entry(index);
            let new = if on {
                entry.protected()
            } else {
                entry.unprotected()
            };
            if new != entry {
                leaf.replace(index, new);
                changed = true;
            }
        }
    });
    if on && changed {
        state.shootdown.invalidate();
    }
    Ok(())
}

/// Takes stores away from the entries that `which` says, by address and under their leaf's lock. How many there were.
fn protect(state: &State, start: u64, end: u64, which: impl Fn(u64, Entry) -> bool) -> usize {
    let mut count = 0;
    state.tables.for_each(start, end, |seen, at, range| {
        // As in `exchange`.
        if seen.is_shared {
            return;
        }
        let mut leaf = seen.leaf.lock();
        if leaf.is_empty() || !state.tables.owns(at, seen.leaf) {
            return;
        }
        let first = range.start;
        for index in range {
            let entry = leaf.entry(index);
            if !entry.is_none() && which(at + ((index - first) * PAGE) as u64, entry) {
                leaf.replace(index, entry.without_owner());
                count += 1;
            }
        }
    });
    count
}

/// Takes out the entries that `which` says, and lets go of them; whether there were any.
fn take_now(state: &State, start: u64, end: u64, which: impl Fn(u64, Entry) -> bool) -> bool {
    let mut detached = Detached::default();
    let found = Cell::new(false);
    take(state, start, end, &mut detached, |at, entry| {
        let takes = which(at, entry);
        found.set(found.get() || takes);
        takes
    });
    if !detached.is_empty() {
        let_go(state, &mut detached);
    }
    found.get()
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
    plan.pinned()
        .iter()
        .fold(result, |so_far, at| copy_pinned(parent, to, *at, so_far))
}

/// A pinned page stays the parent's, the child gets a copy (C17), unless it won't live.
fn copy_pinned(
    parent: &Paged,
    child: &State,
    at: u64,
    so_far: Result<(), NoMemory>,
) -> Result<(), NoMemory> {
    let Some(from) = parent.state().tables.leaf(at) else {
        return so_far;
    };
    let (entry, page) = {
        let leaf = from.leaf.lock();
        let entry = leaf.entry(index(at));
        if entry.is_huge() {
            drop(leaf);
            return huge::copy_pinned(from.leaf, child, at, so_far);
        }
        // SAFETY: F2: in the table, under its lock. A file may take it out later.
        (entry, unsafe { entry.share() })
    };
    let Some(page) = page else {
        return so_far;
    };
    let allocate = || parent.frames.allocate();
    let new = so_far
        .ok()
        .and_then(|()| parent.pending.until_some(allocate));
    let copy = new.map(|mut new| {
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

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;
    use crate::{
        AccessMode, AddressSpace, Domain, FileKind, FileObject, MapFlags, MapRequest, OpenFile,
        Prot, SpaceConfig,
    };

    /// Hazard 2: what was mapped since the mapping was looked up isn't the file's.
    #[test]
    fn truncation_leaves_what_was_mapped_since_in_place_of_the_file() {
        const AT: u64 = 0x4000_0000;
        let config = SpaceConfig::default();
        let space =
            AddressSpace::with_backend(config, &Domain::default(), Paged::default()).unwrap();
        let object = FileObject::builder(FileKind::Shmem, "f")
            .len(2 * LEAF_BYTES)
            .build();
        let file = OpenFile::new(object, AccessMode::ReadWrite);
        let map = |addr, len, file: Option<Arc<OpenFile>>| {
            let kind = match file {
                Some(_) => MapFlags::empty(),
                None => MapFlags::ANONYMOUS,
            };
            let request = MapRequest {
                addr,
                flags: MapFlags::PRIVATE | MapFlags::FIXED | kind,
                file,
                ..MapRequest::anonymous(len, Prot::READ | Prot::WRITE)
            };
            space.map(&request).unwrap();
        };
        map(AT, 2 * LEAF_BYTES, Some(file.clone()));
        let mut cpu = space.accessor();
        cpu.store_u8(AT, 1).unwrap();
        cpu.store_u8(AT + LEAF_BYTES, 1).unwrap();
        std::thread::scope(|scope| {
            let reader = space.register();
            let guard = reader.pin();
            let first = space.backend().state().tables.leaf(AT).unwrap();
            let locked = first.leaf.lock();
            let truncation = scope.spawn(|| file.truncate(0).unwrap());
            std::thread::sleep(std::time::Duration::from_millis(100));
            // It has found the mapping by now, and waits for the first table.
            map(AT + LEAF_BYTES, LEAF_BYTES, None);
            cpu.store_u8(AT + LEAF_BYTES, 7).unwrap();
            drop((locked, guard));
            truncation.join().unwrap();
        });
        assert_eq!(cpu.load_u8(AT + LEAF_BYTES), Ok(7));
        assert!(cpu.load_u8(AT).is_err());
    }
}
