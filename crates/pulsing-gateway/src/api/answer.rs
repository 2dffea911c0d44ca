//! The answer that comes in one piece.

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::{
    Api, ApiError, Envelope, add_usage, check_index, finish_reason, push_json_string, push_usage, worker_json,
};
use crate::protocol::{Delta, Usage};

/// Collects deltas until they are all there.
pub struct Answer {
    envelope: Envelope,
    choices: Vec<Choice>,
}

#[derive(Default)]
struct Choice {
    text: String,
    reasoning: String,
    tool_calls: Vec<Value>,
    logprobs: Option<Map<String, Value>>,
    finish: Option<String>,
    /// Of the Worker that sent it with this choice; it may hold for others of its choices too.
    usage: Option<Usage>,
}

impl Answer {
    /// An answer without text yet.
    pub fn new(envelope: Envelope) -> Self {
        let choices = (0..envelope.choices).map(|_| Choice::default()).collect();
        Self { envelope, choices }
    }

    /// Forgets what came of these choices.
    pub fn begin_again(&mut self, choices: Range<u32>) {
        for choice in choices.filter_map(|index| usize::try_from(index).ok()) {
            if let Some(choice) = self.choices.get_mut(choice) {
                *choice = Choice::default();
            }
        }
    }

    /// Adds a piece.
    ///
    /// # Errors
    /// 502 when the worker breaks its protocol.
    pub fn push(&mut self, delta: &Delta) -> Result<(), ApiError> {
        let index = check_index(delta, self.envelope.choices)?;
        let finish = finish_reason(delta)?;
        let choice = &mut self.choices[index];
        add_usage(&mut choice.usage, delta.usage);
        if choice.finish.is_some() {
            return Ok(());
        }
        choice.text.push_str(&delta.text);
        choice.reasoning.push_str(&delta.reasoning);
        if !delta.tool_calls_json.is_empty() {
            choice.merge_tool_calls(&delta.tool_calls_json)?;
        }
        if !delta.logprobs_json.is_empty() {
            choice.merge_logprobs(&delta.logprobs_json)?;
        }
        choice.finish = finish.map(str::to_owned);
        Ok(())
    }

    /// Tokens spent, as far as the worker said.
    pub fn usage(&self) -> Option<Usage> {
        let mut sum = None;
        self.choices.iter().for_each(|choice| add_usage(&mut sum, choice.usage));
        sum
    }

    /// The body.
    ///
    /// # Errors
    /// 502 when the worker ended before every choice had a finish reason: a cut answer must not look whole.
    pub fn finish(self) -> Result<Vec<u8>, ApiError> {
        let object = match self.envelope.api {
            Api::Chat => "chat.completion",
            _ => "text_completion",
        };
        let size: usize = self.choices.iter().map(|choice| choice.text.len() + 128).sum();
        let usage = self.usage();
        let mut out = Vec::with_capacity(size + 256);
        out.push(b'{');
        out.extend_from_slice(self.envelope.head(object).as_bytes());
        out.extend_from_slice(b"\"choices\":[");
        for (index, choice) in self.choices.into_iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            choice.write(&mut out, index, self.envelope.api)?;
        }
        out.push(b']');
        // It may be left out, but what is there must be an object.
        if let Some(usage) = usage {
            out.extend_from_slice(b",\"usage\":");
            push_usage(&mut out, &usage);
        }
        out.push(b'}');
        Ok(out)
    }
}

impl Choice {
    /// Pieces of one call share its index; names and ids come once, arguments in pieces.
    fn merge_tool_calls(&mut self, text: &str) -> Result<(), ApiError> {
        let pieces: Vec<Map<String, Value>> = serde_json::from_str(text).map_err(|error| {
            ApiError::worker_fault(format!("the worker sent tool calls that are no array of objects: {error}"))
        })?;
        for mut piece in pieces {
            let index = piece.remove("index").and_then(|index| index.as_u64()).unwrap_or(0) as usize;
            if index > self.tool_calls.len() {
                return Err(ApiError::worker_fault(format!(
                    "the worker skipped from tool call {} to {index}",
                    self.tool_calls.len()
                )));
            }
            if index == self.tool_calls.len() {
                self.tool_calls.push(json!({"id": "", "type": "function", "function": {"name": "", "arguments": ""}}));
            }
            let call = &mut self.tool_calls[index];
            for key in ["id", "type"] {
                if let Some(Value::String(value)) = piece.remove(key).filter(|value| value != "") {
                    call[key] = Value::String(value);
                }
            }
            let Some(Value::Object(function)) = piece.remove("function") else { continue };
            if let Some(Value::String(name)) = function.get("name").filter(|name| *name != "") {
                call["function"]["name"] = Value::String(name.clone());
            }
            if let (Some(Value::String(more)), Value::String(arguments)) =
                (function.get("arguments"), &mut call["function"]["arguments"])
            {
                arguments.push_str(more);
            }
        }
        Ok(())
    }

    /// Both forms of `logprobs` are objects of parallel arrays: pieces are appended array by array.
    fn merge_logprobs(&mut self, text: &str) -> Result<(), ApiError> {
        let piece: Map<String, Value> = serde_json::from_str(&worker_json("logprobs", text)?)
            .map_err(|error| ApiError::worker_fault(format!("the worker sent logprobs that are no object: {error}")))?;
        let all = self.logprobs.get_or_insert_with(Map::new);
        for (key, value) in piece {
            match (all.get_mut(&key), value) {
                (Some(Value::Array(have)), Value::Array(more)) => have.extend(more),
                (None, value) => {
                    all.insert(key, value);
                }
                (Some(slot @ Value::Null), value) => *slot = value,
                (Some(_), _) => {}
            }
        }
        Ok(())
    }

    fn write(self, out: &mut Vec<u8>, index: usize, api: Api) -> Result<(), ApiError> {
        let Some(finish) = self.finish else {
            return Err(ApiError::worker_fault("the worker ended before the answer was complete"));
        };
        out.extend_from_slice(format!("{{\"index\":{index},").as_bytes());
        match api {
            Api::Chat => {
                out.extend_from_slice(b"\"message\":{\"role\":\"assistant\",\"content\":");
                if self.text.is_empty() && !self.tool_calls.is_empty() {
                    out.extend_from_slice(b"null");
                } else {
                    push_json_string(out, &self.text);
                }
                out.extend_from_slice(b",\"refusal\":null");
                if !self.reasoning.is_empty() {
                    out.extend_from_slice(b",\"reasoning_content\":");
                    push_json_string(out, &self.reasoning);
                }
                if !self.tool_calls.is_empty() {
                    out.extend_from_slice(format!(",\"tool_calls\":{}", Value::Array(self.tool_calls)).as_bytes());
                }
                out.push(b'}');
            }
            _ => {
                out.extend_from_slice(b"\"text\":");
                push_json_string(out, &self.text);
            }
        }
        match self.logprobs {
            Some(logprobs) => out.extend_from_slice(format!(",\"logprobs\":{}", Value::Object(logprobs)).as_bytes()),
            None => out.extend_from_slice(b",\"logprobs\":null"),
        }
        out.extend_from_slice(b",\"finish_reason\":");
        push_json_string(out, &finish);
        out.push(b'}');
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(api: Api, choices: u32) -> Answer {
        Answer::new(Envelope { api, id: "id-1".into(), created: 7, model: "m\"x".into(), choices })
    }
    fn delta(text: &str) -> Delta {
        Delta { text: text.into(), ..Delta::default() }
    }
    fn end(reason: &str) -> Delta {
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 1 };
        Delta { finish_reason: reason.into(), usage: Some(usage), ..Delta::default() }
    }
    fn value(answer: Answer) -> Value {
        serde_json::from_slice(&answer.finish().unwrap()).unwrap()
    }

    #[test]
    fn a_chat_answer_has_every_key_openai_names() {
        let mut chat = answer(Api::Chat, 1);
        for piece in [delta("Hé"), delta("\"\n"), end("length")] {
            chat.push(&piece).unwrap();
        }
        let expected = json!({
            "id": "id-1", "object": "chat.completion", "created": 7, "model": "m\"x",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hé\"\n", "refusal": null},
                         "logprobs": null, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
                      "prompt_tokens_details": {"cached_tokens": 1}},
        });
        assert_eq!(value(chat), expected);
    }

    #[test]
    fn usage_that_no_worker_told_is_left_out_as_clients_take_no_null() {
        for api in [Api::Chat, Api::Completions] {
            let mut untold = answer(api, 1);
            untold.push(&Delta { usage: None, ..end("stop") }).unwrap();
            assert_eq!(value(untold).get("usage"), None, "{api:?}");
        }
    }

    #[test]
    fn choices_come_in_order_and_usage_is_summed() {
        let mut two = answer(Api::Completions, 2);
        for (index, text) in [(1, "b"), (0, "a")] {
            two.push(&Delta { index, ..delta(text) }).unwrap();
            two.push(&Delta { index, ..end("stop") }).unwrap();
        }
        let body = value(two);
        assert_eq!((&body["choices"][0]["text"], &body["choices"][1]["text"]), (&json!("a"), &json!("b")));
        assert_eq!(body["usage"]["total_tokens"], 10);
        assert_eq!(body["object"], "text_completion");
    }

    #[test]
    fn tool_calls_and_logprobs_are_joined() {
        let mut chat = answer(Api::Chat, 1);
        for json in [
            r#"[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\""}}]"#,
            r#"[{"index":0,"function":{"arguments":":1}"}},{"index":1,"id":"c2","function":{"name":"g","arguments":"{}"}}]"#,
        ] {
            chat.push(&Delta {
                tool_calls_json: json.into(),
                logprobs_json: r#"{"content":[1],"refusal":null}"#.into(),
                ..delta("")
            })
            .unwrap();
        }
        chat.push(&end("tool_calls")).unwrap();
        let body = value(chat);
        let message = &body["choices"][0]["message"];
        assert_eq!(message["content"], Value::Null);
        assert_eq!(
            message["tool_calls"],
            json!([{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}},
                   {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}}])
        );
        assert_eq!(body["choices"][0]["logprobs"], json!({"content": [1, 1], "refusal": null}));
    }

    #[test]
    fn a_cut_answer_is_an_error_not_an_answer() {
        let mut chat = answer(Api::Chat, 1);
        chat.push(&delta("half")).unwrap();
        assert_eq!(chat.finish().unwrap_err().status, 502);
        for bad in [
            Delta { index: 1, ..delta("x") },
            Delta { finish_reason: "abort".into(), ..delta("") },
            Delta { tool_calls_json: "{".into(), ..delta("") },
            Delta { logprobs_json: "NaN".into(), ..delta("") },
        ] {
            assert_eq!(answer(Api::Chat, 1).push(&bad).unwrap_err().status, 502);
        }
    }
}
