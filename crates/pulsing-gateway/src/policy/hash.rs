//! The same Worker for the same conversation.

use std::sync::Arc;

use super::load::LeastLoad;
use super::{Hints, Policy};
use crate::pool::Worker;

/// Rendezvous hashing: every Router ranks the Workers of a key alike, without state, and a Worker that comes or goes moves
/// only its own keys. A full Worker passes the key on to the next in rank. Requests without a key go by load.
pub(super) struct ConsistentHash;

impl Policy for ConsistentHash {
    fn pick(&self, workers: &[Arc<Worker>], hints: Hints<'_>) -> usize {
        let Some(key) = hints.affinity else { return LeastLoad.pick(workers, hints) };
        let key = fnv(key.as_bytes());
        let rank = |worker: &Worker| mix(key ^ worker.seed());
        let best = |free: bool| {
            (0..workers.len())
                .filter(|index| !free || !workers[*index].is_full())
                .max_by_key(|index| rank(&workers[*index]))
        };
        best(true).or_else(|| best(false)).unwrap_or(0)
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
