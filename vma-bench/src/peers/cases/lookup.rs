//! Lookups: independent and dependent addresses, one and two threads.

use super::{Context, size_name};
use crate::peers::contest::Order;
use crate::peers::contestants::{LIMIT, LOCKED_BTREE, OURS};
use crate::peers::harness::{Build, Entrant, Sample, rounds};
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::{IS_NATIVE, sys};

/// Largest layout that the lookup targets are set for.
const TARGET_SIZE: usize = 10_000;
/// At most this times the static tree.
const OF_LIMIT: f64 = 1.2;
/// At most this times the locked `BTreeMap`.
const OF_BTREE: f64 = 0.65;
/// The same for dependent addresses in a plain build, where a search has no 64-bit vector comparison to itself.
const OF_BTREE_DEPENDENT_PLAIN: f64 = 0.9;

/// Adds the rows of one size.
pub fn run(context: Context<'_>, report: &mut Report) {
    for order in [Order::Independent, Order::Dependent] {
        for threads in 1..=sys::cores().min(2) {
            measure(context, order, threads, report);
        }
    }
}

fn measure(context: Context<'_>, order: Order, threads: usize, report: &mut Report) {
    let entrants: Vec<&dyn Entrant> = context.field.all().collect();
    let span = context.effort.span;
    let mut contenders: Vec<Sample<'_>> = entrants
        .iter()
        .map(|e| Box::new(move || e.lookups(order, threads, span)) as Sample<'_>)
        .collect();
    let series = rounds(&mut contenders, context.effort);
    let summaries: Vec<Summary> = series.iter().map(|samples| Summary::of(samples)).collect();
    let median = |name: &str, build: Build| {
        let same = entrants
            .iter()
            .position(|e| e.name() == name && e.build() == build);
        same.or_else(|| entrants.iter().position(|e| e.name() == name))
            .map_or(0.0, |i| summaries[i].median)
    };

    let section = format!("lookup/{}/{threads}t", order.name());
    let column = size_name(context.workload.len());
    let targeted = context.workload.len() <= TARGET_SIZE;
    for (entrant, &summary) in entrants.iter().zip(&summaries) {
        let line = format!("{} {}", entrant.name(), entrant.build().name());
        let is_ours = entrant.name() == OURS;
        let baseline = median(LOCKED_BTREE, entrant.build());
        report.add(&section, &column, &line, |name| {
            let target = (targeted && is_ours).then(|| Target::ratio_at_most(btree_share(order)));
            Row::new(name, "ns", summary)
                .beside(LOCKED_BTREE, baseline)
                .target(target)
        });
        if is_ours {
            report.add(&section, &column, &line, |name| {
                let target = targeted.then(|| Target::ratio_at_most(OF_LIMIT));
                Row::new(name, "ns", summary)
                    .beside(LIMIT, median(LIMIT, Build::Bulk))
                    .target(target)
            });
        }
    }
}

fn btree_share(order: Order) -> f64 {
    if order == Order::Dependent && !IS_NATIVE {
        OF_BTREE_DEPENDENT_PLAIN
    } else {
        OF_BTREE
    }
}
