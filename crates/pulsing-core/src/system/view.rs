//! What a node knows of others.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::id::{ActorId, NodeId};

/// One actor on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// Where it lives.
    pub node: NodeId,
    /// Which one.
    pub actor: ActorId,
}

/// One published instance of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The name it serves under.
    pub name: String,
    /// Where it lives and which one it is.
    pub target: Target,
    /// Its node's address, `ip:port`.
    pub addr: String,
    /// Class or type.
    pub class: String,
    /// Published metadata (kind, model, role, protocol, state).
    pub metadata: BTreeMap<String, String>,
    /// The name is for this instance alone.
    pub unique: bool,
}

/// How a member is seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// Answers probes.
    Alive,
    /// Missed a probe; may still refute.
    Suspect,
    /// Declared down, or its process was replaced.
    Down,
    /// Announced that it leaves.
    Left,
}

impl fmt::Display for MemberState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alive => "alive",
            Self::Suspect => "suspect",
            Self::Down => "down",
            Self::Left => "left",
        })
    }
}

/// One node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its id.
    pub node: NodeId,
    /// Its address, `ip:port`.
    pub addr: String,
    /// How it is seen from here.
    pub state: MemberState,
    /// True for the node that answers.
    pub me: bool,
}
