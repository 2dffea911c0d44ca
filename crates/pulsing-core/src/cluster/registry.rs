//! Named actors of the whole cluster: owner-written, versioned, replicated (M5, R10).
//!
//! Each node alone writes its entries; each write takes that node's next version. A write is pushed to every member at once
//! as a [`Delta`]. What a push missed is repaired: nodes compare [`roots`](Registry::roots) now and then, exchange
//! [`Digest`](super::Digest)s where they differ, and send a [`shipment`](Registry::shipment) of what the other lacks. Any replica may answer
//! for any owner, since replicas at one version of an owner hold the same entries.
//!
//! Invariant: a replica holds, of each owner, the last change of every actor after `floor`, and every live entry at
//! `version`. Below `floor` tombstones were forgotten, so who is older gets the whole state instead of changes.
//!
//! Only members have entries here. A delta may overtake the news that its owner joined, so it waits for
//! [`node_up`](Registry::node_up); a late one of a dead node waits for ever and is pushed out by others.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::claim::{self, Conflict};
use super::delta::{Delta, Gone, Put};
use super::index::Index;
use super::instances::Instances;
use super::owner::{Incoming, Owner, put};
use super::touched::Touched;
use crate::id::{ActorId, NodeId};

/// Bytes of metadata, keys and values together, that one entry may publish (R10).
pub const METADATA_LIMIT: usize = 1024;

/// Deltas of one owner held back because an earlier one has not come yet.
const HELD_BACK: usize = 64;
/// Deltas of nodes that are no members (yet, or any more) held back, of all such nodes together.
const PARKED: usize = 256;

/// One published actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name it serves under.
    pub name: String,
    /// Instance id; withdrawal is by this alone (R10).
    pub actor: ActorId,
    /// Class or type.
    pub class: String,
    /// Published metadata, at most [`METADATA_LIMIT`] bytes.
    pub metadata: BTreeMap<String, String>,
    /// The name is for this instance alone (R10).
    pub unique: bool,
    /// When the name was claimed, in milliseconds since 1970 by the clock of its node; decides between claims.
    pub claimed: u64,
    /// The instance that the name was lost to. Such an entry is published for a while so that the winner's node learns of
    /// it; nobody finds it by its name any more.
    pub lost_to: Option<ActorId>,
}

/// The registry of one node: its own entries and replicas of all others'.
pub struct Registry {
    pub(super) me: NodeId,
    pub(super) owners: BTreeMap<NodeId, Owner>,
    by_name: Index,
    /// Entries of others that lost their name to one of this node, until they are asked for.
    beaten: Vec<(NodeId, Entry)>,
    by_actor: HashMap<ActorId, NodeId>,
    pub(super) members: BTreeSet<NodeId>,
    parked: VecDeque<(NodeId, Delta)>,
    /// Entries handed out: what a lookup costs.
    #[cfg(test)]
    pub(crate) handed_out: std::cell::Cell<usize>,
}

impl Registry {
    /// An empty registry of node `me`.
    pub fn new(me: NodeId) -> Self {
        Self {
            me,
            owners: BTreeMap::from([(me, Owner::default())]),
            by_name: Index::default(),
            beaten: Vec::new(),
            by_actor: HashMap::new(),
            members: BTreeSet::new(),
            parked: VecDeque::new(),
            #[cfg(test)]
            handed_out: std::cell::Cell::new(0),
        }
    }

    /// Publishes an actor of this node, or replaces what was published of it. The delta is for every member, at once.
    ///
    /// The caller has checked the name and the size of the metadata.
    pub fn publish(&mut self, entry: Entry) -> Delta {
        debug_assert!(acceptable(&entry), "the caller checks names and metadata: {entry:?}");
        let me = self.me;
        let version = self.mine().version + 1;
        let put = put(version, &entry);
        self.insert(me, version, entry);
        self.step(version, vec![put], Vec::new())
    }

    /// Withdraws an actor of this node; `None` if it is not published here.
    pub fn withdraw(&mut self, actor: ActorId) -> Option<Delta> {
        let me = self.me;
        if !self.mine().entries.contains_key(&actor) {
            return None;
        }
        let version = self.mine().version + 1;
        self.remove(me, version, actor);
        Some(self.step(version, Vec::new(), vec![Gone { version, actor: actor.to_bytes().to_vec() }]))
    }

    /// Replaces the metadata of an actor of this node; `None` if it is not published here or nothing changes.
    pub fn update(&mut self, actor: ActorId, metadata: BTreeMap<String, String>) -> Option<Delta> {
        let (_, entry) = self.mine().entries.get(&actor)?;
        if entry.metadata == metadata {
            return None;
        }
        let entry = Entry { metadata, ..entry.clone() };
        Some(self.publish(entry))
    }

    /// Gives the name of an actor of this node up to `winner`; `None` if it is not published here or was given up before.
    /// [`withdraw`](Self::withdraw) it once the others have had time to hear of it.
    pub fn concede(&mut self, actor: ActorId, winner: ActorId) -> Option<Delta> {
        let (_, entry) = self.mine().entries.get(&actor).filter(|(_, entry)| entry.lost_to.is_none())?;
        let entry = Entry { lost_to: Some(winner), ..entry.clone() };
        Some(self.publish(entry))
    }

    /// Whether an actor of this node gave up its name.
    pub fn conceded(&self, actor: ActorId) -> bool {
        self.owners
            .get(&self.me)
            .and_then(|mine| mine.entries.get(&actor))
            .is_some_and(|(_, entry)| entry.lost_to.is_some())
    }

    /// Entries of others that lost their name to an actor of this node, each once or, after a repair, again.
    pub fn take_beaten(&mut self) -> Vec<(NodeId, Entry)> {
        std::mem::take(&mut self.beaten)
    }

    /// Takes over what another node sent; true if something changed. Order and repetition do not matter. A delta that
    /// breaks the rules of its format or is about this node is dropped; one whose owner is no member waits for
    /// [`node_up`](Self::node_up).
    pub fn apply(&mut self, delta: Delta) -> bool {
        let Ok(node) = delta.owner() else { return false };
        if node == self.me || delta.check().is_err() {
            return false;
        }
        if !self.members.contains(&node) {
            if self.parked.len() == PARKED {
                self.parked.pop_front();
            }
            self.parked.push_back((node, delta));
            return false;
        }
        let changed = self.apply_one(node, delta);
        // A filled gap may free what waited behind it, in any order.
        let mut more = changed;
        while more {
            let Some(owner) = self.owners.get_mut(&node) else { break };
            let version = owner.version;
            owner.held_back.retain(|held| held.to > version);
            let Some(next) = owner.held_back.iter().position(|held| held.from <= version) else { break };
            let held = owner.held_back.swap_remove(next);
            more = self.apply_one(node, held);
        }
        changed
    }

    /// A node became a member, or is one again: its entries are taken from now on, beginning with those that came too
    /// early. Send it this node's [`digest`](Self::digest) for the rest.
    pub fn node_up(&mut self, node: NodeId) {
        if node == self.me || !self.members.insert(node) {
            return;
        }
        let (early, rest) = std::mem::take(&mut self.parked).into_iter().partition(|(owner, _)| *owner == node);
        self.parked = rest;
        let early: VecDeque<(NodeId, Delta)> = early;
        for (_, delta) in early {
            self.apply(delta);
        }
    }

    /// A node is gone: its entries vanish, and late news of it shows only if it becomes a member again.
    pub fn node_down(&mut self, node: NodeId) {
        if self.members.remove(&node) {
            self.clear_entries(node);
            self.owners.remove(&node);
        }
    }

    /// The node of an actor says that it has none such any more: nobody finds it any more, ahead of its owner's withdrawal. It is
    /// back if its owner still writes it, in a later version. False if it is not found anyway, or is this node's own.
    pub fn bury(&mut self, node: NodeId, actor: ActorId) -> bool {
        if node == self.me || self.by_actor.get(&actor) != Some(&node) {
            return false;
        }
        let Some((_, entry)) = self.owners.get(&node).and_then(|owner| owner.entries.get(&actor)) else { return false };
        let entry = entry.clone();
        self.unname(&entry, node);
        true
    }

    /// The instances of a name, sorted by node and instance; of a contested one those whose claim stands.
    pub fn lookup(&self, name: &str) -> Vec<(NodeId, Entry)> {
        let all = self.all(name);
        if self.by_name.is_contested(name) { claim::judge(all).0 } else { all }
    }

    /// Those of the instances of a name that `touched` is about, as [`lookup`](Self::lookup) tells them.
    pub fn lookup_some(&self, name: &str, touched: &Touched) -> Vec<(NodeId, Entry)> {
        let Touched::Some { ids, nodes } = touched else { return self.lookup(name) };
        if self.by_name.is_contested(name) {
            let about = |id: (NodeId, ActorId)| ids.contains(&id) || nodes.contains(&id.0);
            return self.lookup(name).into_iter().filter(|(node, entry)| about((*node, entry.actor))).collect();
        }
        let Some(held) = self.by_name.get(name) else { return Vec::new() };
        let ones = ids.iter().copied().filter(|id| !nodes.contains(&id.0) && held.contains(id));
        self.resolve(ones.chain(nodes.iter().flat_map(|node| held.of(*node))))
    }

    /// The instance of a name whose turn it is, round and round; of one node if that is given. `None` if there is none.
    pub fn turn(&mut self, name: &str, node: Option<NodeId>) -> Option<(NodeId, Entry)> {
        let standing: Option<BTreeSet<_>> = self
            .by_name
            .is_contested(name)
            .then(|| self.lookup(name).into_iter().map(|(node, entry)| (node, entry.actor)).collect());
        let me = self.me;
        let held = self.by_name.get_mut(name)?;
        let stands = |id: (NodeId, ActorId)| standing.as_ref().is_none_or(|all| all.contains(&id));
        let id = match node {
            // A node has one instance of a name.
            Some(node) => held.of(node).find(|id| stands(*id)),
            None => (0..held.len()).find_map(|_| held.turn(me).filter(|id| stands(*id))),
        };
        self.resolve(id.into_iter()).pop()
    }

    /// All names with their instances, as [`lookup`](Self::lookup) tells them.
    pub fn names(&self) -> BTreeMap<String, Vec<(NodeId, Entry)>> {
        self.by_name.after(None).map(|name| (name.clone(), self.lookup(name))).collect()
    }

    /// Some of [`names`](Self::names), those that come after one of them: until they have `limit` instances.
    pub fn names_after(&self, after: Option<&String>, limit: usize) -> Vec<(String, Vec<(NodeId, Entry)>)> {
        let mut instances = 0;
        let more = |name: &&String| {
            let before = instances;
            instances += self.by_name.get(name).map_or(0, Instances::len);
            before < limit
        };
        self.by_name.after(after).take_while(more).map(|name| (name.clone(), self.lookup(name))).collect()
    }

    /// Who keeps a claim on `name` from being made: anybody if it is to be `unique`, a unique holder otherwise.
    pub fn holder(&self, name: &str, unique: bool) -> Option<(NodeId, Entry)> {
        self.by_name.get(name).filter(|held| unique || held.is_unique())?;
        let mut standing = self.lookup(name);
        standing.sort_by_key(|(_, entry)| (entry.claimed, entry.actor));
        standing.into_iter().next()
    }

    /// Names claimed by more instances than can hold them, with who wins. The owners of losers withdraw them.
    pub fn conflicts(&self) -> Vec<Conflict> {
        let conflict = |name: &String| {
            let (stand, fall) = claim::judge(self.all(name));
            let losers = fall.into_iter().map(|(node, entry)| (node, entry.actor)).collect();
            Some(Conflict { name: name.clone(), winner: stand.into_iter().next()?, losers })
        };
        self.by_name.contested().filter_map(conflict).collect()
    }

    /// Has changes of the instances of `name` noted for [`take_touched`](Self::take_touched), or no longer.
    pub fn watch(&mut self, name: &str, on: bool) {
        self.by_name.watch(name, on);
    }

    /// Watched names, with the instances for which [`lookup`](Self::lookup) may answer differently than when this was last
    /// called.
    pub fn take_touched(&mut self) -> BTreeMap<String, Touched> {
        self.by_name.take_touched()
    }

    /// One actor, wherever it lives.
    pub fn get(&self, actor: ActorId) -> Option<(NodeId, Entry)> {
        let node = *self.by_actor.get(&actor)?;
        self.owners.get(&node)?.entries.get(&actor).map(|(_, entry)| (node, entry.clone()))
    }

    /// How many names have instances.
    pub fn name_count(&self) -> usize {
        self.by_name.len()
    }

    /// One instance each of the first `limit` names in their order.
    pub fn first_names(&self, limit: usize) -> Vec<(NodeId, Entry)> {
        let first = |name: &String| {
            if self.by_name.is_contested(name) {
                return self.lookup(name).into_iter().next();
            }
            self.resolve(self.by_name.get(name)?.iter().take(1)).pop()
        };
        self.by_name.after(None).filter_map(first).take(limit).collect()
    }

    /// Entries held, of all owners.
    pub fn len(&self) -> usize {
        self.owners.values().map(|owner| owner.entries.len()).sum()
    }

    /// True if no entry is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn mine(&mut self) -> &mut Owner {
        self.owners.entry(self.me).or_default()
    }

    /// Closes a local write.
    fn step(&mut self, version: u64, puts: Vec<Put>, gone: Vec<Gone>) -> Delta {
        let owner = self.me.to_bytes().to_vec();
        let mine = self.mine();
        mine.version = version;
        mine.ahead = version;
        mine.forget_old_tombstones();
        Delta { owner, from: version - 1, to: version, puts, gone, ..Delta::default() }
    }

    fn apply_one(&mut self, node: NodeId, delta: Delta) -> bool {
        let owner = self.owners.entry(node).or_default();
        if delta.to <= owner.version {
            return false;
        }
        if delta.until > 0 {
            return self.apply_part(node, delta);
        }
        let have = owner.version;
        if delta.full {
            self.clear_entries(node);
        } else if delta.from > have || delta.to < owner.ahead {
            self.hold_back(node, delta);
            return false;
        }
        let (full, to, since) = (delta.full, delta.to, if delta.full { 0 } else { have });
        self.take(node, delta, since);
        self.reach(node, to, full);
        true
    }

    /// Takes a part of a shipment; the last one makes it count.
    fn apply_part(&mut self, node: NodeId, delta: Delta) -> bool {
        let owner = self.owners.entry(node).or_default();
        let have = owner.version;
        let (to, until) = (delta.to, delta.until);
        match &mut owner.incoming {
            Some(now) if now.id == delta.shipment && !delta.full && delta.from == now.reached => {
                (now.reached, now.until) = (to, until);
            }
            now => {
                // Of several shipments the newest goes on. Any other part has lost its predecessors.
                let newest = now.as_ref().is_none_or(|now| now.id != delta.shipment && until >= now.until);
                if !newest || until < owner.ahead {
                    return false;
                }
                if !delta.full && (delta.from > have || delta.base > have) {
                    owner.missed = true;
                    return false;
                }
                let stale = delta.full.then(|| owner.entries.keys().copied().collect());
                owner.incoming = Some(Incoming { id: delta.shipment, reached: to, until, stale });
            }
        }
        owner.ahead = owner.ahead.max(to);
        if let Some(stale) = owner.incoming.as_mut().and_then(|now| now.stale.as_mut()) {
            for put in &delta.puts {
                if let Ok(actor) = ActorId::from_bytes(&put.actor) {
                    stale.remove(&actor);
                }
            }
        }
        self.take(node, delta, 0);
        if to < until {
            return true;
        }
        let stale = self.owners.get_mut(&node).and_then(|owner| owner.incoming.take()).and_then(|now| now.stale);
        let full = stale.is_some();
        for actor in stale.unwrap_or_default() {
            self.drop_entry(node, actor);
        }
        self.reach(node, to, full);
        true
    }

    /// Carries out the changes of a delta that are later than `since`.
    fn take(&mut self, node: NodeId, delta: Delta, since: u64) {
        for gone in delta.gone.iter().filter(|gone| gone.version > since) {
            if let Ok(actor) = ActorId::from_bytes(&gone.actor) {
                self.remove(node, gone.version, actor);
            }
        }
        for put in delta.puts.into_iter().filter(|put| delta.full || put.version > since) {
            let (Ok(actor), version) = (ActorId::from_bytes(&put.actor), put.version) else { continue };
            let Put { name, class, metadata, unique, claimed, lost_to, .. } = put;
            let lost_to = ActorId::from_bytes(&lost_to).ok();
            let entry = Entry { name, actor, class, metadata, unique, claimed, lost_to };
            // The owner's own node refuses such an entry, so no honest replica ever serves it.
            if acceptable(&entry) {
                self.insert(node, version, entry);
            }
        }
    }

    /// Everything up to version `to` is here.
    fn reach(&mut self, node: NodeId, to: u64, full: bool) {
        let owner = self.owners.entry(node).or_default();
        (owner.version, owner.ahead, owner.incoming, owner.missed) = (to, to, None, false);
        if full {
            owner.floor = to;
            owner.tombstones.clear();
        }
        owner.forget_old_tombstones();
    }

    fn hold_back(&mut self, node: NodeId, delta: Delta) {
        let owner = self.owners.entry(node).or_default();
        if owner.held_back.len() < HELD_BACK && !owner.held_back.contains(&delta) {
            owner.held_back.push(delta);
        }
    }

    fn insert(&mut self, node: NodeId, version: u64, entry: Entry) {
        let actor = entry.actor;
        let owner = self.owners.entry(node).or_default();
        if owner.entries.get(&actor).is_some_and(|(known, _)| *known >= version) {
            return;
        }
        let new = entry.clone();
        owner.written.insert(version, actor);
        if let Some((before, old)) = owner.entries.insert(actor, (version, entry)) {
            owner.written.remove(&before);
            self.unname(&old, node);
        }
        if let Some(winner) = new.lost_to {
            if self.by_actor.get(&winner) == Some(&self.me) && node != self.me {
                self.beaten.push((node, new));
            }
            return;
        }
        self.by_name.insert(&new.name, (node, actor), new.unique);
        self.by_actor.insert(actor, node);
    }

    fn remove(&mut self, node: NodeId, version: u64, actor: ActorId) {
        let owner = self.owners.entry(node).or_default();
        owner.tombstones.insert(version, actor);
        if owner.entries.get(&actor).is_some_and(|(known, _)| *known < version) {
            self.drop_entry(node, actor);
        }
    }

    fn drop_entry(&mut self, node: NodeId, actor: ActorId) {
        let Some(owner) = self.owners.get_mut(&node) else { return };
        let Some((version, entry)) = owner.entries.remove(&actor) else { return };
        owner.written.remove(&version);
        self.unname(&entry, node);
    }

    fn unname(&mut self, entry: &Entry, node: NodeId) {
        if self.by_actor.get(&entry.actor) == Some(&node) {
            self.by_actor.remove(&entry.actor);
        }
        self.by_name.remove(&entry.name, (node, entry.actor), entry.unique);
    }

    fn clear_entries(&mut self, node: NodeId) {
        let actors: Vec<ActorId> =
            self.owners.get(&node).map(|owner| owner.entries.keys().copied().collect()).unwrap_or_default();
        for actor in actors {
            self.drop_entry(node, actor);
        }
    }

    /// The instances of a name, whatever they claim.
    fn all(&self, name: &str) -> Vec<(NodeId, Entry)> {
        self.by_name.get(name).map(|held| self.resolve(held.iter())).unwrap_or_default()
    }

    fn resolve(&self, ids: impl Iterator<Item = (NodeId, ActorId)>) -> Vec<(NodeId, Entry)> {
        let entry = |(node, actor): (NodeId, ActorId)| {
            let (_, entry) = self.owners.get(&node)?.entries.get(&actor)?;
            Some((node, entry.clone()))
        };
        let found: Vec<_> = ids.filter_map(entry).collect();
        #[cfg(test)]
        self.handed_out.set(self.handed_out.get() + found.len());
        found
    }
}

fn acceptable(entry: &Entry) -> bool {
    let metadata: usize = entry.metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    !entry.name.is_empty() && metadata <= METADATA_LIMIT
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
