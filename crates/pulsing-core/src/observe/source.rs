//! What the endpoints are answered from.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::{Events, Metrics};
use crate::id::{ActorId, NodeId};
use crate::system::{Instance, Member};

/// Where a node is in its life; `/ready` answers 200 for [`Ready`](Self::Ready) only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Waits for its seeds.
    Joining,
    /// Member of its cluster.
    Ready,
    /// Finishes what it has begun before it leaves.
    Draining,
    /// Announced its departure.
    Leaving,
}

impl Readiness {
    /// The word in the body of `/ready`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Draining | Self::Leaving => "leaving",
        }
    }
}

/// A node's own particulars.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// Its id.
    pub node: NodeId,
    /// The address others reach it at.
    pub addr: SocketAddr,
    /// Time since its start.
    pub uptime: Duration,
    /// Where it is in its life.
    pub readiness: Readiness,
}

/// An actor that lives on the node that answers.
#[derive(Clone, Debug)]
pub struct LocalActor {
    /// Its name; `None` = reachable by id only.
    pub name: Option<String>,
    /// Its id.
    pub id: ActorId,
    /// Class or type.
    pub class: String,
    /// Published to the cluster.
    pub public: bool,
    /// Hidden from default listings.
    pub internal: bool,
    /// Published metadata.
    pub metadata: BTreeMap<String, String>,
}

/// Answers for one node. Called on network threads for every request: must not block.
pub trait ObserveSource: Send + Sync + 'static {
    /// The node's own particulars.
    fn status(&self) -> NodeStatus;
    /// Members of the cluster, this node included.
    fn members(&self) -> Vec<Member>;
    /// Actors of this node, public or not.
    fn local_actors(&self) -> Vec<LocalActor>;
    /// Every published instance by name, of nodes not known to be down.
    fn names(&self) -> BTreeMap<String, Vec<Instance>>;
    /// How many names and how many instances the registry holds.
    fn registry_size(&self) -> (usize, usize) {
        let names = self.names();
        (names.len(), names.values().map(Vec::len).sum())
    }
    /// What happens on this node, and to the members that it knows.
    fn events(&self) -> &Events;
    /// The counters of this node.
    fn metrics(&self) -> Arc<Metrics>;
}
