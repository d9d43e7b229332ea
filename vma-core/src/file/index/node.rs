//! The nodes, each by itself.

use std::mem;

use super::arena::Node;
use super::{FAN, Interval, Key, LEAF};

/// Entries, in no order: so one that comes goes behind the others, and one that goes leaves its place to the last. Walks sort them.
///
/// One is looked for by a byte of a hash of its key. In a large set each line of memory has to be fetched: two are enough, the one with
/// the tags and that of the entry.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Leaf<V> {
    len: u8,
    tags: [u8; TAGS],
    entries: [Entry<V>; LEAF],
}

#[derive(Debug)]
#[repr(align(32))]
struct Entry<V> {
    interval: Interval,
    value: Option<V>,
}

impl<V> Entry<V> {
    const VACANT: Self = Entry {
        interval: Interval {
            first: 0,
            tie: 0,
            end: 0,
        },
        value: None,
    };
}

/// Whole words of eight.
const TAGS: usize = LEAF.next_multiple_of(8);

const _: () = assert!(LEAF <= u8::MAX as usize);

fn first_of(key: Key) -> u64 {
    (key >> 64) as u64
}

fn tag(key: Key) -> u8 {
    let mixed = (first_of(key) ^ key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// Children in order.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Directory {
    pub(super) len: usize,
    /// The separators' first pages, which mostly suffice: half as much to be read.
    firsts: [u64; FAN],
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
            tags: [0; TAGS],
            entries: [const { Entry::VACANT }; LEAF],
        }
    }
}

impl Node for Directory {
    fn vacant() -> Self {
        Directory {
            len: 0,
            firsts: [0; FAN],
            separators: [0; FAN],
            ends: [0; FAN],
            children: [0; FAN],
        }
    }
}

impl<V> Leaf<V> {
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    /// Those that there are.
    pub(super) fn entries(&self) -> impl Iterator<Item = (Interval, &V)> {
        let entries = self.entries[..self.len()].iter();
        entries.filter_map(|entry| Some((entry.interval, entry.value.as_ref()?)))
    }

    /// One by its place in [`entries`](Self::entries).
    pub(super) fn get(&self, at: usize) -> Option<(Interval, &V)> {
        let entry = &self.entries[at];
        Some((entry.interval, entry.value.as_ref()?))
    }

    fn put(&mut self, at: usize, entry: Entry<V>) {
        self.tags[at] = tag(entry.interval.key());
        self.entries[at] = entry;
    }

    fn take(&mut self, at: usize) -> Entry<V> {
        mem::replace(&mut self.entries[at], Entry::VACANT)
    }

    fn push(&mut self, entry: Entry<V>) {
        self.put(self.len(), entry);
        self.len += 1;
    }

    pub(super) fn insert(&mut self, interval: Interval, value: V) {
        self.push(Entry {
            interval,
            value: Some(value),
        });
    }

    pub(super) fn remove(&mut self, interval: Interval, is: &impl Fn(&V) -> bool) -> Option<V> {
        let at = self.find(interval, is)?;
        self.len -= 1;
        let last = self.take(self.len());
        if at == self.len() {
            return last.value;
        }
        let value = self.entries[at].value.take();
        self.put(at, last);
        value
    }

    fn find(&self, interval: Interval, is: &impl Fn(&V) -> bool) -> Option<usize> {
        const ONES: u64 = 0x0101_0101_0101_0101;
        const TOPS: u64 = ONES << 7;
        let pattern = u64::from(tag(interval.key())) * ONES;
        for (word, tags) in self.tags.as_chunks().0.iter().enumerate() {
            let differing = u64::from_le_bytes(*tags) ^ pattern;
            // The top bits of bytes that are 0, and perhaps of some above the lowest of those.
            let mut zeros = differing.wrapping_sub(ONES) & !differing & TOPS;
            while zeros != 0 {
                let at = word * 8 + zeros.trailing_zeros() as usize / 8;
                if at < self.len()
                    && self.entries[at].interval == interval
                    && self.entries[at].value.as_ref().is_some_and(is)
                {
                    return Some(at);
                }
                zeros &= zeros - 1;
            }
        }
        None
    }

    pub(super) fn append(&mut self, from: &mut Self) {
        for at in 0..from.len() {
            let entry = from.take(at);
            self.push(entry);
        }
        from.len = 0;
    }

    /// The upper half goes into an empty one. The least key of that.
    pub(super) fn split(&mut self, into: &mut Self) -> Key {
        let mut order: [(Key, usize); LEAF] =
            std::array::from_fn(|at| (self.entries[at].interval.key(), at));
        let order = &mut order[..self.len()];
        let (_, middle, _) = order.select_nth_unstable(self.len() / 2);
        let middle = *middle;
        let old = mem::take(&mut self.len);
        for at in 0..old.into() {
            let entry = self.take(at);
            if (entry.interval.key(), at) < middle {
                self.push(entry);
            } else {
                into.push(entry);
            }
        }
        middle.0
    }

    pub(super) fn greatest_end(&self) -> u64 {
        let entries = self.entries[..self.len()].iter();
        entries.map(|entry| entry.interval.end).max().unwrap_or(0)
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
    /// The last child whose separator isn't above a key; the first one's isn't asked, since it may have been that of another.
    pub(super) fn place(&self, key: Key) -> usize {
        let first = first_of(key);
        let (firsts, separators) = (&self.firsts[1..self.len], &self.separators[1..self.len]);
        let less: usize = firsts.iter().map(|other| usize::from(*other < first)).sum();
        let alike = firsts[less..].iter().take_while(|other| **other == first);
        let ties = alike.zip(&separators[less..]);
        less + ties.take_while(|(_, other)| **other <= key).count()
    }

    /// Where the walk of a range ends: from here on children begin behind it.
    pub(super) fn first(&self, at: usize) -> u64 {
        self.firsts[at]
    }

    pub(super) fn insert(&mut self, at: usize, child: Child) {
        put(&mut self.firsts, self.len, at, first_of(child.separator));
        put(&mut self.separators, self.len, at, child.separator);
        put(&mut self.ends, self.len, at, child.end);
        put(&mut self.children, self.len, at, child.id);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, at: usize) {
        pull(&mut self.firsts, self.len, at);
        pull(&mut self.separators, self.len, at);
        pull(&mut self.ends, self.len, at);
        pull(&mut self.children, self.len, at);
        self.len -= 1;
    }

    /// `separator` is the bound of the other.
    pub(super) fn append(&mut self, from: &mut Self, separator: Key) {
        // That of its first child isn't one.
        from.separators[0] = separator;
        from.firsts[0] = first_of(separator);
        let (to, count) = (self.len..self.len + from.len, from.len);
        self.firsts[to.clone()].copy_from_slice(&from.firsts[..count]);
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
        into.firsts[..count].copy_from_slice(&self.firsts[from.clone()]);
        into.separators[..count].copy_from_slice(&self.separators[from.clone()]);
        into.ends[..count].copy_from_slice(&self.ends[from.clone()]);
        into.children[..count].copy_from_slice(&self.children[from.clone()]);
        (self.len, into.len) = (from.start, count);
    }

    pub(super) fn has_end(&self, end: u64) -> bool {
        self.ends[..self.len].contains(&end)
    }

    pub(super) fn greatest_end(&self) -> u64 {
        self.ends[..self.len].iter().copied().max().unwrap_or(0)
    }
}
