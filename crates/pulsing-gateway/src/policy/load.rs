//! Policies that compare load.

use std::sync::Arc;
use std::time::Instant;

use super::{Choice, Hints, Policy, Why};
use crate::pool::Worker;

/// Workers looked at for one request. Of more, so many are taken evenly from the list: the cost must not grow with the
/// fleet, and the best of 64 is as good as the best.
const LOOK: usize = 64;

/// The Worker whose next request waits least. Of equals the one with more room in its KV cache, then by chance, so that
/// several Routers do not march in step.
pub(super) struct LeastLoad;

impl Policy for LeastLoad {
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, _: Hints<'_>) -> Choice {
        Choice { index: survey(workers, Instant::now()).least, why: Why::LeastLoad }
    }
}

/// The least loaded of `workers`; `None` if there are none.
pub(crate) fn least_loaded(workers: &[Arc<Worker>]) -> Option<usize> {
    (!workers.is_empty()).then(|| survey(workers, Instant::now()).least)
}

/// What a look at the load of all, or of some, shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Survey {
    /// The least loaded.
    pub(super) least: usize,
    /// Requests that a Worker has for each that it takes at once, on average.
    pub(super) mean: f64,
}

pub(super) fn survey(workers: &[Arc<Worker>], now: Instant) -> Survey {
    let step = workers.len().div_ceil(LOOK).max(1);
    let start = if step > 1 { rand::random_range(0..step) } else { 0 };
    let mut best = (f64::INFINITY, f32::INFINITY);
    let (mut least, mut equals) = (0, 0);
    let (mut load, mut capacity) = (0_u64, 0_u64);
    for (index, worker) in workers.iter().enumerate().skip(start).step_by(step) {
        let on_it = worker.load_at(now);
        load += u64::from(on_it);
        capacity += u64::from(worker.capacity());
        let rank = (f64::from(on_it.saturating_add(1)) / f64::from(worker.capacity()), worker.kv_usage());
        if rank < best {
            (best, least, equals) = (rank, index, 1);
        } else if rank == best {
            equals += 1;
            if rand::random_range(0..equals) == 0 {
                least = index;
            }
        }
    }
    Survey { least, mean: load as f64 / capacity.max(1) as f64 }
}

/// How far a Worker may be above its share of the load before what speaks for it counts no more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// Requests above its share that are always allowed.
    pub absolute: u32,
    /// Times its share that are always allowed.
    pub relative: f64,
}

impl Default for Balance {
    /// Half as much again as its share, and four requests in any case: with a queue that short nobody waits long.
    fn default() -> Self {
        Self { absolute: 4, relative: 1.5 }
    }
}

impl Balance {
    /// Whether one more request would be too much for `worker`, who would have `mean` times its capacity if all had alike.
    pub(super) fn is_over(self, worker: &Worker, mean: f64, now: Instant) -> bool {
        let load = f64::from(worker.load_at(now));
        let share = mean * f64::from(worker.capacity());
        worker.is_full_at(now) || (load + 1.0 > share * self.relative && load + 1.0 > share + f64::from(self.absolute))
    }
}

/// The less loaded of two taken by chance: the cost does not grow with the fleet.
pub(super) struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, _: Hints<'_>) -> Choice {
        let count = workers.len();
        if count == 1 {
            return Choice { index: 0, why: Why::OnlyOne };
        }
        let one = rand::random_range(0..count);
        let other = (one + rand::random_range(1..count)) % count;
        let index = if workers[other].pressure() < workers[one].pressure() { other } else { one };
        Choice { index, why: Why::LessOfTwo }
    }
}
