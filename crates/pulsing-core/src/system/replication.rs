//! How the registries of the nodes come to agree: pushes, shipments, and the comparison that finds what both missed (M5).
//!
//! * A change of this node's names is pushed to every member at once.
//! * Who meets a member asks it for that member's own names, and tells it how many changes this node has made. The first
//!   member met is asked for everything.
//! * Once a second a random member is sent this node's roots. Where they differ, one conversation at a time settles it: each
//!   side ships what the other's digest lacks. Nothing else is needed to repair what a full queue or a broken link lost.
//!
//! What is large travels in parts, so that what is small passes it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use super::node::Inner;
use crate::cluster::{Delta, Digest, Identity};
use crate::error::Result;
use crate::id::NodeId;
use crate::net::control::Control;
use crate::net::wire::{self, DigestHeader, EmptyHeader, Kind, RootHeader};

/// Bytes of a delta, about: half a millisecond's work for whoever applies it, and 3 ms of a link of 100 Mbit/s.
const PART: usize = 32 << 10;
/// Parts of a shipment that wait in the queue to one peer; pushes wait behind no more than these.
const WINDOW: usize = 4;
/// A shipment that does not move for this long is given up; the next comparison begins another.
const STUCK: Duration = Duration::from_secs(10);
/// A conversation without news for this long is over.
const SILENCE: Duration = Duration::from_secs(2);
/// Least time between two questions for the names of one owner.
const ASK_AGAIN: Duration = Duration::from_secs(1);

pub(super) struct Replication {
    inner: Arc<Inner>,
    control: Arc<Control>,
    /// True once this node has heard what the first member it met knew.
    synced: watch::Sender<bool>,
    /// Changes of this node up to here were pushed.
    pushed: u64,
    talk: Option<Talk>,
    asked: HashMap<NodeId, Instant>,
    shipping: Arc<Mutex<HashMap<NodeId, Option<Order>>>>,
}

/// The member that was asked for everything that this node lacks.
struct Talk {
    with: NodeId,
    news: Instant,
    /// Members met meanwhile, whose names may come along.
    met: Vec<Identity>,
}

/// What a member asked for.
struct Order {
    digest: Digest,
    /// It wants to know what this node holds.
    reply: bool,
}

impl Replication {
    pub(super) fn new(inner: Arc<Inner>, control: Arc<Control>, synced: watch::Sender<bool>) -> Self {
        let shipping = Arc::default();
        Self { inner, control, synced, pushed: 0, talk: None, asked: HashMap::new(), shipping }
    }

    /// A node became a member, or is one again.
    pub(super) fn met(&mut self, peer: Identity) {
        self.inner.registry.lock().node_up(peer.node);
        self.inner.settle_claims();
        if let Some(talk) = &mut self.talk {
            talk.met.push(peer);
        } else if *self.synced.borrow() {
            self.greet(peer);
        } else {
            let digest = self.inner.registry.lock().digest();
            self.begin(peer, &digest);
        }
    }

    /// A member is gone.
    pub(super) fn lost(&mut self, node: NodeId) {
        self.inner.registry.lock().node_down(node);
        self.asked.remove(&node);
        if let Some(talk) = &mut self.talk {
            talk.met.retain(|met| met.node != node);
        }
        if self.talk.as_ref().is_some_and(|talk| talk.with == node) {
            self.end_talk();
        }
    }

    /// Sends every member what was written here since the last push.
    pub(super) fn push(&mut self, members: &[Identity]) {
        let mut shipment = self.inner.registry.lock().written_after(self.pushed, self.random());
        loop {
            let part = self.inner.registry.lock().next_part(&mut shipment, PART);
            let Some(part) = part else { return };
            self.pushed = part.to;
            let body = part.encode();
            for peer in members {
                self.control.send(*peer, Kind::Delta, &EmptyHeader {}, body.clone());
            }
        }
    }

    /// The time to compare registries with one of `members`.
    pub(super) fn compare(&mut self, members: &[Identity]) {
        if self.talk.as_ref().is_some_and(|talk| talk.news.elapsed() > SILENCE) {
            self.end_talk();
        }
        if members.is_empty() {
            return;
        }
        let to = members[self.random() as usize % members.len()];
        let (root, buckets) = self.inner.registry.lock().roots();
        self.control.send(to, Kind::Root, &RootHeader { root, buckets }, Bytes::new());
    }

    /// Takes a delta, a digest or a root.
    ///
    /// # Errors
    /// `Protocol` for what is none.
    pub(super) fn message(&mut self, from: Identity, kind: Kind, header: &[u8], body: &[u8]) -> Result<()> {
        match kind {
            Kind::Delta => self.delta(from, Delta::decode(body)?),
            Kind::Digest => {
                let DigestHeader { reply } = wire::decode(header)?;
                self.digest(from, Digest::decode(body)?, reply);
            }
            _ => {
                let RootHeader { root, buckets } = wire::decode(header)?;
                if self.talk.is_some() {
                    return Ok(());
                }
                let differing = self.inner.registry.lock().differing(root, &buckets);
                if let Some(digest) = differing {
                    self.begin(from, &digest);
                }
            }
        }
        Ok(())
    }

    fn delta(&mut self, from: Identity, delta: Delta) {
        let owner = delta.owner();
        let (changed, gap) = {
            let mut registry = self.inner.registry.lock();
            (registry.apply(delta), owner.ok().filter(|owner| registry.has_gap(*owner)))
        };
        if changed {
            self.inner.settle_claims();
            self.inner.changed();
        }
        if let Some(talk) = self.talk.as_mut().filter(|talk| talk.with == from.node) {
            talk.news = Instant::now();
        }
        if let (Some(owner), None) = (gap, &self.talk)
            && self.may_ask(owner)
        {
            self.ask_for(owner, from);
        }
    }

    fn digest(&mut self, from: Identity, digest: Digest, reply: bool) {
        let whole = digest.only.is_empty();
        let told = !whole && digest.covers(from.node);
        let behind = told && self.inner.registry.lock().behind(&digest);
        if behind && self.may_ask(from.node) {
            // It told of its own changes.
            self.ask_for(from.node, from);
        }
        self.ship(from, Order { digest, reply });
        if whole && !reply && self.talk.as_ref().is_some_and(|talk| talk.with == from.node) {
            // Registry traffic of a peer is ordered: what it knew came before its digest.
            self.synced.send_replace(true);
            self.end_talk();
        }
    }

    fn begin(&mut self, with: Identity, digest: &Digest) {
        self.talk = Some(Talk { with: with.node, news: Instant::now(), met: Vec::new() });
        self.control.send(with, Kind::Digest, &DigestHeader { reply: true }, digest.encode());
    }

    fn end_talk(&mut self) {
        let Some(talk) = self.talk.take() else { return };
        for peer in talk.met {
            self.greet(peer);
        }
    }

    /// Asks a member for its own names, and tells it of this node's.
    fn greet(&mut self, peer: Identity) {
        self.asked.insert(peer.node, Instant::now());
        self.ask_for(peer.node, peer);
        self.ask_for(self.inner.id, peer);
    }

    /// Sends `to` this node's version of one owner: it answers with what came after.
    fn ask_for(&self, owner: NodeId, to: Identity) {
        let digest = self.inner.registry.lock().digest_of(owner);
        self.control.send(to, Kind::Digest, &DigestHeader { reply: false }, digest.encode());
    }

    fn may_ask(&mut self, owner: NodeId) -> bool {
        if self.asked.get(&owner).is_some_and(|asked| asked.elapsed() < ASK_AGAIN) {
            return false;
        }
        self.asked.insert(owner, Instant::now());
        true
    }

    /// Sends `to` what it lacks, part by part, and then what this node holds if it asked for that.
    fn ship(&self, to: Identity, order: Order) {
        match self.shipping.lock().entry(to.node) {
            Entry::Occupied(mut under_way) => {
                // The one that asks for more is served; what another lacks, the next comparison shows.
                let waiting = under_way.get_mut();
                if waiting.as_ref().is_none_or(|waiting| !waiting.digest.only.is_empty()) {
                    *waiting = Some(order);
                }
                return;
            }
            Entry::Vacant(free) => drop(free.insert(None)),
        }
        let (inner, control, shipping) =
            (Arc::clone(&self.inner), Arc::clone(&self.control), Arc::clone(&self.shipping));
        let work = async move {
            let mut next = Some(order);
            while let Some(order) = next {
                let moved = serve(&inner, &control, to, order).await;
                let mut shipping = shipping.lock();
                next = shipping.get_mut(&to.node).and_then(Option::take).filter(|_| moved);
                if next.is_none() {
                    shipping.remove(&to.node);
                }
            }
        };
        drop(self.inner.config.transport.spawn(work));
    }

    fn random(&self) -> u64 {
        self.inner.config.transport.random()
    }
}

/// False if the peer took nothing for too long, or its connection ended.
async fn serve(inner: &Inner, control: &Control, to: Identity, Order { digest, reply }: Order) -> bool {
    let window = Arc::new(Semaphore::new(WINDOW));
    let mut shipment = inner.registry.lock().shipment(&digest, inner.config.transport.random());
    loop {
        let Ok(Ok(place)) = tokio::time::timeout(STUCK, Arc::clone(&window).acquire_owned()).await else {
            tracing::debug!(peer = %to.addr, "a shipment of names is stuck and given up");
            return false;
        };
        let part = inner.registry.lock().next_part(&mut shipment, PART);
        let Some(part) = part else { break };
        if !control.send_with(to, Kind::Delta, &EmptyHeader {}, part.encode(), Some(place)) {
            return false;
        }
    }
    let held = reply.then(|| inner.registry.lock().digest_like(&digest).encode());
    held.is_none_or(|held| control.send(to, Kind::Digest, &DigestHeader { reply: false }, held))
}
