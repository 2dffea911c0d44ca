//! The response object as it grows.

use serde_json::{Map, Value, json};

use super::super::{ApiError, Envelope, FINISH_REASONS, add_usage, check_index};
use super::Translated;
use crate::protocol::{Delta, Usage};

/// Collects deltas into a response.
pub struct ResponseAnswer {
    pub(super) id: String,
    created: u64,
    model: String,
    echo: Map<String, Value>,
    logprobs: bool,
    pub(super) items: Vec<Item>,
    finish: Option<&'static str>,
    usage: Option<Usage>,
}

/// One item of the output.
pub(super) struct Item {
    pub(super) kind: Kind,
    pub(super) id: String,
    /// What it says: text, or a call's arguments.
    pub(super) text: String,
    pub(super) logprobs: Vec<Value>,
    pub(super) done: bool,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Reasoning,
    Message,
    Call {
        /// The model's number of it.
        index: u64,
        call_id: String,
        name: String,
    },
}

/// What a delta changed.
pub(super) enum Change {
    /// An item began.
    Began(usize),
    /// An item grew by this.
    Grew(usize, String, Vec<Value>),
}

impl ResponseAnswer {
    /// A response without output yet.
    pub fn new(envelope: &Envelope, translated: &Translated) -> Self {
        Self {
            id: envelope.id.clone(),
            created: envelope.created,
            model: envelope.model.clone(),
            echo: translated.echo.clone(),
            logprobs: translated.logprobs,
            items: Vec::new(),
            finish: None,
            usage: None,
        }
    }

    /// Forgets what came.
    pub fn begin_again(&mut self) {
        self.items.clear();
        (self.finish, self.usage) = (None, None);
    }

    /// Adds a piece.
    ///
    /// # Errors
    /// 502 when the worker breaks its protocol.
    pub fn push(&mut self, delta: &Delta) -> Result<(), ApiError> {
        self.take(delta, &mut |_, _| {})
    }

    /// Adds a piece and tells what changed.
    pub(super) fn take(&mut self, delta: &Delta, told: &mut dyn FnMut(&Self, Change)) -> Result<(), ApiError> {
        add_usage(&mut self.usage, delta.usage);
        check_index(delta, 1)?;
        if self.finish.is_some() {
            return Ok(());
        }
        if !delta.reasoning.is_empty() {
            self.grow(Kind::Reasoning, &delta.reasoning, Vec::new(), told);
        }
        if !delta.text.is_empty() {
            let logprobs = if self.logprobs { logprobs(&delta.logprobs_json)? } else { Vec::new() };
            self.grow(Kind::Message, &delta.text, logprobs, told);
        }
        if !delta.tool_calls_json.is_empty() {
            let calls: Vec<Value> = serde_json::from_str(&delta.tool_calls_json).map_err(|error| {
                ApiError::worker_fault(format!("the worker sent tool calls that are no array: {error}"))
            })?;
            for call in calls {
                self.call(&call, told);
            }
        }
        if !delta.finish_reason.is_empty() {
            let known = FINISH_REASONS.iter().find(|reason| **reason == delta.finish_reason);
            let Some(reason) = known else {
                let reason = &delta.finish_reason;
                return Err(ApiError::worker_fault(format!("the worker gave up with reason {reason:?}")));
            };
            self.finish = Some(reason);
        }
        Ok(())
    }

    fn grow(&mut self, kind: Kind, text: &str, logprobs: Vec<Value>, told: &mut dyn FnMut(&Self, Change)) {
        let at = match self.items.last() {
            Some(last) if last.kind == kind => self.items.len() - 1,
            _ => self.begin(kind, told),
        };
        self.items[at].text.push_str(text);
        self.items[at].logprobs.extend(logprobs.iter().cloned());
        told(self, Change::Grew(at, text.to_owned(), logprobs));
    }

    fn begin(&mut self, kind: Kind, told: &mut dyn FnMut(&Self, Change)) -> usize {
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        };
        let id = format!("{prefix}_{:032x}", rand::random::<u128>());
        self.items.push(Item { kind, id, text: String::new(), logprobs: Vec::new(), done: false });
        told(self, Change::Began(self.items.len() - 1));
        self.items.len() - 1
    }

    fn call(&mut self, call: &Value, told: &mut dyn FnMut(&Self, Change)) {
        let number = call["index"].as_u64().unwrap_or(0);
        let known = self.items.iter().position(|item| matches!(item.kind, Kind::Call { index, .. } if index == number));
        let at = known.unwrap_or_else(|| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let kind = Kind::Call { index: number, call_id: text(&call["id"]), name: text(&call["function"]["name"]) };
            self.begin(kind, told)
        });
        if let Some(more) = call["function"]["arguments"].as_str().filter(|more| !more.is_empty()) {
            self.items[at].text.push_str(more);
            told(self, Change::Grew(at, more.to_owned(), Vec::new()));
        }
    }

    /// Tokens spent, as far as the worker said.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// The body.
    ///
    /// # Errors
    /// 502 when the worker ended without a finish reason: a cut answer must not look whole.
    pub fn finish(mut self) -> Result<Vec<u8>, ApiError> {
        self.end()?;
        Ok(self.response(self.status()).to_string().into_bytes())
    }

    /// Closes what is open.
    pub(super) fn end(&mut self) -> Result<(), ApiError> {
        if self.finish.is_none() {
            return Err(ApiError::worker_fault("the worker ended before the answer was complete"));
        }
        self.items.iter_mut().for_each(|item| item.done = true);
        Ok(())
    }

    pub(super) fn status(&self) -> &'static str {
        match self.finish {
            None => "in_progress",
            Some("length" | "content_filter") => "incomplete",
            Some(_) => "completed",
        }
    }

    /// The object, with the output so far.
    pub(super) fn response(&self, status: &str) -> Value {
        let echoed = |name: &str, default: Value| match self.echo.get(name) {
            None | Some(Value::Null) => default,
            Some(value) => value.clone(),
        };
        let incomplete = match self.finish {
            Some("length") => json!({"reason": "max_output_tokens"}),
            Some("content_filter") => json!({"reason": "content_filter"}),
            _ => Value::Null,
        };
        let usage = self.usage.filter(|_| self.finish.is_some()).map_or(Value::Null, |usage| {
            json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
            })
        });
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": incomplete,
            "instructions": echoed("instructions", Value::Null),
            "max_output_tokens": echoed("max_output_tokens", Value::Null),
            "max_tool_calls": echoed("max_tool_calls", Value::Null),
            "metadata": echoed("metadata", json!({})),
            "model": self.model,
            "output": self.items.iter().map(|item| item.value(status)).collect::<Vec<_>>(),
            "parallel_tool_calls": echoed("parallel_tool_calls", json!(true)),
            "previous_response_id": null,
            "reasoning": echoed("reasoning", json!({"effort": null, "summary": null})),
            "service_tier": echoed("service_tier", Value::Null),
            "store": false,
            "temperature": echoed("temperature", Value::Null),
            "text": echoed("text", json!({"format": {"type": "text"}})),
            "tool_choice": echoed("tool_choice", json!("auto")),
            "tools": echoed("tools", json!([])),
            "top_p": echoed("top_p", Value::Null),
            "truncation": "disabled",
            "usage": usage,
            "user": null,
        })
    }
}

impl Item {
    /// `response` is the status of the whole.
    pub(super) fn value(&self, response: &str) -> Value {
        let status = match (self.done, response) {
            (false, _) => "in_progress",
            (true, "incomplete") => "incomplete",
            (true, _) => "completed",
        };
        match &self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "summary": [], "status": status,
                "content": self.parts(),
            }),
            Kind::Message => json!({
                "id": self.id, "type": "message", "role": "assistant", "status": status,
                "content": self.parts(),
            }),
            Kind::Call { call_id, name, .. } => json!({
                "id": self.id, "type": "function_call", "status": status,
                "call_id": call_id, "name": name, "arguments": self.text,
            }),
        }
    }
    fn parts(&self) -> Vec<Value> {
        if self.text.is_empty() { Vec::new() } else { vec![self.part()] }
    }
    /// Its one part, as it is now.
    pub(super) fn part(&self) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}),
        }
    }
}

/// The entries of a chat's `logprobs`, which are those of a response.
fn logprobs(text: &str) -> Result<Vec<Value>, ApiError> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let mut logprobs: Value = serde_json::from_str(text)
        .map_err(|error| ApiError::worker_fault(format!("the worker sent logprobs that are no JSON: {error}")))?;
    match logprobs["content"].take() {
        Value::Array(entries) => Ok(entries),
        _ => Ok(Vec::new()),
    }
}
