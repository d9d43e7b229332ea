//! Nodes that are too small, and lists of children that become nodes.

use std::ptr::NonNull;

use smallvec::SmallVec;

use super::node::{ChildWriter, FANOUT, INNER_MIN, LEAF_MIN, Leaf, NodePtr, inner, leaf};
use super::rebuild::{Part, Rebuild};
use super::scratch::{Dead, Item, push};
use super::{EditError, Record};

impl<T: Record> Rebuild<'_, T> {
    /// Merges nodes of this transaction that are too small with a neighbour (T4).
    pub(super) fn settle(&mut self, height: usize, lo: u64, mark: usize) -> Result<(), EditError> {
        let mut k = mark;
        while k < self.scratch.items.len() && self.scratch.items.len() - mark > 1 {
            let small = |item: &Item| item.fresh.is_some_and(|len| len < minimum(height));
            if !small(&self.scratch.items[k]) {
                k += 1;
                continue;
            }
            let left = if k > mark { k - 1 } else { k };
            let lo = if left > mark {
                self.scratch.items[left - 1].last
            } else {
                lo
            };
            self.merge(height, lo, left)?;
            k = left;
        }
        Ok(())
    }

    /// Makes one or two nodes of the items `left` and `left + 1`.
    fn merge(&mut self, height: usize, lo: u64, left: usize) -> Result<(), EditError> {
        let mut rest = SmallVec::<[Item; FANOUT]>::new();
        let after = self.scratch.items.len() - (left + 2);
        rest.try_reserve(after)
            .map_err(|_| EditError::OutOfMemory)?;
        rest.extend(self.scratch.items.drain(left + 2..));
        let pair = [self.scratch.items[left], self.scratch.items[left + 1]];
        self.scratch.items.truncate(left);
        if height == 0 {
            // SAFETY: T7: the writer is ours, or we made it; T2.
            let leaves = pair.map(|item| unsafe { leaf::<T>(item.node.as_ptr()) });
            let lens = leaves.map(Leaf::len);
            let parts = [
                Part::Old(leaves[0], 0, lens[0]),
                Part::Old(leaves[1], 0, lens[1]),
            ];
            self.write_leaves(&parts, lens[0] + lens[1], lo)?;
        } else {
            for item in pair {
                // SAFETY: T7: the writer is ours, or we made it; T2.
                let inner = unsafe { inner(item.node.as_ptr()) };
                let start = self.scratch.items.len();
                self.keep(inner, 0..inner.len(), item.last)?;
                self.recall(start);
            }
            self.settle(height - 1, lo, left)?;
            self.pack(left)?;
        }
        for item in pair {
            match item.fresh {
                Some(_) => self.unmake(item.node),
                None => self.bury(item.node.as_ptr(), height)?,
            }
        }
        for item in rest {
            push(&mut self.scratch.items, item)?;
        }
        Ok(())
    }

    /// Marks those items from `start` on that this transaction made.
    fn recall(&mut self, start: usize) {
        let made = &self.scratch.made;
        for item in &mut self.scratch.items[start..] {
            let known = made.iter().find(|(node, _)| *node == item.node);
            item.fresh = known.map(|(_, len)| *len);
        }
    }

    /// Makes inner nodes of the items above `mark`, and leaves those in their place.
    pub(super) fn pack(&mut self, mark: usize) -> Result<(), EditError> {
        let total = self.scratch.items.len() - mark;
        let count = total.div_ceil(FANOUT);
        let mut at = mark;
        for n in 0..count {
            let len = share(total, count, n);
            let mut made = self.new_inner(len)?;
            // SAFETY: T7: made by us, not yet shown to anybody.
            let mut put = ChildWriter::new(unsafe { made.as_mut() }, self.sequence);
            let items = &self.scratch.items[at..at + len];
            for item in items {
                put.child(item.node.as_ptr(), item.last, item.gap);
            }
            let gap = put.finish();
            let last = items[len - 1].last;
            let node = made.cast();
            at += len;
            self.scratch.items[mark + n] = Item {
                node,
                last,
                gap,
                fresh: Some(len),
            };
        }
        self.scratch.items.truncate(mark + count);
        Ok(())
    }

    /// A node leaves the tree.
    pub(super) fn bury(&mut self, node: NodePtr, height: usize) -> Result<(), EditError> {
        push(&mut self.scratch.dead, Dead::new(node, height, 0))?;
        Ok(())
    }

    /// A node that this transaction made isn't needed after all.
    pub(super) fn unmake(&mut self, node: NonNull<()>) {
        let known = self.scratch.made.iter().position(|(made, _)| *made == node);
        if let Some(i) = known {
            self.scratch.made.swap_remove(i);
            self.pool.give_node(node);
        }
    }
}

/// How many of `total` the `n`-th of `count` nodes gets.
pub(super) fn share(total: usize, count: usize, n: usize) -> usize {
    total / count + usize::from(n < total % count)
}

/// Entries or children of a node that isn't the root, at least.
pub(super) fn minimum(height: usize) -> usize {
    if height == 0 { LEAF_MIN } else { INNER_MIN }
}
