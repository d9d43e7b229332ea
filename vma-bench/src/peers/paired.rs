//! Two contenders of the same rounds, compared round by round.
//!
//! A shared machine has phases in which plain code takes up to twice as long, and they last longer than a round. The ratio of two
//! medians mixes phases; the median of the rounds' own ratios doesn't.

use super::row::{Row, Target};
use super::stats::Summary;

/// What two contenders took in the same rounds.
#[derive(Debug, Clone)]
pub struct Pairs {
    /// (ratio, first, second), by ratio.
    sorted: Vec<(f64, f64, f64)>,
}

impl Pairs {
    /// Sample `i` of both is from round `i`.
    pub fn of(first: &[f64], second: &[f64]) -> Self {
        let mut sorted: Vec<_> = first
            .iter()
            .zip(second)
            .filter(|(first, _)| **first > 0.0)
            .map(|(first, second)| (second / first, *first, *second))
            .collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        Pairs { sorted }
    }

    /// Median of second / first.
    pub fn ratio(&self) -> f64 {
        self.middle().0
    }

    fn ratios(&self) -> Summary {
        let ratios: Vec<f64> = self.sorted.iter().map(|pair| pair.0).collect();
        Summary::of(&ratios)
    }

    /// The round with the median ratio.
    fn middle(&self) -> (f64, f64, f64) {
        let middle = self.sorted.get(self.sorted.len() / 2);
        middle.copied().unwrap_or_default()
    }

    /// Where the median ratio lies with at least 95 % confidence, whatever the distribution: order statistics of the binomial.
    pub fn interval(&self) -> (f64, f64) {
        let middle = self.sorted.len() / 2;
        // 1.96 standard deviations, each half a root of the count.
        let reach = self.sorted.len().isqrt() + 1;
        let at = |rank: usize| self.sorted.get(rank).map_or(0.0, |pair| pair.0);
        let last = self.sorted.len().saturating_sub(1);
        (
            at(middle.saturating_sub(reach)),
            at((middle + reach).min(last)),
        )
    }

    /// The median ratio and the ends of its [interval](Self::interval), each with its name: lines of a table in `x`.
    pub fn with_interval(&self) -> [(&'static str, Summary); 3] {
        let (low, high) = self.interval();
        let ratios = self.ratios();
        let end = |ratio| Summary {
            samples: ratios.samples,
            ..Summary::once(ratio)
        };
        let median = Summary {
            median: self.ratio(),
            ..ratios
        };
        [("low", end(low)), ("median", median), ("high", end(high))]
    }

    /// The second one's figure beside the first one's, both from the round with the median ratio; the spread is the ratios'.
    pub fn row(&self, name: String, unit: &str, first: &str, target: Option<Target>) -> Row {
        let (_, baseline, value) = self.middle();
        let summary = Summary {
            median: value,
            ..self.ratios()
        };
        Row::new(name, unit, summary)
            .beside(first, baseline)
            .target(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the slow phase both take twice as long: each contender's own median says nothing, the ratios do.
    #[test]
    fn phases_of_the_machine_leave_the_ratio_alone() {
        let first = [1.0, 1.0, 2.0, 2.0, 2.0];
        let second = [1.1, 1.1, 2.2, 2.2, 2.2];
        let pairs = Pairs::of(&first, &second);
        assert!((pairs.ratio() - 1.1).abs() < 1e-9);
        let row = pairs.row("x".to_owned(), "ns", "first", None);
        assert_eq!(row.ratio, Some(1.1));
    }

    #[test]
    fn one_wild_round_moves_neither_ratio_nor_interval() {
        let first = [1.0; 101];
        let mut second = [1.2; 101];
        second[50] = 100.0;
        let pairs = Pairs::of(&first, &second);
        let (low, high) = pairs.interval();
        assert!((low - 1.2).abs() < 1e-9 && (high - 1.2).abs() < 1e-9);
    }

    #[test]
    fn the_interval_holds_the_median_and_narrows_with_more_rounds() {
        let ramp = |count: u32| {
            let second: Vec<f64> = (0..count).map(f64::from).collect();
            let pairs = Pairs::of(&vec![1.0; count as usize], &second);
            let (low, high) = pairs.interval();
            assert!(low <= pairs.ratio() && pairs.ratio() <= high);
            (high - low) / f64::from(count)
        };
        assert!(ramp(1000) < ramp(50));
    }

    #[test]
    fn the_interval_is_shown_from_low_to_high_around_the_ratio() {
        let second: Vec<f64> = (0..101).map(f64::from).collect();
        let pairs = Pairs::of(&[1.0; 101], &second);
        let lines = pairs.with_interval();
        assert_eq!(lines.map(|line| line.0), ["low", "median", "high"]);
        let values = lines.map(|line| line.1.median);
        assert!(values.is_sorted() && (values[1] - 50.0).abs() < 1e-9);
        assert!(lines.iter().all(|line| line.1.samples == 101));
    }

    #[test]
    fn no_rounds_give_no_ratio() {
        let pairs = Pairs::of(&[], &[]);
        assert_eq!(pairs.interval(), (0.0, 0.0));
        assert!(pairs.ratio() == 0.0);
    }
}
