//! The same Worker for the same conversation.

use std::sync::Arc;
use std::time::Instant;

use super::load::{Balance, survey};
use super::view::Views;
use super::{Choice, Hints, Policy, Why};
use crate::pool::Worker;

/// Rendezvous hashing with bounded load: every Router ranks the Workers of a key alike, without state, and a Worker that
/// comes or goes moves only its own keys. One that is full, or far above its share of the load, passes the key on to the next
/// in rank. Requests without a key go by load.
pub(super) struct ConsistentHash {
    pub(super) balance: Balance,
    views: Views,
}

impl ConsistentHash {
    pub(super) fn new(balance: Balance) -> Self {
        Self { balance, views: Views::default() }
    }
}

impl Policy for ConsistentHash {
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, hints: Hints<'_>) -> Choice {
        let now = Instant::now();
        let survey = survey(workers, now);
        let Some(key) = hints.affinity else { return Choice { index: survey.least, why: Why::NoKey } };
        let key = fnv(key.as_bytes());
        let view = self.views.of(workers);
        // Below whom the next in rank is looked for.
        let mut below = None;
        let mut first = 0;
        for rank in 0..workers.len() {
            let ranked = view.seeds.iter().enumerate().map(|(index, seed)| (mix(key ^ seed), index));
            let Some(best) = ranked.filter(|one| below.is_none_or(|below| *one < below)).max() else { break };
            let index = best.1;
            if !self.balance.is_over(&workers[index], survey.mean, now) {
                return Choice { index, why: if rank == 0 { Why::Home } else { Why::Spilled { rank } } };
            }
            if rank == 0 {
                first = index;
            }
            below = Some(best);
        }
        Choice { index: first, why: Why::AllFull }
    }
}

/// FNV-1a: the same in every build and version, unlike the standard library's hasher.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The finalizer of splitmix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
