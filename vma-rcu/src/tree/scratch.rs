//! What a transaction notes down while it is prepared. The writer keeps the lists for their room.

use std::ops::Range;
use std::ptr::NonNull;

use super::EditError;
use super::node::{Inner, LEAF_CAP, Leaf, MAX_HEIGHT, NodePtr, Slot, leaf};
use super::pool::record_word;
use crate::sync::atomic::AtomicPtr;

/// A node on its way into its parent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) node: NonNull<()>,
    /// End of its last entry. [`PAD`] for a rightmost inner node whose end wasn't looked up: such an
    /// item is the last of its list, where no pivot is needed.
    pub(super) last: u64,
    /// Largest usable gap below one of its entries.
    pub(super) gap: u64,
    /// Made by this transaction, with this many entries or children.
    pub(super) fresh: Option<usize>,
}

/// Entries of one leaf, side by side, that leave the tree. The leaf is taken out with them, and so can be read until
/// it's retired.
pub(super) struct Run<T> {
    leaf: NonNull<Leaf<T>>,
    from: usize,
    to: usize,
}

impl<T> Run<T> {
    pub(super) fn new(leaf: &Leaf<T>, range: Range<usize>) -> Self {
        Run {
            leaf: NonNull::from(leaf),
            from: range.start,
            to: range.end,
        }
    }

    /// Ends of the entries, starts and records.
    ///
    /// # Safety
    ///
    /// T7: the leaf can't be freed during `'a`: it isn't retired, or the writer is the caller's.
    #[inline(always)]
    pub(super) unsafe fn entries<'a>(&self) -> (&'a [u64], &'a [Slot<T>]) {
        // SAFETY: by the caller's promise.
        let leaf: &Leaf<T> = unsafe { leaf(self.leaf.as_ptr().cast()) };
        let to = self.to.min(LEAF_CAP);
        let from = self.from.min(to);
        (&leaf.ends[from..to], &leaf.slots[from..to])
    }
}

/// Everything that a prepared transaction will do; kept by the writer for its capacity.
pub(super) struct Scratch<T> {
    /// Nodes made.
    pub(super) made: Vec<(NonNull<()>, usize)>,
    /// Words of nodes to retire.
    pub(super) dead: Vec<*mut ()>,
    /// Records to retire.
    pub(super) removed: Vec<Run<T>>,
    /// Number of these.
    pub(super) leaving: usize,
    /// Gaps to store: node, child, value.
    pub(super) gaps: Vec<(NonNull<Inner>, usize, u64)>,
    /// Keys above which the next entry's gap changes without its leaf being rebuilt.
    pub(super) refresh: Vec<u64>,
    /// Where to publish: a child slot, or the root when `None`.
    pub(super) slot: Option<NonNull<AtomicPtr<()>>>,
    /// What to publish; `None`: nothing changes.
    pub(super) value: Option<NodePtr>,
    /// Entries that come in.
    pub(super) added: usize,
    /// The end of the last entry may be another one afterwards.
    pub(super) end_moves: bool,
    /// The new root is a node that the old one led to.
    pub(super) shared_root: bool,
    /// The way down to the leaf, for edits within one.
    pub(super) path: [(NonNull<Inner>, usize); MAX_HEIGHT],
    pub(super) items: Vec<Item>,
}

impl<T> Scratch<T> {
    pub(super) fn new() -> Self {
        Scratch {
            made: Vec::new(),
            dead: Vec::new(),
            removed: Vec::new(),
            leaving: 0,
            gaps: Vec::new(),
            refresh: Vec::new(),
            slot: None,
            value: None,
            added: 0,
            end_moves: false,
            shared_root: false,
            path: [(NonNull::dangling(), 0); MAX_HEIGHT],
            items: Vec::new(),
        }
    }

    /// Room in the lists that a large transaction fills.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.made.capacity().max(self.items.capacity())
    }

    /// The entries `range` of `leaf`, which goes, go with it.
    #[inline(always)]
    pub(super) fn remove(&mut self, leaf: &Leaf<T>, range: Range<usize>) -> Result<(), NoMemory> {
        self.leaving += range.len();
        push(&mut self.removed, Run::new(leaf, range))
    }

    /// Everything that the commit takes out, as words for the disposer.
    #[inline(always)]
    pub(super) fn each_retired(&self, mut give: impl FnMut(*mut ())) {
        for run in &self.removed {
            // SAFETY: T7: the leaf is among what is retired here.
            for slot in unsafe { run.entries() }.1 {
                give(record_word(slot.record));
            }
        }
        for word in &self.dead {
            give(*word);
        }
    }

    pub(super) fn clear(&mut self) {
        self.made.clear();
        self.dead.clear();
        self.removed.clear();
        self.leaving = 0;
        self.gaps.clear();
        self.refresh.clear();
        self.items.clear();
        self.slot = None;
        self.value = None;
        self.shared_root = false;
    }
}

/// Memory ran out: [`EditError::OutOfMemory`] without its size.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoMemory;

impl From<NoMemory> for EditError {
    fn from(_: NoMemory) -> Self {
        EditError::OutOfMemory
    }
}

/// Makes room without ending the process when memory runs out.
#[inline(always)]
pub(super) fn reserve<V>(list: &mut Vec<V>, count: usize) -> Result<(), NoMemory> {
    if list.capacity() - list.len() < count {
        list.try_reserve(count.max(16)).map_err(|_| NoMemory)?;
    }
    Ok(())
}

/// [`reserve`] and push.
#[inline(always)]
pub(super) fn push<V>(list: &mut Vec<V>, value: V) -> Result<(), NoMemory> {
    reserve(list, 1)?;
    list.push(value);
    Ok(())
}
