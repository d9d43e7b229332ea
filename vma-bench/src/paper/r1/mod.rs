//! R1: unmapping a large populated range.
//!
//! Before, the lock is held exclusively until the pages are gone; after, for the bookkeeping alone. Three ways on a space and
//! the running kernel's own munmap, on the same sizes in one run, another one first in each repetition:
//!
//! | way | pages go |
//! |---|---|
//! | exclusive | under the exclusive lock |
//! | downgraded | under the shared lock, as in Linux since 4.20 |
//! | detached | with no lock: the default |
//!
//! Hold times come from the lock itself ([`AddressSpace::with_lock_observer`](vma_core::AddressSpace::with_lock_observer)). Stalls are
//! the longest time of an operation that another thread does in a loop and that overlaps the call; beside them the same loop
//! for as long with nothing going on (idle), and an empty loop. Huge pages of the kernel are off.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts and nanoseconds of a run are far below 2^52"
)]

mod bed;
mod plan;
mod probes;
mod trend;

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

pub use self::bed::R1Error;
use self::bed::{Bed, PAGE, RANGE, RW, Way, unwatched};
use self::plan::{Plan, Size, plan};
use self::probes::{Probe, Seen, empty, kernel_once, kernel_stall};
use self::trend::Trend;
use super::memory::{available, size_name};
use super::{PaperArgs, say};
use crate::peers::harness::{Effort, Sample, Span, rounds};
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys::{Seat, cores, sit, tick_ns, ticks};
use vma_core::{AddressSpace, MapRequest, paged::Paged};

/// The exclusive hold is to be this many times the default's, from [`FACTOR_FROM`] bytes on.
const FACTOR: f64 = 1000.0;
const FACTOR_FROM: u64 = 1 << 30;

/// Measures everything that fits, smallest first.
///
/// # Errors
/// [`R1Error`]; what was measured until then is in the report.
pub fn run(args: &PaperArgs, report: &mut Report) -> Result<(), R1Error> {
    sit(Seat::First);
    let plan = plan(args.quick, args.max_bytes, available());
    for note in &plan.notes {
        say(args.json, note);
    }
    if cores() < 2 {
        say(args.json, "one core only: stalls aren't measured");
    }
    let bar = ProgressBar::new(plan.work());
    if let Ok(style) = ProgressStyle::with_template("{msg:26} [{bar:40}] {percent:>3} % {elapsed}")
    {
        bar.set_style(style);
    }
    let measured = all(&plan, &bar, report);
    bar.finish_and_clear();
    measured
}

fn all(plan: &Plan, bar: &ProgressBar, report: &mut Report) -> Result<(), R1Error> {
    bar.set_message("one page");
    one_page(plan.quick, report)?;
    let bed = Bed::new()?;
    if let Some(bytes) = plan.trend {
        bar.set_message("hold by populated pages");
        by_populated(&bed, bytes, plan.trend_repetitions, bar, report)?;
    }
    for size in &plan.sizes {
        bar.set_message(size_name(size.bytes));
        bed.grow(size.bytes)?;
        by_size(&bed, size, size.bytes == plan.largest(), bar, report)?;
        if cores() > 1 {
            stalls(&bed, size, size.bytes == plan.largest(), bar, report)?;
        }
    }
    Ok(())
}

fn us(times: &[Duration]) -> Summary {
    let us: Vec<f64> = times
        .iter()
        .map(|time| time.as_nanos() as f64 / 1000.0)
        .collect();
    Summary::of(&us)
}

/// Hold times and whole calls with nobody beside.
fn by_size(
    bed: &Bed,
    size: &Size,
    is_largest: bool,
    bar: &ProgressBar,
    report: &mut Report,
) -> Result<(), R1Error> {
    let (len, pages) = (size.bytes, size.bytes / PAGE);
    let mut holds = [const { Vec::new() }; 3];
    let mut calls = [const { Vec::new() }; 3];
    let (mut bare, mut ends, mut kernel) = (Vec::new(), Vec::new(), Vec::new());
    for repetition in 0..size.holds {
        for way in Way::turn(repetition) {
            let unmapped = bed.once(way, len, pages)?;
            holds[way as usize].push(unmapped.hold);
            calls[way as usize].push(unmapped.call);
            bar.inc(size.weight());
        }
        bare.push(bed.once(Way::Detached, len, 0)?.hold);
        ends.push(bed.once(Way::Detached, len, pages.min(2))?.hold);
        bar.inc(2 * size.weight());
        kernel.push(kernel_once(len)?);
        bar.inc(size.weight());
    }
    let column = size_name(len);
    let section = "R1/exclusive hold of the lock";
    let default = us(&holds[Way::Detached as usize]);
    for way in Way::ALL {
        let hold = us(&holds[way as usize]);
        report.add(section, &column, way.name(), |row| {
            let row = Row::new(row, "us", hold);
            if way == Way::Exclusive {
                let target = size.is_factor.then(|| Target::ratio_at_least(FACTOR));
                row.beside(Way::Detached.name(), default.median)
                    .target(target)
            } else {
                row.beside(
                    Way::Exclusive.name(),
                    us(&holds[Way::Exclusive as usize]).median,
                )
            }
        });
    }
    let (bare, ends) = (us(&bare), us(&ends));
    report.add(section, &column, "detached, nothing populated", |row| {
        Row::new(row, "us", bare)
    });
    report.add(section, &column, "detached, both ends populated", |row| {
        Row::new(row, "us", ends)
    });
    if is_largest {
        let section = "R1/exclusive hold, populated beside not";
        report.add(section, &column, Way::Detached.name(), |row| {
            Row::new(row, "us", default)
                .beside("nothing populated", bare.median)
                .target(Some(Target::ratio_at_most(1.2)))
        });
        // Without a page there are no page tables: this is the same range with the same ones at its ends.
        report.add(section, &column, "detached, tables at the ends", |row| {
            Row::new(row, "us", default).beside("both ends populated", ends.median)
        });
    }
    let section = "R1/whole call";
    let kernel = us(&kernel);
    for way in Way::ALL {
        report.add(section, &column, way.name(), |row| {
            Row::new(row, "us", us(&calls[way as usize])).beside("kernel", kernel.median)
        });
    }
    report.add(section, &column, "kernel", |row| {
        Row::new(row, "us", kernel)
    });
    Ok(())
}

/// Longest and typical times of a series.
#[derive(Default)]
struct Series {
    longest: Vec<f64>,
    typical: Vec<f64>,
}

impl Series {
    fn push(&mut self, seen: Seen) {
        self.longest.push(seen.longest / 1000.0);
        self.typical.push(seen.typical / 1000.0);
    }
}

/// What others wait for meanwhile.
fn stalls(
    bed: &Bed,
    size: &Size,
    is_largest: bool,
    bar: &ProgressBar,
    report: &mut Report,
) -> Result<(), R1Error> {
    let len = size.bytes;
    let column = size_name(len);
    for probe in Probe::ALL {
        let mut ways: [Series; 3] = Default::default();
        let (mut idle, mut control) = (Series::default(), Series::default());
        let (mut kernel, mut kernel_idle) = (Series::default(), Series::default());
        let has_kernel = matches!(probe, Probe::Fault | Probe::Writer);
        for repetition in 0..size.stalls {
            let mut time = Duration::ZERO;
            for way in Way::turn(repetition) {
                let (took, seen) = bed.stall(probe, way, len)?;
                ways[way as usize].push(seen);
                time = took;
                bar.inc(size.weight());
            }
            idle.push(bed.idle(probe, len, time)?);
            control.push(empty(time));
            if has_kernel {
                let (stall, alone) = kernel_stall(probe, len)?;
                kernel.push(stall);
                kernel_idle.push(alone);
            }
            bar.inc(size.weight());
        }
        let section = format!("R1/longest stall of {}", probe.name());
        let alone = Summary::of(&idle.longest);
        for way in Way::ALL {
            let is_claimed = is_largest && probe == Probe::Writer && way == Way::Detached;
            report.add(&section, &column, way.name(), |row| {
                Row::new(row, "us", Summary::of(&ways[way as usize].longest))
                    .beside("idle", alone.median)
                    .target(is_claimed.then(|| Target::ratio_at_most(2.0)))
            });
        }
        report.add(&section, &column, "idle", |row| Row::new(row, "us", alone));
        report.add(&section, &column, "empty loop", |row| {
            Row::new(row, "us", Summary::of(&control.longest))
        });
        if has_kernel {
            let alone = Summary::of(&kernel_idle.longest);
            report.add(&section, &column, "kernel", |row| {
                Row::new(row, "us", Summary::of(&kernel.longest))
                    .beside("kernel, idle", alone.median)
            });
            report.add(&section, &column, "kernel, idle", |row| {
                Row::new(row, "us", alone)
            });
        }
        if probe == Probe::Writer {
            let section = "R1/typical map and unmap elsewhere";
            let alone = Summary::of(&idle.typical);
            for way in Way::ALL {
                report.add(section, &column, way.name(), |row| {
                    Row::new(row, "us", Summary::of(&ways[way as usize].typical))
                        .beside("idle", alone.median)
                });
            }
            report.add(section, &column, "idle", |row| Row::new(row, "us", alone));
        }
    }
    Ok(())
}

/// The default's hold on one range of which more and more is populated. The growth is that of a least-squares line through
/// the medians, from a page at each end populated to everything; it's to be within the quartiles of the samples around their medians.
fn by_populated(
    bed: &Bed,
    bytes: u64,
    repetitions: usize,
    bar: &ProgressBar,
    report: &mut Report,
) -> Result<(), R1Error> {
    // One less than a prime: the order of the parts depends on it.
    const PARTS: u64 = 4;
    bed.grow(bytes)?;
    let pages = bytes / PAGE;
    let populated = |part: usize| (pages * part as u64 / PARTS).max(2).min(pages);
    let mut series: Vec<(f64, Vec<f64>)> = (0..=PARTS as usize)
        .map(|part| (populated(part) as f64, Vec::new()))
        .collect();
    let count = series.len();
    for repetition in 0..repetitions {
        for turn in 0..count {
            // Each comes after each of the others as often: what one leaves behind isn't always the same one's to bear.
            let part = (turn * (1 + repetition % (count - 1)) + repetition) % count;
            let hold = bed.once(Way::Detached, bytes, populated(part))?.hold;
            series[part].1.push(hold.as_nanos() as f64);
            bar.inc(plan::weight(bytes));
        }
    }
    let trend = Trend::of(&series);
    let column = size_name(bytes);
    let section = "R1/exclusive hold by populated part";
    for (part, (_, samples)) in series.iter().enumerate() {
        let line = match part {
            0 => "both ends populated".to_owned(),
            _ => format!("{part}/{PARTS} populated"),
        };
        report.add(section, &column, &line, |row| {
            Row::new(row, "ns", Summary::of(samples))
        });
    }
    let growth = Summary {
        samples: trend.samples,
        ..Summary::once(trend.growth.abs())
    };
    report.add(
        "R1/growth of the hold, ends to all populated",
        &column,
        Way::Detached.name(),
        |row| {
            Row::new(row, "ns", growth)
                .beside("quartile distance", trend.quartiles)
                .target(Some(Target::ratio_at_most(1.0)))
        },
    );
    Ok(())
}

/// Unmappings of one page behind a sample.
const PAGES_PER_SAMPLE: u64 = 256;

/// The whole call of the smallest size, on a space that nobody watches: what the optimisation costs where it gains nothing.
fn one_page(quick: bool, report: &mut Report) -> Result<(), R1Error> {
    let space = unwatched()?;
    // Finds out what would go wrong in all the others.
    page_calls(&space, Way::Detached)?;
    let effort = Effort {
        rounds: if quick { 51 } else { 201 },
        warm_up: 5,
        span: Span {
            warm_up: Duration::ZERO,
            measured: Duration::ZERO,
        },
    };
    let mut contenders: Vec<Sample<'_>> = Vec::new();
    for way in Way::ALL {
        let space = &space;
        contenders.push(Box::new(move || page_calls(space, way).unwrap_or(f64::NAN)));
    }
    let series = rounds(&mut contenders, effort);
    let exclusive = Summary::of(&series[Way::Exclusive as usize]);
    for way in Way::ALL {
        let target = (way == Way::Detached).then(|| Target::ratio_at_most(1.1));
        report.add(
            "R1/whole call, one populated page",
            "4 KiB",
            way.name(),
            |row| {
                Row::new(row, "ns", Summary::of(&series[way as usize]))
                    .beside(Way::Exclusive.name(), exclusive.median)
                    .target(target)
            },
        );
    }
    Ok(())
}

/// Nanoseconds that unmapping a populated page takes.
fn page_calls(space: &AddressSpace<Paged>, way: Way) -> Result<f64, R1Error> {
    let request = MapRequest::anonymous(PAGE, RW).fixed(RANGE);
    let mut cpu = space.accessor();
    let mut sum = 0;
    for _ in 0..PAGES_PER_SAMPLE {
        space.map(&request)?;
        cpu.store_u8(RANGE, 1)?;
        let begin = ticks();
        way.unmap(space, RANGE, PAGE)?;
        sum += ticks() - begin;
    }
    Ok(sum as f64 * tick_ns() / PAGES_PER_SAMPLE as f64)
}
