//! What others wait for while a range is unmapped.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vma_core::{Advice, MapRequest};

use super::bed::{Bed, ELSEWHERE, PAGE, R1Error, RANGE, RW, Way};
use crate::host::sys::HostPages;
use crate::peers::stats::Summary;
use crate::peers::sys::{Seat, sit};

/// Pages that faults are taken in: 128 MiB.
const FAULT_PAGES: u64 = 1 << 15;
/// Between two faults, where the unmapping takes so long that there would be none left.
const PACE: Duration = Duration::from_micros(40);
/// Operations whose times are kept, for the typical one.
const KEPT: usize = 1 << 16;

/// What the other thread does in a loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    /// Looks up, then takes the shared side.
    Reader,
    /// Stores to a page for the first time, elsewhere.
    Fault,
    /// Maps and unmaps a page elsewhere.
    Writer,
    /// Once: maps the range again as soon as it's seen unmapped, and stores to its first page.
    Again,
}

impl Probe {
    pub(super) const ALL: [Probe; 4] = [Probe::Reader, Probe::Fault, Probe::Writer, Probe::Again];

    pub(super) fn name(self) -> &'static str {
        match self {
            Probe::Reader => "a reader",
            Probe::Fault => "a fault elsewhere",
            Probe::Writer => "a writer elsewhere",
            Probe::Again => "a writer in the same place",
        }
    }
}

/// How long operations took that ran beside something, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    pub(super) longest: f64,
    pub(super) typical: f64,
}

impl Seen {
    fn of(times: &[f64], longest: f64) -> Self {
        Seen {
            longest,
            typical: Summary::of(times).median,
        }
    }
}

/// Whether the other thread's doing has begun and ended. Release after what is timed there, acquire here: an operation counts if the
/// two overlap.
#[derive(Debug, Default)]
struct Under {
    begun: AtomicBool,
    ended: AtomicBool,
}

impl Under {
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.begun.store(true, Ordering::Release);
        let result = work();
        self.ended.store(true, Ordering::Release);
        result
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Does `step` again and again until the other has ended, or there is nothing left to do.
    fn watch<E>(
        &self,
        pace: Duration,
        mut step: impl FnMut() -> Result<bool, E>,
    ) -> Result<Seen, E> {
        let (mut longest, mut times) = (0.0, Vec::with_capacity(KEPT));
        while !self.has_ended() {
            let begin = Instant::now();
            let goes_on = step()?;
            let took = begin.elapsed();
            if self.begun.load(Ordering::Acquire) {
                let ns = took.as_nanos() as f64;
                longest = f64::max(longest, ns);
                if times.len() < KEPT {
                    times.push(ns);
                }
            }
            if !goes_on {
                break;
            }
            while begin.elapsed() < pace {
                spin_loop();
            }
        }
        Ok(Seen::of(&times, longest))
    }
}

/// Runs `work` here and `watcher` on the other core, as soon as that says that it's ready, or gives up.
fn beside<T, W>(
    work: impl FnOnce() -> T,
    watcher: impl FnOnce(&Under, &dyn Fn()) -> W + Send,
) -> (T, W)
where
    W: Send + Default,
{
    // Orders nothing: what is timed here has marks of its own.
    let (under, ready) = (Under::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            sit(Seat::Second);
            watcher(&under, &|| ready.store(true, Ordering::Relaxed))
        });
        while !ready.load(Ordering::Relaxed) && !other.is_finished() {
            thread::yield_now();
        }
        let result = under.run(work);
        let seen = other.join().unwrap_or_default();
        (result, seen)
    })
}

/// `work` for idle loops: as busy, and for as long.
fn spin(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        spin_loop();
    }
}

fn pace(len: u64) -> Duration {
    if len > 4 << 20 { PACE } else { Duration::ZERO }
}

/// What the empty loop sees: the clock and the scheduler.
pub(super) fn empty(time: Duration) -> Seen {
    let nothing = |under: &Under, ready: &dyn Fn()| {
        ready();
        let seen = under.watch(Duration::ZERO, || Ok::<_, R1Error>(true));
        seen.unwrap_or_default()
    };
    beside(|| spin(time), nothing).1
}

impl Bed {
    /// Sees to it that the pool has frames for the range and for faults beside it: none is new when something is timed.
    pub(super) fn grow(&self, len: u64) -> Result<(), R1Error> {
        let elsewhere = MapRequest::anonymous(FAULT_PAGES * PAGE, RW).fixed(ELSEWHERE);
        self.space.map(&elsewhere)?;
        self.space
            .advise(ELSEWHERE, FAULT_PAGES * PAGE, Advice::POPULATE_WRITE)?;
        self.map(len, len / PAGE)?;
        self.space.unmap(ELSEWHERE, FAULT_PAGES * PAGE)?;
        Ok(self.space.unmap(RANGE, len)?)
    }

    /// The loop of one kind of operation, on the other core.
    fn watch(
        &self,
        probe: Probe,
        len: u64,
        under: &Under,
        ready: &dyn Fn(),
    ) -> Result<Seen, R1Error> {
        let space = &self.space;
        match probe {
            Probe::Reader => {
                let reader = space.register();
                ready();
                under.watch(Duration::ZERO, || {
                    let found = space.find(ELSEWHERE, &reader.pin()).is_some();
                    drop(std::hint::black_box((found, space.read())));
                    Ok(true)
                })
            }
            Probe::Fault => {
                let mut cpu = space.accessor();
                let mut next = 0;
                ready();
                under.watch(pace(len), || {
                    cpu.store_u8(ELSEWHERE + next * PAGE, 1)?;
                    next += 1;
                    Ok(next < FAULT_PAGES)
                })
            }
            Probe::Writer => {
                let request = MapRequest::anonymous(PAGE, RW).fixed(ELSEWHERE);
                ready();
                under.watch(Duration::ZERO, || {
                    space.map(&request)?;
                    space.unmap(ELSEWHERE, PAGE)?;
                    Ok(true)
                })
            }
            Probe::Again => {
                let reader = space.register();
                let request = MapRequest::anonymous(len, RW).fixed(RANGE);
                let mut cpu = space.accessor();
                ready();
                while space.find(RANGE, &reader.pin()).is_some() && !under.has_ended() {
                    spin_loop();
                }
                let begin = Instant::now();
                space.map(&request)?;
                cpu.store_u8(RANGE, 1)?;
                let ns = begin.elapsed().as_nanos() as f64;
                Ok(Seen::of(&[ns], ns))
            }
        }
    }

    /// Runs `work` beside the operation.
    fn beside<T>(
        &self,
        probe: Probe,
        len: u64,
        work: impl FnOnce() -> T,
    ) -> Result<(T, Seen), R1Error> {
        if probe == Probe::Fault {
            let room = MapRequest::anonymous(FAULT_PAGES * PAGE, RW);
            self.space.map(&room.fixed(ELSEWHERE))?;
        }
        let watch = |under: &Under, ready: &dyn Fn()| Some(self.watch(probe, len, under, ready));
        let (result, seen) = beside(work, watch);
        match probe {
            Probe::Fault => self.space.unmap(ELSEWHERE, FAULT_PAGES * PAGE)?,
            Probe::Again => self.space.unmap(RANGE, len)?,
            Probe::Reader | Probe::Writer => {}
        }
        Ok((result, seen.transpose()?.unwrap_or_default()))
    }

    /// What the operation sees beside an unmapping of the whole populated range, and how long that takes.
    pub(super) fn stall(
        &self,
        probe: Probe,
        way: Way,
        len: u64,
    ) -> Result<(Duration, Seen), R1Error> {
        self.map(len, len / PAGE)?;
        let (unmapped, seen) = self.beside(probe, len, || self.unmap(way, len))?;
        Ok((unmapped?, seen))
    }

    /// What it sees in as long a time with nothing going on.
    pub(super) fn idle(&self, probe: Probe, len: u64, time: Duration) -> Result<Seen, R1Error> {
        // Once, and it doesn't wait for a time to pass.
        let time = if probe == Probe::Again {
            Duration::ZERO
        } else {
            time
        };
        Ok(self.beside(probe, len, || spin(time))?.1)
    }
}

/// The same on the running kernel; only faults and writers elsewhere.
fn watch_kernel(probe: Probe, len: u64, under: &Under, ready: &dyn Fn()) -> Result<Seen, R1Error> {
    if probe == Probe::Fault {
        let pages = HostPages::map(FAULT_PAGES as usize)?;
        let mut next = 0;
        ready();
        under.watch(pace(len), || {
            pages.touch_page(next);
            next += 1;
            Ok(next < FAULT_PAGES as usize)
        })
    } else {
        ready();
        under.watch(Duration::ZERO, || {
            drop(HostPages::plain(1)?);
            Ok(true)
        })
    }
}

/// A populated range of this process's own memory.
fn kernel_range(len: u64) -> Result<HostPages, R1Error> {
    let range = HostPages::map((len / PAGE) as usize)?;
    range.populate()?;
    Ok(range)
}

fn timed(range: HostPages) -> Duration {
    let begin = Instant::now();
    drop(range);
    begin.elapsed()
}

/// How long the kernel's munmap takes, with nobody beside.
pub(super) fn kernel_once(len: u64) -> Result<Duration, R1Error> {
    Ok(timed(kernel_range(len)?))
}

/// What an operation on the kernel sees beside its munmap, and in as long a time without.
pub(super) fn kernel_stall(probe: Probe, len: u64) -> Result<(Seen, Seen), R1Error> {
    let range = kernel_range(len)?;
    let watch = |under: &Under, ready: &dyn Fn()| Some(watch_kernel(probe, len, under, ready));
    let (time, stall) = beside(|| timed(range), watch);
    let idle = beside(|| spin(time), watch).1;
    let seen = |seen: Option<Result<Seen, R1Error>>| Ok(seen.transpose()?.unwrap_or_default());
    seen(stall).and_then(|stall: Seen| Ok((stall, seen(idle)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_before_the_call_do_not_count() {
        let under = Under::default();
        let mut left = 3;
        let seen = under.watch(Duration::ZERO, || {
            left -= 1;
            if left == 1 {
                under.run(|| ());
            }
            Ok::<_, R1Error>(true)
        });
        let seen = seen.unwrap();
        assert_eq!(left, 1, "ends when the call has ended");
        assert!(seen.longest > 0.0, "the one that overlaps it counts");
        let before = Under::default();
        let seen = before.watch(Duration::ZERO, || Ok::<_, R1Error>(false));
        assert!(seen.unwrap().longest == 0.0, "none counts");
    }

    #[test]
    fn a_stall_is_seen_beside_a_call_that_waits() {
        let time = Duration::from_millis(5);
        let watcher = |under: &Under, ready: &dyn Fn()| {
            ready();
            under.watch(Duration::ZERO, || {
                thread::sleep(time / 5);
                Ok::<_, R1Error>(true)
            })
        };
        let (result, seen) = beside(
            || {
                thread::sleep(time);
                7
            },
            |under, ready| Some(watcher(under, ready)),
        );
        assert_eq!(result, 7);
        let seen = seen.unwrap().unwrap();
        assert!(seen.longest >= 1e6 && seen.typical >= 1e6, "{seen:?}");
    }

    #[test]
    fn a_watcher_that_gives_up_holds_nobody_up() {
        let gives_up = |_: &Under, _: &dyn Fn()| Some(Err::<Seen, ()>(()));
        let (result, seen) = beside(|| 1, gives_up);
        assert_eq!((result, seen.is_some_and(|seen| seen.is_err())), (1, true));
    }
}
