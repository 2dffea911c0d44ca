//! What the system delivers calls to.

use std::collections::BTreeMap;

use crate::call::Call;

/// Takes the calls for one actor. Rust actors sit behind a mailbox task, Python actors behind their loop's queue.
pub trait Endpoint: Send + Sync + 'static {
    /// Takes a call. Called on network threads: must not block, and never attaches to an interpreter.
    fn deliver(&self, call: Call);
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
}
