//! Which Worker takes the next request.
//!
//! | module  | holds                                                           |
//! |---------|-----------------------------------------------------------------|
//! | `basic` | in turn, by chance                                              |
//! | `load`  | by load, and what too much load is                              |
//! | `hash`  | by conversation                                                 |
//! | `cache` | by prompt; `index` is who has what, [`chain`] what prompts are  |
//! | `view`  | what is worked out of a list of Workers once                    |
//! | `tend`  | forgets the Workers that went                                   |
//! | `why`   | the reason of a choice, for people                              |

mod basic;
mod cache;
pub mod chain;
mod hash;
mod index;
mod load;
mod tend;
mod view;
mod why;

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::config::GatewayError;
use crate::pool::Worker;
use crate::protocol::BlockNews;

pub use load::Balance;
pub(crate) use load::least_loaded;
pub(crate) use tend::tend;
pub use why::Why;

/// What a policy may look at besides the Workers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hints<'a> {
    /// What ties requests of one conversation together.
    pub affinity: Option<&'a str>,
    /// The prompt, as [`chain`] has it; empty where [`Policy::wants_prefix`] is false.
    pub prefix: &'a [u64],
}

/// A Worker and the reason for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Where in the list it stands.
    pub index: usize,
    /// The reason.
    pub why: Why,
}

/// How much an index of prompts holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexSize {
    /// Prompt blocks, once for each Worker that has one.
    pub blocks: usize,
    /// Memory it takes.
    pub bytes: usize,
}

/// Chooses among Workers that are all ready. Called on every request, by many threads: it waits for nobody.
pub trait Policy: Send + Sync {
    /// Chooses from `workers`, which is never empty. A Worker at capacity is taken only when all are.
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, hints: Hints<'_>) -> Choice;
    /// The request goes to this Worker, whoever chose it.
    fn sent(&self, worker: &Worker, hints: Hints<'_>) {
        let _ = (worker, hints);
    }
    /// It looks at [`Hints::prefix`].
    fn wants_prefix(&self) -> bool {
        false
    }
    /// It wants to hear what Workers' caches get and lose.
    fn wants_news(&self) -> bool {
        false
    }
    /// A Worker tells of its cache, in order and without a gap. Where it begins anew, the cache has a number of its own.
    fn told(&self, worker: &Worker, news: &BlockNews) {
        let _ = (worker, news);
    }
    /// These Workers are all there are: what is known of others can be forgotten.
    fn keep(&self, workers: &[Arc<Worker>]) {
        let _ = workers;
    }
    /// Its index of prompts, if it has one.
    fn index(&self) -> Option<IndexSize> {
        None
    }
    /// Blocks of prompts that are in a Worker's cache, by the number of the cache. Looks at all of the index.
    fn holdings(&self) -> HashMap<u32, usize> {
        HashMap::new()
    }
}

/// What policies can be told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyOptions {
    /// Where `consistent_hash` and `cache_aware` give way to load.
    pub balance: Balance,
    /// Memory for the index of `cache_aware`, in bytes. Default 32 MiB: 2 million blocks, which is 512 MiB of prompts.
    pub index_bytes: usize,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self { balance: Balance::default(), index_bytes: 32 << 20 }
    }
}

/// The policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// In turn.
    RoundRobin,
    /// By chance.
    Random,
    /// The less loaded of two taken by chance.
    PowerOfTwo,
    /// The least loaded by the load that Workers push.
    #[default]
    StreamLoad,
    /// The same Worker for the same conversation.
    ConsistentHash,
    /// The Worker that has most of the prompt in its cache.
    CacheAware,
}

impl PolicyKind {
    /// Every accepted name.
    pub const NAMES: [&'static str; 7] =
        ["stream_load", "round_robin", "random", "power_of_two", "consistent_hash", "cache_aware", "least_connection"];

    /// The policy itself.
    pub fn build(self, options: PolicyOptions) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(basic::RoundRobin::default()),
            Self::Random => Box::new(basic::Random),
            Self::PowerOfTwo => Box::new(load::PowerOfTwo),
            Self::StreamLoad => Box::new(load::LeastLoad),
            Self::ConsistentHash => Box::new(hash::ConsistentHash::new(options.balance)),
            Self::CacheAware => Box::new(cache::CacheAware::new(options.index_bytes, options.balance)),
        }
    }
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power_of_two",
            Self::StreamLoad => "stream_load",
            Self::ConsistentHash => "consistent_hash",
            Self::CacheAware => "cache_aware",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = GatewayError;
    fn from_str(name: &str) -> Result<Self, GatewayError> {
        match name {
            "round_robin" => Ok(Self::RoundRobin),
            "random" => Ok(Self::Random),
            "power_of_two" => Ok(Self::PowerOfTwo),
            // Pushed load includes this Router's own connections, so the peer's name for counting them means the same.
            "stream_load" | "least_connection" => Ok(Self::StreamLoad),
            "consistent_hash" => Ok(Self::ConsistentHash),
            "cache_aware" => Ok(Self::CacheAware),
            other => Err(GatewayError::Config(format!(
                "scheduler_type {other:?} is unknown; choose one of {}",
                Self::NAMES.join(", ")
            ))),
        }
    }
}

#[cfg(test)]
mod tests;
