//! R2: fork between a lock of its parent's and one of all processes.
//!
//! Before, a dup holds the dup semaphore while it sleeps on its parent's lock: who attaches a probe waits for that dup, and all other dups
//! wait for who attaches. After, it holds neither while it sleeps on the other.
//!
//! | way | a dup |
//! |---|---|
//! | nested | sleeps on its parent's lock with the dup semaphore held, as in Linux (`SystemConfig::nested_dup`) |
//! | apart | sleeps on one of the two, tries the other, in turn: the default |
//!
//! The load is the source's: a thread of process A maps, populates and unmaps a large range in a loop, another thread of A dups in
//! a loop, process B dups in a loop, and a tracer attaches and detaches probes to a file that neither maps. A call to `map` that populates
//! lets others at the lock every 512 pages, and an unmap needs none for its pages; Linux holds it shared for both. So A
//! unmaps as R1's "downgraded" does, and maps on a guard, which keeps the lock until all pages are there: exclusively, but to a fork that
//! is the same. Both orders get the same load.
//!
//! After each call A's thread sleeps for a moment: it would have the lock again before whoever waits for it is awake, up to 32 times
//! ([`vma_rcu::rwsem`]), and make the nested order look worse than Linux's, whose lock is handed over after 4 ms.
//!
//! A probe is detached without waiting for dups, unlike Linux's: it knows where it is. So what is beside a detach has nothing to wait for in
//! either order.
//!
//! A sample is the longest time of a run of attaches and detaches, each at another point of A's loop. A dup in B counts where it is beside
//! an attach or a detach: that's what B may have to wait for, and as much of it with each size. The longest one of the whole run is
//! shown as well; the longer the run, the more often others have had the core.
//!
//! B and the tracer sit on one core, A's threads on the other, which they keep busy all the time. What the machine and the tracer on the
//! same core make of that stands beside: the longest turn of a B that does nothing but look at the clock, in the same company. Waits for
//! locks come from the locks themselves (`SystemConfig::dup_observer`, `AddressSpace::with_lock_observer`): they include the time until a
//! thread that has got the lock runs again. What A has in frames is in a pool of its own.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts and nanoseconds of a run are far below 2^52"
)]

mod bed;
mod beside;
mod plan;
mod watch;

use std::time::Duration;

use indicatif::ProgressBar;

pub use self::bed::R2Error;
use self::bed::{Bed, Run, Way, pool};
use self::plan::{CLAIMED, Plan, plan, weight};
use super::memory::{available, size_name};
use super::{PaperArgs, progress, say};
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys::{Seat, cores, sit};

/// How much longer the nested order's longest dup is to be, and its attach.
const DUP_FACTOR: f64 = 50.0;
const ATTACH_FACTOR: f64 = 5.0;
/// What the longest dup may grow by from the smallest size to the largest.
const GROWTH: f64 = 2.0;

/// Probes that are attached, one after the other.
const PROBES: [usize; 2] = [1, 4];

/// Measures everything that fits, smallest first.
///
/// # Errors
/// [`R2Error`]; what was measured until then is in the report.
pub fn run(args: &PaperArgs, report: &mut Report) -> Result<(), R2Error> {
    sit(Seat::First);
    if cores() < 2 {
        say(args.json, "one core only: R2 needs two, and isn't measured");
        return Ok(());
    }
    let most = args.max_rounds.map_or(usize::MAX, |most| most as usize);
    let plan = plan(args.quick, args.max_bytes, available(), most);
    for note in &plan.notes {
        say(args.json, note);
    }
    let bar = progress(plan.work());
    let measured = all(&plan, &bar, report);
    bar.finish_and_clear();
    measured
}

fn all(plan: &Plan, bar: &ProgressBar, report: &mut Report) -> Result<(), R2Error> {
    let pool = pool();
    let mut beds = Vec::new();
    for way in Way::ALL {
        beds.push(Bed::new(way, &pool)?);
    }
    let mut by_size = Vec::new();
    for &bytes in &plan.sizes {
        bar.set_message(size_name(bytes));
        let mut seen: [Ways; PROBES.len()] = Default::default();
        for repetition in 0..plan.repetitions {
            for way in Way::turn(repetition) {
                let effort = match way {
                    Way::Control => plan.control,
                    _ => plan.effort,
                };
                let runs = beds[way as usize].run(bytes, PROBES, effort)?;
                for (seen, runs) in seen.iter_mut().zip(runs) {
                    seen[way as usize].extend(runs);
                }
                bar.inc(weight(bytes));
            }
        }
        by_size.push((bytes, seen));
    }
    for (at, probes) in PROBES.into_iter().enumerate() {
        let of_probes = by_size.iter().map(|(bytes, seen)| (*bytes, &seen[at]));
        for (bytes, seen) in of_probes {
            rows(bytes, probes, seen, report);
        }
        sources(probes, report);
    }
    for (at, probes) in PROBES.into_iter().enumerate() {
        if let [(_, first), .., (_, last)] = &by_size[..] {
            growth(probes, &first[at], &last[at], report);
        }
    }
    Ok(())
}

fn probes_name(probes: usize) -> String {
    match probes {
        1 => "1 probe".to_owned(),
        _ => format!("{probes} probes"),
    }
}

fn us(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}

/// The runs of each [`Way`].
type Ways = [Vec<Run>; 3];

/// What is shown of a run, in microseconds.
type Figure = fn(&Run) -> f64;

fn samples(runs: &[Run], figure: Figure) -> Vec<f64> {
    runs.iter().map(figure).collect()
}

fn median(runs: &[Run], figure: Figure) -> f64 {
    Summary::of(&samples(runs, figure)).median
}

/// One of the tables.
struct Table {
    name: &'static str,
    figure: Figure,
    /// The source's, in microseconds, with each number of probes: before and its longest, after and its longest, where there is one.
    source: [[Option<f64>; 4]; 2],
    /// How many times the default's the nested order's is to be.
    factor: Option<f64>,
    /// Whether the empty loop is shown.
    has_control: bool,
}

const TABLES: [Table; 4] = [
    Table {
        name: "longest dup in B beside attach",
        figure: |run| us(run.beside_attach),
        source: [
            [Some(206e3), Some(219e3), Some(100.0), Some(300.0)],
            [Some(208e3), Some(428e3), Some(80.0), Some(320.0)],
        ],
        factor: Some(DUP_FACTOR),
        has_control: true,
    },
    Table {
        name: "attach",
        figure: |run| us(run.attach),
        source: [
            [Some(220e3), None, Some(11.7e3), None],
            [Some(219e3), None, Some(13.5e3), None],
        ],
        factor: Some(ATTACH_FACTOR),
        has_control: false,
    },
    Table {
        name: "longest dup in B beside detach",
        figure: |run| us(run.beside_detach),
        // 265 to 293 ms before, 0.19 to 0.37 after, in all of the source's runs.
        source: [[None, Some(293e3), None, Some(370.0)]; 2],
        factor: None,
        has_control: false,
    },
    Table {
        name: "longest dup in B, whole run",
        figure: |run| us(run.longest),
        source: [[None; 4]; 2],
        factor: None,
        has_control: true,
    },
];

fn section(table: &Table, probes: usize) -> String {
    format!("R2/{}, {}", table.name, probes_name(probes))
}

fn longest(name: &str) -> String {
    format!("{name}, longest of all")
}

fn rows(bytes: u64, probes: usize, seen: &Ways, report: &mut Report) {
    let column = size_name(bytes);
    for table in &TABLES {
        let section = section(table, probes);
        let of = |way: Way| samples(&seen[way as usize], table.figure);
        let apart = Summary::of(&of(Way::Apart));
        for way in Way::ALL {
            // The empty loop is B's; what is attached beside it is as in the default.
            if way == Way::Control && !table.has_control {
                continue;
            }
            let own = of(way);
            report.add(&section, &column, way.name(), |row| {
                let row = Row::new(row, "us", Summary::of(&own));
                if way != Way::Nested {
                    return row;
                }
                let factor = table.factor.filter(|_| bytes == CLAIMED);
                row.beside(Way::Apart.name(), apart.median)
                    .target(factor.map(Target::ratio_at_least))
            });
            report.add(&section, &column, &longest(way.name()), |row| {
                let most = own.iter().copied().fold(0.0, f64::max);
                Row::new(row, "us", one_of(own.len(), most))
            });
        }
    }
    waits(&column, probes, seen, report);
}

fn one_of(samples: usize, value: f64) -> Summary {
    Summary {
        samples: samples as u64,
        ..Summary::once(value)
    }
}

/// Who waits how long for which lock.
fn waits(column: &str, probes: usize, seen: &Ways, report: &mut Report) {
    const FIGURES: [(&str, Figure); 6] = [
        ("B, for the semaphore", |run| us(run.waits[0])),
        ("A's dup, for the semaphore", |run| us(run.waits[1])),
        ("tracer, for the semaphore", |run| us(run.waits[2])),
        ("A's dup, for A's lock", |run| us(run.at_home[0])),
        ("A's other thread, for A's lock", |run| us(run.at_home[1])),
        ("A's other thread holds A's lock", |run| us(run.at_home[2])),
    ];
    let section = format!("R2/longest time at a lock, {}", probes_name(probes));
    for (name, figure) in FIGURES {
        for way in [Way::Nested, Way::Apart] {
            let line = format!("{name}: {}", way.name());
            report.add(&section, column, &line, |row| {
                let own = Summary::of(&samples(&seen[way as usize], figure));
                let row = Row::new(row, "us", own);
                match way {
                    Way::Nested => row.beside(
                        Way::Apart.name(),
                        median(&seen[Way::Apart as usize], figure),
                    ),
                    _ => row,
                }
            });
        }
    }
}

/// The source's figures, to be read beside the others.
fn sources(probes: usize, report: &mut Report) {
    let at = usize::from(probes > 1);
    for table in &TABLES {
        let names = [Way::Nested, Way::Apart]
            .map(Way::name)
            .into_iter()
            .flat_map(|name| [name.to_owned(), longest(name)]);
        for (line, figure) in names.zip(table.source[at]) {
            let Some(figure) = figure else { continue };
            report.add(&section(table, probes), "Linux, 4 GB", &line, |row| {
                Row::new(row, "us", one_of(0, figure))
            });
        }
    }
}

/// The largest size beside the smallest.
fn growth(probes: usize, smallest: &Ways, largest: &Ways, report: &mut Report) {
    let table = &TABLES[0];
    let section = format!("R2/{}, largest A beside smallest", table.name);
    for way in [Way::Nested, Way::Apart] {
        report.add(&section, &probes_name(probes), way.name(), |row| {
            let target = (way == Way::Apart).then(|| Target::ratio_at_most(GROWTH));
            let largest = samples(&largest[way as usize], table.figure);
            Row::new(row, "us", Summary::of(&largest))
                .beside("smallest", median(&smallest[way as usize], table.figure))
                .target(target)
        });
    }
}
