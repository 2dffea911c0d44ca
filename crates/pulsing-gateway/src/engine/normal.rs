//! What engines stream, brought into the form that strict clients accept: read into deltas, which are written down again
//! like those of any Worker.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::lines::Lines;
use super::message::usage_of;
use crate::api::ApiError;
use crate::protocol::{Delta, Usage};

/// Reads an engine's answer, chat or text completion, streamed or whole.
#[derive(Default)]
pub(super) struct Normaliser {
    lines: Lines,
    choices: Vec<Choice>,
    usage: Option<Usage>,
    /// `[DONE]` came; what follows it is nothing.
    done: bool,
}

#[derive(Default)]
struct Choice {
    calls: Vec<Call>,
    finished: bool,
}

/// One tool call of a choice.
struct Call {
    /// What the engine counts it as.
    index: Option<u64>,
    /// What the engine calls it; the client is told another id if this one was taken.
    id: String,
    /// Its arguments so far, where the engine repeats the whole.
    has_arguments: bool,
}

/// Why an answer cannot be read.
#[derive(Debug)]
pub(super) struct Unreadable(pub(super) ApiError);

impl From<String> for Unreadable {
    fn from(text: String) -> Self {
        Self(ApiError::worker_fault(text))
    }
}

impl Normaliser {
    /// The deltas of these bytes of a stream.
    ///
    /// # Errors
    /// What the engine says went wrong, or that it does not speak OpenAI's protocol.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Vec<Delta>, ApiError> {
        let mut deltas = Vec::new();
        let mut lines = std::mem::take(&mut self.lines);
        let read = lines.push(bytes, |payload| self.payload(payload, &mut deltas));
        self.lines = lines;
        read.map(|()| deltas).map_err(|error| error.0)
    }

    /// The last deltas, once the stream is over.
    ///
    /// # Errors
    /// As for [`push`](Self::push).
    pub(super) fn finish(&mut self) -> Result<Vec<Delta>, ApiError> {
        let mut deltas = Vec::new();
        let mut lines = std::mem::take(&mut self.lines);
        lines.finish(|payload| self.payload(payload, &mut deltas)).map_err(|error| error.0)?;
        self.close(&mut deltas);
        Ok(deltas)
    }

    /// `[DONE]` came, or each choice seen has ended: a connection that breaks now took nothing with it.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// The deltas of an answer in one piece.
    ///
    /// # Errors
    /// As for [`push`](Self::push).
    pub(super) fn whole(mut self, body: &[u8]) -> Result<Vec<Delta>, ApiError> {
        let mut deltas = Vec::new();
        self.payload(&String::from_utf8_lossy(body), &mut deltas).map_err(|error| error.0)?;
        self.done = true;
        self.close(&mut deltas);
        Ok(deltas)
    }

    fn close(&mut self, deltas: &mut Vec<Delta>) {
        if self.done {
            // Some engines end without a reason. A stream that is cut has no `[DONE]`.
            for (index, choice) in self.choices.iter_mut().enumerate().filter(|(_, choice)| !choice.finished) {
                choice.finished = true;
                deltas.push(Delta { index: index as u32, finish_reason: "stop".to_owned(), ..Delta::default() });
            }
        }
        if let Some(usage) = self.usage.take() {
            deltas.push(Delta { usage: Some(usage), ..Delta::default() });
        }
    }

    fn payload(&mut self, payload: &str, deltas: &mut Vec<Delta>) -> Result<(), Unreadable> {
        let payload = payload.trim();
        if self.done || payload.is_empty() {
            return Ok(());
        }
        if payload == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let mut event: Map<String, Value> = serde_json::from_str(payload)
            .map_err(|error| Unreadable::from(format!("the engine sent an event that is no JSON object: {error}")))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(Unreadable(failure(error)));
        }
        // Engines repeat it or count up: the last one holds.
        if let Some(usage) = event.get("usage").and_then(usage_of) {
            self.usage = Some(usage);
        }
        let Some(Value::Array(choices)) = event.remove("choices") else { return Ok(()) };
        for (at, choice) in choices.into_iter().enumerate() {
            if let Value::Object(choice) = choice {
                self.choice(at, choice, deltas)?;
            }
        }
        Ok(())
    }

    fn choice(&mut self, at: usize, mut from: Map<String, Value>, deltas: &mut Vec<Delta>) -> Result<(), Unreadable> {
        let index = from.get("index").and_then(Value::as_u64).map_or(at, |index| index as usize);
        if index >= 1 << 16 {
            return Err(Unreadable::from(format!("the engine answered choice {index}")));
        }
        if self.choices.len() <= index {
            self.choices.resize_with(index + 1, Choice::default);
        }
        let choice = &mut self.choices[index];
        if choice.finished {
            return Ok(());
        }
        let mut delta = Delta { index: index as u32, ..Delta::default() };
        for key in ["delta", "message"] {
            if let Some(Value::Object(mut message)) = from.remove(key) {
                delta.text = text(&mut message, "content");
                delta.reasoning = text(&mut message, "reasoning_content");
                if delta.reasoning.is_empty() {
                    delta.reasoning = text(&mut message, "reasoning");
                }
                if let Some(Value::Array(calls)) = message.remove("tool_calls") {
                    let calls: Vec<Value> = calls.into_iter().filter_map(|call| choice.call(call)).collect();
                    if !calls.is_empty() {
                        delta.tool_calls_json = Value::Array(calls).to_string();
                    }
                }
            }
        }
        if delta.text.is_empty() {
            delta.text = text(&mut from, "text");
        }
        if let Some(logprobs @ Value::Object(_)) = from.remove("logprobs") {
            delta.logprobs_json = logprobs.to_string();
        }
        match from.get("finish_reason").and_then(Value::as_str) {
            Some("error" | "abort") => {
                return Err(Unreadable::from("the engine gave up in the middle of its answer".to_owned()));
            }
            Some(reason) if !reason.is_empty() => {
                delta.finish_reason = finish_reason(reason).into_owned();
                choice.finished = true;
            }
            _ => {}
        }
        deltas.push(delta);
        Ok(())
    }
}

impl Choice {
    /// A piece of a tool call: id, type and name once and first, arguments as pieces of text, counted from 0.
    fn call(&mut self, call: Value) -> Option<Value> {
        let Value::Object(mut call) = call else { return None };
        let index = call.get("index").and_then(Value::as_u64);
        let id = text(&mut call, "id");
        let mut function = match call.remove("function") {
            Some(Value::Object(function)) => function,
            _ => Map::new(),
        };
        let name = text(&mut function, "name");
        let arguments = match function.remove("arguments") {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text,
            Some(other) => other.to_string(),
        };
        // Its number tells which call a piece belongs to. Without one, a name begins a call and the rest goes on with the
        // last.
        let known = match index {
            Some(_) => self.calls.iter().position(|known| known.index == index),
            None if name.is_empty() => self.calls.len().checked_sub(1),
            None => None,
        };
        if let Some(at) = known {
            let begun = std::mem::replace(&mut self.calls[at].has_arguments, true);
            if arguments.is_empty() && begun {
                return None;
            }
            return Some(json!({"index": at, "function": {"arguments": arguments}}));
        }
        if name.is_empty() && arguments.is_empty() {
            return None;
        }
        let taken = id.is_empty() || self.calls.iter().any(|known| known.id == id);
        let id = if taken { format!("call_{:024x}", rand::random::<u128>() >> 32) } else { id };
        let at = self.calls.len();
        self.calls.push(Call { index, id: id.clone(), has_arguments: !arguments.is_empty() });
        Some(json!({"index": at, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
    }
}

fn text(from: &mut Map<String, Value>, key: &str) -> String {
    match from.remove(key) {
        Some(Value::String(text)) => text,
        // Content in parts.
        Some(Value::Array(parts)) => parts.iter().filter_map(|part| part.get("text")?.as_str()).collect(),
        _ => String::new(),
    }
}

/// In OpenAI's words.
fn finish_reason(reason: &str) -> Cow<'static, str> {
    Cow::Borrowed(match reason {
        "length" | "max_tokens" | "max_length" | "model_length" => "length",
        "tool_calls" | "tool_call" | "tool_use" => "tool_calls",
        "function_call" => "function_call",
        "content_filter" => "content_filter",
        _ => "stop",
    })
}

/// What an engine says went wrong, in whichever form.
fn failure(error: &Value) -> ApiError {
    let message = error.as_str().or_else(|| error["message"].as_str());
    let mut answer = ApiError::worker_fault(message.unwrap_or("the engine failed in the middle of its answer"));
    if let Some(kind) = error["type"].as_str() {
        answer.kind = Cow::Owned(kind.to_owned());
    }
    answer.param = error["param"].as_str().map(Box::from);
    match &error["code"] {
        Value::String(code) => answer.code = Some(Cow::Owned(code.clone())),
        Value::Number(code) => answer.code = Some(Cow::Owned(code.to_string())),
        _ => {}
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &str) -> Result<Vec<Delta>, ApiError> {
        let mut normaliser = Normaliser::default();
        let mut deltas = normaliser.push(bytes.as_bytes())?;
        deltas.extend(normaliser.finish()?);
        Ok(deltas)
    }
    fn stream(events: &[&str]) -> Vec<Delta> {
        read(&events.iter().map(|event| format!("data: {event}\n\n")).collect::<String>()).unwrap()
    }
    fn calls(deltas: &[Delta]) -> Vec<Value> {
        let lists = deltas.iter().filter(|delta| !delta.tool_calls_json.is_empty());
        lists.flat_map(|delta| serde_json::from_str::<Vec<Value>>(&delta.tool_calls_json).unwrap()).collect()
    }

    #[test]
    fn the_last_usage_holds_whichever_event_it_comes_in() {
        for events in [
            &[
                r#"{"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#,
                r#"{"choices":[{"finish_reason":"eos_token","delta":{}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}"#,
                "[DONE]",
            ][..],
            &[
                r#"{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}"#,
                r#"{"choices":null,"usage":{"prompt_tokens":3,"completion_tokens":2}}"#,
            ],
        ] {
            let deltas = stream(events);
            let last = deltas.last().unwrap();
            assert_eq!(last.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens)), Some((3, 2)));
            assert_eq!(deltas.iter().filter(|delta| delta.finish_reason == "stop").count(), 1, "{deltas:?}");
            assert_eq!(deltas.iter().filter(|delta| delta.usage.is_some()).count(), 1);
        }
    }

    #[test]
    fn tool_calls_are_numbered_from_0_and_named_once_with_ids_of_their_own() {
        let deltas = stream(&[
            r#"{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"x","function":{"name":"f","arguments":""}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"x","function":{"name":"f","arguments":"{\"a\":"}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":1,"function":{"name":null,"arguments":"1}"}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":2,"id":"x","function":{"name":"g","arguments":{"b":2}}}]}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}"#,
            "[DONE]",
        ]);
        let calls = calls(&deltas);
        assert_eq!(calls.iter().map(|call| call["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 0, 0, 1]);
        let names: Vec<_> = calls.iter().map(|call| call["function"].get("name").is_some()).collect();
        assert_eq!(names, [true, false, false, true]);
        let arguments: Vec<_> = calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(arguments, ["", "{\"a\":", "1}", "{\"b\":2}"]);
        assert_eq!((&calls[0]["id"], &calls[0]["type"]), (&json!("x"), &json!("function")));
        assert_ne!(calls[3]["id"], "x", "an id is used once");
    }

    #[test]
    fn calls_without_numbers_are_told_apart_by_their_names() {
        let deltas = stream(&[
            r#"{"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":"{}"}},{"function":{"name":"g","arguments":"{}"}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":" "}}]}}]}"#,
            "[DONE]",
        ]);
        let calls = calls(&deltas);
        assert_eq!(calls.iter().map(|call| call["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 1]);
        assert_ne!(calls[0]["id"], calls[1]["id"]);
    }

    #[test]
    fn a_cut_stream_has_no_finish_and_one_that_says_done_has() {
        let cut = read("data: {\"choices\":[{\"index\":null,\"delta\":{\"content\":\"a\"}}]}\n\n").unwrap();
        assert!(cut.iter().all(|delta| delta.finish_reason.is_empty()));
        let done =
            read("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\ndata: {\"x\":1}").unwrap();
        assert_eq!(done.last().unwrap().finish_reason, "stop");
    }

    #[test]
    fn errors_in_any_form_keep_their_text() {
        for (event, code) in [
            (r#"{"error":{"message":"bad","code":"c"}}"#, Some("c")),
            (r#"{"error":{"message":"bad","code":7}}"#, Some("7")),
            (r#"{"error":"bad"}"#, Some("bad_worker")),
        ] {
            let error = read(&format!("data: {event}\n\n")).unwrap_err();
            assert_eq!((error.message.as_str(), error.code.as_deref()), ("bad", code));
        }
        assert_eq!(read("data: {x\n\n").unwrap_err().status, 502);
        assert_eq!(read("data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n").unwrap_err().status, 502);
    }

    #[test]
    fn a_whole_answer_is_read_like_a_stream() {
        let body = br#"{"choices":[{"index":0,"message":{"role":"assistant","content":null,"reasoning":"r",
            "tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]},"finish_reason":"tool_use"},
            {"text":"t"}],"usage":{"prompt_tokens":1,"completion_tokens":null}}"#;
        let deltas = Normaliser::default().whole(body).unwrap();
        assert_eq!((deltas[0].reasoning.as_str(), deltas[0].finish_reason.as_str()), ("r", "tool_calls"));
        assert_eq!((deltas[1].text.as_str(), deltas[2].finish_reason.as_str(), deltas[2].index), ("t", "stop", 1));
        assert_eq!(deltas[3].usage.map(|usage| usage.prompt_tokens), Some(1));
    }
}
