//! The rest of a stream from another engine, written as if the first one went on.

use bytes::Bytes;

use super::lines::Lines;
use super::sent::{Choice, Event, Sent};
use super::splice::{Splice, with_fields};
use crate::api::ApiError;
use crate::protocol::{Delta, Usage};

/// Rewrites what has to be, and nothing else: `id`, `created` and `model` are the first engine's, who speaks is told once,
/// and the tokens that the client had count as the answer's and not as the prompt's.
pub(super) struct Seam {
    lines: Lines,
    head: Vec<Splice>,
    role: bool,
    had: Had,
    usage: Option<Usage>,
    done: bool,
}

/// What the client had of the answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Had {
    /// Tokens, which the engine that goes on counts as its prompt's.
    pub(super) tokens: u32,
    /// Everything but the usage: nothing else is wanted.
    pub(super) all: bool,
}

impl Had {
    /// The usage of both halves as that of one answer.
    pub(super) fn usage(self, usage: Usage) -> Usage {
        let prompt_tokens = usage.prompt_tokens.saturating_sub(self.tokens);
        Usage {
            prompt_tokens,
            completion_tokens: usage.completion_tokens.saturating_add(self.tokens),
            cached_tokens: usage.cached_tokens.min(prompt_tokens),
        }
    }
    /// The same of what was read.
    pub(super) fn deltas(self, deltas: &mut Vec<Delta>) -> Result<(), ApiError> {
        for delta in deltas.iter_mut() {
            if !delta.reasoning.is_empty() || !delta.tool_calls_json.is_empty() {
                return Err(strayed());
            }
            delta.usage = delta.usage.map(|usage| self.usage(usage));
        }
        if self.all {
            deltas.retain(|delta| delta.usage.is_some());
        }
        Ok(())
    }
}

fn strayed() -> ApiError {
    ApiError::worker_fault(
        "the worker was lost in the middle of its answer, and the one that went on answered with more than text",
    )
}

impl Seam {
    /// For the rest of what was `sent`.
    pub(super) fn new(sent: &Sent, had: Had) -> Self {
        let head = sent.head.clone().unwrap_or_default();
        let names = ["id", "created", "model"].into_iter();
        let head = names.zip(head).filter_map(|(name, value)| Some(Splice::replace(name, value?))).collect();
        Self { lines: Lines::default(), head, role: sent.role, had, usage: None, done: false }
    }

    /// The events that these bytes complete; empty if there are none.
    ///
    /// # Errors
    /// They cannot be read, or say more than text.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Bytes, ApiError> {
        self.through(|lines, event| lines.push(bytes, event))
    }
    /// What is left at the end of the body.
    ///
    /// # Errors
    /// As for [`push`](Self::push), and if the answer is not complete.
    pub(super) fn finish(&mut self) -> Result<Bytes, ApiError> {
        let rest = self.through(|lines, event| lines.finish(event))?;
        match self.done {
            true => Ok(rest),
            false => Err(ApiError::worker_fault("the engine ended its stream before the answer was complete")),
        }
    }
    /// `[DONE]` came.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }
    /// Tokens of the whole answer, if the engine said so.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    fn through(
        &mut self,
        read: impl FnOnce(&mut Lines, &mut dyn FnMut(&str) -> Result<(), String>) -> Result<(), String>,
    ) -> Result<Bytes, ApiError> {
        let mut out = Vec::new();
        let mut failed = None;
        let mut lines = std::mem::take(&mut self.lines);
        let read = read(&mut lines, &mut |payload| {
            if failed.is_none() {
                failed = self.event(payload, &mut out).err();
            }
            Ok(())
        });
        self.lines = lines;
        match failed {
            Some(error) => Err(error),
            None => read.map(|()| out.into()).map_err(ApiError::worker_fault),
        }
    }

    fn event(&mut self, payload: &str, out: &mut Vec<u8>) -> Result<(), ApiError> {
        if self.done || payload.trim_ascii().is_empty() {
            return Ok(());
        }
        if payload.trim_ascii() == "[DONE]" {
            self.done = true;
            out.extend_from_slice(b"data: [DONE]\n\n");
            return Ok(());
        }
        let unreadable = || ApiError::worker_fault("the engine sent an event that cannot be read");
        let event: Event<'_> = serde_json::from_str(payload).map_err(|_| unreadable())?;
        let mut fields = self.head.clone();
        let mut choices = Vec::new();
        for raw in event.choices.iter().flatten() {
            let choice: Choice<'_> = serde_json::from_str(raw.get()).map_err(|_| unreadable())?;
            let said = choice.said().ok_or_else(strayed)?;
            let told = self.role;
            self.role |= said.role;
            match choice.delta {
                _ if self.had.all => {}
                Some(_) if told && said.role && said.text.is_empty() && said.finish.is_none() => {}
                Some(delta) if told && said.role => {
                    let delta = replaced(delta.get(), &[Splice::set("role", "null")]).ok_or_else(unreadable)?;
                    choices.push(replaced(raw.get(), &[Splice::set("delta", delta)]).ok_or_else(unreadable)?);
                }
                _ => choices.push(raw.get().to_owned()),
            }
        }
        // An event of choices that are all dropped is none.
        if choices.is_empty() && event.choices.as_ref().is_some_and(|choices| !choices.is_empty()) {
            return Ok(());
        }
        if !choices.is_empty() {
            fields.push(Splice::replace("choices", format!("[{}]", choices.join(","))));
        }
        if let Some(usage) = event.usage.and_then(|raw| self.whole(raw.get())) {
            fields.push(Splice::replace("usage", usage));
        }
        out.extend_from_slice(b"data: ");
        // An event is one line; inside JSON a line break is only white space.
        let written = replaced(payload, &fields).ok_or_else(unreadable)?;
        out.extend(written.bytes().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }));
        out.extend_from_slice(b"\n\n");
        Ok(())
    }

    fn whole(&mut self, raw: &str) -> Option<String> {
        let usage = super::message::usage_of(&serde_json::from_str(raw).ok()?)?;
        let whole = self.had.usage(usage);
        self.usage = Some(whole);
        let mut fields = vec![
            Splice::replace("prompt_tokens", whole.prompt_tokens),
            Splice::replace("completion_tokens", whole.completion_tokens),
        ];
        if whole.cached_tokens != usage.cached_tokens {
            let details = format!("{{\"cached_tokens\":{}}}", whole.cached_tokens);
            fields.push(Splice::replace("prompt_tokens_details", details));
        }
        replaced(raw, &fields)
    }
}

fn replaced(object: &str, fields: &[Splice]) -> Option<String> {
    let spliced = with_fields(&Bytes::copy_from_slice(object.as_bytes()), fields)?;
    String::from_utf8(spliced.into()).ok()
}
