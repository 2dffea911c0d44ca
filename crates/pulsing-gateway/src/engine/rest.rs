//! What is asked of an engine that goes on with another one's stream, and whether that is sound (S4).
//!
//! The text that the client has is put behind the prompt. A text can be cut into tokens in more than one way, so the
//! engine is asked first how it reads prompt and text: the prompt must be the one that the first engine had, and the
//! number of tokens behind it is what `max_tokens` shrinks by and what the usage of the whole answer grows by.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::attempt::{Engine, broke_off, whole};
use super::endpoint::Endpoint;
use super::message::Forward;
use super::seam::Had;
use super::sent::Sent;
use super::splice::{Splice, with_fields};
use crate::api::{Api, ApiError};
use crate::dispatch::{Failure, Job, Placement, broken};
use crate::pool::{Continues, Worker};

/// The rest of a stream.
pub(super) enum Rest {
    /// To be asked for.
    Ask { body: Bytes, had: Had },
    /// Nothing is left to be generated: the events that end it.
    Known(Bytes),
}

/// A request whose stream may go on elsewhere, as far as that takes looking at it.
pub(crate) struct Wanted<'a> {
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
    /// Reads `body`; `Err` says why nobody can go on with what was `sent` for it.
    pub(crate) fn read(api: Api, body: &'a [u8], sent: &Sent) -> Result<Self, &'static str> {
        let fields: BTreeMap<Cow<'a, str>, &'a RawValue> =
            serde_json::from_slice(body).map_err(|_| "the request cannot be read again")?;
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
        let wanted = Self { fields, api, include_usage };
        wanted.check(sent)?;
        Ok(wanted)
    }

    fn check(&self, sent: &Sent) -> Result<(), &'static str> {
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
        if sent.likeness.continues != Some(Continues::Vllm) && self.stops().iter().any(|stop| begins(stop, &sent.text))
        {
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
}

/// `text` ends with a part of `stop`, from its beginning.
fn begins(stop: &str, text: &str) -> bool {
    (1..stop.len()).any(|end| stop.is_char_boundary(end) && text.ends_with(&stop[..end]))
}

impl Placement {
    /// What is left of a stream whose client has what was `sent`.
    pub(super) async fn rest(
        &self,
        worker: &Worker,
        endpoint: &Arc<Endpoint>,
        job: &Job,
        body: &Bytes,
        sent: &Sent,
    ) -> Result<Rest, Failure> {
        let wanted = Wanted::read(job.api, body, sent).map_err(unsound)?;
        if sent.finish.is_some() && (sent.counted || !wanted.include_usage) {
            return Ok(Rest::Known(Bytes::from_static(b"data: [DONE]\n\n")));
        }
        let model = worker.model_for(self.pool.snapshot().own_name(&job.model)).unwrap_or_default();
        let named = Splice::set("model", Value::from(model.as_str()));
        let made = |fields: &[Splice]| with_fields(body, fields).ok_or_else(|| broken("the request is no JSON object"));
        if sent.text.is_empty() && sent.finish.is_none() {
            return Ok(Rest::Ask { body: made(&[named])?, had: Had { tokens: 0, all: false } });
        }
        let asker = Asker { placement: self, worker, endpoint, job, model: &model };
        let (prompt, tokens) = match (job.api, sent.likeness.continues) {
            (Api::Chat, Some(Continues::Sglang)) => {
                // It puts the tokens of the text behind those of the prompt, which are not known here.
                let text = json!({"prompt": sent.text, "add_special_tokens": false});
                (None, asker.tokens(text).await?.len())
            }
            _ => {
                let prompt = asker.tokens(asker.prompt(&wanted, None)?).await?;
                let both = asker.tokens(asker.prompt(&wanted, Some(&sent.text))?).await?;
                let Some(text) = both.strip_prefix(prompt.as_slice()) else {
                    return Err(unsound("the engine reads the prompt differently with the text behind it"));
                };
                if job.api == Api::Chat && asker.text(text).await? != sent.text {
                    return Err(unsound("the engine's chat template changes the text"));
                }
                (Some(prompt.len()), text.len())
            }
        };
        let had = Had { tokens: u32::try_from(tokens).unwrap_or(u32::MAX), all: sent.finish.is_some() };
        let left = |name| wanted.number(name).map(|value: u64| value.saturating_sub(tokens as u64));
        if wanted.limit().is_some_and(|limit| limit <= tokens as u64) || sent.finish.as_deref() == Some("length") {
            if wanted.include_usage && prompt.is_none() {
                return Err(unsound("the tokens of its prompt are not known"));
            }
            return Ok(Rest::Known(ends(job.api, sent, wanted.include_usage.then_some((prompt.unwrap_or(0), tokens)))));
        }
        let mut fields = vec![named, wanted.with(&sent.text)];
        for name in ["max_completion_tokens", "max_tokens", "min_tokens"] {
            fields.extend(left(name).map(|left| Splice::replace(name, left)));
        }
        if job.api == Api::Chat {
            fields.push(Splice::set("add_generation_prompt", false));
            fields.push(Splice::set("continue_final_message", true));
        }
        Ok(Rest::Ask { body: made(&fields)?, had })
    }
}

fn unsound(why: &'static str) -> Failure {
    Failure::Final(ApiError::worker_fault(why))
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

/// Asks an engine about tokens.
struct Asker<'a> {
    placement: &'a Placement,
    worker: &'a Worker,
    endpoint: &'a Arc<Endpoint>,
    job: &'a Job,
    model: &'a str,
}

impl Asker<'_> {
    /// The question for the tokens of the prompt, with the text so far or without.
    fn prompt(&self, wanted: &Wanted<'_>, text: Option<&str>) -> Result<Value, Failure> {
        let chat = self.job.api == Api::Chat;
        let mut question = serde_json::Map::new();
        let names: &[&str] = if chat {
            &["chat_template", "chat_template_kwargs", "add_special_tokens"]
        } else {
            &["add_special_tokens"]
        };
        let value =
            |raw: &str| serde_json::from_str::<Value>(raw).map_err(|_| broken("the request cannot be read again"));
        for name in names {
            if let Some(raw) = wanted.get(name) {
                question.insert((*name).to_owned(), value(raw)?);
            }
        }
        let name = if chat { "messages" } else { "prompt" };
        let main = match text {
            Some(text) => value(&wanted.with(text).value)?,
            None => value(wanted.get(name).unwrap_or("null"))?,
        };
        question.insert(name.to_owned(), main);
        if chat {
            question.insert("add_generation_prompt".to_owned(), text.is_none().into());
            question.insert("continue_final_message".to_owned(), text.is_some().into());
        }
        Ok(question.into())
    }

    async fn tokens(&self, question: Value) -> Result<Vec<u32>, Failure> {
        #[derive(Deserialize)]
        struct Answer {
            tokens: Vec<u32>,
        }
        Ok(self.ask::<Answer>(Api::Tokenize, question).await?.tokens)
    }
    async fn text(&self, tokens: &[u32]) -> Result<String, Failure> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(alias = "text")]
            prompt: String,
        }
        Ok(self.ask::<Answer>(Api::Detokenize, json!({"tokens": tokens})).await?.prompt)
    }

    async fn ask<T: serde::de::DeserializeOwned>(&self, api: Api, mut question: Value) -> Result<T, Failure> {
        question["model"] = self.model.into();
        let body = Bytes::from(question.to_string());
        let forward = Forward { api, headers: &self.job.headers, request_id: &self.job.request_id, traceparent: None };
        let asked = async {
            let (head, exchange) = self.placement.send(self.endpoint, &forward, &body).await?;
            if !head.status.is_success() {
                return Err(self.placement.refused(self.worker, self.endpoint, self.job, &head, exchange).await);
            }
            whole(head, exchange, self.endpoint).await
        };
        // It generates nothing for this, so nothing tells a question that hangs from one that takes long.
        let limit = self.placement.config.worker_standstill;
        let late = |_| broken(&format!("the engine did not answer {} within {} s", api.path(), limit.as_secs_f64()));
        let Engine::Whole(answer) = tokio::time::timeout(limit, asked).await.map_err(late)?? else {
            return Err(broken("the engine streams where no stream was asked for"));
        };
        serde_json::from_slice(&answer.body)
            .map_err(|error| broken(&format!("the engine's answer about tokens cannot be read: {error}")))
    }
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
                Err(error) => return Err(broke_off(endpoint, &error).await),
            }
        }
    }
}
