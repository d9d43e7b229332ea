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
pub fn bulk(workload: &Workload, effort: Effort, report: &mut Report) {
    let names = [
        OURS,
        BARE_BTREE,
        rangemap::Locked::NAME,
        sorted_vec::Swapped::NAME,
        concurrent::Scc::NAME,
        concurrent::Concurrent::NAME,
        concurrent::Skip::NAME,
    ];
    let mut contenders: Vec<Sample<'_>> = vec![
        builder::<ours::Ours>(workload),
        builder::<btree::Bare>(workload),
        builder::<rangemap::Locked>(workload),
        builder::<sorted_vec::Swapped>(workload),
        builder::<concurrent::Scc>(workload),
        builder::<concurrent::Concurrent>(workload),
        builder::<concurrent::Skip>(workload),
    ];
    let series = rounds(&mut contenders, effort);
    let baseline = series
        .get(1)
        .map_or(0.0, |samples| Summary::of(samples).median);
    for (name, samples) in names.into_iter().zip(&series) {
        report.add(
            "bulk build, per entry",
            &size_name(workload.len()),
            name,
            |row| {
                let target = (name == OURS).then(|| Target::at_most(PER_ENTRY));
                Row::new(row, "ns", Summary::of(samples))
                    .beside(BARE_BTREE, baseline)
                    .target(target)
            },
        );
    }
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
