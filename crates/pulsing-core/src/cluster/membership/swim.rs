//! Between [`Membership`] and foca: packets in, effects out, and what of foca's state has changed.
//!
//! foca keeps its members in a list and searches it for every piece of news, so a roster of N would cost N^2. What is no
//! news is taken out of a packet before foca sees it; the [`View`](super::view::View) knows the rules, which are SWIM's own.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, Bytes};
use foca::{Codec, Header, Member, Message, OwnedNotification, PostcardCodec, State, Timer};

use super::event::TimerKind;
use super::{Body, DIRECT, Identity, MemberEvent, Membership, MembershipError, MembershipOutput, Swim, note};

/// What one call into foca asked for.
#[derive(Default)]
pub(super) struct Effects {
    sends: Vec<(Identity, Vec<u8>)>,
    timers: Vec<(Timer<Identity>, Duration)>,
    notes: Vec<OwnedNotification<Identity>>,
}

impl foca::Runtime<Identity> for Effects {
    fn notify(&mut self, notification: foca::Notification<'_, Identity>) {
        self.notes.push(notification.to_owned());
    }

    fn send_to(&mut self, to: Identity, data: &[u8]) {
        let mut packet = Vec::with_capacity(1 + data.len());
        packet.push(note::SWIM);
        packet.extend_from_slice(data);
        self.sends.push((to, packet));
    }

    fn submit_after(&mut self, event: Timer<Identity>, after: Duration) {
        self.timers.push((event, after));
    }
}

fn malformed(cause: impl ToString) -> MembershipError {
    MembershipError::Malformed(cause.to_string())
}

impl Membership {
    pub(super) fn handle_swim(&mut self, packet: &[u8]) -> Result<(), MembershipError> {
        let mut rest = packet;
        let header: Header<Identity> = PostcardCodec.decode_header(&mut rest).map_err(malformed)?;
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
            self.outranked(src, holder);
        }
        let undead = header.message == Message::TurnUndead;
        if undead && !self.may_renew() {
            return Ok(());
        }
        let (sifted, touched) = self.sift(&header, packet, rest)?;
        let result = self.drive(&touched, |swim, fx| swim.handle_data(&sifted, fx));
        if undead && self.me() != me {
            // Whoever held us for down is the first who has to know better.
            self.announce(src);
        }
        match result {
            Ok(()) => Ok(()),
            Err(foca::Error::DataFromOurselves) => Err(MembershipError::FromOurselves(src)),
            Err(cause) => Err(malformed(cause)),
        }
    }

    /// The packet without the updates that tell nothing, and the addresses that it does tell something about. `rest` is
    /// what follows the header.
    fn sift<'a>(
        &mut self,
        header: &Header<Identity>,
        packet: &'a [u8],
        mut rest: &[u8],
    ) -> Result<(Cow<'a, [u8]>, Vec<SocketAddr>), MembershipError> {
        let mut touched = Vec::new();
        if self.view.is_news(&Member::new(header.src, header.src_incarnation, State::Alive)) {
            touched.push(header.src.addr);
        }
        if rest.len() < 2 || header.message == Message::Broadcast {
            return Ok((Cow::Borrowed(packet), touched));
        }
        let me = self.me();
        let told = rest.get_u16();
        let mut sifted = packet[..packet.len() - rest.len()].to_vec();
        let (tally, mut kept) = (sifted.len() - 2, 0u16);
        for _ in 0..told {
            let before = rest;
            let member: Member<Identity> = PostcardCodec.decode_member(&mut rest).map_err(malformed)?;
            let who = *member.id();
            let keep = if who.addr == me.addr {
                let buried = who == me && member.state() == State::Down;
                if buried { self.may_renew() } else { who.node == me.node || self.rival(who) }
            } else {
                let news = self.view.is_news(&member);
                if news {
                    touched.push(who.addr);
                }
                news
            };
            if keep {
                sifted.extend_from_slice(&before[..before.len() - rest.len()]);
                kept += 1;
            }
        }
        if kept == told {
            return Ok((Cow::Borrowed(packet), touched));
        }
        sifted[tally..tally + 2].copy_from_slice(&kept.to_be_bytes());
        sifted.extend_from_slice(rest);
        Ok((Cow::Owned(sifted), touched))
    }

    /// Hands foca a piece of news, and shares it unless it is for this node alone.
    pub(super) fn apply(&mut self, who: Identity, incarnation: u16, state: State, share: bool) {
        let news = Member::new(who, incarnation, state);
        let result = self.drive(&[who.addr], |swim, fx| swim.apply_many(std::iter::once(news), share, fx));
        if let Err(cause) = result {
            tracing::debug!(%cause, %who, "membership news not applied");
        }
    }

    /// Asks for a peer's roster, and makes this node known to it.
    pub(super) fn announce(&mut self, peer: Identity) {
        if let Err(cause) = self.drive(&[], |swim, fx| swim.announce(peer, fx)) {
            tracing::debug!(%cause, %peer, "cannot greet");
        }
    }

    /// Makes this node and its incarnation known to a peer, and asks for nothing: the header of every packet tells them.
    pub(super) fn introduce(&mut self, peer: Identity) {
        let header =
            Header { src: self.me(), src_incarnation: self.my_incarnation, dst: peer, message: Message::Gossip };
        let mut packet = vec![note::SWIM];
        match PostcardCodec.encode_header(&header, &mut packet) {
            Ok(()) => self.out.push_back(MembershipOutput::Send { to: peer, data: Bytes::from(packet) }),
            Err(cause) => tracing::debug!(%cause, %peer, "cannot introduce this node"),
        }
    }

    pub(super) fn timer_to_swim(&mut self, timer: Timer<Identity>) {
        let touched = match &timer {
            // It judges the probe before it.
            Timer::ProbeRandomMember(_) => self.probing.take(),
            _ => None,
        };
        if let Err(cause) = self.drive(touched.as_slice(), |swim, fx| swim.handle_timer(timer, fx)) {
            // foca repairs its probe cycle by itself; this happens when timers of a paused process fire out of order.
            tracing::debug!(%cause, "membership timer");
        }
    }

    /// Calls into foca. `touched` are the addresses whose members the call may change.
    pub(super) fn drive(
        &mut self,
        touched: &[SocketAddr],
        op: impl FnOnce(&mut Swim, &mut Effects) -> Result<(), foca::Error>,
    ) -> Result<(), foca::Error> {
        let mut fx = Effects::default();
        let result = op(&mut self.swim, &mut fx);
        let renewed = fx.notes.iter().any(|note| matches!(note, OwnedNotification::Rejoin(_)));
        let connected = fx.notes.iter().any(|note| matches!(note, OwnedNotification::Active));
        for (to, packet) in fx.sends {
            self.watch_incarnation(&packet[1..]);
            self.out.push_back(MembershipOutput::Send { to, data: Bytes::from(packet) });
        }
        let stretch = self.health.score() + 1;
        for (timer, after) in fx.timers {
            match timer {
                Timer::ChangeSuspectToDown { member_id, incarnation, .. } => self.suspect(member_id, incarnation),
                Timer::SendIndirectProbe { probed_id, .. } => {
                    self.probing = Some(probed_id.addr);
                    self.schedule(after * stretch, TimerKind::Swim(timer));
                }
                Timer::ProbeRandomMember(_) => self.schedule(after * stretch, TimerKind::Swim(timer)),
                // The view forgets, by time and by number.
                Timer::RemoveDown(_) => {}
                timer => self.schedule(after, TimerKind::Swim(timer)),
            }
        }
        self.look(touched);
        if renewed {
            self.renewed();
        } else if connected {
            // Gossip alone may miss someone; a newcomer introduces itself to those it heard of.
            for peer in self.some_active(DIRECT, |_| true) {
                self.introduce(peer);
            }
        }
        result
    }

    /// Whether this node, declared down, comes back under a newer identity.
    pub(super) fn may_renew(&self) -> bool {
        !self.contests.yielded() && self.renewals.allowed(self.now)
    }

    /// After this node took a newer identity: foca starts over and has to notice that it still has peers, which then get
    /// to know the new self.
    pub(super) fn renewed(&mut self) {
        self.my_incarnation = 0;
        self.renewals.happened(self.now, self.timing.period * 2);
        self.event(MemberEvent::SelfRenewed(self.me()));
        if let Err(cause) = self.drive(&[], |swim, fx| swim.apply_many(std::iter::empty(), true, fx)) {
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

    /// Compares foca's members at these addresses with what was last reported.
    fn look(&mut self, touched: &[SocketAddr]) {
        if touched.is_empty() {
            return;
        }
        let me = self.swim.identity().addr;
        let mut sorted = touched.to_vec();
        sorted.sort_unstable();
        let members = self.swim.iter_membership_state();
        let members =
            members.filter(|member| sorted.binary_search(&member.id().addr).is_ok() && member.id().addr != me);
        let events = self.view.refresh(self.now, members, &mut self.verdicts);
        for event in events {
            self.settle(&event);
            self.event(event);
        }
    }

    /// Forgets members that are gone, here and in foca.
    pub(super) fn forget(&mut self) {
        for gone in self.view.prune(self.now) {
            let result = self.drive(&[], |swim, fx| swim.handle_timer(Timer::RemoveDown(gone), fx));
            if let Err(cause) = result {
                tracing::debug!(%cause, %gone, "cannot forget");
            }
        }
    }
}
