//! What is measured how often.

use super::FACTOR_FROM;
use crate::paper::memory::fits;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// One size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) bytes: u64,
    /// Repetitions with nobody beside.
    pub(super) holds: usize,
    /// Repetitions with each kind of operation beside.
    pub(super) stalls: usize,
    /// The size that the factor between exclusive and default is claimed for.
    pub(super) is_factor: bool,
}

/// What one unmapping of `bytes` counts in the progress bar.
pub(super) fn weight(bytes: u64) -> u64 {
    1 + bytes / MIB
}

impl Size {
    pub(super) fn weight(&self) -> u64 {
        weight(self.bytes)
    }
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) quick: bool,
    pub(super) sizes: Vec<Size>,
    /// The size of which more and more is populated.
    pub(super) trend: Option<u64>,
    pub(super) trend_repetitions: usize,
    /// What was left out, and why.
    pub(super) notes: Vec<String>,
}

/// Bytes, repetitions of holds and of stalls: quick, and full.
const SIZES: [(u64, [usize; 2], [usize; 2]); 8] = [
    (4 * KIB, [51, 21], [201, 51]),
    (2 * MIB, [31, 11], [101, 31]),
    (64 * MIB, [9, 5], [15, 9]),
    (512 * MIB, [5, 3], [7, 5]),
    (GIB, [3, 2], [5, 3]),
    (2 * GIB, [0, 0], [5, 2]),
    (4 * GIB, [0, 0], [3, 1]),
    (8 * GIB, [0, 0], [3, 1]),
];

/// Twice the size has to fit: the space's frames stay in its pool while the kernel populates as much. And the pages that faults beside
/// are taken in.
fn need(bytes: u64) -> u64 {
    2 * bytes + 512 * MIB
}

/// Sizes that fit into `available` bytes of memory, none above `max`.
pub(super) fn plan(quick: bool, max: Option<u64>, available: Option<u64>) -> Plan {
    let mut notes = Vec::new();
    let mut sizes = Vec::new();
    for (bytes, in_quick, in_full) in SIZES {
        let [holds, stalls] = if quick { in_quick } else { in_full };
        if holds == 0 || max.is_some_and(|max| bytes > max) {
            continue;
        }
        if !fits(bytes, need(bytes), available, &mut notes) {
            continue;
        }
        sizes.push(Size {
            bytes,
            holds,
            stalls,
            is_factor: false,
        });
    }
    let claimed = sizes
        .iter_mut()
        .rfind(|size| (FACTOR_FROM..=2 * GIB).contains(&size.bytes));
    if let Some(size) = claimed {
        size.is_factor = true;
    }
    let limit = if quick { 512 * MIB } else { GIB };
    let fitting = sizes.iter().rfind(|size| size.bytes <= limit);
    Plan {
        quick,
        trend: fitting.map(|size| size.bytes),
        trend_repetitions: if quick { 11 } else { 15 },
        sizes,
        notes,
    }
}

impl Plan {
    /// The largest size, in bytes.
    pub(super) fn largest(&self) -> u64 {
        self.sizes.last().map_or(0, |size| size.bytes)
    }

    /// For the progress bar.
    pub(super) fn work(&self) -> u64 {
        let unmappings = |size: &Size| (6 * size.holds + 16 * size.stalls) as u64;
        let by_size = self
            .sizes
            .iter()
            .map(|size| unmappings(size) * size.weight());
        let trend = self
            .trend
            .map_or(0, |bytes| 5 * self.trend_repetitions as u64 * weight(bytes));
        by_size.sum::<u64>() + trend
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(plan: &Plan) -> Vec<u64> {
        plan.sizes.iter().map(|size| size.bytes).collect()
    }

    #[test]
    fn quick_stops_at_a_gibibyte_and_claims_the_factor_there() {
        let plan = plan(true, None, None);
        assert_eq!(plan.largest(), GIB);
        assert!(
            plan.sizes
                .iter()
                .all(|size| size.is_factor == (size.bytes == GIB))
        );
        assert_eq!(plan.trend, Some(512 * MIB));
        assert!(plan.notes.is_empty());
    }

    #[test]
    fn the_full_run_claims_it_at_two() {
        let plan = plan(false, None, Some(64 * GIB));
        assert_eq!(plan.largest(), 8 * GIB);
        assert!(
            plan.sizes
                .iter()
                .all(|size| size.is_factor == (size.bytes == 2 * GIB))
        );
    }

    #[test]
    fn what_does_not_fit_is_left_out_and_said() {
        let small = plan(false, None, Some(3 * GIB));
        assert_eq!(bytes(&small), [4 * KIB, 2 * MIB, 64 * MIB, 512 * MIB, GIB]);
        assert_eq!(small.notes.len(), 3);
        assert!(small.notes[0].starts_with("2 GiB left out: that takes 4608 MiB, and 3072 MiB"));
        assert!(small.sizes.last().is_some_and(|size| size.is_factor));
        let none = plan(true, None, Some(0));
        assert!(none.sizes.is_empty() && none.trend.is_none() && none.largest() == 0);
    }

    #[test]
    fn a_limit_that_was_asked_for_needs_no_note() {
        let plan = plan(true, Some(2 * MIB), None);
        assert_eq!(bytes(&plan), [4 * KIB, 2 * MIB]);
        assert!(plan.notes.is_empty() && plan.sizes.iter().all(|size| !size.is_factor));
        assert_eq!(plan.trend, Some(2 * MIB));
    }
}
