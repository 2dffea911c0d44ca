//! Who holds a name that was claimed for one holder (R10).
//!
//! Two nodes may claim a name before they hear of each other, or while they are parted. Whoever sees both claims decides by
//! the entries alone, so that all come to the same end: the older claim stands, and of two claims of one millisecond that of
//! the smaller instance id. Where the oldest claim is unique it stands alone; where it is not, every unique one falls and all
//! others stand. Clocks of nodes differ: "older" is by the claimants' own clocks, which settles who wins, not who was first.

use super::registry::Entry;
use crate::id::{ActorId, NodeId};

/// Claims on one name that cannot all stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The name.
    pub name: String,
    /// The oldest claim, which stands.
    pub winner: (NodeId, Entry),
    /// Claims that fall.
    pub losers: Vec<(NodeId, ActorId)>,
}

type Instances = Vec<(NodeId, Entry)>;

/// Parts the instances of one name into those that stand and those that fall; the oldest is the first that stands.
pub(super) fn judge(mut instances: Instances) -> (Instances, Instances) {
    let Some(oldest) = instances.iter().map(|(_, entry)| (entry.claimed, entry.actor)).min() else {
        return (instances, Vec::new());
    };
    let alone = instances.iter().any(|(_, entry)| (entry.claimed, entry.actor) == oldest && entry.unique);
    instances.sort_by_key(|(_, entry)| (entry.claimed, entry.actor) != oldest);
    let stands = |entry: &Entry| if alone { (entry.claimed, entry.actor) == oldest } else { !entry.unique };
    instances.into_iter().partition(|(_, entry)| stands(entry))
}
