//! The events that tell a client how a response grows.

use serde_json::{Value, json};

use super::super::{ApiError, Envelope};
use super::Translated;
use super::answer::{Change, Item, Kind, ResponseAnswer};
use crate::protocol::{Delta, Usage};

/// Turns deltas into events.
pub struct ResponseWriter {
    answer: ResponseAnswer,
    events: Events,
}

/// Numbered events.
struct Events {
    begun: bool,
    number: u64,
    /// The item that is open.
    open: Option<usize>,
}

impl ResponseWriter {
    /// A stream without events yet.
    pub fn new(envelope: &Envelope, translated: &Translated) -> Self {
        let events = Events { begun: false, number: 0, open: None };
        Self { answer: ResponseAnswer::new(envelope, translated), events }
    }

    /// Tokens spent, as far as the worker said.
    pub fn usage(&self) -> Option<Usage> {
        self.answer.usage()
    }

    /// Appends the events of one piece.
    ///
    /// # Errors
    /// 502 when the worker breaks its protocol.
    pub fn push(&mut self, out: &mut Vec<u8>, delta: &Delta) -> Result<(), ApiError> {
        self.events.begin(out, &self.answer);
        let events = &mut self.events;
        self.answer.take(delta, &mut |answer, change| events.tell(out, answer, change))
    }

    /// Appends what ends a complete stream.
    ///
    /// # Errors
    /// 502 when the worker ended without a finish reason: a cut stream must not look whole.
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), ApiError> {
        self.events.begin(out, &self.answer);
        self.answer.end()?;
        self.events.close(out, &self.answer);
        let status = self.answer.status();
        let body = json!({"response": self.answer.response(status)});
        self.events.event(out, &format!("response.{status}"), body);
        Ok(())
    }

    /// Appends an error event, after which nothing may follow. Clients that know no such event find the error where chats
    /// have it.
    pub fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let mut body: Value = serde_json::from_slice(&error.to_json()).unwrap_or_default();
        for key in ["message", "param", "code"] {
            body[key] = body["error"][key].clone();
        }
        self.events.event(out, "error", body);
    }
}

impl Events {
    fn begin(&mut self, out: &mut Vec<u8>, answer: &ResponseAnswer) {
        if !std::mem::replace(&mut self.begun, true) {
            for name in ["response.created", "response.in_progress"] {
                self.event(out, name, json!({"response": answer.response("in_progress")}));
            }
        }
    }

    fn tell(&mut self, out: &mut Vec<u8>, answer: &ResponseAnswer, change: Change) {
        match change {
            Change::Began(at) => {
                self.close(out, answer);
                self.open = Some(at);
                let item = &answer.items[at];
                self.event(
                    out,
                    "response.output_item.added",
                    json!({"output_index": at, "item": item.value("in_progress")}),
                );
                if !matches!(item.kind, Kind::Call { .. }) {
                    self.of_item(out, "response.content_part.added", at, item, json!({"part": item.part()}));
                }
            }
            Change::Grew(at, more, logprobs) => {
                let item = &answer.items[at];
                let (name, body) = match item.kind {
                    Kind::Reasoning => ("response.reasoning_text.delta", json!({"delta": more})),
                    Kind::Message => ("response.output_text.delta", json!({"delta": more, "logprobs": logprobs})),
                    Kind::Call { .. } => ("response.function_call_arguments.delta", json!({"delta": more})),
                };
                self.of_item(out, name, at, item, body);
            }
        }
    }

    /// Closes the item that is open.
    fn close(&mut self, out: &mut Vec<u8>, answer: &ResponseAnswer) {
        let Some(at) = self.open.take() else { return };
        let item = &answer.items[at];
        match &item.kind {
            Kind::Reasoning => {
                self.of_item(out, "response.reasoning_text.done", at, item, json!({"text": item.text}));
                self.of_item(out, "response.content_part.done", at, item, json!({"part": item.part()}));
            }
            Kind::Message => {
                let body = json!({"text": item.text, "logprobs": item.logprobs});
                self.of_item(out, "response.output_text.done", at, item, body);
                self.of_item(out, "response.content_part.done", at, item, json!({"part": item.part()}));
            }
            Kind::Call { name, .. } => {
                let body = json!({"arguments": item.text, "name": name});
                self.of_item(out, "response.function_call_arguments.done", at, item, body);
            }
        }
        let done = Item {
            kind: item.kind.clone(),
            id: item.id.clone(),
            text: item.text.clone(),
            logprobs: item.logprobs.clone(),
            done: true,
        };
        self.event(out, "response.output_item.done", json!({"output_index": at, "item": done.value(answer.status())}));
    }

    fn of_item(&mut self, out: &mut Vec<u8>, name: &str, at: usize, item: &Item, mut body: Value) {
        body["item_id"] = Value::from(item.id.as_str());
        body["output_index"] = Value::from(at);
        if !matches!(item.kind, Kind::Call { .. }) {
            body["content_index"] = Value::from(0);
        }
        self.event(out, name, body);
    }

    fn event(&mut self, out: &mut Vec<u8>, name: &str, mut body: Value) {
        body["type"] = Value::from(name);
        body["sequence_number"] = Value::from(self.number);
        self.number += 1;
        out.extend_from_slice(format!("event: {name}\ndata: {body}\n\n").as_bytes());
    }
}
