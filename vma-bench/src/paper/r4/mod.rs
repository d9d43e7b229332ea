//! R4: many spaces map the same files at once.
//!
//! Each file has an index of its mappings, behind a lock that all spaces share. Before, a call that maps the file updates its
//! own space's tree while it holds that lock; after, it holds it for the index alone.
//!
//! | way | the space's tree is updated |
//! |---|---|
//! | before | under the lock of the file's index, as in Linux before 6.6 (`SpaceConfig::publish_under_index_lock`) |
//! | after | outside of it: the default |
//!
//! The index is the same both times: a file knows its tenants, and each tenant its parts, which are noted under a lock of the space's own.
//! So what is seen to before is the publish alone, not the insertion of the interval, which Linux had under that lock as well.
//!
//! What runs is the start and exit of a program with seven libraries, again and again, each in a new space, on ten files that
//! 160 other spaces map all the time. Each thread has a reclamation domain of its own: threads share the files and nothing else.
//!
//! Holds and waits come from the indexes' locks (`FileObjectBuilder::index_observer`); they include a look at the clock, as the
//! line "nothing done" shows. Throughput is measured in rounds of its own that nobody watches, and compared round by round.
//! A longest time is that of a sample, beside the longest turn of an empty loop that runs for as long on as many threads: what
//! the machine makes of it.
//!
//! An index grows in two shapes. Many spaces that map the same pages are what the result is about, and what the target for growth is for. One
//! space that maps pages at random is shown beside a `BTreeMap` that does the same: with 100,000 of them each step is at
//! memory that no cache of a core has any more, and both grow by what it takes to fetch it.
//!
//! Spaces have nothing behind their mappings (`AddressSpace<()>`). Pages are seen to before an index is locked and after it is let go,
//! both before and after, so that holds are the same with `Paged`; all it adds is time in which no index is in use, behind which
//! what a change of the lock gains or costs would be harder to see.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts and nanoseconds of a run are far below 2^52"
)]

mod exec;
mod index;
mod plan;
mod watch;

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use indicatif::ProgressBar;
use vma_core::{Domain, PublishError};

pub use self::exec::R4Error;
use self::exec::{Bed, Way};
use self::index::{Contender, Shape};
use self::plan::{Plan, plan};
use super::{PaperArgs, progress, say};
use crate::peers::cases::size_name;
use crate::peers::harness::{Sample, Span, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys::{Seat, cores, sit};

/// What an index is to take for an entry that comes and goes, in nanoseconds, and at how many entries.
const PAIR_NS: f64 = 300.0;
const PAIR_AT: usize = 10_000;

/// Measures everything.
///
/// # Errors
/// [`R4Error`]; what was measured until then is in the report.
pub fn run(args: &PaperArgs, report: &mut Report) -> Result<(), R4Error> {
    sit(Seat::First);
    let limit = |max: Option<u32>| max.map_or(usize::MAX, |max| max as usize);
    let plan = plan(args.quick, limit(args.max_mappings), limit(args.max_rounds));
    if cores() < 2 {
        say(
            args.json,
            "one core only: nothing is measured with two threads",
        );
    }
    let bar = progress(plan.work());
    let measured = all(&plan, &bar, report);
    bar.finish_and_clear();
    measured
}

fn all(plan: &Plan, bar: &ProgressBar, report: &mut Report) -> Result<(), R4Error> {
    bar.set_message("holds and waits");
    watch::measure(plan, bar, report)?;
    bar.set_message("throughput");
    throughput(plan, report)?;
    bar.inc(plan.throughput.rounds as u64);
    bar.set_message("index");
    indexes(plan, report)?;
    bar.inc(plan.index.rounds as u64);
    Ok(())
}

/// Numbers of threads that are measured.
fn crews() -> &'static [usize] {
    if cores() > 1 { &[1, 2] } else { &[1] }
}

fn crew_name(threads: usize) -> String {
    match threads {
        1 => "1 thread".to_owned(),
        _ => format!("{threads} threads"),
    }
}

/// Runs programs for a while on one or two threads, each on its bed. `begin` is called when all are warm and before any goes on.
/// How many programs, and how many of them in a second.
fn crew(
    beds: &[&Bed],
    domains: &[Domain; 2],
    way: Way,
    span: Span,
    begin: impl Fn(),
) -> Result<(u64, f64), R4Error> {
    let (warm, start) = (Barrier::new(beds.len()), Barrier::new(beds.len()));
    let work = |at: usize, begin: &dyn Fn()| {
        // Whoever fails is waited for all the same.
        let warmed = beds[at].exec_for(way, &domains[at], span.warm_up);
        warm.wait();
        begin();
        start.wait();
        warmed.and_then(|_| beds[at].exec_for(way, &domains[at], span.measured))
    };
    let per_second = |done: (u64, Duration)| done.0 as f64 / done.1.as_secs_f64();
    thread::scope(|scope| {
        let other = (beds.len() > 1).then(|| {
            scope.spawn(|| {
                sit(Seat::Second);
                work(1, &|| ())
            })
        });
        let mine = work(0, &begin)?;
        let mut sum = (mine.0, per_second(mine));
        // A panic over there has been reported; its part is lost.
        if let Some(Ok(theirs)) = other.map(thread::ScopedJoinHandle::join) {
            let theirs = theirs?;
            sum.0 += theirs.0;
            sum.1 += per_second(theirs);
        }
        Ok(sum)
    })
}

/// Programs per second, with nobody watching.
fn throughput(plan: &Plan, report: &mut Report) -> Result<(), R4Error> {
    let bed = Bed::new(plan.standing, false)?;
    let other = Bed::new(plan.standing, false)?;
    let domains = [Domain::default(), Domain::default()];
    // Finds out what would go wrong in all the others.
    for way in Way::ALL {
        bed.exec(way, &domains[0], &mut |_| ())?;
    }
    let span = plan.throughput.span;
    let per_second = |beds: &[&Bed], way| {
        let done = crew(beds, &domains, way, span, || ());
        done.map_or(f64::NAN, |done| done.1)
    };
    let per_second = &per_second;
    let (shared, apart) = ([&bed, &bed], [&bed, &other]);
    let mut contenders: Vec<Sample<'_>> = Vec::new();
    for threads in crews() {
        for way in Way::ALL {
            let beds = &shared[..*threads];
            contenders.push(Box::new(move || per_second(beds, way)));
        }
    }
    if cores() > 1 {
        contenders.push(Box::new(|| per_second(&apart, Way::Outside)));
    }
    let series = rounds(&mut contenders, plan.throughput);
    let section = "R4/programs started and ended per second";
    let (before, after) = (Way::Under.name(), Way::Outside.name());
    for (at, threads) in crews().iter().enumerate() {
        let column = crew_name(*threads);
        let both = Pairs::of(&series[2 * at], &series[2 * at + 1]);
        report.add(section, &column, before, |row| {
            Row::new(row, "1/s", Summary::of(&series[2 * at]))
        });
        let target = (*threads == 2).then(|| Target::ratio_at_least(0.97));
        report.add(section, &column, after, |row| {
            both.row(row, "1/s", before, target)
        });
        if *threads == 2 {
            let apart = Pairs::of(&series[2 * at + 1], &series[2 * at + 2]);
            report.add(section, &column, "after, each files of its own", |row| {
                apart.row(row, "1/s", after, None)
            });
        }
        for (line, ratio) in both.with_interval() {
            report.add(
                "R4/programs per second, after / before",
                &column,
                line,
                |row| Row::new(row, "x", ratio),
            );
        }
    }
    // The source's own figure, to be read beside the others.
    report.add(
        "R4/programs per second, after / before",
        "Linux, 160 tasks",
        "median",
        |row| {
            let source = Summary {
                samples: 0,
                ..Summary::once(1.12)
            };
            Row::new(row, "x", source)
        },
    );
    Ok(())
}

/// An entry of an index of many comes and goes.
fn indexes(plan: &Plan, report: &mut Report) -> Result<(), R4Error> {
    for shape in Shape::ALL {
        index_of(shape, plan, report)?;
    }
    Ok(())
}

fn index_of(shape: Shape, plan: &Plan, report: &mut Report) -> Result<(), PublishError> {
    type Make = fn(Shape, usize) -> Result<Contender, PublishError>;
    const MAKERS: [(&str, Make); 2] = [("index", Contender::ours), ("BTreeMap", Contender::plain)];
    let span = plan.index.span;
    let mut contenders: Vec<Sample<'_>> = Vec::new();
    for size in &plan.sizes {
        for (_, make) in MAKERS {
            let mut contender = make(shape, *size)?;
            // Finds out what would go wrong in all the others.
            contender.pair(span)?;
            contenders.push(Box::new(move || contender.pair(span).unwrap_or(f64::NAN)));
        }
    }
    let series = rounds(&mut contenders, plan.index);
    drop(contenders);
    let section = format!("R4/an entry comes and goes, {}", shape.name());
    for (size, of_size) in plan.sizes.iter().zip(series.chunks(MAKERS.len())) {
        let [ours, tree] = [0, 1].map(|maker| Summary::of(&of_size[maker]));
        let column = size_name(*size);
        report.add(&section, &column, MAKERS[0].0, |row| {
            let target = (*size == PAIR_AT).then(|| Target::at_most(PAIR_NS));
            Row::new(row, "ns", ours)
                .beside(MAKERS[1].0, tree.median)
                .target(target)
        });
        report.add(&section, &column, MAKERS[1].0, |row| {
            Row::new(row, "ns", tree)
        });
    }
    let at = |count: usize| plan.sizes.iter().position(|size| *size == count);
    if let (Some(few), Some(many)) = (at(100), at(100_000)) {
        let growth = |maker: usize| {
            let of = |size: usize| &series[size * MAKERS.len() + maker];
            Pairs::of(of(few), of(many))
        };
        for (maker, (name, _)) in MAKERS.iter().enumerate() {
            let is_aimed_at = maker == 0 && shape == Shape::Spaces;
            let target = is_aimed_at.then(|| Target::ratio_at_most(2.0));
            let section = "R4/an entry comes and goes, 100,000 beside 100";
            report.add(section, shape.name(), name, |row| {
                growth(maker).row(row, "ns", "100 entries", target)
            });
        }
    }
    Ok(())
}
