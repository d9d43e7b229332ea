//! `vma-bench peers`: the tree and the address space measured beside what one would use instead.
//!
//! One process, pinned threads, interleaved rounds ([`harness`]): drift of the machine hits all contestants alike, and
//! every ratio is of two medians of the same run. All contestants hold the same layout and get the same lists of random
//! addresses ([`workload`]). A figure is only compared with a target when the target was set for its size and for the
//! kind of build; the exit status doesn't depend on it.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts and nanoseconds of a run are far below 2^52"
)]

pub mod cases;
pub mod contest;
pub mod contestants;
pub mod harness;
pub mod locks;
pub mod paired;
pub mod report;
pub mod row;
pub mod stats;
pub mod sys;
pub mod workload;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cases::Context;
use contestants::Field;
use harness::{Effort, Span};
use report::Report;
use sys::Seat;
use workload::Workload;

/// Whether this is a build for a processor with AVX2 (`-C target-cpu=native` here), not for plain x86-64.
pub const IS_NATIVE: bool = cfg!(target_feature = "avx2");

/// `native` or `plain`.
pub fn build_kind() -> &'static str {
    if IS_NATIVE { "native" } else { "plain" }
}

/// Options of `peers`.
#[derive(Debug, Clone, clap::Args)]
pub struct PeersArgs {
    /// Fewer rounds and sizes: about a minute.
    #[arg(long)]
    pub quick: bool,
    /// One JSON object per figure and line.
    #[arg(long)]
    pub json: bool,
    /// Only this part (can be given several times).
    #[arg(long, value_enum)]
    pub suite: Vec<Suite>,
    /// Only layouts of N entries (can be given several times).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub size: Vec<u32>,
}

/// A part of the measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Suite {
    /// Trees, maps and the address space.
    Structures,
    /// Reader-writer locks, and locks on single mappings.
    Locks,
}

/// Measures everything and prints it. Fails only if the output can't be written.
pub fn run(args: &PeersArgs) -> ExitCode {
    let begin = Instant::now();
    let mut report = Report::new("peers", args.json);
    let cores = sys::cores();
    if !args.json {
        header(cores);
    }
    sys::sit(Seat::First);
    let (usual, effort) = plan(args.quick);
    let is_asked = |suite| args.suite.is_empty() || args.suite.contains(&suite);
    if is_asked(Suite::Structures) {
        let asked: Vec<usize> = args.size.iter().map(|&size| size as usize).collect();
        let sizes = if asked.is_empty() { usual } else { &asked };
        structures(sizes, effort, begin, &mut report);
    }
    if is_asked(Suite::Locks) {
        progress("locks", begin);
        locks::run(effort, &mut report);
    }
    match report.finish() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "vma-bench: writing the figures: {error}");
            ExitCode::FAILURE
        }
    }
}

fn structures(sizes: &[usize], effort: Effort, begin: Instant, report: &mut Report) {
    // Before anything else has used the allocator.
    for &size in sizes {
        cases::build::bulk(&Workload::new(size), building(effort, size), report);
    }
    for &size in sizes {
        progress(&format!("{} entries", cases::size_name(size)), begin);
        let workload = Workload::new(size);
        let field = Field::new(&workload);
        let effort = at_size(effort, size);
        cases::all(
            Context {
                workload: &workload,
                field: &field,
                effort,
            },
            report,
        );
    }
}

/// Sizes of layout, and how much is measured. Samples are short: on a machine that is shared, most of them then pass
/// without an interruption, and the median doesn't see the others.
fn plan(quick: bool) -> (&'static [usize], Effort) {
    let warm_up = Duration::from_micros(500);
    if quick {
        let span = Span {
            warm_up,
            measured: Duration::from_micros(500),
        };
        let effort = Effort {
            rounds: 15,
            warm_up: 2,
            span,
        };
        return (&[1_000, 10_000, 100_000], effort);
    }
    let span = Span {
        warm_up,
        measured: Duration::from_millis(1),
    };
    let effort = Effort {
        rounds: 51,
        warm_up: 3,
        span,
    };
    (&[100, 1_000, 10_000, 100_000, 1_000_000], effort)
}

/// Large structures take longer until they are back in the cache; fewer rounds of the largest keep the run short.
fn at_size(effort: Effort, size: usize) -> Effort {
    let (warm_up, rounds) = match size {
        0..100_000 => (effort.span.warm_up, effort.rounds),
        100_000..1_000_000 => (effort.span.warm_up * 10, effort.rounds / 2),
        _ => (effort.span.warm_up * 32, effort.rounds / 5),
    };
    let span = Span {
        warm_up,
        ..effort.span
    };
    Effort {
        rounds,
        span,
        ..effort
    }
}

/// A build takes as long as it takes: fewer rounds where it's long.
fn building(effort: Effort, size: usize) -> Effort {
    match size {
        0..100_000 => effort,
        100_000..1_000_000 => Effort {
            rounds: effort.rounds.min(9),
            warm_up: 1,
            ..effort
        },
        _ => Effort {
            rounds: 3,
            warm_up: 1,
            ..effort
        },
    }
}

fn header(cores: usize) {
    let mut out = io::stdout().lock();
    let _ = writeln!(
        out,
        "{} build, {cores} cores; targets as set for this kind of build",
        build_kind()
    );
    if cores < 2 {
        let _ = writeln!(out, "one core only: no cases with two threads");
    }
}

/// One line per part to standard error: a whole run takes minutes, and its tables come at the end.
fn progress(what: &str, begin: Instant) {
    let seconds = begin.elapsed().as_secs();
    let _ = writeln!(io::stderr(), "{seconds:4} s  measuring {what}");
}
