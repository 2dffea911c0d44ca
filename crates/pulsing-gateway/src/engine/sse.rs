//! Looks at an engine's event stream as it passes: where events end, and whether the last one was the end.

use bytes::{Bytes, BytesMut};

use super::lines::MAX_LINE;
use super::message::usage_in;
use crate::api::Api;
use crate::protocol::Usage;

/// How much of the end of a stream is looked at for usage and the reason it finished.
const TAIL: usize = 2048;
/// An event larger than this goes out in parts.
const MAX_HELD: usize = 1 << 20;

/// Lets whole events through, unchanged. Half an event is no use to a client, and after one an error event could not be
/// told apart from it.
#[derive(Default)]
pub(super) struct Gate {
    held: BytesMut,
    tail: Vec<u8>,
    /// Bytes since the last line end.
    line: usize,
    /// A response ends with an event of its own, which is as long as the response.
    response: Option<bool>,
}

impl Gate {
    /// For the events of such a request.
    pub(super) fn new(api: Api) -> Self {
        Self { response: (api == Api::Responses).then_some(false), ..Self::default() }
    }
    /// What may go out now that these bytes came.
    pub(super) fn push(&mut self, bytes: Bytes) -> Option<Bytes> {
        self.line = match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => bytes.len() - end - 1,
            None => self.line + bytes.len(),
        };
        if self.held.is_empty() {
            // The common case: an engine writes event by event.
            let end = last_boundary(&bytes);
            if end == bytes.len() {
                return self.pass(bytes);
            }
            self.held.extend_from_slice(&bytes[end..]);
            return self.pass(bytes.slice(..end));
        }
        // A boundary may lie across what was held and what came.
        let known = self.held.len().saturating_sub(3);
        self.held.extend_from_slice(&bytes);
        let end = match last_boundary(&self.held[known..]) {
            0 if self.held.len() < MAX_HELD => return None,
            0 => self.held.len(),
            end => known + end,
        };
        let out = self.held.split_to(end).freeze();
        self.pass(out)
    }

    fn pass(&mut self, bytes: Bytes) -> Option<Bytes> {
        if bytes.is_empty() {
            return None;
        }
        if self.response == Some(false) {
            self.response = Some(ends_response(&bytes));
        }
        let news = &bytes[bytes.len().saturating_sub(TAIL)..];
        if self.tail.len() + news.len() > 2 * TAIL {
            let spare = self.tail.len().saturating_sub(TAIL.saturating_sub(news.len()));
            self.tail.drain(..spare);
        }
        self.tail.extend_from_slice(news);
        Some(bytes)
    }

    /// The events are those of a response.
    pub(super) fn is_of_response(&self) -> bool {
        self.response.is_some()
    }
    /// A line has come that is too long for an event.
    pub(super) fn is_too_long(&self) -> bool {
        self.line > MAX_LINE
    }
    /// `data: [DONE]` was the last thing that passed.
    pub(super) fn is_done(&self) -> bool {
        self.response.unwrap_or_else(|| self.tail.trim_ascii_end().ends_with(b"[DONE]"))
    }

    /// The body ended as HTTP says: what still has to go out, or `None` if the answer was not complete.
    pub(super) fn finish(&mut self) -> Option<Bytes> {
        let mut rest = std::mem::take(&mut self.held);
        let complete = rest.is_empty() || self.push_rest(&mut rest);
        if complete && self.is_done() {
            return Some(rest.freeze());
        }
        if !complete || self.response.is_some() || !self.finished() {
            return None;
        }
        // Some engines leave it out; clients that wait for it would call the answer cut.
        rest.extend_from_slice(b"data: [DONE]\n\n");
        Some(rest.freeze())
    }

    /// An event without its blank line at the very end of a stream is whole if a line break or `[DONE]` ends it.
    fn push_rest(&mut self, rest: &mut BytesMut) -> bool {
        let done = rest.trim_ascii_end().ends_with(b"[DONE]");
        if !done && !rest.ends_with(b"\n") {
            return false;
        }
        rest.extend_from_slice(if rest.ends_with(b"\n") { b"\n" } else { b"\n\n" });
        self.pass(Bytes::copy_from_slice(rest));
        true
    }

    fn finished(&self) -> bool {
        const KEY: &[u8] = b"\"finish_reason\":";
        self.tail
            .windows(KEY.len())
            .enumerate()
            .filter(|(_, window)| *window == KEY)
            .any(|(at, _)| self.tail[at + KEY.len()..].trim_ascii_start().starts_with(b"\""))
    }

    /// Tokens, if the engine said so near the end.
    pub(super) fn usage(&self) -> Option<Usage> {
        usage_in(&self.tail)
    }
}

/// Holds one of the events that end a response. In text the quotes would stand behind backslashes.
fn ends_response(bytes: &[u8]) -> bool {
    ["completed", "incomplete", "failed"].iter().any(|status| {
        [format!("event: response.{status}\n"), format!("\"type\":\"response.{status}\"")]
            .iter()
            .any(|mark| bytes.windows(mark.len()).any(|window| window == mark.as_bytes()))
    })
}

/// Behind the last blank line; 0 if there is none. Line ends may be LF, CRLF or mixed.
fn last_boundary(bytes: &[u8]) -> usize {
    let mut end = bytes.len();
    while let Some(at) = bytes[..end].iter().rposition(|byte| *byte == b'\n') {
        if bytes[..at].ends_with(b"\n") || bytes[..at].ends_with(b"\n\r") {
            return at + 1;
        }
        end = at;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"日本\"},\"finish_reason\":null}]}\n\n: ping\n\n\
        data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\r\n\r\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}}\n\ndata: [DONE]\n\n";

    fn run(parts: &[&[u8]]) -> (Vec<u8>, bool, Option<Usage>) {
        let mut gate = Gate::default();
        let mut out = Vec::new();
        for part in parts {
            if let Some(bytes) = gate.push(Bytes::copy_from_slice(part)) {
                assert!(!bytes.is_empty());
                out.extend_from_slice(&bytes);
                assert_eq!(last_boundary(&out), out.len(), "half an event went out");
            }
        }
        match gate.finish() {
            Some(rest) => {
                out.extend_from_slice(&rest);
                (out, true, gate.usage())
            }
            None => (out, false, gate.usage()),
        }
    }

    #[test]
    fn bytes_pass_unchanged_however_they_are_cut() {
        let bytes = STREAM.as_bytes();
        let usage = Some(Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 0 });
        for cut in 0..bytes.len() {
            assert_eq!(run(&[&bytes[..cut], &bytes[cut..]]), (bytes.to_vec(), true, usage), "cut at {cut}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(run(&single), (bytes.to_vec(), true, usage));
    }

    #[test]
    fn a_stream_without_its_end_is_not_complete() {
        let cut = STREAM.find("data: {\"choices\":[{\"delta\":{},").unwrap();
        for (text, out) in [
            ("", ""),
            (&STREAM[..cut], &STREAM[..cut]),
            (&STREAM[..cut + 9], &STREAM[..cut]),
            ("data: {\"error\":{}}\n\n", "data: {\"error\":{}}\n\n"),
        ] {
            let (passed, complete, _) = run(&[text.as_bytes()]);
            assert_eq!((String::from_utf8(passed).unwrap().as_str(), complete), (out, false), "{text:?}");
        }
    }

    #[test]
    fn the_end_mark_is_made_good_when_only_that_is_missing() {
        let text = "data: {\"choices\":[{\"delta\":{},\"finish_reason\": \"length\"}]}\n\n";
        assert_eq!(run(&[text.as_bytes()]), (format!("{text}data: [DONE]\n\n").into_bytes(), true, None));
        let (out, complete, _) = run(&[text.as_bytes(), b"data: [DONE]"]);
        assert_eq!((out, complete), (format!("{text}data: [DONE]\n\n").into_bytes(), true));
    }

    #[test]
    fn a_huge_event_is_not_held_for_ever_and_the_tail_stays_small() {
        let mut gate = Gate::default();
        let mut passed = 0;
        for _ in 0..40 {
            passed += gate.push(Bytes::from(vec![b'x'; 100_000])).map_or(0, |bytes| bytes.len());
        }
        assert!(passed >= 2 << 20);
        assert!(gate.tail.len() <= 2 * TAIL && gate.held.len() <= MAX_HELD + 100_000);
    }
}
