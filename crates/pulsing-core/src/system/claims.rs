//! One holder of a unique name, whoever claims it (R10).

use std::sync::Weak;
use std::time::Duration;

use super::driver::Input;
use super::node::Inner;
use super::{Displaced, Target};
use crate::cluster::Conflict;
use crate::error::{Error, Result};
use crate::id::NodeId;

/// How long a lost claim is told of, so that the winner's node hears it across repairs of the registry.
const CONCEDED: Duration = Duration::from_secs(10);

impl Inner {
    /// Refuses a claim on a name that another living node holds.
    ///
    /// # Errors
    /// `NameTaken` naming its holder.
    pub(super) fn check_vacant(&self, name: &str, unique: bool) -> Result<()> {
        let holder = self.registry.lock().holder(name, unique);
        match holder {
            Some((node, entry)) if node == self.id || self.is_member(node) => {
                Err(Error::NameTaken { name: name.to_owned(), actor: entry.actor, node })
            }
            _ => Ok(()),
        }
    }

    /// Ends what lost its name to another node, and tells what won one. Called after news of others' names.
    pub(super) fn settle_claims(&self) {
        let (conflicts, beaten) = {
            let mut registry = self.registry.lock();
            (registry.conflicts(), registry.take_beaten())
        };
        for Conflict { name, winner: (node, entry), losers } in conflicts {
            let winner = Target { node, actor: entry.actor };
            for (node, actor) in losers.into_iter().filter(|(node, _)| *node == self.id) {
                let loser = Target { node, actor };
                self.displace(Displaced { name: name.clone(), loser, winner, addr: self.addr_of(winner.node) });
            }
        }
        for (node, entry) in beaten {
            let winner = entry.lost_to.map(|winner| winner.to_string()).unwrap_or_default();
            tracing::warn!(
                name = %entry.name, winner, loser = %entry.actor, node = %node, addr = %self.addr_of(node),
                "a name was claimed on two nodes: the older claim, here, stands, and the other actor is stopped"
            );
            self.metrics.claims_won.inc();
        }
    }

    fn displace(&self, loss: Displaced) {
        let actor = loss.loser.actor;
        {
            let mut registry = self.registry.lock();
            if registry.concede(actor, loss.winner.actor).is_none() {
                return;
            }
            let _ = self.driver.send(Input::Publish);
        }
        self.metrics.claims_lost.inc();
        let myself = Weak::clone(&self.myself);
        tokio::spawn(async move {
            tokio::time::sleep(CONCEDED).await;
            if let Some(node) = myself.upgrade() {
                let mut registry = node.registry.lock();
                if registry.withdraw(actor).is_some() {
                    let _ = node.driver.send(Input::Publish);
                }
            }
        });
        let held = {
            let mut actors = self.actors.write();
            if actors.by_name.get(&loss.name) == Some(&actor) {
                actors.by_name.remove(&loss.name);
            }
            actors.by_id.get(&actor).cloned()
        };
        if let Some(held) = held {
            held.endpoint.displaced(&loss);
        }
        self.changed();
    }

    fn addr_of(&self, node: NodeId) -> String {
        self.living(node).map(|peer| peer.addr.to_string()).unwrap_or_default()
    }
}
