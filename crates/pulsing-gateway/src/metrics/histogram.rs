//! Histograms.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Seconds of whole requests and their first tokens.
pub(super) const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];
/// Seconds between two pieces of an answer: 5 ms and 100 ms lie on either side of what people read with ease.
pub(super) const GAPS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0];
/// Tokens of one request.
pub(super) const TOKENS: &[f64] = &[
    1.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    65536.0,
    131_072.0,
    262_144.0,
    1_048_576.0,
];
/// Parts of a whole.
pub(super) const SHARES: &[f64] = &[0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0];

/// What was seen, by size.
pub(super) struct Histogram {
    bounds: &'static [f64],
    buckets: Box<[AtomicU64]>,
    /// In millionths.
    sum: AtomicU64,
}

impl Histogram {
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, buckets: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }
    pub(super) fn observe(&self, value: f64) {
        let slot = self.bounds.iter().position(|bound| value <= *bound).unwrap_or(self.bounds.len());
        self.buckets[slot].fetch_add(1, Relaxed);
        self.sum.fetch_add((value * 1e6) as u64, Relaxed);
    }
    pub(super) fn took(&self, time: Duration) {
        self.observe(time.as_secs_f64());
    }
    /// Its lines; `labels` as in `model="x",`, or nothing.
    pub(super) fn write(&self, out: &mut String, name: &str, labels: &str) {
        let mut total = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            total += bucket.load(Relaxed);
            let bound = self.bounds.get(index).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            let _ = writeln!(out, "{name}_bucket{{{labels}le=\"{bound}\"}} {total}");
        }
        let sum = self.sum.load(Relaxed) as f64 / 1e6;
        let labels = labels.trim_end_matches(',');
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(out, "{name}_sum{labels} {sum}\n{name}_count{labels} {total}");
    }
}
