//! Who is in the cluster: SWIM by foca, and around it what foca leaves out.
//!
//! * Local health (M2): timers that fire late, suspicions that were wrong and suspicions about ourselves stretch our own
//!   probe waits and suspicion times. After a pause of this process nobody is accused before a fresh round of probes.
//! * Suspicions (M2) run shorter with each other member that cannot reach the suspect either; who hears nobody keeps its
//!   verdicts to itself.
//! * Hints (M3): a closed link starts a probe at once; a dial refused to two observers is a verdict.
//! * Goodbyes: a leave goes to every member directly and is told apart from a death, also when gossip carries it.
//! * Ways back (M4): down members are greeted for ever, a node that learns that it was declared down renews itself.
//!
//! foca's timer for "suspect to down" never runs here: the deadline is [`doubt`]'s, which can extend it.

mod contest;
mod doubt;
mod event;
mod refusal;
mod renewal;
mod roster;
mod swim;
mod view;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use foca::{Foca, NoCustomBroadcast, PostcardCodec, State, Timer};
use rand::rngs::StdRng;
use rand::seq::{IteratorRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use self::contest::Contests;
use self::doubt::Doubts;
use self::event::TimerKind;
pub use self::event::{DownReason, MemberEvent, MemberInfo, MembershipError, MembershipOutput, MembershipTimer};
use self::renewal::Renewals;
use self::roster::Roster;
use self::view::View;
use super::health::Health;
use super::identity::Identity;
use super::note::{self, Body, Note};
use super::preset::{FANOUT, Preset, Timing};
use crate::id::NodeId;
use crate::system::MemberState;

type Swim = Foca<Identity, PostcardCodec, StdRng, NoCustomBroadcast>;

/// Incarnation under which a leave travels: foca gossips a death with its incarnation, and no refutation counts this far.
const LEFT: u16 = u16::MAX;
/// Members told directly of news that cannot wait for gossip.
const DIRECT: usize = 32;

/// The membership of one node. Feed it datagrams, timers and hints, then [`poll`](Self::poll) until `None`.
pub struct Membership {
    swim: Swim,
    timing: Timing,
    rng: StdRng,
    now: Duration,
    out: VecDeque<MembershipOutput>,
    view: View,
    health: Health,
    doubts: Doubts,
    contests: Contests,
    renewals: Renewals,
    roster: Roster,
    /// Why the next death that shows in foca's state happened.
    verdicts: BTreeMap<NodeId, DownReason>,
    tick_due: Option<Duration>,
    /// After a pause of ours: no probe may fail before this.
    grace_until: Duration,
    my_incarnation: u16,
    /// Whom foca probes in this period.
    probing: Option<SocketAddr>,
    sized_for: usize,
    left: bool,
}

impl Membership {
    /// The membership of a node that knows nobody yet.
    ///
    /// `seed` makes its random choices repeatable; take a random one outside of tests.
    pub fn new(me: Identity, preset: Preset, seed: u64) -> Self {
        let me = Identity::new(me.node, me.addr, me.epoch);
        let timing = preset.timing();
        let mut rng = StdRng::seed_from_u64(seed);
        let swim = Foca::new(me, timing.config(1), StdRng::seed_from_u64(rng.random()), PostcardCodec);
        let first = MembershipTimer { due: None, kind: TimerKind::Tick };
        Self {
            swim,
            timing,
            rng,
            now: Duration::ZERO,
            out: VecDeque::from([MembershipOutput::Timer { after: timing.tick, timer: first }]),
            view: View::default(),
            health: Health::default(),
            doubts: Doubts::default(),
            contests: Contests::default(),
            renewals: Renewals::default(),
            roster: Roster::default(),
            verdicts: BTreeMap::new(),
            tick_due: None,
            grace_until: Duration::ZERO,
            my_incarnation: 0,
            probing: None,
            sized_for: 1,
            left: false,
        }
    }

    /// This node's identity as of now; it changes with [`MemberEvent::SelfRenewed`].
    pub fn me(&self) -> Identity {
        *self.swim.identity()
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<MembershipOutput> {
        self.out.pop_front()
    }

    /// All members but this node. Who went down or left stays listed for 60 s.
    pub fn members(&self) -> Vec<MemberInfo> {
        self.view.members(self.now)
    }

    /// Grows whenever [`members`](Self::members) may answer differently.
    pub fn version(&self) -> u64 {
        self.view.version()
    }

    /// How a node is seen from here; `None` if it is unknown, or forgotten.
    pub fn state_of(&self, node: NodeId) -> Option<MemberState> {
        self.view.state(node)
    }

    /// How many other members are active: alive or suspect.
    pub fn active_members(&self) -> usize {
        self.swim.num_members()
    }

    /// Records held of members, of past ones and of doubts. Bounded, however many nodes come and go.
    pub fn footprint(&self) -> usize {
        self.view.len() + self.doubts.len() + self.contests.len() + self.swim.iter_membership_state().len()
    }

    /// True if this node knows no active member: the driver then dials its seeds again, for ever (M4).
    pub fn is_alone(&self) -> bool {
        self.swim.num_members() == 0
    }

    /// 0 = healthy; up to 7 = this process runs late or accuses wrongly (M2).
    pub fn health_score(&self) -> u32 {
        self.health.score()
    }

    /// A datagram from a peer.
    ///
    /// # Errors
    /// [`MembershipError`] if it cannot be read or claims to come from this node itself.
    pub fn handle_data(&mut self, now: Duration, data: &[u8]) -> Result<(), MembershipError> {
        self.enter(now);
        match data.split_first() {
            Some((&note::SWIM, packet)) => self.handle_swim(packet),
            Some((&note::NOTE, bytes)) => match Note::decode(bytes)? {
                Some(note) => self.handle_note(note),
                None => Ok(()),
            },
            Some((&other, _)) => Err(MembershipError::Malformed(format!("it begins with byte {other}, not 1 or 2"))),
            None => Err(MembershipError::Malformed("it is empty".to_owned())),
        }
    }

    /// A timer that [`poll`](Self::poll) handed out. Lateness counts against this node's own health.
    pub fn handle_timer(&mut self, now: Duration, timer: MembershipTimer) {
        self.enter(now);
        if self.left {
            return;
        }
        let late = timer.due.map_or(Duration::ZERO, |due| now.saturating_sub(due));
        match timer.kind {
            TimerKind::Tick => self.tick(),
            TimerKind::Suspicion(node) => self.suspicion_due(node),
            TimerKind::Check(node) => self.check_due(node),
            TimerKind::Errand { target, asker, since } => {
                // One who was asleep when the answer came knows nothing.
                if late < self.timing.rtt {
                    self.errand_due(target, asker, since);
                }
            }
            TimerKind::Swim(Timer::ProbeRandomMember(token)) => {
                // foca judges its last probe when it starts the next: after a pause the answer may still wait in a buffer.
                if late > self.timing.period || now < self.grace_until {
                    let again = TimerKind::Swim(Timer::ProbeRandomMember(token));
                    return self.schedule(self.timing.period, again);
                }
                if late < self.timing.rtt {
                    self.health.better();
                }
                self.timer_to_swim(Timer::ProbeRandomMember(token));
            }
            TimerKind::Swim(timer) => self.timer_to_swim(timer),
        }
    }

    /// Greets a node, usually a seed, whose identity a handshake told.
    pub fn join(&mut self, now: Duration, peer: Identity) {
        self.enter(now);
        if !self.left && peer.addr != self.me().addr {
            self.announce(peer);
        }
    }

    /// A link to a peer closed without being idle: probes it at once, directly and through others. No verdict.
    pub fn link_closed(&mut self, now: Duration, peer: NodeId) {
        self.enter(now);
        if !self.left {
            self.check(peer);
        }
    }

    /// A dial of a peer was refused: nothing listens there. With a second observer, or when there is no other node to
    /// ask, it is down (M3). Every refused dial should be reported, not only the first.
    pub fn dial_refused(&mut self, now: Duration, peer: NodeId) {
        self.enter(now);
        if !self.left {
            self.refused(peer);
        }
    }

    /// Says goodbye to every known member directly. From then on this node answers with its goodbye only, and
    /// [`poll`](Self::poll) yields what is to be sent.
    pub fn leave(&mut self, now: Duration) {
        self.enter(now);
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        for peer in self.some_active(usize::MAX, |_| true) {
            self.send_note(peer, Body::Leave);
        }
    }

    /// Every entry passes here: a pause of this process shows before anything that waited is judged.
    fn enter(&mut self, now: Duration) {
        self.now = self.now.max(now);
        let Some(due) = self.tick_due else { return };
        let late = self.now.saturating_sub(due);
        if late > self.timing.period {
            // Until the late tick has fired this is one and the same pause.
            self.tick_due = None;
            self.health.worse(2);
            self.grace_until = self.now + self.timing.period;
            self.doubt_afresh();
            tracing::debug!(?late, "this process was paused; probing afresh before anyone is accused");
        } else if late > self.timing.rtt {
            self.tick_due = None;
            self.health.worse(1);
        }
    }

    fn tick(&mut self) {
        self.tick_due = Some(self.now + self.timing.tick);
        self.schedule(self.timing.tick, TimerKind::Tick);
        let size = self.swim.num_members() + 1;
        if size != self.sized_for && self.swim.set_config(self.timing.config(size)).is_ok() {
            self.sized_for = size;
        }
        self.expire_refusals();
        for peer in self.view.greet(self.now, self.timing.greet) {
            self.announce(peer);
        }
        self.tell_roster();
        self.contests.expire(self.now);
        self.forget();
    }

    fn handle_note(&mut self, note: Note) -> Result<(), MembershipError> {
        let (from, me) = (note.from, self.me());
        self.admit(from)?;
        if self.left {
            if note.body != Body::Leave {
                self.send_note(from, Body::Leave);
            }
            return Ok(());
        }
        match note.body {
            Body::Ping { to, origin, suspected } => {
                self.send_note(from, Body::Pong { origin });
                if let Some(who) = self.view.down_as(from) {
                    self.send_note(from, Body::YouAreDown { who });
                }
                if to.addr == me.addr && to != me {
                    self.outbid(to);
                    self.announce(from);
                } else if let Some(incarnation) = suspected.filter(|_| to == me && !self.view.is_out(from)) {
                    self.apply(me, incarnation, State::Suspect, true);
                    self.introduce(from);
                    if origin.node != from.node {
                        self.introduce(origin);
                    }
                }
            }
            Body::Pong { origin } if origin.node != me.node => self.send_note(origin, Body::Answered { target: from }),
            Body::Pong { .. } => {}
            Body::PingFor { target, .. } if target.node == me.node => {}
            Body::PingFor { target, suspected } => self.run_errand(target, from, suspected),
            Body::Answered { target } => self.answered_elsewhere(target.node),
            Body::Silent { target } => self.silent_elsewhere(target, from.node),
            Body::Refused { target } => self.refused_elsewhere(target, from.node),
            Body::Leave => self.say_left(from),
            Body::YouAreDown { who } => {
                if who == me && self.may_renew() {
                    self.apply(me, 0, State::Down, true);
                }
                if who.node == me.node {
                    self.announce(from);
                }
            }
            Body::Outbid { holder } => {
                if holder.addr == me.addr && self.outbid(holder) {
                    self.announce(from);
                }
            }
            Body::AddressShared { other } => {
                if other.addr == me.addr && other.node != me.node {
                    self.address_shared(other);
                }
            }
            Body::Roster { hash } => self.compare_roster(from, hash),
        }
        Ok(())
    }

    /// Notes that a peer talks; refuses one that has this node's address.
    fn admit(&mut self, from: Identity) -> Result<(), MembershipError> {
        if from.addr == self.me().addr {
            return Err(MembershipError::FromOurselves(from));
        }
        self.heard(from.node);
        Ok(())
    }

    fn say_left(&mut self, who: Identity) {
        if self.view.is_known(who) {
            self.apply(who, LEFT, State::Down, true);
            if let Some(event) = self.view.died_by_leaving(who) {
                self.event(event);
            }
        }
    }

    fn event(&mut self, event: MemberEvent) {
        self.out.push_back(MembershipOutput::Event(event));
    }

    fn schedule(&mut self, after: Duration, kind: TimerKind) {
        let timer = MembershipTimer { due: Some(self.now + after), kind };
        self.out.push_back(MembershipOutput::Timer { after, timer });
    }

    fn send_note(&mut self, to: Identity, body: Body) {
        let data = Note { from: self.me(), body }.encode();
        self.out.push_back(MembershipOutput::Send { to, data });
    }

    /// Up to `n` active members that pass, in random order.
    fn some_active(&mut self, n: usize, pass: impl Fn(&Identity) -> bool) -> Vec<Identity> {
        let ids = self.swim.iter_members().map(|member| *member.id()).filter(|id| pass(id));
        let mut some = if n == usize::MAX { ids.collect() } else { ids.sample(&mut self.rng, n) };
        some.shuffle(&mut self.rng);
        some
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
