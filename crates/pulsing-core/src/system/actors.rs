//! The actors of a node: how they come to be known, and how they cease to be (R8, R10).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;

use super::check::{check_metadata, check_name};
use super::driver::Input;
use super::node::{Inner, System};
use super::service::NODE_ACTOR;
use super::{ActorSpec, Endpoint, Reason};
use crate::cluster::{Entry, Touched};
use crate::error::{Error, Result};
use crate::id::ActorId;
use crate::observe::Readiness;

pub(super) struct LocalActor {
    pub(super) spec: Mutex<ActorSpec>,
    pub(super) endpoint: Arc<dyn Endpoint>,
}

#[derive(Default)]
pub(super) struct Actors {
    pub(super) by_id: HashMap<ActorId, Arc<LocalActor>>,
    pub(super) by_name: HashMap<String, ActorId>,
}

impl Actors {
    /// Frees the name of an actor, unless it has gone to another.
    fn free(&mut self, name: Option<&str>, id: ActorId) {
        if let Some(name) = name.filter(|name| self.by_name.get(*name) == Some(&id)) {
            self.by_name.remove(name);
        }
    }
}

impl System {
    /// Makes `endpoint` reachable, and known under its name. The name is public as soon as this returns.
    ///
    /// # Errors
    /// `NameTaken` on this node, or anywhere if either claim is unique; `InvalidName`; `Config` for metadata over 1 KB, a
    /// unique name that is not public, or the id of the node itself; `ShutDown`.
    pub fn register(&self, id: ActorId, spec: ActorSpec, endpoint: Arc<dyn Endpoint>) -> Result<()> {
        if *self.0.readiness.lock() == Readiness::Leaving {
            return Err(Error::ShutDown);
        }
        if id == NODE_ACTOR {
            return Err(Error::Config(format!("actor id {id} is the node's own; ActorId::generate() makes others")));
        }
        if let Some(name) = &spec.name {
            check_name(name)?;
        }
        check_metadata(&spec.metadata)?;
        if spec.unique && (spec.name.is_none() || !spec.public) {
            return Err(Error::Config("a unique actor needs a name, and one that is public".to_owned()));
        }
        let (named, private) = (spec.name.is_some(), spec.name.clone().filter(|_| !spec.public));
        let entry = spec.published(id, self.0.link_config.transport.epoch());
        {
            // Held throughout: of two claims of one name here, the second sees the first, in the registry too.
            let mut actors = self.0.actors.write();
            if let Some(name) = &spec.name {
                if let Some(actor) = actors.by_name.get(name) {
                    return Err(Error::NameTaken { name: name.clone(), actor: *actor, node: self.0.id });
                }
                self.0.check_vacant(name, spec.unique)?;
                actors.by_name.insert(name.clone(), id);
            }
            self.0.tell(id, &spec, "started", None);
            actors.by_id.insert(id, Arc::new(LocalActor { spec: Mutex::new(spec), endpoint }));
            if let Some(entry) = entry {
                self.0.registry.lock().publish(entry);
                let _ = self.0.driver.send(Input::Publish);
            }
        }
        self.0.metrics.actors_created.inc();
        if named {
            // A claim of another node may have come between the look and the publication.
            self.0.settle_claims();
            self.0.renamed(private.as_deref(), id);
        }
        Ok(())
    }

    /// Whether `name` could be claimed now: for those who have work to do before [`register`](Self::register).
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn check_vacant(&self, name: &str, unique: bool) -> Result<()> {
        check_name(name)?;
        if let Some(actor) = self.0.actors.read().by_name.get(name) {
            return Err(Error::NameTaken { name: name.to_owned(), actor: *actor, node: self.0.id });
        }
        self.0.check_vacant(name, unique)
    }

    /// Takes an actor's name off the cluster, and frees it here; the actor can still be reached by its id. Idempotent.
    pub fn withdraw(&self, id: ActorId) {
        let name = {
            let mut actors = self.0.actors.write();
            let Some(actor) = actors.by_id.get(&id).cloned() else { return };
            let name = actor.spec.lock().name.take();
            actors.free(name.as_deref(), id);
            name
        };
        if name.is_some() {
            self.0.unpublish(id);
            self.0.renamed(name.as_deref(), id);
        }
    }

    /// Takes an actor that has ended off this node: its name disappears from the cluster, and who watches it learns `reason`
    /// (R9). False if it was not there.
    pub fn unregister(&self, id: ActorId, reason: Reason) -> bool {
        let why = reason.clone();
        let removed = self.0.ended_here(id, reason, || {
            let mut actors = self.0.actors.write();
            let removed = actors.by_id.remove(&id)?;
            let spec = removed.spec.lock();
            self.0.tell(id, &spec, "ended", Some(&why));
            let name = spec.name.clone();
            drop(spec);
            actors.free(name.as_deref(), id);
            drop(actors);
            // Whoever hears of the end finds the name gone.
            self.0.metrics.actors_stopped.inc();
            self.0.unpublish(id);
            self.0.renamed(name.as_deref(), id);
            Some(())
        });
        removed.is_some()
    }

    /// Counts that supervision starts an actor of this node again, and tells observers; `reason` is how its last instance
    /// ended (R9).
    pub fn restarted(&self, id: ActorId, reason: &Reason) {
        let actor = self.0.actors.read().by_id.get(&id).cloned();
        match actor {
            Some(actor) => self.restarted_as(id, &actor.spec.lock(), reason),
            None => self.0.metrics.actors_restarted.inc(),
        }
    }

    /// [`restarted`](Self::restarted) of an actor that this node looks after, and that lives on a node of its own.
    pub fn restarted_as(&self, id: ActorId, spec: &ActorSpec, reason: &Reason) {
        self.0.metrics.actors_restarted.inc();
        self.0.tell(id, spec, "restarted", Some(reason));
    }

    /// Replaces the metadata published with an actor's name; false if the actor is not here.
    ///
    /// # Errors
    /// `Config` for metadata over 1 KB.
    pub fn set_metadata(&self, id: ActorId, metadata: BTreeMap<String, String>) -> Result<bool> {
        check_metadata(&metadata)?;
        let Some(actor) = self.0.actors.read().by_id.get(&id).cloned() else { return Ok(false) };
        {
            // Both under the registry's lock, so that two updates cannot end in different orders here and there.
            let mut registry = self.0.registry.lock();
            actor.spec.lock().metadata.clone_from(&metadata);
            if registry.update(id, metadata).is_some() {
                let _ = self.0.driver.send(Input::Publish);
            }
        }
        let name = {
            let spec = actor.spec.lock();
            self.0.tell(id, &spec, "updated", None);
            spec.name.clone()
        };
        self.0.renamed(name.as_deref(), id);
        Ok(true)
    }
}

impl ActorSpec {
    fn published(&self, id: ActorId, claimed: u64) -> Option<Entry> {
        let name = self.name.clone().filter(|_| self.public)?;
        let (class, metadata) = (self.class.clone(), self.metadata.clone());
        Some(Entry { name, actor: id, class, metadata, unique: self.unique, claimed, lost_to: None })
    }
}

impl Inner {
    /// Tells observers what became of an actor.
    fn tell(&self, id: ActorId, spec: &ActorSpec, change: &str, reason: Option<&Reason>) {
        self.events.tell("actor", || {
            json!({
                "change": change, "actor_id": id.to_string(), "name": spec.name, "class": spec.class,
                "public": spec.public, "internal": spec.internal, "metadata": spec.metadata,
                "reason": reason.map(Reason::word),
            })
        });
    }

    fn unpublish(&self, id: ActorId) {
        {
            let mut registry = self.registry.lock();
            if !registry.conceded(id) && registry.withdraw(id).is_some() {
                let _ = self.driver.send(Input::Publish);
            }
        }
    }

    /// What is found of an actor of this node under a name may be something else. The registry knows of public actors only.
    fn renamed(&self, name: Option<&str>, id: ActorId) {
        if let Some(name) = name {
            self.listeners.poke(name, &Touched::one((self.id, id)));
        }
        self.changed();
    }
}
