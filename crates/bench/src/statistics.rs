//! Figures from samples. Pure.
//!
//! Medians and nearest-rank percentiles, because a noisy machine's outliers say nothing about the
//! program under test and must not move a result.

/// The middle sample, or the mean of the two middle ones. None without samples.
#[must_use]
pub fn median(samples: &[f64]) -> Option<f64> {
    let sorted = sorted(samples);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    Some(f64::midpoint(sorted[middle - 1], upper))
}

/// The smallest sample that at least `percent` of all samples do not exceed. None without samples.
#[must_use]
pub fn percentile(samples: &[f64], percent: u8) -> Option<f64> {
    let sorted = sorted(samples);
    let rank = (sorted.len() * usize::from(percent)).div_ceil(100);
    sorted.get(rank.max(1) - 1).copied()
}

/// The median of one set of samples over that of another. None without samples, or over zero.
#[must_use]
pub fn ratio_of_medians(numerator: &[f64], denominator: &[f64]) -> Option<f64> {
    let below = median(denominator).filter(|below| *below != 0.0)?;
    Some(median(numerator)? / below)
}

/// How many of `count` things came per second, from when the first of them was due to when the last
/// was there. None if no time passed.
#[must_use]
pub fn rate(count: u32, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| f64::from(count) / seconds)
}

/// The slope of the straight line with the least squares through points (x, y). None unless there are two
/// different x.
#[must_use]
pub fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let count = points.iter().map(|_| 1.0).sum::<f64>();
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let joint: f64 = points
        .iter()
        .map(|point| (point.0 - x) * (point.1 - y))
        .sum();
    (spread > 0.0).then(|| joint / spread)
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_odd_number_is_the_middle() {
        assert_eq!(median(&[9.0, 1.0, 5.0]), Some(5.0));
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_middle_ones() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 100.0]), Some(3.5));
    }

    #[test]
    fn nothing_has_no_figures() {
        assert_eq!(median(&[]), None);
        assert_eq!(percentile(&[], 99), None);
        assert_eq!(ratio_of_medians(&[], &[1.0]), None);
        assert_eq!(ratio_of_medians(&[1.0], &[]), None);
    }

    #[test]
    fn a_percentile_is_one_of_the_samples() {
        let samples: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&samples, 50), Some(100.0));
        assert_eq!(percentile(&samples, 99), Some(198.0));
        assert_eq!(percentile(&samples, 100), Some(200.0));
        assert_eq!(percentile(&samples, 0), Some(1.0));
        assert_eq!(percentile(&[7.0], 99), Some(7.0));
    }

    #[test]
    fn an_outlier_does_not_move_a_ratio() {
        let ratio = ratio_of_medians(&[60.0, 62.0, 900.0], &[2.0, 2.0, 2.1]);
        assert_eq!(ratio, Some(31.0));
    }

    #[test]
    fn a_ratio_over_zero_is_none() {
        assert_eq!(ratio_of_medians(&[1.0], &[0.0]), None);
    }

    #[test]
    fn a_rate_needs_time() {
        assert_eq!(rate(500, 2.0), Some(250.0));
        assert_eq!(rate(500, 0.0), None);
    }

    #[test]
    fn a_slope_needs_two_places() {
        let line = [(1.0, 5.0), (2.0, 7.0), (16.0, 35.0)];
        assert_eq!(slope(&line), Some(2.0));
        assert_eq!(slope(&[(1.0, 5.0), (1.0, 9.0)]), None);
        assert_eq!(slope(&[]), None);
    }
}
