//! What is found under a name, and who waits for that to change (R10, M5).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::check::check_name;
use super::node::{Inner, System};
use super::{Instance, Target};
use crate::cluster::Entry;
use crate::error::{Error, Result};
use crate::id::{ActorId, NodeId};
use crate::moment::from_now;
use crate::observe::Readiness;

/// Least time between two looks of a [`NameWatch`]: what changes in between comes as one change.
const PACE: Duration = Duration::from_millis(10);
/// Names listed under one hold of the registry's lock, which membership waits for, too.
const PAGE: usize = 512;
/// Names that an error tells of.
const NAMES_TOLD: usize = 20;

/// One change of the instances of a watched name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameChange {
    /// It serves under the name.
    Added(Instance),
    /// Its metadata, or what else is published of it, is another.
    Updated(Instance),
    /// It serves under the name no more; as it was told of last.
    Removed(Instance),
}

impl NameChange {
    /// The instance concerned.
    pub fn instance(&self) -> &Instance {
        match self {
            Self::Added(instance) | Self::Updated(instance) | Self::Removed(instance) => instance,
        }
    }
}

/// The instances of one name and how they change: those that exist come first, as [`NameChange::Added`].
///
/// What changes while nobody asks is folded: each instance is told of at most once, as it is by then, so a slow reader needs
/// no more memory than the name has instances, and always ends at the truth. Dropped, it ends.
pub struct NameWatch {
    told_of: Subscription,
    known: BTreeMap<(NodeId, ActorId), Instance>,
    queue: VecDeque<NameChange>,
    looked: Option<Instant>,
}

impl NameWatch {
    /// The name.
    pub fn name(&self) -> &str {
        &self.told_of.name
    }

    /// The next change. Cancelling the wait loses nothing.
    ///
    /// # Errors
    /// `ShutDown` once this node is shut down.
    pub async fn next(&mut self) -> Result<NameChange> {
        loop {
            self.changed().await?;
            if let Some(change) = self.queue.pop_front() {
                return Ok(change);
            }
        }
    }

    /// Waits until [`take`](Self::take) has something to tell. Cancelling the wait loses nothing.
    ///
    /// # Errors
    /// `ShutDown` once this node is shut down.
    pub async fn changed(&mut self) -> Result<()> {
        loop {
            let node = self.told_of.node.upgrade().filter(|node| *node.readiness.lock() != Readiness::Leaving);
            if node.is_none() {
                return Err(Error::ShutDown);
            }
            drop(node);
            if !self.queue.is_empty() {
                return Ok(());
            }
            if let Some(looked) = self.looked {
                // The wait for the pace comes first: no change is marked as seen before it is looked at.
                tokio::time::sleep_until(looked + PACE).await;
                self.told_of.changes.changed().await.map_err(|_| Error::ShutDown)?;
            }
            self.look();
        }
    }

    /// What changed since it was last told, without waiting.
    pub fn take(&mut self) -> Vec<NameChange> {
        if self.looked.is_none() || self.told_of.changes.has_changed().unwrap_or(false) {
            self.look();
        }
        self.queue.drain(..).collect()
    }

    fn look(&mut self) {
        let Some(node) = self.told_of.node.upgrade() else { return };
        self.looked = Some(Instant::now());
        // Before looking: a change that comes while we look is looked at again.
        self.told_of.changes.mark_unchanged();
        let found = System(node).instances(&self.told_of.name);
        let mut before = std::mem::take(&mut self.known);
        let mut changes = Vec::new();
        for instance in found {
            let key = (instance.target.node, instance.target.actor);
            match before.remove(&key) {
                None => changes.push(NameChange::Added(instance.clone())),
                Some(known) if known != instance => changes.push(NameChange::Updated(instance.clone())),
                Some(_) => {}
            }
            self.known.insert(key, instance);
        }
        self.queue.extend(before.into_values().map(NameChange::Removed));
        self.queue.extend(changes);
    }
}

/// Who waits for changes of which names.
#[derive(Default)]
pub(super) struct Listeners(Mutex<HashMap<String, (usize, watch::Sender<()>)>>);

impl Listeners {
    /// The instances of a name may be others.
    pub(super) fn poke(&self, name: &str) {
        if let Some((_, changes)) = self.0.lock().get(name) {
            changes.send_replace(());
        }
    }

    /// The instances of any name may be others.
    pub(super) fn poke_all(&self) {
        for (_, changes) in self.0.lock().values() {
            changes.send_replace(());
        }
    }
}

/// Hears of changes of one name until dropped.
struct Subscription {
    node: Weak<Inner>,
    name: String,
    changes: watch::Receiver<()>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let Some(node) = self.node.upgrade() else { return };
        let mut listeners = node.listeners.0.lock();
        let Some((count, _)) = listeners.get_mut(&self.name) else { return };
        *count -= 1;
        if *count == 0 {
            listeners.remove(&self.name);
            node.registry.lock().watch(&self.name, false);
        }
    }
}

impl System {
    /// Instances of a name, of nodes not known to be down; private ones of this node too. Never waits.
    pub fn instances(&self, name: &str) -> Vec<Instance> {
        let found = self.0.registry.lock().lookup(name);
        let mut all: Vec<Instance> =
            found.into_iter().filter_map(|(node, entry)| self.0.instance(node, entry)).collect();
        let actors = self.0.actors.read();
        let private = actors.by_name.get(name).and_then(|id| Some((*id, actors.by_id.get(id)?)));
        if let Some((id, actor)) = private {
            let spec = actor.spec.lock();
            if !spec.public {
                all.push(Instance {
                    name: name.to_owned(),
                    target: Target { node: self.0.id, actor: id },
                    addr: self.addr().to_string(),
                    class: spec.class.clone(),
                    metadata: spec.metadata.clone(),
                    unique: false,
                });
            }
        }
        all
    }

    /// Every published instance by name, of nodes not known to be down. All of them: to follow some, see
    /// [`watch_name`](Self::watch_name).
    pub fn names(&self) -> BTreeMap<String, Vec<Instance>> {
        self.0.published()
    }

    /// How many names are published, and one instance each of the first `limit` of them.
    pub fn first_names(&self, limit: usize) -> (usize, Vec<Instance>) {
        let (count, first) = {
            let registry = self.0.registry.lock();
            (registry.name_count(), registry.first_names(limit))
        };
        (count, first.into_iter().filter_map(|(node, entry)| self.0.instance(node, entry)).collect())
    }

    /// The published instance that is this actor, wherever in the cluster it lives; `None` for one without a published
    /// name.
    pub fn published(&self, actor: ActorId) -> Option<Instance> {
        let found = self.0.registry.lock().get(actor);
        found.and_then(|(node, entry)| self.0.instance(node, entry))
    }

    /// The name that an actor serves under, wherever in the cluster it lives; `None` for one without a published name.
    pub fn name_of(&self, actor: ActorId) -> Option<String> {
        self.0.registry.lock().get(actor).map(|(_, entry)| entry.name)
    }

    /// Watches the instances of a name, those of [`instances`](Self::instances), as they come, change and go. Costs nothing
    /// while other names change.
    ///
    /// # Errors
    /// `InvalidName` for what cannot be one.
    pub fn watch_name(&self, name: &str) -> Result<NameWatch> {
        check_name(name)?;
        Ok(NameWatch { told_of: self.0.subscribe(name), known: BTreeMap::new(), queue: VecDeque::new(), looked: None })
    }

    /// One instance of `name`, waiting up to `timeout` for it to appear (R10). Among several: round robin, local or not.
    ///
    /// # Errors
    /// `NameNotFound` with the names that exist; `InvalidName` for what cannot be one.
    pub async fn resolve(&self, name: &str, node: Option<NodeId>, timeout: Duration) -> Result<Instance> {
        check_name(name)?;
        if let Some(found) = self.pick(name, node) {
            return Ok(found);
        }
        let mut told_of = self.0.subscribe(name);
        let deadline = from_now(timeout);
        loop {
            if let Some(found) = self.pick(name, node) {
                return Ok(found);
            }
            if !matches!(tokio::time::timeout_at(deadline, told_of.changes.changed()).await, Ok(Ok(()))) {
                let known: Vec<_> = self.first_names(NAMES_TOLD).1.into_iter().map(|one| one.name).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(Error::NameNotFound { name: name.to_owned(), waited: timeout, known });
            }
        }
    }

    fn pick(&self, name: &str, node: Option<NodeId>) -> Option<Instance> {
        let mut found = self.instances(name);
        found.retain(|one| node.is_none_or(|node| one.target.node == node));
        if found.is_empty() {
            return None;
        }
        let turn = self.0.turns.fetch_add(1, Ordering::Relaxed) % found.len();
        Some(found.swap_remove(turn))
    }
}

impl Inner {
    /// Tells whoever waits for changes of members or names that some may have happened. Not under the registry's lock.
    pub(super) fn changed(&self) {
        let touched = self.registry.lock().take_touched();
        for name in touched {
            self.listeners.poke(&name);
        }
        self.changes.send_modify(|version| *version += 1);
    }

    fn subscribe(&self, name: &str) -> Subscription {
        let changes = {
            let mut listeners = self.listeners.0.lock();
            let (count, sender) = listeners.entry(name.to_owned()).or_insert_with(|| (0, watch::Sender::new(())));
            *count += 1;
            self.registry.lock().watch(name, true);
            sender.subscribe()
        };
        Subscription { node: Weak::clone(&self.myself), name: name.to_owned(), changes }
    }

    fn instance(&self, node: NodeId, entry: Entry) -> Option<Instance> {
        let addr = if node == self.id { self.me.lock().addr } else { self.living(node)?.addr };
        Some(Instance {
            name: entry.name,
            target: Target { node, actor: entry.actor },
            addr: addr.to_string(),
            class: entry.class,
            metadata: entry.metadata,
            unique: entry.unique,
        })
    }

    pub(super) fn published(&self) -> BTreeMap<String, Vec<Instance>> {
        let mut all = BTreeMap::new();
        let mut page = self.registry.lock().names_after(None, PAGE);
        while let Some((last, _)) = page.last() {
            let next = self.registry.lock().names_after(Some(last), PAGE);
            for (name, found) in page {
                let found: Vec<_> = found.into_iter().filter_map(|(node, entry)| self.instance(node, entry)).collect();
                if !found.is_empty() {
                    all.insert(name, found);
                }
            }
            page = next;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::call::Call;
    use crate::system::{ActorSpec, Ending, Endpoint, Security, SystemConfig};

    struct Nobody;

    impl Endpoint for Nobody {
        fn deliver(&self, _: Call) {}
        fn end(&self, _: Ending) {}
    }

    fn register(system: &System, name: &str) {
        let spec = ActorSpec { name: Some(name.to_owned()), public: true, ..ActorSpec::default() };
        system.register(ActorId::generate(), spec, Arc::new(Nobody)).unwrap();
    }

    async fn system() -> System {
        System::start(SystemConfig { security: Security::Insecure, ..SystemConfig::default() }).await.unwrap()
    }

    #[tokio::test]
    async fn a_watch_costs_nothing_while_other_names_change_or_once_it_is_closed() {
        let system = system().await;
        let (one, mut two) = (system.watch_name("a").unwrap(), system.watch_name("a").unwrap());
        assert!(two.take().is_empty());
        register(&system, "b");
        assert!(!two.told_of.changes.has_changed().unwrap(), "nobody looks because of another name");
        register(&system, "a");
        assert!(two.told_of.changes.has_changed().unwrap());
        assert_eq!(two.take().len(), 1);
        drop(one);
        assert_eq!(system.0.listeners.0.lock()["a"].0, 1);
        drop(two);
        assert!(system.0.listeners.0.lock().is_empty());
        register(&system, "c");
        assert!(system.0.registry.lock().take_touched().is_empty());
        assert!(system.resolve("d", None, Duration::ZERO).await.is_err());
        assert!(system.0.listeners.0.lock().is_empty(), "nor does a resolve leave anything behind");
        system.shutdown().await;
    }

    async fn found(system: &System, name: &str) -> Instance {
        system.resolve(name, None, Duration::from_secs(5)).await.unwrap()
    }

    #[tokio::test]
    async fn test_r10_a_node_that_does_not_know_an_actor_is_believed_at_once_and_its_owner_when_it_writes_it_again() {
        let owner = system().await;
        let seeds = vec![owner.addr().to_string()];
        let config = SystemConfig { security: Security::Insecure, seeds, ..SystemConfig::default() };
        let other = System::start(config).await.unwrap();
        register(&owner, "a");
        let one = found(&other, "a").await;
        // Gone without the news of it.
        let actor = owner.0.actors.write().by_id.remove(&one.target.actor);
        drop(actor);
        let payload = crate::payload::Payload::new(crate::payload::Codec::RAW, "x");
        let ended = other.call(one.target, payload, crate::call::CallOptions::default()).await;
        assert!(matches!(ended, Err(Error::ActorNotFound { .. })));
        assert_eq!(other.instances("a"), []);
        assert!(other.resolve("a", None, Duration::ZERO).await.is_err());
        let again = BTreeMap::from([("state".to_owned(), "ready".to_owned())]);
        owner.0.registry.lock().update(one.target.actor, again).unwrap();
        owner.0.driver.send(crate::system::driver::Input::Publish).unwrap();
        assert_eq!(found(&other, "a").await.target, one.target);
        other.shutdown().await;
        owner.shutdown().await;
    }
}
