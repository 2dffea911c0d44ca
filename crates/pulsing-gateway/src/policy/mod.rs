//! Which Worker takes the next request.

mod basic;
mod hash;
mod load;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::config::GatewayError;
use crate::pool::Worker;

/// What a policy may look at besides the Workers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hints<'a> {
    /// What ties requests of one conversation together.
    pub affinity: Option<&'a str>,
}

/// Chooses among Workers that are all ready. Reads only: it is called on every request, by many threads.
pub trait Policy: Send + Sync {
    /// Index into `workers`, which is never empty. A Worker at capacity is taken only when all are.
    fn pick(&self, workers: &[Arc<Worker>], hints: Hints<'_>) -> usize;
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
}

impl PolicyKind {
    /// Every accepted name.
    pub const NAMES: [&'static str; 6] =
        ["stream_load", "round_robin", "random", "power_of_two", "consistent_hash", "least_connection"];

    /// The policy itself.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(basic::RoundRobin::default()),
            Self::Random => Box::new(basic::Random),
            Self::PowerOfTwo => Box::new(load::PowerOfTwo),
            Self::StreamLoad => Box::new(load::LeastLoad),
            Self::ConsistentHash => Box::new(hash::ConsistentHash),
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
            "cache_aware" => Err(GatewayError::Config(
                "scheduler_type \"cache_aware\" is not in this version; \"consistent_hash\" keeps a conversation on one \
                 worker by its `user`, and \"stream_load\" is the default"
                    .to_owned(),
            )),
            other => Err(GatewayError::Config(format!(
                "scheduler_type {other:?} is unknown; choose one of {}",
                Self::NAMES.join(", ")
            ))),
        }
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
