//! What the system delivers calls to.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Ending, Target};
use crate::call::Call;
use crate::net::loan::Reader;

/// Takes the calls for one actor. Rust actors sit behind a mailbox task, Python actors behind their loop's queue.
pub trait Endpoint: Send + Sync + 'static {
    /// Takes a call. Called on network threads: must not block, and never attaches to an interpreter.
    fn deliver(&self, call: Call);
    /// Tells the actor to end; it passes what waits (R4). The actor calls [`System::unregister`](crate::System::unregister)
    /// when it has ended. Must not block either.
    fn end(&self, ending: Ending);
    /// The actor's name has gone to another claimant, and the actor is to stop: see [`ActorSpec::unique`]. Called once, after
    /// the name was withdrawn; must not block.
    fn displaced(&self, _loss: &Displaced) {}
    /// The event loop that its calls go to, if it can read for the network.
    fn reader(&self) -> Option<Arc<dyn Reader>> {
        None
    }
}

/// How an actor lost its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Displaced {
    /// The name.
    pub name: String,
    /// Who lost it.
    pub loser: Target,
    /// Who holds it.
    pub winner: Target,
    /// Where the winner's node listens, `ip:port`; empty when it has just left.
    pub addr: String,
}

impl std::fmt::Display for Displaced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, loser, winner, addr } = self;
        let (loser, node, winner) = (loser.actor, winner.node, winner.actor);
        write!(f, "actor {loser} lost name {name:?} to the older claim of actor {winner} on node {node} ({addr})")
    }
}

/// How an actor is known.
#[derive(Clone, Debug, Default)]
pub struct ActorSpec {
    /// Its name; `None` = reachable by id only.
    pub name: Option<String>,
    /// Publish the name to the cluster.
    pub public: bool,
    /// Class or type, for observers (`module.Class` in Python).
    pub class: String,
    /// Published with the name; 1 KB in all (R10). Usual keys: kind, model, role, protocol, state.
    pub metadata: BTreeMap<String, String>,
    /// Hidden from default listings.
    pub internal: bool,
    /// The name is for this instance alone in the whole cluster (R10). It has to be public. Of claims made at once on several
    /// nodes, or while they were parted, the oldest wins; the others are told through [`Endpoint::displaced`].
    pub unique: bool,
}
