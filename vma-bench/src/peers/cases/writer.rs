//! Lookups beside a thread that edits without pause: the median against the idle one, and the tail of single calls.
//!
//! The tail is timed call by call; a loop that does nothing, timed alike between the lookups, shows how much of each
//! figure is the clock's and the machine's.

use super::{Context, size_name};
use crate::peers::contestants::OURS;
use crate::peers::harness::{EditEntrant, Sample, Tails, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys;

/// Largest p99.9 of a lookup beside the writer, ns.
const TAIL: f64 = 500.0;

/// Adds the rows of one size; none on a machine with one core.
pub fn run(context: Context<'_>, report: &mut Report) {
    if sys::cores() < 2 {
        return;
    }
    let entrants: Vec<&dyn EditEntrant> = context
        .field
        .edited()
        .filter(|e| e.survives_writer())
        .collect();
    medians(context, &entrants, report);
    for beside_writer in [false, true] {
        tails(context, &entrants, beside_writer, report);
    }
}

/// At most this times the idle time.
fn slowdown(size: usize) -> Option<Target> {
    match size {
        0..1_000 => None,
        1_000..10_000 => Some(Target::ratio_at_most(1.5)),
        _ => Some(Target::ratio_at_most(1.25)),
    }
}

fn medians(context: Context<'_>, entrants: &[&dyn EditEntrant], report: &mut Report) {
    use crate::peers::contest::Order::Independent;
    let span = context.effort.span;
    let mut contenders: Vec<Sample<'_>> = Vec::new();
    for &entrant in entrants {
        contenders.push(Box::new(move || entrant.lookups(Independent, 1, span)));
        contenders.push(Box::new(move || entrant.lookups_beside_writer(span)));
    }
    let series = rounds(&mut contenders, context.effort);
    for (entrant, pair) in entrants.iter().zip(series.chunks(2)) {
        let [idle, busy] = pair else { continue };
        let line = format!("{} {}", entrant.name(), entrant.build().name());
        let target = slowdown(context.workload.len()).filter(|_| entrant.name() == OURS);
        report.add(
            "beside a writer/lookup",
            &size_name(context.workload.len()),
            &line,
            |name| Pairs::of(idle, busy).row(name, "ns", "its idle time", target),
        );
    }
}

fn tails(
    context: Context<'_>,
    entrants: &[&dyn EditEntrant],
    beside_writer: bool,
    report: &mut Report,
) {
    let mut all: Vec<Tails> = entrants.iter().map(|_| Tails::default()).collect();
    let span = context.effort.span;
    let mut contenders: Vec<Sample<'_>> = entrants
        .iter()
        .zip(&mut all)
        .map(|(entrant, tails)| {
            Box::new(move || {
                entrant.tails(beside_writer, span, tails);
                0.0
            }) as Sample<'_>
        })
        .collect();
    rounds(&mut contenders, context.effort);
    drop(contenders);
    let case = if beside_writer {
        "beside a writer"
    } else {
        "idle"
    };
    for (entrant, tails) in entrants.iter().zip(&all) {
        let line = format!("{} {}", entrant.name(), entrant.build().name());
        add_tails(
            context,
            case,
            &line,
            tails,
            beside_writer && entrant.name() == OURS,
            report,
        );
    }
}

/// Percentiles and their names.
const POINTS: [(f64, &str); 4] = [
    (50.0, "p50"),
    (99.0, "p99"),
    (99.9, "p99.9"),
    (100.0, "max"),
];

fn add_tails(
    context: Context<'_>,
    case: &str,
    line: &str,
    tails: &Tails,
    targeted: bool,
    report: &mut Report,
) {
    for (percentile, point) in POINTS {
        let ns = |histogram: &hdrhistogram::Histogram<u64>| {
            histogram.value_at_percentile(percentile) as f64 * sys::tick_ns()
        };
        let summary = Summary {
            median: ns(&tails.lookup),
            spread: 0.0,
            samples: tails.lookup.len(),
        };
        let control = ns(&tails.control);
        let target = (targeted && point == "p99.9").then(|| Target::at_most(TAIL));
        let section = format!("{case}/single lookup {point}");
        let column = size_name(context.workload.len());
        report.add(&section, &column, line, |name| {
            Row::new(name, "ns", summary)
                .beside("control loop", control)
                .target(target)
        });
        report.add(
            &section,
            &column,
            &format!("{line}: control loop"),
            |name| {
                let summary = Summary {
                    median: control,
                    spread: 0.0,
                    samples: tails.control.len(),
                };
                Row::new(name, "ns", summary)
            },
        );
    }
}
