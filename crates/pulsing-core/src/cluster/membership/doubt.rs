//! Doubts about members, from hint to verdict: checks that a closed link starts, suspicions, refused dials.

use std::collections::BTreeMap;
use std::time::Duration;

use foca::State;

use super::{Body, DIRECT, DownReason, Identity, MemberEvent, Membership, NodeId, TimerKind};
use crate::system::MemberState;

/// A refusal counts for this long.
const REFUSAL_COUNTS_FOR: Duration = Duration::from_secs(10);
/// A suspect that talks but does not refute gets its suspicion time anew this often.
const EXTENSIONS: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Doubts {
    checks: BTreeMap<NodeId, Check>,
    suspicions: BTreeMap<NodeId, Suspicion>,
    /// By target, then observer: when.
    refusals: BTreeMap<NodeId, BTreeMap<NodeId, Duration>>,
}

#[derive(Debug)]
struct Check {
    started: Duration,
    due: Duration,
}

#[derive(Debug)]
struct Suspicion {
    identity: Identity,
    incarnation: u16,
    since: Duration,
    due: Duration,
    extended: u32,
}

impl Membership {
    /// A peer showed life: doubts that rest on its silence are void.
    pub(super) fn heard(&mut self, node: NodeId) {
        self.view.heard(self.now, node);
        self.doubts.checks.remove(&node);
        if self.doubts.refusals.remove(&node).is_some() {
            // What came may have been on its way when the process died: the refusals may be right, so ask again.
            self.check(node);
        }
    }

    /// Probes a member at once, directly and through others.
    pub(super) fn check(&mut self, node: NodeId) {
        if self.doubts.checks.contains_key(&node) {
            return;
        }
        let Some((target, ..)) = self.view.active(node) else { return };
        let wait = self.timing.period * (self.health.score() + 1);
        self.doubts.checks.insert(node, Check { started: self.now, due: self.now + wait });
        self.schedule(wait, TimerKind::Check(node));
        self.ping_around(target, None);
    }

    fn ping_around(&mut self, target: Identity, suspected: Option<u16>) {
        self.send_ping(target, self.me(), suspected);
        for helper in self.helpers(target.node) {
            self.send_note(helper, Body::PingFor { target });
        }
    }

    pub(super) fn send_ping(&mut self, to: Identity, origin: Identity, suspected: Option<u16>) {
        self.send_note(to, Body::Ping { to, origin, suspected });
    }

    pub(super) fn check_due(&mut self, node: NodeId) {
        let Some(check) = self.doubts.checks.get(&node) else { return };
        if check.due > self.now {
            return self.schedule(check.due - self.now, TimerKind::Check(node));
        }
        let started = check.started;
        self.doubts.checks.remove(&node);
        let answered = self.view.last_heard(node).is_some_and(|heard| heard > started);
        if let Some((target, state, incarnation)) = self.view.active(node).filter(|_| !answered) {
            if state == MemberState::Alive {
                self.apply(target, incarnation, State::Suspect);
            }
            self.suspect(target, incarnation);
        }
    }

    /// Starts the time in which a suspect has to answer, and tells it so.
    pub(super) fn suspect(&mut self, identity: Identity, incarnation: u16) {
        let known = self.doubts.suspicions.get(&identity.node);
        if known.is_some_and(|known| known.identity == identity && known.incarnation == incarnation) {
            return;
        }
        let wait = self.suspicion_time();
        let suspicion = Suspicion { identity, incarnation, since: self.now, due: self.now + wait, extended: 0 };
        self.doubts.suspicions.insert(identity.node, suspicion);
        self.schedule(wait / 2, TimerKind::Suspicion(identity.node));
        self.ping_around(identity, Some(incarnation));
    }

    fn suspicion_time(&self) -> Duration {
        let stretch = 1.0 + f64::from(self.health.score()) / 2.0;
        self.timing.suspicion_for(self.swim.num_members() + 1).mul_f64(stretch)
    }

    pub(super) fn suspicion_due(&mut self, node: NodeId) {
        let full = self.suspicion_time();
        let Some(suspicion) = self.doubts.suspicions.get_mut(&node) else { return };
        let (identity, incarnation) = (suspicion.identity, suspicion.incarnation);
        if suspicion.due > self.now {
            let rest = suspicion.due - self.now;
            self.schedule(rest, TimerKind::Suspicion(node));
            return self.ping_around(identity, Some(incarnation));
        }
        let talks = self.view.last_heard(node).is_some_and(|heard| heard > suspicion.since);
        if talks && suspicion.extended < EXTENSIONS {
            suspicion.extended += 1;
            suspicion.since = self.now;
            suspicion.due = self.now + full;
            self.schedule(full / 2, TimerKind::Suspicion(node));
            return self.ping_around(identity, Some(incarnation));
        }
        self.doubts.suspicions.remove(&node);
        if self.view.active(node) == Some((identity, MemberState::Suspect, incarnation)) {
            self.condemn(identity, incarnation, DownReason::Unresponsive);
        }
    }

    /// After a pause of our own: every silence so far may have been ours.
    pub(super) fn doubt_afresh(&mut self) {
        let full = self.suspicion_time();
        let wait = self.timing.period * (self.health.score() + 1);
        let mut again = Vec::new();
        for suspicion in self.doubts.suspicions.values_mut() {
            suspicion.since = self.now;
            suspicion.due = self.now + full;
            again.push((suspicion.identity, Some(suspicion.incarnation)));
        }
        for (node, check) in &mut self.doubts.checks {
            check.started = self.now;
            check.due = self.now + wait;
            again.extend(self.view.active(*node).map(|(identity, ..)| (identity, None)));
        }
        for (identity, suspected) in again {
            self.ping_around(identity, suspected);
        }
    }

    /// Our own dial was refused.
    pub(super) fn refused(&mut self, node: NodeId) {
        let Some((target, ..)) = self.view.active(node) else { return };
        let me = self.me().node;
        let first = self.doubts.refusals.entry(node).or_default().insert(me, self.now).is_none();
        if first {
            for peer in self.active(|id| id.node != node).into_iter().take(DIRECT) {
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
            self.condemn(target, incarnation, DownReason::Refused { observers: count });
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
            observers.retain(|_, at| now.saturating_sub(*at) < REFUSAL_COUNTS_FOR);
            !observers.is_empty()
        });
    }

    fn condemn(&mut self, who: Identity, incarnation: u16, reason: DownReason) {
        self.verdicts.insert(who.node, reason);
        self.apply(who, incarnation, State::Down);
        self.verdicts.remove(&who.node);
        // If it lives after all, it should renew itself at once.
        self.send_note(who, Body::YouAreDown { who });
    }

    /// Clears the doubts that an event settled.
    pub(super) fn settle(&mut self, event: &MemberEvent) {
        let node = match event {
            MemberEvent::Refuted(id) => {
                if self.doubts.suspicions.contains_key(&id.node) {
                    // We were wrong about it.
                    self.health.worse(1);
                }
                id.node
            }
            MemberEvent::Down(id, _) | MemberEvent::Left(id) => id.node,
            MemberEvent::Renewed { old, .. } => old.node,
            _ => return,
        };
        self.doubts.suspicions.remove(&node);
        self.doubts.checks.remove(&node);
        self.doubts.refusals.remove(&node);
    }
}
