//! The practical limit of a lookup: a static, perfectly packed search tree of fan-out 16 under the same pin.
//!
//! It can't be edited, and so spares everything that edits cost readers: child pointers (children are where arithmetic
//! says), half-full nodes, acquire loads. Each level holds the separators of its nodes, two cache lines per node; the
//! leaf holds starts (two lines), then end and record side by side (one line per lookup).

use vma_rcu::reclaim::{Domain, Reader as PinReader};

use crate::peers::contest::{Contestant, Find, Hit, ReadJob};
use crate::peers::workload::{Rec, Workload};

mod rank;
use rank::{FANOUT, Keys, rank};

/// What a leaf says of an entry apart from its start.
#[derive(Debug)]
struct Tail {
    end: u64,
    /// `None` pads the last leaf; its key is then `u64::MAX >> 1`, past every address.
    record: Option<Box<Rec>>,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct Leaf {
    starts: Keys,
    tails: [Tail; FANOUT],
}

/// The tree, and the domain that its readers pin although nothing is ever freed.
#[derive(Debug)]
pub struct Limit {
    domain: Domain,
    /// Root first. Node `i` of a level has the nodes `16 i ..` of the next one as children.
    inner: Vec<Box<[Keys]>>,
    leaves: Box<[Leaf]>,
}

impl Limit {
    fn new(workload: &Workload) -> Self {
        let leaves: Box<[Leaf]> = workload
            .entries
            .chunks(FANOUT)
            .zip(0..)
            .map(|(chunk, i)| leaf(chunk, i))
            .collect();
        let mut firsts: Vec<u64> = leaves.iter().map(|leaf| leaf.starts.first()).collect();
        let mut inner = Vec::new();
        while firsts.len() > 1 {
            inner.push(
                firsts
                    .chunks(FANOUT)
                    .map(separators)
                    .collect::<Box<[Keys]>>(),
            );
            firsts = firsts.chunks(FANOUT).map(|chunk| chunk[0]).collect();
        }
        inner.reverse();
        Self {
            domain: Domain::default(),
            inner,
            leaves,
        }
    }

    #[inline(always)]
    fn find(&self, addr: u64) -> Option<Hit> {
        let mut node = 0;
        for level in &self.inner {
            node = node * FANOUT + rank(level.get(node)?, addr);
        }
        let leaf = self.leaves.get(node)?;
        let index = rank(&leaf.starts, addr).checked_sub(1)?;
        let tail = leaf.tails.get(index)?;
        if addr >= tail.end {
            return None;
        }
        Some(Hit::new(
            leaf.starts.get(index),
            tail.end,
            tail.record.as_deref()?,
        ))
    }
}

/// The starts of `chunk`'s entries, which begin with number `16 i`, and their records.
fn leaf(chunk: &[std::ops::Range<u64>], i: u64) -> Leaf {
    let mut records = (i * FANOUT as u64..).map(|id| Box::new(Rec::new(id)));
    Leaf {
        starts: Keys::padded(chunk.iter().map(|range| range.start)),
        tails: std::array::from_fn(|k| match chunk.get(k) {
            Some(range) => Tail {
                end: range.end,
                record: records.next(),
            },
            None => Tail {
                end: 0,
                record: None,
            },
        }),
    }
}

/// What separates the children whose first keys are `firsts`: all but the first of them.
fn separators(firsts: &[u64]) -> Keys {
    Keys::padded(firsts[1..].iter().copied())
}

impl Contestant for Limit {
    const NAME: &'static str = "static limit";

    fn bulk(workload: &Workload) -> Self {
        Self::new(workload)
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        let pins = self.domain.register();
        job.run(&mut Reader { limit: self, pins })
    }
}

struct Reader<'a> {
    limit: &'a Limit,
    pins: PinReader,
}

impl Find for Reader<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let _guard = self.pins.pin();
        self.limit.find(addr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_bisection_finds_at_every_height() {
        for count in [1, 15, 16, 17, 255, 256, 257, 4096, 5000] {
            let w = Workload::new(count);
            let limit = Limit::new(&w);
            let borders = w
                .entries
                .iter()
                .flat_map(|e| [e.start - 1, e.start, e.end - 1, e.end]);
            for addr in borders.chain([0, w.end() + 1]) {
                let at = w.entries.partition_point(|e| e.start <= addr);
                let want = at
                    .checked_sub(1)
                    .map(|i| &w.entries[i])
                    .filter(|e| e.contains(&addr));
                let got = limit.find(addr);
                assert_eq!(
                    got.map(|hit| hit.start..hit.end),
                    want.cloned(),
                    "{addr:#x} of {count}"
                );
            }
        }
    }
}
