//! Headers of wire version 1 and the frame that carries them.
//!
//! ```text
//! u32 LE  length of what follows
//! u8      kind
//! u8      flags (0 in version 1)
//! u16 LE  length of the header
//! header  protobuf, one message a kind; unknown fields are skipped, so fields may be added
//! body    the segments the header announces, or a part of them
//! ```

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use crate::error::{AppError, Error};

/// The wire versions that a node speaks, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub lowest: u8,
    /// The latest.
    pub highest: u8,
}

impl Versions {
    /// What this build speaks: the version that it was made for and, once there is one, the version before.
    pub const KNOWN: Self = Self { lowest: 1, highest: 1 };

    /// The latest version that both speak.
    pub fn meet(self, other: Self) -> Option<u8> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }
}

impl std::fmt::Display for Versions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}..{}", self.lowest, self.highest)
    }
}

/// First bytes of a link: no TLS record and no HTTP method starts so.
pub const MAGIC: &[u8; 8] = b"\x89PULSING";
/// A header longer than this is nonsense.
pub const MAX_HEADER: usize = u16::MAX as usize;
/// Bytes before the header.
pub const FRAME_PREFIX: usize = 8;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Caller to callee: [`CallHeader`].
    Call = 1,
    /// Callee to caller: [`ReplyHeader`], the single value.
    Value = 2,
    /// Callee to caller: [`ErrorHeader`].
    Error = 3,
    /// Callee to caller: [`RefHeader`], a stream begins.
    StreamStart = 4,
    /// Callee to caller: [`ReplyHeader`], one item.
    Item = 5,
    /// Callee to caller: [`RefHeader`], the stream is complete.
    End = 6,
    /// Caller to callee: [`CreditHeader`].
    Credit = 7,
    /// Caller to callee: [`RefHeader`], the answer is no longer wanted.
    Cancel = 8,
    /// Either way on the bulk lane: [`RefHeader`] naming a message begun earlier, and more of its body.
    Chunk = 9,
    /// Either way: [`RefHeader`] naming a bulk message that arrived whole.
    Arrived = 10,
    /// Either way on the bulk lane: [`RefHeader`] naming a message begun earlier whose rest will not come.
    Abort = 11,
    /// Callee to caller: [`AcceptedHeader`], tells found a place in their mailbox.
    Accepted = 12,
    /// Membership datagram, opaque.
    Datagram = 16,
    /// Registry delta.
    Delta = 17,
    /// Registry digest: [`DigestHeader`].
    Digest = 18,
    /// Registry root: [`RootHeader`].
    Root = 19,
    /// Last frame of a control connection closed for being idle: its end says nothing about the node.
    Bye = 20,
}

impl Kind {
    fn from_u8(kind: u8) -> Option<Self> {
        Some(match kind {
            1 => Self::Call,
            2 => Self::Value,
            3 => Self::Error,
            4 => Self::StreamStart,
            5 => Self::Item,
            6 => Self::End,
            7 => Self::Credit,
            8 => Self::Cancel,
            9 => Self::Chunk,
            10 => Self::Arrived,
            11 => Self::Abort,
            12 => Self::Accepted,
            16 => Self::Datagram,
            17 => Self::Delta,
            18 => Self::Digest,
            19 => Self::Root,
            20 => Self::Bye,
            _ => return None,
        })
    }
}

/// Header of [`Kind::Call`].
#[derive(Clone, PartialEq, Message)]
pub struct CallHeader {
    /// Chosen by the caller, unique on its link.
    #[prost(uint64, tag = "1")]
    pub call: u64,
    /// Target actor id, 16 bytes.
    #[prost(bytes = "bytes", tag = "2")]
    pub actor: Bytes,
    /// True for a tell.
    #[prost(bool, tag = "3")]
    pub tell: bool,
    /// Payload codec.
    #[prost(uint32, tag = "4")]
    pub codec: u32,
    /// Lengths in bytes: the head, then each buffer.
    #[prost(uint64, repeated, tag = "5")]
    pub segments: Vec<u64>,
    /// Time left in milliseconds when sent: a duration, since clocks differ (R5).
    #[prost(uint64, optional, tag = "6")]
    pub timeout_ms: Option<u64>,
    /// Calling actor id, or empty.
    #[prost(bytes = "bytes", tag = "7")]
    pub sender: Bytes,
    /// Actors waiting in this chain, outermost first.
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub chain: Vec<Bytes>,
    /// W3C traceparent.
    #[prost(string, tag = "9")]
    pub trace: String,
    /// Fail instead of waiting for a full mailbox.
    #[prost(bool, tag = "10")]
    pub no_wait: bool,
    /// Stream items the caller takes before it grants more.
    #[prost(uint32, tag = "11")]
    pub window: u32,
    /// Message number on the bulk lane; 0 = the whole message is in this frame.
    #[prost(uint64, tag = "12")]
    pub message: u64,
    /// Bulk lane: ordered frames sent on the small lane before; this message is handled after them (R2).
    #[prost(uint64, tag = "13")]
    pub after: u64,
}

/// Header of [`Kind::Value`] and [`Kind::Item`].
#[derive(Clone, PartialEq, Message)]
pub struct ReplyHeader {
    /// The call.
    #[prost(uint64, tag = "1")]
    pub call: u64,
    /// Payload codec.
    #[prost(uint32, tag = "2")]
    pub codec: u32,
    /// Lengths in bytes: the head, then each buffer.
    #[prost(uint64, repeated, tag = "3")]
    pub segments: Vec<u64>,
    /// As in [`CallHeader::message`].
    #[prost(uint64, tag = "4")]
    pub message: u64,
    /// As in [`CallHeader::after`].
    #[prost(uint64, tag = "5")]
    pub after: u64,
}

/// Header of the kinds that need none.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct EmptyHeader {}

/// Header of the kinds that only name a call or a message.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct RefHeader {
    /// The call or message number.
    #[prost(uint64, tag = "1")]
    pub id: u64,
}

/// Header of [`Kind::Credit`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct CreditHeader {
    /// The call.
    #[prost(uint64, tag = "1")]
    pub call: u64,
    /// Further items the caller takes.
    #[prost(uint32, tag = "2")]
    pub items: u32,
}

/// Header of [`Kind::Accepted`].
#[derive(Clone, PartialEq, Message)]
pub struct AcceptedHeader {
    /// The actor, 16 bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub actor: Bytes,
    /// How many of its tells.
    #[prost(uint32, tag = "2")]
    pub count: u32,
    /// It has ended, and takes none any more.
    #[prost(bool, tag = "3")]
    pub ended: bool,
}

/// Header of [`Kind::Error`].
#[derive(Clone, PartialEq, Message)]
pub struct ErrorHeader {
    /// The call.
    #[prost(uint64, tag = "1")]
    pub call: u64,
    /// [`Error::kind`].
    #[prost(string, tag = "2")]
    pub kind: String,
    /// The variant's text fields in declaration order, or the whole message of a kind this version does not know.
    #[prost(string, repeated, tag = "3")]
    pub text: Vec<String>,
    /// The variant's numbers in declaration order.
    #[prost(uint64, repeated, tag = "4")]
    pub numbers: Vec<u64>,
    /// Error code of an application error.
    #[prost(sint32, tag = "5")]
    pub code: i32,
    /// Data of an application error.
    #[prost(bytes = "bytes", tag = "6")]
    pub data: Bytes,
}

/// Header of [`Kind::Root`].
#[derive(Clone, PartialEq, Message)]
pub struct RootHeader {
    /// Hash over every owner's version.
    #[prost(fixed64, tag = "1")]
    pub root: u64,
    /// Of many owners, a hash for each of 64 buckets of them; else empty.
    #[prost(fixed64, repeated, tag = "2")]
    pub buckets: Vec<u64>,
}

/// Header of [`Kind::Digest`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct DigestHeader {
    /// The receiver should answer with its own digest too.
    #[prost(bool, tag = "1")]
    pub reply: bool,
}

/// The first bytes of a frame up to and including its header.
///
/// # Panics
/// Debug builds check that the header fits its length field; only this module's messages are encoded here.
pub fn encode(kind: Kind, header: &impl Message, body_len: usize) -> Bytes {
    let header_len = header.encoded_len();
    debug_assert!(header_len <= MAX_HEADER, "headers are bounded by construction");
    let mut out = BytesMut::with_capacity(FRAME_PREFIX + header_len);
    put_prefix(&mut out, kind, header_len, body_len);
    // BytesMut grows as needed, so encoding cannot run out of room.
    let _ = header.encode(&mut out);
    out.freeze()
}

fn put_prefix(out: &mut BytesMut, kind: Kind, header_len: usize, body_len: usize) {
    out.put_u32_le((4 + header_len + body_len) as u32);
    out.put_u8(kind as u8);
    out.put_u8(0);
    out.put_u16_le(header_len as u16);
}

/// The fixed part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// `None`: a kind of a later version, to be skipped.
    pub kind: Option<Kind>,
    /// Bytes of header.
    pub header: usize,
    /// Bytes of body.
    pub body: usize,
}

/// Reads the fixed part.
///
/// # Errors
/// [`Error::Protocol`] when the lengths contradict each other.
pub fn decode_prefix(raw: [u8; FRAME_PREFIX]) -> Result<Prefix, Error> {
    let total = u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]) as usize;
    let header = u16::from_le_bytes([raw[6], raw[7]]) as usize;
    let body = total
        .checked_sub(4 + header)
        .ok_or_else(|| Error::Protocol(format!("frame of {total} bytes cannot hold a header of {header}")))?;
    Ok(Prefix { kind: Kind::from_u8(raw[4]), header, body })
}

/// Reads a header.
///
/// # Errors
/// [`Error::Protocol`] when the bytes are no such message.
pub fn decode<M: Message + Default>(header: &[u8]) -> Result<M, Error> {
    M::decode(header).map_err(|e| Error::Protocol(format!("bad frame header: {e}")))
}

impl ErrorHeader {
    /// The wire form of an error.
    pub fn from_error(call: u64, error: &Error) -> Self {
        let mut out = Self { call, kind: error.kind().to_owned(), ..Self::default() };
        match error {
            Error::ActorNotFound { actor, node } => out.text = vec![actor.to_string(), node.to_string()],
            Error::ActorStopped { actor, begun } => {
                out.text = vec![actor.to_string()];
                // Nodes that know no such number take the message for begun.
                out.numbers = if *begun { Vec::new() } else { vec![1] };
            }
            Error::MailboxFull { actor, capacity } => {
                out.text = vec![actor.to_string()];
                out.numbers = vec![*capacity as u64];
            }
            Error::Deadlock { chain } => out.text = vec![chain.clone()],
            Error::Timeout { what, after } => {
                out.text = vec![what.clone()];
                out.numbers = vec![after.as_millis() as u64];
            }
            Error::TooLarge { what, size, limit, setting } | Error::ReplyTooLarge { what, size, limit, setting } => {
                out.text = vec![what.clone(), setting.clone()];
                out.numbers = vec![*size, *limit];
            }
            Error::App(app) => {
                out.text = vec![app.type_name.clone(), app.message.clone(), app.traceback.clone()];
                out.code = app.code;
                out.data = app.data.clone();
            }
            Error::Cancelled | Error::ShutDown => {}
            other => out.text = vec![other.to_string()],
        }
        // A header is at most 64 KiB: tracebacks and pickles that would pass it are cut, the type and message survive.
        if out.encoded_len() > MAX_HEADER {
            out.data = Bytes::new();
            for text in &mut out.text {
                truncate(text, 16 << 10);
            }
        }
        out
    }

    /// The error that was sent. Kinds this version does not know arrive as [`Error::Protocol`] with the peer's words.
    pub fn into_error(self) -> Error {
        let text = |i: usize| self.text.get(i).cloned().unwrap_or_default();
        let number = |i: usize| self.numbers.get(i).copied().unwrap_or_default();
        let parsed = match self.kind.as_str() {
            "actor_not_found" => match (text(0).parse(), text(1).parse()) {
                (Ok(actor), Ok(node)) => Some(Error::ActorNotFound { actor, node }),
                _ => None,
            },
            "actor_stopped" => text(0).parse().ok().map(|actor| Error::ActorStopped { actor, begun: number(0) == 0 }),
            "mailbox_full" => {
                text(0).parse().ok().map(|actor| Error::MailboxFull { actor, capacity: number(0) as usize })
            }
            "deadlock" => Some(Error::Deadlock { chain: text(0) }),
            "timeout" => Some(Error::Timeout { what: text(0), after: std::time::Duration::from_millis(number(0)) }),
            "too_large" => Some(Error::TooLarge { what: text(0), size: number(0), limit: number(1), setting: text(1) }),
            "reply_too_large" => {
                Some(Error::ReplyTooLarge { what: text(0), size: number(0), limit: number(1), setting: text(1) })
            }
            "app" => Some(Error::App(Box::new(AppError {
                type_name: text(0),
                message: text(1),
                traceback: text(2),
                code: self.code,
                data: self.data.clone(),
            }))),
            "cancelled" => Some(Error::Cancelled),
            "shut_down" => Some(Error::ShutDown),
            _ => None,
        };
        parsed.unwrap_or_else(|| Error::Protocol(format!("{}: {}", self.kind, self.text.join("; "))))
    }
}

fn truncate(text: &mut String, at: usize) {
    if text.len() > at {
        let cut = (0..=at).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
        text.truncate(cut);
        text.push_str("... (cut)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ActorId;

    /// Wire version 1 must stay readable: these bytes are frozen.
    #[test]
    fn golden_frames_of_version_1() {
        let call = CallHeader {
            call: 7,
            actor: Bytes::copy_from_slice(&ActorId(0x0102).to_bytes()),
            codec: 1,
            segments: vec![3, 4],
            timeout_ms: Some(30_000),
            window: 64,
            ..CallHeader::default()
        };
        let bytes = encode(Kind::Call, &call, 7);
        let golden = "2b000000\
                      01002000\
                      0807\
                      121000000000000000000000000000000102\
                      2001\
                      2a020304\
                      30b0ea01\
                      5840";
        assert_eq!(hex(&bytes), golden.replace(' ', ""));
        let prefix = decode_prefix(bytes[..8].try_into().unwrap()).unwrap();
        assert_eq!(prefix, Prefix { kind: Some(Kind::Call), header: bytes.len() - 8, body: 7 });
        assert_eq!(decode::<CallHeader>(&bytes[8..]).unwrap(), call);

        let credit = encode(Kind::Credit, &CreditHeader { call: 300, items: 32 }, 0);
        assert_eq!(hex(&credit), "090000000700050008ac021020");

        let accepted = AcceptedHeader { actor: call.actor.clone(), count: 128, ended: true };
        let golden = "1b0000000c0017000a1000000000000000000000000000000102108001 1801";
        assert_eq!(hex(&encode(Kind::Accepted, &accepted, 0)), golden.replace(' ', ""));
    }

    #[test]
    fn errors_survive_the_wire() {
        let app = AppError {
            type_name: "builtins.ValueError".into(),
            message: "no".into(),
            traceback: "tb".into(),
            code: 400,
            data: Bytes::from_static(b"x"),
        };
        for error in [
            Error::ActorStopped { actor: ActorId(9), begun: true },
            Error::ActorStopped { actor: ActorId(9), begun: false },
            Error::MailboxFull { actor: ActorId(9), capacity: 256 },
            Error::Cancelled,
            Error::ShutDown,
            Error::Timeout { what: "x".into(), after: std::time::Duration::from_millis(5) },
            Error::TooLarge { what: "message".into(), size: 9, limit: 8, setting: "max_message".into() },
            Error::ReplyTooLarge { what: "an answer".into(), size: 9, limit: 8, setting: "max_message".into() },
            Error::App(Box::new(app)),
        ] {
            let back = ErrorHeader::from_error(1, &error).into_error();
            assert_eq!(back, error);
        }
    }

    #[test]
    fn a_huge_traceback_is_cut_not_lost() {
        let app = AppError {
            message: "m".into(),
            traceback: "é".repeat(100_000),
            data: vec![0; 80_000].into(),
            ..Default::default()
        };
        let header = ErrorHeader::from_error(1, &Error::App(Box::new(app)));
        assert!(header.encoded_len() <= MAX_HEADER);
        assert!(matches!(header.into_error(), Error::App(a) if a.message == "m" && a.traceback.ends_with("(cut)")));
    }

    #[test]
    fn lying_lengths_are_an_error() {
        assert!(decode_prefix([3, 0, 0, 0, 1, 0, 0, 0]).is_err());
        assert!(decode_prefix([8, 0, 0, 0, 1, 0, 9, 0]).is_err());
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }
}
