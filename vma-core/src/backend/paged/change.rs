//! What calls do to pages.

use smallvec::SmallVec;

use super::State;
use super::entry::{Entry, Kind};
use super::frame::Frame;
use super::table::{ENTRIES, LEAF_BYTES, NoMemory, Tables, index};
use super::{FileUnmap, PAGE, PageChange};
use crate::error::PublishError;

/// Frames that a list without memory of its own holds.
const AT_LEAST: usize = 64;

/// Frames that have been taken out of tables. They are let go of when no access can use them any more.
struct Batch<'s> {
    state: &'s State,
    frames: SmallVec<[Frame; AT_LEAST]>,
    /// Something has changed since the last shootdown.
    pending: bool,
}

impl<'s> Batch<'s> {
    fn new(state: &'s State) -> Self {
        Batch {
            state,
            frames: SmallVec::new(),
            pending: false,
        }
    }

    /// Room for `count` more, or for as many as there can be: at least one. Not under a leaf's lock.
    fn room(&mut self, count: usize) -> usize {
        let left = |frames: &SmallVec<[Frame; AT_LEAST]>| frames.capacity() - frames.len();
        if left(&self.frames) < count && self.frames.try_reserve(count).is_err() {
            self.flush();
        }
        left(&self.frames).min(count)
    }

    /// Takes an entry's reference.
    fn take(&mut self, old: Entry) {
        // SAFETY: F2: the caller has just taken it out.
        let frame = unsafe { old.take() };
        self.frames.extend(frame);
        self.pending = true;
    }

    /// Waits for the accesses, then lets go.
    fn flush(&mut self) {
        if std::mem::take(&mut self.pending) {
            self.state.shootdown.invalidate();
        }
        self.frames.clear();
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Tables that a change will put entries into. They stay if it isn't made after all.
pub(super) fn prepare(state: &State, changes: &[PageChange]) -> Result<(), PublishError> {
    for change in changes {
        let made = match *change {
            PageChange::Guard { start, end } => make_leaves(&state.tables, start, end),
            PageChange::Move { from, to, len } => make_targets(&state.tables, from, to, len),
            _ => Ok(()),
        };
        made.map_err(|NoMemory| PublishError::NoMemory)?;
    }
    Ok(())
}

/// Makes the leaves of a range.
fn make_leaves(tables: &Tables, start: u64, end: u64) -> Result<(), NoMemory> {
    let mut at = start;
    while at < end {
        tables.make_leaf(at)?;
        at = (at / LEAF_BYTES + 1) * LEAF_BYTES;
    }
    Ok(())
}

/// Makes the leaves that the leaves of `from` are moved into.
fn make_targets(tables: &Tables, from: u64, to: u64, len: u64) -> Result<(), NoMemory> {
    let mut result = Ok(());
    tables.for_each(from, from + len, |_, at, range| {
        let target = at - from + to;
        let end = target + (range.len() * PAGE) as u64;
        if result.is_ok() {
            result = make_leaves(tables, target, end);
        }
    });
    result
}

/// See [`Backend::commit`](super::super::Backend::commit).
pub(super) fn commit(state: &State, changes: &[PageChange], hole: &dyn Fn(u64) -> (u64, u64)) {
    let mut batch = Batch::new(state);
    for change in changes {
        match *change {
            PageChange::Zap { start, end } => zap(&mut batch, start, end, |_| true),
            PageChange::Discard { start, end } => {
                zap(&mut batch, start, end, |entry| !entry.is_guard());
            }
            PageChange::Unguard { start, end } => zap(&mut batch, start, end, Entry::is_guard),
            PageChange::Guard { start, end } => guard(&mut batch, start, end),
            PageChange::Move { from, to, len } => move_pages(&mut batch, from, to, len),
            PageChange::Protect { .. } => batch.pending = true,
        }
    }
    batch.flush();
    drop(batch);
    for change in changes {
        if let PageChange::Zap { start, end }
        | PageChange::Move {
            from: start,
            len: end,
            ..
        } = *change
        {
            let end = match change {
                PageChange::Move { .. } => start + end,
                _ => end,
            };
            free_tables(state, start, end, hole);
        }
    }
}

/// Unlinks the tables that map nothing any more, around what was taken out.
fn free_tables(state: &State, start: u64, end: u64, hole: &dyn Fn(u64) -> (u64, u64)) {
    let mut at = start;
    while at < end {
        let (low, high) = hole(at);
        if low < high {
            state.tables.free(low, high);
        }
        at = high.max(at + PAGE as u64);
    }
}

/// Takes out the entries of a range that `which` says.
fn zap(batch: &mut Batch<'_>, start: u64, end: u64, which: impl Fn(Entry) -> bool) {
    let tables = &batch.state.tables;
    tables.for_each(start, end, |leaf, _, range| {
        let mut rest = range;
        while !rest.is_empty() {
            let room = batch.room(rest.len());
            let run = rest.start..(rest.start + room).min(rest.end);
            rest.start = run.end;
            let mut leaf = leaf.lock();
            if leaf.is_empty() {
                return;
            }
            for at in run {
                let entry = leaf.entry(at);
                if !entry.is_none() && which(entry) {
                    leaf.replace(at, Entry::NONE);
                    batch.take(entry);
                }
            }
        }
    });
}

/// Puts in guard pages.
fn guard(batch: &mut Batch<'_>, start: u64, end: u64) {
    let tables = &batch.state.tables;
    tables.for_each(start, end, |leaf, _, range| {
        let mut rest = range;
        while !rest.is_empty() {
            let room = batch.room(rest.len());
            let run = rest.start..(rest.start + room).min(rest.end);
            rest.start = run.end;
            let mut leaf = leaf.lock();
            for at in run {
                let old = leaf.replace(at, Entry::GUARD);
                batch.take(old);
            }
        }
    });
}

/// Moves entries; the tables that they go into are there.
fn move_pages(batch: &mut Batch<'_>, from: u64, to: u64, len: u64) {
    let tables = &batch.state.tables;
    tables.for_each(from, from + len, |source, at, range| {
        for (i, index_from) in range.enumerate() {
            let target = at - from + to + (i * PAGE) as u64;
            // Nobody else locks two leaves of a space: their order doesn't matter.
            let old = source.lock().replace(index_from, Entry::NONE);
            if old.is_none() {
                continue;
            }
            batch.pending = true;
            // The table is there, by `prepare`; were it not, the page would be lost, and not leaked.
            let leaf = tables.leaf(target);
            let there = leaf.map_or(old, |leaf| leaf.lock().replace(index(target), old));
            debug_assert!(there.is_none(), "nothing is where pages are moved to");
            batch.room(1);
            batch.take(there);
        }
    });
}

/// See [`Backend::unmap_file`](super::super::Backend::unmap_file).
pub(super) fn unmap_file(state: &State, unmap: &FileUnmap<'_>) {
    let mut batch = Batch::new(state);
    let copies = unmap.copies;
    zap(&mut batch, unmap.start, unmap.end, |entry| {
        entry.head().is_some() && (copies || entry.kind() != Kind::Anon)
    });
}

/// See [`Backend::unmap_removed`](super::super::Backend::unmap_removed).
pub(super) fn unmap_removed(state: &State, start: u64, end: u64) {
    zap(&mut Batch::new(state), start, end, Entry::is_removed);
}

/// Shares private pages with a child; stores to them go to copies from here on, in both.
pub(super) fn copy(
    parent: &State,
    child: &State,
    ranges: &[(u64, u64)],
) -> Result<(), PublishError> {
    // What can fail comes first, so that the parent stays as it is.
    let mut result = Ok(());
    for (start, end) in ranges {
        parent.tables.for_each(*start, *end, |_, at, _| {
            if result.is_ok() {
                result = child.tables.make_leaf(at).map(|_| ());
            }
        });
    }
    result.map_err(|NoMemory| PublishError::NoMemory)?;
    let mut batch = Batch::new(parent);
    for (start, end) in ranges {
        parent.tables.for_each(*start, *end, |leaf, at, range| {
            let Some(copy) = child.tables.leaf(at) else {
                return;
            };
            let (mut leaf, mut copy) = (leaf.lock(), copy.lock());
            for index in range {
                let entry = leaf.entry(index);
                let shown = match entry.kind() {
                    Kind::Anon => share_private(&mut leaf, index, entry),
                    _ if entry.is_guard() => entry,
                    // The child finds it by itself.
                    _ => continue,
                };
                batch.pending = true;
                copy.replace(index, shown);
            }
        });
    }
    Ok(())
}

/// One private page, for the child.
fn share_private(leaf: &mut super::table::LockedLeaf<'_>, index: usize, entry: Entry) -> Entry {
    // SAFETY: F2: in the table, under its lock.
    let Some(frame) = (unsafe { entry.share() }) else {
        return Entry::NONE;
    };
    if entry.is_owned() {
        leaf.replace(index, entry.without_owner());
    }
    Entry::of(frame, Kind::Anon, false)
}

const _: () = assert!(ENTRIES * PAGE == LEAF_BYTES as usize);
