//! Repairs rosters that missed a change: hashes go round, and who differs asks for the other's roster.

use std::time::Duration;

use super::{Body, Identity, Membership};

#[derive(Debug, Default)]
pub(super) struct Roster {
    tell_at: Duration,
    ask_at: Duration,
}

/// The part of one active member in the hash of a roster (FNV-1a, 64 bits): the same on all machines and versions.
pub(super) fn part(member: Identity) -> u64 {
    let bytes = member.encode();
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Membership {
    fn roster_hash(&mut self) -> u64 {
        self.view.roster() ^ part(self.me())
    }

    /// Tells one member what this node's roster amounts to.
    pub(super) fn tell_roster(&mut self) {
        if self.now < self.roster.tell_at {
            return;
        }
        self.roster.tell_at = self.now + self.timing.period * 2;
        if let Some(peer) = self.some_active(1, |_| true).first().copied() {
            let hash = self.roster_hash();
            self.send_note(peer, Body::Roster { hash });
        }
    }

    /// A member's roster amounts to this. A roster is tens of kilobytes in a cluster of a thousand, and news under way
    /// makes rosters differ for a moment, so one is not asked for often.
    pub(super) fn compare_roster(&mut self, from: Identity, hash: u64) {
        if hash != self.roster_hash() && self.now >= self.roster.ask_at && self.view.active(from.node).is_some() {
            self.roster.ask_at = self.now + self.timing.period * 20;
            self.announce(from);
        }
    }
}
