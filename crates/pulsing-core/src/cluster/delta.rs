//! How registry changes travel. These messages are wire-stable: tags are never reused, golden bytes stand in the tests.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;

use crate::error::{Error, Result};
use crate::id::{ActorId, NodeId};

/// Changes of one owner: everything that still matters of the versions after `from` up to and including `to`.
#[derive(Clone, PartialEq, Message)]
pub struct Delta {
    /// The node that wrote the entries: 16 bytes. See [`owner`](Self::owner).
    #[prost(bytes = "vec", tag = "1")]
    pub owner: Vec<u8>,
    /// Applies to a replica that holds at least this version.
    #[prost(uint64, tag = "2")]
    pub from: u64,
    /// The version a replica holds afterwards.
    #[prost(uint64, tag = "3")]
    pub to: u64,
    /// The whole state at `to`, for a replica older than the history that the sender still holds: what is not listed
    /// does not exist.
    #[prost(bool, tag = "4")]
    pub full: bool,
    /// Entries written.
    #[prost(message, repeated, tag = "5")]
    pub puts: Vec<Put>,
    /// Entries withdrawn; empty in a full delta.
    #[prost(message, repeated, tag = "6")]
    pub gone: Vec<Gone>,
    /// Not 0: a part of a shipment, which makes a replica hold this version once a part has `to` reach it.
    #[prost(uint64, tag = "7")]
    pub until: u64,
    /// Which shipment it is a part of.
    #[prost(fixed64, tag = "8")]
    pub shipment: u64,
    /// The shipment tells of withdrawals after this version; who is older must have had it from its first part on.
    #[prost(uint64, tag = "9")]
    pub base: u64,
}

/// One entry as of one version.
#[derive(Clone, PartialEq, Message)]
pub struct Put {
    /// Version at which it was written.
    #[prost(uint64, tag = "1")]
    pub version: u64,
    /// Instance id, 16 bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub actor: Vec<u8>,
    /// The name it serves under.
    #[prost(string, tag = "3")]
    pub name: String,
    /// Class or type.
    #[prost(string, tag = "4")]
    pub class: String,
    /// Published metadata.
    #[prost(btree_map = "string, string", tag = "5")]
    pub metadata: BTreeMap<String, String>,
    /// The name is for this instance alone.
    #[prost(bool, tag = "6")]
    pub unique: bool,
    /// When the name was claimed, in milliseconds since 1970.
    #[prost(uint64, tag = "7")]
    pub claimed: u64,
    /// The instance that the name was lost to, 16 bytes; usually empty.
    #[prost(bytes = "vec", tag = "8")]
    pub lost_to: Vec<u8>,
}

/// A tombstone.
#[derive(Clone, PartialEq, Message)]
pub struct Gone {
    /// Version at which the entry was withdrawn.
    #[prost(uint64, tag = "1")]
    pub version: u64,
    /// Instance id, 16 bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub actor: Vec<u8>,
}

/// What a node holds: the version of each owner it knows.
#[derive(Clone, PartialEq, Message)]
pub struct Digest {
    /// Sorted by node.
    #[prost(message, repeated, tag = "1")]
    pub owners: Vec<OwnerVersion>,
    /// Not 0: about owners of these [`bucket`]s only, a bit each.
    #[prost(fixed64, tag = "2")]
    pub buckets: u64,
    /// Not empty: about this owner only, 16 bytes.
    #[prost(bytes = "vec", tag = "3")]
    pub only: Vec<u8>,
}

/// Which of 64 buckets an owner is in: the last six bits of its id.
pub(super) fn bucket(node: NodeId) -> u32 {
    (node.0 % 64) as u32
}

/// One line of a [`Digest`].
#[derive(Clone, PartialEq, Message)]
pub struct OwnerVersion {
    /// The owner, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub node: Vec<u8>,
    /// Highest version held of it.
    #[prost(uint64, tag = "2")]
    pub version: u64,
}

impl Delta {
    /// Whose entries these are.
    ///
    /// # Errors
    /// [`Error::Protocol`] unless the field has 16 bytes.
    pub fn owner(&self) -> Result<NodeId> {
        NodeId::from_bytes(&self.owner)
    }

    /// The protobuf bytes.
    pub fn encode(&self) -> Bytes {
        Bytes::from(self.encode_to_vec())
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the bytes are no such message, an id has another length than 16, or a version lies outside
    /// of the delta's own span.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let delta = <Self as Message>::decode(bytes)
            .map_err(|cause| Error::Protocol(format!("registry delta cannot be read: {cause}")))?;
        delta.check()?;
        Ok(delta)
    }

    /// The rules of [`decode`](Self::decode), for a delta that came inside another message.
    pub(crate) fn check(&self) -> Result<()> {
        self.owner()?;
        let floor = if self.full { 0 } else { self.from };
        if self.to < self.from || (self.full && !self.gone.is_empty()) || (self.until > 0 && self.until < self.to) {
            return Err(Error::Protocol(format!(
                "registry delta from version {} to {} makes no sense (full: {}, tombstones: {}, until: {})",
                self.from,
                self.to,
                self.full,
                self.gone.len(),
                self.until
            )));
        }
        let versions = self.puts.iter().map(|put| (put.version, &put.actor));
        for (version, actor) in versions.chain(self.gone.iter().map(|gone| (gone.version, &gone.actor))) {
            ActorId::from_bytes(actor)?;
            if version <= floor || version > self.to {
                return Err(Error::Protocol(format!(
                    "registry change of version {version} outside of its delta ({floor}, {}]",
                    self.to
                )));
            }
        }
        Ok(())
    }
}

impl Digest {
    /// The protobuf bytes.
    pub fn encode(&self) -> Bytes {
        Bytes::from(self.encode_to_vec())
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the bytes are no such message or an id has another length than 16.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let digest = <Self as Message>::decode(bytes)
            .map_err(|cause| Error::Protocol(format!("registry digest cannot be read: {cause}")))?;
        for line in &digest.owners {
            NodeId::from_bytes(&line.node)?;
        }
        Ok(digest)
    }

    /// Whether the digest tells of this owner, if only by leaving it out.
    pub fn covers(&self, node: NodeId) -> bool {
        let only = self.only.is_empty() || self.only == node.to_bytes();
        only && (self.buckets == 0 || self.buckets >> bucket(node) & 1 == 1)
    }

    /// Versions by owner; lines that cannot be read are left out.
    pub(crate) fn versions(&self) -> BTreeMap<NodeId, u64> {
        self.owners.iter().filter_map(|line| Some((NodeId::from_bytes(&line.node).ok()?, line.version))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Delta {
        Delta {
            owner: NodeId(1).to_bytes().to_vec(),
            from: 1,
            to: 3,
            full: false,
            puts: vec![Put {
                version: 2,
                actor: ActorId(2).to_bytes().to_vec(),
                name: "a".to_owned(),
                class: "b".to_owned(),
                metadata: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
                unique: true,
                claimed: 300,
                lost_to: ActorId(4).to_bytes().to_vec(),
            }],
            gone: vec![Gone { version: 3, actor: ActorId(3).to_bytes().to_vec() }],
            until: 5,
            shipment: 9,
            base: 1,
        }
    }

    #[test]
    fn golden_delta() {
        let id = |n: u8| [&[0u8; 15][..], &[n]].concat();
        let golden: Vec<u8> = [
            &[0x0a, 16][..],
            &id(1),
            &[0x10, 1, 0x18, 3],
            &[0x2a, 57, 0x08, 2, 0x12, 16],
            &id(2),
            &[0x1a, 1, b'a', 0x22, 1, b'b', 0x2a, 6, 0x0a, 1, b'k', 0x12, 1, b'v'],
            &[0x30, 1, 0x38, 0xac, 2, 0x42, 16],
            &id(4),
            &[0x32, 20, 0x08, 3, 0x12, 16],
            &id(3),
            &[0x38, 5, 0x41, 9, 0, 0, 0, 0, 0, 0, 0, 0x48, 1],
        ]
        .concat();
        assert_eq!(sample().encode(), golden);
        assert_eq!(Delta::decode(&golden).unwrap(), sample());
    }

    #[test]
    fn golden_digest() {
        let line = OwnerVersion { node: NodeId(5).to_bytes().to_vec(), version: 300 };
        let digest = Digest { owners: vec![line.clone()], ..Digest::default() };
        let golden: Vec<u8> = [&[0x0a, 21, 0x0a, 16][..], &[0; 15], &[5, 0x10, 0xac, 2]].concat();
        assert_eq!(digest.encode(), golden);
        assert_eq!(Digest::decode(&golden).unwrap(), digest);
        let digest = Digest { owners: vec![line], buckets: 0x21, only: vec![0, 7] };
        let golden = [&golden[..], &[0x11, 0x21, 0, 0, 0, 0, 0, 0, 0, 0x1a, 2, 0, 7]].concat();
        assert_eq!(digest.encode(), golden);
        assert_eq!(Digest::decode(&golden).unwrap(), digest);
    }

    #[test]
    fn fields_of_a_later_version_are_skipped() {
        // Tag 100, length-delimited, as a version to come may add it.
        let later = |bytes: Bytes| [&bytes[..], &[0xa2, 0x06, 2, 1, 2]].concat();
        assert_eq!(Delta::decode(&later(sample().encode())).unwrap(), sample());
        assert_eq!(Digest::decode(&later(Digest::default().encode())).unwrap(), Digest::default());
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        let owner = Delta { owner: vec![1], ..sample() };
        let backwards = Delta { from: 9, ..sample() };
        let beyond = Delta { to: 2, ..sample() };
        let past_its_end = Delta { until: 2, ..sample() };
        let full_with_tombstones = Delta { full: true, ..sample() };
        let mut actor = sample();
        actor.puts[0].actor.pop();
        for bad in [owner, backwards, beyond, past_its_end, full_with_tombstones, actor] {
            assert!(matches!(Delta::decode(&bad.encode()), Err(Error::Protocol(_))), "{bad:?}");
        }
        assert!(Delta::decode(&[0xff]).is_err());
        assert!(Digest::decode(&[0x0a, 2, 0x0a, 0]).is_err(), "an empty node id");
    }
}
