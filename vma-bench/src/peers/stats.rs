//! Medians and spreads.

/// What a series of samples says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// Distance between the quartiles, in percent of the median.
    pub spread: f64,
    /// Number of samples.
    pub samples: u64,
}

impl Summary {
    /// Summary of `samples`; all zero when there are none.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = quantile(&sorted, 0.5);
        let iqr = quantile(&sorted, 0.75) - quantile(&sorted, 0.25);
        let spread = if median == 0.0 {
            0.0
        } else {
            100.0 * iqr / median
        };
        Self {
            median,
            spread,
            samples: samples.len() as u64,
        }
    }

    /// One figure that was measured once (bytes).
    pub fn once(value: f64) -> Self {
        Self {
            median: value,
            spread: 0.0,
            samples: 1,
        }
    }
}

/// Linear interpolation between the two nearest ranks.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let rank = q * last as f64;
    let low = (0..last)
        .take_while(|&next| (next + 1) as f64 <= rank)
        .count();
    let high = (low + 1).min(last);
    sorted[low] + (sorted[high] - sorted[low]) * (rank - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_quartiles_of_an_odd_series() {
        let s = Summary::of(&[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert!((s.median - 3.0).abs() < 1e-9);
        assert!((s.spread - 100.0 * 2.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn one_wild_sample_does_not_move_the_median() {
        assert!((Summary::of(&[1.0, 1.0, 1.0, 1e9]).median - 1.0).abs() < 1e-9);
    }

    #[test]
    fn empty_series_is_zero() {
        assert_eq!(
            Summary::of(&[]),
            Summary {
                median: 0.0,
                spread: 0.0,
                samples: 0
            }
        );
    }
}
