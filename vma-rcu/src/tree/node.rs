//! Node layout.
//!
//! A node is 384 bytes, six cache lines, in this order of use by a search:
//!
//! ```text
//! leaf    ends 16 x u64 (two lines)   | 15 x (start, record), guard bits, length (four lines)
//! inner   pivots 16 x u64 (two lines) | children 15 x pointer, birth | gaps 16 x u64
//! ```
//!
//! The last lane of `ends` and `pivots` is always [`PAD`], and so are unused ones: a search over all 16
//! lanes needs no length. Start and record of an entry lie in one line, so that a lookup touches three of a
//! leaf. The pivot of a child is the end of its last entry, exactly (T3); the last
//! child has none.
//!
//! Everything in a leaf, and the pivots and the birth of an inner node, are written before the node is
//! published and never again. `children` of a live inner node change by single stores (T6). `gaps` are
//! the writer's own; readers don't touch their lines.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::ptr::{self, NonNull};

use super::lock::LockWord;
use super::search::first_above;
use super::{MAX_END, Record};
use crate::sync::Track;
use crate::sync::atomic::{AtomicPtr, Ordering};

/// Keys per search.
pub(super) const LANES: usize = if cfg!(any(test, loom, small_nodes)) {
    4
} else {
    16
};
/// Entries of a leaf, at most.
pub(super) const LEAF_CAP: usize = LANES - 1;
/// Children of an inner node, at most.
pub(super) const FANOUT: usize = LANES - 1;
/// Entries of a leaf that isn't the root, at least.
pub(super) const LEAF_MIN: usize = if LANES == 4 { 1 } else { 5 };
/// Children of an inner node, at least.
pub(super) const INNER_MIN: usize = if LANES == 4 { 2 } else { 5 };
/// Above every end: unused lanes, and the bound of the last child.
pub(super) const PAD: u64 = u64::MAX;
/// Levels of inner nodes: with at least [`INNER_MIN`] children each, memory ends first.
pub(super) const MAX_HEIGHT: usize = 24;

/// A node of either kind; the height says which.
pub(super) type NodePtr = *mut ();

#[repr(C, align(64))]
pub(super) struct Leaf<T> {
    pub(super) ends: [u64; LANES],
    pub(super) slots: [Slot<T>; LEAF_CAP],
    /// Bit i: record i keeps a start gap.
    pub(super) guarded: u32,
    /// Number of entries.
    pub(super) len: u32,
    /// Instead of padding, so that every byte stays set when the memory becomes an inner node.
    pub(super) rest: u64,
    pub(super) track: Track,
}

/// What a leaf holds of an entry beside its end.
#[repr(C)]
pub(super) struct Slot<T> {
    pub(super) start: u64,
    pub(super) record: *mut T,
}

impl<T> Slot<T> {
    pub(super) const UNUSED: Self = Slot {
        start: PAD,
        record: ptr::null_mut(),
    };
}

impl<T> Clone for Slot<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Slot<T> {}

#[repr(C, align(64))]
pub(super) struct Inner {
    pub(super) pivots: [u64; LANES],
    /// Store-release by the writer (`Prepared::commit`), load-acquire by readers: what the child holds was written
    /// before. Model:
    /// `a_lookup_sees_old_or_new_and_never_freed_memory`, which fails when the store is weakened.
    pub(super) children: [AtomicPtr<()>; FANOUT],
    /// The transaction that made this node (T6).
    pub(super) birth: u64,
    /// Largest usable gap below each child (T5); 0 for unused ones. Read with the writer in hand, written
    /// with the writer exclusively in hand (T7): see [`gaps`](Self::gaps).
    gaps: UnsafeCell<[u64; LANES]>,
    pub(super) track: Track,
}

/// Cache lines of a node: those of the slots of a leaf, of the children of an inner node.
pub(super) const SLOT_LINES: Range<usize> = 2..6;
pub(super) const CHILD_LINES: Range<usize> = 2..4;

#[cfg(not(any(test, loom, small_nodes)))]
const _: () = assert!(size_of::<Leaf<u64>>() == 384 && size_of::<Inner>() == 384);

/// Memory for a node of either kind.
#[repr(C)]
pub(super) union NodeMemory<T> {
    leaf: std::mem::ManuallyDrop<Leaf<T>>,
    inner: std::mem::ManuallyDrop<Inner>,
}

/// A record: what the pointers in leaves point to. Aligned so that its address has bits to spare.
#[repr(C, align(8))]
pub(super) struct RecordMemory<T> {
    pub(super) value: T,
    /// [`Record::start_gap`], asked once: it's a user's code, and mustn't run inside a commit.
    pub(super) start_gap: u64,
    pub(super) lock: LockWord,
}

impl<T> Leaf<T> {
    /// A leaf without entries.
    pub(super) fn empty() -> Self {
        Leaf {
            ends: [PAD; LANES],
            slots: [Slot::UNUSED; LEAF_CAP],
            guarded: 0,
            len: 0,
            rest: 0,
            track: Track::new(),
        }
    }

    /// Number of entries.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }
}

impl<T: Record> Leaf<T> {
    /// Bytes kept free below entry `i`.
    #[inline]
    pub(super) fn start_gap(&self, i: usize) -> u64 {
        if self.guarded >> i & 1 == 0 {
            return 0;
        }
        self.noted_gap(i)
    }

    /// The same, from the record.
    pub(super) fn noted_gap(&self, i: usize) -> u64 {
        let record = self.slots[i].record.cast::<RecordMemory<T>>();
        // SAFETY: T7. The record lives as long as a leaf that holds it can be reached.
        unsafe { &*record }.start_gap
    }

    /// Where the free space below entry `i` ends.
    #[inline]
    pub(super) fn gap_end(&self, i: usize) -> u64 {
        self.slots[i].start.saturating_sub(self.start_gap(i))
    }

    /// Largest usable gap below one of the first `len` entries; `lo` is the end of the entry before the first one.
    #[inline]
    pub(super) fn max_gap(&self, lo: u64, len: usize) -> u64 {
        let len = len.min(LEAF_CAP);
        let (mut max, mut previous) = (0, lo);
        if self.guarded != 0 {
            for i in 0..len {
                max = max.max(self.gap_end(i).saturating_sub(previous));
                previous = self.ends[i];
            }
            return max;
        }
        for (slot, end) in self.slots[..len].iter().zip(&self.ends[..len]) {
            max = max.max(slot.start.wrapping_sub(previous));
            previous = *end;
        }
        max
    }
}

impl Inner {
    /// A node without children.
    pub(super) fn empty(birth: u64) -> Self {
        Inner {
            pivots: [PAD; LANES],
            children: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            birth,
            gaps: UnsafeCell::new([0; LANES]),
            track: Track::new(),
        }
    }

    /// Number of children.
    #[inline]
    pub(super) fn len(&self) -> usize {
        first_above(&self.pivots, MAX_END) + 1
    }

    /// Child `i` as the writer sees it.
    #[inline]
    pub(super) fn child(&self, i: usize) -> NodePtr {
        self.children[i].load(Ordering::Relaxed)
    }

    /// The cached gaps.
    ///
    /// # Safety
    ///
    /// T7: the caller holds the writer, shared or exclusively, for as long as the reference lives, and
    /// stores no gap meanwhile.
    #[inline(always)]
    pub(super) unsafe fn gaps(&self) -> &[u64; LANES] {
        // SAFETY: by the caller's promise nobody writes.
        unsafe { &*self.gaps.get() }
    }

    /// Stores the gap of child `i`.
    ///
    /// # Safety
    ///
    /// T7: the caller holds the writer exclusively, or made the node and hasn't published it; no
    /// reference from [`gaps`](Self::gaps) is alive.
    #[inline(always)]
    pub(super) unsafe fn set_gap(&self, i: usize, gap: u64) {
        // SAFETY: by the caller's promise nobody reads or writes.
        unsafe { (*self.gaps.get())[i] = gap };
    }
}

/// Fills a fresh inner node, child by child.
pub(super) struct ChildWriter<'n> {
    node: &'n mut Inner,
    at: usize,
    gap: u64,
}

impl<'n> ChildWriter<'n> {
    /// For a node that nobody else has seen, and its birth.
    #[inline(always)]
    pub(super) fn new(node: &'n mut Inner, birth: u64) -> Self {
        node.birth = birth;
        let (at, gap) = (0, 0);
        ChildWriter { node, at, gap }
    }

    /// The next child: the end of its last entry, and its largest gap. At most [`FANOUT`].
    #[inline(always)]
    pub(super) fn child(&mut self, child: NodePtr, last: u64, gap: u64) {
        let i = self.at;
        self.node.pivots[i] = last;
        self.node.children[i].store(child, Ordering::Relaxed);
        self.node.gaps.get_mut()[i] = gap;
        self.gap = self.gap.max(gap);
        self.at += 1;
    }

    /// Some children of another node, as they are.
    #[inline(always)]
    pub(super) fn children(&mut self, from: &Inner, gaps: &[u64; LANES], range: Range<usize>) {
        let pivots = from.pivots[range.clone()].iter();
        let children = from.children[range.clone()].iter();
        for ((pivot, child), gap) in pivots.zip(children).zip(&gaps[range]) {
            self.child(child.load(Ordering::Relaxed), *pivot, *gap);
        }
    }

    /// That was the last child, which has no pivot; the node's own largest gap.
    #[inline(always)]
    pub(super) fn finish(self) -> u64 {
        let len = self.at;
        self.node.pivots[len - 1..].fill(PAD);
        for child in &self.node.children[len..] {
            child.store(ptr::null_mut(), Ordering::Relaxed);
        }
        self.node.gaps.get_mut()[len..].fill(0);
        self.gap
    }
}

/// The largest of `gaps`, if that of child `i` were `gap`.
#[inline(always)]
pub(super) fn max_gap_with(gaps: &[u64; LANES], i: usize, gap: u64) -> u64 {
    let mut gaps = *gaps;
    gaps[i] = gap;
    gaps.iter().fold(0, |max, gap| max.max(*gap))
}

/// The root pointer with the tree's height in its low bits. Null: an empty tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Root(pub(super) NodePtr);

impl Root {
    const MASK: usize = 63;
    pub(super) const EMPTY: Root = Root(ptr::null_mut());

    pub(super) fn new(node: NonNull<()>, height: usize) -> Self {
        debug_assert!(height <= MAX_HEIGHT);
        Root(node.as_ptr().map_addr(|address| address | height))
    }

    /// Levels of inner nodes above the leaves.
    #[inline]
    pub(super) fn height(self) -> usize {
        self.0.addr() & Self::MASK
    }

    #[inline]
    pub(super) fn node(self) -> NodePtr {
        self.0.map_addr(|address| address & !Self::MASK)
    }

    #[inline]
    pub(super) fn is_empty(self) -> bool {
        self.0.is_null()
    }
}

/// The inner node behind a pointer.
///
/// # Safety
///
/// T7: `node` is an inner node that can't be freed during `'a`: it is reachable and the caller holds a
/// guard or the writer, or it is the caller's own.
#[inline(always)]
pub(super) unsafe fn inner<'a>(node: NodePtr) -> &'a Inner {
    // SAFETY: by the caller's promise.
    let inner = unsafe { &*node.cast::<Inner>() };
    inner.track.read();
    inner
}

/// The leaf behind a pointer.
///
/// # Safety
///
/// As for [`inner`], and it is a leaf.
#[inline(always)]
pub(super) unsafe fn leaf<'a, T>(node: NodePtr) -> &'a Leaf<T> {
    // SAFETY: by the caller's promise.
    let leaf = unsafe { &*node.cast::<Leaf<T>>() };
    leaf.track.read();
    leaf
}
