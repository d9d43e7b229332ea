//! Free-gap search, and the upkeep of the cached gaps.
//!
//! Every inner node holds, per child, the largest usable gap *below* an entry of that child: from the
//! end of the entry before it, in whatever leaf that is, to its start less its start gap (T5). The free
//! space above the last entry belongs to no one and is looked at apart. A search goes down to where the window
//! begins (for the lowest fit) or ends (for the highest), as long as the cached gaps leave hope. What it doesn't find there is
//! in the nearest child with a large enough gap beside that way, in which every step down is to such a child again: that
//! gap fits, or reaches out of the window at its other end, and then none does.

use std::ops::Range;

use super::node::{
    CHILD_LINES, Inner, Leaf, MAX_HEIGHT, Root, SLOT_LINES, inner, leaf, max_gap_with,
};
use super::search::{Portable, Search, first_above, prefetch};
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
    let below = if root.is_empty() {
        None
    } else {
        // SAFETY: T7, by the caller's promise.
        unsafe { search::<T, true>(root, need, request) }
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
    // SAFETY: T7, by the caller's promise.
    unsafe { search::<T, false>(root, need, request) }
}

/// The lowest fit below an entry, or the highest; compiled for each kind of search within nodes.
///
/// # Safety
///
/// T7: the caller holds the writer of `root`'s tree; it isn't empty.
unsafe fn search<T: Record, const LOWEST: bool>(
    root: Root,
    need: u64,
    request: &GapRequest,
) -> Option<u64> {
    #[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
    if super::search::available() {
        #[cfg_attr(not(target_feature = "avx2"), target_feature(enable = "avx2,popcnt"))]
        unsafe fn fast<T: Record, const LOWEST: bool>(
            root: Root,
            need: u64,
            request: &GapRequest,
        ) -> Option<u64> {
            // SAFETY: T7, by the caller's promise.
            unsafe { search_with::<super::search::Avx2, T, LOWEST>(root, need, request) }
        }
        // SAFETY: AVX2 is there; T7 by the caller's promise.
        return unsafe { fast::<T, LOWEST>(root, need, request) };
    }
    // SAFETY: T7, by the caller's promise.
    unsafe { search_with::<Portable, T, LOWEST>(root, need, request) }
}

/// The body of [`search`].
///
/// # Safety
///
/// T7: the caller holds the writer of `root`'s tree; it isn't empty. `S` suits the processor.
#[inline(always)]
unsafe fn search_with<S: Search, T: Record, const LOWEST: bool>(
    root: Root,
    need: u64,
    request: &GapRequest,
) -> Option<u64> {
    // The first entry that ends above it is the first, or the last, with a gap in the window.
    let cut = if LOWEST {
        request.window.start
    } else {
        request.window.end.saturating_sub(1)
    };
    let cut = cut.min(MAX_END);
    let (mut node, mut height, mut lo) = (root.node(), root.height(), 0);
    // The nearest child beside the way that has a fit: its parent, index, and what is below the parent.
    let mut beside = None;
    let here = loop {
        if height == 0 {
            prefetch(node, 0..SLOT_LINES.end);
            // SAFETY: T7, T2.
            let leaf: &Leaf<T> = unsafe { leaf(node) };
            let i = S::first_above(&leaf.ends, cut);
            let side = if LOWEST {
                u32::MAX << i
            } else {
                !(u32::MAX << i << 1)
            };
            break in_leaf::<T, LOWEST>(leaf, lo, side, need, request);
        }
        prefetch(node, 0..CHILD_LINES.end);
        // SAFETY: T7, T2.
        let inner = unsafe { inner(node) };
        // SAFETY: T7: the writer is the caller's.
        let fits = S::at_least(unsafe { inner.gaps() }, need);
        let i = S::first_above(&inner.pivots, cut);
        let side = if LOWEST {
            fits & u32::MAX << i << 1
        } else {
            fits & !(u32::MAX << i)
        };
        height -= 1;
        if side != 0 {
            beside = Some((inner, nearest::<LOWEST>(side), lo, height));
        }
        if fits >> i & 1 == 0 {
            break None;
        }
        lo = below(inner, i, lo);
        node = inner.child(i);
    };
    if here.is_some() {
        return here;
    }
    let (mut inner, mut i, mut lo, mut height) = beside?;
    loop {
        lo = below(inner, i, lo);
        node = inner.child(i);
        if height == 0 {
            break;
        }
        height -= 1;
        prefetch(node, 0..CHILD_LINES.end);
        // SAFETY: T7, T2.
        inner = unsafe { super::node::inner(node) };
        // SAFETY: T7: the writer is the caller's.
        let fits = S::at_least(unsafe { inner.gaps() }, need);
        if fits == 0 {
            return None;
        }
        i = nearest::<LOWEST>(fits);
    }
    prefetch(node, 0..SLOT_LINES.end);
    // SAFETY: T7, T2.
    let leaf: &Leaf<T> = unsafe { leaf(node) };
    in_leaf::<T, LOWEST>(leaf, lo, u32::MAX, need, request)
}

/// The fit below one of those entries of a leaf whose bit is set; `lo` is the end of the last entry before the leaf.
#[inline(always)]
fn in_leaf<T: Record, const LOWEST: bool>(
    leaf: &Leaf<T>,
    lo: u64,
    entries: u32,
    need: u64,
    request: &GapRequest,
) -> Option<u64> {
    let mut fits = entries & fits_in(leaf, lo, need);
    while fits != 0 {
        let i = nearest::<LOWEST>(fits);
        fits &= !(1 << i);
        let start = if i == 0 { lo } else { leaf.ends[i - 1] };
        let gap = start..leaf.gap_end(i);
        let found = if LOWEST {
            request.low(need, gap)
        } else {
            request.high(need, gap)
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

/// The entries of a leaf with a gap of at least `need` below them, but for start gaps. All are looked at, without a branch: which one
/// it will be can't be predicted.
#[inline(always)]
fn fits_in<T: Record>(leaf: &Leaf<T>, lo: u64, need: u64) -> u32 {
    let mut fits = 0;
    let mut start = lo;
    for (i, (slot, end)) in leaf.slots.iter().zip(&leaf.ends).enumerate() {
        fits |= u32::from(slot.start.wrapping_sub(start) >= need) << i;
        start = *end;
    }
    fits & !(u32::MAX << leaf.len())
}

/// The first of a set, or the last.
#[inline(always)]
fn nearest<const LOWEST: bool>(set: u32) -> usize {
    if LOWEST {
        set.trailing_zeros() as usize
    } else {
        set.ilog2() as usize
    }
}

/// End of the last entry before child `i`; `lo` is that before the node.
fn below(inner: &Inner, i: usize, lo: u64) -> u64 {
    if i == 0 { lo } else { inner.pivots[i - 1] }
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
