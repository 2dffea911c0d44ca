//! The result of a run: JSON that explains itself.

use serde::Serialize;
use serde_json::{Value, json};

use crate::config::{Config, Kind};
use crate::point::Point;

/// Name and definition of every number, in every report.
pub const DEFINITIONS: &[(&str, &str)] = &[
    ("clock", "monotonic, whole microseconds; stamps are taken when bytes leave the read call, before parsing"),
    (
        "ttft",
        "first event with a token (text, reasoning, tool call) - first request byte sent; an empty string is no token",
    ),
    ("ttfo", "first event with a token outside reasoning - first request byte sent"),
    ("tpot", "(last token - first token) / (N - 1) per request, N >= 2; excludes ttft"),
    ("itl", "gaps between tokens pooled over all requests; further tokens of one event have gap 0"),
    ("icl", "gaps between token-bearing events pooled over all requests"),
    ("e2e", "last token - first request byte sent; the usage event and [DONE] are not in it"),
    ("stream_end", "[DONE] or end of the body - first request byte sent"),
    ("normalised", "e2e / N per request"),
    ("queue", "first request byte sent - time the request was due: client queue and connecting"),
    ("_sched", "anchored to the time the request was due instead of the time it was sent"),
    ("lag", "time the client took the request up - time it was due"),
    ("N", "usage.completion_tokens; else the last running usage; else a tokenizer over the whole text; else events"),
    ("tokens of an event", "difference of running usage; else N shared out by length of text, at least 1 each"),
    ("window", "first send to last token before the point's deadline; throughput is totals within it / its length"),
    (
        "goodput",
        "requests within all objectives (ttft, e2e: since due) / (ok + failed + dropped); those cut off are excluded",
    ),
    (
        "capacity",
        "output tokens per second of the steady part / mean tokens of an answer; a sweep's rates go to 120 % of it",
    ),
    ("late", "finished after the deadline, within the drain: in the latencies, its later tokens not in the throughput"),
    ("cut", "in flight when the drain or the run ended: in no latency"),
    ("steady", "closed loop: while >= 90 % of the users are in flight; open loop: without the first 10 % of the point"),
    ("saturated", "open loop: waiting requests and time to first token both rose, or requests never found a slot"),
    ("client_limited", "lag p99 > 5 ms, timer lag p99 > 10 ms, CPU > 90 % of all cores, no ports, or a moved schedule"),
    ("percentiles", "of all raw values, linearly interpolated"),
];

/// The server as the probe found it.
#[derive(Clone, Debug, Serialize)]
pub struct Server {
    /// Host and port.
    pub authority: String,
    /// Path of the requests.
    pub path: String,
    /// Models the server lists.
    pub models: Option<Vec<String>>,
    /// Whether `ignore_eos` is sent.
    pub ignore_eos_sent: bool,
    /// Whether usage is asked for.
    pub usage_asked: bool,
    /// Tokens a prompt word comes to, measured or assumed.
    pub tokens_per_word: f64,
    /// Whether that was measured.
    pub prompt_length_measured: bool,
    /// Spellings of the request that the server refused.
    pub refused: Vec<String>,
}

/// The whole result.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this format.
    pub schema_version: u32,
    /// The tool that wrote it.
    pub tool: Value,
    /// Definitions of all numbers.
    pub definitions: Value,
    /// Machine and times.
    pub environment: Value,
    /// What was asked, without the key.
    pub config: Config,
    /// Seed of prompts and arrivals.
    pub seed: u64,
    /// The server.
    pub server: Server,
    /// Load before the first point; in no point's numbers.
    pub warmup: Option<Value>,
    /// The points, in the order they ran.
    pub points: Vec<Point>,
    /// Whether Ctrl-C ended the run.
    pub interrupted: bool,
    /// What happened to the run as a whole.
    pub notes: Vec<String>,
}

impl Report {
    /// The report as JSON, with the key blanked wherever a server echoed it.
    ///
    /// # Errors
    /// None that data of this shape can cause; serde's signature asks for it.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        let mut value = serde_json::to_value(self)?;
        // The key that was configured stays out by construction; this is for echoes of it.
        if let Some(key) = self.config.api_key.as_deref().filter(|key| key.len() >= 8) {
            blank(&mut value, key);
        }
        value["config"]["api_key_given"] = json!(self.config.api_key.is_some());
        value["config"]["kind"] = json!(self.config.kind.name());
        serde_json::to_string(&value)
    }

    /// The point a sweep's rates were derived from.
    pub fn capacity(&self) -> Option<f64> {
        let first = self.points.first().filter(|_| self.config.kind == Kind::Sweep)?;
        Some(first.capacity())
    }
}

/// What the definitions look like in a report.
pub(crate) fn definitions() -> Value {
    DEFINITIONS.iter().map(|(name, text)| ((*name).to_owned(), json!(text))).collect::<serde_json::Map<_, _>>().into()
}

fn blank(value: &mut Value, key: &str) {
    match value {
        Value::String(text) if text.contains(key) => *text = without(text, key),
        Value::Array(items) => items.iter_mut().for_each(|item| blank(item, key)),
        Value::Object(fields) => fields.values_mut().for_each(|field| blank(field, key)),
        _ => {}
    }
}

/// `text` with every occurrence of the key blanked.
pub(crate) fn without(text: &str, key: &str) -> String {
    if key.is_empty() { text.to_owned() } else { text.replace(key, "[api key]") }
}
