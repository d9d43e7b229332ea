//! Search for a free gap in a fragmented space, lowest and highest fit, beside a walk over a `BTreeMap`.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

use vma_rcu::tree::GapRequest;

use super::{Context, size_name};
use crate::peers::contest::Contestant;
use crate::peers::contestants::ours::Ours;
use crate::peers::harness::{Sample, Span, rounds};
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::workload::{PAGE, Rng, Workload};

/// Largest time of a search among [`TARGET_SIZE`] entries, ns.
const PER_SEARCH: f64 = 150.0;
const TARGET_SIZE: usize = 100_000;
/// Requests made beforehand.
const REQUESTS: usize = 1 << 12;
/// Searches between two looks at the clock: a walk can take long.
const CHUNK: usize = 16;
const WALK: &str = "BTreeMap walk";

/// Which end of the window is searched from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Lowest,
    Highest,
}

/// Adds the rows of one size.
pub fn run(context: Context<'_>, report: &mut Report) {
    let workload = context.workload;
    let tree = Ours::grown(workload).unwrap_or_else(|| Ours::bulk(workload));
    let map: BTreeMap<u64, u64> = workload.entries.iter().map(|e| (e.start, e.end)).collect();
    for fit in [Fit::Lowest, Fit::Highest] {
        let requests = requests(workload, fit);
        let span = context.effort.span;
        let (mut ours_at, mut walk_at) = (0, 0);
        let mut contenders: Vec<Sample<'_>> = vec![
            Box::new(|| ours(&tree, fit, &requests, &mut ours_at, span)),
            Box::new(|| walk(&map, fit, &requests, &mut walk_at, span)),
        ];
        let series = rounds(&mut contenders, context.effort);
        let [ours, walked] = [0, 1].map(|i| Summary::of(&series[i]));
        let section = match fit {
            Fit::Lowest => "gap search/lowest fit",
            Fit::Highest => "gap search/highest fit",
        };
        let column = size_name(workload.len());
        report.add(section, &column, Ours::NAME, |name| {
            let target = (workload.len() == TARGET_SIZE).then(|| Target::at_most(PER_SEARCH));
            Row::new(name, "ns", ours)
                .beside(WALK, walked.median)
                .target(target)
        });
        report.add(section, &column, WALK, |name| Row::new(name, "ns", walked));
    }
}

/// A third each small (nearly every gap fits), medium, and large (one gap in a thousand fits), from random places on.
fn requests(workload: &Workload, fit: Fit) -> Vec<(u64, Range<u64>)> {
    let mut rng = Rng::new(7);
    let end = workload.end();
    (0..REQUESTS)
        .map(|_| {
            let pages = match rng.below(3) {
                0 => 1 + rng.below(8),
                1 => 16 + rng.below(128),
                _ => 512 + rng.below(256),
            };
            let from = workload.entries[rng.below(workload.len() as u64) as usize].start;
            let window = match fit {
                Fit::Lowest => from..end + (1 << 32),
                Fit::Highest => PAGE..from,
            };
            (pages * PAGE, window)
        })
        .collect()
}

/// Runs `search` on the requests, going round, until the budget is used up.
fn over_requests(
    requests: &[(u64, Range<u64>)],
    at: &mut usize,
    span: Span,
    mut search: impl FnMut(u64, &Range<u64>) -> Option<u64>,
) -> f64 {
    let (mut begin, mut done, mut warm) = (Instant::now(), 0u32, false);
    loop {
        for (len, window) in &requests[*at..*at + CHUNK] {
            black_box(search(*len, window));
        }
        done += CHUNK as u32;
        *at = (*at + CHUNK) % REQUESTS;
        let elapsed = begin.elapsed();
        if !warm && elapsed >= span.warm_up {
            (begin, done, warm) = (Instant::now(), 0, true);
        } else if warm && elapsed >= span.measured {
            return elapsed.as_nanos() as f64 / f64::from(done);
        }
    }
}

fn ours(tree: &Ours, fit: Fit, requests: &[(u64, Range<u64>)], at: &mut usize, span: Span) -> f64 {
    let (tree, writer) = tree.halves();
    let writer = writer.lock();
    let view = tree.locked(&writer);
    over_requests(requests, at, span, |len, window| {
        let request = GapRequest {
            len,
            align: 1,
            align_offset: 0,
            window: window.clone(),
        };
        match fit {
            Fit::Lowest => view.lowest_gap(&request),
            Fit::Highest => view.highest_gap(&request),
        }
    })
}

fn walk(
    map: &BTreeMap<u64, u64>,
    fit: Fit,
    requests: &[(u64, Range<u64>)],
    at: &mut usize,
    span: Span,
) -> f64 {
    over_requests(requests, at, span, |len, window| match fit {
        Fit::Lowest => walk_up(map, len, window),
        Fit::Highest => walk_down(map, len, window),
    })
}

fn walk_up(map: &BTreeMap<u64, u64>, len: u64, window: &Range<u64>) -> Option<u64> {
    let before = map.range(..=window.start).next_back();
    let mut free = before.map_or(window.start, |(_, &end)| end.max(window.start));
    for (&start, &end) in map.range(window.start + 1..) {
        if start.min(window.end).saturating_sub(free) >= len {
            return Some(free);
        }
        free = end;
    }
    (window.end.saturating_sub(free) >= len).then_some(free)
}

fn walk_down(map: &BTreeMap<u64, u64>, len: u64, window: &Range<u64>) -> Option<u64> {
    let mut top = window.end;
    for (&start, &end) in map.range(..window.end).rev() {
        if top.saturating_sub(end.max(window.start)) >= len {
            return Some(top - len);
        }
        top = top.min(start);
    }
    (top.saturating_sub(window.start) >= len).then(|| top - len)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sides must do the same work, or the ratio says nothing.
    #[test]
    fn tree_and_walk_find_the_same_gap() {
        let w = Workload::new(3000);
        let tree = Ours::bulk(&w);
        let map: BTreeMap<u64, u64> = w.entries.iter().map(|e| (e.start, e.end)).collect();
        let (index, writer) = tree.halves();
        let writer = writer.lock();
        let view = index.locked(&writer);
        for fit in [Fit::Lowest, Fit::Highest] {
            for (len, window) in requests(&w, fit) {
                let request = GapRequest {
                    len,
                    align: 1,
                    align_offset: 0,
                    window: window.clone(),
                };
                let (got, want) = match fit {
                    Fit::Lowest => (view.lowest_gap(&request), walk_up(&map, len, &window)),
                    Fit::Highest => (view.highest_gap(&request), walk_down(&map, len, &window)),
                };
                assert_eq!(got, want, "{fit:?} {len:#x} {window:x?}");
            }
        }
    }
}
