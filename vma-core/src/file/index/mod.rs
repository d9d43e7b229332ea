//! An ordered multiset of half-open intervals of pages, with a value each; they may overlap, and be equal.
//!
//! A B+ tree, in order of first page, then of a number that the caller chooses. For each child a directory keeps the greatest end of
//! an interval below, so that a walk passes over what ends before its range: what overlaps a range is found in O(log n + found).
//!
//! It lives behind a lock under which nothing may be allocated or freed. So nodes come from an arena that is
//! [enlarged](IntervalSet::needs) beforehand, and go back to it; its memory is handed out when the set is empty.
//!
//! # Invariants
//!
//! * **X1** Keys of a leaf are at most those of later leaves; within one they are in no order.
//! * **X2** All keys below child `i` are at least its separator, and at most that of child `i + 1`. (Equal keys may lie on both sides.)
//! * **X3** The cached end of a child is the greatest end below it.
//! * **X4** No node but the root is empty, and all leaves are equally deep.
//! * **X5** Each node of the arena is in the tree once, or free.

mod arena;
mod node;
#[cfg(all(test, not(loom)))]
mod tests;

use std::ops::ControlFlow;

use self::arena::Arena;
pub(crate) use self::arena::{Chunk, Need};
use self::node::{Child, Directory, Leaf};

/// Entries of a leaf.
const LEAF: usize = if cfg!(test) { 4 } else { 32 };
/// Children of a directory.
const FAN: usize = if cfg!(test) { 4 } else { 32 };

/// Where an entry is, in order: `end` isn't part of the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interval {
    /// First page.
    pub(crate) first: u64,
    /// Tells entries apart that begin alike.
    pub(crate) tie: u64,
    /// First page after it.
    pub(crate) end: u64,
}

impl Interval {
    fn key(self) -> Key {
        Key::from(self.first) << 64 | Key::from(self.tie)
    }
}

/// First page and tie, as one number: two instructions compare it.
type Key = u128;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct IntervalSet<V> {
    leaves: Arena<Leaf<V>>,
    directories: Arena<Directory>,
    /// A leaf at height 0, else a directory. Nothing yet, while there are no entries.
    root: u32,
    height: u32,
    len: usize,
}

impl<V> IntervalSet<V> {
    pub(crate) const fn new() -> Self {
        IntervalSet {
            leaves: Arena::new(),
            directories: Arena::new(),
            root: 0,
            height: 0,
            len: 0,
        }
    }

    /// Entries.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// What has to be [added](Self::add) before so many entries can be inserted for certain; `None`: nothing.
    pub(crate) fn needs(&self, entries: usize) -> Option<Need> {
        let is_one_leaf = self.height == 0 && self.len + entries <= LEAF;
        let (leaves, directories) = if is_one_leaf {
            (usize::from(self.len == 0), 0)
        } else {
            // Each splits a leaf and all above it at worst, and the root gets one above.
            (entries + 1, entries * (self.height as usize + 1))
        };
        self.leaves
            .needs(leaves, Need::leaves)
            .or_else(|| self.directories.needs(directories, Need::directories))
    }

    /// Memory for more nodes. What it returns is to be freed elsewhere.
    #[must_use]
    pub(crate) fn add(&mut self, chunk: Chunk<V>) -> Chunk<V> {
        match chunk {
            Chunk::Leaves(nodes) => Chunk::Leaves(self.leaves.add(nodes)),
            Chunk::Directories(nodes) => Chunk::Directories(self.directories.add(nodes)),
        }
    }

    /// The memory of an empty set, to be freed elsewhere.
    pub(crate) fn take_memory(&mut self) -> Option<Self> {
        (self.len == 0 && !self.leaves.is_empty()).then(|| std::mem::replace(self, Self::new()))
    }

    /// What was [needed](Self::needs) has been added.
    pub(crate) fn insert(&mut self, interval: Interval, value: V) {
        if self.len == 0 {
            (self.root, self.height) = (self.leaves.take(), 0);
        }
        self.len += 1;
        let Some(right) = self.insert_below(self.root, self.height, interval, value) else {
            return;
        };
        let left = Child {
            separator: 0,
            end: self.greatest_end(self.root, self.height),
            id: self.root,
        };
        let root = self.directories.take();
        let directory = self.directories.get_mut(root);
        directory.insert(0, left);
        directory.insert(1, right);
        (self.root, self.height) = (root, self.height + 1);
    }

    fn greatest_end(&self, id: u32, height: u32) -> u64 {
        if height == 0 {
            self.leaves.get(id).greatest_end()
        } else {
            self.directories.get(id).greatest_end()
        }
    }

    /// Whether something below ends there, which nothing below is beyond.
    fn has_end(&self, id: u32, height: u32, end: u64) -> bool {
        if height == 0 {
            let mut entries = self.leaves.get(id).entries();
            entries.any(|(interval, _)| interval.end == end)
        } else {
            self.directories.get(id).has_end(end)
        }
    }

    /// Inserts below a node, which is split if it has to be: the new one is returned.
    fn insert_below(
        &mut self,
        id: u32,
        height: u32,
        interval: Interval,
        value: V,
    ) -> Option<Child> {
        if height == 0 {
            return self.insert_into(id, interval, value);
        }
        let directory = self.directories.get_mut(id);
        let at = directory.place(interval.key());
        if directory.ends[at] < interval.end {
            directory.ends[at] = interval.end;
        }
        let child = directory.children[at];
        let new = self.insert_below(child, height - 1, interval, value)?;
        // What was moved away may have had the greatest end.
        let end = self.greatest_end(child, height - 1);
        let directory = self.directories.get_mut(id);
        directory.ends[at] = end;
        if directory.len < FAN {
            directory.insert(at + 1, new);
            return None;
        }
        let right = self.directories.take();
        let (directory, upper) = self.directories.pair(id, right);
        directory.split(upper);
        if at < directory.len {
            directory.insert(at + 1, new);
        } else {
            upper.insert(at + 1 - directory.len, new);
        }
        Some(Child {
            separator: upper.separators[0],
            end: upper.greatest_end(),
            id: right,
        })
    }

    fn insert_into(&mut self, id: u32, interval: Interval, value: V) -> Option<Child> {
        let leaf = self.leaves.get_mut(id);
        if leaf.len() < LEAF {
            leaf.insert(interval, value);
            return None;
        }
        let right = self.leaves.take();
        let (leaf, upper) = self.leaves.pair(id, right);
        let separator = leaf.split(upper);
        if interval.key() < separator {
            leaf.insert(interval, value);
        } else {
            upper.insert(interval, value);
        }
        Some(Child {
            separator,
            end: upper.greatest_end(),
            id: right,
        })
    }

    /// Takes out one entry with this interval whose value `is` the one.
    pub(crate) fn remove(&mut self, interval: Interval, is: impl Fn(&V) -> bool) -> Option<V> {
        if self.len == 0 {
            return None;
        }
        let value = self.remove_below(self.root, self.height, interval, &is)?;
        self.len -= 1;
        while self.height > 0 && self.directories.get(self.root).len == 1 {
            let only = self.directories.get(self.root).children[0];
            self.free(self.root, self.height);
            (self.root, self.height) = (only, self.height - 1);
        }
        if self.len == 0 {
            self.free(self.root, 0);
        }
        Some(value)
    }

    fn remove_below(
        &mut self,
        id: u32,
        height: u32,
        interval: Interval,
        is: &impl Fn(&V) -> bool,
    ) -> Option<V> {
        if height == 0 {
            return self.leaves.get_mut(id).remove(interval, is);
        }
        let mut at = self.directories.get(id).place(interval.key());
        let value = loop {
            let child = self.directories.get(id).children[at];
            if let Some(value) = self.remove_below(child, height - 1, interval, is) {
                break value;
            }
            // Equal keys may lie to the left of their separator as well.
            if at == 0 || self.directories.get(id).separators[at] < interval.key() {
                return None;
            }
            at -= 1;
        };
        let child = self.directories.get(id).children[at];
        if self.directories.get(id).ends[at] == interval.end
            && !self.has_end(child, height - 1, interval.end)
        {
            let end = self.greatest_end(child, height - 1);
            self.directories.get_mut(id).ends[at] = end;
        }
        self.mend(id, height, at);
        Some(value)
    }

    fn count(&self, id: u32, height: u32) -> usize {
        if height == 0 {
            self.leaves.get(id).len()
        } else {
            self.directories.get(id).len
        }
    }

    fn free(&mut self, id: u32, height: u32) {
        if height == 0 {
            self.leaves.give(id);
        } else {
            self.directories.get_mut(id).len = 0;
            self.directories.give(id);
        }
    }

    /// A child that has become small is joined with a neighbour if both are no more than three quarters of one.
    fn mend(&mut self, id: u32, height: u32, at: usize) {
        let most = if height == 1 { LEAF } else { FAN };
        let directory = self.directories.get(id);
        let count = self.count(directory.children[at], height - 1);
        if count > most / 3 {
            return;
        }
        if count == 0 {
            let child = directory.children[at];
            self.directories.get_mut(id).remove(at);
            self.free(child, height - 1);
            return;
        }
        for left in [at.checked_sub(1), Some(at)].into_iter().flatten() {
            let directory = self.directories.get(id);
            if left + 1 >= directory.len {
                continue;
            }
            let (a, b) = (directory.children[left], directory.children[left + 1]);
            let sum = self.count(a, height - 1) + self.count(b, height - 1);
            if sum > most * 3 / 4 {
                continue;
            }
            if height == 1 {
                let (low, high) = self.leaves.pair(a, b);
                low.append(high);
            } else {
                let separator = directory.separators[left + 1];
                let (low, high) = self.directories.pair(a, b);
                low.append(high, separator);
            }
            let directory = self.directories.get_mut(id);
            directory.ends[left] = directory.ends[left].max(directory.ends[left + 1]);
            directory.remove(left + 1);
            self.free(b, height - 1);
            return;
        }
    }

    /// Calls `f` for each entry that overlaps `first..end`, in order, behind those that another walk has seen, until it breaks.
    pub(crate) fn overlapping(
        &self,
        (first, end): (u64, u64),
        after: Cursor,
        mut f: impl FnMut(Interval, &V) -> ControlFlow<()>,
    ) {
        if self.len > 0 && first < end {
            let mut walk = Walk {
                set: self,
                first,
                end,
                after: after.0,
                f: &mut f,
            };
            let _ = walk.below(self.root, self.height);
        }
    }
}

/// How far a walk has come: to all entries with a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor(Option<Key>);

impl Cursor {
    /// Behind this one, and all that are like it but for the end.
    pub(crate) fn behind(interval: Interval) -> Self {
        Cursor(Some(interval.key()))
    }

    /// Whether an entry is still ahead.
    pub(crate) fn is_before(self, interval: Interval) -> bool {
        self.0.is_none_or(|key| interval.key() > key)
    }

    pub(crate) fn is_at(self, interval: Interval) -> bool {
        self.0 == Some(interval.key())
    }
}

struct Walk<'s, V, F> {
    set: &'s IntervalSet<V>,
    first: u64,
    end: u64,
    after: Option<Key>,
    f: &'s mut F,
}

impl<V, F: FnMut(Interval, &V) -> ControlFlow<()>> Walk<'_, V, F> {
    fn below(&mut self, id: u32, height: u32) -> ControlFlow<()> {
        if height == 0 {
            return self.leaf(id);
        }
        let directory = self.set.directories.get(id);
        for at in 0..directory.len {
            let next = directory.separators[..directory.len].get(at + 1);
            let is_seen = next.is_some_and(|next| self.after.is_some_and(|after| *next <= after));
            if is_seen || directory.ends[at] <= self.first {
                continue;
            }
            if at > 0 && directory.first(at) >= self.end {
                return ControlFlow::Break(());
            }
            self.below(directory.children[at], height - 1)?;
        }
        ControlFlow::Continue(())
    }

    fn leaf(&mut self, id: u32) -> ControlFlow<()> {
        let leaf = self.set.leaves.get(id);
        let (mut found, mut count) = ([(0, 0); LEAF], 0);
        for (at, (interval, _)) in leaf.entries().enumerate() {
            let is_ahead = self.after.is_none_or(|after| interval.key() > after);
            if is_ahead && interval.first < self.end && interval.end > self.first {
                found[count] = (interval.key(), at);
                count += 1;
            }
        }
        found[..count].sort_unstable();
        for (_, at) in &found[..count] {
            if let Some((interval, value)) = leaf.get(*at) {
                (self.f)(interval, value)?;
            }
        }
        ControlFlow::Continue(())
    }
}
