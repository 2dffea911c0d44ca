//! What was last reported of each member; differences to foca's state become events.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use foca::{Member, State};

use super::{DownReason, LEFT, MemberEvent, MemberInfo};
use crate::cluster::Identity;
use crate::id::NodeId;
use crate::system::MemberState;

/// How long the departed stay listed for observers, and how many of them.
const LISTED_FOR: Duration = Duration::from_secs(60);
const LISTED: usize = 256;
/// Down members are greeted ever more seldom, up to this many times the first wait.
const SLOWEST_GREETING: u32 = 12;

#[derive(Debug)]
struct Seen {
    identity: Identity,
    state: MemberState,
    incarnation: u16,
    heard: Option<Duration>,
    greet_at: Duration,
    greet_wait: Duration,
}

#[derive(Debug, Default)]
pub(super) struct View {
    seen: BTreeMap<SocketAddr, Seen>,
    by_node: HashMap<NodeId, SocketAddr>,
    departed: VecDeque<(Duration, MemberInfo)>,
}

impl View {
    /// Takes over foca's state; what changed since the last call comes back.
    pub fn refresh<'a>(
        &mut self,
        now: Duration,
        members: impl Iterator<Item = &'a Member<Identity>>,
        verdicts: &mut BTreeMap<NodeId, DownReason>,
    ) -> Vec<MemberEvent> {
        let mut events = Vec::new();
        for member in members {
            let (id, incarnation) = (*member.id(), member.incarnation());
            let state = match member.state() {
                State::Alive => MemberState::Alive,
                State::Suspect => MemberState::Suspect,
                State::Down if incarnation == LEFT => MemberState::Left,
                State::Down => MemberState::Down,
            };
            let before = self.seen.get(&id.addr).map(|seen| (seen.identity, seen.state, seen.incarnation));
            if before == Some((id, state, incarnation))
                || before.is_some_and(|(known, was, _)| known == id && was == MemberState::Left)
            {
                continue;
            }
            self.note(now, id, state, incarnation);
            let was_active = before.is_some_and(|(_, was, _)| active(was));
            let known = before.map(|(known, ..)| known);
            match known {
                Some(old) if old.node != id.node => {
                    if self.by_node.get(&old.node) == Some(&id.addr) {
                        self.by_node.remove(&old.node);
                    }
                    if was_active {
                        events.push(MemberEvent::Down(old, DownReason::Replaced));
                        self.depart(now, old, MemberState::Down);
                    }
                    if active(state) {
                        events.push(MemberEvent::Up(id));
                    }
                }
                Some(old) if was_active && active(state) && old != id => {
                    events.push(MemberEvent::Renewed { old, new: id });
                }
                _ if !was_active && active(state) => events.push(MemberEvent::Up(id)),
                _ if was_active && !active(state) => {
                    let reason = verdicts.get(&id.node).copied().unwrap_or(DownReason::Reported);
                    events.push(if state == MemberState::Left {
                        MemberEvent::Left(id)
                    } else {
                        MemberEvent::Down(id, reason)
                    });
                    self.depart(now, id, state);
                }
                _ => {}
            }
            let was_suspect = before.is_some_and(|(known, was, _)| known == id && was == MemberState::Suspect);
            match state {
                MemberState::Suspect if !was_suspect => events.push(MemberEvent::Suspect(id)),
                MemberState::Alive if was_suspect => events.push(MemberEvent::Refuted(id)),
                _ => {}
            }
        }
        events
    }

    fn note(&mut self, now: Duration, identity: Identity, state: MemberState, incarnation: u16) {
        let fresh = Seen { identity, state, incarnation, heard: None, greet_at: now, greet_wait: Duration::ZERO };
        let seen = self.seen.entry(identity.addr).or_insert(fresh);
        if seen.identity.node != identity.node {
            seen.heard = None;
        }
        if active(seen.state) != active(state) {
            (seen.greet_at, seen.greet_wait) = (now, Duration::ZERO);
        }
        (seen.identity, seen.state, seen.incarnation) = (identity, state, incarnation);
        // A node that moved to another address is known by its latest.
        self.by_node.insert(identity.node, identity.addr);
        if active(state) {
            self.departed.retain(|(_, info)| info.identity.node != identity.node);
        }
    }

    fn depart(&mut self, now: Duration, identity: Identity, state: MemberState) {
        self.departed.retain(|(_, info)| info.identity.node != identity.node);
        self.departed.push_back((now, MemberInfo { identity, state }));
        if self.departed.len() > LISTED {
            self.departed.pop_front();
        }
    }

    /// A goodbye that came after the same node's death was reported: what counts is the goodbye.
    pub fn died_by_leaving(&mut self, who: Identity) -> Option<MemberEvent> {
        let seen = self.seen.get_mut(&who.addr).filter(|seen| seen.identity == who)?;
        if seen.state != MemberState::Down {
            return None;
        }
        seen.state = MemberState::Left;
        seen.incarnation = LEFT;
        let listed = self.departed.iter_mut().find(|(_, info)| info.identity == who)?;
        listed.1.state = MemberState::Left;
        Some(MemberEvent::Left(who))
    }

    pub fn members(&self, now: Duration) -> Vec<MemberInfo> {
        let living = self
            .seen
            .values()
            .filter(|seen| active(seen.state))
            .map(|seen| MemberInfo { identity: seen.identity, state: seen.state });
        let departed =
            self.departed.iter().filter(|(at, _)| now.saturating_sub(*at) < LISTED_FOR).map(|(_, info)| *info);
        living.chain(departed).collect()
    }

    fn get(&self, node: NodeId) -> Option<&Seen> {
        self.seen.get(self.by_node.get(&node)?).filter(|seen| seen.identity.node == node)
    }

    /// The member of this id, if it is active.
    pub fn active(&self, node: NodeId) -> Option<(Identity, MemberState, u16)> {
        let seen = self.get(node).filter(|seen| active(seen.state))?;
        Some((seen.identity, seen.state, seen.incarnation))
    }

    pub fn is_known(&self, who: Identity) -> bool {
        self.seen.get(&who.addr).is_some_and(|seen| seen.identity == who)
    }

    /// If `who` talks although it, or a later self of its process, counts as down here: under which identity.
    pub fn down_as(&self, who: Identity) -> Option<Identity> {
        let seen = self.seen.get(&who.addr)?;
        (seen.identity == who && !active(seen.state)).then_some(seen.identity)
    }

    /// Another run at the address of `who` that wins over it.
    pub fn outranks(&self, who: Identity) -> Option<Identity> {
        let seen = self.seen.get(&who.addr)?;
        let wins = foca::Identity::win_addr_conflict(&seen.identity, &who);
        (seen.identity.node != who.node && wins).then_some(seen.identity)
    }

    pub fn heard(&mut self, now: Duration, node: NodeId) {
        if let Some(seen) = self.by_node.get(&node).and_then(|addr| self.seen.get_mut(addr))
            && seen.identity.node == node
        {
            seen.heard = Some(now);
        }
    }

    pub fn last_heard(&self, node: NodeId) -> Option<Duration> {
        self.get(node)?.heard
    }

    /// Down members whose turn it is to be greeted: a partition may have healed. Who left is not bothered.
    pub fn greet(&mut self, now: Duration, first_wait: Duration) -> Vec<Identity> {
        let mut due = Vec::new();
        for seen in self.seen.values_mut().filter(|seen| seen.state == MemberState::Down && seen.greet_at <= now) {
            if seen.greet_wait > Duration::ZERO {
                due.push(seen.identity);
            }
            seen.greet_wait = (seen.greet_wait * 2).clamp(first_wait, first_wait * SLOWEST_GREETING);
            seen.greet_at = now + seen.greet_wait;
        }
        due
    }

    /// Forgets what foca forgot.
    pub fn prune(&mut self, now: Duration, is_known: impl Fn(SocketAddr) -> bool) {
        self.departed.retain(|(at, _)| now.saturating_sub(*at) < LISTED_FOR);
        if self.seen.values().all(|seen| active(seen.state)) {
            return;
        }
        self.seen.retain(|addr, seen| active(seen.state) || is_known(*addr));
        let seen = &self.seen;
        self.by_node.retain(|node, addr| seen.get(addr).is_some_and(|seen| seen.identity.node == *node));
    }
}

pub(super) fn active(state: MemberState) -> bool {
    matches!(state, MemberState::Alive | MemberState::Suspect)
}
