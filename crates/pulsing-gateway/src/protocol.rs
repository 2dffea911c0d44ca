//! The worker protocol, written by hand after `proto/worker.proto`; a test compares the two.

use bytes::Bytes;
use prost::Message;
use pulsing_core::{Codec, Payload};

/// The version of the protocol that this crate speaks.
pub const VERSION: u32 = 1;

/// What a Router asks of a Worker.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// Version this request speaks.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Which question.
    #[prost(oneof = "Kind", tags = "2, 3, 4, 5, 6")]
    pub kind: Option<Kind>,
}

/// The questions.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Kind {
    /// Answered by a stream of [`Deltas`], or by one of them where it is to be [`whole`](Generate::whole).
    #[prost(message, tag = "2")]
    Generate(Generate),
    /// Answered by a stream of [`LoadReport`] that ends with the worker.
    #[prost(message, tag = "3")]
    SubscribeLoad(SubscribeLoad),
    /// Answered by one [`Description`].
    #[prost(message, tag = "4")]
    Describe(Describe),
    /// Answered by one [`Answer`].
    #[prost(message, tag = "5")]
    Question(Question),
    /// Answered by a stream of the bytes that the engine answered, or by nothing where no bytes were sent.
    #[prost(message, tag = "6")]
    Relay(Relay),
}

/// Generate text for the JSON body that travels beside this message.
#[derive(Clone, PartialEq, Message)]
pub struct Generate {
    /// `chat.completions` or `completions`.
    #[prost(string, tag = "1")]
    pub api: String,
    /// `x-request-id`.
    #[prost(string, tag = "2")]
    pub request_id: String,
    /// Milliseconds left when sent; 0 = none.
    #[prost(uint64, tag = "3")]
    pub deadline_ms: u64,
    /// W3C `traceparent`.
    #[prost(string, tag = "4")]
    pub traceparent: String,
    /// Text already sent to the client, to continue from.
    #[prost(string, tag = "5")]
    pub continue_text: String,
    /// The same as token ids.
    #[prost(uint32, repeated, tag = "6")]
    pub continue_tokens: Vec<u32>,
    /// Opaque prefill/decode state.
    #[prost(bytes = "bytes", tag = "7")]
    pub handoff: Bytes,
    /// Nobody sees any of the answer before all of it is there: one [`Deltas`] may answer in place of the stream.
    #[prost(bool, tag = "8")]
    pub whole: bool,
}

/// Something with one short answer; the JSON body travels beside this message.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Question {
    /// `embeddings`, `tokenize` or `detokenize`.
    #[prost(string, tag = "1")]
    pub api: String,
    /// `x-request-id`.
    #[prost(string, tag = "2")]
    pub request_id: String,
    /// Milliseconds left when sent; 0 = none.
    #[prost(uint64, tag = "3")]
    pub deadline_ms: u64,
    /// W3C `traceparent`.
    #[prost(string, tag = "4")]
    pub traceparent: String,
}

/// What a [`Question`] is answered with.
#[derive(Clone, PartialEq, Message)]
pub struct Answer {
    /// One for each input, in order.
    #[prost(message, repeated, tag = "1")]
    pub embeddings: Vec<Embedding>,
    /// Of `tokenize`.
    #[prost(uint32, repeated, tag = "2")]
    pub tokens: Vec<u32>,
    /// One a token, where the body asks for them.
    #[prost(string, repeated, tag = "3")]
    pub token_texts: Vec<String>,
    /// Of `detokenize`.
    #[prost(string, tag = "4")]
    pub text: String,
    /// Tokens spent.
    #[prost(message, optional, tag = "5")]
    pub usage: Option<Usage>,
    /// With `tokens`: the longest context; 0 = unknown.
    #[prost(uint64, tag = "6")]
    pub max_model_len: u64,
}

/// One vector.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Embedding {
    /// 32-bit floats, little-endian.
    #[prost(bytes = "bytes", tag = "1")]
    pub values: Bytes,
}

/// Asks for load reports.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct SubscribeLoad {
    /// With [`BlockNews`] in them.
    #[prost(bool, tag = "1")]
    pub blocks: bool,
}

/// The bytes beside this message are to reach the engine for which the worker stands; none: is it there?
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Relay {}

/// Asks what the worker is.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Describe {}

/// One stream item: what became ready together.
#[derive(Clone, PartialEq, Message)]
pub struct Deltas {
    /// In order.
    #[prost(message, repeated, tag = "1")]
    pub deltas: Vec<Delta>,
}

/// A piece of one choice.
#[derive(Clone, PartialEq, Message)]
pub struct Delta {
    /// Choice.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// New text, whole characters only.
    #[prost(string, tag = "2")]
    pub text: String,
    /// Its tokens.
    #[prost(uint32, repeated, tag = "3")]
    pub token_ids: Vec<u32>,
    /// The choice's `logprobs` object for this piece, as JSON.
    #[prost(string, tag = "4")]
    pub logprobs_json: String,
    /// `delta.tool_calls` for this piece, as JSON.
    #[prost(string, tag = "5")]
    pub tool_calls_json: String,
    /// Reasoning text.
    #[prost(string, tag = "6")]
    pub reasoning: String,
    /// `stop`, `length`, `tool_calls` or `content_filter`; empty = goes on.
    #[prost(string, tag = "7")]
    pub finish_reason: String,
    /// With the last delta of the request.
    #[prost(message, optional, tag = "8")]
    pub usage: Option<Usage>,
    /// From a prefill worker, with its last delta: what a decode worker needs to go on.
    #[prost(bytes = "bytes", tag = "9")]
    pub handoff: Bytes,
}

/// Tokens spent.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Usage {
    /// In the prompt.
    #[prost(uint32, tag = "1")]
    pub prompt_tokens: u32,
    /// In the answer.
    #[prost(uint32, tag = "2")]
    pub completion_tokens: u32,
    /// Prompt tokens found in a cache.
    #[prost(uint32, tag = "3")]
    pub cached_tokens: u32,
}

/// How a worker is doing; sent on change and as a heartbeat at least every 500 ms.
#[derive(Clone, PartialEq, Message)]
pub struct LoadReport {
    /// `loading`, `ready`, `draining` or `failed`.
    #[prost(string, tag = "1")]
    pub state: String,
    /// Requests being served.
    #[prost(uint32, tag = "2")]
    pub running: u32,
    /// Requests that wait.
    #[prost(uint32, tag = "3")]
    pub waiting: u32,
    /// Requests it takes at once.
    #[prost(uint32, tag = "4")]
    pub capacity: u32,
    /// Share of the KV cache in use, 0..1; 0 = unknown.
    #[prost(float, tag = "5")]
    pub kv_usage: f32,
    /// Requests finished since it started.
    #[prost(uint64, tag = "6")]
    pub processed: u64,
    /// Milliseconds since the last token or part of a prompt; 0 when only clients are waited for. When idle it says nothing.
    #[prost(uint64, tag = "7")]
    pub progress_age_ms: u64,
    /// Names of the models it serves.
    #[prost(string, repeated, tag = "8")]
    pub models: Vec<String>,
    /// Why it failed, how far loading is.
    #[prost(string, tag = "9")]
    pub detail: String,
    /// Longest context in tokens; 0 = unknown.
    #[prost(uint64, tag = "10")]
    pub max_model_len: u64,
    /// Of a worker with `url`: milliseconds since the first question that the server has not answered; 0 = none.
    #[prost(uint64, tag = "11")]
    pub answer_age_ms: u64,
    /// Only for who asked for it.
    #[prost(message, optional, tag = "12")]
    pub blocks: Option<BlockNews>,
}

/// What a worker's prompt cache got and lost, by the hashes of [`chain`](crate::policy::chain).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct BlockNews {
    /// 1, 2, 3, ... on one subscription.
    #[prost(uint64, tag = "1")]
    pub seq: u64,
    /// The cache holds what this and later news store, and nothing else.
    #[prost(bool, tag = "2")]
    pub reset: bool,
    /// In the cache since the news before.
    #[prost(fixed64, repeated, tag = "3")]
    pub stored: Vec<u64>,
    /// No longer in it.
    #[prost(fixed64, repeated, tag = "4")]
    pub dropped: Vec<u64>,
}

/// What a worker is.
#[derive(Clone, PartialEq, Message)]
pub struct Description {
    /// `transformers`, `mistralrs`, `vllm`, ...
    #[prost(string, tag = "1")]
    pub engine: String,
    /// Its version.
    #[prost(string, tag = "2")]
    pub engine_version: String,
    /// How it is doing.
    #[prost(message, optional, tag = "3")]
    pub load: Option<LoadReport>,
    /// For a worker with `url` in its metadata: the `Authorization` that the engine there wants; empty = none.
    #[prost(string, tag = "4")]
    pub authorization: String,
}

/// A message of the worker protocol as a payload, the client's body (if any) beside it.
pub fn payload(message: &impl Message, body: Option<Bytes>) -> Payload {
    Payload { codec: Codec::WORKER, head: message.encode_to_vec().into(), buffers: body.into_iter().collect() }
}

/// A message as bytes.
pub fn encode(message: &impl Message) -> Vec<u8> {
    message.encode_to_vec()
}

/// A message from bytes.
///
/// # Errors
/// A sentence that says what is wrong with them.
pub fn decode_bytes<M: Message + Default>(bytes: &[u8]) -> Result<M, String> {
    M::decode(bytes).map_err(|error| format!("not the worker protocol: {error}"))
}

/// The request that subscribes to load reports; with `blocks` to news of the prompt cache, too.
pub fn subscribe_load(blocks: bool) -> Payload {
    payload(&Request { version: VERSION, kind: Some(Kind::SubscribeLoad(SubscribeLoad { blocks })) }, None)
}

/// The request that asks what the worker is.
pub fn describe() -> Payload {
    payload(&Request { version: VERSION, kind: Some(Kind::Describe(Describe {})) }, None)
}

/// The request that carries `bytes` to an engine.
pub fn relay(bytes: Bytes) -> Payload {
    payload(&Request { version: VERSION, kind: Some(Kind::Relay(Relay {})) }, Some(bytes))
}

/// Reads a payload of the worker protocol.
///
/// # Errors
/// A sentence that says what the payload is instead.
pub fn decode<M: Message + Default>(payload: &Payload) -> Result<M, String> {
    if payload.codec != Codec::WORKER {
        return Err(format!("a payload of codec {} came where the worker protocol (3) was due", payload.codec.0));
    }
    M::decode(payload.head.clone()).map_err(|error| format!("not the worker protocol: {error}"))
}

/// Whether metadata `protocol="min..max"` includes the version spoken here.
pub fn speaks_our_version(range: &str) -> bool {
    let (min, max) = range.split_once("..").unwrap_or((range, range));
    match (min.trim().parse::<u32>(), max.trim().parse::<u32>()) {
        (Ok(min), Ok(max)) => (min..=max).contains(&VERSION),
        _ => false,
    }
}
