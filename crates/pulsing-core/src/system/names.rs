//! What is found under a name, and who waits for that to change (R10, M5).

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::check::check_name;
use super::node::{Inner, System};
use super::{Instance, Target};
use crate::cluster::{Entry, Touched};
use crate::error::{Error, Result};
use crate::id::{ActorId, NodeId};
use crate::moment::from_now;
use crate::net::handshake::is_local;
use crate::observe::Readiness;

/// Least time between two looks of a [`NameWatch`]: what changes in between comes as one change.
const PACE: Duration = Duration::from_millis(10);
/// Instances listed under one hold of the registry's lock, which membership waits for, too; one name is never parted.
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
                self.told_of.changed().await?;
            }
            self.look();
        }
    }

    /// What changed since it was last told, without waiting.
    pub fn take(&mut self) -> Vec<NameChange> {
        if self.looked.is_none() || self.told_of.has_changed() {
            self.look();
        }
        self.queue.drain(..).collect()
    }

    fn look(&mut self) {
        let Some(node) = self.told_of.node.upgrade() else { return };
        // Before looking: a change that comes while we look is looked at again.
        let touched = if self.looked.is_some() { self.told_of.take() } else { Touched::All };
        self.looked = Some(Instant::now());
        let about: Vec<Key> = match &touched {
            Touched::All => self.known.keys().copied().collect(),
            Touched::Some { ids, nodes } => {
                let on = |node: &NodeId| self.known.range((*node, ActorId(0))..=(*node, ActorId(u128::MAX)));
                let all = nodes.iter().flat_map(on).map(|(key, _)| *key).chain(ids.iter().copied());
                all.collect()
            }
        };
        let found = System(node).some_instances(&self.told_of.name, &touched);
        let mut found: BTreeMap<Key, Instance> = found.into_iter().map(|one| (key(&one), one)).collect();
        for key in about {
            if !found.contains_key(&key) {
                self.queue.extend(self.known.remove(&key).map(NameChange::Removed));
            }
        }
        while let Some((key, instance)) = found.pop_first() {
            match self.known.insert(key, instance.clone()) {
                None => self.queue.push_back(NameChange::Added(instance)),
                Some(known) if known != instance => self.queue.push_back(NameChange::Updated(instance)),
                Some(_) => {}
            }
        }
    }
}

type Key = (NodeId, ActorId);

fn key(instance: &Instance) -> Key {
    (instance.target.node, instance.target.actor)
}

/// Who waits for changes of which names.
#[derive(Default)]
pub(super) struct Listeners(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    next: u64,
    by_name: BTreeMap<String, BTreeMap<u64, Arc<News>>>,
}

/// What one of them has not looked at.
struct News {
    touched: Mutex<Touched>,
    changes: watch::Sender<()>,
}

impl News {
    fn add(&self, touched: &Touched) {
        self.touched.lock().add(touched);
        self.changes.send_replace(());
    }
}

impl Listeners {
    /// These instances of a name may be others.
    pub(super) fn poke(&self, name: &str, touched: &Touched) {
        for news in self.0.lock().by_name.get(name).into_iter().flat_map(BTreeMap::values) {
            news.add(touched);
        }
    }

    /// These instances of any name may be others.
    pub(super) fn poke_all(&self, touched: &Touched) {
        for news in self.0.lock().by_name.values().flat_map(BTreeMap::values) {
            news.add(touched);
        }
    }
}

/// Hears of changes of one name until dropped.
struct Subscription {
    node: Weak<Inner>,
    name: String,
    number: u64,
    news: Arc<News>,
    changes: watch::Receiver<()>,
}

impl Subscription {
    async fn changed(&mut self) -> Result<()> {
        self.changes.changed().await.map_err(|_| Error::ShutDown)
    }

    fn has_changed(&self) -> bool {
        self.changes.has_changed().unwrap_or(false)
    }

    fn take(&mut self) -> Touched {
        self.changes.mark_unchanged();
        std::mem::take(&mut *self.news.touched.lock())
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let Some(node) = self.node.upgrade() else { return };
        let mut waiting = node.listeners.0.lock();
        let Some(all) = waiting.by_name.get_mut(&self.name) else { return };
        all.remove(&self.number);
        if all.is_empty() {
            waiting.by_name.remove(&self.name);
            node.registry.lock().watch(&self.name, false);
        }
    }
}

impl System {
    /// Instances of a name, of nodes not known to be down; private ones of this node too. Never waits.
    pub fn instances(&self, name: &str) -> Vec<Instance> {
        self.some_instances(name, &Touched::All)
    }

    /// Those of them that `touched` is about.
    fn some_instances(&self, name: &str, touched: &Touched) -> Vec<Instance> {
        let found = self.0.registry.lock().lookup_some(name, touched);
        let public = found.into_iter().filter_map(|(node, entry)| self.0.instance(node, entry));
        let private = self.private(name).filter(|one| match touched {
            Touched::All => true,
            Touched::Some { ids, nodes } => ids.contains(&key(one)) || nodes.contains(&one.target.node),
        });
        public.chain(private).collect()
    }

    /// The actor of this node that serves under a name which is not published.
    fn private(&self, name: &str) -> Option<Instance> {
        let actors = self.0.actors.read();
        let id = *actors.by_name.get(name)?;
        let spec = actors.by_id.get(&id)?.spec.lock();
        (!spec.public).then(|| Instance {
            name: name.to_owned(),
            target: Target { node: self.0.id, actor: id },
            addr: self.addr().to_string(),
            class: spec.class.clone(),
            metadata: spec.metadata.clone(),
            unique: false,
        })
    }

    /// Every published instance by name, of nodes not known to be down. All of them: to follow some, see
    /// [`watch_name`](Self::watch_name).
    pub fn names(&self) -> BTreeMap<String, Vec<Instance>> {
        self.0.published()
    }

    /// Whether a node's address, `ip:port`, is one of this host's. Asks the system for its interfaces.
    pub fn is_on_this_host(addr: &str) -> bool {
        addr.parse::<SocketAddr>().is_ok_and(|addr| is_local(addr.ip()))
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
            if !matches!(tokio::time::timeout_at(deadline, told_of.changed()).await, Ok(Ok(()))) {
                let known: Vec<_> = self.first_names(NAMES_TOLD).1.into_iter().map(|one| one.name).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(Error::NameNotFound { name: name.to_owned(), waited: timeout, known });
            }
        }
    }

    fn pick(&self, name: &str, node: Option<NodeId>) -> Option<Instance> {
        let private = self.private(name).filter(|one| node.is_none_or(|node| one.target.node == node));
        if private.is_none() {
            let next = self.0.registry.lock().turn(name, node)?;
            if let Some(found) = self.0.instance(next.0, next.1) {
                return Some(found);
            }
        }
        // Rare: one of this node's own among them that is not in the registry, or the registry does not know yet that a
        // node is gone.
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
        for (name, touched) in touched {
            self.listeners.poke(&name, &touched);
        }
        self.changes.add();
    }

    fn subscribe(&self, name: &str) -> Subscription {
        let news = Arc::new(News { touched: Mutex::default(), changes: watch::Sender::new(()) });
        let changes = news.changes.subscribe();
        let number = {
            let mut waiting = self.listeners.0.lock();
            waiting.next += 1;
            let number = waiting.next;
            waiting.by_name.entry(name.to_owned()).or_default().insert(number, Arc::clone(&news));
            self.registry.lock().watch(name, true);
            number
        };
        Subscription { node: Weak::clone(&self.myself), name: name.to_owned(), number, news, changes }
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
    use std::collections::BTreeSet;

    use super::*;
    use crate::call::Call;
    use crate::cluster::{Identity, MemberInfo, Registry};
    use crate::system::MemberState;
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
        assert!(!two.told_of.has_changed(), "nobody looks because of another name");
        register(&system, "a");
        assert!(two.told_of.has_changed());
        assert_eq!(two.take().len(), 1);
        drop(one);
        assert_eq!(system.0.listeners.0.lock().by_name["a"].len(), 1);
        drop(two);
        assert!(system.0.listeners.0.lock().by_name.is_empty());
        register(&system, "c");
        assert!(system.0.registry.lock().take_touched().is_empty());
        assert!(system.resolve("d", None, Duration::ZERO).await.is_err());
        assert!(system.0.listeners.0.lock().by_name.is_empty(), "nor does a resolve leave anything behind");
        system.shutdown().await;
    }

    /// An actor's entry, as its node writes it.
    fn entry(actor: u128) -> Entry {
        let name = "crowd".to_owned();
        let (class, metadata) = (String::new(), BTreeMap::new());
        Entry { name, actor: ActorId(actor), class, metadata, unique: false, claimed: 0, lost_to: None }
    }

    #[tokio::test]
    async fn test_m5_a_change_of_one_of_twenty_thousand_instances_costs_one_look() {
        let system = system().await;
        let mut owners: Vec<_> = (1..=20).map(|node| Registry::new(NodeId(node))).collect();
        let member = |owner: u128| {
            let addr = std::net::SocketAddr::from(([192, 0, 2, owner as u8], 7000));
            MemberInfo { identity: Identity::new(NodeId(owner), addr, 1), state: MemberState::Alive }
        };
        system.0.set_members((1..=20).map(member).collect());
        let cost = || system.0.registry.lock().handed_out.replace(0);
        let apply = |delta| {
            assert!(system.0.registry.lock().apply(delta));
            system.0.changed();
        };
        for (at, owner) in owners.iter_mut().enumerate() {
            system.0.registry.lock().node_up(NodeId(at as u128 + 1));
            (0..1000).for_each(|n| apply(owner.publish(entry(at as u128 * 1000 + n))));
        }
        let mut watch = system.watch_name("crowd").unwrap();
        assert_eq!(watch.take().len(), 20_000);
        assert_eq!(cost(), 20_000, "publishing looks at none, the first look at all");

        let ready = BTreeMap::from([("state".to_owned(), "ready".to_owned())]);
        apply(owners[3].update(ActorId(3001), ready).unwrap());
        apply(owners[4].withdraw(ActorId(4001)).unwrap());
        apply(owners[5].publish(entry(50_000)));
        let changes = watch.take();
        let told: Vec<_> = changes.iter().map(|one| (one.instance().target.actor.0, one)).collect();
        assert!(
            matches!(
                told[..],
                [(4001, NameChange::Removed(_)), (3001, NameChange::Updated(_)), (50_000, NameChange::Added(_))]
            ),
            "{changes:?}"
        );
        assert_eq!(cost(), 2, "what is there of what changed");

        // A node is gone, and no other instance is looked at.
        system.0.registry.lock().node_down(NodeId(9));
        system.0.set_members((1..=20).filter(|node| *node != 9).map(member).collect());
        assert_eq!(watch.take().iter().filter(|one| matches!(one, NameChange::Removed(_))).count(), 1000);
        assert_eq!(cost(), 0);

        let turns: BTreeSet<_> = (0..19_000).filter_map(|_| system.pick("crowd", None)).map(|one| key(&one)).collect();
        assert_eq!((turns.len(), cost()), (19_000, 19_000), "each has its turn, and none costs more than itself");
        assert!(system.pick("crowd", Some(NodeId(2))).is_some() && system.pick("crowd", Some(NodeId(9))).is_none());
        assert_eq!((system.first_names(3).1.len(), cost()), (1, 2));
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
    /// Takes nothing more; may have begun with what it refuses.
    struct Stopped {
        begun: bool,
    }

    impl Endpoint for Stopped {
        fn deliver(&self, call: Call) {
            let actor = call.target;
            call.responder.error(Error::ActorStopped { actor, begun: self.begun });
        }
        fn end(&self, _: Ending) {}
    }

    #[tokio::test]
    async fn test_r10_whoever_refuses_an_ask_or_a_tell_because_it_stopped_is_found_no_more() {
        let owner = system().await;
        let seeds = vec![owner.addr().to_string()];
        let config = SystemConfig { security: Security::Insecure, seeds, ..SystemConfig::default() };
        let other = System::start(config).await.unwrap();
        for (name, begun) in [("asked", false), ("told", false), ("restarted", true)] {
            let spec = ActorSpec { name: Some(name.to_owned()), public: true, ..ActorSpec::default() };
            owner.register(ActorId::generate(), spec, Arc::new(Stopped { begun })).unwrap();
        }
        let payload = || crate::payload::Payload::new(crate::payload::Codec::RAW, "x");
        let options = crate::call::CallOptions::default;
        for (name, left) in [("asked", 0), ("restarted", 1)] {
            let one = found(&other, name).await;
            let ended = other.call(one.target, payload(), options()).await;
            assert!(matches!(ended, Err(Error::ActorStopped { .. })), "{ended:?}");
            assert_eq!(other.instances(name).len(), left, "{name}: with a message that had begun it may be restarted");
        }
        let one = found(&other, "told").await;
        let mut watch = other.watch_name("told").unwrap();
        assert!(matches!(watch.next().await, Ok(NameChange::Added(_))));
        other.tell(one.target, payload(), options()).await.unwrap();
        let change = tokio::time::timeout(Duration::from_secs(10), watch.next()).await;
        assert!(matches!(change, Ok(Ok(NameChange::Removed(_)))), "{change:?}");
        assert_eq!(other.instances("told"), []);
        other.shutdown().await;
        owner.shutdown().await;
    }
}
