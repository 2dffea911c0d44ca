//! One process: membership, registry, and the little that the network layer adds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use pulsing_core::cluster::{
    Delta, Digest, Entry, Identity, MemberEvent, Membership, MembershipOutput, MembershipTimer, Preset, Registry,
};
use pulsing_core::{ActorId, MemberState, NodeId};
use rand::RngExt;
use rand::rngs::StdRng;

use super::{address, ms};

/// What travels.
#[derive(Debug)]
pub enum Packet {
    Membership(Bytes),
    Root(Identity, u64),
    Digest(Identity, Bytes),
    Delta(Bytes),
}

/// What happens to a process.
#[derive(Debug)]
pub enum Input {
    Packet(Packet),
    Timer(MembershipTimer),
    LinkClosed(NodeId),
    Refused(NodeId),
    /// A handshake told who is there.
    Greeted(Identity),
    Redial,
    Sync,
    Leave,
    Publish(String, ActorId, bool),
    Withdraw(ActorId),
}

/// What a process wants done.
#[derive(Default)]
pub struct Effects {
    pub sends: Vec<(Identity, Packet)>,
    pub later: Vec<(Duration, Input)>,
    pub dials: Vec<SocketAddr>,
}

pub struct Process {
    pub node: NodeId,
    pub run: u64,
    pub membership: Membership,
    pub registry: Registry,
    pub paused: bool,
    pub waiting: Vec<Input>,
    pub log: Vec<(Duration, MemberEvent)>,
    /// Actors of this node that lost their name, and to whom.
    pub displaced: Vec<(ActorId, ActorId)>,
    /// Actors elsewhere that lost their name to one of this node.
    pub beaten: BTreeSet<ActorId>,
    /// Bytes of a part of a shipment.
    pub part: usize,
    shipments: u64,
    seeds: Vec<usize>,
}

impl Process {
    pub fn new(me: Identity, run: u64, preset: Preset, seed: u64, seeds: &[usize]) -> Self {
        Self {
            node: me.node,
            run,
            membership: Membership::new(me, preset, seed),
            registry: Registry::new(me.node),
            paused: false,
            waiting: Vec::new(),
            log: Vec::new(),
            displaced: Vec::new(),
            beaten: BTreeSet::new(),
            part: 500,
            shipments: 0,
            seeds: seeds.to_vec(),
        }
    }

    pub fn handle(&mut self, now: Duration, input: Input, hosts: usize, rng: &mut StdRng) -> Effects {
        let mut fx = Effects::default();
        match input {
            Input::Packet(packet) => self.packet(now, packet, &mut fx),
            Input::Timer(timer) => self.membership.handle_timer(now, timer),
            Input::LinkClosed(node) => self.membership.link_closed(now, node),
            Input::Refused(node) => self.membership.dial_refused(now, node),
            Input::Greeted(identity) => self.membership.join(now, identity),
            Input::Leave => self.membership.leave(now),
            Input::Redial => {
                let known: BTreeSet<SocketAddr> = self.peers().into_iter().map(|peer| peer.addr).collect();
                let seeds = self.seeds.iter().filter(|seed| **seed < hosts).map(|seed| address(*seed));
                fx.dials.extend(seeds.filter(|seed| !known.contains(seed)));
                fx.later.push((ms(1000), Input::Redial));
            }
            Input::Sync => {
                let peers = self.peers();
                if !peers.is_empty() {
                    let peer = peers[rng.random_range(0..peers.len())];
                    fx.sends.push((peer, Packet::Root(self.membership.me(), self.registry.root())));
                }
                fx.later.push((ms(1000), Input::Sync));
            }
            Input::Publish(name, actor, unique) => {
                let (class, metadata) = ("Test".to_owned(), BTreeMap::new());
                let claimed = now.as_millis() as u64;
                let entry = Entry { name, actor, class, metadata, unique, claimed, lost_to: None };
                let delta = self.registry.publish(entry);
                self.push(&delta, &mut fx);
            }
            Input::Withdraw(actor) => {
                let delta = self.registry.withdraw(actor).expect("a published actor");
                self.push(&delta, &mut fx);
            }
        }
        while let Some(output) = self.membership.poll() {
            match output {
                MembershipOutput::Send { to, data } => fx.sends.push((to, Packet::Membership(data))),
                MembershipOutput::Timer { after, timer } => fx.later.push((after, Input::Timer(timer))),
                MembershipOutput::Event(event) => {
                    self.log.push((now, event));
                    self.event(event, &mut fx);
                }
            }
        }
        self.settle_claims(&mut fx);
        fx
    }

    fn settle_claims(&mut self, fx: &mut Effects) {
        for conflict in self.registry.conflicts() {
            let winner = conflict.winner.1.actor;
            for (_, loser) in conflict.losers.into_iter().filter(|(owner, _)| *owner == self.node) {
                self.displaced.push((loser, winner));
                let delta = self.registry.concede(loser, winner).expect("a published actor");
                self.push(&delta, fx);
                fx.later.push((ms(10_000), Input::Withdraw(loser)));
            }
        }
        self.beaten.extend(self.registry.take_beaten().into_iter().map(|(_, entry)| entry.actor));
    }

    fn event(&mut self, event: MemberEvent, fx: &mut Effects) {
        match event {
            MemberEvent::Up(id) | MemberEvent::Renewed { new: id, .. } => {
                self.registry.node_up(id.node);
                fx.sends.push((id, Packet::Digest(self.membership.me(), self.registry.digest().encode())));
            }
            MemberEvent::Down(id, _) | MemberEvent::Left(id) => self.registry.node_down(id.node),
            _ => {}
        }
    }

    fn packet(&mut self, now: Duration, packet: Packet, fx: &mut Effects) {
        match packet {
            Packet::Membership(data) => {
                self.membership.handle_data(now, &data).expect("honest peers send readable datagrams");
            }
            Packet::Root(from, root) => {
                if root != self.registry.root() {
                    fx.sends.push((from, self.digest()));
                }
            }
            Packet::Digest(from, bytes) => {
                let digest = Digest::decode(&bytes).expect("a digest");
                self.shipments += 1;
                let mut shipment = self.registry.shipment(&digest, self.node.0 as u64 ^ self.shipments << 20);
                while let Some(part) = self.registry.next_part(&mut shipment, self.part) {
                    fx.sends.push((from, Packet::Delta(part.encode())));
                }
                if self.registry.behind(&digest) {
                    fx.sends.push((from, self.digest()));
                }
            }
            Packet::Delta(bytes) => {
                let delta = Delta::decode(&bytes).expect("a delta");
                let owner = delta.owner().expect("an owner");
                self.registry.apply(delta);
                if self.registry.gaps().contains(&owner)
                    && let Some(peer) = self.peers().into_iter().find(|peer| peer.node == owner)
                {
                    fx.sends.push((peer, self.digest()));
                }
            }
        }
    }

    fn push(&self, delta: &Delta, fx: &mut Effects) {
        fx.sends.extend(self.peers().into_iter().map(|peer| (peer, Packet::Delta(delta.encode()))));
    }

    fn digest(&self) -> Packet {
        Packet::Digest(self.membership.me(), self.registry.digest().encode())
    }

    fn peers(&self) -> Vec<Identity> {
        let active = |state| matches!(state, MemberState::Alive | MemberState::Suspect);
        let members = self.membership.members();
        members.into_iter().filter(|info| active(info.state)).map(|info| info.identity).collect()
    }
}
