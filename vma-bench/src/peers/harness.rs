//! Interleaved rounds: in each round every contender takes one sample, so that drift of the machine hits all alike.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::contest::{
    Contestant, Editable, Find, Lookups, Order, Pairs, PairsUntil, ReadJob, Splits, TimedLookups,
    Timing,
};
use super::sys::{self, Seat};
use super::workload::Workload;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Rounds that count.
    pub rounds: usize,
    /// Rounds before them that don't.
    pub warm_up: usize,
    /// How long each sample is.
    pub span: Span,
}

/// One sample: the contender's data is brought into the caches first, since the others have just used them.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// The same work, not counted.
    pub warm_up: Duration,
    /// The work that counts.
    pub measured: Duration,
}

/// Takes one sample of one contender: nanoseconds per operation.
pub type Sample<'a> = Box<dyn FnMut() -> f64 + 'a>;

/// Runs the rounds; the samples of contender `i` are in element `i`. Every round begins with another contender.
pub fn rounds(contenders: &mut [Sample<'_>], effort: Effort) -> Vec<Vec<f64>> {
    let count = contenders.len();
    let mut samples = vec![Vec::with_capacity(effort.rounds); count];
    for round in 0..effort.warm_up + effort.rounds {
        for turn in 0..count {
            let who = (turn + round) % count;
            let ns = contenders[who]();
            if round >= effort.warm_up {
                samples[who].push(ns);
            }
        }
    }
    samples
}

/// How a structure came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// From the sorted sequence.
    Bulk,
    /// By random insertion.
    Grown,
}

impl Build {
    /// Name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bulk => "bulk",
            Self::Grown => "grown",
        }
    }
}

/// Ticks of single lookups, and of the control loop between them.
#[derive(Debug)]
pub struct Tails {
    /// Lookups.
    pub lookup: Histogram<u64>,
    /// Empty turns.
    pub control: Histogram<u64>,
}

impl Default for Tails {
    fn default() -> Self {
        Self {
            lookup: super::contest::histogram(),
            control: super::contest::histogram(),
        }
    }
}

/// A contestant made ready to be measured, whatever its type: one dynamic call per sample.
pub trait Entrant: Sync {
    /// The contestant's name.
    fn name(&self) -> &'static str;
    /// How it was built.
    fn build(&self) -> Build;
    /// Bytes allocated per entry once it was built.
    fn bytes_per_entry(&self) -> f64;
    /// Nanoseconds per lookup, one or two threads at it.
    fn lookups(&self, order: Order, threads: usize, span: Span) -> f64;
}

/// An entrant that can be edited.
pub trait EditEntrant: Entrant {
    /// Nanoseconds per removal of an entry and its insertion.
    fn pairs(&self, span: Span) -> f64;
    /// Nanoseconds per split in three and the way back.
    fn splits(&self, span: Span) -> f64;
    /// Nanoseconds per independent lookup beside a thread that does nothing but pairs.
    fn lookups_beside_writer(&self, span: Span) -> f64;
    /// Whether readers get anything done beside a thread that writes without pause.
    fn survives_writer(&self) -> bool;
    /// Times single lookups, alone or beside that thread.
    fn tails(&self, beside_writer: bool, span: Span, tails: &mut Tails);
}

/// The one implementation of [`Entrant`].
#[derive(Debug)]
pub struct Subject<'w, C> {
    inner: C,
    workload: &'w Workload,
    build: Build,
    bytes: f64,
    /// Where each thread goes on in the list of pages. Relaxed: each is used by one thread at a time.
    pages: [AtomicUsize; 2],
    /// The same for edits.
    picks: AtomicUsize,
}

impl<'w, C: Contestant> Subject<'w, C> {
    /// Builds the contestant, counting its memory; `None` if it can't be built so.
    pub fn new(workload: &'w Workload, build: Build) -> Option<Self> {
        let (inner, bytes) = sys::live_bytes(|| match build {
            Build::Bulk => Some(C::bulk(workload)),
            Build::Grown => C::grown(workload),
        });
        Some(Self {
            inner: inner?,
            workload,
            build,
            bytes: bytes as f64 / workload.len().max(1) as f64,
            pages: [
                AtomicUsize::new(0),
                AtomicUsize::new(workload.pages.len() / 2),
            ],
            picks: AtomicUsize::new(0),
        })
    }

    /// Runs independent or dependent lookups on this thread; `start` is waited for once the reader is ready.
    fn look_up(&self, seat: usize, order: Order, span: Span, start: &Barrier) -> Timing {
        let mut cursor = self.pages[seat].load(Ordering::Relaxed);
        let job = Lookups {
            pages: &self.workload.pages,
            cursor: &mut cursor,
            span,
            order,
        };
        let timing = self.inner.read(Together { job, start });
        self.pages[seat].store(cursor, Ordering::Relaxed);
        timing
    }
}

/// A job that begins when all threads are ready.
struct Together<'b, J> {
    job: J,
    start: &'b Barrier,
}

impl<J: ReadJob> ReadJob for Together<'_, J> {
    type Out = J::Out;

    #[inline(always)]
    fn run(self, finder: &mut impl Find) -> J::Out {
        self.start.wait();
        self.job.run(finder)
    }
}

impl<C: Contestant> Entrant for Subject<'_, C> {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn build(&self) -> Build {
        self.build
    }

    fn bytes_per_entry(&self) -> f64 {
        self.bytes
    }

    fn lookups(&self, order: Order, threads: usize, span: Span) -> f64 {
        let start = Barrier::new(threads);
        if threads < 2 {
            return self.look_up(0, order, span, &start).ns();
        }
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                sys::sit(Seat::Second);
                self.look_up(1, order, span, &start)
            });
            let mine = self.look_up(0, order, span, &start).ns();
            // A panic over there has been reported; its sample is lost.
            other
                .join()
                .map_or(mine, |theirs| f64::midpoint(mine, theirs.ns()))
        })
    }
}

impl<C: Editable> Subject<'_, C> {
    /// Runs `read` while another thread does pairs without pause.
    fn beside_writer<T>(&self, read: impl FnOnce() -> T) -> T {
        let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                sys::sit(Seat::Second);
                self.inner.edit(PairsUntil {
                    workload: self.workload,
                    stop: &stop,
                    done: &done,
                });
            });
            while done.load(Ordering::Relaxed) == 0 && !writer.is_finished() {
                std::hint::spin_loop();
            }
            let out = read();
            stop.store(true, Ordering::Relaxed);
            out
        })
    }
}

impl<C: Editable> EditEntrant for Subject<'_, C> {
    fn pairs(&self, span: Span) -> f64 {
        let mut cursor = self.picks.load(Ordering::Relaxed);
        let timing = self.inner.edit(Pairs {
            workload: self.workload,
            cursor: &mut cursor,
            span,
        });
        self.picks.store(cursor, Ordering::Relaxed);
        timing.ns()
    }

    fn splits(&self, span: Span) -> f64 {
        let mut cursor = self.picks.load(Ordering::Relaxed);
        let timing = self.inner.edit(Splits {
            workload: self.workload,
            cursor: &mut cursor,
            span,
        });
        self.picks.store(cursor, Ordering::Relaxed);
        timing.ns()
    }

    fn survives_writer(&self) -> bool {
        C::SURVIVES_WRITER
    }

    fn lookups_beside_writer(&self, span: Span) -> f64 {
        self.beside_writer(|| {
            self.look_up(0, Order::Independent, span, &Barrier::new(1))
                .ns()
        })
    }

    fn tails(&self, beside_writer: bool, span: Span, tails: &mut Tails) {
        let mut cursor = self.pages[0].load(Ordering::Relaxed);
        let mut read = || {
            self.inner.read(TimedLookups {
                pages: &self.workload.pages,
                cursor: &mut cursor,
                span,
                tail: &mut tails.lookup,
                control: &mut tails.control,
            });
        };
        if beside_writer {
            self.beside_writer(read);
        } else {
            read();
        }
        self.pages[0].store(cursor, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn every_contender_samples_in_every_round_and_none_is_always_first() {
        let order = RefCell::new(Vec::new());
        let order = &order;
        let mut contenders: Vec<Sample<'_>> = (0..3u8)
            .map(|who| {
                Box::new(move || {
                    order.borrow_mut().push(who);
                    f64::from(who)
                }) as Sample<'_>
            })
            .collect();
        let effort = Effort {
            rounds: 2,
            warm_up: 1,
            span: Span {
                warm_up: Duration::ZERO,
                measured: Duration::ZERO,
            },
        };
        let samples = rounds(&mut contenders, effort);
        assert_eq!(samples, [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]);
        assert_eq!(*order.borrow(), [0, 1, 2, 1, 2, 0, 2, 0, 1]);
    }
}
