//! What a transaction notes down while it is prepared. The writer keeps the lists for their room.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use super::EditError;
use super::node::{Inner, Leaf, MAX_HEIGHT, NodePtr, Slot, leaf};
use super::pool::{node_word, record_word};
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

/// A node that leaves the tree, and which of its entries leave with it.
pub(super) struct Dead<T> {
    /// As the disposer wants it ([`node_word`]).
    word: *mut (),
    /// Bit i: entry i. None of an inner node.
    gone: u32,
    marker: PhantomData<*mut T>,
}

impl<T> Dead<T> {
    /// A leaf that goes with the entries that `gone` has a bit of, or an inner node.
    #[inline(always)]
    pub(super) fn new(node: NodePtr, height: usize, gone: u32) -> Self {
        Dead {
            word: node_word(node, height),
            gone,
            marker: PhantomData,
        }
    }

    /// The entries that leave: end, start and record.
    ///
    /// # Safety
    ///
    /// T7: the node can't be freed during `'a`: it is in the tree or has been taken out of it, but isn't retired, or
    /// only since the writer is the caller's.
    #[inline(always)]
    pub(super) unsafe fn entries<'a>(&self) -> impl Iterator<Item = (u64, &'a Slot<T>)>
    where
        T: 'a,
    {
        let node = self.word;
        Bits(self.gone).map(move |i| {
            // SAFETY: by the caller's promise; only leaves have bits, and their words have no mark.
            let leaf: &Leaf<T> = unsafe { leaf(node) };
            (leaf.ends[i], &leaf.slots[i])
        })
    }
}

/// Where a word has its bits, ascending.
struct Bits(u32);

impl Iterator for Bits {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let bit = self.0.trailing_zeros() as usize;
        self.0 &= self.0.checked_sub(1)?;
        Some(bit)
    }
}

/// The bits of the entries `range` of a leaf.
#[inline(always)]
pub(super) fn bits(range: Range<usize>) -> u32 {
    (1 << range.end) - (1 << range.start)
}

/// Everything that a prepared transaction will do; kept by the writer for its capacity.
pub(super) struct Scratch<T> {
    /// Nodes made.
    pub(super) made: Vec<(NonNull<()>, usize)>,
    /// What to retire.
    pub(super) dead: Vec<Dead<T>>,
    /// Entries among it.
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

    /// Everything that the commit takes out, as words for the disposer.
    #[inline(always)]
    pub(super) fn each_retired(&self, mut give: impl FnMut(*mut ())) {
        for dead in &self.dead {
            // SAFETY: T7: the leaf is retired here, after its entries.
            for (_, slot) in unsafe { dead.entries() } {
                give(record_word(slot.record));
            }
            give(dead.word);
        }
    }

    pub(super) fn clear(&mut self) {
        self.made.clear();
        self.dead.clear();
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
