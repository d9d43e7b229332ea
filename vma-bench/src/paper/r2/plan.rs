//! What is measured how often.

use super::bed::Effort;
use crate::paper::memory::fits;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The size that factors are claimed for.
pub(super) const CLAIMED: u64 = 2 * GIB;

const SIZES: [u64; 3] = [64 * MIB, 512 * MIB, 2 * GIB];
/// Together the samples.
const REPETITIONS: usize = 3;
const RUNS: usize = 5;
const QUICK_LIMIT: u64 = 512 * MIB;

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Of A's mapping, in bytes, smallest first.
    pub(super) sizes: Vec<u64>,
    /// How often the load is begun anew, in each order.
    pub(super) repetitions: usize,
    /// What is measured beside it each time, with each number of probes.
    pub(super) effort: Effort,
    /// The same of the control.
    pub(super) control: Effort,
    /// What was left out, and why.
    pub(super) notes: Vec<String>,
}

/// A's mapping, what a child has kept of the last one, and the rest.
fn need(bytes: u64) -> u64 {
    2 * bytes + 512 * MIB
}

/// Sizes that fit into `available` bytes of memory, none above `max`; no more than `most` samples.
pub(super) fn plan(quick: bool, max: Option<u64>, available: Option<u64>, most: usize) -> Plan {
    let mut notes = Vec::new();
    let mut sizes = Vec::new();
    for bytes in SIZES {
        if (quick && bytes > QUICK_LIMIT) || max.is_some_and(|max| bytes > max) {
            continue;
        }
        if !fits(bytes, need(bytes), available, &mut notes) {
            continue;
        }
        sizes.push(bytes);
    }
    // A smaller one was asked for.
    sizes.extend(max.filter(|max| (PAGE..SIZES[0]).contains(max)));
    let effort = Effort {
        runs: RUNS.min(most),
        turns: if quick { 1 } else { 3 },
    };
    Plan {
        sizes,
        repetitions: REPETITIONS.min(most),
        effort,
        control: Effort {
            runs: effort.runs.min(2),
            ..effort
        },
        notes,
    }
}

impl Plan {
    /// For the progress bar: mebibytes, each order and the control.
    pub(super) fn work(&self) -> u64 {
        let of_sizes = self.sizes.iter().map(|size| weight(*size));
        3 * self.repetitions as u64 * of_sizes.sum::<u64>()
    }
}

/// What one beginning of the load counts in it.
pub(super) fn weight(bytes: u64) -> u64 {
    1 + bytes / MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: usize = usize::MAX;

    #[test]
    fn there_are_fifteen_samples_of_each_and_quick_leaves_out_the_largest() {
        let (quick, full) = (plan(true, None, None, ALL), plan(false, None, None, ALL));
        for plan in [&quick, &full] {
            assert!(plan.repetitions * plan.effort.runs >= 15);
            assert!(plan.control.runs > 0 && plan.control.runs < plan.effort.runs);
        }
        assert_eq!(quick.sizes, [64 * MIB, 512 * MIB]);
        assert_eq!(full.sizes.last(), Some(&CLAIMED));
        assert!(quick.work() < full.work());
    }

    #[test]
    fn what_does_not_fit_is_left_out_and_said() {
        let small = plan(false, None, Some(3 * GIB), ALL);
        assert_eq!(small.sizes, [64 * MIB, 512 * MIB]);
        assert_eq!(small.notes.len(), 1);
        assert!(small.notes[0].starts_with("2 GiB left out: that takes 4608 MiB, and 3072 MiB"));
    }

    #[test]
    fn nothing_is_larger_or_more_often_than_was_asked_for() {
        let small = plan(true, Some(2 * MIB), None, 1);
        assert_eq!(small.sizes, [2 * MIB]);
        assert!(small.notes.is_empty());
        let runs = [small.effort.runs, small.control.runs, small.repetitions];
        assert_eq!(runs, [1; 3]);
        assert!(plan(true, Some(0), None, 1).sizes.is_empty());
    }
}
