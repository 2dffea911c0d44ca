//! OpenAI's API: what comes in, what goes out.

mod answer;
mod error;
mod fields;
#[cfg(test)]
mod fuzz_tests;
mod question;
mod request;
mod responses;
mod scan;
mod stream;
mod writer;

pub use answer::Answer;
pub use error::ApiError;
pub use question::Question;
pub use request::{Api, Parsed, Resume, parse};
pub use responses::{ResponseAnswer, ResponseWriter, Translated, translate};
pub use scan::{Build, build};
pub use stream::StreamWriter;
pub use writer::{Collector, Writer};

use crate::protocol::{Delta, Usage};

/// The reasons a choice may end with; clients refuse others.
const FINISH_REASONS: [&str; 5] = ["stop", "length", "tool_calls", "content_filter", "function_call"];

/// What all events and the answer of one request share.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// Which endpoint was asked.
    pub api: Api,
    /// `chatcmpl-...` or `cmpl-...`.
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// The name the client asked for.
    pub model: String,
    /// Choices there will be.
    pub choices: u32,
}

impl Envelope {
    /// `"id":...,"object":...,"created":...,"model":...,` with `object` as given.
    fn head(&self, object: &str) -> String {
        format!(
            "\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{},",
            json_string(&self.id),
            self.created,
            json_string(&self.model)
        )
    }
}

/// Appends `text` as a JSON string.
fn push_json_string(out: &mut Vec<u8>, text: &str) {
    // Writing to a Vec cannot fail and a str is always representable.
    let _ = serde_json::to_writer(out, text);
}

fn json_string(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len() + 2);
    push_json_string(&mut out, text);
    String::from_utf8(out).unwrap_or_default()
}

fn push_usage(out: &mut Vec<u8>, usage: &Usage) {
    let total = u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens);
    out.extend_from_slice(
        format!(
            "{{\"prompt_tokens\":{},\"completion_tokens\":{},\"total_tokens\":{total},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{}}}}}",
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        )
        .as_bytes(),
    );
}

/// JSON from a worker, checked and on one line: an event is one line, and inside JSON a line break is only white space.
fn worker_json(what: &str, text: &str) -> Result<String, ApiError> {
    match serde_json::from_str::<&serde_json::value::RawValue>(text) {
        Ok(raw) => Ok(raw.get().replace(['\n', '\r'], " ")),
        Err(error) => Err(ApiError::worker_fault(format!("the worker sent {what} that is no JSON: {error}"))),
    }
}

fn finish_reason(delta: &Delta) -> Result<Option<&str>, ApiError> {
    match delta.finish_reason.as_str() {
        "" => Ok(None),
        known if FINISH_REASONS.contains(&known) => Ok(Some(known)),
        other => Err(ApiError::worker_fault(format!("the worker gave up with reason {other:?}"))),
    }
}

fn check_index(delta: &Delta, choices: u32) -> Result<usize, ApiError> {
    if delta.index < choices {
        return Ok(delta.index as usize);
    }
    Err(no_such_choice(delta.index, choices))
}

/// A Worker answered what it was not asked for.
pub(crate) fn no_such_choice(index: u32, choices: u32) -> ApiError {
    ApiError::worker_fault(format!("the worker answered choice {index} of a request for {choices} choice(s)"))
}

fn add_usage(total: &mut Option<Usage>, part: Option<Usage>) {
    if let Some(part) = part {
        let sum = total.get_or_insert_with(Usage::default);
        sum.prompt_tokens = sum.prompt_tokens.saturating_add(part.prompt_tokens);
        sum.completion_tokens = sum.completion_tokens.saturating_add(part.completion_tokens);
        sum.cached_tokens = sum.cached_tokens.saturating_add(part.cached_tokens);
    }
}
