//! What a call carries: opaque to the runtime, named by its codec.

use bytes::Bytes;

use crate::error::{Error, Result};

/// How the two ends agreed to encode a payload. The runtime never looks inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Codec(pub u8);

impl Codec {
    /// Plain bytes: `head` is a message type, `buffers[0]` its body.
    pub const RAW: Codec = Codec(0);
    /// Python pickle protocol 5: `head` is the pickle, `buffers` its out-of-band buffers.
    pub const PICKLE: Codec = Codec(1);
    /// JSON in `head`.
    pub const JSON: Codec = Codec(2);
    /// The worker protocol (`proto/worker.proto`): `head` is a protobuf message, `buffers[0]` the client's JSON body.
    pub const WORKER: Codec = Codec(3);
    /// What nodes ask each other for: to watch, end and link actors.
    pub const NODE: Codec = Codec(4);
}

/// Bytes of a frame's header, 64 KiB in all, that may list the lengths of buffers.
const LISTED: usize = 48 << 10;

/// Bytes that the lengths of a payload's parts take in a header: protobuf varints.
fn segments_len(payload: &Payload) -> usize {
    let varint = |n: usize| (usize::BITS - n.leading_zeros()).div_ceil(7).max(1) as usize;
    varint(payload.head.len()) + payload.buffers.iter().map(|buffer| varint(buffer.len())).sum::<usize>()
}

/// A message: a head and any number of large buffers that are never copied into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// How to read `head`.
    pub codec: Codec,
    /// The encoded message.
    pub head: Bytes,
    /// Out-of-band buffers, in the order the head refers to them.
    pub buffers: Vec<Bytes>,
}

impl Payload {
    /// A payload without out-of-band buffers.
    pub fn new(codec: Codec, head: impl Into<Bytes>) -> Self {
        Self { codec, head: head.into(), buffers: Vec::new() }
    }
    /// The same payload with these buffers.
    pub fn with_buffers(mut self, buffers: Vec<Bytes>) -> Self {
        self.buffers = buffers;
        self
    }
    /// Bytes of head and buffers together.
    pub fn len(&self) -> usize {
        self.head.len() + self.buffers.iter().map(Bytes::len).sum::<usize>()
    }
    /// Refuses what no peer is sent: more than `limit` bytes, or more buffers than a frame's header can list.
    ///
    /// # Errors
    /// `TooLarge`.
    pub(crate) fn check(&self, what: &str, limit: u64) -> Result<()> {
        let size = self.len() as u64;
        if size > limit {
            return Err(Error::TooLarge { what: what.to_owned(), size, limit, setting: "max_message".to_owned() });
        }
        let listed = segments_len(self);
        if listed > LISTED {
            return Err(Error::TooLarge {
                what: format!("the list of the {} buffers of {what}", self.buffers.len()),
                size: listed as u64,
                limit: LISTED as u64,
                setting: "fixed; join small buffers".to_owned(),
            });
        }
        Ok(())
    }
    /// True when there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
