//! The address space as a whole: map and unmap with lock, merging and accounting, and its memory per mapping.

use super::{Context, size_name};
use crate::peers::contest::warmed;
use crate::peers::contestants::BARE_BTREE;
use crate::peers::contestants::btree::Bare;
use crate::peers::contestants::space::Space;
use crate::peers::harness::{Build, EditEntrant, Entrant, Sample, Subject, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys;

/// At most this times the bare map's removal and insertion.
const OF_BTREE: f64 = 3.0;
/// The size that it's set for.
const TARGET_SIZE: usize = 10_000;
/// Largest number of bytes per mapping. Below 10k mappings what a space takes when empty counts for more.
const PER_MAPPING: f64 = 200.0;

/// Adds the rows of one size.
pub fn run(context: Context<'_>, report: &mut Report) {
    let workload = context.workload;
    let column = size_name(workload.len());
    let (space, bytes) = sys::live_bytes(|| Space::new(workload));
    let bytes = bytes as f64 / workload.len() as f64;
    let Some(bare) = Subject::<Bare>::new(workload, Build::Grown) else {
        return;
    };

    let span = context.effort.span;
    let (mut in_place, mut placed) = (0, 0);
    let (space, bare_map) = (&space, &bare);
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(move || {
            let step = |picks: &[u32]| picks.iter().for_each(|&pick| space.remap(workload, pick));
            warmed(&workload.picks, &mut in_place, span, step).ns()
        }),
        Box::new(move || {
            let step = |picks: &[u32]| picks.iter().for_each(|_| space.place());
            warmed(&workload.picks, &mut placed, span, step).ns()
        }),
        Box::new(move || bare_map.pairs(span)),
    ];
    let series = rounds(&mut contenders, context.effort);
    let bare_pairs = series.last().map_or(&[][..], |samples| samples);
    for (line, samples) in ["AddressSpace, random place", "AddressSpace, placed by it"]
        .into_iter()
        .zip(&series)
    {
        report.add("map+unmap", &column, line, |name| {
            let target = (workload.len() == TARGET_SIZE).then(|| Target::ratio_at_most(OF_BTREE));
            Pairs::of(bare_pairs, samples).row(name, "ns", BARE_BTREE, target)
        });
    }
    report.add("memory per mapping", &column, "AddressSpace", |name| {
        let target = (workload.len() >= TARGET_SIZE).then(|| Target::at_most(PER_MAPPING));
        Row::new(name, "bytes", Summary::once(bytes))
            .beside(BARE_BTREE, bare.bytes_per_entry())
            .target(target)
    });
}
