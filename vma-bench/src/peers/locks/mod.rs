//! Locks: what each side costs alone, beside a second thread, and what a lock on one mapping costs beside a lookup.

mod contestants;

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::sync::ShardedLock;
use hdrhistogram::Histogram;
use vma_core::{AddressSpace, MapRequest, Prot};
use vma_rcu::percpu_rwsem::PercpuRwSemaphore;
use vma_rcu::rwsem::RwSemaphore;

use self::contestants::{Bravo, Fenced, Lock};
use super::contest::histogram;
use super::harness::{Effort, Sample, Span, rounds};
use super::paired::Pairs;
use super::report::Report;
use super::row::{Row, Target};
use super::stats::Summary;
use super::sys::{self, Seat};

const PARKING_LOT: &str = <parking_lot::RwLock<u64> as Lock>::NAME;
const PERCPU: &str = <PercpuRwSemaphore<u64> as Lock>::NAME;
const RWSEM: &str = <RwSemaphore<u64> as Lock>::NAME;
const BRAVO: &str = Bravo::NAME;

/// Operations between two looks at the clock.
const CHUNK: u32 = 128;
/// Reads that make one operation: a clock is slow beside them.
const BURST: u32 = 64;
/// Times as many rounds where contenders are compared round by round.
const PAIRED: usize = 5;
/// Single calls that tails are made of.
const SINGLE: usize = 20_000;

/// Adds all rows.
pub fn run(effort: Effort, report: &mut Report) {
    let one = reads(1, effort, report);
    if sys::cores() > 1 {
        let two = reads(2, effort, report);
        alone_and_together(effort, &one, &two, report);
    }
    writes(effort, report);
    writer_waits(report);
    mappings(effort, report);
}

/// A lock under test, whatever its type.
struct Entrant {
    name: &'static str,
    read: Box<dyn Fn(Span) -> f64 + Sync>,
    write: Box<dyn Fn(Span) -> f64 + Sync>,
}

fn entrant<L: Lock + Send + 'static>() -> Entrant {
    let lock: &'static L = Box::leak(Box::new(L::make()));
    Entrant {
        name: L::NAME,
        read: Box::new(move |span| {
            timed(span, || {
                black_box(burst(lock));
            }) / f64::from(BURST)
        }),
        write: Box::new(move |span| timed(span, || lock.write())),
    }
}

/// A loop of its own for each lock, so that none depends on what the compiler made of the code around it.
#[inline(never)]
fn burst<L: Lock>(lock: &L) -> u64 {
    (0..BURST).fold(0, |sum, _| sum.wrapping_add(lock.read()))
}

fn field() -> Vec<Entrant> {
    vec![
        entrant::<RwSemaphore<u64>>(),
        entrant::<PercpuRwSemaphore<u64>>(),
        entrant::<Fenced>(),
        entrant::<parking_lot::RwLock<u64>>(),
        entrant::<std::sync::RwLock<u64>>(),
        entrant::<ShardedLock<u64>>(),
        entrant::<Bravo>(),
    ]
}

/// Nanoseconds per call of `f`, repeated for as long as the span says, and a little before.
#[inline(always)]
fn timed(span: Span, mut f: impl FnMut()) -> f64 {
    let mut run = |time: Duration| {
        let begin = Instant::now();
        let mut count = 0_u64;
        loop {
            for _ in 0..CHUNK {
                f();
            }
            count += u64::from(CHUNK);
            let elapsed = begin.elapsed();
            if elapsed >= time {
                return elapsed.as_nanos() as f64 / count as f64;
            }
        }
    };
    run(span.warm_up);
    run(span.measured)
}

/// Medians of the shared side, by contestant.
fn reads(threads: usize, effort: Effort, report: &mut Report) -> Vec<(&'static str, f64)> {
    let field = field();
    let mut contenders: Vec<Sample<'_>> = field
        .iter()
        .map(|entrant| {
            let read = &entrant.read;
            Box::new(move || together(threads, || read(effort.span))) as Sample<'_>
        })
        .collect();
    let series = rounds(&mut contenders, effort);
    let medians: Vec<_> = field
        .iter()
        .zip(&series)
        .map(|(entrant, samples)| (entrant.name, Summary::of(samples).median))
        .collect();
    let of = |name: &str| {
        let at = field.iter().position(|entrant| entrant.name == name);
        at.map_or(&[][..], |at| &series[at])
    };
    for (entrant, samples) in field.iter().zip(&series) {
        let column = format!("{threads}t");
        let mut add = |baseline: &str, target: Option<f64>| {
            report.add("locks/read", &column, entrant.name, |name| {
                let target = target.map(Target::ratio_at_most);
                Pairs::of(of(baseline), samples).row(name, "ns", baseline, target)
            });
        };
        let single = threads == 1;
        match entrant.name {
            PERCPU if single => {
                add(PARKING_LOT, Some(0.4));
                add(BRAVO, Some(1.0));
            }
            RWSEM if single => add(PARKING_LOT, Some(1.1)),
            _ => add(PARKING_LOT, None),
        }
    }
    medians
}

fn median(medians: &[(&'static str, f64)], name: &str) -> f64 {
    medians
        .iter()
        .find(|(known, _)| *known == name)
        .map_or(0.0, |(_, median)| *median)
}

/// The mean of what `sample` gives on each thread, all at once.
fn together(threads: usize, sample: impl Fn() -> f64 + Sync) -> f64 {
    if threads < 2 {
        return sample();
    }
    side_by_side(|_| sample())
}

/// The mean of what two threads measure, who are told which one they are.
fn side_by_side(sample: impl Fn(usize) -> f64 + Sync) -> f64 {
    let start = Barrier::new(2);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            sys::sit(Seat::Second);
            start.wait();
            sample(1)
        });
        start.wait();
        let mine = sample(0);
        other
            .join()
            .map_or(mine, |theirs| f64::midpoint(mine, theirs))
    })
}

/// A loop that shares nothing and takes no lock: what two threads cost more than one is the machine's.
#[inline(never)]
fn plain_burst(own: &mut [u64; 2]) -> u64 {
    (0..BURST).fold(0, |sum, _| {
        let [entered, left] = black_box(&mut *own);
        *entered = entered.wrapping_add(1);
        let seen = *entered - *left;
        *left = left.wrapping_add(1);
        sum.wrapping_add(seen)
    })
}

/// Readers that share nothing cost the same beside others, in pairs of the same round. What two threads cost more than one needn't
/// be the lock's: two threads with a lock each, and a loop without any, show what the machine makes of it.
fn alone_and_together(
    effort: Effort,
    one: &[(&'static str, f64)],
    two: &[(&'static str, f64)],
    report: &mut Report,
) {
    let locks = [(); 2].map(|()| PercpuRwSemaphore::new(0_u64));
    let read = |lock: &PercpuRwSemaphore<u64>| {
        timed(effort.span, || {
            black_box(burst(lock));
        }) / f64::from(BURST)
    };
    let plain = || {
        let mut own = [0, 0];
        timed(effort.span, || {
            black_box(plain_burst(&mut own));
        }) / f64::from(BURST)
    };
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| read(&locks[0])),
        Box::new(|| side_by_side(|_| read(&locks[0]))),
        Box::new(|| side_by_side(|which| read(&locks[which]))),
        Box::new(plain),
        Box::new(|| side_by_side(|_| plain())),
    ];
    let effort = Effort {
        rounds: effort.rounds * PAIRED,
        ..effort
    };
    let series = rounds(&mut contenders, effort);
    let section = "locks/read, 2 threads beside 1";
    let beside = "itself with one thread";
    for (name, baseline, samples, target) in [
        (PERCPU, 0, 1, Some(Target::ratio_at_most(1.2))),
        ("PercpuRwSemaphore, a lock each", 0, 2, None),
        ("no lock, nothing shared", 3, 4, None),
    ] {
        let pairs = Pairs::of(&series[baseline], &series[samples]);
        report.add(section, "2t", name, |row| {
            pairs.row(row, "ns", beside, target)
        });
    }
    for (name, together) in two.iter().filter(|(name, _)| *name != PERCPU) {
        report.add(section, "2t", name, |row| {
            Row::new(row, "ns", Summary::once(*together)).beside(beside, median(one, name))
        });
    }
}

fn writes(effort: Effort, report: &mut Report) {
    let field = field();
    for threads in 1..=sys::cores().min(2) {
        let mut contenders: Vec<Sample<'_>> = field
            .iter()
            .map(|entrant| {
                let write = &entrant.write;
                Box::new(move || together(threads, || write(effort.span))) as Sample<'_>
            })
            .collect();
        let series = rounds(&mut contenders, effort);
        let at = field.iter().position(|entrant| entrant.name == PARKING_LOT);
        let baseline = at.map_or(&[][..], |at| &series[at]);
        for (entrant, samples) in field.iter().zip(&series) {
            report.add("locks/write", &format!("{threads}t"), entrant.name, |row| {
                let target =
                    (entrant.name == RWSEM && threads == 1).then(|| Target::ratio_at_most(1.1));
                Pairs::of(baseline, samples).row(row, "ns", PARKING_LOT, target)
            });
        }
    }
}

/// What else happens while the per-CPU semaphore's writer comes and goes.
#[derive(Clone, Copy)]
enum Beside {
    Nobody,
    BusyThread,
    Reader,
}

/// Single calls of the per-CPU semaphore's exclusive side, and the same loop with nothing in it.
fn writer_waits(report: &mut Report) {
    let lock = PercpuRwSemaphore::new(0_u64);
    let cases = [
        ("nobody", Beside::Nobody),
        ("a busy thread", Beside::BusyThread),
        ("a reader", Beside::Reader),
    ];
    for (column, beside) in cases {
        if sys::cores() < 2 && !matches!(beside, Beside::Nobody) {
            continue;
        }
        let stop = AtomicBool::new(false);
        let (mut calls, mut control) = (histogram(), histogram());
        thread::scope(|scope| {
            if !matches!(beside, Beside::Nobody) {
                let (lock, stop) = (&lock, &stop);
                scope.spawn(move || {
                    sys::sit(Seat::Second);
                    while !stop.load(Ordering::Relaxed) {
                        match beside {
                            Beside::Reader => drop(black_box(lock.read())),
                            _ => std::hint::spin_loop(),
                        }
                    }
                });
            }
            single(&mut calls, || *lock.write() += 1);
            single(&mut control, || ());
            stop.store(true, Ordering::Relaxed);
        });
        let target = matches!(beside, Beside::Nobody).then(|| Target::at_most(10_000.0));
        tails(
            "locks/percpu writer beside",
            column,
            "",
            target,
            &calls,
            report,
        );
        tails(
            "locks/percpu writer beside",
            column,
            ": control loop",
            None,
            &control,
            report,
        );
    }
}

/// Times each call by itself.
fn single(into: &mut Histogram<u64>, mut f: impl FnMut()) {
    for turn in 0..SINGLE + SINGLE / 10 {
        let begin = sys::ticks();
        f();
        let end = sys::ticks();
        if turn >= SINGLE / 10 {
            into.saturating_record(end - begin);
        }
    }
}

/// Median, two tails and maximum; the target is the median's.
fn tails(
    section: &str,
    column: &str,
    line: &str,
    target: Option<Target>,
    ticks: &Histogram<u64>,
    report: &mut Report,
) {
    let ns = |ticks: u64| ticks as f64 * sys::tick_ns();
    let figures = [
        ("p50", ns(ticks.value_at_quantile(0.5)), target),
        ("p99", ns(ticks.value_at_quantile(0.99)), None),
        ("p99.9", ns(ticks.value_at_quantile(0.999)), None),
        ("max", ns(ticks.max()), None),
    ];
    for (figure, value, target) in figures {
        report.add(section, column, &format!("{figure}{line}"), |row| {
            Row::new(row, "ns", Summary::once(value)).target(target)
        });
    }
}

/// A lock on one mapping beside a lookup of it.
fn mappings(effort: Effort, report: &mut Report) {
    const COUNT: u64 = 1000;
    const STEP: u64 = 0x10000;
    let space = AddressSpace::default();
    for i in 1..=COUNT {
        let request = MapRequest::anonymous(0x1000, Prot::READ).fixed(i * STEP);
        space.map(&request).expect("there is room");
    }
    let reader = space.register();
    let (mut at_find, mut at_lock) = (0_u64, 0_u64);
    let next = |at: &mut u64| {
        *at = (*at * 5 + 7) % COUNT;
        (*at + 1) * STEP
    };
    let (mut calls, mut control) = (histogram(), histogram());
    single(&mut calls, || {
        let locked = space.lock_vma(next(&mut at_lock), &reader.pin());
        black_box(locked.is_ok());
    });
    single(&mut control, || {
        black_box(next(&mut at_find));
    });
    let (space, reader, next) = (&space, &reader, &next);
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(move || {
            timed(effort.span, || {
                let guard = reader.pin();
                let found = space.find(next(&mut at_find), &guard);
                black_box(found.map(vma_core::VmaRef::start));
            })
        }),
        Box::new(move || {
            timed(effort.span, || {
                let locked = space.lock_vma(next(&mut at_lock), &reader.pin());
                black_box(locked.is_ok());
            })
        }),
    ];
    let series = rounds(&mut contenders, effort);
    let find = Summary::of(&series[0]);
    report.add("locks/one mapping of 1k", "1t", "find", |row| {
        Row::new(row, "ns", find)
    });
    report.add(
        "locks/one mapping of 1k",
        "1t",
        "lock_vma and unlock",
        |row| Row::new(row, "ns", Summary::of(&series[1])).beside("find", find.median),
    );
    tails(
        "locks/one mapping of 1k, single calls",
        "1t",
        "",
        None,
        &calls,
        report,
    );
    tails(
        "locks/one mapping of 1k, single calls",
        "1t",
        ": control loop",
        None,
        &control,
        report,
    );
}
