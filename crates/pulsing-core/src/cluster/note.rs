//! What members say to each other beside SWIM's own messages.
//!
//! A datagram begins with one byte: [`SWIM`], then foca's packet, or [`NOTE`], then a protobuf [`Wire`].

use bytes::Bytes;
use prost::Message;

use super::identity::Identity;
use crate::error::Error;

/// First byte of a datagram that carries foca's packet.
pub(crate) const SWIM: u8 = 1;
/// First byte of a datagram that carries a note.
pub(crate) const NOTE: u8 = 2;

/// A note and who wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub from: Identity,
    pub body: Body,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// Are you there? The answer goes to `origin`, directly or through the sender. `suspected` is the incarnation at
    /// which the sender suspects the receiver: a chance to refute at once.
    Ping { to: Identity, origin: Identity, suspected: Option<u16> },
    /// Answer to a ping asked for by `origin`.
    Pong { origin: Identity },
    /// Please ping `target` for me, and tell it if I suspect it, and at which incarnation.
    PingFor { target: Identity, suspected: Option<u16> },
    /// `target` answered the ping that you asked for.
    Answered { target: Identity },
    /// `target` did not answer the ping that you asked for.
    Silent { target: Identity },
    /// My dial of `target` was refused: nothing listens there.
    Refused { target: Identity },
    /// I leave the cluster.
    Leave,
    /// I hold `who`, which is you, for down.
    YouAreDown { who: Identity },
    /// At your address I know `holder`, which counts as newer than you although you are the one who talks: your clock
    /// was set back. Outbid it.
    Outbid { holder: Identity },
    /// Two living processes, you and `other`, give the same address as their own.
    AddressShared { other: Identity },
    /// What my roster amounts to; if yours differs, one of us missed something.
    Roster { hash: u64 },
}

/// The wire form. Tags are never reused.
#[derive(Clone, PartialEq, Message)]
struct Wire {
    /// 1 ping, 2 pong, 3 ping for me, 4 answered, 5 refused, 6 leave, 7 you are down, 8 outbid, 9 silent,
    /// 10 address shared, 11 roster.
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(bytes = "vec", tag = "2")]
    from: Vec<u8>,
    /// Whom the note is about: a ping's receiver, else the one named in [`Body`].
    #[prost(bytes = "vec", tag = "3")]
    about: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    origin: Vec<u8>,
    #[prost(uint32, optional, tag = "5")]
    suspected: Option<u32>,
    #[prost(fixed64, optional, tag = "6")]
    roster: Option<u64>,
}

impl Note {
    pub fn encode(&self) -> Bytes {
        let mut wire = Wire { from: self.from.encode(), ..Wire::default() };
        match self.body {
            Body::Ping { to, origin, suspected } => {
                wire.kind = 1;
                wire.about = to.encode();
                wire.origin = origin.encode();
                wire.suspected = suspected.map(u32::from);
            }
            Body::Pong { origin } => {
                wire.kind = 2;
                wire.origin = origin.encode();
            }
            Body::PingFor { target, suspected } => {
                wire.set(3, target);
                wire.suspected = suspected.map(u32::from);
            }
            Body::Answered { target } => wire.set(4, target),
            Body::Refused { target } => wire.set(5, target),
            Body::Leave => wire.kind = 6,
            Body::YouAreDown { who } => wire.set(7, who),
            Body::Outbid { holder } => wire.set(8, holder),
            Body::Silent { target } => wire.set(9, target),
            Body::AddressShared { other } => wire.set(10, other),
            Body::Roster { hash } => {
                wire.kind = 11;
                wire.roster = Some(hash);
            }
        }
        let mut out = Vec::with_capacity(1 + wire.encoded_len());
        out.push(NOTE);
        out.extend_from_slice(&wire.encode_to_vec());
        Bytes::from(out)
    }

    /// Reads what follows the [`NOTE`] byte; `None` is a kind that a later version may have added.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, Error> {
        let wire =
            Wire::decode(bytes).map_err(|cause| Error::Protocol(format!("membership note cannot be read: {cause}")))?;
        let about = || Identity::decode(&wire.about);
        let origin = || Identity::decode(&wire.origin);
        let suspected = wire.suspected.map(u16::try_from).transpose().map_err(|_| {
            Error::Protocol(format!("membership note with incarnation {:?} over 65535", wire.suspected))
        })?;
        let body = match wire.kind {
            1 => Body::Ping { to: about()?, origin: origin()?, suspected },
            2 => Body::Pong { origin: origin()? },
            3 => Body::PingFor { target: about()?, suspected },
            4 => Body::Answered { target: about()? },
            5 => Body::Refused { target: about()? },
            6 => Body::Leave,
            7 => Body::YouAreDown { who: about()? },
            8 => Body::Outbid { holder: about()? },
            9 => Body::Silent { target: about()? },
            10 => Body::AddressShared { other: about()? },
            11 => Body::Roster {
                hash: wire.roster.ok_or_else(|| Error::Protocol("membership note without its roster".to_owned()))?,
            },
            _ => return Ok(None),
        };
        Ok(Some(Self { from: Identity::decode(&wire.from)?, body }))
    }
}

impl Wire {
    fn set(&mut self, kind: u32, about: Identity) {
        self.kind = kind;
        self.about = about.encode();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::NodeId;

    fn id(n: u8) -> Identity {
        Identity::new(NodeId(u128::from(n)), format!("192.0.2.{n}:1").parse().unwrap(), 1)
    }

    #[test]
    fn every_note_round_trips() {
        for body in [
            Body::Ping { to: id(2), origin: id(3), suspected: Some(9) },
            Body::Ping { to: id(2), origin: id(3), suspected: None },
            Body::Pong { origin: id(2) },
            Body::PingFor { target: id(2), suspected: None },
            Body::PingFor { target: id(2), suspected: Some(3) },
            Body::Silent { target: id(2) },
            Body::AddressShared { other: id(2) },
            Body::Roster { hash: 0xfeed_f00d },
            Body::Answered { target: id(2) },
            Body::Refused { target: id(2) },
            Body::Leave,
            Body::YouAreDown { who: id(2) },
            Body::Outbid { holder: id(2) },
        ] {
            let note = Note { from: id(1), body };
            let bytes = note.encode();
            assert_eq!(bytes[0], NOTE);
            assert_eq!(Note::decode(&bytes[1..]).unwrap(), Some(note));
        }
    }

    #[test]
    fn golden_bytes() {
        let bytes = Note { from: id(1), body: Body::Leave }.encode();
        let golden: Vec<u8> = [
            &[2, 8, 6, 0x12, 32][..],
            &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 4, 192, 0, 2, 1, 0, 1],
            &[0, 0, 0, 0, 0, 0, 0, 1],
        ]
        .concat();
        assert_eq!(&bytes[..], &golden[..]);
    }

    #[test]
    fn a_kind_from_the_future_is_skipped_and_rubbish_refused() {
        let later = Wire { kind: 99, from: id(1).encode(), ..Wire::default() };
        assert_eq!(Note::decode(&later.encode_to_vec()).unwrap(), None);
        assert!(Note::decode(&[0xff, 0xff]).is_err());
        let headless = Wire { kind: 5, from: id(1).encode(), ..Wire::default() };
        assert!(Note::decode(&headless.encode_to_vec()).is_err());
    }
}
