//! How long the locks of indexes are held and waited for.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use vma_core::{Domain, LockObserver, LockTimes};
use vma_rcu::rwsem::{LockStatistics, RwSemaphore};

use super::exec::{Bed, CALLS, Kind, R4Error, Way};
use super::plan::Plan;
use super::{crew, crew_name, crews};
use crate::peers::harness::Span;
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys::{Seat, sit};

/// All of it.
pub(super) fn measure(plan: &Plan, bar: &ProgressBar, report: &mut Report) -> Result<(), R4Error> {
    let bed = Bed::new(plan.standing, true)?;
    let domains = [Domain::default(), Domain::default()];
    for threads in crews() {
        let mut ways: [Seen; 2] = Default::default();
        let mut control = Seen::default();
        for repetition in 0..plan.watched {
            let bare = control.nothing(*threads, plan.watched_span.measured);
            for way in Way::turn(repetition) {
                let seen = &mut ways[way as usize];
                seen.watch(&bed, &domains, way, *threads, plan.watched_span, bare)?;
            }
            bar.inc(u64::from(*threads == 1));
        }
        rows(*threads, &ways, &control, report);
    }
    by_kind(&bed, &domains[0], plan, bar, report)
}

/// Samples, in nanoseconds.
#[derive(Debug, Default)]
struct Seen {
    hold: Vec<f64>,
    /// Less what a hold takes in which nothing is done.
    net_hold: Vec<f64>,
    longest_hold: Vec<f64>,
    wait: Vec<f64>,
    longest_wait: Vec<f64>,
}

fn ns(time: Duration) -> f64 {
    time.as_nanos() as f64
}

impl Seen {
    fn watch(
        &mut self,
        bed: &Bed,
        domains: &[Domain; 2],
        way: Way,
        threads: usize,
        span: Span,
        bare: f64,
    ) -> Result<(), R4Error> {
        let (programs, _) = crew(&[bed, bed][..threads], domains, way, span, || bed.reset())?;
        let calls = (programs * CALLS) as f64;
        let (held, waited) = (bed.held(), bed.waited());
        self.hold.push(ns(held.total) / calls);
        self.net_hold
            .push((ns(held.total) - bare * held.count as f64) / calls);
        self.longest_hold.push(ns(held.longest));
        self.wait.push(ns(waited.total) / calls);
        self.longest_wait.push(ns(waited.longest));
        Ok(())
    }

    /// What there is to see where nothing is done: the hold and the wait of a lock of one's own, and the longest turn of an empty loop on as
    /// many threads. Returns that hold.
    fn nothing(&mut self, threads: usize, time: Duration) -> f64 {
        const HOLDS: u64 = 1024;
        let lock = RwSemaphore::with_statistics((), Own::default());
        for _ in 0..HOLDS {
            drop(lock.write());
        }
        let (held, waited) = (
            lock.statistics().0.held(true),
            lock.statistics().0.waited(true),
        );
        let bare = ns(held.total) / HOLDS as f64;
        self.hold.push(bare);
        self.wait.push(ns(waited.total) / HOLDS as f64);
        let longest = ns(longest_turns(threads, time));
        self.longest_hold.push(longest);
        self.longest_wait.push(longest);
        bare
    }
}

/// A lock's own times, kept as a file keeps those of its index.
#[derive(Debug, Default)]
struct Own(LockTimes);

impl LockStatistics for Own {
    fn waited(&self, exclusive: bool, time: Duration) {
        LockObserver::waited(&self.0, exclusive, time);
    }

    fn held(&self, exclusive: bool, time: Duration) {
        LockObserver::held(&self.0, exclusive, time);
    }
}

/// The longest turn of a loop that does nothing but look at the clock, on one or two threads.
fn longest_turns(threads: usize, time: Duration) -> Duration {
    std::thread::scope(|scope| {
        let other = (threads > 1).then(|| {
            scope.spawn(|| {
                sit(Seat::Second);
                longest_turn(time)
            })
        });
        let mine = longest_turn(time);
        let theirs = other.and_then(|other| other.join().ok());
        mine.max(theirs.unwrap_or_default())
    })
}

fn longest_turn(time: Duration) -> Duration {
    let begin = Instant::now();
    let (mut last, mut longest) = (begin, Duration::ZERO);
    while last - begin < time {
        let now = Instant::now();
        longest = longest.max(now - last);
        last = now;
    }
    longest
}

fn rows(threads: usize, ways: &[Seen; 2], control: &Seen, report: &mut Report) {
    type Of = fn(&Seen) -> &Vec<f64>;
    let column = crew_name(threads);
    let [before, after] = Way::ALL.map(Way::name);
    let tables: [(&str, Of, &str, Option<Target>); 5] = [
        (
            "R4/hold of the index's lock, per call",
            |seen| &seen.hold,
            "nothing done, per hold",
            Some(Target::ratio_at_most(0.5)),
        ),
        (
            "R4/hold of the index's lock, per call, less the clock",
            |seen| &seen.net_hold,
            "",
            None,
        ),
        (
            "R4/hold of the index's lock, longest",
            |seen| &seen.longest_hold,
            "empty loop",
            None,
        ),
        (
            "R4/wait for the index's lock, per call",
            |seen| &seen.wait,
            "nothing done, per wait",
            None,
        ),
        (
            "R4/wait for the index's lock, longest",
            |seen| &seen.longest_wait,
            "empty loop",
            None,
        ),
    ];
    for (section, of, idle, target) in tables {
        let [first, second] = [0, 1].map(|way: usize| of(&ways[way]));
        report.add(section, &column, before, |row| {
            Row::new(row, "ns", Summary::of(first))
        });
        report.add(section, &column, after, |row| {
            Pairs::of(first, second).row(row, "ns", before, target)
        });
        if !of(control).is_empty() {
            report.add(section, &column, idle, |row| {
                Row::new(row, "ns", Summary::of(of(control)))
            });
        }
    }
}

/// Holds by what was called for, on one thread.
fn by_kind(
    bed: &Bed,
    domain: &Domain,
    plan: &Plan,
    bar: &ProgressBar,
    report: &mut Report,
) -> Result<(), R4Error> {
    let mut samples: [[Vec<f64>; 4]; 2] = Default::default();
    for repetition in 0..plan.watched {
        for way in Way::turn(repetition) {
            // The caches are the other way's.
            bed.exec(way, domain, &mut |_| ())?;
            let mut sums = [Duration::ZERO; 4];
            bed.reset();
            for _ in 0..plan.programs {
                let mut done = |kind: Kind| {
                    sums[kind as usize] += bed.held().total;
                    bed.reset();
                };
                bed.exec(way, domain, &mut done)?;
            }
            for kind in Kind::ALL {
                let calls = (plan.programs * kind.calls()) as f64;
                samples[way as usize][kind as usize].push(ns(sums[kind as usize]) / calls);
            }
        }
        bar.inc(1);
    }
    let section = "R4/hold of the index's lock, per call of a kind";
    let [before, after] = Way::ALL.map(Way::name);
    for kind in Kind::ALL {
        let [first, second] = [0, 1].map(|way: usize| &samples[way][kind as usize]);
        report.add(section, kind.name(), before, |row| {
            Row::new(row, "ns", Summary::of(first))
        });
        report.add(section, kind.name(), after, |row| {
            Pairs::of(first, second).row(row, "ns", before, None)
        });
    }
    Ok(())
}
