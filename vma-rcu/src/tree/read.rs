//! The read path: lookup, next, previous, ordered iteration.
//!
//! Each is one descent from a root that is loaded once; its steps are bounded by the height. Nothing is
//! locked, retried or written. The caller holds a guard or the writer, which keeps everything that is
//! reached alive (T7); what a node that was taken out leads to no longer changes (T6), so that a descent
//! which meets such a node sees the tree as it was when the node was taken out.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use smallvec::SmallVec;

use super::node::{
    CHILD_LINES, Inner, LEAF_CAP, Leaf, MAX_HEIGHT, PAD, Root, SLOT_LINES, inner, leaf,
};
use super::search::{Portable, Search, first_above, prefetch};
use super::{Entry, MAX_END, Record};
use crate::sync::atomic::Ordering;

/// Compiles a descent for each kind of search, and picks at run time where the build doesn't say.
macro_rules! dispatch {
    ($(#[$doc:meta])* $name:ident => $body:ident -> $out:ty) => {
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// T7: what is reachable from `root` can't be freed during `'a`.
        #[inline]
        pub(super) unsafe fn $name<'a, T: Record>(root: Root, key: u64) -> $out {
            // Apart, so that the way to the other needs no stack frame.
            #[inline(never)]
            unsafe fn portable<'a, T: Record>(root: Root, key: u64) -> $out {
                // SAFETY: T7, by the caller's promise.
                unsafe { $body::<Portable, T>(root, key) }
            }
            #[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
            if super::search::available() {
                #[cfg_attr(not(target_feature = "avx2"), target_feature(enable = "avx2,popcnt"))]
                #[cfg_attr(target_feature = "avx2", inline(always))]
                unsafe fn fast<'a, T: Record>(root: Root, key: u64) -> $out {
                    // SAFETY: T7, by the caller's promise.
                    unsafe { $body::<super::search::Avx2, T>(root, key) }
                }
                // SAFETY: AVX2 is there; T7 by the caller's promise.
                return unsafe { fast::<T>(root, key) };
            }
            // SAFETY: T7, by the caller's promise.
            unsafe { portable::<T>(root, key) }
        }
    };
}

dispatch! {
    /// The entry that contains `key`.
    find => find_with -> Option<Entry<'a, T>>
}
dispatch! {
    /// The first entry that ends above `key`.
    find_next => find_next_with -> Option<Entry<'a, T>>
}

dispatch! {
    /// The entry that contains `key`: its range and its record, as the pointer that it is.
    find_record => find_record_with -> Option<Place<'a, T>>
}

dispatch! {
    /// The last entry that ends at or below `key`, and the first that ends above it, in one descent.
    neighbours => neighbours_with -> Neighbours<'a, T>
}

/// Where an entry is, for who needs more of its record than the value.
pub(super) struct Place<'a, T> {
    pub(super) range: Range<u64>,
    pub(super) record: NonNull<T>,
    alive: PhantomData<&'a T>,
}

/// The entries before and after a key.
type Neighbours<'a, T> = (Option<Entry<'a, T>>, Option<Entry<'a, T>>);

/// The leaf whose interval contains `key`; `root` isn't empty and `key` is below [`PAD`].
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during `'a`. `S` suits the processor.
#[inline(always)]
unsafe fn descend<'a, S: Search, T>(root: Root, key: u64) -> &'a Leaf<T> {
    let mut node = root.node();
    for _ in 0..root.height() {
        prefetch(node, CHILD_LINES);
        // SAFETY: T7, by the caller's promise; T2: above the last level nodes are inner.
        let inner = unsafe { inner(node) };
        // The last lane is PAD, above any key: the index stays below LANES; T4 for the rest.
        let i = S::first_above(&inner.pivots, key);
        node = inner.children[i.min(LEAF_CAP - 1)].load(Ordering::Acquire);
    }
    prefetch(node, SLOT_LINES);
    // SAFETY: T7, and T2: leaves are at the root's height.
    unsafe { leaf(node) }
}

/// The body of [`find`].
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during `'a`. `S` suits the processor.
#[inline(always)]
unsafe fn find_with<'a, S: Search, T: Record>(root: Root, key: u64) -> Option<Entry<'a, T>> {
    // SAFETY: T7, by the caller's promise.
    let entry = unsafe { find_next_with::<S, T>(root, key) }?;
    (entry.start <= key).then_some(entry)
}

/// The body of [`find_next`].
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during `'a`. `S` suits the processor.
#[inline(always)]
unsafe fn find_next_with<'a, S: Search, T: Record>(root: Root, key: u64) -> Option<Entry<'a, T>> {
    // SAFETY: T7, by the caller's promise.
    let (leaf, i) = unsafe { place::<S, T>(root, key) }?;
    // SAFETY: T7; the index is that of an entry.
    Some(unsafe { entry(leaf, i) })
}

/// The body of [`find_record`].
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during `'a`. `S` suits the processor.
#[inline(always)]
unsafe fn find_record_with<'a, S: Search, T: Record>(root: Root, key: u64) -> Option<Place<'a, T>> {
    // SAFETY: T7, by the caller's promise.
    let (leaf, i): (&'a Leaf<T>, usize) = unsafe { place::<S, T>(root, key) }?;
    let slot = &leaf.slots[i];
    let record = NonNull::new(slot.record)?;
    (slot.start <= key).then_some(Place {
        range: slot.start..leaf.ends[i],
        record,
        alive: PhantomData,
    })
}

/// Where the first entry that ends above `key` is.
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during `'a`. `S` suits the processor.
#[inline(always)]
unsafe fn place<'a, S: Search, T: Record>(root: Root, key: u64) -> Option<(&'a Leaf<T>, usize)> {
    if root.is_empty() || key > MAX_END {
        return None;
    }
    // SAFETY: T7, by the caller's promise.
    let leaf = unsafe { descend::<S, T>(root, key) };
    let i = S::first_above(&leaf.ends, key);
    // T3: only in the last leaf is no end above the key.
    (i < LEAF_CAP && leaf.ends[i] != PAD).then_some((leaf, i))
}

/// Entry `i` of a leaf.
///
/// # Safety
///
/// T7: the leaf's records can't be freed during `'a`; `i` is below the leaf's length.
#[inline(always)]
pub(super) unsafe fn entry<'a, T: Record>(leaf: &Leaf<T>, i: usize) -> Entry<'a, T> {
    Entry {
        start: leaf.slots[i].start,
        end: leaf.ends[i],
        // SAFETY: T7, by the caller's promise.
        value: unsafe { &*leaf.slots[i].record },
    }
}

/// The last entry that ends at or below `key`.
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during `'a`.
pub(super) unsafe fn find_prev<'a, T: Record>(root: Root, key: u64) -> Option<Entry<'a, T>> {
    // SAFETY: T7, by the caller's promise.
    unsafe { neighbours(root, key) }.0
}

/// The body of [`neighbours`].
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during `'a`. `S` suits the processor.
#[inline(always)]
unsafe fn neighbours_with<'a, S: Search, T: Record>(root: Root, key: u64) -> Neighbours<'a, T> {
    if root.is_empty() {
        return (None, None);
    }
    let key = key.min(MAX_END);
    let mut node = root.node();
    // Where to go when the leaf has nothing below the key: the child left of the deepest turn.
    let mut left = None;
    for height in (0..root.height()).rev() {
        prefetch(node, CHILD_LINES);
        // SAFETY: T7, by the caller's promise; T2.
        let inner = unsafe { inner(node) };
        let i = S::first_above(&inner.pivots, key).min(LEAF_CAP - 1);
        if i > 0 {
            left = Some((inner, i - 1, height));
        }
        node = inner.children[i].load(Ordering::Acquire);
    }
    prefetch(node, SLOT_LINES);
    // SAFETY: T7, T2.
    let here = unsafe { leaf::<T>(node) };
    let i = S::first_above(&here.ends, key);
    // T3: only in the last leaf is no end above the key.
    let is_entry = i < LEAF_CAP && here.ends[i] != PAD;
    // SAFETY: T7; the index is that of an entry.
    let next = is_entry.then(|| unsafe { entry(here, i) });
    if i > 0 {
        // SAFETY: T7; entries below the first end above the key exist.
        return (Some(unsafe { entry(here, i - 1) }), next);
    }
    let Some((inner, i, height)) = left else {
        return (None, next);
    };
    // SAFETY: T7; T4: a leaf has an entry.
    (Some(unsafe { last_below(inner, i, height) }), next)
}

/// The last entry below child `i` of a node whose children are `height` levels above the leaves.
///
/// # Safety
///
/// T7: what is reachable from `inner` can't be freed during `'a`.
#[cold]
unsafe fn last_below<'a, T: Record>(top: &Inner, i: usize, height: usize) -> Entry<'a, T> {
    let mut node = top.children[i].load(Ordering::Acquire);
    for _ in 0..height {
        // SAFETY: T7, T2.
        let inner = unsafe { inner(node) };
        node = inner.children[inner.len() - 1].load(Ordering::Acquire);
    }
    // SAFETY: T7, T2.
    let last = unsafe { leaf::<T>(node) };
    // SAFETY: T7; T4: a leaf has an entry.
    unsafe { entry(last, last.len() - 1) }
}

/// End of the last entry; 0 for an empty tree.
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during the call.
pub(super) unsafe fn last_end<T: Record>(root: Root) -> u64 {
    // SAFETY: T7, by the caller's promise.
    unsafe { find_prev::<T>(root, MAX_END) }.map_or(0, |last| last.end)
}

/// Entries in ascending order: see [`RangeTree::iter`](super::RangeTree::iter).
pub struct Iter<'g, T> {
    /// The way down, with the next child to visit.
    path: SmallVec<[(&'g Inner, usize); MAX_HEIGHT]>,
    leaf: Option<&'g Leaf<T>>,
    next: usize,
}

impl<'g, T: Record> Iter<'g, T> {
    /// From the first entry that ends above `from`.
    ///
    /// # Safety
    ///
    /// T7: what is reachable from `root` can't be freed during `'g`.
    pub(super) unsafe fn new(root: Root, from: u64) -> Self {
        let mut iter = Iter {
            path: SmallVec::new(),
            leaf: None,
            next: 0,
        };
        if root.is_empty() || from > MAX_END {
            return iter;
        }
        let mut node = root.node();
        for _ in 0..root.height() {
            // SAFETY: T7, T2.
            let inner = unsafe { inner(node) };
            let i = first_above(&inner.pivots, from);
            iter.path.push((inner, i + 1));
            node = inner.children[i].load(Ordering::Acquire);
        }
        // SAFETY: T7, T2.
        let leaf = unsafe { leaf::<T>(node) };
        iter.next = first_above(&leaf.ends, from);
        iter.leaf = Some(leaf);
        iter
    }

    /// The next leaf in order.
    fn advance(&mut self) -> Option<&'g Leaf<T>> {
        let height = self.path.len();
        while let Some((inner, next)) = self.path.last_mut() {
            if *next >= inner.len() {
                self.path.pop();
                continue;
            }
            let mut node = inner.children[*next].load(Ordering::Acquire);
            *next += 1;
            while self.path.len() < height {
                // SAFETY: T7, by `new`'s caller; T2.
                let inner = unsafe { super::node::inner(node) };
                self.path.push((inner, 1));
                node = inner.children[0].load(Ordering::Acquire);
            }
            // SAFETY: T7, by `new`'s caller; T2.
            return Some(unsafe { leaf(node) });
        }
        None
    }
}

impl<'g, T: Record> Iterator for Iter<'g, T> {
    type Item = Entry<'g, T>;

    fn next(&mut self) -> Option<Entry<'g, T>> {
        let mut leaf = self.leaf?;
        while self.next >= LEAF_CAP || leaf.ends[self.next] == PAD {
            self.leaf = self.advance();
            self.next = 0;
            leaf = self.leaf?;
        }
        let i = self.next;
        self.next += 1;
        // SAFETY: T7, by `new`'s caller; the index is that of an entry.
        Some(unsafe { entry(leaf, i) })
    }
}

impl<T: Record> std::iter::FusedIterator for Iter<'_, T> {}

impl<T> std::fmt::Debug for Iter<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Iter").finish_non_exhaustive()
    }
}
