//! Exact summaries: raw values are kept and sorted, percentiles are interpolated.

use serde::Serialize;

/// A distribution in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of values.
    pub n: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
    /// Whether n < 1000: the p99 rests on fewer than ten values.
    pub weak_p99: bool,
}

/// Values in microseconds, many of which may be zero; zeros are only counted.
#[derive(Clone, Debug, Default)]
pub struct Values {
    zeros: u64,
    rest: Vec<f64>,
}

impl Values {
    /// Adds one value, microseconds.
    pub fn push(&mut self, value: f64) {
        if value == 0.0 { self.zeros += 1 } else { self.rest.push(value) }
    }

    /// Adds `n` zeros.
    pub fn push_zeros(&mut self, n: u64) {
        self.zeros += n;
    }

    /// The sum, microseconds.
    pub fn sum(&self) -> f64 {
        self.rest.iter().sum()
    }

    /// None when there are no values: an absent latency is not 0.
    pub fn summary(mut self) -> Option<Summary> {
        let n = self.zeros + self.rest.len() as u64;
        if n == 0 {
            return None;
        }
        self.rest.sort_unstable_by(f64::total_cmp);
        // Stamps only grow, so no value is below zero: the zeros come first.
        let value = |at: u64| if at < self.zeros { 0.0 } else { self.rest[(at - self.zeros) as usize] };
        let quantile = |q: f64| {
            let at = (n - 1) as f64 * q;
            let low = at.floor() as u64;
            let high = (low + 1).min(n - 1);
            value(low) + (value(high) - value(low)) * (at - low as f64)
        };
        let ms = |micros: f64| (micros.round()) / 1000.0;
        Some(Summary {
            n,
            mean: ms(self.sum() / n as f64),
            min: ms(value(0)),
            p50: ms(quantile(0.50)),
            p90: ms(quantile(0.90)),
            p95: ms(quantile(0.95)),
            p99: ms(quantile(0.99)),
            max: ms(value(n - 1)),
            weak_p99: n < 1000,
        })
    }
}

impl FromIterator<f64> for Values {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        let mut all = Self::default();
        for value in values {
            all.push(value);
        }
        all
    }
}

/// A summary of whole microseconds.
pub fn summary(values: impl Iterator<Item = u64>) -> Option<Summary> {
    values.map(|value| value as f64).collect::<Values>().summary()
}

/// Slope of a least-squares line and its t value; none for fewer than three points or a flat x.
pub fn slope(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let n = points.len() as f64;
    if points.len() < 3 {
        return None;
    }
    let mean_x = points.iter().map(|point| point.0).sum::<f64>() / n;
    let mean_y = points.iter().map(|point| point.1).sum::<f64>() / n;
    let var_x: f64 = points.iter().map(|point| (point.0 - mean_x).powi(2)).sum();
    if var_x == 0.0 {
        return None;
    }
    let slope = points.iter().map(|point| (point.0 - mean_x) * (point.1 - mean_y)).sum::<f64>() / var_x;
    let rest: f64 = points.iter().map(|point| (point.1 - mean_y - slope * (point.0 - mean_x)).powi(2)).sum();
    let error = (rest / (n - 2.0) / var_x).sqrt();
    Some((slope, if error > 0.0 { slope / error } else { slope.signum() * f64::INFINITY }))
}

#[cfg(test)]
mod tests {
    use super::{Values, slope, summary};

    #[test]
    fn percentiles_are_interpolated_and_grow() {
        let all = summary(1..=1000).unwrap();
        assert_eq!((all.n, all.min, all.max, all.weak_p99), (1000, 0.001, 1.0, false));
        assert_eq!(all.p50, 0.501); // 500.5 us
        let order = [all.min, all.p50, all.p90, all.p95, all.p99, all.max];
        assert!(order.windows(2).all(|pair| pair[0] <= pair[1]));
    }

    #[test]
    fn zeros_count_like_any_value_and_nothing_is_not_zero() {
        let mut values: Values = [50_000.0, 150_000.0, 50_000.0].into_iter().collect();
        values.push_zeros(2);
        let all = values.summary().unwrap();
        assert_eq!((all.n, all.p50, all.p99, all.mean), (5, 50.0, 146.0, 50.0));
        assert_eq!(summary(std::iter::empty()), None);
        assert_eq!(summary(std::iter::once(7)).unwrap().p99, 0.007);
    }

    #[test]
    fn a_slope_comes_with_its_weight() {
        let rising: Vec<_> = (0..20).map(|x| (f64::from(x), f64::from(x) * 2.0)).collect();
        assert_eq!(slope(&rising).unwrap().0, 2.0);
        assert!(slope(&rising[..2]).is_none());
    }
}
