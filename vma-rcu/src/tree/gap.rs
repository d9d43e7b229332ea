//! Free-gap search, and the upkeep of the cached gaps.
//!
//! Every inner node holds, per child, the largest usable gap *below* an entry of that child: from the
//! end of the entry before it, in whatever leaf that is, to its start less its start gap (T5). The free
//! space above the last entry belongs to no one and is looked at apart. A search descends only where the
//! cached gap is large enough, so that beside the two children that the window cuts, each descent finds.

use std::ops::Range;

use super::node::{
    CHILD_LINES, Inner, LEAF_CAP, Leaf, MAX_HEIGHT, NodePtr, PAD, Root, SLOT_LINES, inner, leaf,
    max_gap_with,
};
use super::search::{at_least, first_above, prefetch};
use super::{MAX_END, Record};
use smallvec::SmallVec;

/// What a free range must be like.
///
/// As in Linux (`vm_unmapped_area`), a gap counts when it holds `len + align - 1` bytes, whatever its
/// own alignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GapRequest {
    /// Bytes wanted; more than zero.
    pub len: u64,
    /// A power of two; 1 for any address.
    pub align: u64,
    /// The address is this much above a multiple of `align`.
    pub align_offset: u64,
    /// The range lies within.
    pub window: Range<u64>,
}

impl GapRequest {
    /// `len` bytes anywhere in `window`.
    pub fn new(len: u64, window: Range<u64>) -> Self {
        GapRequest {
            len,
            align: 1,
            align_offset: 0,
            window,
        }
    }

    /// Bytes that a gap must have; `None`: none has.
    fn need(&self) -> Option<u64> {
        if self.len == 0 || !self.align.is_power_of_two() {
            return None;
        }
        self.len.checked_add(self.align - 1)
    }

    /// The part of the gap within the window, if it is enough.
    fn fit(&self, need: u64, gap: Range<u64>) -> Option<Range<u64>> {
        let start = gap.start.max(self.window.start);
        let end = gap.end.min(self.window.end);
        (end.checked_sub(start)? >= need).then_some(start..end)
    }

    /// Lowest address in a gap.
    fn low(&self, need: u64, gap: Range<u64>) -> Option<u64> {
        let gap = self.fit(need, gap)?;
        let lift = self.align_offset.wrapping_sub(gap.start) & (self.align - 1);
        Some(gap.start + lift)
    }

    /// Highest address in a gap.
    fn high(&self, need: u64, gap: Range<u64>) -> Option<u64> {
        let gap = self.fit(need, gap)?;
        let highest = gap.end - self.len;
        Some(highest - (highest.wrapping_sub(self.align_offset) & (self.align - 1)))
    }
}

/// Lowest address that satisfies the request; `last_end` is the end of the last entry.
///
/// # Safety
///
/// T7: the caller holds the writer of `root`'s tree.
pub(super) unsafe fn lowest<T: Record>(
    root: Root,
    last_end: u64,
    request: &GapRequest,
) -> Option<u64> {
    let need = request.need()?;
    let descent = Descent { need, request };
    let below = if root.is_empty() {
        None
    } else {
        // SAFETY: T7, by the caller's promise.
        unsafe { descent.lowest::<T>(root.node(), root.height(), 0) }
    };
    below.or_else(|| request.low(need, last_end..MAX_END))
}

/// Highest address that satisfies the request.
///
/// # Safety
///
/// As for [`lowest`].
pub(super) unsafe fn highest<T: Record>(
    root: Root,
    last_end: u64,
    request: &GapRequest,
) -> Option<u64> {
    let need = request.need()?;
    let above = request.high(need, last_end..MAX_END);
    if above.is_some() || root.is_empty() {
        return above;
    }
    let descent = Descent { need, request };
    // SAFETY: T7, by the caller's promise.
    unsafe { descent.highest::<T>(root.node(), root.height(), 0, PAD) }
}

/// One search: below an inner node only children with a large enough gap are candidates.
#[derive(Clone, Copy)]
struct Descent<'r> {
    need: u64,
    request: &'r GapRequest,
}

impl Descent<'_> {
    /// `lo` is the end of the last entry before the node.
    ///
    /// # Safety
    ///
    /// T7: the caller holds the writer of the node's tree; T2: it's at this height.
    unsafe fn lowest<T: Record>(self, node: NodePtr, height: usize, lo: u64) -> Option<u64> {
        if height == 0 {
            prefetch(node, 0..SLOT_LINES.end);
            // SAFETY: T7, T2.
            let leaf: &Leaf<T> = unsafe { leaf(node) };
            return gaps(leaf, lo).find_map(|gap| self.request.low(self.need, gap));
        }
        prefetch(node, 0..CHILD_LINES.end);
        // SAFETY: T7, T2.
        let inner = unsafe { inner(node) };
        // SAFETY: T7: the writer is the caller's.
        let mut candidates = at_least(unsafe { inner.gaps() }, self.need);
        let window = &self.request.window;
        if window.start > lo {
            // The children before end at or below the window's start, and their gaps do, too.
            candidates &= u32::MAX << first_above(&inner.pivots, window.start.min(MAX_END));
        }
        while candidates != 0 {
            let i = candidates.trailing_zeros() as usize;
            candidates &= candidates - 1;
            let lo = below(inner, i, lo);
            if lo >= window.end {
                return None;
            }
            // SAFETY: T7, by the caller's promise.
            let found = unsafe { self.lowest::<T>(inner.child(i), height - 1, lo) };
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// As [`lowest`](Self::lowest); the node's last entry ends at or below `hi`.
    ///
    /// # Safety
    ///
    /// As for [`lowest`](Self::lowest).
    unsafe fn highest<T: Record>(
        self,
        node: NodePtr,
        height: usize,
        lo: u64,
        hi: u64,
    ) -> Option<u64> {
        if height == 0 {
            prefetch(node, 0..SLOT_LINES.end);
            // SAFETY: T7, T2.
            let leaf: &Leaf<T> = unsafe { leaf(node) };
            let high = |gap| self.request.high(self.need, gap);
            return gaps(leaf, lo).rev().find_map(high);
        }
        prefetch(node, 0..CHILD_LINES.end);
        // SAFETY: T7, T2.
        let inner = unsafe { inner(node) };
        // SAFETY: T7: the writer is the caller's.
        let mut candidates = at_least(unsafe { inner.gaps() }, self.need);
        let window = &self.request.window;
        if window.end < hi {
            // The first entry that ends above the window's last byte is the last with a gap within.
            let last = first_above(&inner.pivots, window.end.saturating_sub(1));
            candidates &= !(u32::MAX << last << 1);
        }
        while candidates != 0 {
            let i = candidates.ilog2() as usize;
            candidates &= !(1 << i);
            let hi = hi.min(inner.pivots[i]);
            if hi <= window.start {
                return None;
            }
            let lo = below(inner, i, lo);
            // SAFETY: T7, by the caller's promise.
            let found = unsafe { self.highest::<T>(inner.child(i), height - 1, lo, hi) };
            if found.is_some() {
                return found;
            }
        }
        None
    }
}

/// End of the last entry before child `i`; `lo` is that before the node.
fn below(inner: &Inner, i: usize, lo: u64) -> u64 {
    if i == 0 { lo } else { inner.pivots[i - 1] }
}

/// The usable gaps below the entries of a leaf, in ascending order.
fn gaps<T: Record>(leaf: &Leaf<T>, lo: u64) -> impl DoubleEndedIterator<Item = Range<u64>> {
    (0..leaf.len().min(LEAF_CAP)).map(move |i| {
        let start = if i == 0 { lo } else { leaf.ends[i - 1] };
        start..leaf.gap_end(i)
    })
}

/// Computes anew the gaps on the way to the first entry that ends above `key`.
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during the call, and the writer is the caller's.
pub(super) unsafe fn refresh<T: Record>(root: Root, key: u64) {
    if root.is_empty() {
        return;
    }
    let mut path = SmallVec::<[(&Inner, usize); MAX_HEIGHT]>::new();
    let mut node = root.node();
    let mut lo = 0;
    for _ in 0..root.height() {
        // SAFETY: T7, T2.
        let inner = unsafe { inner(node) };
        let i = first_above(&inner.pivots, key);
        lo = below(inner, i, lo);
        path.push((inner, i));
        node = inner.child(i);
    }
    // SAFETY: T7, T2.
    let leaf: &Leaf<T> = unsafe { leaf(node) };
    let mut gap = leaf.max_gap(lo, leaf.len());
    for (inner, i) in path.into_iter().rev() {
        // SAFETY: T7: the writer is the caller's.
        let gaps = unsafe { inner.gaps() };
        if gaps[i] == gap {
            return;
        }
        let max = max_gap_with(gaps, i, gap);
        // SAFETY: T7: exclusively the caller's.
        unsafe { inner.set_gap(i, gap) };
        gap = max;
    }
}
