//! Runs the membership and registry state machines: clocks, timers and sockets for [`crate::cluster`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::node::Inner;
use super::replication::Replication;
use crate::cluster::{Identity, MemberEvent, Membership, MembershipOutput, MembershipTimer};
use crate::error::Error;
use crate::net::control::{Control, ControlEvent};
use crate::net::link::LinkEnd;
use crate::net::wire::{EmptyHeader, Kind};
use crate::system::{MemberState, Reason};

/// How often registries are compared (M5).
const ROOT_PERIOD: Duration = Duration::from_secs(1);

/// What the driver reacts to.
pub(super) enum Input {
    /// Names of this node changed; the registry has it.
    Publish,
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
    control: Arc<Control>,
    timers: BinaryHeap<Reverse<Due>>,
    order: u64,
    started: Instant,
    replication: Replication,
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
        let control = Arc::new(control);
        let replication = Replication::new(Arc::clone(&inner), Arc::clone(&control), synced);
        Self {
            inner,
            membership,
            control,
            timers: BinaryHeap::new(),
            order: 0,
            started,
            replication,
            alive: Vec::new(),
            version: 0,
        }
    }

    pub(super) async fn run(
        mut self,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        mut events: mpsc::UnboundedReceiver<ControlEvent>,
        mut names: mpsc::Receiver<ControlEvent>,
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
                // In this order: a late timer is taken for this node's sickness (M2), and probes are answered while names come
                // or go in bulk. Nothing here is left to chance, so that a seed decides a test's run.
                biased;
                () = timer => self.fire_due(),
                _ = roots.tick() => self.replication.compare(&self.alive),
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
                event = names.recv() => match event {
                    Some(event) => self.control_event(event),
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
            Input::Publish => self.replication.push(&self.alive),
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
            Kind::Delta | Kind::Digest | Kind::Root => self.replication.message(from, kind, header, body)?,
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
                MembershipOutput::Send { to, data } => {
                    self.control.send(to, Kind::Datagram, &EmptyHeader {}, data);
                }
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

    /// Tells observers how a member is seen from now on.
    fn tell(&self, peer: Identity, state: MemberState) {
        self.inner.events.tell(
            "member",
            || json!({"node_id": peer.node.to_string(), "addr": peer.addr.to_string(), "state": state}),
        );
    }

    fn member_event(&mut self, event: MemberEvent) {
        match event {
            MemberEvent::Up(peer) => {
                self.tell(peer, MemberState::Alive);
                tracing::info!(peer = %peer, "node joined");
                self.replication.met(peer);
            }
            MemberEvent::Down(peer, reason) => {
                self.tell(peer, MemberState::Down);
                tracing::warn!(peer = %peer, %reason, "node is down");
                self.inner.node_ended(peer.node, &Reason::NodeLost);
                self.gone(peer, "its node was declared down");
            }
            MemberEvent::Left(peer) => {
                self.tell(peer, MemberState::Left);
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
                self.tell(peer, MemberState::Suspect);
                tracing::debug!(peer = %peer, "node is suspected");
                self.inner.metrics.suspicions.inc();
            }
            MemberEvent::Refuted(peer) => {
                self.tell(peer, MemberState::Alive);
                tracing::debug!(peer = %peer, "suspicion refuted");
            }
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
        self.replication.lost(peer.node);
        self.control.forget(peer.node);
        self.inner
            .close_link(peer.node, &Error::ConnectionLost { addr: peer.addr.to_string(), reason: why.to_owned() });
    }

    async fn leave(&mut self) {
        let now = self.now();
        self.membership.leave(now);
        self.settle();
        self.control.close(Duration::from_secs(1)).await;
    }
}
