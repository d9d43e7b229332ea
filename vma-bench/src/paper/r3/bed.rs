//! A system full of spaces, who looks at them, and who creates and ends others meanwhile.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vma_core::{
    CreateError, Domain, MapError, MapRequest, Prot, Reader, SpaceConfig, SpaceHandle, SpaceRef,
    System, VmaRef,
};
use vma_rcu::tree::{EditError, RangeTree, Record, Writer};

use super::Way;
use crate::peers::harness::Span;
use crate::peers::sys::{Seat, sit};

const PAGE: u64 = 4096;
/// How often a space comes and goes beside.
const CHURN: Duration = Duration::from_micros(500);

/// Why it can't be measured.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says all there is")]
pub enum R3Error {
    #[error("creating a space: {0}")]
    Create(#[from] CreateError),
    #[error("mapping: {0}")]
    Map(#[from] MapError),
    #[error("making a tree: {0}")]
    Tree(#[from] EditError),
}

struct Number;

impl Record for Number {}

/// See the [module](self).
pub(super) struct Bed {
    system: System,
    spaces: Vec<SpaceHandle>,
    numbers: RangeTree<Number>,
    domain: Domain,
    _writer: Writer<Number>,
}

fn populated(system: &System) -> Result<SpaceHandle, R3Error> {
    let space = system.create(SpaceConfig::default(), ())?;
    for prot in [Prot::READ, Prot::READ | Prot::WRITE, Prot::empty()] {
        space.map(&MapRequest::anonymous(PAGE, prot))?;
    }
    Ok(space)
}

impl Bed {
    pub(super) fn new(count: usize) -> Result<Self, R3Error> {
        let system = System::default();
        let spaces = (0..count).map(|_| populated(&system));
        let spaces = spaces.collect::<Result<Vec<_>, _>>()?;
        let domain = Domain::default();
        let (numbers, mut writer) = RangeTree::new(&domain);
        let entries = spaces.iter().map(|space| {
            let at = u64::from(space.id().get());
            (at..at + 1, Number)
        });
        numbers.build(&mut writer, entries)?;
        Ok(Bed {
            system,
            spaces,
            numbers,
            domain,
            _writer: writer,
        })
    }

    /// Does `f` while another thread creates spaces and ends them.
    pub(super) fn beside_churn<R>(&self, f: impl FnOnce() -> R) -> Result<R, R3Error> {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let churn = scope.spawn(|| {
                sit(Seat::Second);
                while !stop.load(Ordering::Relaxed) {
                    drop(populated(&self.system)?);
                    thread::sleep(CHURN);
                }
                Ok(())
            });
            let result = f();
            stop.store(true, Ordering::Relaxed);
            match churn.join() {
                Ok(churned) => churned.map(|()| result),
                // It has been reported.
                Err(_) => Ok(result),
            }
        })
    }

    /// Nanoseconds per space, with as many threads at it.
    pub(super) fn sample(&self, way: Way, threads: usize, span: Span) -> f64 {
        let start = Barrier::new(threads);
        let work = |seat: usize| {
            let registered = match way {
                Way::PlainTree => self.domain.register(),
                _ => self.system.register(),
            };
            let mut looker = Looker {
                bed: self,
                reader: &registered,
                at: seat * self.spaces.len() / 2,
            };
            looker.look_for(way, span.warm_up);
            start.wait();
            looker.look_for(way, span.measured)
        };
        if threads < 2 {
            return work(0);
        }
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                sit(Seat::Second);
                work(1)
            });
            let mine = work(0);
            // A panic over there has been reported; its sample is lost.
            other
                .join()
                .map_or(mine, |theirs| f64::midpoint(mine, theirs))
        })
    }
}

/// Lookups between two looks at the clock.
const BATCH: usize = 256;
/// From one number to the next: prime to the counts.
const STRIDE: usize = 37;

struct Looker<'b> {
    bed: &'b Bed,
    reader: &'b Reader,
    at: usize,
}

impl Looker<'_> {
    /// Looks at spaces for a while: nanoseconds for each.
    fn look_for(&mut self, way: Way, time: Duration) -> f64 {
        let begin = Instant::now();
        let mut looks = 0;
        while begin.elapsed() < time {
            looks += self.some(way);
        }
        begin.elapsed().as_nanos() as f64 / looks.max(1) as f64
    }

    fn next(&mut self) -> u32 {
        self.at = (self.at + STRIDE) % self.bed.spaces.len();
        self.at as u32 + 1
    }

    /// How many spaces were looked at.
    fn some(&mut self, way: Way) -> usize {
        let system = &self.bed.system;
        let mut looks = BATCH;
        match way {
            Way::WalkByReference => {
                let guard = self.reader.pin();
                let kept = system.iter(0, &guard).filter_map(|member| {
                    let space = member.get()?;
                    black_box(space.find_next(0, &guard).map(VmaRef::start));
                    Some(())
                });
                looks = kept.count();
            }
            Way::WalkUnderGuard => {
                let guard = self.reader.pin();
                let seen = system
                    .iter(0, &guard)
                    .map(|member| black_box(member.find_next(0).map(VmaRef::start)));
                looks = seen.count();
            }
            Way::GetByReference => {
                for _ in 0..BATCH {
                    let id = self.next();
                    let guard = self.reader.pin();
                    black_box(system.get(id, &guard).map(|space| space.id()));
                }
            }
            Way::FindUnderGuard => {
                for _ in 0..BATCH {
                    let id = self.next();
                    let guard = self.reader.pin();
                    black_box(system.find(id, &guard).map(SpaceRef::id));
                }
            }
            Way::PlainTree => {
                for _ in 0..BATCH {
                    let id = self.next();
                    let guard = self.reader.pin();
                    black_box(self.bed.numbers.find(id.into(), &guard).map(|it| it.end));
                }
            }
        }
        looks
    }
}
