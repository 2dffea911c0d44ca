//! What one replica lacks and another holds: roots that differ, digests that say where, shipments of the rest (M5).

use super::Registry;
use super::delta::{Delta, Digest, OwnerVersion, bucket};
use super::owner::{Cursor, Owner, Shipment, fingerprint};
use crate::id::NodeId;

/// Owners up to which a whole digest is sent where roots differ, 30 bytes each.
const DIGEST_WHOLE: usize = 64;

impl Registry {
    /// A fingerprint of what is held, equal on two nodes exactly if their digests are (but for a chance of 2^-64).
    pub fn root(&self) -> u64 {
        fingerprint(self.known())
    }

    /// The [`root`](Self::root) and, where a digest is long, a fingerprint of each of 64 buckets of owners: nodes that differ
    /// exchange digests of the buckets that do.
    pub fn roots(&self) -> (u64, Vec<u64>) {
        if self.owners.len() <= DIGEST_WHOLE {
            return (self.root(), Vec::new());
        }
        let of = |index| fingerprint(self.known().filter(|(node, _)| bucket(**node) == index));
        (self.root(), (0..64).map(of).collect())
    }

    /// This node's digest as far as it may differ from that of whoever has these [`roots`](Self::roots); `None` if nowhere.
    pub fn differing(&self, root: u64, buckets: &[u64]) -> Option<Digest> {
        if root == self.root() {
            return None;
        }
        if buckets.len() != 64 {
            return Some(self.digest());
        }
        let mut own = [(); 64].map(|()| Vec::new());
        for line in self.known() {
            own[bucket(*line.0) as usize].push(line);
        }
        let differ = |index: &usize| fingerprint(own[*index].iter().copied()) != buckets[*index];
        let scope = (0..64).filter(differ).fold(0, |mask, index| mask | 1u64 << index);
        Some(self.digest_like(&Digest { buckets: scope, ..Digest::default() }))
    }

    /// The version held of each owner.
    pub fn digest(&self) -> Digest {
        self.digest_like(&Digest::default())
    }

    /// The version held of one owner: asks for its entries and no others.
    pub fn digest_of(&self, node: NodeId) -> Digest {
        self.digest_like(&Digest { only: node.to_bytes().to_vec(), ..Digest::default() })
    }

    /// The version held of each owner that `other` is about.
    pub fn digest_like(&self, other: &Digest) -> Digest {
        let line =
            |(node, owner): (&NodeId, &Owner)| OwnerVersion { node: node.to_bytes().to_vec(), version: owner.version };
        let owners = self.known().filter(|(node, _)| other.covers(**node)).map(line).collect();
        Digest { owners, buckets: other.buckets, only: other.only.clone() }
    }

    /// What the sender of `digest` lacks and this node holds: for [`next_part`](Self::next_part), which may be asked for as
    /// long as it takes. `id`: a number that no other shipment to that node has.
    pub fn shipment(&self, digest: &Digest, id: u64) -> Shipment {
        let theirs = digest.versions();
        let lacks = |(node, owner): (&NodeId, &Owner)| {
            let have = theirs.get(node).copied().unwrap_or(0);
            (have < owner.version && digest.covers(*node)).then(|| Cursor::new(*node, id, have))
        };
        Shipment(self.owners.iter().filter_map(lacks).collect())
    }

    /// What was written here after `version`, as a shipment.
    pub fn written_after(&self, version: u64, id: u64) -> Shipment {
        Shipment([Cursor::new(self.me, id, version)].into())
    }

    /// The last version written here.
    pub fn version(&self) -> u64 {
        self.owners.get(&self.me).map_or(0, |mine| mine.version)
    }

    /// The next part of a shipment, of about `limit` bytes at most; `None` at its end. Parts must arrive in order.
    pub fn next_part(&self, shipment: &mut Shipment, limit: usize) -> Option<Delta> {
        while let Some(cursor) = shipment.0.front_mut() {
            let part = self.owners.get(&cursor.node).and_then(|owner| owner.part(cursor, limit));
            match part {
                Some((delta, more)) => {
                    if !more {
                        shipment.0.pop_front();
                    }
                    return Some(delta);
                }
                None => drop(shipment.0.pop_front()),
            }
        }
        None
    }

    /// What the sender of `digest` lacks and this node holds, one delta an owner.
    pub fn missing(&self, digest: &Digest) -> Vec<Delta> {
        let mut shipment = self.shipment(digest, 0);
        std::iter::from_fn(|| self.next_part(&mut shipment, usize::MAX)).collect()
    }

    /// Whether the sender of `digest` holds something that this node lacks: then send it this node's own digest.
    pub fn behind(&self, digest: &Digest) -> bool {
        digest.versions().into_iter().any(|(node, version)| {
            self.members.contains(&node) && self.owners.get(&node).map_or(0, |owner| owner.version) < version
        })
    }

    /// Owners of whom a delta came whose predecessor is missing: send one of them, or anyone, this node's digest.
    pub fn gaps(&self) -> Vec<NodeId> {
        self.owners.iter().filter(|(_, owner)| owner.has_gap()).map(|(node, _)| *node).collect()
    }

    /// Whether a delta of this owner came whose predecessor is missing.
    pub fn has_gap(&self, node: NodeId) -> bool {
        self.owners.get(&node).is_some_and(Owner::has_gap)
    }

    fn known(&self) -> impl Iterator<Item = (&NodeId, &Owner)> + Clone {
        self.owners.iter().filter(|(_, owner)| owner.version > 0)
    }
}
