//! Refused dials: nothing listens at a member's address (M3).

use std::time::Duration;

use super::{Body, DIRECT, DownReason, Identity, Membership, NodeId};

/// A refusal counts for this long.
const COUNTS_FOR: Duration = Duration::from_secs(10);

impl Membership {
    /// Our own dial was refused.
    pub(super) fn refused(&mut self, node: NodeId) {
        let Some((target, ..)) = self.view.active(node) else { return self.view.refused(node) };
        let me = self.me().node;
        let first = self.doubts.refusals.entry(node).or_default().insert(me, self.now).is_none();
        if first {
            for peer in self.some_active(DIRECT, |id| id.node != node) {
                self.send_note(peer, Body::Refused { target });
            }
            // Starts others' dials, unless a closed link already did.
            self.check(node);
        }
        self.weigh_refusals(target);
    }

    /// Another node's dial was refused.
    pub(super) fn refused_elsewhere(&mut self, target: Identity, observer: NodeId) {
        if self.view.active(target.node).is_none_or(|(known, ..)| known != target)
            || self.view.active(observer).is_none()
        {
            return;
        }
        let observers = self.doubts.refusals.entry(target.node).or_default();
        observers.insert(observer, self.now);
        self.check(target.node);
        self.weigh_refusals(target);
    }

    fn weigh_refusals(&mut self, target: Identity) {
        let me = self.me().node;
        let Some(observers) = self.doubts.refusals.get(&target.node) else { return };
        let count = observers.len();
        // Who might confirm it: members that do not refuse our own dials, too. Without any, our word is all there is.
        let refused_here = |node: &NodeId| self.doubts.refusals.get(node).is_some_and(|by| by.contains_key(&me));
        let others = self.swim.iter_members().map(|member| member.id().node);
        let alone = !others.filter(|node| *node != target.node).any(|node| !refused_here(&node));
        if count >= 2 || (alone && observers.contains_key(&me)) {
            let incarnation = self.view.active(target.node).map_or(0, |(_, _, incarnation)| incarnation);
            self.condemn(target, incarnation, DownReason::Refused { observers: count }, true);
        } else {
            return;
        }
        // One death may leave us the only possible observer of the next.
        let rest: Vec<NodeId> = self.doubts.refusals.keys().copied().collect();
        for node in rest {
            if let Some((next, ..)) = self.view.active(node) {
                return self.weigh_refusals(next);
            }
        }
    }

    pub(super) fn expire_refusals(&mut self) {
        let now = self.now;
        self.doubts.refusals.retain(|_, observers| {
            observers.retain(|_, at| now.saturating_sub(*at) < COUNTS_FOR);
            !observers.is_empty()
        });
    }
}
