//! Policies that do not look at load, beyond passing over full Workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Choice, Hints, Policy, Why};
use crate::pool::Worker;

/// Counters of turns. More than a Router has models, as a rule.
const TURNS: usize = 64;

/// In turn. Models that are asked for by turns must not share one: each would always meet the same of its Workers. Which
/// Worker comes first tells the models apart.
pub(super) struct RoundRobin([AtomicUsize; TURNS]);

impl Default for RoundRobin {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicUsize::new(0)))
    }
}

impl Policy for RoundRobin {
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, _: Hints<'_>) -> Choice {
        let count = workers.len();
        let turns = &self.0[workers[0].seed() as usize % TURNS];
        let start = turns.fetch_add(1, Ordering::Relaxed) % count;
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
