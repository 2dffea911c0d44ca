//! What a call carries: opaque to the runtime, named by its codec.

use bytes::Bytes;

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
    /// True when there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
