//! One request to one Worker, and to the next when that one fails before it has begun to answer (S4).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use hyper::HeaderMap;
use pulsing_core::{ActorId, CallOptions, Error, ItemStream, Reply};
use tokio::sync::oneshot;

use crate::api::{Api, ApiError};
use crate::cluster::{BoxFuture, Cluster};
use crate::config::GatewayConfig;
use crate::engine::{Engine, EngineStream, Head, Whole};
use crate::metrics::{Metrics, Retry};
use crate::picker::PickRequest;
use crate::policy::{Hints, Policy};
use crate::pool::{Lease, Pool, State, Worker};
use crate::protocol::{self, Deltas, Generate, Kind, Request, Usage};

/// What placing a request needs.
pub(crate) struct Placement {
    pub(crate) cluster: Arc<dyn Cluster>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) config: GatewayConfig,
    pub(crate) metrics: Metrics,
}

/// One client request, shared by its sub-requests.
pub(crate) struct Job {
    pub(crate) api: Api,
    pub(crate) model: String,
    /// The client named the model itself, and where.
    pub(crate) names_model: bool,
    pub(crate) model_at: Option<Range<usize>>,
    pub(crate) stream: bool,
    /// The client's headers, for engines.
    pub(crate) headers: HeaderMap,
    pub(crate) request_id: String,
    pub(crate) traceparent: Option<String>,
    pub(crate) affinity: Option<String>,
    pub(crate) deadline: Instant,
    /// For a scheduler outside.
    pub(crate) pick: Option<PickRequest>,
}

/// A Worker's stream that has begun.
struct Upstream {
    stream: ItemStream,
    first: Option<Deltas>,
    lease: Lease,
    /// To begin again with elsewhere; `None` once the client sees the pieces.
    body: Option<Bytes>,
    /// Workers that this request has lost before.
    lost: u32,
}

/// Who may take a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takers {
    Any,
    /// It has several prompts and is still whole, which suits engines: when the choice falls on an actor it is to be
    /// divided.
    Undivided,
    /// It is one of several prompts.
    Actors,
}

/// Where a request went.
enum Placed {
    Actor(Upstream),
    Engine(Engine),
    /// Nowhere: see [`Takers::Undivided`].
    Divide,
}

/// How an attempt ended that gave no answer.
pub(crate) enum Failure {
    /// The Worker, or the way to it, is gone: nothing of the answer was seen, so another may give it.
    Lost(String),
    /// The Worker takes no requests now.
    Unready(ApiError),
    /// The Worker failed on this request.
    Failed(ApiError),
    /// To the client, as it is.
    Final(ApiError),
}

impl Placement {
    /// Sends `body` to a Worker and waits for the first piece of its answer.
    async fn place(
        self: Arc<Self>,
        job: Arc<Job>,
        body: Bytes,
        takers: Takers,
        mut lost: u32,
    ) -> Result<Placed, ApiError> {
        let mut excluded: Vec<ActorId> = Vec::new();
        let mut failed: Option<ApiError> = None;
        let mut last_words: Option<String> = None;
        let mut patience = None;
        let mut versions = self.pool.versions();
        loop {
            versions.mark_unchanged();
            let ready = self.pool.snapshot().ready_for(&job.model).unwrap_or_default();
            let Some(worker) = self.choose(&ready, &excluded, &job, takers).await else {
                if let Some(error) = failed {
                    return Err(error);
                }
                // Waiting pays only when somebody has just been lost: then another may be coming.
                let hurt = lost > 0 || last_words.is_some() || self.pool.snapshot().count(State::Unreachable) > 0;
                let until = *patience.get_or_insert_with(|| Instant::now() + self.config.worker_wait);
                if hurt && tokio::time::timeout_at(until.into(), versions.changed()).await.is_ok_and(|ok| ok.is_ok()) {
                    continue;
                }
                let mut why = self.pool.explain(&job.model);
                if let Some(words) = last_words {
                    why = format!("{why} The last one tried said: {words}");
                }
                return Err(ApiError::no_workers(&why));
            };
            let attempt = match worker.endpoint() {
                Some(endpoint) => tokio::select! {
                    answer = self.attempt_engine(&worker, endpoint, &job, body.clone()) => answer.map(Placed::Engine),
                    () = self.gone(&worker, &job) => Err(Failure::Lost("the engine stopped answering".to_owned())),
                },
                None if takers == Takers::Undivided => return Ok(Placed::Divide),
                None => self.attempt(&worker, &job, body.clone(), lost).await.map(Placed::Actor),
            };
            match attempt {
                Ok(placed) => return Ok(placed),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Lost(error)) => {
                    tracing::info!(request_id = %job.request_id, worker = %worker.target().actor, %error, "lost before the first piece; trying another worker");
                    self.pool.suspect(&worker);
                    lost += 1;
                    if lost >= self.config.max_attempts {
                        return Err(lost_too_often(lost));
                    }
                    self.metrics.retry(Retry::Lost);
                }
                Err(Failure::Unready(error)) => {
                    excluded.push(worker.target().actor);
                    last_words = Some(error.message);
                    self.metrics.retry(Retry::Unready);
                }
                Err(Failure::Failed(mut error)) => {
                    // The same failure on two Workers is the request's own: do not carry it through the fleet.
                    let again = failed.is_some();
                    error.no_retry = true;
                    if again {
                        return Err(error);
                    }
                    tracing::info!(request_id = %job.request_id, worker = %worker.target().actor, error = %error.message, "worker failed; trying another");
                    excluded.push(worker.target().actor);
                    failed = Some(error);
                    self.metrics.retry(Retry::Failed);
                }
            }
        }
    }

    /// Ends when an engine has been gone for so long that what it has not begun to answer is better sent to another one,
    /// and there is another one. A connection to a process that hangs says nothing of it.
    async fn gone(&self, worker: &Arc<Worker>, job: &Job) {
        let mut versions = self.pool.versions();
        let mut since = None;
        loop {
            versions.mark_unchanged();
            let others = || {
                let ready = self.pool.snapshot().ready_for(&job.model).unwrap_or_default();
                ready.iter().any(|other| !Arc::ptr_eq(other, worker))
            };
            since = (worker.state() == State::Failed && others()).then(|| since.unwrap_or_else(Instant::now));
            let changed = match since.map(|since: Instant| since + self.config.take_back) {
                Some(until) if Instant::now() >= until => return,
                Some(until) => tokio::time::timeout_at(until.into(), versions.changed()).await.unwrap_or(Ok(())),
                None => versions.changed().await,
            };
            if changed.is_err() {
                // The pool is no more; the request goes on.
                return std::future::pending().await;
            }
        }
    }

    async fn choose(
        &self,
        ready: &Arc<[Arc<Worker>]>,
        excluded: &[ActorId],
        job: &Job,
        takers: Takers,
    ) -> Option<Arc<Worker>> {
        let kept: Vec<Arc<Worker>>;
        let candidates: &[Arc<Worker>] = if excluded.is_empty() && takers != Takers::Actors {
            ready
        } else {
            let fits = |worker: &Worker| takers != Takers::Actors || worker.endpoint().is_none();
            let left = ready.iter().filter(|worker| !excluded.contains(&worker.target().actor) && fits(worker));
            kept = left.cloned().collect();
            &kept
        };
        if candidates.is_empty() {
            return None;
        }
        if let Some(worker) = self.ask_picker(candidates, job).await {
            return Some(worker);
        }
        let hints = Hints { affinity: job.affinity.as_deref() };
        candidates.get(self.policy.pick(candidates, hints)).cloned()
    }

    async fn ask_picker(&self, candidates: &[Arc<Worker>], job: &Job) -> Option<Arc<Worker>> {
        let picker = self.config.picker.as_ref()?;
        let (answer, pick) = oneshot::channel();
        picker.pick(job.pick.clone()?, answer);
        match tokio::time::timeout(self.config.picker_limit, pick).await {
            Ok(Ok(None)) => None,
            Ok(Ok(Some(actor))) => {
                let found = candidates.iter().find(|worker| worker.target().actor == actor).cloned();
                if found.is_none() {
                    self.metrics.picker_failed.fetch_add(1, Relaxed);
                }
                found
            }
            Ok(Err(_)) => {
                self.metrics.picker_failed.fetch_add(1, Relaxed);
                None
            }
            Err(_) => {
                self.metrics.picker_late.fetch_add(1, Relaxed);
                None
            }
        }
    }

    async fn attempt(&self, worker: &Arc<Worker>, job: &Job, body: Bytes, lost: u32) -> Result<Upstream, Failure> {
        let again = (!job.stream).then(|| body.clone());
        let lease = worker.lease();
        let left = job.deadline.saturating_duration_since(Instant::now());
        let generate = Generate {
            api: job.api.wire_name().to_owned(),
            request_id: job.request_id.clone(),
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            traceparent: job.traceparent.clone().unwrap_or_default(),
            ..Generate::default()
        };
        let request = Request { version: protocol::VERSION, kind: Some(Kind::Generate(generate)) };
        let options = CallOptions { timeout: Some(left), trace: job.traceparent.clone(), ..CallOptions::default() };
        let payload = protocol::payload(&request, Some(body));
        let reply = self.cluster.call(worker.target(), payload, options).await;
        let mut stream = match reply.map_err(|error| self.classify(error))? {
            Reply::Stream(stream) => stream,
            Reply::Value(_) => return Err(broken("the worker answered with a value where a stream was due")),
        };
        match stream.next().await {
            Some(Ok(item)) => {
                let first = protocol::decode::<Deltas>(&item).map_err(|error| broken(&error))?;
                Ok(Upstream { stream, first: Some(first), lease, body: again, lost })
            }
            Some(Err(error)) => Err(self.classify(error)),
            None => Err(broken("the worker ended without an answer")),
        }
    }

    fn classify(&self, error: Error) -> Failure {
        match error {
            Error::ActorNotFound { .. }
            | Error::ActorStopped { .. }
            | Error::NodeNotFound { .. }
            | Error::ConnectFailed { .. }
            | Error::ConnectionLost { .. }
            | Error::Refused { .. } => Failure::Lost(error.to_string()),
            Error::Timeout { .. } => Failure::Final(ApiError::deadline(self.config.request_timeout.as_secs_f64())),
            Error::ShutDown => Failure::Final(ApiError::draining()),
            Error::MailboxFull { .. } => Failure::Unready(ApiError::worker_fault("its mailbox is full")),
            Error::TooLarge { limit, .. } => {
                Failure::Final(ApiError::too_large(usize::try_from(limit).unwrap_or(usize::MAX)))
            }
            Error::App(error) => {
                let error = ApiError::from_worker(&error);
                match error.status {
                    503 => Failure::Unready(error),
                    500.. => Failure::Failed(error),
                    _ => Failure::Final(error),
                }
            }
            other => broken(&format!("the call to the worker failed: {}", other.kind())),
        }
    }

    /// What a failure in the middle of a stream tells the client.
    pub(crate) fn cut(&self, worker: &Worker, failure: Failure) -> ApiError {
        match failure {
            Failure::Lost(error) => {
                tracing::warn!(worker = %worker.target().actor, %error, "worker lost in the middle of a stream");
                self.pool.suspect(worker);
                ApiError::worker_fault("the worker was lost in the middle of its answer")
            }
            Failure::Unready(error) | Failure::Failed(error) | Failure::Final(error) => error,
        }
    }
}

fn lost_too_often(lost: u32) -> ApiError {
    let mut error = ApiError::worker_fault(format!(
        "{lost} workers were lost while they worked on this request, one after another"
    ));
    error.no_retry = true;
    error
}

pub(crate) fn broken(message: &str) -> Failure {
    Failure::Failed(ApiError::worker_fault(message))
}

/// What comes of a request.
pub(crate) enum Piece {
    /// From an actor: to be written as the client's protocol has it.
    Deltas(Deltas),
    /// From an engine: the whole answer.
    Whole(Box<Whole>),
    /// From an engine: events as they are; with the first ones the head of its answer.
    Events(Bytes, Option<Head>),
    /// An engine's events are complete.
    Complete(Option<Usage>),
    /// The Worker was lost, another begins anew: what came of these choices does not count. Only where the client waits
    /// for the whole answer.
    Again(Range<u32>),
}

/// The pieces of one client request, from one Worker or, with several prompts, from several. Dropping it cancels them.
pub(crate) struct Source {
    placement: Arc<Placement>,
    job: Arc<Job>,
    subs: Vec<Sub>,
    /// What the request is divided into if no engine takes it whole.
    parts: Vec<Bytes>,
    /// Choices a sub-request has.
    n: u32,
    next: usize,
}

enum Sub {
    Waiting(BoxFuture<Result<Placed, ApiError>>),
    Live(Box<Upstream>),
    Engine(Box<EngineStream>),
    Done,
}

enum Step {
    Piece(Piece),
    Divide,
    /// The body, and how many Workers it has cost.
    Again(Bytes, u32),
}

impl Source {
    /// Places one sub-request a part; choice `c` of part `p` comes out as choice `p * n + c`. Engines get the client's
    /// `body` whole.
    pub(crate) fn new(placement: &Arc<Placement>, job: &Arc<Job>, body: Bytes, parts: Vec<Bytes>, n: u32) -> Self {
        let (placement, job) = (Arc::clone(placement), Arc::clone(job));
        let mut source = Self { placement, job, subs: Vec::new(), parts, n, next: 0 };
        let ready = source.placement.pool.snapshot().ready_for(&source.job.model).unwrap_or_default();
        if source.parts.len() == 1 {
            source.subs = vec![source.waiting(body, Takers::Any, 0)];
        } else if ready.iter().any(|worker| worker.endpoint().is_some()) {
            source.subs = vec![source.waiting(body, Takers::Undivided, 0)];
        } else {
            source.divide();
        }
        source
    }

    fn waiting(&self, body: Bytes, takers: Takers, lost: u32) -> Sub {
        Sub::Waiting(Box::pin(Arc::clone(&self.placement).place(Arc::clone(&self.job), body, takers, lost)))
    }
    fn divide(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        self.subs = parts.into_iter().map(|part| self.waiting(part, Takers::Actors, 0)).collect();
    }

    /// The next pieces; `None` when every sub-request is complete. Nothing follows an error.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, ApiError>>> {
        'again: loop {
            let count = self.subs.len();
            let mut live = false;
            for step in 0..count {
                let at = (self.next + step) % count;
                match self.subs[at].poll(cx, &self.placement) {
                    Poll::Ready(Some(Ok(Step::Divide))) => {
                        self.divide();
                        continue 'again;
                    }
                    Poll::Ready(Some(Ok(Step::Again(body, lost)))) => {
                        // An engine's whole answer is no part of another.
                        let takers = if count == 1 { Takers::Any } else { Takers::Actors };
                        self.subs[at] = self.waiting(body, takers, lost);
                        let first = at as u32 * self.n;
                        return Poll::Ready(Some(Ok(Piece::Again(first..first + self.n))));
                    }
                    Poll::Ready(Some(Ok(Step::Piece(mut piece)))) => {
                        if let Piece::Deltas(deltas) = &mut piece {
                            for delta in &mut deltas.deltas {
                                // A choice out of its own range must not pass for another sub-request's.
                                delta.index =
                                    if delta.index < self.n { at as u32 * self.n + delta.index } else { u32::MAX };
                            }
                        }
                        // Turn by turn, so that one fast Worker does not hold back the others.
                        self.next = at + usize::from(count > 1);
                        return Poll::Ready(Some(Ok(piece)));
                    }
                    Poll::Ready(Some(Err(error))) => {
                        self.subs.clear();
                        return Poll::Ready(Some(Err(error)));
                    }
                    Poll::Ready(None) => {}
                    Poll::Pending => live = true,
                }
            }
            return if live { Poll::Pending } else { Poll::Ready(None) };
        }
    }

    pub(crate) async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl Sub {
    fn poll(&mut self, cx: &mut Context<'_>, placement: &Placement) -> Poll<Option<Result<Step, ApiError>>> {
        let piece = |piece| Poll::Ready(Some(Ok(Step::Piece(piece))));
        loop {
            match self {
                Self::Done => return Poll::Ready(None),
                Self::Waiting(placing) => match placing.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(Placed::Actor(upstream))) => *self = Self::Live(Box::new(upstream)),
                    Poll::Ready(Ok(Placed::Engine(Engine::Whole(whole)))) => {
                        *self = Self::Done;
                        return piece(Piece::Whole(whole));
                    }
                    Poll::Ready(Ok(Placed::Engine(Engine::Stream(stream)))) => *self = Self::Engine(stream),
                    Poll::Ready(Ok(Placed::Divide)) => {
                        *self = Self::Done;
                        return Poll::Ready(Some(Ok(Step::Divide)));
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(error))),
                },
                Self::Live(upstream) => {
                    if let Some(first) = upstream.first.take() {
                        return piece(Piece::Deltas(first));
                    }
                    return match upstream.stream.poll_next(cx) {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Some(Ok(item))) => match protocol::decode(&item) {
                            Ok(deltas) => piece(Piece::Deltas(deltas)),
                            Err(error) => Poll::Ready(Some(Err(ApiError::worker_fault(error)))),
                        },
                        Poll::Ready(Some(Err(error))) => {
                            let (worker, failure) = (upstream.lease.worker(), placement.classify(error));
                            let lost = upstream.lost + 1;
                            Poll::Ready(Some(match (upstream.body.take(), failure) {
                                (Some(_), Failure::Lost(_)) if lost >= placement.config.max_attempts => {
                                    placement.pool.suspect(worker);
                                    Err(lost_too_often(lost))
                                }
                                (Some(body), Failure::Lost(error)) => {
                                    tracing::info!(worker = %worker.target().actor, %error, "lost before its answer was whole; trying another worker");
                                    placement.pool.suspect(worker);
                                    placement.metrics.retry(Retry::Lost);
                                    Ok(Step::Again(body, lost))
                                }
                                (_, failure) => Err(placement.cut(worker, failure)),
                            }))
                        }
                        Poll::Ready(None) => {
                            *self = Self::Done;
                            Poll::Ready(None)
                        }
                    };
                }
                Self::Engine(stream) => {
                    return match stream.poll_next(cx, placement) {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Some(Ok(bytes))) => piece(Piece::Events(bytes, stream.take_head())),
                        Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
                        Poll::Ready(None) => {
                            let usage = stream.usage();
                            *self = Self::Done;
                            piece(Piece::Complete(usage))
                        }
                    };
                }
            }
        }
    }
}
