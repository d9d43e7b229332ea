//! Edits: remove and insert an entry, split one in three and back.

use super::{Context, size_name};
use crate::peers::IS_NATIVE;
use crate::peers::contestants::{BARE_BTREE, OURS};
use crate::peers::harness::{EditEntrant, Sample, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::Target;

/// Adds the rows of one size.
pub fn run(context: Context<'_>, report: &mut Report) {
    let span = context.effort.span;
    let size = context.workload.len();
    measure(
        context,
        "remove+insert",
        pair_target(size),
        &|e| e.pairs(span),
        report,
    );
    measure(
        context,
        "split+back",
        Some(Target::ratio_at_most(0.8)),
        &|e| e.splits(span),
        report,
    );
}

/// What a pair may cost beside the bare map; set at two sizes.
fn pair_target(size: usize) -> Option<Target> {
    match size {
        10_000 if IS_NATIVE => Some(Target::ratio_at_most(1.6)),
        10_000 => Some(Target::ratio_at_most(2.0)),
        100_000 => Some(Target::ratio_at_most(1.2)),
        _ => None,
    }
}

fn measure(
    context: Context<'_>,
    section: &str,
    target: Option<Target>,
    sample: &dyn Fn(&dyn EditEntrant) -> f64,
    report: &mut Report,
) {
    let entrants: Vec<&dyn EditEntrant> = context.field.edited().collect();
    let mut contenders: Vec<Sample<'_>> = entrants
        .iter()
        .map(|&e| Box::new(move || sample(e)) as Sample<'_>)
        .collect();
    let series = rounds(&mut contenders, context.effort);
    let bare = entrants
        .iter()
        .position(|e| e.name() == BARE_BTREE)
        .map_or(&[][..], |i| &series[i]);
    for (entrant, samples) in entrants.iter().zip(&series) {
        let line = format!("{} {}", entrant.name(), entrant.build().name());
        report.add(section, &size_name(context.workload.len()), &line, |name| {
            let target = target.filter(|_| entrant.name() == OURS);
            Pairs::of(bare, samples).row(name, "ns", BARE_BTREE, target)
        });
    }
}
