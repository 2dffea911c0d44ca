//! Who a member is.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::id::NodeId;

/// First byte of [`Identity::encode`].
const VERSION: u8 = 1;

/// One run of one process at one address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Identity {
    /// The run: a restarted process has a new one.
    #[serde(with = "node_bytes")]
    pub node: NodeId,
    /// Where it listens.
    pub addr: SocketAddr,
    /// Which of two identities at one address is the newer: starts at the unix milliseconds of the process start, so
    /// that a restarted process wins over its former self at once (M4), and grows by one with each renewal.
    pub epoch: u64,
}

impl Identity {
    /// An identity that compares equal to its decoded form: the scope and flow label of an IPv6 address mean nothing
    /// on another host and are dropped.
    pub fn new(node: NodeId, addr: SocketAddr, epoch: u64) -> Self {
        Self { node, addr: SocketAddr::new(addr.ip(), addr.port()), epoch }
    }

    /// Stable bytes: version 1, node (16), family (4 or 6), address (4 or 16), port and epoch in network order.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(44);
        out.push(VERSION);
        out.extend_from_slice(&self.node.to_bytes());
        match self.addr.ip() {
            IpAddr::V4(ip) => {
                out.push(4);
                out.extend_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                out.push(6);
                out.extend_from_slice(&ip.octets());
            }
        }
        out.extend_from_slice(&self.addr.port().to_be_bytes());
        out.extend_from_slice(&self.epoch.to_be_bytes());
        out
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`Error::Protocol`] for another version, another address family, or another length.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader(bytes);
        let [version] = reader.take()?;
        if version != VERSION {
            return Err(Error::Protocol(format!("identity of version {version}, this node reads {VERSION}")));
        }
        let node = NodeId(u128::from_be_bytes(reader.take()?));
        let [family] = reader.take()?;
        let ip = match family {
            4 => IpAddr::V4(Ipv4Addr::from(reader.take::<4>()?)),
            6 => IpAddr::V6(Ipv6Addr::from(reader.take::<16>()?)),
            other => return Err(Error::Protocol(format!("identity with address family {other}, expected 4 or 6"))),
        };
        let port = u16::from_be_bytes(reader.take()?);
        let epoch = u64::from_be_bytes(reader.take()?);
        if !reader.0.is_empty() {
            return Err(Error::Protocol(format!("identity with {} bytes too many", reader.0.len())));
        }
        Ok(Self { node, addr: SocketAddr::new(ip, port), epoch })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.node, self.addr)
    }
}

impl foca::Identity for Identity {
    type Addr = SocketAddr;

    fn renew(&self) -> Option<Self> {
        Some(Self { epoch: self.epoch.checked_add(1)?, ..*self })
    }

    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        (self.epoch, self.node) > (adversary.epoch, adversary.node)
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or_else(|| Error::Protocol(format!("identity cut short: {} more bytes, need {N}", self.0.len())))?;
        self.0 = rest;
        Ok(*head)
    }
}

/// Sixteen plain bytes: a variable-length u128 would take up to nineteen.
mod node_bytes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::id::NodeId;

    pub(super) fn serialize<S: Serializer>(node: &NodeId, serializer: S) -> Result<S::Ok, S::Error> {
        node.to_bytes().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<NodeId, D::Error> {
        <[u8; 16]>::deserialize(deserializer).map(|raw| NodeId(u128::from_be_bytes(raw)))
    }
}

#[cfg(test)]
mod tests {
    use foca::Identity as _;

    use super::*;

    fn sample() -> Identity {
        Identity::new(NodeId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10), "192.0.2.7:8000".parse().unwrap(), 0x0a0b)
    }

    #[test]
    fn golden_bytes() {
        let golden: Vec<u8> = [
            &[1][..],
            &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
            &[4, 192, 0, 2, 7, 0x1f, 0x40],
            &[0, 0, 0, 0, 0, 0, 0x0a, 0x0b],
        ]
        .concat();
        assert_eq!(sample().encode(), golden);
        assert_eq!(Identity::decode(&golden).unwrap(), sample());
    }

    #[test]
    fn ipv6_round_trips_without_scope() {
        let addr = SocketAddr::V6(std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 9, 5, 7));
        let identity = Identity::new(NodeId(1), addr, 3);
        assert_eq!(Identity::decode(&identity.encode()).unwrap(), identity);
    }

    #[test]
    fn refuses_other_versions_families_and_lengths() {
        let good = sample().encode();
        let mut version = good.clone();
        version[0] = 2;
        let mut family = good.clone();
        family[17] = 5;
        let mut long = good.clone();
        long.push(0);
        for bad in [&version[..], &family, &long, &good[..good.len() - 1], &[]] {
            assert!(matches!(Identity::decode(bad), Err(Error::Protocol(_))), "{bad:?}");
        }
    }

    #[test]
    fn the_newer_run_wins_an_address() {
        let old = sample();
        let renewed = old.renew().unwrap();
        assert!(renewed.win_addr_conflict(&old) && !old.win_addr_conflict(&renewed));
        let restarted = Identity::new(NodeId(1), old.addr, old.epoch + 5000);
        assert!(restarted.win_addr_conflict(&renewed));
    }
}
