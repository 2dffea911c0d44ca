//! Links: when one actor ends abnormally, the other is stopped (R9).
//!
//! Each of the two nodes watches the other's actor for its own, so that a link outlives whoever asked for it.

use std::sync::Arc;

use super::node::{Inner, System};
use super::service::Ask;
use super::{Ending, Target, Terminated};
use crate::error::{Error, Result};
use crate::id::ActorId;

impl System {
    /// Links two actors, wherever they live: when one fails, is killed or its node is lost, the other is stopped and counts
    /// as failed. A stop that was meant does not pass along. Linking twice changes nothing.
    ///
    /// # Errors
    /// `ActorNotFound` when one of them has ended, or why its node could not be asked; then there is no link.
    pub async fn link(&self, a: Target, b: Target) -> Result<()> {
        if a == b {
            return Err(Error::Config(format!("actor {} cannot be linked to itself", a.actor)));
        }
        self.link_one(a, b).await?;
        if let Err(error) = self.link_one(b, a).await {
            let _ = self.ask_node(a.node, &Ask::Unlink(a.actor, b)).await;
            return Err(error);
        }
        Ok(())
    }

    async fn link_one(&self, actor: Target, peer: Target) -> Result<()> {
        match self.ask_node(actor.node, &Ask::Link(actor.actor, peer)).await? {
            None => Ok(()),
            Some(_) => Err(Error::ActorNotFound { actor: actor.actor, node: actor.node }),
        }
    }

    /// Undoes [`link`](Self::link); nothing happens when there is none.
    ///
    /// # Errors
    /// Why a node could not be asked.
    pub async fn unlink(&self, a: Target, b: Target) -> Result<()> {
        let first = self.ask_node(a.node, &Ask::Unlink(a.actor, b)).await;
        self.ask_node(b.node, &Ask::Unlink(b.actor, a)).await?;
        first.map(drop)
    }
}

impl Inner {
    /// Ends `actor` when `peer` ends abnormally; false if `actor` is not here.
    pub(super) fn link_here(self: &Arc<Self>, actor: ActorId, peer: Target) -> bool {
        let node = Arc::downgrade(self);
        let hook = move |ended: Result<Terminated>| {
            let (Some(node), Ok(ended)) = (node.upgrade(), ended) else { return };
            node.unlink_here(actor, peer);
            if ended.reason.is_abnormal() {
                let error = format!("linked actor {} on node {}: {}", peer.actor, peer.node, ended.reason);
                node.end_here(actor, Ending::Fail { error });
            }
        };
        {
            let state = self.watching.state.lock();
            if !self.actors.read().by_id.contains_key(&actor) {
                return false;
            }
            if state.links.get(&actor).is_some_and(|peers| peers.contains_key(&peer)) {
                return true;
            }
        }
        let guard = System(Arc::clone(self)).on_end(peer, hook);
        let unwanted = {
            let mut state = self.watching.state.lock();
            if self.actors.read().by_id.contains_key(&actor) {
                state.links.entry(actor).or_default().insert(peer, guard)
            } else {
                Some(guard)
            }
        };
        drop(unwanted);
        true
    }

    pub(super) fn unlink_here(&self, actor: ActorId, peer: Target) {
        let guard = {
            let mut state = self.watching.state.lock();
            let Some(peers) = state.links.get_mut(&actor) else { return };
            let guard = peers.remove(&peer);
            if peers.is_empty() {
                state.links.remove(&actor);
            }
            guard
        };
        drop(guard);
    }
}
