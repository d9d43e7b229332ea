//! Lookups: independent and dependent addresses, one and two threads.

use super::{Context, size_name};
use crate::peers::contest::Order;
use crate::peers::contestants::{LIMIT, LOCKED_BTREE, OURS};
use crate::peers::harness::{Build, Entrant, Sample, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::Target;
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
    let of = |name: &str, build: Build| {
        let same = entrants
            .iter()
            .position(|e| e.name() == name && e.build() == build);
        same.or_else(|| entrants.iter().position(|e| e.name() == name))
            .map_or(&[][..], |i| &series[i])
    };

    let section = format!("lookup/{}/{threads}t", order.name());
    let column = size_name(context.workload.len());
    let targeted = context.workload.len() <= TARGET_SIZE;
    for (entrant, samples) in entrants.iter().zip(&series) {
        let line = format!("{} {}", entrant.name(), entrant.build().name());
        let is_ours = entrant.name() == OURS;
        let beside_btree = Pairs::of(of(LOCKED_BTREE, entrant.build()), samples);
        report.add(&section, &column, &line, |name| {
            let target = (targeted && is_ours).then(|| Target::ratio_at_most(btree_share(order)));
            beside_btree.row(name, "ns", LOCKED_BTREE, target)
        });
        if is_ours {
            report.add(&section, &column, &line, |name| {
                let target = targeted.then(|| Target::ratio_at_most(OF_LIMIT));
                Pairs::of(of(LIMIT, Build::Bulk), samples).row(name, "ns", LIMIT, target)
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
