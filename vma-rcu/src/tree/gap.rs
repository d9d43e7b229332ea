//! Free-gap search, and the upkeep of the cached gaps.
//!
//! Every inner node holds, per child, the largest usable gap *below* an entry of that child: from the
//! end of the entry before it, in whatever leaf that is, to its start less its start gap (T5). The free
//! space above the last entry belongs to no one and is looked at apart. A search descends only where the
//! cached gap is large enough, so that beside the two children that the window cuts, each descent finds.

use std::ops::Range;

use super::node::{Inner, LEAF_CAP, Leaf, MAX_HEIGHT, NodePtr, PAD, Root, inner, leaf};
use super::search::first_above;
use super::{Record, read};
use crate::sync::atomic::Ordering;
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

/// Lowest address that satisfies the request.
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during the call.
pub(super) unsafe fn lowest<T: Record>(root: Root, request: &GapRequest) -> Option<u64> {
    let need = request.need()?;
    if !root.is_empty() {
        // SAFETY: T7, by the caller's promise.
        let found = unsafe { low_in::<T>(root.node(), root.height(), 0, need, request) };
        if found.is_some() {
            return found;
        }
    }
    // SAFETY: T7, by the caller's promise.
    let last = unsafe { read::last_end::<T>(root) };
    request.low(need, last..PAD)
}

/// Highest address that satisfies the request.
///
/// # Safety
///
/// As for [`lowest`].
pub(super) unsafe fn highest<T: Record>(root: Root, request: &GapRequest) -> Option<u64> {
    let need = request.need()?;
    // SAFETY: T7, by the caller's promise.
    let last = unsafe { read::last_end::<T>(root) };
    let above = request.high(need, last..PAD);
    if above.is_some() || root.is_empty() {
        return above;
    }
    // SAFETY: T7, by the caller's promise.
    unsafe { high_in::<T>(root.node(), root.height(), 0, need, request) }
}

unsafe fn low_in<T: Record>(
    node: NodePtr,
    height: usize,
    lo: u64,
    need: u64,
    request: &GapRequest,
) -> Option<u64> {
    if height == 0 {
        // SAFETY: T7, T2.
        let leaf: &Leaf<T> = unsafe { leaf(node) };
        return gaps(leaf, lo).find_map(|gap| request.low(need, gap));
    }
    // SAFETY: T7, T2.
    let inner = unsafe { inner(node) };
    let len = inner.len();
    let first = first_above(&inner.pivots, request.window.start.min(PAD - 1));
    for i in first.min(len - 1)..len {
        let lo = below(inner, i, lo);
        if lo >= request.window.end {
            return None;
        }
        if inner.gap(i) >= need {
            // SAFETY: T7, by the caller's promise.
            let found = unsafe { low_in::<T>(inner.child(i), height - 1, lo, need, request) };
            if found.is_some() {
                return found;
            }
        }
    }
    None
}

unsafe fn high_in<T: Record>(
    node: NodePtr,
    height: usize,
    lo: u64,
    need: u64,
    request: &GapRequest,
) -> Option<u64> {
    if height == 0 {
        // SAFETY: T7, T2.
        let leaf: &Leaf<T> = unsafe { leaf(node) };
        let fits = |gap| request.high(need, gap);
        return gaps(leaf, lo).filter_map(fits).last();
    }
    // SAFETY: T7, T2.
    let inner = unsafe { inner(node) };
    let last = inner.len() - 1;
    // The gap that holds the window's last byte may lie below an entry beyond the window.
    let top = request.window.end.saturating_sub(1).min(PAD - 1);
    let first = first_above(&inner.pivots, top).min(last);
    for i in (0..=first).rev() {
        let lo = below(inner, i, lo);
        if inner.gap(i) >= need {
            // SAFETY: T7, by the caller's promise.
            let found = unsafe { high_in::<T>(inner.child(i), height - 1, lo, need, request) };
            if found.is_some() {
                return found;
            }
        }
        if lo <= request.window.start {
            return None;
        }
    }
    None
}

/// End of the last entry before child `i`; `lo` is that before the node.
fn below(inner: &Inner, i: usize, lo: u64) -> u64 {
    if i == 0 { lo } else { inner.pivots[i - 1] }
}

/// The usable gaps below the entries of a leaf, in ascending order.
fn gaps<T: Record>(leaf: &Leaf<T>, lo: u64) -> impl Iterator<Item = Range<u64>> {
    (0..LEAF_CAP)
        .take_while(|i| leaf.ends[*i] != PAD)
        .map(move |i| {
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
        if inner.gap(i) == gap {
            return;
        }
        inner.gaps[i].store(gap, Ordering::Relaxed);
        gap = inner.max_gap_with(i, gap);
    }
}
