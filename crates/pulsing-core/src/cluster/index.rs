//! Which instances serve under which name, which names are contested, and whose changes are waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::instances::{Id, Instances};
use super::touched::Touched;

/// The names of a registry.
#[derive(Default)]
pub(super) struct Index {
    names: BTreeMap<String, Instances>,
    /// Names that cannot be all their instances'.
    contested: BTreeSet<String>,
    /// Names that somebody here waits for changes of, and what changed of them since that was taken.
    watched: BTreeSet<String>,
    touched: BTreeMap<String, Touched>,
}

impl Index {
    pub(super) fn insert(&mut self, name: &str, id: Id, unique: bool) {
        if let Some(held) = self.names.get_mut(name) {
            held.insert(id, unique);
        } else {
            self.names.entry(name.to_owned()).or_default().insert(id, unique);
        }
        self.note(name, id);
    }

    pub(super) fn remove(&mut self, name: &str, id: Id, unique: bool) {
        let Some(held) = self.names.get_mut(name) else { return };
        if held.remove(id, unique) {
            if held.len() == 0 {
                self.names.remove(name);
            }
            self.note(name, id);
        }
    }

    /// Notes a change of a name, and whether it is contested.
    fn note(&mut self, name: &str, id: Id) {
        let before = self.contested.contains(name);
        let after = self.names.get(name).is_some_and(Instances::is_contested);
        if after && !before {
            self.contested.insert(name.to_owned());
        } else if before && !after {
            self.contested.remove(name);
        }
        if self.watched.contains(name) {
            // Where claims are weighed one change decides about the others, too.
            let what = if before || after { Touched::All } else { Touched::one(id) };
            self.touched.entry(name.to_owned()).or_default().add(&what);
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&Instances> {
        self.names.get(name)
    }

    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Instances> {
        self.names.get_mut(name)
    }

    pub(super) fn is_contested(&self, name: &str) -> bool {
        self.contested.contains(name)
    }

    pub(super) fn contested(&self) -> impl Iterator<Item = &String> {
        self.contested.iter()
    }

    /// In their order; those after one of them, or all.
    pub(super) fn after(&self, name: Option<&String>) -> impl Iterator<Item = &String> {
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        self.names.range::<String, _>((from, Bound::Unbounded)).map(|(name, _)| name)
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn watch(&mut self, name: &str, on: bool) {
        if on {
            self.watched.insert(name.to_owned());
        } else {
            self.watched.remove(name);
            self.touched.remove(name);
        }
    }

    pub(super) fn take_touched(&mut self) -> BTreeMap<String, Touched> {
        std::mem::take(&mut self.touched)
    }
}
