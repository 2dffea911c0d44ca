//! Doubts about members, from hint to verdict: checks that a closed link starts, and suspicions (Lifeguard, M2, M3).
//!
//! A suspect is pinged anew in every period, told that it is suspected so that it can refute at once, and pinged by others
//! on our behalf. One of them that reaches it speaks for it; one that does not either says so, which confirms the
//! suspicion independently, and shows that it is not we who hear nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use foca::State;

use super::event::TimerKind;
use super::{Body, DownReason, FANOUT, Identity, MemberEvent, Membership, NodeId};
use crate::system::MemberState;

/// A suspect that talks but does not refute gets its suspicion time anew this often.
const EXTENSIONS: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Doubts {
    checks: BTreeMap<NodeId, Check>,
    suspicions: BTreeMap<NodeId, Suspicion>,
    /// By target, then observer: when its dial was refused.
    pub(super) refusals: BTreeMap<NodeId, BTreeMap<NodeId, Duration>>,
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
    /// When it is looked at next. Timers of an earlier plan find it in the future.
    wake: Duration,
    extended: u32,
    /// Who was asked to ping the suspect.
    asked: BTreeSet<NodeId>,
    /// Who of them could not reach it either.
    confirmed: BTreeSet<NodeId>,
    /// Whether any of them answered at all.
    replied: bool,
    /// The first round of answers has been judged.
    judged: bool,
}

impl Doubts {
    pub fn len(&self) -> usize {
        let refusals: usize = self.refusals.values().map(BTreeMap::len).sum();
        self.checks.len() + self.suspicions.len() + refusals
    }

    pub fn is_suspected(&self, node: NodeId) -> bool {
        self.suspicions.contains_key(&node)
    }

    pub fn clear(&mut self, node: NodeId) {
        self.suspicions.remove(&node);
        self.checks.remove(&node);
        self.refusals.remove(&node);
    }
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

    /// Pings directly and through others; who the others are.
    fn ping_around(&mut self, target: Identity, suspected: Option<u16>) -> Vec<NodeId> {
        self.send_ping(target, self.me(), suspected);
        let helpers = self.some_active(FANOUT, |id| id.node != target.node);
        for helper in &helpers {
            self.send_note(*helper, Body::PingFor { target, suspected });
        }
        helpers.iter().map(|helper| helper.node).collect()
    }

    pub(super) fn send_ping(&mut self, to: Identity, origin: Identity, suspected: Option<u16>) {
        self.send_note(to, Body::Ping { to, origin, suspected });
    }

    /// Another node asks for a ping on its behalf.
    pub(super) fn run_errand(&mut self, target: Identity, asker: Identity, suspected: Option<u16>) {
        self.send_ping(target, asker, suspected);
        let since = self.now;
        self.schedule(self.timing.period, TimerKind::Errand { target, asker, since });
    }

    /// The time for an answer to such a ping is over; an answer would have been passed on.
    pub(super) fn errand_due(&mut self, target: Identity, asker: Identity, since: Duration) {
        if self.view.last_heard(target.node).is_none_or(|heard| heard <= since) {
            self.send_note(asker, Body::Silent { target });
        }
    }

    /// A helper could not reach `target` either.
    pub(super) fn silent_elsewhere(&mut self, target: Identity, helper: NodeId) {
        let Some(suspicion) = self.doubts.suspicions.get_mut(&target.node) else { return };
        if suspicion.identity != target || !suspicion.asked.contains(&helper) {
            return;
        }
        suspicion.replied = true;
        suspicion.confirmed.insert(helper);
        self.plan(target.node);
    }

    /// A helper reached `target`.
    pub(super) fn answered_elsewhere(&mut self, target: NodeId) {
        if let Some(suspicion) = self.doubts.suspicions.get_mut(&target) {
            suspicion.replied = true;
        }
        self.heard(target);
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
                self.apply(target, incarnation, State::Suspect, true);
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
        let asked = self.ping_around(identity, Some(incarnation)).into_iter().collect();
        let suspicion = Suspicion {
            identity,
            incarnation,
            since: self.now,
            wake: Duration::MAX,
            extended: 0,
            asked,
            confirmed: BTreeSet::new(),
            replied: false,
            judged: false,
        };
        self.doubts.suspicions.insert(identity.node, suspicion);
        self.plan(identity.node);
    }

    /// How long a suspect has to refute: Lifeguard's formula, from `max` down to `min` with the logarithm of the
    /// confirmations. With too few others to confirm anything the shortest time is all there is.
    fn suspicion_time(&self, confirmations: usize) -> Duration {
        let members = self.swim.num_members() + 1;
        let (min, max) = (self.timing.suspicion, self.timing.longest_suspicion(members));
        let expected = FANOUT.min(members.saturating_sub(2));
        let time = if expected == 0 {
            min
        } else {
            let confirmed = ((confirmations + 1) as f64).ln() / ((expected + 1) as f64).ln();
            max.saturating_sub((max - min).mul_f64(confirmed)).max(min)
        };
        time.mul_f64(1.0 + f64::from(self.health.score()) / 2.0)
    }

    /// Wakes for the next round, or for the end if that comes first.
    fn plan(&mut self, node: NodeId) {
        let Some(suspicion) = self.doubts.suspicions.get(&node) else { return };
        let due = suspicion.since + self.suspicion_time(suspicion.confirmed.len());
        let wake = due.min(suspicion.wake.min(self.now + self.timing.period)).max(self.now);
        let Some(suspicion) = self.doubts.suspicions.get_mut(&node) else { return };
        if wake != suspicion.wake {
            suspicion.wake = wake;
            self.schedule(wake - self.now, TimerKind::Suspicion(node));
        }
    }

    pub(super) fn suspicion_due(&mut self, node: NodeId) {
        let Some(suspicion) = self.doubts.suspicions.get_mut(&node) else { return };
        if suspicion.wake > self.now {
            return;
        }
        suspicion.wake = Duration::MAX;
        let (identity, incarnation, since) = (suspicion.identity, suspicion.incarnation, suspicion.since);
        let (extended, confirmations) = (suspicion.extended, suspicion.confirmed.len());
        if self.now > since + self.timing.period && !std::mem::replace(&mut suspicion.judged, true) {
            // Not one of the helpers said anything: the fault may well be ours.
            if !suspicion.replied && !suspicion.asked.is_empty() {
                self.health.worse(1);
            }
        }
        let due = since + self.suspicion_time(confirmations);
        let talks = self.view.last_heard(node).is_some_and(|heard| heard > since);
        if due <= self.now && (!talks || extended >= EXTENSIONS) {
            self.doubts.suspicions.remove(&node);
            if self.view.active(node) == Some((identity, MemberState::Suspect, incarnation)) {
                let reason = if talks { DownReason::Deaf } else { DownReason::Unresponsive };
                self.condemn(identity, incarnation, reason, self.hears_anybody(since, node));
            }
            return;
        }
        let asked = self.ping_around(identity, Some(incarnation));
        if let Some(suspicion) = self.doubts.suspicions.get_mut(&node) {
            suspicion.asked.extend(asked);
            if due <= self.now {
                suspicion.extended += 1;
                suspicion.since = self.now;
                suspicion.confirmed.clear();
            }
        }
        self.plan(node);
    }

    /// Whether anyone but `suspect` was heard since then. One who hears nobody may be the one who is cut off, and keeps its
    /// verdicts to itself: those who hear it would take them for news.
    fn hears_anybody(&self, since: Duration, suspect: NodeId) -> bool {
        self.swim.num_members() < 2 || self.view.anyone_heard(since, suspect)
    }

    /// After a pause of our own: every silence so far may have been ours.
    pub(super) fn doubt_afresh(&mut self) {
        let wait = self.timing.period * (self.health.score() + 1);
        let mut again = Vec::new();
        for suspicion in self.doubts.suspicions.values_mut() {
            suspicion.since = self.now;
            suspicion.wake = Duration::MAX;
            suspicion.confirmed.clear();
            again.push((suspicion.identity, Some(suspicion.incarnation)));
        }
        for (node, check) in &mut self.doubts.checks {
            check.started = self.now;
            check.due = self.now + wait;
            again.extend(self.view.active(*node).map(|(identity, ..)| (identity, None)));
        }
        for (identity, suspected) in again {
            let asked = self.ping_around(identity, suspected);
            if let Some(suspicion) = self.doubts.suspicions.get_mut(&identity.node) {
                suspicion.asked.extend(asked);
            }
            self.plan(identity.node);
        }
    }

    /// Declares a member down; `share`: for all to hear.
    pub(super) fn condemn(&mut self, who: Identity, incarnation: u16, reason: DownReason, share: bool) {
        self.verdicts.insert(who.node, reason);
        self.apply(who, incarnation, State::Down, share);
        self.verdicts.remove(&who.node);
        // If it lives after all, it should renew itself at once.
        self.send_note(who, Body::YouAreDown { who });
    }

    /// Clears the doubts that an event settled.
    pub(super) fn settle(&mut self, event: &MemberEvent) {
        let node = match event {
            MemberEvent::Refuted(id) => {
                if self.doubts.is_suspected(id.node) {
                    // We were wrong about it.
                    self.health.worse(1);
                }
                id.node
            }
            MemberEvent::Down(id, _) | MemberEvent::Left(id) => id.node,
            MemberEvent::Renewed { old, .. } => old.node,
            _ => return,
        };
        self.doubts.clear(node);
    }
}
