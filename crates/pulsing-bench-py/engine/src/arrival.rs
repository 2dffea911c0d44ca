//! When the requests of an open loop are due.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::config::Law;

/// Endless due times, in microseconds from the start of the point. One generator, one seed: several drawing from copies of one
/// seed would make the load burstier than its law.
#[derive(Debug)]
pub struct Arrivals {
    law: Law,
    gap: f64,
    at: f64,
    count: u64,
    rng: StdRng,
}

impl Arrivals {
    /// `rate` requests per second by `law`; the same seed gives the same times.
    pub fn new(law: Law, rate: f64, seed: u64) -> Self {
        Self { law, gap: 1e6 / rate, at: 0.0, count: 0, rng: StdRng::seed_from_u64(seed) }
    }
}

impl Iterator for Arrivals {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let due = match self.law {
            // From the count, not by adding gaps up: rounding must not change the rate.
            Law::Constant => self.count as f64 * self.gap,
            Law::Poisson => {
                let uniform: f64 = self.rng.random();
                self.at += -(1.0 - uniform).ln() * self.gap;
                self.at
            }
        };
        self.count += 1;
        Some(due as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::Arrivals;
    use crate::config::Law;

    #[test]
    fn constant_arrivals_keep_their_rate() {
        let due: Vec<u64> = Arrivals::new(Law::Constant, 300.0, 1).take(3001).collect();
        assert_eq!((due[0], due[3000]), (0, 10_000_000));
    }

    #[test]
    fn poisson_arrivals_have_the_law_they_are_named_after() {
        let due: Vec<u64> = Arrivals::new(Law::Poisson, 1000.0, 42).take_while(|at| *at < 100_000_000).collect();
        let n = due.len() as f64;
        assert!((n - 100_000.0).abs() < 4.0 * 100_000f64.sqrt(), "count {n}");
        // Variance of the counts per 50 ms over their mean: 1 for a Poisson process; 2000 bins put it within 0.13.
        let mut bins = vec![0f64; 2000];
        for at in &due {
            bins[(at / 50_000) as usize] += 1.0;
        }
        let mean = bins.iter().sum::<f64>() / 2000.0;
        let variance = bins.iter().map(|bin| (bin - mean).powi(2)).sum::<f64>() / 1999.0;
        assert!((variance / mean - 1.0).abs() < 0.13, "dispersion {}", variance / mean);
        // Kolmogorov-Smirnov distance of the gaps from the exponential law, 1 % bound.
        let mut gaps: Vec<f64> = due.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1000.0).collect();
        gaps.sort_unstable_by(f64::total_cmp);
        let m = gaps.len() as f64;
        let distance =
            gaps.iter().enumerate().map(|(i, gap)| ((1.0 - (-gap).exp()) - i as f64 / m).abs()).fold(0.0, f64::max);
        assert!(distance < 1.63 / m.sqrt() + 0.001, "KS distance {distance}");
    }

    #[test]
    fn the_same_seed_gives_the_same_schedule() {
        let draw = |seed| Arrivals::new(Law::Poisson, 50.0, seed).take(100).collect::<Vec<_>>();
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }
}
