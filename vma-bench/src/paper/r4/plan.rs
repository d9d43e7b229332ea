//! What is measured how often.

use std::time::Duration;

use crate::peers::harness::{Effort, Span};

/// Everything.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// Spaces that map the files all the time.
    pub(super) standing: usize,
    /// Rounds in which the locks are watched.
    pub(super) watched: usize,
    /// How long each of their samples is.
    pub(super) watched_span: Span,
    /// Programs behind a sample of holds by kind of call.
    pub(super) programs: u64,
    /// Rounds in which nobody watches.
    pub(super) throughput: Effort,
    /// Mappings in an index.
    pub(super) sizes: Vec<usize>,
    pub(super) index: Effort,
}

/// As many as the tasks of the source.
const STANDING: usize = 160;
/// Mappings of a linked file that a space has, at most while it's being mapped.
const OF_A_SPACE: usize = 5;
const SIZES: [usize; 4] = [100, 1_000, 10_000, 100_000];

const fn span(warm_up: u64, measured: u64) -> Span {
    Span {
        warm_up: Duration::from_micros(warm_up),
        measured: Duration::from_micros(measured),
    }
}

/// Quick or full, with no file mapped more than `max` times and no more than `max_rounds` rounds.
pub(super) fn plan(quick: bool, max: usize, max_rounds: usize) -> Plan {
    let rounds = |in_quick: usize, in_full: usize| {
        let rounds = if quick { in_quick } else { in_full };
        rounds.min(max_rounds)
    };
    let effort = |rounds, span| Effort {
        rounds,
        warm_up: 2,
        span,
    };
    Plan {
        standing: STANDING.min(max / OF_A_SPACE),
        watched: rounds(51, 301),
        watched_span: span(1_000, 5_000),
        programs: 16,
        throughput: effort(rounds(101, 801), span(2_000, 10_000)),
        sizes: SIZES.into_iter().filter(|size| *size <= max).collect(),
        index: effort(rounds(31, 201), span(500, 1_000)),
    }
}

impl Plan {
    /// For the progress bar: rounds, each as much as it takes.
    pub(super) fn work(&self) -> u64 {
        let rounds = 2 * self.watched + self.throughput.rounds + self.index.rounds;
        rounds as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: usize = usize::MAX;

    #[test]
    fn quick_measures_the_same_less_often() {
        let (quick, full) = (plan(true, ALL, ALL), plan(false, ALL, ALL));
        assert_eq!(
            (quick.standing, &quick.sizes),
            (full.standing, &full.sizes),
            "targets are claimed for these"
        );
        assert_eq!(quick.standing, 160);
        assert!(quick.watched < full.watched && quick.index.rounds < full.index.rounds);
        assert!(quick.throughput.rounds < full.throughput.rounds);
        assert!(quick.work() < full.work());
    }

    #[test]
    fn no_index_is_larger_than_was_asked_for() {
        let small = plan(true, 1_000, ALL);
        assert_eq!(small.sizes, [100, 1_000]);
        assert!(small.standing * OF_A_SPACE <= 1_000 && small.standing > 0);
        let smallest = plan(true, 1, ALL);
        assert!(smallest.sizes.is_empty() && smallest.standing == 0);
    }

    #[test]
    fn there_are_no_more_rounds_than_were_asked_for() {
        let plan = plan(false, ALL, 3);
        assert_eq!(plan.work(), 4 * 3);
        assert_eq!((plan.standing, plan.sizes.len()), (STANDING, SIZES.len()));
    }
}
