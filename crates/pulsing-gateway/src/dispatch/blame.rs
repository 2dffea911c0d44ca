//! Who is to blame when a request fails: the request, where it fails on several Workers, and else a Worker.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pulsing_core::ActorId;

/// How long a request is remembered after its last failure.
const MEMORY: Duration = Duration::from_secs(60);
/// Requests remembered at most; 64 bytes each.
const MOST: usize = 1024;

/// How much of a body's beginning and of its end counts, in bytes: more would hold up the thread that others' requests are
/// served on.
const EDGE: usize = 256 << 10;

/// A request as it is known again: a hash of its body's edges and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fingerprint(u64);

/// Requests that failed lately, and where.
#[derive(Default)]
pub(crate) struct Blame {
    hashing: RandomState,
    known: Mutex<HashMap<Fingerprint, Entry>>,
}

struct Entry {
    /// Workers that it failed on; two say it all.
    on: [Option<ActorId>; 2],
    guilty: bool,
    at: Instant,
}

impl Blame {
    /// For requests that have failed. Of a body larger than two edges what lies between them does not count.
    pub(super) fn fingerprint(&self, body: &[u8]) -> Fingerprint {
        let edges = match body.len() {
            length if length > 2 * EDGE => (&body[..EDGE], &body[length - EDGE..]),
            _ => (body, &body[..0]),
        };
        Fingerprint(self.hashing.hash_one((body.len(), edges)))
    }
    /// The request failed on `worker`. True if it is the request's own fault: it has failed on another one before, whoever
    /// sent it.
    pub(super) fn failed(&self, request: Fingerprint, worker: ActorId, now: Instant) -> bool {
        let mut known = self.known.lock();
        let entry = remember(&mut known, request, now);
        match entry.on {
            [None, _] => entry.on[0] = Some(worker),
            [Some(first), None] if first != worker => entry.on[1] = Some(worker),
            _ => {}
        }
        entry.guilty |= entry.on[1].is_some();
        entry.guilty
    }
    /// The request has cost as many Workers as one may.
    pub(super) fn convict(&self, request: Fingerprint, now: Instant) {
        remember(&mut self.known.lock(), request, now).guilty = true;
    }
    /// The request is known to be at fault.
    pub(super) fn is_guilty(&self, request: Fingerprint, now: Instant) -> bool {
        let known = self.known.lock();
        known.get(&request).is_some_and(|entry| entry.guilty && now.duration_since(entry.at) < MEMORY)
    }
    /// The request was answered: where it failed, it was not its fault.
    pub(super) fn acquit(&self, request: Fingerprint) {
        self.known.lock().remove(&request);
    }
}

fn remember(known: &mut HashMap<Fingerprint, Entry>, request: Fingerprint, now: Instant) -> &mut Entry {
    let fresh = |entry: &Entry| now.duration_since(entry.at) < MEMORY;
    if known.len() >= MOST && !known.contains_key(&request) {
        known.retain(|_, entry| fresh(entry));
        if known.len() >= MOST
            && let Some(oldest) = known.iter().min_by_key(|(_, entry)| entry.at).map(|(request, _)| *request)
        {
            known.remove(&oldest);
        }
    }
    let blank = || Entry { on: [None; 2], guilty: false, at: now };
    let entry = known.entry(request).or_insert_with(blank);
    if !fresh(entry) {
        *entry = blank();
    }
    entry.at = now;
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_s5_two_workers_make_a_request_guilty_for_a_minute() {
        let blame = Blame::default();
        let (poison, other) = (blame.fingerprint(b"poison"), blame.fingerprint(b"other"));
        let now = Instant::now();
        assert!(!blame.failed(poison, ActorId(1), now));
        assert!(!blame.failed(poison, ActorId(1), now), "the same worker again says nothing more");
        assert!(!blame.failed(other, ActorId(2), now));
        assert!(blame.failed(poison, ActorId(2), now));
        let later = now + Duration::from_secs(59);
        assert!(blame.failed(poison, ActorId(7), later), "one failure is enough from then on");
        assert!(!blame.failed(poison, ActorId(1), later + MEMORY), "and forgotten after a minute");
        blame.acquit(other);
        assert!(!blame.failed(other, ActorId(3), now));
    }

    #[test]
    fn a_large_request_is_known_by_its_edges_and_its_length() {
        let blame = Blame::default();
        let mut body = vec![b'x'; 3 * EDGE];
        let known = blame.fingerprint(&body);
        assert_eq!(blame.fingerprint(&body.clone()), known);
        for at in [0, EDGE - 1, 2 * EDGE, 3 * EDGE - 1] {
            body[at] = b'y';
            assert_ne!(blame.fingerprint(&body), known, "{at}");
            body[at] = b'x';
        }
        body[EDGE] = b'y';
        assert_eq!(blame.fingerprint(&body), known, "the middle is not read");
        assert_ne!(blame.fingerprint(&body[..2 * EDGE + 1]), blame.fingerprint(&body[..2 * EDGE]));
    }

    #[test]
    fn the_table_is_bounded_and_the_oldest_goes_first() {
        let blame = Blame::default();
        let begun = Instant::now();
        let request = |number: usize| blame.fingerprint(&number.to_le_bytes());
        for number in 0..MOST + 100 {
            blame.convict(request(number), begun + Duration::from_millis(number as u64));
        }
        let now = begun + Duration::from_secs(2);
        assert_eq!(blame.known.lock().len(), MOST);
        assert!(!blame.is_guilty(request(99), now) && blame.is_guilty(request(100), now));
        blame.convict(request(0), now + MEMORY);
        assert_eq!(blame.known.lock().len(), 1, "what is forgotten goes all at once");
    }
}
