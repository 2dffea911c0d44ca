//! Two living processes that give the same address as their own.
//!
//! A process that restarts meets its former self in old gossip: one newer epoch settles that, since the dead do not
//! outbid. The living do, and without an end to it each would push the other out of the cluster again and again.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Body, Identity, MemberEvent, Membership, NodeId};

/// After this many epochs beyond the first, a rival for our address is no ghost: both are told.
const ALIVE_AFTER: u32 = 2;
/// One more, and this node no longer outbids.
const YIELD_AFTER: u32 = 3;
/// A rival not heard of for this long has gone.
const FORGET: Duration = Duration::from_secs(600);
/// A process that talks although a newer one has its address is expected to outbid, or to be gone, within this time.
const SETTLED: Duration = Duration::from_secs(3);
/// Contests remembered of each kind: bounds what a peer can make us hold.
const REMEMBERED: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Contests {
    /// Others at our own address.
    rivals: BTreeMap<NodeId, Rival>,
    /// Processes that talk although another one has their address.
    outranked: BTreeMap<NodeId, Outranked>,
}

#[derive(Debug)]
struct Rival {
    epoch: u64,
    rounds: u32,
    told: bool,
    last: Duration,
}

#[derive(Debug)]
struct Outranked {
    since: Duration,
    /// All who are concerned know.
    told: bool,
    /// When it was heard.
    last: Duration,
    /// When it may be answered again: two who answer each other at once would never stop.
    answer_at: Duration,
}

impl Contests {
    /// This node has lost its address to another living process and makes no more claim to it.
    pub fn yielded(&self) -> bool {
        self.rivals.values().any(|rival| rival.rounds >= YIELD_AFTER)
    }

    pub fn len(&self) -> usize {
        self.rivals.len() + self.outranked.len()
    }

    pub fn expire(&mut self, now: Duration) {
        self.rivals.retain(|_, rival| now.saturating_sub(rival.last) < FORGET);
        self.outranked.retain(|_, outranked| now.saturating_sub(outranked.last) < FORGET);
    }
}

impl Membership {
    /// News of another process at this node's address. True if this node still claims the address.
    pub(super) fn rival(&mut self, other: Identity) -> bool {
        if self.contests.rivals.len() >= REMEMBERED && !self.contests.rivals.contains_key(&other.node) {
            return !self.contests.yielded();
        }
        let fresh = Rival { epoch: other.epoch, rounds: 0, told: false, last: self.now };
        let rival = self.contests.rivals.entry(other.node).or_insert(fresh);
        if other.epoch > rival.epoch {
            rival.epoch = other.epoch;
            rival.rounds += 1;
            rival.last = self.now;
        }
        let rounds = rival.rounds;
        if rounds >= ALIVE_AFTER {
            self.address_shared(other);
        }
        !self.contests.yielded()
    }

    /// Another process gives our address as its own, and lives.
    pub(super) fn address_shared(&mut self, other: Identity) {
        let me = self.me();
        let fresh = Rival { epoch: other.epoch, rounds: 0, told: false, last: self.now };
        if self.contests.rivals.len() < REMEMBERED || self.contests.rivals.contains_key(&other.node) {
            let rival = self.contests.rivals.entry(other.node).or_insert(fresh);
            if !std::mem::replace(&mut rival.told, true) {
                self.event(MemberEvent::AddressShared { holder: me, other });
            }
        }
    }

    /// `other`, at this node's address, counts as newer: a clock was set back. Takes a newer epoch, unless that has been
    /// tried often enough; true if it did.
    pub(super) fn outbid(&mut self, other: Identity) -> bool {
        let me = self.me();
        if other == me || other.epoch < me.epoch || !(other.node == me.node || self.rival(other)) {
            return false;
        }
        let newer = Identity { epoch: other.epoch.saturating_add(1), ..me };
        let changed = self.drive(&[], |swim, fx| swim.change_identity(newer, fx)).is_ok();
        if changed {
            self.renewed();
        }
        changed
    }

    /// `loser` talks although `holder` has its address. Tells it; and if both go on living, all who are concerned.
    pub(super) fn outranked(&mut self, loser: Identity, holder: Identity) {
        if self.contests.outranked.len() >= REMEMBERED && !self.contests.outranked.contains_key(&loser.node) {
            return;
        }
        let fresh = Outranked { since: self.now, told: false, last: self.now, answer_at: self.now };
        let held = self.contests.outranked.entry(loser.node).or_insert(fresh);
        held.last = self.now;
        let answer = held.answer_at <= self.now;
        if answer {
            held.answer_at = self.now + self.timing.period;
        }
        let both_live = self.view.last_heard(holder.node).is_some_and(|heard| heard > held.since + SETTLED);
        if both_live && !std::mem::replace(&mut held.told, true) {
            self.event(MemberEvent::AddressShared { holder, other: loser });
            self.send_note(holder, Body::AddressShared { other: loser });
        }
        if answer {
            self.send_note(loser, Body::Outbid { holder });
        }
    }
}
