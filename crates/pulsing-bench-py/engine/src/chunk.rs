//! What one event of an answer says: how much text on which channel, usage, an end, an error.

use serde::Deserialize;
use serde_json::Value;

use crate::record::{Class, Failure};
use crate::sse::Event;

/// Token numbers of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: Option<u64>,
    /// Tokens of the answer, reasoning included.
    pub completion: Option<u64>,
    /// Tokens of reasoning within `completion`.
    pub reasoning: Option<u64>,
    /// Tokens of the prompt that came from a cache.
    pub cached: Option<u64>,
}

/// One event, read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Text a reader of the answer sees, tool names and arguments included.
    pub visible: String,
    /// Text of reasoning.
    pub reasoning: String,
    /// Whether a choice said why it ended.
    pub finished: bool,
    /// Whether there were choices at all; a usage event has none.
    pub has_choices: bool,
    /// Token numbers, if the event carries some.
    pub usage: Option<Usage>,
    /// Whether this is the end mark.
    pub done: bool,
}

impl Chunk {
    /// Whether the event carries at least one token. An empty string is none.
    pub fn has_token(&self) -> bool {
        !self.visible.is_empty() || !self.reasoning.is_empty()
    }

    /// Reads an event of `/chat/completions` or `/completions`.
    ///
    /// # Errors
    /// [`Class::StreamError`] for an error the server sent in the stream, [`Class::BadJson`] for what cannot be read.
    pub fn read(event: &Event) -> Result<Self, Failure> {
        let data = event.data.trim_ascii();
        if data == b"[DONE]" {
            return Ok(Self { done: true, ..Self::default() });
        }
        if event.name == "error" {
            return Err(Failure::new(Class::StreamError, clip(data)));
        }
        let wire: Wire = serde_json::from_slice(data)
            .map_err(|error| Failure::new(Class::BadJson, format!("{error} in {}", clip(data))))?;
        if let Some(error) = wire.error.filter(|error| !error.is_null()) {
            return Err(Failure::new(Class::StreamError, message(&error)));
        }
        let mut chunk = Self { has_choices: !wire.choices.is_empty(), ..Self::default() };
        chunk.usage = wire.usage.map(Into::into);
        for choice in wire.choices {
            chunk.finished |= choice.finish_reason.is_some();
            let delta = choice.delta.unwrap_or_default();
            for part in [choice.text, delta.content, delta.refusal].into_iter().flatten() {
                chunk.visible.push_str(&part);
            }
            for call in
                delta.tool_calls.into_iter().flatten().filter_map(|call| call.function).chain(delta.function_call)
            {
                chunk.visible.push_str(call.name.as_deref().unwrap_or_default());
                chunk.visible.push_str(call.arguments.as_deref().unwrap_or_default());
            }
            // Servers that renamed the field send both for a while; the same text must not count twice.
            if let Some(part) = delta.reasoning_content.or(delta.reasoning) {
                chunk.reasoning.push_str(&part);
            }
        }
        Ok(chunk)
    }
}

/// The words of an error object, whatever its shape.
pub(crate) fn message(error: &Value) -> String {
    match error.get("message").and_then(Value::as_str).or_else(|| error.as_str()) {
        Some(text) if !text.is_empty() => clip(text.as_bytes()),
        _ => clip(error.to_string().as_bytes()),
    }
}

/// The start of what a server sent, for a report.
pub(crate) fn clip(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut short: String = text.chars().take(300).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    if short.is_empty() { "(nothing)".into() } else { short }
}

#[derive(Deserialize)]
struct Wire {
    #[serde(default, deserialize_with = "null_is_default")]
    choices: Vec<WireChoice>,
    #[serde(default)]
    usage: Option<WireUsage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct WireChoice {
    #[serde(default)]
    delta: Option<WireDelta>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    finish_reason: Option<Value>,
}

#[derive(Default, Deserialize)]
struct WireDelta {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<WireCall>>,
    #[serde(default)]
    function_call: Option<WireFunction>,
}

#[derive(Deserialize)]
struct WireCall {
    #[serde(default)]
    function: Option<WireFunction>,
}

#[derive(Deserialize)]
struct WireFunction {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<String>,
}

#[derive(Deserialize)]
struct WireUsage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<WireDetails>,
    #[serde(default)]
    completion_tokens_details: Option<WireDetails>,
}

#[derive(Default, Deserialize)]
struct WireDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
    #[serde(default)]
    reasoning_tokens: Option<u64>,
}

impl From<WireUsage> for Usage {
    fn from(wire: WireUsage) -> Self {
        Self {
            prompt: wire.prompt_tokens,
            completion: wire.completion_tokens,
            reasoning: wire.completion_tokens_details.and_then(|details| details.reasoning_tokens),
            cached: wire.prompt_tokens_details.and_then(|details| details.cached_tokens),
        }
    }
}

fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
