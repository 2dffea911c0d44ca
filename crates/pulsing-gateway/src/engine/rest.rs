//! What is asked of an engine that goes on with another one's stream, and whether that is sound (S4).
//!
//! The text that the client has is put behind the prompt. A text can be cut into tokens in more than one way, so the
//! engine is asked first how it reads prompt and text: the prompt must be the one that the first engine had, and the
//! number of tokens behind it is what `max_tokens` shrinks by and what the usage of the whole answer grows by.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use pulsing_core::Error::App;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::asker::Asker;
use super::attempt::broke_off;
use super::endpoint::Endpoint;
use super::message::Forward;
use super::seam::Had;
use super::sent::Sent;
use super::splice::{Splice, with_fields};
use super::wire::WireError;
use crate::api::{Api, ApiError};
use crate::aside::aside;
use crate::dial;
use crate::dispatch::{Failure, Job, Placement, broken};
use crate::pool::{Continues, Worker};
use crate::tunnel;

/// Fields that say how many tokens there are to be.
const LIMITS: [&str; 3] = ["max_completion_tokens", "max_tokens", "min_tokens"];

/// The rest of a stream.
pub(crate) enum Rest {
    /// To be asked for.
    Ask { body: Bytes, had: Had },
    /// Nothing is left to be generated: the events that end it.
    Known(Bytes),
}

/// A request and what the client has of its stream, for the threads that read large ones.
#[derive(Clone)]
pub(super) struct Begun {
    api: Api,
    body: Bytes,
    pub(super) text: Arc<str>,
    /// Whose stream it is.
    continues: Option<Continues>,
}

impl Begun {
    /// What was `sent` must have been read.
    fn new(api: Api, body: &Bytes, sent: &Sent) -> Self {
        Self { api, body: body.clone(), text: sent.text.as_str().into(), continues: sent.likeness.continues }
    }
    /// Bytes that are read through for it.
    fn size(&self) -> usize {
        self.body.len() + self.text.len()
    }
    /// What `work` makes of it.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Wanted<'_>) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let begun = self.clone();
        let read = aside(self.size(), move || work(&Wanted::read(&begun).map_err(unsound)?)).await;
        read.unwrap_or_else(|| Err(unread()))
    }
    /// The request with `fields`, and with the text so far behind the prompt if it is `continued`.
    pub(super) async fn made(&self, mut fields: Vec<Splice>, continued: bool) -> Result<Bytes, Failure> {
        let begun = self.clone();
        self.read(move |wanted| {
            fields.extend(continued.then(|| wanted.with(&begun.text)));
            with_fields(&begun.body, &fields).ok_or_else(|| broken("the request is no JSON object"))
        })
        .await
    }
}

/// A request whose stream may go on elsewhere, as far as that takes looking at it.
pub(super) struct Wanted<'a> {
    fields: BTreeMap<Cow<'a, str>, &'a RawValue>,
    api: Api,
    include_usage: bool,
}

/// Fields that say nothing of how the answer goes on, or say the same to another engine.
const HARMLESS: [&str; 34] = [
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "ignore_eos",
    "logit_bias",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "min_tokens",
    "model",
    "parallel_tool_calls",
    "priority",
    "prompt",
    "prompt_cache_key",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "session_id",
    "session_params",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tools",
    "top_k",
    "top_p",
    "user",
    "user_id",
];
/// And those that must have this value: with another one the answer depends on more than its text.
const PLAIN: [(&str, &str); 16] = [
    ("add_generation_prompt", "true"),
    ("best_of", "1"),
    ("continue_final_message", "false"),
    ("echo", "false"),
    ("frequency_penalty", "0"),
    ("include_stop_str_in_output", "false"),
    ("logprobs", "false"),
    ("n", "1"),
    ("presence_penalty", "0"),
    ("repetition_penalty", "1"),
    ("return_token_ids", "false"),
    ("skip_special_tokens", "true"),
    ("spaces_between_special_tokens", "true"),
    ("tool_choice", "\"none\""),
    ("top_logprobs", "0"),
    ("use_beam_search", "false"),
];

impl<'a> Wanted<'a> {
    /// `Err` says why nobody can go on with it.
    fn read(begun: &'a Begun) -> Result<Self, &'static str> {
        let fields: BTreeMap<Cow<'a, str>, &'a RawValue> = serde_json::from_slice(&begun.body).map_err(|_| UNREAD)?;
        let same = |raw: &str, due: &str| match (raw.parse::<f64>(), due.parse::<f64>()) {
            (Ok(value), Ok(due)) => value == due,
            _ => raw == due,
        };
        for (name, value) in &fields {
            let harmless = HARMLESS.contains(&name.as_ref());
            let plain = PLAIN.iter().any(|(plain, due)| plain == name && same(value.get(), due));
            if !harmless && !plain && value.get() != "null" {
                tracing::debug!(field = %name, "a stream is not continued for this field of its request");
                return Err("its request has a field with which the rest depends on more than the text");
            }
        }
        #[derive(Default, Deserialize)]
        struct Options {
            include_usage: Option<bool>,
        }
        let options =
            fields.get("stream_options").and_then(|raw| serde_json::from_str::<Option<Options>>(raw.get()).ok());
        let include_usage = options.flatten().and_then(|options| options.include_usage).unwrap_or(false);
        let wanted = Self { fields, api: begun.api, include_usage };
        wanted.check(begun)?;
        Ok(wanted)
    }

    fn check(&self, begun: &Begun) -> Result<(), &'static str> {
        #[derive(Deserialize)]
        struct Message<'a> {
            #[serde(borrow)]
            role: Cow<'a, str>,
            #[serde(default)]
            content: Value,
        }
        if self.api == Api::Chat {
            let messages = self.get("messages").unwrap_or("[]");
            let messages: Vec<Message<'_>> =
                serde_json::from_str(messages).map_err(|_| "its messages are none that an engine goes on with")?;
            if messages.last().is_none_or(|last| last.role == "assistant") {
                return Err("its last message is an assistant's");
            }
            let is_text = |content: &Value| match content {
                Value::Array(parts) => parts.iter().all(|part| part["type"] == "text"),
                other => other.is_string() || other.is_null(),
            };
            if !messages.iter().all(|message| is_text(&message.content)) {
                return Err("its messages hold more than text");
            }
        } else {
            if !self.get("prompt").is_some_and(|prompt| prompt.starts_with('"')) {
                return Err("its prompt is no text");
            }
            if self.limit().is_none() {
                return Err("it has no max_tokens, and what an engine takes for it is not known");
            }
        }
        // vLLM holds back what may be the beginning of a stop string; of others a part of one may be out already.
        if begun.continues != Some(Continues::Vllm) && self.stops().iter().any(|stop| begins(stop, &begun.text)) {
            return Err("its text ends with what may begin a stop string");
        }
        Ok(())
    }

    fn get(&self, name: &str) -> Option<&'a str> {
        self.fields.get(name).map(|raw| raw.get()).filter(|raw| *raw != "null")
    }
    /// Most tokens of the answer.
    fn limit(&self) -> Option<u64> {
        ["max_completion_tokens", "max_tokens"].into_iter().find_map(|name| self.number(name))
    }
    fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse::<f64>().ok().map(|value| value as u64)
    }
    fn stops(&self) -> Vec<String> {
        let raw = self.get("stop").unwrap_or("[]");
        serde_json::from_str(raw)
            .or_else(|_| serde_json::from_str(raw).map(|one: String| vec![one]))
            .unwrap_or_default()
    }
    /// The client's prompt or messages with the text so far.
    fn with(&self, text: &str) -> Splice {
        let text = Value::from(text).to_string();
        if self.api == Api::Chat {
            let messages = self.get("messages").unwrap_or("[]").trim_end().strip_suffix(']').unwrap_or("[");
            return Splice::set("messages", format!("{messages},{{\"role\":\"assistant\",\"content\":{text}}}]"));
        }
        let prompt = self.get("prompt").unwrap_or("\"\"");
        Splice::set("prompt", format!("{}{}", &prompt[..prompt.len() - 1], &text[1..]))
    }
    /// What an engine is asked for the tokens of the prompt, with the `text` so far or without.
    fn question(&self, text: Option<&str>) -> Result<Value, Failure> {
        let chat = self.api == Api::Chat;
        let mut question = serde_json::Map::new();
        let names: &[&str] = if chat {
            &["chat_template", "chat_template_kwargs", "add_special_tokens"]
        } else {
            &["add_special_tokens"]
        };
        let value = |raw: &str| serde_json::from_str::<Value>(raw).map_err(|_| unread());
        for name in names {
            if let Some(raw) = self.get(name) {
                question.insert((*name).to_owned(), value(raw)?);
            }
        }
        let name = if chat { "messages" } else { "prompt" };
        let main = match text {
            Some(text) => value(&self.with(text).value)?,
            None => value(self.get(name).unwrap_or("null"))?,
        };
        question.insert(name.to_owned(), main);
        if chat {
            question.insert("add_generation_prompt".to_owned(), text.is_none().into());
            question.insert("continue_final_message".to_owned(), text.is_some().into());
        }
        Ok(question.into())
    }
}

/// `text` ends with a part of `stop`, from its beginning.
fn begins(stop: &str, text: &str) -> bool {
    (1..stop.len()).any(|end| stop.is_char_boundary(end) && text.ends_with(&stop[..end]))
}

impl Placement {
    /// What is left of a stream whose client has what was `sent`.
    pub(crate) async fn rest(
        &self,
        worker: &Arc<Worker>,
        endpoint: &Arc<Endpoint>,
        job: &Job,
        body: &Bytes,
        sent: &Sent,
    ) -> Result<Rest, Failure> {
        let begun = Begun::new(job.api, body, sent);
        let (include_usage, limit, numbers) = begun
            .read(|wanted| Ok((wanted.include_usage, wanted.limit(), LIMITS.map(|name| wanted.number(name)))))
            .await?;
        if sent.finish.is_some() && (sent.counted || !include_usage) {
            return Ok(Rest::Known(Bytes::from_static(b"data: [DONE]\n\n")));
        }
        let model = worker.model_for(self.pool.snapshot().own_name(&job.model)).unwrap_or_default();
        let mut fields = vec![Splice::set("model", Value::from(model.as_str()))];
        if sent.text.is_empty() && sent.finish.is_none() {
            return Ok(Rest::Ask { body: begun.made(fields, false).await?, had: Had { tokens: 0, all: false } });
        }
        let asker = Asker { placement: self, worker, endpoint, job, model: &model, like: &sent.likeness };
        let alone = |_: &Wanted<'_>, text: &str| Ok(json!({"prompt": text, "add_special_tokens": false}));
        let (prompt, tokens) = match (job.api, sent.likeness.continues) {
            // It puts the tokens of the text behind those of the prompt, which are not known here.
            (Api::Chat, Some(Continues::Sglang)) => match asker.tokens(&begun, alone).await {
                Ok(text) => (None, text.len()),
                // Nobody needs to know how many there are.
                Err(Failure::Final(_)) if limit.is_none() && !include_usage => (None, 0),
                Err(Failure::Final(_)) => {
                    let (prompt, text) = asker.counted(&begun).await?;
                    (Some(prompt), text)
                }
                Err(failure) => return Err(failure),
            },
            _ => {
                let asked = asker.tokens(&begun, |wanted, _| wanted.question(None)).await;
                // Where none like it answers questions, vLLM shows with an answer how it has read what was sent.
                let vllm = sent.likeness.continues == Some(Continues::Vllm);
                let shows = vllm && matches!(asked, Err(Failure::Final(_)));
                let (prompt, both) = if shows {
                    (asker.shown(&begun, false).await?, asker.shown(&begun, true).await?)
                } else {
                    (asked?, asker.tokens(&begun, |wanted, text| wanted.question(Some(text))).await?)
                };
                let Some(text) = both.strip_prefix(prompt.as_slice()) else {
                    return Err(unsound("the engine reads the prompt differently with the text behind it"));
                };
                if job.api == Api::Chat {
                    let same = match asker.text(text).await {
                        Ok(said) => said == sent.text,
                        // Where the tokens are those of the text alone, they are those of no other one.
                        Err(Failure::Final(_)) if shows => asker.shown_alone(&begun).await? == text,
                        Err(Failure::Final(_)) => asker.tokens(&begun, alone).await? == text,
                        Err(failure) => return Err(failure),
                    };
                    if !same {
                        return Err(unsound("the engine's chat template changes the text"));
                    }
                }
                (Some(prompt.len()), text.len())
            }
        };
        let had = Had { tokens: u32::try_from(tokens).unwrap_or(u32::MAX), all: sent.finish.is_some() };
        if limit.is_some_and(|limit| limit <= tokens as u64) || sent.finish.as_deref() == Some("length") {
            if include_usage && prompt.is_none() {
                return Err(unsound("the tokens of its prompt are not known"));
            }
            return Ok(Rest::Known(ends(job.api, sent, include_usage.then_some((prompt.unwrap_or(0), tokens)))));
        }
        let left = |number: u64| number.saturating_sub(tokens as u64);
        fields
            .extend(LIMITS.iter().zip(numbers).filter_map(|(name, number)| Some(Splice::replace(name, left(number?)))));
        if job.api == Api::Chat {
            fields.extend(unfinished());
        }
        Ok(Rest::Ask { body: begun.made(fields, true).await?, had })
    }
}

/// Why nobody can go on with a stream whose client has what was `sent`; `None` if somebody may.
pub(crate) async fn hindrance(api: Api, body: &Bytes, sent: &Sent) -> Option<&'static str> {
    let begun = Begun::new(api, body, sent);
    let read = aside(begun.size(), move || Wanted::read(&begun).err()).await;
    read.unwrap_or(Some(UNREAD))
}

const UNREAD: &str = "the request cannot be read again";

pub(super) fn unread() -> Failure {
    broken(UNREAD)
}
pub(super) fn unsound(why: &'static str) -> Failure {
    Failure::Final(ApiError::worker_fault(why))
}

/// The last message is to be gone on with.
pub(super) fn unfinished() -> [Splice; 2] {
    [Splice::set("add_generation_prompt", false), Splice::set("continue_final_message", true)]
}

/// The end of a stream that has all its tokens, as an engine would have written it.
fn ends(api: Api, sent: &Sent, usage: Option<(usize, usize)>) -> Bytes {
    let [id, created, model] = sent.head.clone().unwrap_or_default().map(|value| value.unwrap_or("null".to_owned()));
    let object = if api == Api::Chat { "chat.completion.chunk" } else { "text_completion" };
    let head =
        format!("data: {{\"id\":{id},\"object\":\"{object}\",\"created\":{created},\"model\":{model},\"choices\":");
    let mut out = String::new();
    if sent.finish.is_none() {
        let said = if api == Api::Chat { "\"delta\":{}" } else { "\"text\":\"\"" };
        out += &format!("{head}[{{\"index\":0,{said},\"logprobs\":null,\"finish_reason\":\"length\"}}]}}\n\n");
    }
    if let Some((prompt, tokens)) = usage {
        let total = prompt + tokens;
        out += &format!(
            "{head}[],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{tokens}}}}}\n\n"
        );
    }
    (out + "data: [DONE]\n\n").into()
}

impl Placement {
    /// Sends a request over a kept connection, or over another one if that was closed at the very moment.
    pub(super) async fn send(
        &self,
        endpoint: &Arc<Endpoint>,
        forward: &Forward<'_>,
        body: &Bytes,
    ) -> Result<(super::message::Head, super::exchange::Exchange), Failure> {
        let mut fresh = false;
        loop {
            let (wire, reused) = endpoint.connection(fresh).await.map_err(|error| {
                if dial::is_ours(&error) {
                    let why = format!("it can open no connection to an engine: {error}; try again later");
                    return Failure::Final(ApiError::overloaded(why, 1));
                }
                endpoint.forget();
                Failure::Unreached(format!("cannot connect to the engine: {error}"))
            })?;
            match wire.send(forward.head(endpoint, body.len()), body.clone(), endpoint).await {
                Ok(answer) => return Ok(answer),
                // The engine may have closed a kept connection at the very moment it was used: no fault of anyone.
                Err(error) if reused && error.is_silence() => {
                    tracing::debug!(%error, "a kept connection to an engine was closed");
                    fresh = true;
                }
                Err(error) => return Err(self.unanswered(endpoint, &error).await),
            }
        }
    }

    /// Why nothing of an answer came.
    async fn unanswered(&self, endpoint: &Endpoint, error: &WireError) -> Failure {
        match error {
            WireError::Io(io) => match tunnel::blocked(io) {
                Some(App(error)) => Failure::Unreached(error.message.clone()),
                Some(way) => self.classify(way.clone()),
                None => broke_off(endpoint, error).await,
            },
            _ => broke_off(endpoint, error).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, ThreadId};

    use super::*;

    fn begun(prompt: usize) -> Begun {
        let body = json!({"prompt": "x".repeat(prompt), "max_tokens": 9}).to_string();
        Begun { api: Api::Completions, body: body.into(), text: "so far".into(), continues: Some(Continues::Vllm) }
    }

    #[tokio::test]
    async fn large_requests_are_read_and_spliced_off_the_thread_that_serves_others() {
        let on = |_: &Wanted<'_>| -> Result<ThreadId, Failure> { Ok(thread::current().id()) };
        let here = thread::current().id();
        assert!(begun(100).read(on).await.is_ok_and(|there| there == here));
        let large = begun(2 << 20);
        assert!(large.read(on).await.is_ok_and(|there| there != here));
        let Ok(made) = large.made(vec![Splice::replace("max_tokens", 7)], true).await else { panic!("no rest") };
        let made: Value = serde_json::from_slice(&made).unwrap();
        assert_eq!(made["max_tokens"], 7);
        assert_eq!(made["prompt"], "x".repeat(2 << 20) + "so far");
    }
}
