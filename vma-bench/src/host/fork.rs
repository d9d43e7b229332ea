//! A space duplicated beside fork(2).
//!
//! fork copies a whole process: what the mappings or pages in question cost is the difference to a fork, and to a dup, without
//! them, divided by their number. The copy on the kernel ends at once; waiting for it, and dropping the space's copy, is no part of the
//! time. It runs on the other core meanwhile, if there is one.

use std::time::Instant;

use vma_core::paged::{FramePool, Paged};
use vma_core::{AddressSpace, Advice, Prot};

use super::sys::{Copy, HostPages};
use super::{PAGE, map, per_page, space, touch};
use crate::peers::harness::{Effort, Sample, rounds};
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;

/// Mappings whose copying is measured.
const VMAS: u64 = 1000;

/// All of it.
pub(super) fn measure(quick: bool, effort: Effort, report: &mut Report) {
    let few = |rounds: usize| Effort {
        rounds: effort.rounds.min(rounds),
        warm_up: 1,
        ..effort
    };
    mappings(effort, report);
    let sizes: &[(u64, usize)] = if quick {
        &[(64, 9), (512, 3)]
    } else {
        &[(64, 31), (512, 9)]
    };
    for (mib, rounds) in sizes {
        pages(*mib, few(*rounds), report);
    }
    let large = if quick { 1 << 10 } else { 4 << 10 };
    shared_tables(large, few(if quick { 3 } else { 5 }), report);
    let sizes: &[u64] = if quick { &[512] } else { &[512, 8192] };
    for pages in sizes {
        first_stores(*pages, few(31), report);
    }
}

fn dup(space: &AddressSpace<Paged>) -> AddressSpace<Paged> {
    space.dup().expect("there is memory for a copy")
}

/// Nanoseconds that `f` takes; what it returns is dropped afterwards.
fn timed<T>(f: impl FnOnce() -> T) -> f64 {
    let begin = Instant::now();
    let result = f();
    let ns = begin.elapsed().as_nanos() as f64;
    drop(result);
    ns
}

/// An untimed copy first: the host's fork of a moment ago has write-protected this process's memory, the library's as well, so that each
/// page of it that is stored to faults once in the kernel, which is no part of what a dup does.
fn timed_dup(space: &AddressSpace<Paged>) -> f64 {
    drop(dup(space));
    timed(|| dup(space))
}

/// The same with a store to the first page in between, which makes the way to it the parent's own again.
fn timed_dup_of(space: &AddressSpace<Paged>, at: u64) -> f64 {
    drop(dup(space));
    touch(&mut space.accessor(), at, 1);
    timed(|| dup(space))
}

fn fork() -> f64 {
    timed(|| Copy::brief().expect("the kernel has memory for a copy"))
}

fn populate(space: &AddressSpace<Paged>, pages: u64) -> u64 {
    let at = map(space, pages);
    let populated = space.advise(at, pages * PAGE, Advice::POPULATE_WRITE);
    populated.expect("mapped to be written, and the pool has no limit");
    at
}

/// The difference between two series round by round, per unit.
fn difference(with: &[f64], without: &[f64], units: u64) -> Vec<f64> {
    let pairs = with.iter().zip(without);
    pairs.map(|(a, b)| (a - b) / units as f64).collect()
}

/// Four series (the kernel's and ours, each with and without) become two rows.
fn compare(section: &str, column: &str, series: &[Vec<f64>], units: u64, report: &mut Report) {
    let kernel = Summary::of(&difference(&series[0], &series[1], units));
    let ours = Summary::of(&difference(&series[2], &series[3], units));
    report.add(section, column, "kernel", |row| Row::new(row, "ns", kernel));
    report.add(section, column, "paged", |row| {
        Row::new(row, "ns", ours)
            .beside("kernel", kernel.median)
            .target(Some(Target::ratio_at_most(0.3)))
    });
}

/// Mappings of a page each, with alternating rights, nothing populated.
fn mappings(effort: Effort, report: &mut Report) {
    let pool = FramePool::default();
    let (many, none) = (space(&pool), space(&pool));
    let at = map(&many, VMAS);
    for page in (1..VMAS).step_by(2) {
        let split = many.protect(at + page * PAGE, PAGE, Prot::READ);
        split.expect("far from the limit of mappings");
    }
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| {
            let host = HostPages::map(VMAS as usize).expect("the kernel has memory");
            host.split().expect("far from the limit of mappings");
            fork()
        }),
        Box::new(fork),
        Box::new(|| timed_dup(&many)),
        Box::new(|| timed_dup(&none)),
    ];
    let series = rounds(&mut contenders, effort);
    let column = format!("{VMAS} VMAs");
    compare("host/fork, per VMA", &column, &series, VMAS, report);
}

/// One mapping, populated.
fn pages(mib: u64, effort: Effort, report: &mut Report) {
    let pages = mib << 8;
    let pool = FramePool::default();
    let (full, empty) = (space(&pool), space(&pool));
    map(&empty, pages);
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| {
            let host = HostPages::map(pages as usize).expect("the kernel has memory");
            host.touch();
            fork()
        }),
        Box::new(|| {
            let _host = HostPages::map(pages as usize).expect("the kernel has memory");
            fork()
        }),
        Box::new(|| {
            let at = populate(&full, pages);
            let ns = timed_dup_of(&full, at);
            full.unmap(at, pages * PAGE).expect("mapped");
            ns
        }),
        Box::new(|| timed_dup(&empty)),
    ];
    let series = rounds(&mut contenders, effort);
    let column = format!("{mib} MiB");
    compare(
        "host/fork, per populated page",
        &column,
        &series,
        pages,
        report,
    );
}

/// Tables are shared from the top: what is populated below costs nothing.
fn shared_tables(large_mib: u64, effort: Effort, report: &mut Report) {
    const SMALL_MIB: u64 = 4;
    /// Of which the median is one sample.
    const DUPS: usize = 15;
    let pool = FramePool::with_spare(usize::MAX, (large_mib << 8) as usize);
    let sample = |mib: u64| {
        let space = space(&pool);
        let at = populate(&space, mib << 8);
        // Of several, as the heap's growing and shrinking is half of the time of some.
        let times: Vec<f64> = (0..DUPS).map(|_| timed_dup_of(&space, at)).collect();
        Summary::of(&times).median
    };
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| sample(SMALL_MIB)),
        Box::new(|| sample(large_mib)),
    ];
    let series = rounds(&mut contenders, effort);
    let small = Summary::of(&series[0]);
    let section = "host/dup, whole call";
    let name = format!("{SMALL_MIB} MiB populated");
    report.add(section, "paged", &name, |row| Row::new(row, "ns", small));
    report.add(
        section,
        "paged",
        &format!("{large_mib} MiB populated"),
        |row| {
            Row::new(row, "ns", Summary::of(&series[1]))
                .beside(&name, small.median)
                .target(Some(Target::ratio_at_most(2.0)))
        },
    );
}

/// The parent's first store to each page while the copy is there: copy on write.
fn first_stores(pages: u64, effort: Effort, report: &mut Report) {
    let pool = FramePool::default();
    let space = space(&pool);
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| {
            let host = HostPages::map(pages as usize).expect("the kernel has memory");
            host.touch();
            let copy = Copy::staying().expect("the kernel has memory for a copy");
            let ns = per_page(pages, || host.touch());
            drop(copy);
            ns
        }),
        Box::new(|| {
            let at = populate(&space, pages);
            let mut cpu = space.accessor();
            // As in `timed_dup`: the frames that copies will be in are stored to.
            let copy = dup(&space);
            touch(&mut cpu, at, pages);
            drop(copy);
            let copy = dup(&space);
            let ns = per_page(pages, || touch(&mut cpu, at, pages));
            drop(copy);
            space.unmap(at, pages * PAGE).expect("mapped");
            ns
        }),
    ];
    let series = rounds(&mut contenders, effort);
    let kernel = Summary::of(&series[0]);
    let column = format!("{pages} pages");
    let section = "host/copy on write, per page";
    report.add(section, &column, "kernel", |row| {
        Row::new(row, "ns", kernel)
    });
    report.add(section, &column, "paged", |row| {
        Row::new(row, "ns", Summary::of(&series[1]))
            .beside("kernel", kernel.median)
            .target(Some(Target::ratio_at_most(0.6)))
    });
}
