//! What observers of a node's port are told.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use super::node::Inner;
use super::view::{Instance, Member};
use super::{SystemConfig, address, port};
use crate::error::{Error, Result};
use crate::net::handshake::Trust;
use crate::net::transport::{Listener, Transport};
use crate::observe::{Events, LocalActor, Metrics, NodeStatus, ObserveSource};

/// Listens where observers are answered besides the node's port, if anywhere.
///
/// # Errors
/// `InvalidAddress`, `Bind`.
pub(super) async fn listen(config: &SystemConfig, transport: &Transport) -> Result<Option<(Listener, SocketAddr)>> {
    let Some(text) = &config.observe_addr else { return Ok(None) };
    let at = address::resolve(text, transport).await?[0];
    // Whoever held it before was asked in plain HTTP, too.
    let listener = port::listen(at, "--observe_addr", transport, &Trust::Anyone).await?;
    let port = listener.port().map_err(|error| Error::Config(error.to_string()))?;
    Ok(Some((listener, SocketAddr::new(at.ip(), port))))
}

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
    fn events(&self) -> &Events {
        &self.events
    }
    fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }
}
