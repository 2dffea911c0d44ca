//! Runs the membership and registry state machines: clocks, timers and sockets for [`crate::cluster`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::node::Inner;
use crate::cluster::{Delta, Digest, Identity, MemberEvent, Membership, MembershipOutput, MembershipTimer};
use crate::error::Error;
use crate::net::control::{Control, ControlEvent};
use crate::net::link::LinkEnd;
use crate::net::wire::{self, DigestHeader, EmptyHeader, Kind, RootHeader};
use crate::system::{MemberState, Reason};

/// How often a registry root goes to one random member (M5).
const ROOT_PERIOD: Duration = Duration::from_secs(1);

/// What the driver reacts to.
pub(super) enum Input {
    /// A change of this node's own names, to be pushed.
    Publish(Delta),
    /// A seed said who it is.
    Join(Identity),
    /// A link or control connection ended.
    Ended(crate::id::NodeId, LinkEnd),
    /// Leave, and tell when everybody was told.
    Leave(oneshot::Sender<()>),
}

struct Due {
    at: Instant,
    order: u64,
    timer: MembershipTimer,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

pub(super) struct Driver {
    inner: Arc<Inner>,
    membership: Membership,
    control: Control,
    timers: BinaryHeap<Reverse<Due>>,
    order: u64,
    started: Instant,
    synced: watch::Sender<bool>,
    /// Members that are not gone, as of this version of the membership.
    alive: Vec<Identity>,
    version: u64,
}

impl Driver {
    pub(super) fn new(
        inner: Arc<Inner>,
        membership: Membership,
        control: Control,
        synced: watch::Sender<bool>,
    ) -> Self {
        let started = inner.started;
        Self {
            inner,
            membership,
            control,
            timers: BinaryHeap::new(),
            order: 0,
            started,
            synced,
            alive: Vec::new(),
            version: 0,
        }
    }

    pub(super) async fn run(
        mut self,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        mut events: mpsc::UnboundedReceiver<ControlEvent>,
    ) {
        let mut roots = tokio::time::interval(ROOT_PERIOD);
        roots.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.settle();
            let next = self.timers.peek().map(|Reverse(due)| due.at);
            let timer = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // In this order: a late timer is taken for this node's sickness (M2), and probes are answered while names are
                // published in bulk. Nothing here is left to chance, so that a seed decides a test's run.
                biased;
                () = timer => self.fire_due(),
                _ = roots.tick() => self.send_root(),
                event = events.recv() => match event {
                    Some(event) => self.control_event(event),
                    None => return,
                },
                input = inputs.recv() => match input {
                    Some(Input::Leave(done)) => {
                        self.leave().await;
                        let _ = done.send(());
                        return;
                    }
                    Some(input) => self.input(input),
                    None => return,
                },
            }
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn input(&mut self, input: Input) {
        let now = self.now();
        match input {
            Input::Publish(delta) => self.push(&delta),
            Input::Join(peer) => self.membership.join(now, peer),
            Input::Ended(node, end) => self.ended(node, end),
            Input::Leave(_) => {}
        }
    }

    fn ended(&mut self, node: crate::id::NodeId, end: LinkEnd) {
        let now = self.now();
        match end {
            LinkEnd::Refused => self.membership.dial_refused(now, node),
            LinkEnd::Broken => self.membership.link_closed(now, node),
        }
    }

    fn control_event(&mut self, event: ControlEvent) {
        match event {
            ControlEvent::Ended(node, end) => self.ended(node, end),
            ControlEvent::Message { from, kind, header, body } => {
                if let Err(error) = self.message(from, kind, &header, &body) {
                    tracing::warn!(peer = %from.addr, %error, "a control message was not understood");
                }
            }
        }
    }

    fn message(&mut self, from: Identity, kind: Kind, header: &[u8], body: &[u8]) -> Result<(), Error> {
        match kind {
            Kind::Datagram => {
                let now = self.now();
                self.membership.handle_data(now, body).map_err(|e| Error::Protocol(e.to_string()))?;
            }
            Kind::Delta => {
                let delta = Delta::decode(body)?;
                let (changed, gaps) = {
                    let mut registry = self.inner.registry.lock();
                    (registry.apply(delta), !registry.gaps().is_empty())
                };
                if changed {
                    self.inner.settle_claims();
                    self.inner.changed();
                }
                if gaps {
                    self.send_digest(from, false);
                }
            }
            Kind::Digest => {
                let DigestHeader { reply } = wire::decode(header)?;
                let digest = Digest::decode(body)?;
                let missing = self.inner.registry.lock().missing(&digest);
                for delta in missing {
                    self.control.send(from, Kind::Delta, &EmptyHeader {}, delta.encode());
                }
                if reply {
                    self.send_digest(from, false);
                } else {
                    // The connection is ordered: what the peer knew came before its digest.
                    self.synced.send_replace(true);
                }
            }
            Kind::Root => {
                let RootHeader { root } = wire::decode(header)?;
                let mine = self.inner.registry.lock().root();
                if root != mine {
                    self.send_digest(from, true);
                }
            }
            other => return Err(Error::Protocol(format!("{other:?} frame on a control connection"))),
        }
        Ok(())
    }

    fn fire_due(&mut self) {
        let now = Instant::now();
        while self.timers.peek().is_some_and(|Reverse(due)| due.at <= now) {
            if let Some(Reverse(due)) = self.timers.pop() {
                let since = self.now();
                self.membership.handle_timer(since, due.timer);
            }
        }
    }

    /// Carries out what membership asked for, until it asks for nothing.
    fn settle(&mut self) {
        let mut events = Vec::new();
        while let Some(output) = self.membership.poll() {
            match output {
                MembershipOutput::Send { to, data } => self.control.send(to, Kind::Datagram, &EmptyHeader {}, data),
                MembershipOutput::Timer { after, timer } => {
                    self.order += 1;
                    self.timers.push(Reverse(Due { at: Instant::now() + after, order: self.order, timer }));
                }
                MembershipOutput::Event(event) => events.push(event),
            }
        }
        // Far more datagrams come than changes.
        if self.version != self.membership.version() {
            self.version = self.membership.version();
            let members = self.membership.members();
            let living = |state| matches!(state, MemberState::Alive | MemberState::Suspect);
            self.alive = members.iter().filter(|m| living(m.state)).map(|m| m.identity).collect();
            self.inner.set_members(members);
        }
        for event in events {
            self.member_event(event);
        }
    }

    fn member_event(&mut self, event: MemberEvent) {
        match event {
            MemberEvent::Up(peer) => {
                tracing::info!(peer = %peer, "node joined");
                self.inner.registry.lock().node_up(peer.node);
                self.inner.settle_claims();
                self.send_digest(peer, true);
            }
            MemberEvent::Down(peer, reason) => {
                tracing::warn!(peer = %peer, %reason, "node is down");
                self.inner.node_ended(peer.node, &Reason::NodeLost);
                self.gone(peer, "its node was declared down");
            }
            MemberEvent::Left(peer) => {
                tracing::info!(peer = %peer, "node left");
                self.inner.node_leaves(peer.node);
                self.inner.retire_link(
                    peer.node,
                    Error::ConnectionLost {
                        addr: peer.addr.to_string(),
                        reason: "its node left the cluster".to_owned(),
                    },
                );
                self.gone(peer, "its node left the cluster");
            }
            MemberEvent::Suspect(peer) => {
                tracing::debug!(peer = %peer, "node is suspected");
                self.inner.metrics.suspicions.inc();
            }
            MemberEvent::Refuted(peer) => tracing::debug!(peer = %peer, "suspicion refuted"),
            MemberEvent::Renewed { new, .. } => tracing::info!(peer = %new, "node renewed its identity"),
            MemberEvent::SelfRenewed(me) => {
                tracing::warn!(me = %me, "this node was declared down by others and came back under a new epoch");
                *self.inner.me.lock() = me;
            }
            MemberEvent::SelfSuspected => self.inner.metrics.refutations.inc(),
            MemberEvent::AddressShared { holder, other } => tracing::error!(
                "nodes {} and {} both give {} as their address, and both live: the cluster can reach only one of them there; \
                 start the other with an address of its own",
                holder.node,
                other.node,
                holder.addr
            ),
        }
        self.inner.changed();
    }

    fn gone(&mut self, peer: Identity, why: &str) {
        self.inner.registry.lock().node_down(peer.node);
        self.control.forget(peer.node);
        self.inner
            .close_link(peer.node, &Error::ConnectionLost { addr: peer.addr.to_string(), reason: why.to_owned() });
    }

    fn push(&self, delta: &Delta) {
        let body = delta.encode();
        for peer in &self.alive {
            self.control.send(*peer, Kind::Delta, &EmptyHeader {}, body.clone());
        }
    }

    fn send_digest(&self, to: Identity, reply: bool) {
        let body = self.inner.registry.lock().digest().encode();
        self.control.send(to, Kind::Digest, &DigestHeader { reply }, body);
    }

    fn send_root(&self) {
        if self.alive.is_empty() {
            return;
        }
        let to = self.alive[self.inner.config.transport.random() as usize % self.alive.len()];
        let root = self.inner.registry.lock().root();
        self.control.send(to, Kind::Root, &RootHeader { root }, Bytes::new());
    }

    async fn leave(&mut self) {
        let now = self.now();
        self.membership.leave(now);
        self.settle();
        self.control.close(Duration::from_secs(1)).await;
    }
}
