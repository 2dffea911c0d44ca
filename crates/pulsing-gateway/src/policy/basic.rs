//! Policies that do not look at load, beyond passing over full Workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Choice, Hints, Policy, Why};
use crate::pool::Worker;

/// In turn.
#[derive(Default)]
pub(super) struct RoundRobin(AtomicUsize);

impl Policy for RoundRobin {
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, _: Hints<'_>) -> Choice {
        let count = workers.len();
        let start = self.0.fetch_add(1, Ordering::Relaxed) % count;
        Choice { index: first_free(workers, (0..count).map(|step| (start + step) % count)), why: Why::Turn }
    }
}

/// By chance.
pub(super) struct Random;

impl Policy for Random {
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, _: Hints<'_>) -> Choice {
        let count = workers.len();
        let start = rand::random_range(0..count);
        Choice { index: first_free(workers, (0..count).map(|step| (start + step) % count)), why: Why::Chance }
    }
}

/// The first Worker below capacity, trying `order`; else the first of it.
fn first_free(workers: &[Arc<Worker>], mut order: impl Iterator<Item = usize>) -> usize {
    let first = order.next().unwrap_or(0);
    if !workers[first].is_full() {
        return first;
    }
    order.find(|index| !workers[*index].is_full()).unwrap_or(first)
}
