//! Who is in the cluster: SWIM by foca, and around it what foca leaves out.
//!
//! * Local health (M2): timers that fire late, suspicions that were wrong and suspicions about ourselves stretch our own
//!   probe waits and suspicion times. After a pause of this process nobody is accused before a fresh round of probes.
//! * Hints (M3): a closed link starts a probe at once; a dial refused to two observers is a verdict.
//! * Goodbyes: a leave goes to every member directly and is told apart from a death, also when gossip carries it.
//! * Ways back (M4): down members are greeted for ever, a node that learns that it was declared down renews itself.
//!
//! foca's timer for "suspect to down" never runs here: the deadline is [`doubt`]'s, which can extend it.

mod doubt;
mod view;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use foca::{Codec, Foca, Header, Message, NoCustomBroadcast, OwnedNotification, PostcardCodec, State, Timer};
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};

use self::doubt::Doubts;
use self::view::View;
use super::health::Health;
use super::identity::Identity;
use super::note::{self, Body, Note};
use super::preset::{FANOUT, Preset, Timing};
use crate::error::Error;
use crate::id::NodeId;
use crate::system::MemberState;

type Swim = Foca<Identity, PostcardCodec, StdRng, NoCustomBroadcast>;

/// Incarnation under which a leave travels: foca gossips a death with its incarnation, and no refutation counts this far.
const LEFT: u16 = u16::MAX;
/// Members told directly of news that cannot wait for gossip.
const DIRECT: usize = 32;

/// Why a datagram was not taken. The membership is unchanged; the datagram is lost, as any datagram may be.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// The bytes are no membership message of this version.
    #[error("membership message cannot be read: {0}")]
    Malformed(String),
    /// The sender claims this node's own address. Two nodes advertise the same address, or a node talks to itself.
    #[error("membership message from {0}, which is this node's own address; two nodes advertise the same one")]
    FromOurselves(Identity),
}

impl From<Error> for MembershipError {
    fn from(error: Error) -> Self {
        Self::Malformed(error.to_string())
    }
}

/// Why a member counts as down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// It did not answer within the suspicion time.
    Unresponsive,
    /// Nothing listens at its address, as seen by this many nodes.
    Refused {
        /// How many.
        observers: usize,
    },
    /// A newer process took its address.
    Replaced,
    /// Another member found it down.
    Reported,
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unresponsive => f.write_str("it did not answer in time"),
            Self::Refused { observers } => write!(f, "its address refused connections ({observers} observers)"),
            Self::Replaced => f.write_str("a newer process took its address"),
            Self::Reported => f.write_str("another member found it down"),
        }
    }
}

/// A change in what this node believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberEvent {
    /// A new member, or one that came back.
    Up(Identity),
    /// A member is gone.
    Down(Identity, DownReason),
    /// A member said goodbye.
    Left(Identity),
    /// A member missed its probes and may still refute.
    Suspect(Identity),
    /// A suspect is alive.
    Refuted(Identity),
    /// The same process under a newer epoch: it was wrongly declared down somewhere and is back.
    Renewed {
        /// As it was known.
        old: Identity,
        /// As it is known now.
        new: Identity,
    },
    /// This node was declared down and goes on under this identity; handshakes must show it from now on.
    SelfRenewed(Identity),
    /// This node was suspected and refuted.
    SelfSuspected,
}

/// A member as seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Who.
    pub identity: Identity,
    /// How it is.
    pub state: MemberState,
}

/// A timer handed out by [`Membership::poll`], to be given back to [`Membership::handle_timer`] once it is due, however
/// late. It carries what it needs to be ignored when it has become stale.
#[derive(Clone, Debug)]
pub struct MembershipTimer {
    /// When it ought to fire; `None` for the very first, before any time was known.
    due: Option<Duration>,
    kind: TimerKind,
}

#[derive(Clone, Debug)]
enum TimerKind {
    Tick,
    Swim(Timer<Identity>),
    /// A suspicion may have run out.
    Suspicion(NodeId),
    /// A probe that a hint started may have gone unanswered.
    Check(NodeId),
}

/// What the driver has to do.
#[derive(Clone, Debug)]
pub enum MembershipOutput {
    /// Send a datagram, dialling if there is no link; drop it if that fails.
    Send {
        /// Whom.
        to: Identity,
        /// What.
        data: Bytes,
    },
    /// Call [`Membership::handle_timer`] after this time.
    Timer {
        /// From now.
        after: Duration,
        /// With this.
        timer: MembershipTimer,
    },
    /// Tell who is interested.
    Event(MemberEvent),
}

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
    /// Why the next death that shows in foca's state happened.
    verdicts: BTreeMap<NodeId, DownReason>,
    tick_due: Option<Duration>,
    /// After a pause of ours: no probe may fail before this.
    grace_until: Duration,
    my_incarnation: u16,
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
            verdicts: BTreeMap::new(),
            tick_due: None,
            grace_until: Duration::ZERO,
            my_incarnation: 0,
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
        for peer in self.active(|_| true) {
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
        let swim = &self.swim;
        self.view.prune(self.now, |addr| swim.iter_membership_state().any(|member| member.id().addr == addr));
    }

    fn handle_swim(&mut self, packet: &[u8]) -> Result<(), MembershipError> {
        let header: Header<Identity> =
            PostcardCodec.decode_header(packet).map_err(|cause| MembershipError::Malformed(cause.to_string()))?;
        let (src, me) = (header.src, self.me());
        self.admit(src)?;
        if self.left {
            self.send_note(src, Body::Leave);
            return Ok(());
        }
        if header.dst.addr == me.addr && header.dst != me && header.message != Message::Announce {
            // The sender knows a former self of this node, or the process that had the address before.
            self.outbid(header.dst);
            self.announce(src);
        }
        if let Some(holder) = self.view.outranks(src) {
            self.send_note(src, Body::Outbid { holder });
        }
        let undead = header.message == Message::TurnUndead;
        let result = self.drive(|swim, fx| swim.handle_data(packet, fx));
        if undead && self.me() != me {
            // Whoever held us for down is the first who has to know better.
            self.announce(src);
        }
        match result {
            Ok(()) => Ok(()),
            Err(foca::Error::DataFromOurselves) => Err(MembershipError::FromOurselves(src)),
            Err(cause) => Err(MembershipError::Malformed(cause.to_string())),
        }
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
                } else if let Some(incarnation) = suspected.filter(|_| to == me) {
                    self.apply(me, incarnation, State::Suspect);
                    self.announce(from);
                }
            }
            Body::Pong { origin } if origin.node != me.node => self.send_note(origin, Body::Answered { target: from }),
            Body::Pong { .. } => {}
            Body::PingFor { target } if target.node == me.node => {}
            Body::PingFor { target } => self.send_ping(target, from, None),
            Body::Answered { target } => self.heard(target.node),
            Body::Refused { target } => self.refused_elsewhere(target, from.node),
            Body::Leave => self.say_left(from),
            Body::YouAreDown { who } => {
                if who == me {
                    self.apply(me, 0, State::Down);
                }
                if who.node == me.node {
                    self.announce(from);
                }
            }
            Body::Outbid { holder } => {
                if holder.addr == me.addr {
                    self.outbid(holder);
                    self.announce(from);
                }
            }
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

    /// If `other`, at this node's address, counts as newer: a clock was set back. Takes a newer epoch.
    fn outbid(&mut self, other: Identity) {
        let me = self.me();
        if other != me && other.epoch >= me.epoch {
            let newer = Identity { epoch: other.epoch.saturating_add(1), ..me };
            let changed = self.drive(|swim, fx| swim.change_identity(newer, fx));
            if changed.is_ok() {
                self.renewed();
            }
        }
    }

    fn say_left(&mut self, who: Identity) {
        if self.view.is_known(who) {
            self.apply(who, LEFT, State::Down);
            if let Some(event) = self.view.died_by_leaving(who) {
                self.event(event);
            }
        }
    }

    /// Hands foca a piece of news and shares it.
    fn apply(&mut self, who: Identity, incarnation: u16, state: State) {
        let news = foca::Member::new(who, incarnation, state);
        if let Err(cause) = self.drive(|swim, fx| swim.apply_many(std::iter::once(news), true, fx)) {
            tracing::debug!(%cause, %who, "membership news not applied");
        }
    }

    fn announce(&mut self, peer: Identity) {
        if let Err(cause) = self.drive(|swim, fx| swim.announce(peer, fx)) {
            tracing::debug!(%cause, %peer, "cannot greet");
        }
    }

    fn timer_to_swim(&mut self, timer: Timer<Identity>) {
        if let Err(cause) = self.drive(|swim, fx| swim.handle_timer(timer, fx)) {
            // foca repairs its probe cycle by itself; this happens when timers of a paused process fire out of order.
            tracing::debug!(%cause, "membership timer");
        }
    }

    fn drive(
        &mut self,
        op: impl FnOnce(&mut Swim, &mut Effects) -> Result<(), foca::Error>,
    ) -> Result<(), foca::Error> {
        let mut fx = Effects::default();
        let result = op(&mut self.swim, &mut fx);
        let renewed = fx.notes.iter().any(|note| matches!(note, OwnedNotification::Rejoin(_)));
        let connected = fx.notes.iter().any(|note| matches!(note, OwnedNotification::Active));
        for (to, packet) in fx.sends {
            self.watch_incarnation(&packet);
            let mut data = Vec::with_capacity(1 + packet.len());
            data.push(note::SWIM);
            data.extend_from_slice(&packet);
            self.out.push_back(MembershipOutput::Send { to, data: Bytes::from(data) });
        }
        let stretch = self.health.score() + 1;
        for (timer, after) in fx.timers {
            match timer {
                Timer::ChangeSuspectToDown { member_id, incarnation, .. } => self.suspect(member_id, incarnation),
                Timer::ProbeRandomMember(_) | Timer::SendIndirectProbe { .. } => {
                    self.schedule(after * stretch, TimerKind::Swim(timer));
                }
                timer => self.schedule(after, TimerKind::Swim(timer)),
            }
        }
        self.look();
        if renewed {
            self.renewed();
        } else if connected {
            // Gossip alone may miss someone; a newcomer introduces itself to everybody it heard of.
            for peer in self.active(|_| true).into_iter().take(DIRECT) {
                self.announce(peer);
            }
        }
        result
    }

    /// After this node took a newer identity: foca starts over and has to notice that it still has peers, which then get
    /// to know the new self.
    fn renewed(&mut self) {
        self.my_incarnation = 0;
        self.event(MemberEvent::SelfRenewed(self.me()));
        if let Err(cause) = self.drive(|swim, fx| swim.apply_many(std::iter::empty(), true, fx)) {
            tracing::debug!(%cause, "after renewing the own identity");
        }
    }

    /// Our incarnation grows when, and only when, we refute a suspicion; foca has no getter, but writes it on every packet.
    fn watch_incarnation(&mut self, packet: &[u8]) {
        let header: Result<Header<Identity>, _> = PostcardCodec.decode_header(packet);
        if let Ok(header) = header
            && header.src == self.me()
            && header.src_incarnation > self.my_incarnation
        {
            self.my_incarnation = header.src_incarnation;
            self.health.worse(1);
            self.event(MemberEvent::SelfSuspected);
        }
    }

    /// Compares foca's state with what was last reported.
    fn look(&mut self) {
        let me = self.swim.identity().addr;
        let members = self.swim.iter_membership_state().filter(|member| member.id().addr != me);
        let events = self.view.refresh(self.now, members, &mut self.verdicts);
        for event in events {
            self.settle(&event);
            self.event(event);
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

    /// Active members that pass, in random order.
    fn active(&mut self, pass: impl Fn(&Identity) -> bool) -> Vec<Identity> {
        let ids = self.swim.iter_members().map(|member| *member.id()).filter(|id| pass(id));
        let mut ids: Vec<Identity> = ids.collect();
        rand::seq::SliceRandom::shuffle(&mut ids[..], &mut self.rng);
        ids
    }

    /// Up to [`FANOUT`] active members other than `node`.
    fn helpers(&mut self, node: NodeId) -> Vec<Identity> {
        let ids = self.swim.iter_members().map(|member| *member.id()).filter(|id| id.node != node);
        ids.sample(&mut self.rng, FANOUT)
    }
}

/// What one call into foca asked for.
#[derive(Default)]
struct Effects {
    sends: Vec<(Identity, Vec<u8>)>,
    timers: Vec<(Timer<Identity>, Duration)>,
    notes: Vec<OwnedNotification<Identity>>,
}

impl foca::Runtime<Identity> for Effects {
    fn notify(&mut self, notification: foca::Notification<'_, Identity>) {
        self.notes.push(notification.to_owned());
    }

    fn send_to(&mut self, to: Identity, data: &[u8]) {
        self.sends.push((to, data.to_vec()));
    }

    fn submit_after(&mut self, event: Timer<Identity>, after: Duration) {
        self.timers.push((event, after));
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
