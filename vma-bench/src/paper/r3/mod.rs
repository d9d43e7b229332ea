//! R3: many threads look at all spaces at once.
//!
//! Before, whoever looks at a space takes a reference and drops it again, and all threads write the same counts; after, a guard
//! suffices, and what was found is asked in place whether it still is.
//!
//! | way | per space |
//! |---|---|
//! | reference | one more user, a look, one user less (`System::get`): the count of users and that of the record, up and down |
//! | guard | a look: no count is touched (`System::find`, `System::iter`) |
//!
//! A look is the first mapping of the space. All the while another thread creates spaces and ends them, some 2,000 in a second, in the same
//! registry. One thread and two are compared round by round: what the second one costs is what is shared. A lookup is compared with that in a tree of
//! as many numbers, each with its own pin.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts and nanoseconds of a run are far below 2^52"
)]

mod bed;

use std::time::Duration;

use self::bed::Bed;
pub use self::bed::R3Error;
use super::{PaperArgs, say};
use crate::peers::harness::{Effort, Sample, Span, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys::{Seat, cores, sit};

/// What a second thread may cost who goes under a guard.
const SECOND_THREAD: f64 = 1.2;
/// What a lookup may cost beside one in a tree alone.
const OF_TREE: f64 = 1.5;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    WalkByReference,
    WalkUnderGuard,
    GetByReference,
    FindUnderGuard,
    PlainTree,
}

impl Way {
    const ALL: [Way; 5] = [
        Way::WalkByReference,
        Way::WalkUnderGuard,
        Way::GetByReference,
        Way::FindUnderGuard,
        Way::PlainTree,
    ];

    fn section(self) -> &'static str {
        match self {
            Way::WalkByReference | Way::WalkUnderGuard => "R3/walk over all spaces, per space",
            Way::GetByReference | Way::FindUnderGuard | Way::PlainTree => "R3/lookup by number",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Way::WalkByReference | Way::GetByReference => "reference",
            Way::WalkUnderGuard | Way::FindUnderGuard => "guard (default)",
            Way::PlainTree => "a tree of numbers",
        }
    }

    fn is_ours(self) -> bool {
        matches!(self, Way::WalkUnderGuard | Way::FindUnderGuard)
    }
}

/// Measures everything.
///
/// # Errors
/// [`R3Error`]; what was measured until then is in the report.
pub fn run(args: &PaperArgs, report: &mut Report) -> Result<(), R3Error> {
    sit(Seat::First);
    say(
        args.json,
        "the source: 100 parallel ps on 100 CPUs, 90 % of the time in the kernel before, about 60 % after",
    );
    if cores() < 2 {
        say(
            args.json,
            "one core only: nothing is measured with two threads",
        );
    }
    let counts: &[usize] = if args.quick { &[1000] } else { &[100, 1000] };
    let most = args.max_rounds.map_or(usize::MAX, |most| most as usize);
    let effort = Effort {
        rounds: if args.quick { 51 } else { 201 }.min(most),
        warm_up: 3.min(most),
        span: Span {
            warm_up: Duration::from_millis(1),
            measured: Duration::from_millis(4),
        },
    };
    for &count in counts {
        let bed = Bed::new(count)?;
        let measured = bed.beside_churn(|| {
            by_count(&bed, count, effort, report);
        });
        measured?;
    }
    Ok(())
}

/// Numbers of threads that are measured.
fn crews() -> &'static [usize] {
    if cores() > 1 { &[1, 2] } else { &[1] }
}

fn by_count(bed: &Bed, count: usize, effort: Effort, report: &mut Report) {
    let cases: Vec<(Way, usize)> = Way::ALL
        .iter()
        .flat_map(|way| crews().iter().map(|threads| (*way, *threads)))
        .collect();
    let mut contenders: Vec<Sample<'_>> = cases
        .iter()
        .map(|&(way, threads)| {
            Box::new(move || bed.sample(way, threads, effort.span)) as Sample<'_>
        })
        .collect();
    let series = rounds(&mut contenders, effort);
    let of = |way: Way, threads: usize| {
        let at = cases.iter().position(|case| *case == (way, threads));
        at.map_or(&[][..], |at| &series[at])
    };
    let column = format!("{count} spaces");
    for (&(way, threads), samples) in cases.iter().zip(&series) {
        let line = match threads {
            1 => format!("{}, 1 thread", way.name()),
            _ => format!("{}, {threads} threads", way.name()),
        };
        report.add(way.section(), &column, &line, |row| {
            if threads > 1 {
                let target = way.is_ours().then(|| Target::ratio_at_most(SECOND_THREAD));
                return Pairs::of(of(way, 1), samples).row(row, "ns", "1 thread", target);
            }
            match way {
                Way::FindUnderGuard => {
                    let target = Some(Target::ratio_at_most(OF_TREE));
                    let tree = Way::PlainTree;
                    Pairs::of(of(tree, 1), samples).row(row, "ns", tree.name(), target)
                }
                Way::WalkByReference => {
                    let ours = Way::WalkUnderGuard;
                    Pairs::of(of(ours, 1), samples).row(row, "ns", ours.name(), None)
                }
                Way::GetByReference => {
                    let ours = Way::FindUnderGuard;
                    Pairs::of(of(ours, 1), samples).row(row, "ns", ours.name(), None)
                }
                Way::WalkUnderGuard | Way::PlainTree => Row::new(row, "ns", Summary::of(samples)),
            }
        });
    }
}
