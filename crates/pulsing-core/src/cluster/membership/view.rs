//! What was last reported of each member; differences to foca's state become events.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use foca::{Member, State};

use super::{DownReason, LEFT, MemberEvent, MemberInfo, roster};
use crate::cluster::Identity;
use crate::id::NodeId;
use crate::system::MemberState;

/// How long the departed stay listed for observers, and how many of them.
const LISTED_FOR: Duration = Duration::from_secs(60);
const LISTED: usize = 256;
/// A member that left, or that is down while its address refuses connections, is remembered for this long: until the last
/// gossip that calls it alive has run dry. One remembered too short would be probed and found dead again.
const REMEMBER_GONE: Duration = Duration::from_secs(120);
/// A member that is down and merely silent may be cut off: it is greeted for this long.
const REMEMBER_SILENT: Duration = Duration::from_secs(60 * 60);
/// Past members remembered at most, the latest ones: who comes and goes by the thousands must not fill memory.
const REMEMBERED: usize = 1024;
/// Down members greeted at once: each greeting may be a dial.
const GREETINGS: usize = 8;
/// Down members are greeted ever more seldom, up to this many times the first wait.
const SLOWEST_GREETING: u32 = 12;

#[derive(Debug)]
struct Seen {
    identity: Identity,
    state: MemberState,
    incarnation: u16,
    heard: Option<Duration>,
    /// When it became active or ceased to be, or, if it is down, talked since.
    since: Duration,
    /// It is down and its address refuses connections.
    refused: bool,
    greet_at: Duration,
    greet_wait: Duration,
}

#[derive(Debug, Default)]
pub(super) struct View {
    seen: BTreeMap<SocketAddr, Seen>,
    by_node: HashMap<NodeId, SocketAddr>,
    departed: VecDeque<(Duration, MemberInfo)>,
    /// Grows when [`View::members`] may answer differently.
    version: u64,
    /// How many are not active.
    past: usize,
    /// The hash of all active members; none after a change.
    roster: Option<u64>,
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
        self.version += 1;
        self.roster = None;
        let was_past = self.seen.get(&identity.addr).is_some_and(|seen| !active(seen.state));
        self.past = self.past + usize::from(!active(state)) - usize::from(was_past);
        let fresh = Seen {
            identity,
            state,
            incarnation,
            heard: None,
            since: now,
            refused: false,
            greet_at: now,
            greet_wait: Duration::ZERO,
        };
        let seen = self.seen.entry(identity.addr).or_insert(fresh);
        if seen.identity.node != identity.node {
            seen.heard = None;
        }
        if active(seen.state) != active(state) {
            (seen.since, seen.refused) = (now, false);
            (seen.greet_at, seen.greet_wait) = (now, Duration::ZERO);
        }
        (seen.identity, seen.state, seen.incarnation) = (identity, state, incarnation);
        // A node that moved to another address is known by its latest.
        self.by_node.insert(identity.node, identity.addr);
        if active(state) && !self.departed.is_empty() {
            self.departed.retain(|(_, info)| info.identity.node != identity.node);
        }
    }

    /// Whether foca would learn anything from this, by SWIM's rules: of two at one address the newer run counts, down is
    /// final, and an incarnation is overruled by a higher one or, at the same one, by the worse state.
    pub fn is_news(&self, update: &Member<Identity>) -> bool {
        let Some(seen) = self.seen.get(&update.id().addr) else { return true };
        if seen.identity != *update.id() {
            return !foca::Identity::win_addr_conflict(&seen.identity, update.id());
        }
        match (seen.state, update.state()) {
            (MemberState::Down | MemberState::Left, _) => false,
            (_, State::Down) => true,
            (MemberState::Alive, State::Suspect) => update.incarnation() >= seen.incarnation,
            _ => update.incarnation() > seen.incarnation,
        }
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    /// Records held, of past members too.
    pub fn len(&self) -> usize {
        self.seen.len() + self.by_node.len() + self.departed.len()
    }

    /// The hash of all active members, whatever their order.
    pub fn roster(&mut self) -> u64 {
        let living = self.seen.values().filter(|seen| active(seen.state));
        *self
            .roster
            .get_or_insert_with(|| living.map(|seen| roster::part(seen.identity)).fold(0, |all, part| all ^ part))
    }

    /// How this node is seen, if it is remembered.
    pub fn state(&self, node: NodeId) -> Option<MemberState> {
        let gone = || self.departed.iter().find(|(_, info)| info.identity.node == node).map(|(_, info)| info.state);
        self.get(node).map(|seen| seen.state).or_else(gone)
    }

    /// A down member's address refuses connections.
    pub fn refused(&mut self, node: NodeId) {
        if let Some(seen) = self.by_node.get(&node).and_then(|addr| self.seen.get_mut(addr))
            && seen.identity.node == node
        {
            seen.refused = true;
        }
    }

    /// Whether any active member but `except` was heard after `since`.
    pub fn anyone_heard(&self, since: Duration, except: NodeId) -> bool {
        let mut others = self.seen.values().filter(|seen| active(seen.state) && seen.identity.node != except);
        others.any(|seen| seen.heard.is_some_and(|heard| heard > since))
    }

    fn depart(&mut self, now: Duration, identity: Identity, state: MemberState) {
        self.version += 1;
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
        self.version += 1;
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

    /// `who` is no member as far as this node knows: what it thinks of others does not count.
    pub fn is_out(&self, who: Identity) -> bool {
        self.down_as(who).is_some() || self.outranks(who).is_some()
    }

    pub fn heard(&mut self, now: Duration, node: NodeId) {
        if let Some(seen) = self.by_node.get(&node).and_then(|addr| self.seen.get_mut(addr))
            && seen.identity.node == node
        {
            seen.heard = Some(now);
            if seen.state == MemberState::Down {
                // It may not hear us, and would be a newcomer if it were forgotten.
                seen.since = now;
            }
        }
    }

    pub fn last_heard(&self, node: NodeId) -> Option<Duration> {
        self.get(node)?.heard
    }

    /// Down members whose turn it is to be greeted: a partition may have healed. Who left is not bothered.
    pub fn greet(&mut self, now: Duration, first_wait: Duration) -> Vec<Identity> {
        if self.past == 0 {
            return Vec::new();
        }
        let due = self.seen.values_mut().filter(|seen| seen.state == MemberState::Down && seen.greet_at <= now);
        let mut due: Vec<&mut Seen> = due.collect();
        due.sort_by_key(|seen| seen.greet_at);
        let mut greeted = Vec::new();
        for seen in due {
            if seen.greet_wait > Duration::ZERO {
                if greeted.len() == GREETINGS {
                    break;
                }
                greeted.push(seen.identity);
            }
            seen.greet_wait = (seen.greet_wait * 2).clamp(first_wait, first_wait * SLOWEST_GREETING);
            seen.greet_at = now + seen.greet_wait;
        }
        greeted
    }

    /// Takes out the past members whose time is over, and the oldest of those who are too many.
    pub fn prune(&mut self, now: Duration) -> Vec<Identity> {
        let listed = self.departed.len();
        self.departed.retain(|(at, _)| now.saturating_sub(*at) < LISTED_FOR);
        if self.departed.len() != listed {
            self.version += 1;
        }
        if self.past == 0 {
            return Vec::new();
        }
        let mut past: Vec<(Duration, Identity, bool)> = Vec::with_capacity(self.past);
        for seen in self.seen.values().filter(|seen| !active(seen.state)) {
            let kept = if seen.state == MemberState::Left || seen.refused { REMEMBER_GONE } else { REMEMBER_SILENT };
            past.push((seen.since, seen.identity, now.saturating_sub(seen.since) >= kept));
        }
        past.sort_by_key(|(since, ..)| *since);
        let too_many = past.len().saturating_sub(REMEMBERED);
        let over = past.into_iter().enumerate().filter(|(n, (.., over))| *over || *n < too_many);
        let over: Vec<Identity> = over.map(|(_, (_, identity, _))| identity).collect();
        for identity in &over {
            self.seen.remove(&identity.addr);
            if self.by_node.get(&identity.node) == Some(&identity.addr) {
                self.by_node.remove(&identity.node);
            }
        }
        self.past -= over.len();
        over
    }
}

pub(super) fn active(state: MemberState) -> bool {
    matches!(state, MemberState::Alive | MemberState::Suspect)
}
