//! The frequent cases: one edit that stays within one leaf.
//!
//! * The leaf keeps its last end and neither overflows nor runs short, and its parent may be changed in
//!   place: one new leaf is all that the edit takes.
//! * The last end moves, the leaf overflows, or the parent mustn't be changed in place, and the parent has room for
//!   what comes of it: the new leaves and a new parent.
//!
//! Anything else is left to [`Rebuild`], which could do these cases as well, at two to three times the cost.

use std::ops::Range;
use std::ptr::NonNull;

use super::Record;
use super::lanes::Lanes;
use super::node::{
    CHILD_LINES, ChildWriter, FANOUT, LEAF_CAP, LEAF_MIN, Leaf, MAX_HEIGHT, NodePtr, PAD, Root,
    SLOT_LINES, inner, leaf,
};
use super::rebuild::{Part, Rebuild};
use super::scratch::{Dead, NoMemory, bits, push};
use super::search::{Search, prefetch};
use super::write::{Edit, New};

/// Where the way down, which is in the scratch, has led.
struct Target<'t, T> {
    node: NodePtr,
    leaf: &'t Leaf<T>,
    /// What the leaf answers for: from the end of the last entry before it to the end of its own last.
    lo: u64,
    hi: u64,
    /// The leaf's parent may be changed in place (T6).
    exclusive: bool,
}

impl<T: Record> Rebuild<'_, T> {
    /// Does the edit if it is of this kind; false if it isn't, with nothing done.
    #[inline(always)]
    pub(super) fn within_leaf<S: Lanes>(
        &mut self,
        root: Root,
        edit: &Edit,
    ) -> Result<bool, NoMemory> {
        let Some(target) = self.path_to::<S>(root, edit) else {
            return Ok(false);
        };
        let old = target.leaf;
        // What ends within the window, if nothing lies across its borders.
        let from = S::first_above(&old.ends, edit.lo);
        let to = S::first_above(&old.ends, edit.hi);
        let starts_below =
            |i: usize, bound| old.slots.get(i).is_some_and(|slot| slot.start < bound);
        let straddles = starts_below(from, edit.lo) || starts_below(to, edit.hi);
        let len = old.len();
        let new_len = len - (to - from) + edit.count;
        // An edit with no effect, or one that is an error, is left to the other path.
        if straddles || new_len < LEAF_MIN || to - from + edit.count == 0 {
            return Ok(false);
        }
        let news = &self.news[edit.first..edit.first + edit.count];
        let keeps_end =
            to < len || target.hi == PAD || news.last().is_some_and(|new| new.end == target.hi);
        let in_place = target.exclusive && keeps_end && new_len <= LEAF_CAP;
        if !in_place && !self.parent_takes(root.height(), new_len, keeps_end) {
            return Ok(false);
        }
        let dead = Dead::new(target.node, 0, bits(from..to));
        push(&mut self.scratch.dead, dead)?;
        self.scratch.leaving = to - from;
        if new_len > LEAF_CAP {
            self.write_split(&target, from..to, edit, new_len)?;
            self.with_parent::<S>(root, target.lo)?;
            return Ok(true);
        }
        let mut node = self.new_leaf(new_len)?;
        // SAFETY: T7: made by us, not yet shown to anybody.
        let out = unsafe { node.as_mut() };
        splice_leaf::<S, T>(out, old, from, to, news);
        let gap = S::max_gap(out, target.lo);
        if in_place {
            self.publish::<S>(root, root.height(), node.cast(), gap)?;
        } else {
            self.present(node, new_len, out.ends[new_len - 1], gap)?;
            self.with_parent::<S>(root, target.lo)?;
        }
        Ok(true)
    }

    /// Two leaves, or more, for what doesn't fit into one.
    #[inline(never)]
    fn write_split(
        &mut self,
        target: &Target<'_, T>,
        removed: Range<usize>,
        edit: &Edit,
        new_len: usize,
    ) -> Result<(), NoMemory> {
        let parts = [
            Part::Old(target.leaf, 0, removed.start),
            Part::New(edit.first, edit.first + edit.count),
            Part::Old(target.leaf, removed.end, target.leaf.len()),
        ];
        self.write_leaves(&parts, new_len, target.lo)
    }

    /// Whether the leaf's parent can hold what `new_len` entries take, and the pivot that moves, if one does.
    #[inline(never)]
    fn parent_takes(&self, height: usize, new_len: usize, keeps_end: bool) -> bool {
        let (parent, i) = self.scratch.path[height - 1];
        // SAFETY: T7: the writer is ours; T2: on the way down.
        let parent = unsafe { parent.as_ref() };
        parent.len() - 1 + new_len.div_ceil(LEAF_CAP) <= FANOUT
            && (keeps_end || parent.pivots[i] != PAD)
    }

    /// Puts the leaves that take the old one's place, which are on the item stack, into a new parent. `lo` is the
    /// end of the last entry before them.
    #[inline(never)]
    fn with_parent<S: Lanes>(&mut self, root: Root, lo: u64) -> Result<(), NoMemory> {
        let level = root.height() - 1;
        let node = match level.checked_sub(1).map(|up| self.scratch.path[up]) {
            // SAFETY: T7: the writer is ours; T2: on the way down.
            Some((above, j)) => unsafe { above.as_ref() }.child(j),
            None => root.node(),
        };
        push(&mut self.scratch.dead, Dead::new(node, 1, 0))?;
        let (parent, i) = self.scratch.path[level];
        // SAFETY: as above.
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
        let mut last = lo;
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
        self.publish::<S>(root, level, made.cast(), gap)
    }

    /// The leaf that the edit lies in, if there is one and what is above its parent may be changed in place.
    #[inline(always)]
    fn path_to<'t, S: Search>(&mut self, root: Root, edit: &Edit) -> Option<Target<'t, T>> {
        let height = root.height();
        let mut birth = self.floor;
        let mut exclusive = true;
        let mut node = root.node();
        // None in an empty tree, whose root has no height.
        for step in &mut self.scratch.path[..height] {
            prefetch(node, CHILD_LINES);
            // SAFETY: T7: the writer is ours; T2.
            let inner = unsafe { inner(node) };
            let i = S::first_above(&inner.pivots, edit.lo);
            // T6.
            if i >= FANOUT || !exclusive {
                return None;
            }
            exclusive = inner.birth >= birth;
            birth = inner.birth;
            *step = (NonNull::from(inner), i);
            node = inner.child(i);
        }
        prefetch(node, SLOT_LINES);
        let (parent, i) = self.scratch.path[height.checked_sub(1)?];
        // SAFETY: T7: the writer is ours; T2: on the way down.
        let pivots = unsafe { &parent.as_ref().pivots };
        let lo = match i.checked_sub(1) {
            Some(before) => pivots[before],
            None => self.bound(height - 1, |i| i.checked_sub(1)).unwrap_or(0),
        };
        let hi = match pivots[i] {
            PAD => self.bound(height - 1, Some).unwrap_or(PAD),
            pivot => pivot,
        };
        // SAFETY: T7, T2.
        let leaf = unsafe { leaf(node) };
        // The edit must end where the leaf does.
        (edit.hi <= hi).then_some(Target {
            node,
            leaf,
            lo,
            hi,
            exclusive,
        })
    }

    /// The pivot at what `beside` makes of the step down, on the lowest of the first `levels` that has one there.
    #[inline(never)]
    fn bound(&self, levels: usize, beside: impl Fn(usize) -> Option<usize>) -> Option<u64> {
        let steps = self.scratch.path[..levels].iter().rev();
        steps.copied().find_map(|(inner, i)| {
            // SAFETY: T7: the writer is ours; T2: on the way down.
            let pivots = unsafe { &inner.as_ref().pivots };
            beside(i).map(|i| pivots[i]).filter(|pivot| *pivot != PAD)
        })
    }

    /// The commit will put `node`, which the first `levels` nodes of the way down lead to, in its place, and the gaps
    /// right on the way up: the node's own is `gap`.
    #[inline(always)]
    fn publish<S: Lanes>(
        &mut self,
        root: Root,
        levels: usize,
        node: NonNull<()>,
        gap: u64,
    ) -> Result<(), NoMemory> {
        let Some(parent) = levels.checked_sub(1) else {
            self.scratch.value = Some(Root::new(node, root.height()).0);
            return Ok(());
        };
        let (inner, i) = self.scratch.path[parent];
        // SAFETY: T7: the writer is ours; T2: on the way down.
        let inner = unsafe { inner.as_ref() };
        self.scratch.slot = Some(NonNull::from(&inner.children[i]));
        self.scratch.value = Some(node.as_ptr());
        // SAFETY: T7: the writer is ours, and nothing is stored before the commit.
        let before = unsafe { inner.gaps() }[i];
        if before != gap {
            self.note_gaps::<S>(levels, before, gap)?;
        }
        Ok(())
    }

    /// The gap of what the first `levels` nodes of the way down lead to changes from `before` to `after`.
    #[inline(always)]
    fn note_gaps<S: Lanes>(
        &mut self,
        levels: usize,
        mut before: u64,
        mut after: u64,
    ) -> Result<(), NoMemory> {
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
                None => S::max_with(gaps, i, after),
            };
            (before, after) = (own, new);
        }
        Ok(())
    }
}

/// Fills `out` with `old`, `news` taking the place of the entries `from..to`.
#[inline(always)]
fn splice_leaf<S: Lanes, T>(
    out: &mut Leaf<T>,
    old: &Leaf<T>,
    from: usize,
    to: usize,
    news: &[New<T>],
) {
    let rest = from + news.len();
    S::splice(out, old, to, rest);
    let mut guarded = old.guarded & ((1 << from) - 1) | old.guarded >> to << rest;
    let ends = out.ends[from..rest].iter_mut();
    for (i, ((end, slot), new)) in ends.zip(&mut out.slots[from..rest]).zip(news).enumerate() {
        *end = new.end;
        *slot = new.slot();
        guarded |= u32::from(new.guarded) << (from + i);
    }
    out.guarded = guarded;
    out.len = old.len + news.len() as u32 - (to - from) as u32;
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
