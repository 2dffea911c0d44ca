//! What is seen of a run while it goes on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

use crate::record::{Outcome, Record};

/// How many of the latest requests the live percentiles look at.
const RECENT: usize = 512;

/// The counters of the point that is running.
#[derive(Debug, Default)]
pub(crate) struct Live {
    pub(crate) sent: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    pub(crate) peak: AtomicU64,
    pub(crate) tokens: AtomicU64,
    pub(crate) ok: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    label: String,
    began: u64,
    length: u64,
    points_done: usize,
    points: Option<usize>,
    failed: BTreeMap<String, u64>,
    ttft: VecDeque<u64>,
    tpot: VecDeque<f64>,
    lag: VecDeque<u64>,
}

/// A look at a running benchmark. Latencies in milliseconds over the latest requests.
#[derive(Clone, Debug, Serialize)]
pub struct Progress {
    /// What is running: probe, warm-up, or a point.
    pub label: String,
    /// Seconds since the point began.
    pub elapsed: f64,
    /// Seconds the point will take, without its drain; 0 where that is not known.
    pub duration: f64,
    /// Points finished.
    pub points_done: usize,
    /// Points planned.
    pub points: Option<usize>,
    /// Requests begun in this point.
    pub sent: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Whole answers.
    pub ok: u64,
    /// Failures by class.
    pub failed: BTreeMap<String, u64>,
    /// Output tokens of finished requests.
    pub tokens: u64,
    /// Median time to first token.
    pub ttft_p50: Option<f64>,
    /// 99th percentile of the time to first token.
    pub ttft_p99: Option<f64>,
    /// Median time per output token.
    pub tpot_p50: Option<f64>,
    /// 99th percentile of how late requests were taken up.
    pub lag_p99: Option<f64>,
}

impl Live {
    pub(crate) fn begin(&self, label: &str, now: u64, length: u64, points_done: usize, points: Option<usize>) {
        for counter in [&self.sent, &self.peak, &self.tokens, &self.ok] {
            counter.store(0, Ordering::Relaxed);
        }
        *self.inner.lock() =
            Inner { label: label.to_owned(), began: now, length, points_done, points, ..Inner::default() };
    }

    pub(crate) fn started(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
        let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self, record: &Record) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.tokens.fetch_add(record.tokens, Ordering::Relaxed);
        let mut inner = self.inner.lock();
        keep(&mut inner.lag, record.start.saturating_sub(record.sched));
        match &record.outcome {
            Outcome::Ok => {
                self.ok.fetch_add(1, Ordering::Relaxed);
                if let Some(ttft) = record.ttft() {
                    keep(&mut inner.ttft, ttft);
                }
                if let Some(tpot) = record.tpot() {
                    keep(&mut inner.tpot, tpot);
                }
            }
            Outcome::Failed(failure) => *inner.failed.entry(failure.class.name()).or_default() += 1,
            Outcome::Cut => {}
        }
    }

    pub(crate) fn look(&self, now: u64) -> Progress {
        let inner = self.inner.lock();
        let ms = |values: &VecDeque<u64>, q| quantile(values.iter().map(|value| *value as f64).collect(), q);
        Progress {
            label: inner.label.clone(),
            elapsed: now.saturating_sub(inner.began) as f64 / 1e6,
            duration: inner.length as f64 / 1e6,
            points_done: inner.points_done,
            points: inner.points,
            sent: self.sent.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            ok: self.ok.load(Ordering::Relaxed),
            failed: inner.failed.clone(),
            tokens: self.tokens.load(Ordering::Relaxed),
            ttft_p50: ms(&inner.ttft, 0.5),
            ttft_p99: ms(&inner.ttft, 0.99),
            tpot_p50: quantile(inner.tpot.iter().copied().collect(), 0.5),
            lag_p99: ms(&inner.lag, 0.99),
        }
    }
}

fn keep<T>(values: &mut VecDeque<T>, value: T) {
    if values.len() == RECENT {
        values.pop_front();
    }
    values.push_back(value);
}

fn quantile(mut values: Vec<f64>, q: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let at = (values.len().checked_sub(1)? as f64 * q).round() as usize;
    values.get(at).map(|micros| micros.round() / 1000.0)
}
