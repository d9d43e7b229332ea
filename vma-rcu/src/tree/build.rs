//! Bulk build: a tree from a sorted sequence, leaf by leaf, in linear time.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::node::{LEAF_CAP, LEAF_MIN, Leaf, PAD, Slot};
use super::rebuild::Rebuild;
use super::scratch::Item;
use super::write::{Writer, check};
use super::{EditError, RangeTree, Record};
use crate::reclaim::keep_first;

/// Entries per leaf: one lane is left free, so that the first insertions don't all split.
const FILL: usize = if LEAF_CAP > 4 { LEAF_CAP - 1 } else { LEAF_CAP };

impl<T: Record> RangeTree<T> {
    /// Replaces the whole content by `entries`, sorted and disjoint, in one publish. In an empty tree that
    /// takes linear time and no memory beside the nodes and records.
    ///
    /// # Errors
    ///
    /// As for [`Transaction::splice`](super::Transaction::splice); the tree is then as it was.
    ///
    /// # Panics
    ///
    /// When `writer` is another tree's.
    pub fn build(
        &self,
        writer: &mut Writer<T>,
        entries: impl IntoIterator<Item = (Range<u64>, T)>,
    ) -> Result<(), EditError> {
        let mut transaction = self.write(writer);
        if transaction.view().is_empty() {
            transaction.fill(entries)?.commit();
        } else {
            transaction.splice(0..super::MAX_END, entries)?;
            transaction.prepare()?.commit();
        }
        Ok(())
    }
}

/// A tree under construction. Dropped before it's finished, it drops the values it was given.
struct Bulk<'r, 't, T: Record> {
    rebuild: &'r mut Rebuild<'t, T>,
    /// The first so many nodes made are leaves.
    leaves: usize,
    finished: bool,
}

impl<T: Record> Drop for Bulk<'_, '_, T> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let mut panic = None;
        while let Some((node, _)) = self.rebuild.scratch.made.pop() {
            let is_leaf = self.rebuild.scratch.made.len() < self.leaves;
            let pool = &mut *self.rebuild.pool;
            if is_leaf {
                // SAFETY: T7: made by us; T2.
                let leaf = unsafe { super::node::leaf::<T>(node.as_ptr()) };
                for record in leaf.slots[..leaf.len()].iter().map(|slot| slot.record) {
                    let result = catch_unwind(AssertUnwindSafe(|| {
                        // SAFETY: R1: never published, ours alone, visited once.
                        unsafe { pool.drop_record(record) };
                    }));
                    keep_first(&mut panic, result.err());
                }
            }
            pool.give_node(node);
        }
        if let Some(panic) = panic
            && !std::thread::panicking()
        {
            resume_unwind(panic);
        }
    }
}

impl<T: Record> Rebuild<'_, T> {
    /// Makes a tree of `entries` for an empty one; how many there are.
    pub(super) fn bulk(
        &mut self,
        entries: impl IntoIterator<Item = (Range<u64>, T)>,
    ) -> Result<usize, EditError> {
        let mut bulk = Bulk {
            rebuild: self,
            leaves: 0,
            finished: false,
        };
        let mut entries = entries.into_iter().peekable();
        let (mut count, mut last) = (0, 0);
        while entries.peek().is_some() {
            let len;
            (len, last) = bulk.leaf(&mut entries, last)?;
            count += len;
        }
        bulk.balance_last();
        let root = bulk.rebuild.raise(0)?;
        bulk.rebuild.scratch.value = Some(root.0);
        bulk.finished = true;
        Ok(count)
    }
}

impl<T: Record> Bulk<'_, '_, T> {
    /// Fills one leaf: the number of its entries, and the end of the last.
    fn leaf(
        &mut self,
        entries: &mut impl Iterator<Item = (Range<u64>, T)>,
        lo: u64,
    ) -> Result<(usize, u64), EditError> {
        let mut node = self.rebuild.new_leaf(0)?;
        // SAFETY: T7: made by us, not yet shown to anybody.
        let leaf = unsafe { node.as_mut() };
        *leaf = Leaf::empty();
        leaf.track.write();
        self.leaves += 1;
        let (mut len, mut last) = (0, lo);
        for (range, value) in entries.take(FILL) {
            check(&range)?;
            if range.start < last {
                return Err(EditError::OutOfOrder { range });
            }
            let gap = value.start_gap();
            let record = self.rebuild.pool.record(value, gap);
            let record = record.map_err(|_| EditError::OutOfMemory)?.as_ptr();
            let start = range.start;
            leaf.slots[len] = Slot { start, record };
            leaf.ends[len] = range.end;
            leaf.guarded |= u32::from(gap > 0) << len;
            last = range.end;
            len += 1;
            leaf.len = len as u32;
        }
        let gap = leaf.max_gap(lo, len);
        self.rebuild.present(node, len, last, gap)?;
        Ok((len, last))
    }

    /// Moves entries from the last leaf but one, which is full, to the last, if that is short (T4).
    fn balance_last(&mut self) {
        let (lo, left, right) = match &mut self.rebuild.scratch.items[..] {
            [.., before, left, right] => (before.last, left, right),
            [left, right] => (0, left, right),
            _ => return,
        };
        balance(lo, left, right, PhantomData::<T>);
    }
}

/// See [`Bulk::balance_last`]; `lo` is the end of the entry before the two leaves.
fn balance<T: Record>(lo: u64, left: &mut Item, right: &mut Item, _: PhantomData<T>) {
    let (Some(full), Some(len)) = (left.fresh, right.fresh) else {
        return;
    };
    if len >= LEAF_MIN {
        return;
    }
    let count = LEAF_MIN - len;
    let keep = full - count;
    // SAFETY: T7: made by us, not published, and each of the two is borrowed once.
    let from = unsafe { &mut *left.node.as_ptr().cast::<Leaf<T>>() };
    // SAFETY: as above.
    let to = unsafe { &mut *right.node.as_ptr().cast::<Leaf<T>>() };
    to.ends.copy_within(..len, count);
    to.slots.copy_within(..len, count);
    to.ends[..count].copy_from_slice(&from.ends[keep..full]);
    to.slots[..count].copy_from_slice(&from.slots[keep..full]);
    to.guarded = to.guarded << count | from.guarded >> keep;
    from.ends[keep..full].fill(PAD);
    from.slots[keep..full].fill(Slot::UNUSED);
    from.guarded &= (1 << keep) - 1;
    from.len = keep as u32;
    to.len = LEAF_MIN as u32;
    left.last = from.ends[keep - 1];
    left.gap = from.max_gap(lo, keep);
    left.fresh = Some(keep);
    right.gap = to.max_gap(left.last, LEAF_MIN);
    right.fresh = Some(LEAF_MIN);
}
