//! What is kept of one finished request.

use serde::Serialize;
use serde_json::{Value, json};

/// Why a request failed. The name of each class is what reports use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Nobody listens there.
    Refused,
    /// This machine has no port or descriptor left: the client's fault, not the server's.
    NoPorts,
    /// The connection could not be made for another reason.
    ConnectFailed,
    /// The connection did not stand within the connect limit.
    TimeoutConnect,
    /// No token within the first-token limit.
    TimeoutFirst,
    /// Nothing read within the idle limit.
    TimeoutIdle,
    /// Not finished within the total limit.
    TimeoutTotal,
    /// The peer reset the connection, or closed it before it answered.
    Reset,
    /// The answer ended before its end mark.
    Truncated,
    /// A status other than 200.
    Http(u16),
    /// A 200 whose body is no event stream.
    NotAStream,
    /// An error the server reported inside the stream.
    StreamError,
    /// An event that is not the JSON of this API.
    BadJson,
    /// Broken HTTP.
    Protocol,
}

impl Class {
    /// The name in reports.
    pub fn name(self) -> String {
        match self {
            Self::Refused => "refused".into(),
            Self::NoPorts => "no_ports".into(),
            Self::ConnectFailed => "connect_failed".into(),
            Self::TimeoutConnect => "timeout_connect".into(),
            Self::TimeoutFirst => "timeout_first".into(),
            Self::TimeoutIdle => "timeout_idle".into(),
            Self::TimeoutTotal => "timeout_total".into(),
            Self::Reset => "reset".into(),
            Self::Truncated => "truncated".into(),
            Self::Http(status) => format!("http_{status}"),
            Self::NotAStream => "not_a_stream".into(),
            Self::StreamError => "stream_error".into(),
            Self::BadJson => "bad_json".into(),
            Self::Protocol => "protocol".into(),
        }
    }

    /// Whether no connection came about; a user of a closed loop pauses before it tries again.
    pub(crate) fn is_connect(self) -> bool {
        matches!(self, Self::Refused | Self::NoPorts | Self::ConnectFailed | Self::TimeoutConnect)
    }
}

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which kind.
    pub class: Class,
    /// What was seen, in words; never empty.
    pub reason: String,
    /// The server's `Retry-After`, as it stood.
    pub retry_after: Option<String>,
}

impl Failure {
    /// A failure without a `Retry-After`.
    pub fn new(class: Class, reason: impl Into<String>) -> Self {
        let reason: String = reason.into();
        let reason = if reason.is_empty() { class.name() } else { reason };
        Self { class, reason, retry_after: None }
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The whole answer came.
    Ok,
    /// It failed.
    Failed(Failure),
    /// The end of the run or of the drain cut it off; neither good nor bad.
    Cut,
}

/// Where the number of output tokens comes from, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// `usage.completion_tokens` at the end of the answer.
    Usage,
    /// The last running usage of an answer without a final one.
    CumulativeUsage,
    /// A tokenizer over the whole text.
    Tokenizer,
    /// One per token-bearing event.
    Events,
    /// No token came.
    None,
}

/// One finished request. Stamps are microseconds of the run's time line.
#[derive(Clone, Debug)]
pub struct Record {
    /// When it was due.
    pub sched: u64,
    /// When the client took it up, before it waited for a free slot or a connection.
    pub start: u64,
    /// First byte handed to the socket.
    pub send: Option<u64>,
    /// How long connecting took; none on a kept connection.
    pub connect_us: Option<u64>,
    /// Status line and headers read.
    pub head: Option<u64>,
    /// First token on any channel.
    pub first: Option<u64>,
    /// First token outside reasoning.
    pub out: Option<u64>,
    /// Last token.
    pub last: Option<u64>,
    /// End mark or end of the body.
    pub end: Option<u64>,
    /// When the client was done with it, however it ended.
    pub closed: u64,
    /// Output tokens.
    pub tokens: u64,
    /// Where `tokens` comes from.
    pub source: Source,
    /// Gaps between token-bearing events, microseconds.
    pub gaps: Vec<u32>,
    /// Share of the tokens that came before the point's deadline, 0 to 1.
    pub in_window: f64,
    /// Prompt tokens the server counted.
    pub prompt: Option<u64>,
    /// Prompt tokens the server had cached.
    pub cached: Option<u64>,
    /// Output tokens the server calls reasoning.
    pub reasoning: Option<u64>,
    /// `max_tokens` of the request.
    pub asked: u32,
    /// Reads that carried at least one token-bearing event.
    pub token_reads: u32,
    /// Whether the end mark was missing.
    pub missing_done: bool,
    /// Whether a kept connection turned out dead and the request was sent again.
    pub resent: bool,
    /// How it ended.
    pub outcome: Outcome,
    /// The text, kept only where it has to be counted.
    pub text: Option<String>,
}

impl Record {
    /// Whether the whole answer came.
    pub fn is_ok(&self) -> bool {
        self.outcome == Outcome::Ok
    }

    /// Time to first token, microseconds; none when no token came.
    pub fn ttft(&self) -> Option<u64> {
        between(self.send, self.first)
    }

    /// Time to first token outside reasoning, microseconds.
    pub fn ttfo(&self) -> Option<u64> {
        between(self.send, self.out)
    }

    /// From sending to the last token, microseconds.
    pub fn e2e(&self) -> Option<u64> {
        between(self.send, self.last)
    }

    /// Mean time per token after the first, microseconds; none for fewer than two tokens.
    pub fn tpot(&self) -> Option<f64> {
        let span = between(self.first, self.last)?;
        (self.tokens >= 2).then(|| span as f64 / (self.tokens - 1) as f64)
    }

    /// From the schedule to sending, microseconds.
    pub fn queue(&self) -> Option<u64> {
        between(Some(self.sched), self.send)
    }

    /// The request as a JSON object, latencies and times in milliseconds of the run's time line.
    pub fn to_json(&self, point: &str) -> Value {
        let ms = |micros: Option<u64>| micros.map(|micros| micros as f64 / 1e3);
        let (outcome, reason) = match &self.outcome {
            Outcome::Ok => ("ok".to_owned(), None),
            Outcome::Cut => ("cut".to_owned(), None),
            Outcome::Failed(failure) => (failure.class.name(), Some(&failure.reason)),
        };
        json!({
            "point": point,
            "outcome": outcome,
            "reason": reason,
            "due": ms(Some(self.sched)),
            "taken_up": ms(Some(self.start)),
            "sent": ms(self.send),
            "connect_ms": ms(self.connect_us),
            "ttft_ms": ms(self.ttft()),
            "ttfo_ms": ms(self.ttfo()),
            "e2e_ms": ms(self.e2e()),
            "tpot_ms": self.tpot().map(|micros| micros.round() / 1e3),
            "closed": ms(Some(self.closed)),
            "tokens": self.tokens,
            "token_source": self.source,
            "asked_tokens": self.asked,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "reasoning_tokens": self.reasoning,
            "event_gaps_ms": self.gaps.iter().map(|gap| f64::from(*gap) / 1e3).collect::<Vec<_>>(),
        })
    }

    /// Tokens that shared an event with an earlier one: their gap is 0.
    pub fn zero_gaps(&self) -> u64 {
        self.tokens.saturating_sub(1).saturating_sub(self.gaps.len() as u64)
    }
}

/// The time from one stamp to another, where both exist.
pub(crate) fn between(from: Option<u64>, to: Option<u64>) -> Option<u64> {
    to?.checked_sub(from?)
}
