//! What observers of a node's port are told.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::node::Inner;
use super::view::{Instance, Member};
use crate::observe::{LocalActor, Metrics, NodeStatus, ObserveSource};

impl ObserveSource for Inner {
    fn status(&self) -> NodeStatus {
        NodeStatus {
            node: self.id,
            addr: self.me.lock().addr,
            uptime: self.started.elapsed(),
            readiness: *self.readiness.lock(),
        }
    }
    fn members(&self) -> Vec<Member> {
        self.all_members()
    }
    fn local_actors(&self) -> Vec<LocalActor> {
        let actors = self.actors.read();
        actors
            .by_id
            .iter()
            .map(|(id, actor)| {
                let spec = actor.spec.lock();
                LocalActor {
                    name: spec.name.clone(),
                    id: *id,
                    class: spec.class.clone(),
                    public: spec.public,
                    internal: spec.internal,
                    metadata: spec.metadata.clone(),
                }
            })
            .collect()
    }
    fn names(&self) -> BTreeMap<String, Vec<Instance>> {
        self.published()
    }
    fn registry_size(&self) -> (usize, usize) {
        let registry = self.registry.lock();
        (registry.name_count(), registry.len())
    }
    fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }
}
