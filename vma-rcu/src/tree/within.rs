//! The frequent cases: one edit that stays within one leaf.
//!
//! * The leaf keeps its last end and neither overflows nor runs short, and its parent may be changed in
//!   place: one new leaf is all that the edit takes.
//! * The last end moves, the leaf overflows, or the parent mustn't be changed in place, and the parent has room for
//!   what comes of it: the new leaves and a new parent.
//!
//! Anything else is left to [`Rebuild`], which could do these cases as well, at two to three times the cost.

use std::ptr::NonNull;

use super::node::{
    CHILD_LINES, ChildWriter, FANOUT, LEAF_CAP, LEAF_MIN, Leaf, MAX_HEIGHT, NodePtr, PAD, Root,
    SLOT_LINES, Slot, inner, leaf, max_gap_with,
};
use super::pool::node_word;
use super::rebuild::{Part, Rebuild};
use super::scratch::{Removed, push};
use super::search::{Portable, Search, prefetch};
use super::write::{Edit, New};
use super::{EditError, Record};

/// Where the way down, which is in the scratch, has led.
struct Target<'t, T> {
    node: NodePtr,
    leaf: &'t Leaf<T>,
    parent: NodePtr,
    /// What the leaf answers for: from the end of the last entry before it to the end of its own last.
    lo: u64,
    hi: u64,
    height: usize,
    /// The leaf's largest gap, as its parent has it.
    gap: u64,
    /// The leaf's parent may be changed in place (T6).
    exclusive: bool,
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
        let news = &self.news[edit.first..edit.first + edit.count];
        let keeps_end =
            to < len || target.hi == PAD || news.last().is_some_and(|new| new.end == target.hi);
        let changes = to > from || edit.count > 0;
        // An edit with no effect is left to the other path.
        if new_len < LEAF_MIN || !changes {
            return Ok(false);
        }
        let in_place = target.exclusive && keeps_end && new_len <= LEAF_CAP;
        if !in_place && !self.parent_takes(&target, new_len, keeps_end) {
            return Ok(false);
        }
        for i in from..to {
            self.remove(old, i, edit)?;
        }
        push(&mut self.scratch.dead, node_word(target.node, 0))?;
        if new_len > LEAF_CAP {
            let parts = [
                Part::Old(old, 0, from),
                Part::New(edit.first, edit.first + edit.count),
                Part::Old(old, to, len),
            ];
            self.write_leaves(&parts, new_len, target.lo)?;
            self.with_parent(&target)?;
            return Ok(true);
        }
        let mut node = self.new_leaf(new_len)?;
        // SAFETY: T7: made by us, not yet shown to anybody.
        let out = unsafe { node.as_mut() };
        splice_leaf(out, old, from, to, news);
        let gap = spliced_gap(out, old, &target, from..to, edit.count, new_len);
        if in_place {
            self.publish(target.height, target.height, node.cast(), (target.gap, gap))?;
        } else {
            self.present(node, new_len, out.ends[new_len - 1], gap)?;
            self.with_parent(&target)?;
        }
        Ok(true)
    }

    /// Whether the leaf's parent can hold what `new_len` entries take, and the pivot that moves, if one does.
    fn parent_takes(&self, target: &Target<'_, T>, new_len: usize, keeps_end: bool) -> bool {
        let (parent, i) = self.scratch.path[target.height - 1];
        // SAFETY: T7: the writer is ours; T2: on the way down.
        let parent = unsafe { parent.as_ref() };
        parent.len() - 1 + new_len.div_ceil(LEAF_CAP) <= FANOUT
            && (keeps_end || parent.pivots[i] != PAD)
    }

    /// Puts the leaves that take the old one's place, which are on the item stack, into a new parent.
    #[inline(never)]
    fn with_parent(&mut self, target: &Target<'_, T>) -> Result<(), EditError> {
        push(&mut self.scratch.dead, node_word(target.parent, 1))?;
        let level = target.height - 1;
        let (parent, i) = self.scratch.path[level];
        // SAFETY: T7: the writer is ours; T2: on the way down.
        let parent = unsafe { parent.as_ref() };
        // SAFETY: T7: the writer is ours, and nothing is stored before the commit.
        let gaps = unsafe { parent.gaps() };
        let old_len = parent.len();
        let len = old_len - 1 + self.scratch.items.len();
        let mut made = self.new_inner(len)?;
        // SAFETY: T7: made by us, not yet shown to anybody.
        let out = unsafe { made.as_mut() };
        let mut put = ChildWriter::new(out, self.sequence);
        put.children(parent, gaps, 0..i);
        let mut last = target.lo;
        for item in &self.scratch.items {
            last = item.last;
            put.child(item.node.as_ptr(), last, item.gap);
        }
        let mut next = i + 1;
        if next < old_len && last != parent.pivots[i] {
            // The gap below the right neighbour's first entry has grown.
            // SAFETY: T7, T2.
            let right: &Leaf<T> = unsafe { leaf(parent.child(next)) };
            let gap = right.gap_end(0).saturating_sub(last).max(gaps[next]);
            put.child(parent.child(next), parent.pivots[next], gap);
            next += 1;
        }
        put.children(parent, gaps, next..old_len);
        let gap = put.finish();
        self.scratch.items.clear();
        let own = level.checked_sub(1).map_or(gap, |up| {
            let (above, j) = self.scratch.path[up];
            // SAFETY: T7: the writer is ours; T2: on the way down.
            let above = unsafe { above.as_ref() };
            // SAFETY: T7: the writer is ours, and nothing is stored before the commit.
            let gaps = unsafe { above.gaps() };
            gaps[j]
        });
        self.publish(level, target.height, made.cast(), (own, gap))
    }

    /// The leaf that the edit lies in, if there is one and what is above its parent may be changed in place.
    #[inline(always)]
    fn path_to<'t, S: Search>(&mut self, root: Root, edit: &Edit) -> Option<Target<'t, T>> {
        if root.is_empty() || root.height() == 0 {
            return None;
        }
        let (mut lo, mut hi, mut gap) = (0, PAD, 0);
        let mut birth = self.floor;
        let mut exclusive = true;
        let mut node = root.node();
        let mut parent = node;
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
            // The edit must end where the leaf does, and T6.
            if edit.hi > hi || !exclusive {
                return None;
            }
            exclusive = inner.birth >= birth;
            birth = inner.birth;
            // SAFETY: T7: the writer is ours.
            gap = unsafe { inner.gaps() }[i];
            *step = (NonNull::from(inner), i);
            parent = node;
            node = inner.child(i);
        }
        prefetch(node, SLOT_LINES);
        // SAFETY: T7, T2.
        let leaf = unsafe { leaf(node) };
        let height = root.height();
        Some(Target {
            node,
            leaf,
            parent,
            lo,
            hi,
            height,
            gap,
            exclusive,
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

    /// The commit will put `node`, which the first `levels` nodes of the way down lead to, in its place in a tree of
    /// `height`, and the gaps right on the way up: the node's own changes as `gap` says.
    #[inline(always)]
    fn publish(
        &mut self,
        levels: usize,
        height: usize,
        node: NonNull<()>,
        gap: (u64, u64),
    ) -> Result<(), EditError> {
        let Some(parent) = levels.checked_sub(1) else {
            self.scratch.value = Some(Root::new(node, height).0);
            return Ok(());
        };
        let (inner, i) = self.scratch.path[parent];
        // SAFETY: T7: the writer is ours; T2: on the way down.
        let inner = unsafe { inner.as_ref() };
        self.scratch.slot = Some(NonNull::from(&inner.children[i]));
        self.scratch.value = Some(node.as_ptr());
        let (mut before, mut after) = gap;
        for level in (0..levels.min(MAX_HEIGHT)).rev() {
            if before == after {
                break;
            }
            let (inner, i) = self.scratch.path[level];
            push(&mut self.scratch.gaps, (inner, i, after))?;
            // The root has no parent that would hold its own gap.
            let Some((parent, j)) = level.checked_sub(1).map(|up| self.scratch.path[up]) else {
                break;
            };
            // SAFETY: as above.
            let inner = unsafe { inner.as_ref() };
            // SAFETY: as above.
            let parent = unsafe { parent.as_ref() };
            // SAFETY: T7: the writer is ours.
            let own = unsafe { parent.gaps() }[j];
            // SAFETY: as above.
            let gaps = unsafe { inner.gaps() };
            let new = match replaced_max(own, before, after) {
                Some(new) => new,
                None => max_gap_with(gaps, i, after),
            };
            (before, after) = (own, new);
        }
        Ok(())
    }
}

/// Fills `out` with `old`, `news` taking the place of the entries `from..to`.
#[inline(always)]
fn splice_leaf<T>(out: &mut Leaf<T>, old: &Leaf<T>, from: usize, to: usize, news: &[New<T>]) {
    let rest = from + news.len();
    out.ends = old.ends;
    // In halves, which are moved in registers; the whole would be a call.
    let (low, high) = out.slots.split_at_mut(LEAF_CAP / 2);
    low.copy_from_slice(&old.slots[..LEAF_CAP / 2]);
    high.copy_from_slice(&old.slots[LEAF_CAP / 2..]);
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
    let before = old.few_gaps(target.lo, removed.start..old_len.min(removed.end + 1));
    let after = out.few_gaps(target.lo, removed.start..len.min(removed.start + count + 1));
    match replaced_max(target.gap, before, after) {
        Some(gap) => gap,
        None => out.max_gap(target.lo, len),
    }
}

/// The new maximum of gaps of which the largest is `max`, when some, the largest of them `before`, give
/// way to some, the largest of them `after`. `None` when only a recount tells.
#[inline(always)]
fn replaced_max(max: u64, before: u64, after: u64) -> Option<u64> {
    if after >= max {
        Some(after)
    } else {
        (before < max).then_some(max)
    }
}
