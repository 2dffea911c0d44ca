//! Counters: plain atomics, read by `/metrics`.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

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

/// A number that grows and shrinks.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// Adds `n`, which may be negative.
    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    /// The value now.
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds in microseconds: from a call within a host to the usual deadline.
pub(super) const BOUNDS: [u64; 16] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 10_000_000,
    30_000_000,
];

/// How long something took, in buckets.
#[derive(Debug, Default)]
pub struct Durations {
    /// Those up to each bound and above the one before; the last for all above.
    counts: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

impl Durations {
    /// Counts one.
    pub fn add(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let at = BOUNDS.partition_point(|bound| *bound < micros);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// How many took up to each bound, the last without one, and the seconds of all together.
    pub(super) fn get(&self) -> ([u64; BOUNDS.len() + 1], f64) {
        let mut sum = 0;
        let counts = std::array::from_fn(|at| {
            sum += self.counts[at].load(Ordering::Relaxed);
            sum
        });
        (counts, self.micros.load(Ordering::Relaxed) as f64 / 1e6)
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
    /// Messages that wait in mailboxes of this node's actors.
    pub mailbox_messages: Gauge,
    /// Calls delivered to actors of this node, from other nodes or other actors here.
    pub messages: Counter,
    /// Calls this node sent to others.
    pub messages_sent: Counter,
    /// From a call to another node until its first answer, an error or its deadline; calls that were given up do not count.
    pub answers: Durations,
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
