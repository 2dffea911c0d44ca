//! Asks engines how they cut a text into tokens.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::attempt::{Engine, whole};
use super::endpoint::Endpoint;
use super::message::{Forward, usage_in};
use super::rest::{Begun, Wanted, unfinished, unread, unsound};
use super::splice::Splice;
use crate::api::{Api, ApiError};
use crate::aside::aside;
use crate::dispatch::{Failure, Job, Placement, broken};
use crate::pool::{Likeness, Worker};

/// Engines that are asked at most in the place of one that does not answer such questions.
const OTHERS: usize = 4;

/// Asks an engine about tokens.
pub(super) struct Asker<'a> {
    pub(super) placement: &'a Placement,
    /// Who is to go on.
    pub(super) worker: &'a Arc<Worker>,
    pub(super) endpoint: &'a Arc<Endpoint>,
    pub(super) job: &'a Job,
    pub(super) model: &'a str,
    /// Who else could, and reads the same.
    pub(super) like: &'a Likeness,
}

impl Asker<'_> {
    /// Of what `question` makes of the request and the text so far.
    pub(super) async fn tokens(
        &self,
        begun: &Begun,
        question: impl FnOnce(&Wanted<'_>, &str) -> Result<Value, Failure> + Send + 'static,
    ) -> Result<Vec<u32>, Failure> {
        #[derive(Deserialize)]
        struct Answer {
            tokens: Vec<u32>,
        }
        let (text, model) = (Arc::clone(&begun.text), self.model.to_owned());
        let body = begun.read(move |wanted| Ok(named(question(wanted, &text)?, model))).await?;
        Ok(self.ask::<Answer>(Api::Tokenize, body).await?.tokens)
    }
    pub(super) async fn text(&self, tokens: &[u32]) -> Result<String, Failure> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(alias = "text")]
            prompt: String,
        }
        let (tokens, model) = (tokens.to_vec(), self.model.to_owned());
        let size = size_of_val(tokens.as_slice());
        let body = aside(size, move || named(json!({"tokens": tokens}), model)).await.ok_or_else(unread)?;
        Ok(self.ask::<Answer>(Api::Detokenize, body).await?.prompt)
    }

    /// Asks, and where the engine does not answer such questions others like it, which have the same tokens.
    async fn ask<T: DeserializeOwned + Send + 'static>(&self, api: Api, body: Bytes) -> Result<T, Failure> {
        let refused = match self.ask_one(self.worker, self.endpoint, api, &body).await {
            Err(Failure::Final(error)) => error,
            answer => return answer,
        };
        let ready = self.placement.pool.snapshot().candidates(&self.job.model, self.job.api);
        let others = ready.iter().filter(|other| !Arc::ptr_eq(other, self.worker) && other.is_like(self.like));
        for other in others.take(OTHERS) {
            if let Some(endpoint) = other.endpoint()
                && let Ok(answer) = self.ask_one(other, endpoint, api, &body).await
            {
                return Ok(answer);
            }
        }
        Err(Failure::Final(ApiError::worker_fault(format!("{} is not answered: {}", api.path(), refused.message))))
    }

    async fn ask_one<T: DeserializeOwned + Send + 'static>(
        &self,
        worker: &Arc<Worker>,
        endpoint: &Arc<Endpoint>,
        api: Api,
        body: &Bytes,
    ) -> Result<T, Failure> {
        // It generates nothing for this, so nothing tells a question that hangs from one that takes long.
        let limit = self.placement.config.worker_standstill;
        let answer = self.exchange(worker, endpoint, api, body, limit).await?;
        let read = aside(answer.len(), move || serde_json::from_slice(&answer)).await;
        read.ok_or_else(|| broken("the engine's answer about tokens was not read"))?
            .map_err(|error| broken(&format!("the engine's answer about tokens cannot be read: {error}")))
    }

    /// Tokens of the prompt, and of the text so far, as the engine itself counts what it is sent.
    pub(super) async fn counted(&self, begun: &Begun) -> Result<(usize, usize), Failure> {
        let mut counts = [0; 2];
        for (count, continued) in counts.iter_mut().zip([false, true]) {
            let answer = self.tried(begun, continued, None).await?;
            let usage = usage_in(&answer).ok_or_else(|| broken("the engine does not tell its usage"))?;
            *count = usage.prompt_tokens as usize;
        }
        let [prompt, both] = counts;
        match both.checked_sub(prompt).filter(|text| *text > 0) {
            Some(text) => Ok((prompt, text)),
            None => Err(broken("the engine counts no more tokens with the text behind the prompt")),
        }
    }

    /// Tokens of the prompt, with the text so far if it is `continued`, as vLLM shows what it was sent.
    pub(super) async fn shown(&self, begun: &Begun, continued: bool) -> Result<Vec<u32>, Failure> {
        let answer = self.tried(begun, continued, Some(Splice::set("return_token_ids", true))).await?;
        shown_in(answer).await
    }
    /// The same of the text so far alone.
    pub(super) async fn shown_alone(&self, begun: &Begun) -> Result<Vec<u32>, Failure> {
        let (text, model) = (Arc::clone(&begun.text), self.model.to_owned());
        let asked = move || {
            let question = json!({
                "prompt": &*text, "add_special_tokens": false, "max_tokens": 1, "temperature": 0, "return_token_ids": true,
            });
            named(question, model)
        };
        let body = aside(begun.text.len(), asked).await.ok_or_else(unread)?;
        shown_in(self.generated(Api::Completions, &body).await?).await
    }

    /// Lets the engine generate one token behind the prompt, or behind prompt and text. What it has read for that is in its
    /// cache when it goes on.
    async fn tried(&self, begun: &Begun, continued: bool, more: Option<Splice>) -> Result<Bytes, Failure> {
        let mut fields = vec![
            Splice::set("model", Value::from(self.model)),
            Splice::set("max_tokens", 1),
            Splice::replace("max_completion_tokens", 1),
            Splice::replace("min_tokens", 0),
            Splice::set("stream", false),
            Splice::replace("stream_options", "null"),
        ];
        fields.extend(continued.then(unfinished).into_iter().flatten().filter(|_| self.job.api == Api::Chat));
        fields.extend(more);
        let body = begun.made(fields, continued).await?;
        self.generated(self.job.api, &body).await
    }
    async fn generated(&self, api: Api, body: &Bytes) -> Result<Bytes, Failure> {
        let _lease = self.worker.lease_for(body.len(), Duration::ZERO);
        self.exchange(self.worker, self.endpoint, api, body, self.worker.patience()).await
    }

    /// One question and all of its answer.
    async fn exchange(
        &self,
        worker: &Arc<Worker>,
        endpoint: &Arc<Endpoint>,
        api: Api,
        body: &Bytes,
        limit: Duration,
    ) -> Result<Bytes, Failure> {
        let forward = Forward { api, headers: &self.job.headers, request_id: &self.job.request_id, traceparent: None };
        let asked = async {
            let (head, exchange) = self.placement.send(endpoint, &forward, body).await?;
            if !head.status.is_success() {
                return Err(self.placement.refused(worker, endpoint, self.job, &head, exchange).await);
            }
            whole(head, exchange, endpoint).await
        };
        let late = |_| broken(&format!("the engine did not answer {} within {} s", api.path(), limit.as_secs_f64()));
        match tokio::time::timeout(limit, asked).await.map_err(late)?? {
            Engine::Whole(answer) => Ok(answer.body),
            Engine::Stream(_) | Engine::Deltas(_) => Err(broken("the engine streams where no stream was asked for")),
        }
    }
}

/// The ids of a prompt in an answer that shows them.
async fn shown_in(answer: Bytes) -> Result<Vec<u32>, Failure> {
    #[derive(Deserialize)]
    struct Shown {
        prompt_token_ids: Option<Vec<u32>>,
        #[serde(default)]
        choices: Vec<Choice>,
    }
    #[derive(Deserialize)]
    struct Choice {
        prompt_token_ids: Option<Vec<u32>>,
    }
    let read = aside(answer.len(), move || serde_json::from_slice::<Shown>(&answer).ok()).await.flatten();
    let mut shown = read.ok_or_else(|| broken("the engine's answer about tokens cannot be read"))?;
    let of_choice = shown.choices.first_mut().and_then(|choice| choice.prompt_token_ids.take());
    // One of a version that knows nothing of it does as if it had not been asked.
    shown.prompt_token_ids.or(of_choice).ok_or_else(|| unsound("no engine like it tells the tokens of a text"))
}

/// A question to the engine about `model`.
fn named(mut question: Value, model: String) -> Bytes {
    question["model"] = model.into();
    question.to_string().into()
}
