//! The nodes, each by itself.

use super::arena::Node;
use super::{FAN, Interval, Key, LEAF};

/// Entries, in no order: so one that comes goes behind the others, and one that goes leaves its place to the last. Walks sort them.
#[derive(Debug)]
pub(crate) struct Leaf<V> {
    pub(super) len: usize,
    pub(super) keys: [Key; LEAF],
    pub(super) ends: [u64; LEAF],
    pub(super) values: [Option<V>; LEAF],
}

/// Children in order.
#[derive(Debug)]
pub(crate) struct Directory {
    pub(super) len: usize,
    pub(super) separators: [Key; FAN],
    pub(super) ends: [u64; FAN],
    pub(super) children: [u32; FAN],
}

/// What a directory says of a child.
#[derive(Clone, Copy)]
pub(super) struct Child {
    pub(super) separator: Key,
    pub(super) end: u64,
    pub(super) id: u32,
}

impl<V> Node for Leaf<V> {
    fn vacant() -> Self {
        Leaf {
            len: 0,
            keys: [0; LEAF],
            ends: [0; LEAF],
            values: [const { None }; LEAF],
        }
    }
}

impl Node for Directory {
    fn vacant() -> Self {
        Directory {
            len: 0,
            separators: [0; FAN],
            ends: [0; FAN],
            children: [0; FAN],
        }
    }
}

fn greatest(ends: &[u64]) -> u64 {
    ends.iter().copied().max().unwrap_or(0)
}

impl<V> Leaf<V> {
    fn push(&mut self, key: Key, end: u64, value: Option<V>) {
        self.keys[self.len] = key;
        self.ends[self.len] = end;
        self.values[self.len] = value;
        self.len += 1;
    }

    pub(super) fn insert(&mut self, interval: Interval, value: V) {
        self.push(interval.key(), interval.end, Some(value));
    }

    pub(super) fn remove(&mut self, interval: Interval, is: &impl Fn(&V) -> bool) -> Option<V> {
        let key = interval.key();
        let at = (0..self.len).find(|at| {
            self.keys[*at] == key
                && self.ends[*at] == interval.end
                && self.values[*at].as_ref().is_some_and(is)
        })?;
        self.len -= 1;
        let value = self.values[at].take();
        if at < self.len {
            self.keys[at] = self.keys[self.len];
            self.ends[at] = self.ends[self.len];
            self.values[at] = self.values[self.len].take();
        }
        value
    }

    pub(super) fn append(&mut self, from: &mut Self) {
        for at in 0..from.len {
            self.push(from.keys[at], from.ends[at], from.values[at].take());
        }
        from.len = 0;
    }

    /// The upper half goes into an empty one. The least key of that.
    pub(super) fn split(&mut self, into: &mut Self) -> Key {
        let mut order: [(Key, usize); LEAF] = std::array::from_fn(|at| (self.keys[at], at));
        let order = &mut order[..self.len];
        let (_, middle, _) = order.select_nth_unstable(self.len / 2);
        let middle = *middle;
        let (old, mut kept) = (self.len, 0);
        self.len = 0;
        for at in 0..old {
            let (key, end, value) = (self.keys[at], self.ends[at], self.values[at].take());
            if (key, at) < middle {
                self.keys[kept] = key;
                self.ends[kept] = end;
                self.values[kept] = value;
                kept += 1;
            } else {
                into.push(key, end, value);
            }
        }
        self.len = kept;
        middle.0
    }

    pub(super) fn greatest_end(&self) -> u64 {
        greatest(&self.ends[..self.len])
    }
}

/// Puts an item at `at` of the first `len`, and moves those behind it.
fn put<T: Copy>(items: &mut [T], len: usize, at: usize, item: T) {
    items.copy_within(at..len, at + 1);
    items[at] = item;
}

/// The reverse.
fn pull<T: Copy>(items: &mut [T], len: usize, at: usize) {
    items.copy_within(at + 1..len, at);
}

impl Directory {
    /// The last child whose separator isn't above a key.
    pub(super) fn place(&self, key: Key) -> usize {
        let above = self.separators[..self.len].partition_point(|other| *other <= key);
        above.saturating_sub(1)
    }

    pub(super) fn insert(&mut self, at: usize, child: Child) {
        put(&mut self.separators, self.len, at, child.separator);
        put(&mut self.ends, self.len, at, child.end);
        put(&mut self.children, self.len, at, child.id);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, at: usize) {
        pull(&mut self.separators, self.len, at);
        pull(&mut self.ends, self.len, at);
        pull(&mut self.children, self.len, at);
        self.len -= 1;
    }

    /// `separator` is the bound of the other.
    pub(super) fn append(&mut self, from: &mut Self, separator: Key) {
        // That of its first child isn't one.
        from.separators[0] = separator;
        let (to, count) = (self.len..self.len + from.len, from.len);
        self.separators[to.clone()].copy_from_slice(&from.separators[..count]);
        self.ends[to.clone()].copy_from_slice(&from.ends[..count]);
        self.children[to].copy_from_slice(&from.children[..count]);
        self.len += count;
        from.len = 0;
    }

    /// The upper half goes into an empty one.
    pub(super) fn split(&mut self, into: &mut Self) {
        let from = self.len / 2..self.len;
        let count = from.len();
        into.separators[..count].copy_from_slice(&self.separators[from.clone()]);
        into.ends[..count].copy_from_slice(&self.ends[from.clone()]);
        into.children[..count].copy_from_slice(&self.children[from.clone()]);
        (self.len, into.len) = (from.start, count);
    }

    pub(super) fn greatest_end(&self) -> u64 {
        greatest(&self.ends[..self.len])
    }
}
