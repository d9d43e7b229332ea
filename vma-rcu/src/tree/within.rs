//! The frequent case: one edit that stays within one leaf.
//!
//! The leaf keeps its last end, neither overflows nor runs short, and its parent may be changed in
//! place. Then one new leaf is all that the edit takes. Anything else is left to [`Rebuild`], which could
//! do this case as well, at twice the cost.

use std::ptr::NonNull;

use super::node::{
    CHILD_LINES, LEAF_CAP, LEAF_MIN, Leaf, MAX_HEIGHT, NodePtr, PAD, Root, SLOT_LINES, Slot, inner,
    leaf, max_gap_with,
};
use super::pool::node_word;
use super::rebuild::Rebuild;
use super::scratch::{Removed, push};
use super::search::{Portable, Search, prefetch};
use super::write::{Edit, New};
use super::{EditError, Record};

/// Where the way down, which is in the scratch, has led.
struct Target<'t, T> {
    node: NodePtr,
    leaf: &'t Leaf<T>,
    /// What the leaf answers for: from the end of the last entry before it to the end of its own last.
    lo: u64,
    hi: u64,
    height: usize,
    /// The leaf's largest gap, as its parent has it.
    gap: u64,
}

impl<T: Record> Rebuild<'_, T> {
    /// Does the edit if it is of this kind; false if it isn't, with nothing done.
    #[inline]
    pub(super) fn within_leaf(&mut self, root: Root, edit: &Edit) -> Result<bool, EditError> {
        #[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
        if super::search::available() {
            #[cfg_attr(not(target_feature = "avx2"), target_feature(enable = "avx2,popcnt"))]
            fn fast<T: Record>(
                rebuild: &mut Rebuild<'_, T>,
                root: Root,
                edit: &Edit,
            ) -> Result<bool, EditError> {
                rebuild.within_leaf_by::<super::search::Avx2>(root, edit)
            }
            #[cfg_attr(
                target_feature = "avx2",
                expect(unused_unsafe, reason = "needed where the build doesn't promise AVX2")
            )]
            // SAFETY: AVX2 is there.
            return unsafe { fast(self, root, edit) };
        }
        self.within_leaf_by::<Portable>(root, edit)
    }

    #[inline(always)]
    fn within_leaf_by<S: Search>(&mut self, root: Root, edit: &Edit) -> Result<bool, EditError> {
        let Some(target) = self.path_to::<S>(root, edit) else {
            return Ok(false);
        };
        let old = target.leaf;
        let len = old.len();
        let from = S::first_above(&old.ends, edit.lo);
        let mut to = from;
        while to < len && old.slots[to].start < edit.hi {
            to += 1;
        }
        let new_len = len - (to - from) + edit.count;
        // A last end that moves is a pivot that moves. An edit with no effect is left to the other path.
        let keeps_end = to < len || target.hi == PAD;
        let changes = to > from || edit.count > 0;
        if !(LEAF_MIN..=LEAF_CAP).contains(&new_len) || !keeps_end || !changes {
            return Ok(false);
        }
        for i in from..to {
            self.remove(old, i, edit)?;
        }
        let mut node = self.new_leaf(new_len)?;
        // SAFETY: T7: made by us, not yet shown to anybody.
        let out = unsafe { node.as_mut() };
        let news = &self.news[edit.first..edit.first + edit.count];
        splice_leaf(out, old, from, to, news);
        let gap = spliced_gap(out, old, &target, from..to, edit.count, new_len);
        self.publish(&target, node.cast(), gap)?;
        Ok(true)
    }

    /// The leaf that the edit lies in, if there is one and its slot may be stored to.
    #[inline(always)]
    fn path_to<'t, S: Search>(&mut self, root: Root, edit: &Edit) -> Option<Target<'t, T>> {
        if root.is_empty() || root.height() == 0 {
            return None;
        }
        let (mut lo, mut hi, mut gap) = (0, PAD, 0);
        let mut birth = self.floor;
        let mut node = root.node();
        for step in &mut self.scratch.path[..root.height()] {
            prefetch(node, CHILD_LINES);
            // SAFETY: T7: the writer is ours; T2.
            let inner = unsafe { inner(node) };
            let i = S::first_above(&inner.pivots, edit.lo);
            let pivot = inner.pivots[i];
            if i > 0 {
                lo = inner.pivots[i - 1];
            }
            if pivot != PAD {
                hi = pivot;
            }
            // T6, and the edit must end where the leaf does.
            if inner.birth < birth || edit.hi > hi {
                return None;
            }
            birth = inner.birth;
            // SAFETY: T7: the writer is ours.
            gap = unsafe { inner.gaps() }[i];
            *step = (NonNull::from(inner), i);
            node = inner.child(i);
        }
        prefetch(node, SLOT_LINES);
        // SAFETY: T7, T2.
        let leaf = unsafe { leaf(node) };
        let height = root.height();
        Some(Target {
            node,
            leaf,
            lo,
            hi,
            height,
            gap,
        })
    }

    /// Entry `i` of `leaf` goes.
    #[inline(always)]
    pub(super) fn remove(
        &mut self,
        leaf: &Leaf<T>,
        i: usize,
        edit: &Edit,
    ) -> Result<(), EditError> {
        let Slot { start, record } = leaf.slots[i];
        let end = leaf.ends[i];
        if start < edit.lo || end > edit.hi {
            let window = edit.lo..edit.hi;
            return Err(EditError::Straddles { window, start, end });
        }
        push(&mut self.scratch.removed, Removed { start, end, record })?;
        Ok(())
    }

    /// The commit will put `node` in the leaf's place, and the gaps right on the way up.
    #[inline(always)]
    fn publish(
        &mut self,
        target: &Target<'_, T>,
        node: NonNull<()>,
        gap: u64,
    ) -> Result<(), EditError> {
        push(&mut self.scratch.dead, node_word(target.node, 0))?;
        self.scratch.value = Some(node.as_ptr());
        let mut child = (target.gap, gap);
        let mut slot = None;
        for level in (0..target.height.min(MAX_HEIGHT)).rev() {
            let (inner, i) = self.scratch.path[level];
            // SAFETY: T7: the writer is ours; T2: on the way down.
            let inner = unsafe { inner.as_ref() };
            slot = slot.or(Some(NonNull::from(&inner.children[i])));
            let (before, after) = child;
            if before == after {
                break;
            }
            push(&mut self.scratch.gaps, (NonNull::from(inner), i, after))?;
            // The root has no parent that would hold its own gap.
            let Some((parent, j)) = level.checked_sub(1).map(|up| self.scratch.path[up]) else {
                break;
            };
            // SAFETY: as above.
            let parent = unsafe { parent.as_ref() };
            // SAFETY: T7: the writer is ours.
            let own = unsafe { parent.gaps() }[j];
            // SAFETY: as above.
            let gaps = unsafe { inner.gaps() };
            let new = replaced_max(own, before, after, || max_gap_with(gaps, i, after));
            child = (own, new);
        }
        self.scratch.slot = slot;
        Ok(())
    }
}

/// Fills `out` with `old`, `news` taking the place of the entries `from..to`.
#[inline(always)]
fn splice_leaf<T>(out: &mut Leaf<T>, old: &Leaf<T>, from: usize, to: usize, news: &[New<T>]) {
    let rest = from + news.len();
    out.ends = old.ends;
    out.slots = old.slots;
    if rest != to {
        // One loop over both: copies of a few words aren't worth two calls.
        let tail = LEAF_CAP - rest.max(to);
        let (ends, slots) = (&old.ends[to..to + tail], &old.slots[to..to + tail]);
        let into = out.ends[rest..].iter_mut().zip(&mut out.slots[rest..]);
        for ((end, slot), from) in into.zip(ends.iter().zip(slots)) {
            (*end, *slot) = (*from.0, *from.1);
        }
        for i in rest + tail..LEAF_CAP {
            out.ends[i] = PAD;
            out.slots[i] = Slot::UNUSED;
        }
    }
    out.len = old.len + news.len() as u32 - (to - from) as u32;
    out.guarded = old.guarded & ((1 << from) - 1) | old.guarded >> to << rest;
    for (i, new) in news.iter().enumerate() {
        out.ends[from + i] = new.end;
        out.slots[from + i] = new.slot();
        out.guarded |= u32::from(new.guarded) << (from + i);
    }
}

/// Largest gap of `out`, which is `old` with `count` entries in place of `removed`. The gaps that
/// change are those of these entries, and of the one after them.
#[inline(always)]
fn spliced_gap<T: Record>(
    out: &Leaf<T>,
    old: &Leaf<T>,
    target: &Target<'_, T>,
    removed: std::ops::Range<usize>,
    count: usize,
    len: usize,
) -> u64 {
    let old_len = len + removed.len() - count;
    let before = old.max_gap_of(target.lo, removed.start..old_len.min(removed.end + 1));
    let after = out.max_gap_of(target.lo, removed.start..len.min(removed.start + count + 1));
    replaced_max(target.gap, before, after, || out.max_gap(target.lo, len))
}

/// The new maximum of gaps of which the largest is `max`, when some, the largest of them `before`, give
/// way to some, the largest of them `after`. `recount` is asked only when that doesn't tell.
#[inline(always)]
fn replaced_max(max: u64, before: u64, after: u64, recount: impl FnOnce() -> u64) -> u64 {
    if after >= max {
        after
    } else if before < max {
        max
    } else {
        recount()
    }
}
