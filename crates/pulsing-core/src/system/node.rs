//! [`System`]: the public face of a node.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::{ActorSpec, Endpoint, Instance, Member, SystemConfig, Target};
use crate::call::{CallHandle, CallOptions, Mode, Reply, ReplySink};
use crate::error::Result;
use crate::id::{ActorId, NodeId};
use crate::observe::Metrics;
use crate::payload::Payload;

/// A running node. Clones share it.
#[derive(Clone)]
pub struct System {}

impl System {
    /// Binds, joins the seeds, and starts serving. Call it inside a tokio runtime, which must outlive the system.
    ///
    /// # Errors
    /// `Bind`, `InvalidAddress`, `Config`, `JoinFailed`, or `Refused` when a seed says why it will not have us.
    pub async fn start(config: SystemConfig) -> Result<Self> { todo!() }
    /// This node's id.
    pub fn node_id(&self) -> NodeId { todo!() }
    /// The address others reach this node at.
    pub fn addr(&self) -> SocketAddr { todo!() }
    /// The counters of this node.
    pub fn metrics(&self) -> &Arc<Metrics> { todo!() }

    /// Makes `endpoint` reachable, and known under its name. The name is public as soon as this returns.
    ///
    /// # Errors
    /// `NameTaken`, `InvalidName`, `ShutDown`.
    pub fn register(&self, id: ActorId, spec: ActorSpec, endpoint: Arc<dyn Endpoint>) -> Result<()> { todo!() }
    /// Takes an actor off this node; its name disappears from the cluster. False if it was not there.
    pub fn unregister(&self, id: ActorId) -> bool { todo!() }
    /// Replaces the metadata published with an actor's name.
    pub fn set_metadata(&self, id: ActorId, metadata: BTreeMap<String, String>) -> bool { todo!() }

    /// Instances of a name, of nodes not known to be down. Never waits.
    pub fn instances(&self, name: &str) -> Vec<Instance> { todo!() }
    /// Every published instance by name, of nodes not known to be down.
    pub fn names(&self) -> BTreeMap<String, Vec<Instance>> { todo!() }
    /// Members of the cluster, this node included.
    pub fn members(&self) -> Vec<Member> { todo!() }
    /// A number that changes whenever `instances`, `names` or `members` may answer differently.
    pub fn changes(&self) -> watch::Receiver<u64> { todo!() }
    /// One instance of `name`, waiting up to `timeout` for it to appear (R10). Among several: round robin, local or not.
    ///
    /// # Errors
    /// `NameNotFound`.
    pub async fn resolve(&self, name: &str, node: Option<NodeId>, timeout: Duration) -> Result<Instance> { todo!() }

    /// Sends a call and returns at once. Every outcome, an unreachable node included, reaches `sink`; the deadline in
    /// `options` is kept here: it cancels the callee and ends the call with `Timeout`. A `Tell` sends its sink nothing but
    /// an early `Error`.
    pub fn dispatch(&self, target: Target, mode: Mode, payload: Payload, options: CallOptions, sink: Arc<dyn ReplySink>) -> CallHandle { todo!() }
    /// [`dispatch`](Self::dispatch) as a future. Dropping it cancels the callee.
    ///
    /// # Errors
    /// Whatever the call ended with.
    pub async fn call(&self, target: Target, payload: Payload, options: CallOptions) -> Result<Reply> { todo!() }
    /// Sends without a reply; returns once the message is on its way.
    ///
    /// # Errors
    /// `ShutDown`, `ActorNotFound` for a local target.
    pub fn tell(&self, target: Target, payload: Payload, options: CallOptions) -> Result<()> { todo!() }

    /// Leaves the cluster: names withdrawn, departure announced, links closed. Actors must be stopped before.
    pub async fn shutdown(&self) { todo!() }
}
