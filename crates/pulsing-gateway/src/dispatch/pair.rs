//! One request on two Workers: one reads the prompt, the other generates.
//!
//! The policy chooses who reads, for that is where prompts are cached; of those that generate and understand it the least
//! loaded is taken. If one of the two fails before the first piece, the request begins anew, with another one in its place.
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
use crate::api::Resume;
use crate::aside::aside;
use crate::engine::{Engine, Splice, with_fields};
use crate::explain::Decision;
use crate::policy::{Why, least_loaded};
use crate::pool::{Companion, Pairing, Role, Worker};
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

impl Placement {
    /// Who generates from what `prefill` reads.
    pub(super) fn decoder(&self, job: &Job, prefill: &Worker, excluded: &[ActorId]) -> Option<Arc<Worker>> {
        let Role::Prefill(pairing) = prefill.role() else { return None };
        let decoders = self.pool.snapshot().decoders_for(&job.model);
        let fits = |worker: &&Arc<Worker>| {
            worker.pairing().is_some_and(|other| other.fits(&pairing))
                && worker.endpoint().is_some() == prefill.endpoint().is_some()
                && !excluded.contains(&worker.target().actor)
        };
        let fitting: Vec<Arc<Worker>> = decoders.iter().filter(fits).cloned().collect();
        let decoder = Arc::clone(fitting.get(least_loaded(&fitting)?)?);
        self.explain(job, &decoder, Why::Decodes, &fitting);
        Some(decoder)
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
        let Some(Pairing::Concurrent { host, port }) = prefill.pairing() else {
            let reads = Arc::new(Job { stream: false, ..Job::clone(job) });
            let read =
                self.half(Half::Reads, prefill, &reads, task, Told::read_only(), trial).await.map_err(of(prefill))?;
            let said = self.said(read).await.map_err(of(prefill))?;
            let trial = self.pool.admit(decode).unwrap_or(false);
            return self.half(Half::Generates, decode, job, task, Told::read(said), trial).await.map_err(of(decode));
        };
        let told = Told::rendezvous(if host.is_empty() { prefill.host() } else { &host }, port, job.batch);
        let (failed, mut failure) = oneshot::channel();
        let companion = {
            let (placement, prefill, job) = (Arc::clone(self), Arc::clone(prefill), Arc::clone(job));
            let (mut task, told) = (task.again(), told.clone());
            // Ends with the request that it is a part of.
            Companion::new(tokio::spawn(async move {
                let read = match placement.half(Half::Reads, &prefill, &job, &mut task, told, trial).await {
                    Ok(read) => placement.drain(read).await,
                    Err(failure) => Err(failure),
                };
                if let Err(failure) = read {
                    let _ = failed.send(failure);
                }
            }))
        };
        let trial = self.pool.admit(decode).unwrap_or(false);
        let mut generated = tokio::select! {
            generated = self.half(Half::Generates, decode, job, task, told, trial) => generated.map_err(of(decode))?,
            Ok(failure) = &mut failure => return Err(of(prefill)(failure)),
        };
        generated.keep(companion);
        Ok(generated)
    }

    /// Sends one of the two its request.
    async fn half(
        self: &Arc<Self>,
        half: Half,
        worker: &Arc<Worker>,
        job: &Arc<Job>,
        task: &mut Task,
        told: Told,
        trial: bool,
    ) -> Result<Placed, Failure> {
        let Some(endpoint) = worker.endpoint() else {
            // What the other half has read is gone with this one, so nobody else could go on with its stream.
            let job = Arc::new(Job { handoff: told.handoff, resume: Resume::Never, ..Job::clone(job) });
            return self.attempt(worker, &job, task, trial).await.map(Placed::Actor);
        };
        let mut fields = told.fields;
        if let Some(model) = worker.model_for(self.pool.snapshot().own_name(&job.model)) {
            fields.push(Splice::set("model", serde_json::Value::from(model)));
        }
        let whole = task.body.clone();
        let spliced = aside(whole.len(), move || with_fields(&whole, &fields)).await;
        let body = spliced.flatten().ok_or_else(|| broken("the request is no JSON object"))?;
        let made = Job { half: Some(half), ..Job::clone(job) };
        tokio::select! {
            answer = self.attempt_engine(worker, endpoint, &made, body, None, trial) => answer.map(Placed::Engine),
            () = Arc::clone(self).gone(Arc::clone(worker), Arc::clone(job), None) => Err(Failure::TakenBack),
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
        Self { body: self.body.clone(), takers: Takers::Actors, past: self.past, resume: None, sent: None, not: None }
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
