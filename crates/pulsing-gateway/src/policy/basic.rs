//! Policies that do not look at load, beyond passing over full Workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Hints, Policy, first_free};
use crate::pool::Worker;

/// In turn.
#[derive(Default)]
pub(super) struct RoundRobin(AtomicUsize);

impl Policy for RoundRobin {
    fn pick(&self, workers: &[Arc<Worker>], _: Hints<'_>) -> usize {
        let count = workers.len();
        let start = self.0.fetch_add(1, Ordering::Relaxed) % count;
        first_free(workers, (0..count).map(|step| (start + step) % count))
    }
}

/// By chance.
pub(super) struct Random;

impl Policy for Random {
    fn pick(&self, workers: &[Arc<Worker>], _: Hints<'_>) -> usize {
        let count = workers.len();
        let start = rand::random_range(0..count);
        first_free(workers, (0..count).map(|step| (start + step) % count))
    }
}
