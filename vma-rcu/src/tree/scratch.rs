//! What a transaction notes down while it is prepared. The writer keeps the lists for their room.

use std::ptr::NonNull;

use super::EditError;
use super::node::{Inner, MAX_HEIGHT, NodePtr};
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

/// An entry that leaves the tree.
pub(super) struct Removed<T> {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) record: *mut T,
}

/// Everything that a prepared transaction will do; kept by the writer for its capacity.
pub(super) struct Scratch<T> {
    /// Nodes made.
    pub(super) made: Vec<(NonNull<()>, usize)>,
    /// Words of nodes to retire.
    pub(super) dead: Vec<*mut ()>,
    /// Records to retire.
    pub(super) removed: Vec<Removed<T>>,
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
    /// End of the last entry afterwards, where it is known.
    pub(super) last_end: Option<u64>,
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
            gaps: Vec::new(),
            refresh: Vec::new(),
            slot: None,
            value: None,
            added: 0,
            last_end: None,
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

    pub(super) fn clear(&mut self) {
        self.made.clear();
        self.dead.clear();
        self.removed.clear();
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
