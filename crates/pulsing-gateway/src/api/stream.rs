//! The answer as server-sent events, to the letter of what strict clients accept: the role first, text and finish reason
//! in separate events, usage only when asked for and with an empty `choices`, then `[DONE]`.

use super::{
    Api, ApiError, Envelope, add_usage, check_index, finish_reason, push_json_string, push_usage, worker_json,
};
use crate::protocol::{Delta, Usage};

/// A comment: keeps idle connections open, and is no event to anyone.
const PING: &[u8] = b": ping\n\n";

/// Turns deltas into events.
pub struct StreamWriter {
    api: Api,
    /// `data: {"id":...,"choices":[` of every event of this stream.
    head: Vec<u8>,
    include_usage: bool,
    choices: Vec<Phase>,
    usage: Option<Usage>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Open,
    Finished,
}

impl StreamWriter {
    /// A stream without events yet.
    pub fn new(envelope: &Envelope, include_usage: bool) -> Self {
        let object = match envelope.api {
            Api::Chat => "chat.completion.chunk",
            _ => "text_completion",
        };
        let head = format!("data: {{{}\"choices\":[", envelope.head(object)).into_bytes();
        Self {
            api: envelope.api,
            head,
            include_usage,
            choices: vec![Phase::New; envelope.choices as usize],
            usage: None,
        }
    }

    /// Tokens spent, as far as the worker said.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Appends the events of one piece.
    ///
    /// # Errors
    /// 502 when the worker breaks its protocol.
    pub fn push(&mut self, out: &mut Vec<u8>, delta: &Delta) -> Result<(), ApiError> {
        add_usage(&mut self.usage, delta.usage);
        let index = check_index(delta, self.choices.len() as u32)?;
        let finish = finish_reason(delta)?;
        if self.choices[index] == Phase::Finished {
            return Ok(());
        }
        if self.choices[index] == Phase::New {
            self.choices[index] = Phase::Open;
            if self.api == Api::Chat {
                self.event(out, index, None, None, |out| {
                    out.extend_from_slice(b"\"role\":\"assistant\",\"content\":\"\"");
                    Ok(())
                })?;
            }
        }
        let logprobs = match delta.logprobs_json.as_str() {
            "" => None,
            text => Some(worker_json("logprobs", text)?),
        };
        let has_content = !delta.text.is_empty() || !delta.tool_calls_json.is_empty() || !delta.reasoning.is_empty();
        if has_content || logprobs.is_some() {
            self.event(out, index, logprobs.as_deref(), None, |out| content(out, delta, self.api))?;
        }
        if let Some(reason) = finish {
            self.choices[index] = Phase::Finished;
            self.event(out, index, None, Some(reason), |_| Ok(()))?;
        }
        Ok(())
    }

    /// Appends what ends a complete stream.
    ///
    /// # Errors
    /// 502 when a choice has no finish reason: a cut stream must not look whole.
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), ApiError> {
        if self.choices.iter().any(|phase| *phase != Phase::Finished) {
            return Err(ApiError::worker_fault("the worker ended before the answer was complete"));
        }
        if let (true, Some(usage)) = (self.include_usage, self.usage) {
            out.extend_from_slice(&self.head);
            out.extend_from_slice(b"],\"usage\":");
            push_usage(out, &usage);
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        Ok(())
    }

    /// Appends an error event. Neither a finish reason nor `[DONE]` may follow it.
    pub fn error(out: &mut Vec<u8>, error: &ApiError) {
        out.extend_from_slice(b"data: ");
        // An event is one line; inside JSON a line break is only white space.
        out.extend(error.to_json().iter().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte }));
        out.extend_from_slice(b"\n\n");
    }

    /// Appends a comment that keeps the connection open.
    pub fn ping(out: &mut Vec<u8>) {
        out.extend_from_slice(PING);
    }

    fn event(
        &self,
        out: &mut Vec<u8>,
        index: usize,
        logprobs: Option<&str>,
        finish: Option<&str>,
        content: impl FnOnce(&mut Vec<u8>) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let begun = out.len();
        out.extend_from_slice(&self.head);
        out.extend_from_slice(b"{\"index\":");
        out.extend_from_slice(index.to_string().as_bytes());
        match self.api {
            Api::Chat => {
                out.extend_from_slice(b",\"delta\":{");
                // An error event must not follow half an event.
                content(out).inspect_err(|_| out.truncate(begun))?;
                out.push(b'}');
            }
            _ => {
                out.extend_from_slice(b",\"text\":");
                let before = out.len();
                content(out).inspect_err(|_| out.truncate(begun))?;
                if out.len() == before {
                    out.extend_from_slice(b"\"\"");
                }
            }
        }
        out.extend_from_slice(b",\"logprobs\":");
        out.extend_from_slice(logprobs.unwrap_or("null").as_bytes());
        out.extend_from_slice(b",\"finish_reason\":");
        match finish {
            Some(reason) => push_json_string(out, reason),
            None => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(if self.include_usage { b"}],\"usage\":null}\n\n" } else { b"}]}\n\n" });
        Ok(())
    }
}

/// Writes the inside of `delta`, or the completion's `text`.
fn content(out: &mut Vec<u8>, delta: &Delta, api: Api) -> Result<(), ApiError> {
    if api != Api::Chat {
        push_json_string(out, &delta.text);
        return Ok(());
    }
    let mut separator: &[u8] = b"";
    let mut key = |out: &mut Vec<u8>, name: &str| {
        out.extend_from_slice(std::mem::replace(&mut separator, b","));
        out.extend_from_slice(format!("\"{name}\":").as_bytes());
    };
    if !delta.reasoning.is_empty() {
        key(out, "reasoning_content");
        push_json_string(out, &delta.reasoning);
    }
    if !delta.text.is_empty() {
        key(out, "content");
        push_json_string(out, &delta.text);
    }
    if !delta.tool_calls_json.is_empty() {
        key(out, "tool_calls");
        out.extend_from_slice(worker_json("tool calls", &delta.tool_calls_json)?.as_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(api: Api, choices: u32) -> Envelope {
        Envelope { api, id: "i".into(), created: 7, model: "m".into(), choices }
    }
    fn run(writer: &mut StreamWriter, deltas: &[Delta]) -> String {
        let mut out = Vec::new();
        for delta in deltas {
            writer.push(&mut out, delta).unwrap();
        }
        writer.finish(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }
    fn last(text: &str) -> Delta {
        let usage = Usage { prompt_tokens: 1, completion_tokens: 2, cached_tokens: 0 };
        Delta { text: text.into(), finish_reason: "stop".into(), usage: Some(usage), ..Delta::default() }
    }

    #[test]
    fn a_one_token_chat_answer_is_role_text_finish_done() {
        let text = run(&mut StreamWriter::new(&envelope(Api::Chat, 1), false), &[last("é\n")]);
        let head = r#"data: {"id":"i","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"#;
        let expected = [
            format!(r#"{head}"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}"#),
            format!(r#"{head}"content":"é\n"}},"logprobs":null,"finish_reason":null}}]}}"#),
            format!(r#"{head}}},"logprobs":null,"finish_reason":"stop"}}]}}"#),
            "data: [DONE]".to_owned(),
            String::new(),
        ];
        assert_eq!(text, expected.join("\n\n"));
    }

    #[test]
    fn usage_comes_only_when_asked_for_and_without_choices() {
        let text = run(&mut StreamWriter::new(&envelope(Api::Completions, 1), true), &[last("a")]);
        let events: Vec<&str> = text.trim_end().split("\n\n").collect();
        assert_eq!(events.len(), 4, "{text}");
        assert!(events[..2].iter().all(|event| event.ends_with(r#","usage":null}"#)), "{text}");
        assert!(
            events[2].contains(r#""choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3"#)
        );
        assert_eq!(events[3], "data: [DONE]");
    }

    #[test]
    fn json_of_a_worker_cannot_break_an_event() {
        let mut writer = StreamWriter::new(&envelope(Api::Chat, 1), false);
        let mut out = Vec::new();
        let tools = Delta { tool_calls_json: "[\n{\"index\":0}\r\n]".into(), ..Delta::default() };
        writer.push(&mut out, &tools).unwrap();
        let text = String::from_utf8(out.clone()).unwrap();
        assert!(text.trim_end().split("\n\n").all(|event| !event.contains('\n')), "{text:?}");
        let bad = Delta { tool_calls_json: "]}\n\ndata: x".into(), ..Delta::default() };
        assert_eq!(writer.push(&mut out, &bad).unwrap_err().status, 502);
        assert_eq!(String::from_utf8(out).unwrap(), text, "half an event before the error");
    }

    #[test]
    fn each_choice_has_its_role_and_one_finish() {
        let mut writer = StreamWriter::new(&envelope(Api::Chat, 2), false);
        let text = run(
            &mut writer,
            &[Delta { index: 1, ..last("b") }, Delta { index: 1, ..last("late") }, Delta { index: 0, ..last("a") }],
        );
        assert_eq!(text.matches("\"role\"").count(), 2);
        assert_eq!(text.matches("\"finish_reason\":\"stop\"").count(), 2);
        assert!(!text.contains("late"));
    }

    #[test]
    fn a_stream_without_a_finish_reason_is_no_success() {
        let mut writer = StreamWriter::new(&envelope(Api::Chat, 1), false);
        let mut out = Vec::new();
        writer.push(&mut out, &Delta { text: "a".into(), ..Delta::default() }).unwrap();
        assert_eq!(writer.finish(&mut out).unwrap_err().status, 502);
    }
}
