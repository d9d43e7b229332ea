//! What a contestant can do, and the loops that measure it.
//!
//! Loops are generic over the contestant, so that a lookup is compiled into its loop as in a user's program. A structure
//! whose readers need a guard or handle of their own gets it through [`Contestant::read`], which runs a whole [`ReadJob`].

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::harness::Span;
use super::sys;
use super::workload::{Rec, Workload, address, thirds};

/// What a lookup returns: the range that holds the address, and where its record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// First byte of the entry.
    pub start: u64,
    /// First byte past it.
    pub end: u64,
    /// Address of the record (not read: what a caller does with it isn't the index's cost).
    pub record: usize,
}

impl Hit {
    /// A hit on `start..end` with its record.
    #[inline(always)]
    pub fn new(start: u64, end: u64, record: &Rec) -> Self {
        Self {
            start,
            end,
            record: std::ptr::from_ref(record).addr(),
        }
    }

    /// One number that depends on all three.
    #[inline(always)]
    fn fold(self) -> u64 {
        self.start ^ self.end ^ self.record as u64
    }
}

/// One thread's way to look addresses up.
pub trait Find {
    /// The entry that contains `addr`.
    fn find(&mut self, addr: u64) -> Option<Hit>;
}

/// Something to do with a [`Find`], whatever its type.
pub trait ReadJob {
    /// What comes out.
    type Out;
    /// Does it.
    fn run(self, finder: &mut impl Find) -> Self::Out;
}

/// A structure that takes part.
pub trait Contestant: Sync + Sized {
    /// Name in rows and tables.
    const NAME: &'static str;

    /// Built from the sorted ranges, the fastest way it has.
    fn bulk(workload: &Workload) -> Self;

    /// Built by inserting the ranges one at a time in random order; `None` where that isn't of interest.
    fn grown(_workload: &Workload) -> Option<Self> {
        None
    }

    /// Runs `job` with this thread's reader.
    fn read<J: ReadJob>(&self, job: J) -> J::Out;
}

/// Edits, each complete (visible to readers) when it returns.
pub trait Edit {
    /// Takes out the entry at `range`.
    fn remove(&mut self, range: &Range<u64>);
    /// Puts in a new entry.
    fn insert(&mut self, range: &Range<u64>, rec: Rec);
    /// Splits the entry `whole` in three at `cuts`; the middle and the last get new records.
    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), recs: [Rec; 3]);
    /// Undoes [`split`](Self::split).
    fn join(&mut self, whole: &Range<u64>, cuts: (u64, u64), rec: Rec);
}

/// Something to do with an [`Edit`], whatever its type.
pub trait EditJob {
    /// What comes out.
    type Out;
    /// Does it.
    fn run(self, editor: &mut impl Edit) -> Self::Out;
}

/// A structure that can be edited.
pub trait Editable: Contestant {
    /// Whether lookups go on while another thread edits without pause (a lock over a whole series doesn't let them).
    const SURVIVES_WRITER: bool = true;

    /// Runs `job` with the writing side.
    fn edit<J: EditJob>(&self, job: J) -> J::Out;
}

/// Operations done and the time they took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// Operations.
    pub ops: u64,
    /// Time for all of them.
    pub elapsed: Duration,
}

impl Timing {
    /// Nanoseconds per operation.
    pub fn ns(self) -> f64 {
        self.elapsed.as_nanos() as f64 / self.ops.max(1) as f64
    }
}

/// Most operations between two looks at the clock.
const MAX_CHUNK: usize = 1024;

/// `over_list` twice: once to warm up, once to measure.
#[inline(always)]
pub fn warmed(
    list: &[u32],
    cursor: &mut usize,
    span: Span,
    mut step: impl FnMut(&[u32]),
) -> Timing {
    let mut timing = Timing::default();
    // One loop rather than two calls, so that `step` is compiled once.
    for budget in [span.warm_up, span.measured] {
        timing = over_list(list, cursor, budget, &mut step);
    }
    timing
}

/// Calls `step` with pieces of `list` as large as the budget allows, beginning at `*cursor` and wrapping round, until
/// the budget is used up.
#[inline(always)]
fn over_list(
    list: &[u32],
    cursor: &mut usize,
    budget: Duration,
    mut step: impl FnMut(&[u32]),
) -> Timing {
    let mut ops = 0;
    let mut chunk = 1;
    let mut before = Duration::ZERO;
    let begin = Instant::now();
    loop {
        let from = *cursor % list.len();
        let to = (from + chunk).min(list.len());
        step(&list[from..to]);
        ops += (to - from) as u64;
        *cursor = to;
        let elapsed = begin.elapsed();
        if elapsed >= budget {
            return Timing { ops, elapsed };
        }
        // Some structures take a thousand times longer now and then: pieces shrink again.
        let quick = elapsed.saturating_sub(before) < budget / 8;
        chunk = if quick {
            (chunk * 2).min(MAX_CHUNK)
        } else {
            (chunk / 2).max(1)
        };
        before = elapsed;
    }
}

/// How lookups follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Addresses are known beforehand: the processor overlaps lookups (throughput).
    Independent,
    /// The next address depends on what was found: no overlap (latency).
    Dependent,
}

impl Order {
    /// Name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Independent => "independent",
            Self::Dependent => "dependent",
        }
    }
}

/// Looks up the addresses of a list for a while.
#[derive(Debug)]
pub struct Lookups<'a> {
    /// Page numbers.
    pub pages: &'a [u32],
    /// Where in the list to begin; left where the job ended.
    pub cursor: &'a mut usize,
    /// How long.
    pub span: Span,
    /// In which way.
    pub order: Order,
}

impl ReadJob for Lookups<'_> {
    type Out = Timing;

    #[inline(always)]
    fn run(self, finder: &mut impl Find) -> Timing {
        match self.order {
            Order::Independent => warmed(self.pages, self.cursor, self.span, |pages| {
                let mut folded = 0;
                for &page in pages {
                    if let Some(hit) = finder.find(address(page)) {
                        folded ^= hit.fold();
                    }
                }
                black_box(folded);
            }),
            Order::Dependent => {
                // Zero, which the compiler can't know: the chain is real, the addresses are those of the list.
                let zero = black_box(0);
                warmed(self.pages, self.cursor, self.span, |pages| {
                    let mut found = 0;
                    for &page in pages {
                        let addr = address(page) ^ (found & zero);
                        found = finder.find(addr).map_or(0, Hit::fold);
                    }
                    black_box(found);
                })
            }
        }
    }
}

/// Looks addresses up, timing each call by itself; in between, the same loop with nothing in it.
#[derive(Debug)]
pub struct TimedLookups<'a> {
    /// Page numbers.
    pub pages: &'a [u32],
    /// Where in the list to begin; left where the job ended.
    pub cursor: &'a mut usize,
    /// How long.
    pub span: Span,
    /// Ticks per lookup.
    pub tail: &'a mut Histogram<u64>,
    /// Ticks per turn of the empty loop.
    pub control: &'a mut Histogram<u64>,
}

impl ReadJob for TimedLookups<'_> {
    type Out = ();

    fn run(self, finder: &mut impl Find) {
        let Self {
            pages,
            cursor,
            span,
            tail,
            control,
        } = self;
        over_list(pages, cursor, span.warm_up, |pages| {
            for &page in pages {
                black_box(finder.find(address(page)));
            }
        });
        over_list(pages, cursor, span.measured, |pages| {
            for &page in pages {
                let addr = black_box(address(page));
                let begin = sys::ticks();
                black_box(finder.find(addr));
                let end = sys::ticks();
                tail.saturating_record(end - begin);
            }
            for &page in pages {
                let addr = black_box(address(page));
                let begin = sys::ticks();
                black_box(addr);
                let end = sys::ticks();
                control.saturating_record(end - begin);
            }
        });
    }
}

/// An empty histogram for ticks, two digits exact.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 1 << 40, 2).expect("bounds are valid")
}

/// Removes random entries and puts them back, each with a new record.
#[derive(Debug)]
pub struct Pairs<'a> {
    /// The layout.
    pub workload: &'a Workload,
    /// Where in the list of picks to begin; left where the job ended.
    pub cursor: &'a mut usize,
    /// How long.
    pub span: Span,
}

impl EditJob for Pairs<'_> {
    type Out = Timing;

    #[inline(always)]
    fn run(self, editor: &mut impl Edit) -> Timing {
        let entries = &self.workload.entries;
        warmed(&self.workload.picks, self.cursor, self.span, |picks| {
            for &pick in picks {
                let range = &entries[pick as usize];
                editor.remove(range);
                editor.insert(range, Rec::new(u64::from(pick)));
            }
        })
    }
}

/// Splits random entries in three and joins them again.
#[derive(Debug)]
pub struct Splits<'a> {
    /// The layout.
    pub workload: &'a Workload,
    /// Where in the list of picks to begin; left where the job ended.
    pub cursor: &'a mut usize,
    /// How long.
    pub span: Span,
}

/// Ids of records that a split makes, apart from those of whole entries.
const MIDDLE: u64 = 1 << 40;
/// The same for the last third.
const LAST: u64 = 1 << 41;

impl EditJob for Splits<'_> {
    type Out = Timing;

    #[inline(always)]
    fn run(self, editor: &mut impl Edit) -> Timing {
        let entries = &self.workload.entries;
        warmed(&self.workload.picks, self.cursor, self.span, |picks| {
            for &pick in picks {
                let (id, range) = (u64::from(pick), &entries[pick as usize]);
                let cuts = thirds(range);
                editor.split(
                    range,
                    cuts,
                    [Rec::new(id), Rec::new(MIDDLE | id), Rec::new(LAST | id)],
                );
                editor.join(range, cuts, Rec::new(id));
            }
        })
    }
}

/// Edits without end until told to stop: the hot writer.
#[derive(Debug)]
pub struct PairsUntil<'a> {
    /// The layout.
    pub workload: &'a Workload,
    /// Set when the writer is to stop. Relaxed suffices: nothing is published with it.
    pub stop: &'a std::sync::atomic::AtomicBool,
    /// Counts the pairs done. Relaxed: a statistic.
    pub done: &'a std::sync::atomic::AtomicU64,
}

impl EditJob for PairsUntil<'_> {
    type Out = ();

    fn run(self, editor: &mut impl Edit) {
        use std::sync::atomic::Ordering::Relaxed;
        let entries = &self.workload.entries;
        let mut picks = self.workload.picks.iter().cycle();
        while !self.stop.load(Relaxed) {
            let Some(&pick) = picks.next() else { return };
            let range = &entries[pick as usize];
            editor.remove(range);
            editor.insert(range, Rec::new(u64::from(pick)));
            self.done.fetch_add(1, Relaxed);
        }
    }
}
