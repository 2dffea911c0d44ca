//! One request on two Workers: one reads the prompt, the other generates.
//!
//! The policy chooses who reads, for that is where prompts are cached; of those that generate and understand it the least
//! loaded is taken. If one of the two fails before the first piece, the request begins anew, with another one in its place;
//! where a stream is gone on with, both are asked for the rest of it.
//! Engines are told by fields in the client's body, everything else of which stays as it is; actors by `handoff`.

use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use pulsing_core::ActorId;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use super::place::{Placed, Takers, Task};
use super::{Failure, Half, Job, Placement, broken};
use crate::aside::aside;
use crate::engine::{Asked, Engine, Had, Rest, Splice, with_fields};
use crate::explain::Decision;
use crate::policy::{Why, least_loaded};
use crate::pool::{Companion, Likeness, Pairing, Role, Worker};
use crate::protocol::{self, Deltas};

/// What one of the two is told beside the request.
#[derive(Clone, Default)]
struct Told {
    /// An engine.
    fields: Vec<Splice>,
    /// An actor.
    handoff: Bytes,
}

impl Told {
    /// Both at once, as SGLang has it: where the prompt is read, and a number to find it by.
    fn rendezvous(host: &str, port: u16, parts: usize) -> Self {
        // Signed integers of other languages hold it.
        let room = || rand::random::<u64>() >> 1;
        let one = room();
        let fields = if parts > 1 {
            // Of a batch each part has a number of its own.
            let rooms: Vec<u64> = (0..parts).map(|_| room()).collect();
            [json!(vec![host; parts]), json!(vec![port; parts]), json!(rooms)]
        } else {
            [json!(host), json!(port), json!(one)]
        };
        let [hosts, ports, rooms] = fields;
        Self {
            fields: vec![
                Splice::set("bootstrap_host", hosts),
                Splice::set("bootstrap_port", ports),
                Splice::set("bootstrap_room", rooms),
            ],
            handoff: json!({"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": one}).to_string().into(),
        }
    }
    /// The one that reads, before the other one gets the request, as vLLM has it.
    fn read_only() -> Self {
        let params = json!({
            "do_remote_decode": true,
            "do_remote_prefill": false,
            "remote_engine_id": null,
            "remote_block_ids": null,
            "remote_host": null,
            "remote_port": null,
        });
        Self {
            fields: vec![
                Splice::set("kv_transfer_params", params),
                Splice::set("max_tokens", 1),
                Splice::replace("max_completion_tokens", 1),
                Splice::replace("min_tokens", 0),
                Splice::set("stream", false),
                Splice::replace("stream_options", "null"),
            ],
            handoff: Bytes::new(),
        }
    }
    /// The one that generates, once the other one has read and said this.
    fn read(said: Bytes) -> Self {
        let params = std::str::from_utf8(&said).ok().filter(|said| !said.is_empty());
        Self {
            fields: params.map(|params| Splice::set("kv_transfer_params", params)).into_iter().collect(),
            handoff: said,
        }
    }
}

/// What one of the two is to do.
struct Share {
    half: Half,
    /// The client's request, or what is left of it.
    body: Bytes,
    told: Told,
    /// What the client has already, for an engine that generates.
    had: Option<Had>,
}

impl Placement {
    /// Who generates from what `prefill` reads.
    pub(super) fn decoder(
        &self,
        job: &Job,
        prefill: &Worker,
        excluded: &[ActorId],
        like: Option<&Likeness>,
    ) -> Option<Arc<Worker>> {
        let fitting = self.decoders(job, prefill, |worker| {
            !excluded.contains(&worker.target().actor) && like.is_none_or(|like| worker.is_like(like))
        });
        let decoder = Arc::clone(fitting.get(least_loaded(&fitting)?)?);
        self.explain(job, &decoder, Why::Decodes, &fitting);
        Some(decoder)
    }
    /// Who could generate from what `prefill` reads, of those that are `wanted`.
    pub(super) fn decoders(
        &self,
        job: &Job,
        prefill: &Worker,
        wanted: impl Fn(&Arc<Worker>) -> bool,
    ) -> Vec<Arc<Worker>> {
        let Role::Prefill(pairing) = prefill.role() else { return Vec::new() };
        let decoders = self.pool.snapshot().decoders_for(&job.model);
        let fits = |worker: &&Arc<Worker>| {
            worker.pairing().is_some_and(|other| other.fits(&pairing))
                && worker.endpoint().is_some() == prefill.endpoint().is_some()
                && wanted(worker)
        };
        decoders.iter().filter(fits).cloned().collect()
    }
    /// Keeps a choice for whoever asks.
    pub(super) fn explain(&self, job: &Job, chosen: &Arc<Worker>, why: Why, candidates: &[Arc<Worker>]) {
        if self.config.debug_routing {
            let decision = Arc::new(Decision::new(&job.request_id, &job.model, chosen, why, candidates));
            job.trail.decided(&decision);
            self.decisions.add(decision);
        }
    }

    /// Sends the request to both and waits for the first piece. A failure comes with the Worker that failed.
    pub(super) async fn attempt_pair(
        self: &Arc<Self>,
        prefill: &Arc<Worker>,
        decode: &Arc<Worker>,
        job: &Arc<Job>,
        task: &mut Task,
        trial: bool,
    ) -> Result<Placed, (Failure, Arc<Worker>)> {
        // Two that work for it are no second attempt.
        job.trail.note(|notes| notes.sequential = false);
        let of = |worker: &Arc<Worker>| {
            let worker = Arc::clone(worker);
            move |failure| (failure, worker)
        };
        let (body, had) = match self.rest_for(decode, job, task).await.map_err(of(decode))? {
            Some(Rest::Known(events)) => return Ok(Placed::Engine(self.known(decode, job, events))),
            Some(Rest::Ask { body, had }) => (body, Some(had)),
            None => (task.body.clone(), None),
        };
        let Some(Pairing::Concurrent { host, port }) = prefill.pairing() else {
            let reads = Arc::new(Job { stream: false, ..Job::clone(job) });
            let mut reading = task.again();
            let half = Share { half: Half::Reads, body: body.clone(), told: Told::read_only(), had: None };
            let read = self.half(half, prefill, &reads, &mut reading, trial).await;
            task.past = reading.past;
            let said = self.said(read.map_err(of(prefill))?).await.map_err(of(prefill))?;
            let trial = self.pool.admit(decode).unwrap_or(false);
            let half = Share { half: Half::Generates, body, told: Told::read(said), had };
            return self.half(half, decode, job, task, trial).await.map_err(of(decode));
        };
        let told = Told::rendezvous(if host.is_empty() { prefill.host() } else { &host }, port, job.batch);
        let (failed, mut failure) = oneshot::channel();
        let companion = {
            let (placement, prefill, job) = (Arc::clone(self), Arc::clone(prefill), Arc::clone(job));
            let mut task = task.again();
            let half = Share { half: Half::Reads, body: body.clone(), told: told.clone(), had: None };
            // Ends with the request that it is a part of.
            Companion::new(tokio::spawn(async move {
                let read = match placement.half(half, &prefill, &job, &mut task, trial).await {
                    Ok(read) => placement.drain(read).await,
                    Err(failure) => Err(failure),
                };
                if let Err(failure) = read {
                    let _ = failed.send(failure);
                }
            }))
        };
        let trial = self.pool.admit(decode).unwrap_or(false);
        let half = Share { half: Half::Generates, body, told, had };
        let mut generated = tokio::select! {
            generated = self.half(half, decode, job, task, trial) => generated.map_err(of(decode))?,
            Ok(failure) = &mut failure => return Err(of(prefill)(failure)),
        };
        generated.keep(companion);
        Ok(generated)
    }

    /// What engines are asked for where another one has begun the stream.
    async fn rest_for(
        self: &Arc<Self>,
        decode: &Arc<Worker>,
        job: &Arc<Job>,
        task: &Task,
    ) -> Result<Option<Rest>, Failure> {
        let (Some(sent), Some(endpoint)) = (&task.sent, decode.endpoint()) else { return Ok(None) };
        tokio::select! {
            rest = self.rest(decode, endpoint, job, &task.body, sent) => rest.map(Some),
            () = Arc::clone(self).gone(Arc::clone(decode), Arc::clone(job), task.like()) => Err(Failure::TakenBack),
        }
    }

    /// Sends one of the two its request.
    async fn half(
        self: &Arc<Self>,
        Share { half, body: whole, told, had }: Share,
        worker: &Arc<Worker>,
        job: &Arc<Job>,
        task: &mut Task,
        trial: bool,
    ) -> Result<Placed, Failure> {
        let Some(endpoint) = worker.endpoint() else {
            let job = Arc::new(Job { handoff: told.handoff, ..Job::clone(job) });
            return self.attempt(worker, &job, task, trial).await.map(Placed::Actor);
        };
        let mut fields = told.fields;
        if let Some(model) = worker.model_for(self.pool.snapshot().own_name(&job.model)) {
            fields.push(Splice::set("model", serde_json::Value::from(model)));
        }
        let spliced = aside(whole.len(), move || with_fields(&whole, &fields)).await;
        let body = spliced.flatten().ok_or_else(|| broken("the request is no JSON object"))?;
        let rest = task.sent.as_deref().zip(had);
        let asked = Asked { api: job.api, body, model_at: None, trial, rest, waited: task.past.waited };
        let made = Job { half: Some(half), ..Job::clone(job) };
        tokio::select! {
            answer = self.attempt_half(worker, endpoint, &made, asked) => answer.map(Placed::Engine),
            () = Arc::clone(self).gone(Arc::clone(worker), Arc::clone(job), task.like()) => Err(Failure::TakenBack),
        }
    }

    /// What the one that read has to say to the one that generates; an engine may have nothing to say.
    async fn said(&self, read: Placed) -> Result<Bytes, Failure> {
        #[derive(Deserialize)]
        struct Answer<'a> {
            #[serde(borrow)]
            kv_transfer_params: Option<&'a RawValue>,
        }
        match read {
            Placed::Engine(Engine::Whole(whole)) => {
                let answer: Answer<'_> = serde_json::from_slice(&whole.body)
                    .map_err(|error| broken(&format!("the prefill engine's answer cannot be read: {error}")))?;
                Ok(answer
                    .kv_transfer_params
                    .map_or_else(Bytes::new, |params| whole.body.slice_ref(params.get().as_bytes())))
            }
            Placed::Engine(_) => Err(broken("the prefill engine streams where no stream was asked for")),
            read => match self.drain(read).await? {
                said if said.is_empty() => Err(broken("the prefill worker ended without a handoff")),
                said => Ok(said),
            },
        }
    }

    /// Waits for the end of an answer; gives the handoff in it.
    async fn drain(&self, placed: Placed) -> Result<Bytes, Failure> {
        let mut handoff = Bytes::new();
        match placed {
            Placed::Actor(mut upstream) => {
                let mut next = upstream.first.take();
                while let Some(Deltas { deltas }) = next {
                    if let Some(last) = deltas.into_iter().rev().find(|delta| !delta.handoff.is_empty()) {
                        handoff = last.handoff;
                    }
                    let Some(stream) = &mut upstream.stream else { break };
                    next = match stream.next().await {
                        None => None,
                        Some(Ok(item)) => Some(protocol::decode(&item).map_err(|error| broken(&error))?),
                        Some(Err(error)) => return Err(self.classify(error)),
                    };
                }
            }
            Placed::Engine(Engine::Stream(mut stream)) => {
                while let Some(passed) = poll_fn(|cx| stream.poll_next(cx, self)).await {
                    // Nothing of it was noted, so nobody goes on with it.
                    passed.map_err(Failure::Failed)?;
                }
            }
            Placed::Engine(Engine::Whole(_) | Engine::Deltas(_)) | Placed::Divide => {}
        }
        Ok(handoff)
    }
}

impl Task {
    /// The same for the other half.
    fn again(&self) -> Self {
        Self {
            body: self.body.clone(),
            takers: Takers::Actors,
            past: self.past,
            resume: self.resume.clone(),
            sent: None,
            not: None,
        }
    }
}

impl Placed {
    /// `companion` ends with the request.
    fn keep(&mut self, companion: Companion) {
        match self {
            Self::Actor(upstream) => upstream.lease.keep(companion),
            Self::Engine(Engine::Stream(stream)) => stream.keep(companion),
            // All of the answer is here.
            Self::Engine(Engine::Whole(_) | Engine::Deltas(_)) | Self::Divide => {}
        }
    }
}
