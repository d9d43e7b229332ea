//! The index of one file alone: an entry comes and goes, by the functions that map and unmap use.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use vma_core::PublishError;
use vma_core::bench::IndexBench;

use crate::peers::harness::Span;

const PAGE: u64 = 4096;
/// Entries that come before they go again, as those of a program do.
pub(super) const BATCH: usize = 32;
/// Places that entries come to; a power of two.
const PLACES: usize = 4096;
/// Pages of a mapping that many spaces have.
const SHARED: Range<u64> = 16..48;

/// How the mappings of a file lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Each another page, all in one space.
    Pages,
    /// All the same pages at the same address, each in another space.
    Spaces,
}

impl Shape {
    pub(super) const ALL: [Shape; 2] = [Shape::Pages, Shape::Spaces];

    pub(super) fn name(self) -> &'static str {
        match self {
            Shape::Pages => "each another page",
            Shape::Spaces => "the same pages in many spaces",
        }
    }

    /// What is there all the time.
    fn standing(self, count: usize) -> impl Iterator<Item = Mapping> {
        (0..count).map(move |at| match self {
            Shape::Pages => Mapping::of_page(2 * at as u64),
            Shape::Spaces => Mapping {
                space: BATCH + at,
                pages: SHARED,
                addr: 0x7000_0000,
            },
        })
    }

    /// What comes and goes: anywhere between, a batch of them each another.
    fn coming(self, count: usize) -> Vec<Mapping> {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let places = (0..PLACES).map(|at| {
            let random = random.next();
            match self {
                Shape::Pages => Mapping {
                    // Two in one page aren't at one address.
                    addr: (1 << 40) + at as u64 * PAGE,
                    ..Mapping::of_page(random % count.max(1) as u64 * 2 + 1)
                },
                Shape::Spaces => Mapping {
                    space: at % BATCH,
                    pages: SHARED,
                    addr: random % (1 << 47) / PAGE * PAGE,
                },
            }
        });
        places.collect()
    }
}

/// Numbers that look random, the same in each run (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Pages of the file that a space shows at an address.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapping {
    space: usize,
    pages: Range<u64>,
    addr: u64,
}

impl Mapping {
    fn of_page(page: u64) -> Self {
        Mapping {
            space: 0,
            pages: page..page + 1,
            addr: (1 << 30) + page * PAGE,
        }
    }
}

/// What holds mappings.
trait Index {
    fn enter(&self, mapping: &Mapping) -> Result<(), PublishError>;
    fn leave(&self, mapping: &Mapping);
}

impl Index for IndexBench {
    #[inline]
    fn enter(&self, mapping: &Mapping) -> Result<(), PublishError> {
        self.link(mapping.space, mapping.pages.clone(), mapping.addr)
    }

    #[inline]
    fn leave(&self, mapping: &Mapping) {
        self.unlink(mapping.space, mapping.pages.clone(), mapping.addr);
    }
}

/// What one would use instead: sorted by first page, so that it can't say which mappings show a page without looking at all before it.
struct Plain {
    map: RwLock<BTreeMap<(u64, u64, usize), Entry>>,
    spaces: Vec<Arc<u64>>,
}

struct Entry {
    _end: u64,
    _space: Weak<u64>,
}

impl Index for Plain {
    #[inline]
    fn enter(&self, mapping: &Mapping) -> Result<(), PublishError> {
        let entry = Entry {
            _end: mapping.pages.end,
            _space: Arc::downgrade(&self.spaces[mapping.space]),
        };
        let key = (mapping.pages.start, mapping.addr, mapping.space);
        self.map.write().insert(key, entry);
        Ok(())
    }

    #[inline]
    fn leave(&self, mapping: &Mapping) {
        let key = (mapping.pages.start, mapping.addr, mapping.space);
        let gone = self.map.write().remove(&key);
        drop(gone);
    }
}

/// An index with what is there all the time, and what comes and goes.
pub(super) struct Contender {
    index: Box<dyn Batches>,
    coming: Vec<Mapping>,
    next: usize,
}

/// One dynamic call per batch.
trait Batches {
    fn batch(&self, batch: &[Mapping]) -> Result<(), PublishError>;
}

impl<I: Index> Batches for I {
    fn batch(&self, batch: &[Mapping]) -> Result<(), PublishError> {
        for mapping in batch {
            self.enter(mapping)?;
        }
        for mapping in batch {
            self.leave(mapping);
        }
        Ok(())
    }
}

impl Contender {
    fn new(
        index: impl Index + 'static,
        shape: Shape,
        count: usize,
    ) -> Result<Contender, PublishError> {
        for mapping in shape.standing(count) {
            index.enter(&mapping)?;
        }
        Ok(Contender {
            index: Box::new(index),
            coming: shape.coming(count),
            next: 0,
        })
    }

    /// The library's.
    pub(super) fn ours(shape: Shape, count: usize) -> Result<Contender, PublishError> {
        Self::new(IndexBench::new(BATCH + count), shape, count)
    }

    /// A [`BTreeMap`] behind a lock.
    pub(super) fn plain(shape: Shape, count: usize) -> Result<Contender, PublishError> {
        let plain = Plain {
            map: RwLock::default(),
            spaces: (0..(BATCH + count) as u64).map(Arc::new).collect(),
        };
        Self::new(plain, shape, count)
    }

    /// Nanoseconds that an entry takes to come and go.
    pub(super) fn pair(&mut self, span: Span) -> Result<f64, PublishError> {
        self.pairs_for(span.warm_up)?;
        self.pairs_for(span.measured)
    }

    fn pairs_for(&mut self, time: Duration) -> Result<f64, PublishError> {
        let (begin, mut count) = (Instant::now(), 0);
        loop {
            let at = self.next % PLACES;
            self.index.batch(&self.coming[at..at + BATCH])?;
            self.next = at + BATCH;
            count += BATCH;
            let elapsed = begin.elapsed();
            if elapsed >= time {
                return Ok(elapsed.as_nanos() as f64 / count as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_comes_is_never_what_is_there() {
        for shape in Shape::ALL {
            let key = |mapping: &Mapping| (mapping.space, mapping.pages.start, mapping.addr);
            let standing: BTreeSet<_> = shape.standing(100).map(|mapping| key(&mapping)).collect();
            assert_eq!(standing.len(), 100);
            let coming = shape.coming(100);
            assert!(
                coming
                    .iter()
                    .all(|mapping| !standing.contains(&key(mapping)))
            );
            for batch in coming.chunks(BATCH) {
                let distinct: BTreeSet<_> = batch.iter().map(key).collect();
                assert_eq!(distinct.len(), BATCH, "{shape:?}");
            }
        }
    }

    #[test]
    fn what_has_come_goes_again() {
        for shape in Shape::ALL {
            let (ours, coming) = (IndexBench::new(BATCH + 10), shape.coming(10));
            for mapping in shape.standing(10) {
                ours.enter(&mapping).unwrap();
            }
            for batch in coming.chunks(BATCH) {
                ours.batch(batch).unwrap();
            }
            assert_eq!(ours.count(), 10, "{shape:?}");
            let span = Span {
                warm_up: Duration::ZERO,
                measured: Duration::ZERO,
            };
            let mut plain = Contender::plain(shape, 10).unwrap();
            assert!(plain.pair(span).unwrap() > 0.0 && plain.next == 2 * BATCH);
        }
    }
}
