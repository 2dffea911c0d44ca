//! The instances of one name (R10): in a vector while they are few, in a tree when they are many.

use std::collections::BTreeSet;
use std::ops::Bound;

use crate::id::{ActorId, NodeId};

/// One instance, and the order of them.
pub(super) type Id = (NodeId, ActorId);

/// So many are kept in a vector. Most names have one instance, for which a tree would be ten times as large; each change of
/// a long vector moves what comes behind it.
const FEW: usize = 32;

enum Ids {
    /// Sorted.
    Few(Vec<Id>),
    Many(BTreeSet<Id>),
}

/// The instances of one name, sorted.
pub(super) struct Instances {
    ids: Ids,
    /// How many of them want the name for themselves.
    unique: usize,
    /// Whose turn it was last. Most names are never resolved.
    last: Option<Box<Id>>,
}

impl Default for Instances {
    fn default() -> Self {
        Self { ids: Ids::Few(Vec::new()), unique: 0, last: None }
    }
}

impl Instances {
    pub(super) fn insert(&mut self, id: Id, unique: bool) {
        let fresh = match &mut self.ids {
            Ids::Few(ids) => match ids.binary_search(&id) {
                Ok(_) => false,
                Err(place) => {
                    if ids.is_empty() {
                        // A vector's first growth is to four.
                        ids.reserve_exact(1);
                    }
                    ids.insert(place, id);
                    true
                }
            },
            Ids::Many(ids) => ids.insert(id),
        };
        self.unique += usize::from(fresh && unique);
        if let Ids::Few(ids) = &mut self.ids
            && ids.len() > FEW
        {
            self.ids = Ids::Many(std::mem::take(ids).into_iter().collect());
        }
    }

    /// False if it was not there. `unique` as it was inserted.
    pub(super) fn remove(&mut self, id: Id, unique: bool) -> bool {
        let there = match &mut self.ids {
            Ids::Few(ids) => ids.binary_search(&id).map(|place| ids.remove(place)).is_ok(),
            Ids::Many(ids) => ids.remove(&id),
        };
        self.unique -= usize::from(there && unique);
        // Half of what makes a tree: a number that goes up and down around it would be copied each time.
        if let Ids::Many(ids) = &mut self.ids
            && ids.len() <= FEW / 2
        {
            self.ids = Ids::Few(std::mem::take(ids).into_iter().collect());
        }
        there
    }

    pub(super) fn contains(&self, id: &Id) -> bool {
        match &self.ids {
            Ids::Few(ids) => ids.binary_search(id).is_ok(),
            Ids::Many(ids) => ids.contains(id),
        }
    }

    pub(super) fn len(&self) -> usize {
        match &self.ids {
            Ids::Few(ids) => ids.len(),
            Ids::Many(ids) => ids.len(),
        }
    }

    /// Whether some want the name for themselves.
    pub(super) fn is_unique(&self) -> bool {
        self.unique > 0
    }

    /// Whether it cannot be the name of them all.
    pub(super) fn is_contested(&self) -> bool {
        self.unique > 0 && self.len() > 1
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = Id> + '_ {
        self.range(Bound::Unbounded, Bound::Unbounded)
    }

    /// Those of one node.
    pub(super) fn of(&self, node: NodeId) -> impl Iterator<Item = Id> + '_ {
        self.range(Bound::Included((node, ActorId(0))), Bound::Included((node, ActorId(u128::MAX))))
    }

    /// The one whose turn it is, round and round; the first of all is the first after `begin`.
    pub(super) fn turn(&mut self, begin: NodeId) -> Option<Id> {
        let last = self.last.as_deref().copied().unwrap_or((begin, ActorId(u128::MAX)));
        let next = self.range(Bound::Excluded(last), Bound::Unbounded).next().or_else(|| self.iter().next())?;
        match &mut self.last {
            Some(last) => **last = next,
            None => self.last = Some(Box::new(next)),
        }
        Some(next)
    }

    fn range(&self, from: Bound<Id>, to: Bound<Id>) -> impl Iterator<Item = Id> + '_ {
        let (few, many) = match &self.ids {
            Ids::Few(ids) => {
                let begin = match from {
                    Bound::Unbounded => 0,
                    Bound::Included(id) => ids.partition_point(|one| *one < id),
                    Bound::Excluded(id) => ids.partition_point(|one| *one <= id),
                };
                let end = match to {
                    Bound::Unbounded => ids.len(),
                    Bound::Included(id) => ids.partition_point(|one| *one <= id),
                    Bound::Excluded(id) => ids.partition_point(|one| *one < id),
                };
                (ids.get(begin..end), None)
            }
            Ids::Many(ids) => (None, Some(ids.range((from, to)))),
        };
        few.into_iter().flatten().chain(many.into_iter().flatten()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(node: u128, actor: u128) -> Id {
        (NodeId(node), ActorId(actor))
    }

    #[test]
    fn r10_few_or_many_are_kept_alike() {
        let mut held = Instances::default();
        let mut model = BTreeSet::new();
        // Up and down through the number at which they are kept differently; an odd step visits every place.
        for (step, up) in (0..90u128).map(|n| (n, true)).chain((0..90).map(|n| (n, false))) {
            let one = id(step * 37 % 90 / 9, step * 37 % 90);
            if up {
                held.insert(one, step % 2 == 0);
                held.insert(one, step % 2 == 0);
                model.insert(one);
            } else {
                assert!(held.remove(one, step % 2 == 0));
                assert!(!held.remove(one, step % 2 == 0), "only once");
                model.remove(&one);
            }
            assert_eq!(held.iter().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            assert_eq!((held.len(), held.contains(&one)), (model.len(), up));
            let of = |node| model.iter().copied().filter(|one| one.0 == NodeId(node)).collect::<Vec<_>>();
            for node in [0, 5, 9, 10] {
                assert_eq!(held.of(NodeId(node)).collect::<Vec<_>>(), of(node), "of node {node}");
            }
            assert!(!matches!(&held.ids, Ids::Few(ids) if ids.len() > FEW), "a change moves no more than a few");
        }
        assert!(!held.is_unique() && matches!(held.ids, Ids::Few(_)), "what is small again is kept so");
    }

    #[test]
    fn r10_everyone_has_a_turn_before_anyone_has_a_second() {
        for count in [1, 3, FEW as u128 + 8] {
            let mut held = Instances::default();
            (0..count).for_each(|n| held.insert(id(n / 2, n), false));
            assert_eq!(
                held.turn(NodeId(0)),
                Some(id((2 % count) / 2, 2 % count)),
                "the first one after the node's own"
            );
            let rest = (1..count).filter_map(|_| held.turn(NodeId(0)));
            assert_eq!(rest.collect::<BTreeSet<_>>().len() as u128, count - 1);
            let before = held.turn(NodeId(0)).unwrap();
            held.remove(before, false);
            assert_ne!(held.turn(NodeId(0)), Some(before), "the turn goes on when its holder is gone");
        }
        assert_eq!(Instances::default().turn(NodeId(1)), None);
    }
}
