//! Which instances of a name may be others than they were.

use std::collections::BTreeSet;

use super::instances::Id;
use crate::id::NodeId;

/// So many instances are noted one by one. Whoever does not look for longer looks at all of them: what it has to remember
/// stays small, and the cost of a look is that of a few dozen instances a change even for names with tens of thousands.
const NOTED: usize = 1024;

/// Instances of one name that may be others than when they were last looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Touched {
    /// These, and all of these nodes.
    Some {
        /// Node and instance.
        ids: BTreeSet<Id>,
        /// Nodes that came, went, or changed their address.
        nodes: BTreeSet<NodeId>,
    },
    /// All of them.
    All,
}

impl Default for Touched {
    fn default() -> Self {
        Self::Some { ids: BTreeSet::new(), nodes: BTreeSet::new() }
    }
}

impl Touched {
    /// One instance.
    pub fn one(id: Id) -> Self {
        Self::Some { ids: BTreeSet::from([id]), nodes: BTreeSet::new() }
    }

    /// All instances of these nodes.
    pub fn of(nodes: BTreeSet<NodeId>) -> Self {
        Self::Some { ids: BTreeSet::new(), nodes }
    }

    /// Adds what `other` says.
    pub fn add(&mut self, other: &Self) {
        match (&mut *self, other) {
            (Self::All, _) => {}
            (_, Self::All) => *self = Self::All,
            (Self::Some { ids, nodes }, Self::Some { ids: more, nodes: others }) => {
                ids.extend(more);
                nodes.extend(others);
                if ids.len() + nodes.len() > NOTED {
                    *self = Self::All;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ActorId;

    #[test]
    fn m5_what_nobody_looks_at_takes_no_more_room_than_a_thousand_instances() {
        let mut touched = Touched::default();
        for n in 0..NOTED as u128 {
            touched.add(&Touched::one((NodeId(1), ActorId(n))));
        }
        assert!(matches!(&touched, Touched::Some { ids, .. } if ids.len() == NOTED));
        touched.add(&Touched::of(BTreeSet::from([NodeId(2)])));
        assert_eq!(touched, Touched::All);
        touched.add(&Touched::one((NodeId(1), ActorId(1))));
        assert_eq!(touched, Touched::All, "never less again");
    }
}
