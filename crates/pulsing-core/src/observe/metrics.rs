//! Counters: plain atomics, read by `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one node.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Actors registered since the start.
    pub actors_created: Counter,
    /// Actors unregistered since the start.
    pub actors_stopped: Counter,
    /// Actors restarted by supervision.
    pub actors_restarted: Counter,
    /// Calls delivered to actors of this node, from other nodes or other actors here.
    pub messages: Counter,
    /// Calls this node sent to others.
    pub messages_sent: Counter,
    /// Names that an actor of this node kept against a claim of another node.
    pub claims_won: Counter,
    /// Names that an actor of this node lost to an older claim of another node.
    pub claims_lost: Counter,
    /// Messages nobody took: unknown actor, or dropped at stop.
    pub dead_letters: Counter,
    /// Membership and registry frames for which a queue had no room.
    pub control_dropped: Counter,
    /// Streams begun by actors of this node.
    pub streams: Counter,
    /// Stream items delivered to callers here.
    pub stream_items: Counter,
    /// Bytes read from peers.
    pub bytes_in: Counter,
    /// Bytes written to peers.
    pub bytes_out: Counter,
    /// Bytes of large data that a binding copied between its language's objects and messages, for want of a way to lend
    /// or hand over their memory.
    pub bytes_copied: Counter,
    /// Peers refused at the handshake.
    pub refused: Counter,
    /// Suspicions raised by this node.
    pub suspicions: Counter,
    /// Suspicions about this node that it refuted.
    pub refutations: Counter,
}
