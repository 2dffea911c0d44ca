//! Policies that compare load.

use std::sync::Arc;

use super::{Hints, Policy};
use crate::pool::Worker;

/// The Worker whose next request waits least. Equals are taken by chance, so that several Routers do not march in step.
pub(super) struct LeastLoad;

impl Policy for LeastLoad {
    fn pick(&self, workers: &[Arc<Worker>], _: Hints<'_>) -> usize {
        let mut best = f64::INFINITY;
        let mut chosen = 0;
        let mut equals = 0;
        for (index, worker) in workers.iter().enumerate() {
            let pressure = worker.pressure();
            if pressure < best {
                (best, chosen, equals) = (pressure, index, 1);
            } else if pressure == best {
                equals += 1;
                if rand::random_range(0..equals) == 0 {
                    chosen = index;
                }
            }
        }
        chosen
    }
}

/// The less loaded of two taken by chance: the cost does not grow with the fleet.
pub(super) struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn pick(&self, workers: &[Arc<Worker>], _: Hints<'_>) -> usize {
        let count = workers.len();
        if count == 1 {
            return 0;
        }
        let one = rand::random_range(0..count);
        let other = (one + rand::random_range(1..count)) % count;
        if workers[other].pressure() < workers[one].pressure() { other } else { one }
    }
}
