//! One owner's entries in a replica, and how they are shipped in parts (M5).
//!
//! A shipment replays an owner's changes in the order of their versions, each part from where the last one ended. Until the
//! last part is in, a replica still counts as being at the version it had before: some of what it holds is newer. It answers
//! lookups with that, but ships nothing of this owner.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use prost::Message as _;
use sha2::{Digest as _, Sha256};

use super::delta::{Delta, Gone, Put};
use super::registry::Entry;
use crate::id::{ActorId, NodeId};

/// Tombstones kept of one owner. A replica that misses more changes than this is sent the whole state.
pub(super) const TOMBSTONES: usize = 1024;
/// Bytes around a put in a delta.
const PUT_FRAME: usize = 3;
/// Encoded bytes of a tombstone, about.
const GONE_SIZE: usize = 24;

#[derive(Default)]
pub(super) struct Owner {
    pub(super) version: u64,
    /// Changes up to here are no longer held one by one.
    pub(super) floor: u64,
    pub(super) entries: BTreeMap<ActorId, (u64, Entry)>,
    /// The entries by the version that wrote them.
    pub(super) written: BTreeMap<u64, ActorId>,
    pub(super) tombstones: BTreeMap<u64, ActorId>,
    pub(super) held_back: Vec<Delta>,
    /// A part came that continues what is not held here.
    pub(super) missed: bool,
    /// The newest change that shows here; more than `version` while a shipment comes in, or after one that broke off.
    pub(super) ahead: u64,
    pub(super) incoming: Option<Incoming>,
}

/// A shipment that comes in.
pub(super) struct Incoming {
    pub(super) id: u64,
    /// The last part went up to here.
    pub(super) reached: u64,
    /// The last part said that it goes on up to here.
    pub(super) until: u64,
    /// It is the whole state: entries that it does not name by its end do not exist.
    pub(super) stale: Option<BTreeSet<ActorId>>,
}

/// What is on its way to one node: made by [`Registry::shipment`](super::Registry::shipment), used up by
/// [`Registry::next_part`](super::Registry::next_part).
#[derive(Debug, Default)]
pub struct Shipment(pub(super) VecDeque<Cursor>);

/// How far one owner's changes have been shipped.
#[derive(Debug)]
pub(super) struct Cursor {
    pub(super) node: NodeId,
    id: u64,
    /// Parts up to here are gone.
    at: u64,
    /// Withdrawals after this are told of; what was withdrawn before is only left out.
    base: u64,
    full: bool,
    begun: bool,
}

impl Cursor {
    /// Everything after `have`.
    pub(super) fn new(node: NodeId, id: u64, have: u64) -> Self {
        Self { node, id, at: have, base: have, full: have == 0, begun: false }
    }
}

impl Owner {
    /// The next part, of about `limit` bytes at most, and whether more follow; `None` when everything is shipped.
    pub(super) fn part(&self, cursor: &mut Cursor, limit: usize) -> Option<(Delta, bool)> {
        if self.ahead > self.version || (cursor.begun || !cursor.full) && cursor.at >= self.version {
            return None;
        }
        if cursor.full && !cursor.begun || cursor.at.max(cursor.base) < self.floor {
            // A replica without anything needs no tombstones; one that is older than they are gets the whole state.
            let id = if cursor.begun { cursor.id.wrapping_add(1) } else { cursor.id };
            *cursor = Cursor { node: cursor.node, id, at: 0, base: self.version, full: true, begun: false };
        }
        let from = cursor.at;
        let mut puts = self.written.range(from + 1..).peekable();
        let full = cursor.full && !cursor.begun;
        // All that are held, also those from before the shipment: a node of the version before, to which each part is a
        // delta of its own, may have what a shipment that broke off had brought it. The first part lists what exists.
        let mut gone = self.tombstones.range(if full { cursor.base } else { from } + 1..).peekable();
        let mut delta = Delta { owner: cursor.node.to_bytes().to_vec(), from, full, ..Delta::default() };
        let mut size = 0;
        while size < limit {
            let put_first = match (puts.peek(), gone.peek()) {
                (None, None) => break,
                (put, gone) => put.is_some_and(|(version, _)| gone.is_none_or(|(other, _)| *version < other)),
            };
            if put_first {
                let Some((version, actor)) = puts.next() else { break };
                if let Some((_, entry)) = self.entries.get(actor) {
                    let put = put(*version, entry);
                    size += put.encoded_len() + PUT_FRAME;
                    delta.puts.push(put);
                }
                delta.to = *version;
            } else {
                let Some((version, actor)) = gone.next() else { break };
                delta.gone.push(Gone { version: *version, actor: actor.to_bytes().to_vec() });
                size += GONE_SIZE;
                delta.to = *version;
            }
        }
        let more = puts.peek().is_some() || gone.peek().is_some();
        if !more {
            delta.to = self.version;
        }
        if more || cursor.begun {
            (delta.until, delta.shipment, delta.base) = (self.version, cursor.id, cursor.base);
        }
        (cursor.at, cursor.begun) = (delta.to, true);
        Some((delta, more))
    }

    /// Whether a change came whose predecessor is missing.
    pub(super) fn has_gap(&self) -> bool {
        self.missed || !self.held_back.is_empty()
    }

    pub(super) fn forget_old_tombstones(&mut self) {
        while self.tombstones.len() > TOMBSTONES {
            if let Some((version, _)) = self.tombstones.pop_first() {
                self.floor = self.floor.max(version);
            }
        }
    }
}

pub(super) fn put(version: u64, entry: &Entry) -> Put {
    Put {
        version,
        actor: entry.actor.to_bytes().to_vec(),
        name: entry.name.clone(),
        class: entry.class.clone(),
        metadata: entry.metadata.clone(),
        unique: entry.unique,
        claimed: entry.claimed,
        lost_to: entry.lost_to.map(|winner| winner.to_bytes().to_vec()).unwrap_or_default(),
    }
}

/// A fingerprint of which versions are held.
pub(super) fn fingerprint<'a>(lines: impl Iterator<Item = (&'a NodeId, &'a Owner)>) -> u64 {
    let mut hash = Sha256::new();
    for (node, owner) in lines {
        hash.update(node.to_bytes());
        hash.update(owner.version.to_be_bytes());
    }
    let mut head = [0; 8];
    head.copy_from_slice(&hash.finalize()[..8]);
    u64::from_be_bytes(head)
}
