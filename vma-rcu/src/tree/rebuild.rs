//! From edits to new nodes: the part of a transaction that can fail.
//!
//! The edits go down the tree together. On the way up each node says what became of it:
//!
//! * nothing changed;
//! * it was replaced by zero or more new nodes ([`Effect::Replaced`]);
//! * a child was replaced by one node that ends where the old one did, and the node may be changed in
//!   place: then the child's slot is where the transaction will be published
//!   ([`Effect::Published`]), and nothing above is copied.
//!
//! The slot that is found is the lowest common ancestor of everything that changes. "May be changed in
//! place" is T6: no node that was taken out of the tree leads to it, else a reader on such a node would
//! meet later transactions but not earlier ones. A node is exclusive when, from the root down to it, no
//! node is older than its parent, and the root isn't older than the last snapshot.

use super::lanes::Lanes;
use super::node::{
    Inner, LEAF_CAP, Leaf, MAX_HEIGHT, NodePtr, PAD, Root, Slot, inner, leaf, max_gap_with,
};
use super::pool::Pool;
use super::repack::{minimum, share};
use super::scratch::{Dead, Item, NoMemory, Scratch, bits, push};
use super::search::first_above;
use super::write::{Edit, New};
use super::{EditError, Record};
use smallvec::SmallVec;
use std::ops::Range;
use std::ptr::NonNull;

/// What became of a node.
enum Effect {
    Same,
    /// The slot is found below; the node's largest gap if that changes.
    Published {
        gap: Option<u64>,
    },
    /// The new nodes are on the item stack.
    Replaced,
}

/// The interval that a node answers for. `lo` is the end of the last entry before it, as it will be.
#[derive(Clone, Copy)]
struct Cover {
    lo: u64,
    hi: u64,
}

/// Entries on their way into a leaf.
pub(super) enum Part<'n, T> {
    Old(&'n Leaf<T>, usize, usize),
    New(usize, usize),
}

impl<T> Part<'_, T> {
    fn len(&self) -> usize {
        match *self {
            Part::Old(_, from, to) | Part::New(from, to) => to - from,
        }
    }
}

/// One run over the tree.
pub(super) struct Rebuild<'t, T> {
    pub(super) pool: &'t mut Pool<T>,
    pub(super) scratch: &'t mut Scratch<T>,
    /// A vector rather than a slice: to load its address and length as one word right after the length was
    /// stored would stall on the stores before it.
    pub(super) news: &'t Vec<New<T>>,
    /// This transaction; the birth of the nodes it makes.
    pub(super) sequence: u64,
    /// Nodes older than this belong to a snapshot.
    pub(super) floor: u64,
}

impl<T: Record> Rebuild<'_, T> {
    /// Fills the scratch with what `edits` (sorted, disjoint) do to the tree.
    #[inline(always)]
    pub(super) fn run<S: Lanes>(&mut self, root: Root, edits: &[Edit]) -> Result<(), EditError> {
        if let [edit] = edits
            && self.within_leaf::<S>(root, edit)?
        {
            return Ok(());
        }
        self.anywhere(root, edits)
    }

    #[inline(never)]
    fn anywhere(&mut self, root: Root, edits: &[Edit]) -> Result<(), EditError> {
        let cover = Cover { lo: 0, hi: PAD };
        let height = root.height();
        let effect = if root.is_empty() {
            self.leaf(None, cover.lo, edits)?
        } else if height == 0 {
            self.leaf(Some(root.node()), cover.lo, edits)?
        } else {
            self.inner(root.node(), height, cover, Some(self.floor), edits)?
        };
        if let Effect::Replaced = effect {
            self.scratch.value = Some(self.raise(height)?.0);
        }
        Ok(())
    }

    /// Makes one root of the items on the stack, which are nodes of `height`.
    pub(super) fn raise(&mut self, mut height: usize) -> Result<Root, EditError> {
        while self.scratch.items.len() > 1 {
            if height == MAX_HEIGHT {
                return Err(EditError::OutOfMemory);
            }
            height += 1;
            self.pack(0)?;
        }
        let Some(mut top) = self.scratch.items.pop() else {
            return Ok(Root::EMPTY);
        };
        // A root with one child gives way to it.
        while height > 0 && top.fresh == Some(1) {
            // SAFETY: T7: made by us; T2.
            let child = unsafe { inner(top.node.as_ptr()) }.child(0);
            self.unmake(top.node);
            height -= 1;
            let known = self
                .scratch
                .made
                .iter()
                .find(|(node, _)| node.as_ptr() == child);
            let fresh = known.map(|(_, len)| *len);
            let node = NonNull::new(child).ok_or(EditError::OutOfMemory)?;
            top = Item { node, fresh, ..top };
        }
        // T6: the old root still leads to a child that was there before.
        self.scratch.shared_root = top.fresh.is_none();
        Ok(Root::new(top.node, height))
    }

    /// A node of `height` that isn't the root.
    fn node(
        &mut self,
        node: NodePtr,
        height: usize,
        cover: Cover,
        parent: Option<u64>,
        edits: &[Edit],
    ) -> Result<Effect, EditError> {
        if height == 0 {
            return self.leaf(Some(node), cover.lo, edits);
        }
        self.inner(node, height, cover, parent, edits)
    }

    /// An inner node of `height`; `parent` is the birth that makes it exclusive, `None` if nothing does.
    fn inner(
        &mut self,
        node: NodePtr,
        height: usize,
        cover: Cover,
        parent: Option<u64>,
        edits: &[Edit],
    ) -> Result<Effect, EditError> {
        // SAFETY: T7: the writer is ours; T2.
        let inner = unsafe { inner(node) };
        let exclusive = parent.is_some_and(|birth| inner.birth >= birth);
        let (lowest, highest) = match edits {
            [] => return Ok(Effect::Same),
            [first, .., last] => (first.lo, last.hi),
            [only] => (only.lo, only.hi),
        };
        let first = first_above(&inner.pivots, lowest);
        let child = child_cover(inner, first, cover);
        let mark = self.scratch.items.len();
        if highest > child.hi {
            let last = first_above(&inner.pivots, highest - 1);
            return self.several(node, height, cover, first..last + 1, edits);
        }
        let parent = exclusive.then_some(inner.birth);
        match self.node(inner.child(first), height - 1, child, parent, edits)? {
            Effect::Same => Ok(Effect::Same),
            Effect::Published { gap } => {
                let gap = gap.map(|gap| self.store_gap(inner, first, gap));
                Ok(Effect::Published {
                    gap: gap.transpose()?.flatten(),
                })
            }
            Effect::Replaced => {
                if exclusive && let [item] = self.scratch.items[mark..] {
                    let whole = item.fresh.is_none_or(|n| n >= minimum(height - 1));
                    if whole && (child.hi == PAD || child.hi == item.last) {
                        self.scratch.items.pop();
                        self.scratch.slot = Some(NonNull::from(&inner.children[first]));
                        self.scratch.value = Some(item.node.as_ptr());
                        let gap = self.store_gap(inner, first, item.gap)?;
                        return Ok(Effect::Published { gap });
                    }
                }
                self.note_end(inner, first, child, mark)?;
                let len = inner.len();
                let made = self.scratch.items.len() - mark;
                self.keep(inner, 0..first, cover.hi)?;
                self.scratch.items[mark..].rotate_left(made);
                self.keep(inner, first + 1..len, cover.hi)?;
                self.finish(node, height, cover.lo, mark)
            }
        }
    }

    /// Edits that concern the children `touched`, more than one.
    fn several(
        &mut self,
        node: NodePtr,
        height: usize,
        cover: Cover,
        touched: Range<usize>,
        edits: &[Edit],
    ) -> Result<Effect, EditError> {
        // SAFETY: T7: the writer is ours; T2.
        let inner = unsafe { inner(node) };
        let mark = self.scratch.items.len();
        let mut changed = false;
        // Edits whose new entries have found their child.
        let mut placed = 0;
        self.keep(inner, 0..touched.start, cover.hi)?;
        let mut lo = child_cover(inner, touched.start, cover).lo;
        for i in touched.clone() {
            let child = Cover {
                lo,
                ..child_cover(inner, i, cover)
            };
            // The old end of the child before, where the edits are cut; the first child gets all below.
            let cut = if i == touched.start {
                0
            } else {
                inner.pivots[i - 1]
            };
            let clipped = clip(edits, cut, child.hi, &mut placed)?;
            let before = self.scratch.items.len();
            let effect = self.node(inner.child(i), height - 1, child, None, &clipped)?;
            if let Effect::Same = effect {
                self.keep(inner, i..i + 1, cover.hi)?;
            } else {
                changed = true;
                self.note_end(inner, i, child, before)?;
            }
            lo = self.scratch.items[mark..]
                .last()
                .map_or(cover.lo, |item| item.last);
        }
        if !changed {
            self.scratch.items.truncate(mark);
            return Ok(Effect::Same);
        }
        self.keep(inner, touched.end..inner.len(), cover.hi)?;
        self.finish(node, height, cover.lo, mark)
    }

    /// The items above `mark` are the new children of `node`: makes nodes of them.
    fn finish(
        &mut self,
        node: NodePtr,
        height: usize,
        lo: u64,
        mark: usize,
    ) -> Result<Effect, EditError> {
        self.settle(height - 1, lo, mark)?;
        self.pack(mark)?;
        self.bury(node, height)?;
        Ok(Effect::Replaced)
    }

    /// The children `range` of `inner` stay as they are.
    pub(super) fn keep(
        &mut self,
        inner: &Inner,
        range: Range<usize>,
        hi: u64,
    ) -> Result<(), EditError> {
        for i in range {
            let pivot = inner.pivots[i];
            let item = Item {
                node: NonNull::new(inner.child(i)).ok_or(EditError::OutOfMemory)?,
                last: if pivot == PAD { hi } else { pivot },
                // SAFETY: T7: the writer is ours.
                gap: unsafe { inner.gaps() }[i],
                fresh: None,
            };
            push(&mut self.scratch.items, item)?;
        }
        Ok(())
    }

    /// Child `i` became the items above `mark`. When it ends elsewhere now, the gap below its right
    /// neighbour's first entry changes, which is settled after the commit.
    fn note_end(
        &mut self,
        inner: &Inner,
        i: usize,
        child: Cover,
        mark: usize,
    ) -> Result<(), EditError> {
        let old = inner.pivots[i];
        if old == PAD {
            return Ok(());
        }
        let new = self.scratch.items[mark..]
            .last()
            .map_or(child.lo, |item| item.last);
        if new != old {
            push(&mut self.scratch.refresh, old.max(new))?;
        }
        Ok(())
    }

    /// Stores `gap` for child `i` at the commit; what that makes of the node's own gap, if it may change.
    fn store_gap(&mut self, inner: &Inner, i: usize, gap: u64) -> Result<Option<u64>, EditError> {
        // SAFETY: T7: the writer is ours.
        let gaps = unsafe { inner.gaps() };
        if gaps[i] == gap {
            return Ok(None);
        }
        push(&mut self.scratch.gaps, (NonNull::from(inner), i, gap))?;
        Ok(Some(max_gap_with(gaps, i, gap)))
    }

    /// A leaf, or none at all in an empty tree.
    fn leaf(
        &mut self,
        node: Option<NodePtr>,
        lo: u64,
        edits: &[Edit],
    ) -> Result<Effect, EditError> {
        // SAFETY: T7: the writer is ours; T2.
        let leaf = node.map(|node| unsafe { leaf::<T>(node) });
        let mut parts = SmallVec::<[Part<'_, T>; 8]>::new();
        let most = 2 * edits.len() + 1;
        parts
            .try_reserve(most)
            .map_err(|_| EditError::OutOfMemory)?;
        let mut total = 0;
        let mut changed = false;
        let mut gone = 0;
        let mut done = 0;
        for edit in edits {
            let new = Part::New(edit.first, edit.first + edit.count);
            changed |= edit.count > 0;
            if let Some(leaf) = leaf {
                let (from, to) = Self::cut(leaf, edit)?;
                gone |= bits(from..to);
                total += from - done;
                parts.push(Part::Old(leaf, done, from));
                done = to;
            }
            total += new.len();
            parts.push(new);
        }
        if !changed && gone == 0 {
            return Ok(Effect::Same);
        }
        if let Some(leaf) = leaf {
            let len = leaf.len();
            total += len - done;
            parts.push(Part::Old(leaf, done, len));
        }
        if let Some(node) = node {
            push(&mut self.scratch.dead, Dead::new(node, 0, gone))?;
            self.scratch.leaving += gone.count_ones() as usize;
        }
        self.write_leaves(&parts, total, lo)?;
        Ok(Effect::Replaced)
    }

    /// The entries of `leaf` that `edit` removes.
    fn cut(leaf: &Leaf<T>, edit: &Edit) -> Result<(usize, usize), EditError> {
        let from = first_above(&leaf.ends, edit.lo);
        let mut to = from;
        while to < LEAF_CAP && leaf.slots[to].start < edit.hi {
            let (start, end) = (leaf.slots[to].start, leaf.ends[to]);
            if start < edit.lo || end > edit.hi {
                let window = edit.lo..edit.hi;
                return Err(EditError::Straddles { window, start, end });
            }
            to += 1;
        }
        Ok((from, to))
    }

    /// Makes as many leaves of `parts` as they need.
    pub(super) fn write_leaves(
        &mut self,
        parts: &[Part<'_, T>],
        total: usize,
        mut lo: u64,
    ) -> Result<(), NoMemory> {
        let count = total.div_ceil(LEAF_CAP);
        let mut parts = parts.iter();
        let mut part = parts.next();
        let mut skip = 0;
        for n in 0..count {
            let len = share(total, count, n);
            let mut node = self.new_leaf(len)?;
            // SAFETY: T7: made by us, not yet shown to anybody.
            let out = unsafe { node.as_mut() };
            out.guarded = 0;
            let mut at = 0;
            while at < len {
                let Some(source) = part else { break };
                let take = (source.len() - skip).min(len - at);
                self.copy(out, at, source, skip, take);
                at += take;
                skip += take;
                if skip == source.len() {
                    part = parts.next();
                    skip = 0;
                }
            }
            out.len = len as u32;
            out.ends[len..].fill(PAD);
            out.slots[len..].fill(Slot::UNUSED);
            let (last, gap) = (out.ends[len - 1], out.max_gap(lo, len));
            self.present(node, len, last, gap)?;
            lo = last;
        }
        Ok(())
    }

    /// Memory for a leaf that will have `len` entries.
    #[inline(always)]
    pub(super) fn new_leaf(&mut self, len: usize) -> Result<NonNull<Leaf<T>>, NoMemory> {
        let node = self.pool.leaf().ok_or(NoMemory)?;
        self.note_made(node.cast(), len)?;
        Ok(node)
    }

    /// Memory for an inner node that will have `len` children.
    #[inline]
    pub(super) fn new_inner(&mut self, len: usize) -> Result<NonNull<Inner>, NoMemory> {
        let node = self.pool.inner().ok_or(NoMemory)?;
        self.note_made(node.cast(), len)?;
        Ok(node)
    }

    #[inline(always)]
    fn note_made(&mut self, node: NonNull<()>, len: usize) -> Result<(), NoMemory> {
        let pushed = push(&mut self.scratch.made, (node, len));
        if pushed.is_err() {
            self.pool.give_node(node);
        }
        pushed
    }

    /// A leaf is complete: an item of it.
    #[inline]
    pub(super) fn present(
        &mut self,
        node: NonNull<Leaf<T>>,
        len: usize,
        last: u64,
        gap: u64,
    ) -> Result<(), NoMemory> {
        let item = Item {
            node: node.cast(),
            last,
            gap,
            fresh: Some(len),
        };
        push(&mut self.scratch.items, item)
    }

    /// Copies `count` entries of `source` from its entry `skip` on to entry `at` of `out`.
    #[inline]
    fn copy(&self, out: &mut Leaf<T>, at: usize, source: &Part<'_, T>, skip: usize, count: usize) {
        match *source {
            Part::Old(leaf, from, _) => {
                for i in 0..count {
                    out.ends[at + i] = leaf.ends[from + skip + i];
                    out.slots[at + i] = leaf.slots[from + skip + i];
                }
                let bits = leaf.guarded >> (from + skip) & ((1 << count) - 1);
                out.guarded |= bits << at;
            }
            Part::New(from, _) => {
                for i in 0..count {
                    let new = &self.news[from + skip + i];
                    out.ends[at + i] = new.end;
                    out.slots[at + i] = new.slot();
                    out.guarded |= u32::from(new.guarded) << (at + i);
                }
            }
        }
    }
}

/// The interval of child `i`.
#[inline]
fn child_cover(inner: &Inner, i: usize, cover: Cover) -> Cover {
    let pivot = inner.pivots[i];
    Cover {
        lo: if i > 0 { inner.pivots[i - 1] } else { cover.lo },
        hi: if pivot == PAD { cover.hi } else { pivot },
    }
}

/// The parts of `edits` within `lo..hi`. New entries go with the first part of their edit: the first
/// `placed` edits have found their place.
fn clip(
    edits: &[Edit],
    lo: u64,
    hi: u64,
    placed: &mut usize,
) -> Result<SmallVec<[Edit; 4]>, NoMemory> {
    let mut clipped = SmallVec::new();
    clipped.try_reserve(edits.len()).map_err(|_| NoMemory)?;
    for (i, edit) in edits.iter().enumerate() {
        let part = Edit {
            lo: edit.lo.max(lo),
            hi: edit.hi.min(hi),
            count: if i < *placed { 0 } else { edit.count },
            ..*edit
        };
        if part.lo < part.hi {
            clipped.push(part);
            *placed = (*placed).max(i + 1);
        }
    }
    Ok(clipped)
}
