//! What a client has of an engine's stream: kept while it passes, read when the engine is lost.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::lines::Lines;
use crate::api::Resume;
use crate::dispatch::Job;
use crate::pool::{Likeness, Worker};
use crate::protocol::Deltas;

/// Events are kept as they are up to so many bytes, and then read: most streams end before anybody asks what they said.
const UNREAD: usize = 32 * 1024;
/// A longer text is not kept, in bytes: no model answers with that much.
const MAX_TEXT: usize = 16 << 20;

/// The text of one choice so far, and what every event of the stream carries.
#[derive(Clone)]
pub(crate) struct Sent {
    unread: Vec<u8>,
    lines: Lines,
    pub(super) text: String,
    /// `id`, `created` and `model` as JSON, as the first event has them.
    pub(super) head: Option<[Option<String>; 3]>,
    /// The client has been told who speaks.
    pub(super) role: bool,
    /// Why it ended.
    pub(super) finish: Option<String>,
    /// The client has been told the tokens of the whole answer.
    pub(super) counted: bool,
    /// Nobody could go on with it.
    spoiled: bool,
    /// Who could.
    pub(crate) likeness: Arc<Likeness>,
}

/// An event, as far as it matters here.
#[derive(Deserialize)]
pub(super) struct Event<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    created: Option<&'a RawValue>,
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) choices: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    index: Option<u32>,
    #[serde(borrow)]
    pub(super) delta: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
    #[serde(borrow)]
    logprobs: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Option<Cow<'a, str>>,
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow)]
    function_call: Option<&'a RawValue>,
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
}

/// What one choice of an event says.
pub(super) struct Said {
    pub(super) role: bool,
    pub(super) text: String,
    pub(super) finish: Option<String>,
}

impl Choice<'_> {
    /// `None` if it is more than a piece of the text of the only choice.
    pub(super) fn said(&self) -> Option<Said> {
        let message = match self.delta {
            Some(delta) => serde_json::from_str::<Message<'_>>(delta.get()).ok()?,
            None => Message::default(),
        };
        let empty = |raw: Option<&RawValue>| raw.is_none_or(|raw| matches!(raw.get(), "\"\"" | "[]"));
        let others = [message.reasoning_content, message.reasoning, message.tool_calls, message.function_call];
        let plain = self.index.unwrap_or(0) == 0
            && others.into_iter().all(empty)
            && empty(message.refusal)
            && self.logprobs.is_none();
        plain.then(|| Said {
            role: message.role.is_some(),
            text: message.content.as_deref().or(self.text.as_deref()).unwrap_or_default().to_owned(),
            finish: self.finish_reason.as_deref().filter(|reason| !reason.is_empty()).map(str::to_owned),
        })
    }
}

impl Sent {
    /// For a stream of `job` that `worker` begins; `None` where nobody could go on with it.
    pub(crate) fn of(job: &Job, worker: &Worker, own_name: Option<&str>) -> Option<Box<Self>> {
        if job.resume != Resume::Greedy || !job.stream || job.batch != 1 {
            return None;
        }
        let likeness = Arc::new(worker.engine_likeness(worker.model_for(own_name)?)?);
        Some(Box::new(Self {
            unread: Vec::new(),
            lines: Lines::default(),
            text: String::new(),
            head: None,
            role: false,
            finish: None,
            counted: false,
            spoiled: false,
            likeness,
        }))
    }

    /// Notes events that go to the client as they are.
    pub(super) fn events(&mut self, bytes: &Bytes) {
        if self.spoiled {
            return;
        }
        self.unread.extend_from_slice(bytes);
        if self.unread.len() >= UNREAD {
            self.read();
        }
    }
    /// Notes what is written down for the client.
    pub(super) fn deltas(&mut self, deltas: &Deltas) {
        for delta in &deltas.deltas {
            self.spoiled |= delta.index != 0
                || !delta.reasoning.is_empty()
                || !delta.tool_calls_json.is_empty()
                || !delta.logprobs_json.is_empty();
            self.add(&delta.text, Some(&delta.finish_reason).filter(|reason| !reason.is_empty()).cloned());
        }
    }

    /// The engine is lost. False if nobody could go on with what the client has.
    pub(crate) fn ends(&mut self) -> bool {
        // A huge event goes out in parts, and behind half of one nothing can be said.
        self.read() && self.lines.is_between_events()
    }
    /// Reads what was kept. False if nobody could go on after it.
    fn read(&mut self) -> bool {
        let unread = std::mem::take(&mut self.unread);
        let mut lines = std::mem::take(&mut self.lines);
        let read = lines.push(&unread, |payload| if self.event(payload) { Ok(()) } else { Err(String::new()) });
        self.lines = lines;
        self.spoiled |= read.is_err();
        !self.spoiled
    }

    fn event(&mut self, payload: &str) -> bool {
        if matches!(payload.trim_ascii(), "" | "[DONE]") {
            return true;
        }
        let Ok(event) = serde_json::from_str::<Event<'_>>(payload) else { return false };
        if event.error.is_some() {
            return false;
        }
        let raw = |value: Option<&RawValue>| value.map(|value| value.get().to_owned());
        self.head.get_or_insert_with(|| [raw(event.id), raw(event.created), raw(event.model)]);
        self.counted |= event.usage.is_some() && event.choices.as_ref().is_some_and(Vec::is_empty);
        for choice in event.choices.into_iter().flatten() {
            let said = serde_json::from_str::<Choice<'_>>(choice.get()).ok().and_then(|choice| choice.said());
            let Some(said) = said else { return false };
            self.role |= said.role;
            self.add(&said.text, said.finish);
        }
        !self.spoiled
    }

    fn add(&mut self, text: &str, finish: Option<String>) {
        self.text.push_str(text);
        self.finish = self.finish.take().or(finish);
        self.spoiled |= self.text.len() > MAX_TEXT;
    }
}
