//! Building from a sorted sequence, and the memory that a structure takes.

use std::hint::black_box;
use std::time::Instant;

use super::{Context, size_name};
use crate::peers::contest::Contestant;
use crate::peers::contestants::{
    BARE_BTREE, LOCKED_BTREE, OURS, btree, concurrent, ours, rangemap, sorted_vec,
};
use crate::peers::harness::{Build, Effort, Entrant, Sample, rounds};
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::workload::Workload;

/// Largest time per entry of a bulk build, ns.
const PER_ENTRY: f64 = 40.0;

/// Adds the time to build, for one size. Freeing what was built is not part of it.
///
/// The tree and its baseline take turns by themselves: what other structures leave behind in the allocator's lists
/// would be measured with them.
pub fn bulk(workload: &Workload, effort: Effort, report: &mut Report) {
    let mut both = [
        (OURS, builder::<ours::Ours>(workload)),
        (BARE_BTREE, builder::<btree::Bare>(workload)),
    ];
    let summaries = summaries(&mut both, effort);
    let baseline = summaries.last().map_or(0.0, |(_, summary)| summary.median);
    let mut others = [
        (
            rangemap::Locked::NAME,
            builder::<rangemap::Locked>(workload),
        ),
        (
            sorted_vec::Swapped::NAME,
            builder::<sorted_vec::Swapped>(workload),
        ),
        (concurrent::Scc::NAME, builder::<concurrent::Scc>(workload)),
        (
            concurrent::Concurrent::NAME,
            builder::<concurrent::Concurrent>(workload),
        ),
        (
            concurrent::Skip::NAME,
            builder::<concurrent::Skip>(workload),
        ),
    ];
    let few = Effort {
        rounds: effort.rounds.min(9),
        warm_up: 1,
        ..effort
    };
    let others = self::summaries(&mut others, few);
    for (name, summary) in summaries.into_iter().chain(others) {
        report.add(
            "bulk build, per entry",
            &size_name(workload.len()),
            name,
            |row| {
                let target = (name == OURS).then(|| Target::at_most(PER_ENTRY));
                Row::new(row, "ns", summary)
                    .beside(BARE_BTREE, baseline)
                    .target(target)
            },
        );
    }
}

fn summaries(
    builders: &mut [(&'static str, Sample<'_>)],
    effort: Effort,
) -> Vec<(&'static str, Summary)> {
    let names: Vec<_> = builders.iter().map(|(name, _)| *name).collect();
    let mut samples: Vec<Sample<'_>> = builders
        .iter_mut()
        .map(|(_, build)| Box::new(build) as Sample<'_>)
        .collect();
    let series = rounds(&mut samples, effort);
    names
        .into_iter()
        .zip(series.iter().map(|samples| Summary::of(samples)))
        .collect()
}

fn builder<C: Contestant>(workload: &Workload) -> Sample<'_> {
    Box::new(|| {
        let begin = Instant::now();
        let built = black_box(C::bulk(workload));
        let elapsed = begin.elapsed();
        drop(built);
        elapsed.as_nanos() as f64 / workload.len() as f64
    })
}

/// Adds the bytes per entry that the structures of a field took when they had been built, records included.
pub fn memory(context: Context<'_>, report: &mut Report) {
    let bytes = |name: &str, build: Build| {
        context
            .field
            .all()
            .find(|e| e.name() == name && e.build() == build)
            .map_or(0.0, Entrant::bytes_per_entry)
    };
    for entrant in context.field.all() {
        let line = format!("{} {}", entrant.name(), entrant.build().name());
        report.add(
            "memory per entry",
            &size_name(context.workload.len()),
            &line,
            |name| {
                let baseline = bytes(LOCKED_BTREE, entrant.build());
                Row::new(name, "bytes", Summary::once(entrant.bytes_per_entry()))
                    .beside(LOCKED_BTREE, baseline)
            },
        );
    }
}
