//! Whether a figure grows with something.

use crate::peers::stats::Summary;

/// A straight line through medians, and how far the samples lie apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trend {
    /// What the line rises by from the first position to the last.
    pub(super) growth: f64,
    /// Distance between the quartiles of all samples, each less the median of its position.
    pub(super) quartiles: f64,
    /// All samples.
    pub(super) samples: u64,
}

impl Trend {
    /// Least squares through the median at each position, in ascending order. No growth with less than two positions.
    pub(super) fn of(series: &[(f64, Vec<f64>)]) -> Self {
        let points: Vec<(f64, f64)> = series
            .iter()
            .map(|(at, samples)| (*at, Summary::of(samples).median))
            .collect();
        let from_median = series
            .iter()
            .zip(&points)
            .flat_map(|((_, samples), point)| samples.iter().map(move |sample| sample - point.1));
        let mut rest: Vec<f64> = from_median.collect();
        rest.sort_by(f64::total_cmp);
        let quartiles = match rest.len() {
            0 => 0.0,
            n => rest[(3 * n / 4).min(n - 1)] - rest[n / 4],
        };
        let span = match (points.first(), points.last()) {
            (Some(first), Some(last)) => last.0 - first.0,
            _ => 0.0,
        };
        Trend {
            growth: slope(&points) * span,
            quartiles,
            samples: rest.len() as u64,
        }
    }
}

/// Of the least-squares line; 0 where there is none.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let square: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    if square > 0.0 {
        let product = points.iter().map(|point| (point.0 - x) * (point.1 - y));
        product.sum::<f64>() / square
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn a_line_is_found_and_its_growth_is_from_end_to_end() {
        let series: Vec<_> = [0.0, 10.0, 20.0, 40.0]
            .map(|x| (x, vec![5.0 + 3.0 * x; 3]))
            .into();
        let trend = Trend::of(&series);
        assert!(close(trend.growth, 120.0) && close(trend.quartiles, 0.0));
        assert_eq!(trend.samples, 12);
    }

    #[test]
    fn wild_samples_move_neither_line_nor_quartiles() {
        let flat = vec![10.0, 11.0, 9.0, 10.0, 1e9];
        let trend = Trend::of(&[(0.0, flat.clone()), (1.0, flat.clone()), (2.0, flat)]);
        assert!(close(trend.growth, 0.0), "{trend:?}");
        assert!((0.5..=2.0).contains(&trend.quartiles), "{trend:?}");
    }

    #[test]
    fn without_two_positions_nothing_grows() {
        for series in [vec![], vec![(1.0, vec![3.0])], vec![(1.0, vec![])]] {
            assert!(close(Trend::of(&series).growth, 0.0));
        }
    }
}
