//! One request to one engine.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use hyper::{StatusCode, header};

use super::endpoint::Endpoint;
use super::exchange::Exchange;
use super::message::{Forward, Head, error_of, with_model};
use super::normal::Normaliser;
use super::reader::{Passed, Reader};
use super::rest::Rest;
use super::seam::{Had, Seam};
use super::sent::Sent;
use super::sse::Gate;
use super::wire::WireError;
use crate::api::{Api, ApiError};
use crate::aside::aside;
use crate::dispatch::{Begun, Cause, Failure, GoOn, Half, Job, Past, Placement, Stall, Task, broken};
use crate::pool::{Companion, Fault, Lease, Worker};
use crate::protocol::{Deltas, Usage};

/// Largest answer that is no stream, in bytes. Nobody means to get more: 128 choices with logprobs do not reach it.
const MAX_WHOLE: usize = 256 << 20;
/// Largest error body that is read.
const MAX_ERROR: usize = 1 << 20;

/// An engine that has begun to answer.
pub(crate) enum Engine {
    /// Events to come.
    Stream(Box<EngineStream>),
    /// All of it.
    Whole(Box<Whole>),
    /// All of it, read.
    Deltas(Deltas),
}

/// A complete answer.
pub(crate) struct Whole {
    pub(crate) head: Head,
    pub(crate) body: Bytes,
    pub(crate) first_byte: Instant,
}

/// An answer that goes on. Dropping it closes the connection.
pub(crate) struct EngineStream {
    /// `None` where everything is known already.
    exchange: Option<Exchange>,
    reader: Reader,
    head: Option<Head>,
    first: Option<Bytes>,
    lease: Lease,
    ended: bool,
    /// To go on with elsewhere; `None` where that cannot be.
    again: Option<Again>,
}

/// What it takes to go on with another engine.
struct Again {
    body: Bytes,
    past: Past,
    sent: Box<Sent>,
    stall: Stall,
}

/// What is sent.
pub(crate) struct Asked<'a> {
    pub(crate) api: Api,
    pub(crate) body: Bytes,
    /// Where the value of `model` lies in it.
    pub(crate) model_at: Option<Range<usize>>,
    /// It tries a Worker out that has failed.
    pub(crate) trial: bool,
    /// What the client has already, of a stream that another engine began: the body is made for the rest.
    pub(crate) rest: Option<(&'a Sent, Had)>,
    /// See [`Past::waited`].
    pub(crate) waited: Duration,
}

impl Placement {
    /// Sends what the client asked to an engine and waits for the first byte of its answer; for all of it if the client
    /// wants no stream, so that an engine that dies on the way costs the client nothing.
    pub(crate) async fn attempt_engine(
        &self,
        worker: &Arc<Worker>,
        endpoint: &Arc<Endpoint>,
        job: &Job,
        task: &Task,
        trial: bool,
    ) -> Result<Engine, Failure> {
        job.trail.attempt(worker);
        let waited = task.past.waited;
        if let Some(sent) = &task.sent {
            let (body, had) = match self.rest(worker, endpoint, job, &task.body, sent).await? {
                Rest::Ask { body, had } => (body, had),
                Rest::Known(events) => return Ok(self.known(worker, job, events)),
            };
            let asked = Asked { api: job.api, body, model_at: None, trial, rest: Some((sent, had)), waited };
            let answer = self.exchange(worker, endpoint, job, asked).await?;
            return answer.ok_or_else(|| broken("the engine does not know that path"));
        }
        let native = job.native.as_ref().filter(|_| job.half.is_none() && endpoint.may_have_responses());
        if let Some(native) = native {
            let (body, model_at) = (native.body.clone(), native.model_at.clone());
            let asked = Asked { api: Api::Responses, body, model_at, trial, rest: None, waited };
            match self.exchange(worker, endpoint, job, asked).await {
                Ok(Some(engine)) => return Ok(engine),
                Ok(None) => endpoint.has_no_responses(),
                Err(failure) => return Err(failure),
            }
        }
        let (body, model_at) = (task.body.clone(), job.model_at.clone());
        let asked = Asked { api: job.api, body, model_at, trial, rest: None, waited };
        let answer = self.exchange(worker, endpoint, job, asked).await?;
        // Only a path that an engine may lack is answered with nothing.
        answer.ok_or_else(|| broken("the engine does not know that path"))
    }

    /// Sends an engine its half of a request.
    pub(crate) async fn attempt_half(
        &self,
        worker: &Arc<Worker>,
        endpoint: &Arc<Endpoint>,
        job: &Job,
        asked: Asked<'_>,
    ) -> Result<Engine, Failure> {
        job.trail.attempt(worker);
        let answer = self.exchange(worker, endpoint, job, asked).await?;
        answer.ok_or_else(|| broken("the engine does not know that path"))
    }

    /// One exchange; `None` if the engine has no `/v1/responses`, which was asked for.
    async fn exchange(
        &self,
        worker: &Arc<Worker>,
        endpoint: &Arc<Endpoint>,
        job: &Job,
        Asked { api, body, model_at, trial, rest, waited }: Asked<'_>,
    ) -> Result<Option<Engine>, Failure> {
        let mut lease = worker.lease_for(body.len(), waited);
        if trial {
            lease.tries();
        }
        let own_name = worker.model_for(self.pool.snapshot().own_name(&job.model));
        let body = match own_name.filter(|model| !job.names_model || *model != job.model) {
            Some(model) if job.half.is_none() && rest.is_none() => {
                let spliced = aside(body.len(), move || with_model(&body, model_at, &model)).await;
                spliced.ok_or_else(|| broken("the model's name could not be put into the request"))?
            }
            _ => body,
        };
        let trace = job.trace();
        let forward =
            Forward { api, headers: &job.headers, request_id: &job.request_id, traceparent: trace.as_deref() };
        let (head, exchange) = self.send(endpoint, &forward, &body).await?;
        if !head.status.is_success() {
            let failure = self.refused(worker, endpoint, job, &head, exchange).await;
            return match failure {
                Failure::Final(error) if api == Api::Responses && is_absent(&head, &error) => Ok(None),
                other => Err(other),
            };
        }
        if let Some(strange) = head.strange_kind(api, job.stream) {
            let due = if job.stream { "a stream of events" } else { "JSON" };
            return Err(broken(&format!("the engine answered {} with {strange} where {due} was due", head.status)));
        }
        // A response is written from what a chat says.
        let reads = api != Api::Responses
            && job.half != Some(Half::Reads)
            && (job.native.is_some() || (worker.normalizes() && api.generates()));
        if job.stream {
            let reader = match rest {
                had if reads => Reader::Normal(Box::default(), had.map(|(_, had)| had)),
                Some((sent, had)) => Reader::Seam(Box::new(Seam::new(sent, had))),
                None => Reader::Gate(Gate::new(api)),
            };
            return stream(head, exchange, lease, reader, endpoint).await.map(Some);
        }
        let mut answer = whole(head, exchange, endpoint).await?;
        if let (Engine::Whole(whole), true) = (&answer, reads) {
            let body = whole.body.clone();
            let read = aside(body.len(), move || Normaliser::default().whole(&body)).await;
            let read = read.unwrap_or_else(|| Err(ApiError::worker_fault("the engine's answer could not be read")));
            let deltas = read.map_err(Failure::Failed)?;
            answer = Engine::Deltas(Deltas { deltas });
        }
        lease.answered();
        Ok(Some(answer))
    }
}

async fn stream(
    head: Head,
    mut exchange: Exchange,
    mut lease: Lease,
    reader: Reader,
    endpoint: &Endpoint,
) -> Result<Engine, Failure> {
    match exchange.data().await {
        Some(Ok(first)) => {
            lease.answered();
            let (head, first) = (reader.passes().then_some(head), Some(first));
            let exchange = Some(exchange);
            Ok(Engine::Stream(Box::new(EngineStream {
                exchange,
                reader,
                head,
                first,
                lease,
                ended: false,
                again: None,
            })))
        }
        Some(Err(error)) => Err(broke_off(endpoint, &error).await),
        None => Err(broken("the engine ended its stream without an answer")),
    }
}

pub(super) async fn whole(head: Head, mut exchange: Exchange, endpoint: &Endpoint) -> Result<Engine, Failure> {
    let mut first_byte = None;
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(data) = exchange.data().await {
        let data = match data {
            Ok(data) => data,
            Err(error) => return Err(broke_off(endpoint, &error).await),
        };
        if first.len() + rest.len() + data.len() > MAX_WHOLE {
            return Err(broken(&format!("the engine's answer is over the limit of {MAX_WHOLE} bytes")));
        }
        if first_byte.is_none() {
            first_byte = Some(Instant::now());
            first = data;
        } else {
            if rest.is_empty() {
                rest.extend_from_slice(&std::mem::take(&mut first));
            }
            rest.extend_from_slice(&data);
        }
    }
    let Some(first_byte) = first_byte else {
        return Err(broken("the engine answered with nothing"));
    };
    let body = if rest.is_empty() { first } else { rest.freeze() };
    Ok(Engine::Whole(Box::new(Whole { head, body, first_byte })))
}

/// The engine does not know the path; one without the model says so.
fn is_absent(head: &Head, error: &ApiError) -> bool {
    matches!(head.status.as_u16(), 404 | 405 | 501) && !error.message.contains("model")
}

impl Placement {
    /// The end of a stream that is known without a question.
    pub(crate) fn known(&self, worker: &Arc<Worker>, job: &Job, events: Bytes) -> Engine {
        let reader = match job.native.is_some() || worker.normalizes() {
            true => Reader::Normal(Box::default(), None),
            false => Reader::Gate(Gate::new(job.api)),
        };
        let (first, lease) = (Some(events), worker.lease_for(0, Duration::ZERO));
        let stream = EngineStream { exchange: None, reader, head: None, first, lease, ended: false, again: None };
        Engine::Stream(Box::new(stream))
    }

    /// What an answer other than 2xx means.
    pub(super) async fn refused(
        &self,
        worker: &Worker,
        endpoint: &Endpoint,
        job: &Job,
        head: &Head,
        mut exchange: Exchange,
    ) -> Failure {
        let mut body = BytesMut::new();
        while let Some(Ok(data)) = exchange.data().await {
            if body.len() + data.len() > MAX_ERROR {
                break;
            }
            body.extend_from_slice(&data);
        }
        let error = error_of(head, &body.freeze());
        match head.status.as_u16() {
            // The client's own key goes to an engine that has none, and is the client's to put right. No other one is.
            401 | 403 if endpoint.authorization().is_some() || !job.headers.contains_key(header::AUTHORIZATION) => {
                // It may have been changed: ask for it again.
                worker.want_key();
                let has_key = endpoint.authorization().is_some();
                // Where clients bring the keys, one without says nothing of the others.
                let own = has_key || self.config.has_keys();
                let fault = match head.status {
                    StatusCode::UNAUTHORIZED => {
                        if own {
                            self.pool.lock_out(worker);
                        }
                        None
                    }
                    // A 403 may be about this one request: only where others serve it the key is to blame.
                    _ => own.then_some(Fault::Named),
                };
                let error = ApiError::worker_fault(match (has_key, head.status) {
                    (true, StatusCode::UNAUTHORIZED) => {
                        "the engine refused the key that its EngineWorker was started with"
                    }
                    (true, _) => "the engine forbids this to the key that its EngineWorker was started with",
                    (false, _) => "the engine wants a key, and its EngineWorker was started with none",
                });
                Failure::Refused(error, fault)
            }
            _ if !job.api.generates() && is_absent(head, &error) => {
                let workers = "its engine does not know that path";
                Failure::Final(ApiError::unsupported_endpoint(&job.model, job.api.path(), workers))
            }
            503 => Failure::Unready(error),
            501 if job.native.is_some() => Failure::Final(error),
            // What has no error in OpenAI's shape comes from something that is no engine, or from one that is in pieces.
            500.. if error.body.is_none() => Failure::Broken(error),
            500.. => Failure::Failed(error),
            400..500 => Failure::Final(error),
            other => broken(&format!("the engine answered with status {other}, which says nothing to an API client")),
        }
    }
}

/// What it means that there is no answer, or only a part of one: the engine is lost if nobody listens there any more, and
/// else it is this one request that broke.
pub(super) async fn broke_off(endpoint: &Endpoint, error: &WireError) -> Failure {
    if endpoint.is_there().await {
        broken(&format!("the engine broke off: {error}"))
    } else {
        Failure::Lost(format!("the engine broke off: {error}"))
    }
}

/// What a client is told whose stream broke, if nobody goes on with it. Whether the engine is gone is found out behind its
/// back.
fn cut(placement: &Placement, worker: &Arc<Worker>, error: &WireError) -> ApiError {
    tracing::warn!(worker = %worker.target().actor, %error, "an engine broke off in the middle of a stream");
    let (pool, worker) = (Arc::clone(&placement.pool), Arc::clone(worker));
    tokio::spawn(async move {
        if let Some(endpoint) = worker.endpoint()
            && !endpoint.is_there().await
        {
            pool.suspect(&worker);
        }
    });
    ApiError::worker_fault(match error {
        WireError::Unreadable(why) => format!("the engine's answer cannot be read: {why}"),
        _ => "the worker was lost in the middle of its answer".to_owned(),
    })
}

impl EngineStream {
    /// `companion` ends with it.
    pub(crate) fn keep(&mut self, companion: Companion) {
        self.lease.keep(companion);
    }
    /// Notes from here on what the client gets, so that another engine may go on with it: `sent` is what it has.
    pub(crate) fn note(&mut self, body: &Bytes, past: Past, sent: Box<Sent>, stall: Stall) {
        if self.reader.is_of_chunks() {
            self.again = Some(Again { body: body.clone(), past, sent, stall });
        }
    }
    /// Nobody else went on with it while it stood still.
    pub(crate) fn stays(&mut self, pause: Duration) {
        if let Some(again) = &mut self.again {
            again.stall.again_after(pause);
        }
    }
    /// Whose it is.
    pub(crate) fn worker(&self) -> &Arc<Worker> {
        self.lease.worker()
    }
    /// Status and headers, once.
    pub(crate) fn take_head(&mut self) -> Option<Head> {
        self.head.take()
    }

    /// What came next; `None` at the end of a complete answer.
    pub(crate) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        placement: &Placement,
    ) -> Poll<Option<Result<Passed, ApiError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            let data = match self.first.take() {
                Some(first) => first,
                None => {
                    let data = match &mut self.exchange {
                        Some(exchange) => exchange.poll_data(cx),
                        None => Poll::Ready(None),
                    };
                    let Poll::Ready(data) = data else { return self.poll_still(cx) };
                    match data {
                        Some(Ok(data)) => {
                            let now = Instant::now();
                            self.lease.worker().gave(now);
                            if let Some(again) = &mut self.again {
                                again.stall.beat(now);
                            }
                            data
                        }
                        // Everything was there already.
                        Some(Err(_)) if self.reader.is_done() => {
                            self.ended = true;
                            return Poll::Ready(self.reader.finish().transpose());
                        }
                        Some(Err(error)) => {
                            self.ended = true;
                            let told = cut(placement, self.lease.worker(), &error);
                            let Some(Again { body, past, sent, .. }) = self.again.take() else {
                                return Poll::Ready(Some(Err(told)));
                            };
                            let lost = GoOn { body, past, begun: Begun::Engine(sent), cause: Cause::Lost(told) };
                            return Poll::Ready(Some(Ok(Passed::GoOn(Box::new(lost)))));
                        }
                        None => {
                            self.ended = true;
                            return Poll::Ready(self.reader.finish().transpose());
                        }
                    }
                }
            };
            match self.reader.push(data) {
                Ok(None) => {}
                Ok(Some(passed)) => {
                    match (&mut self.again, &passed) {
                        (Some(again), Passed::Events(events)) => again.sent.events(events),
                        (Some(again), Passed::Deltas(deltas)) => again.sent.deltas(deltas),
                        (None, _) | (_, Passed::GoOn(_)) => {}
                    }
                    return Poll::Ready(Some(Ok(passed)));
                }
                Err(error) => {
                    self.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    /// Nothing comes: ready if the stream stands still.
    fn poll_still(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Passed, ApiError>>> {
        let Some(again) = &mut self.again else { return Poll::Pending };
        std::task::ready!(again.stall.poll(cx));
        if self.reader.is_done() {
            // What hangs is only the end of the body.
            self.ended = true;
            return Poll::Ready(self.reader.finish().transpose());
        }
        let begun = Begun::Engine(again.sent.clone());
        let cause = Cause::Still(self.lease.worker().target().actor);
        let still = GoOn { body: again.body.clone(), past: again.past, begun, cause };
        Poll::Ready(Some(Ok(Passed::GoOn(Box::new(still)))))
    }

    /// Tokens, if the engine said so near the end.
    pub(crate) fn usage(&self) -> Option<Usage> {
        self.reader.usage()
    }
    /// The client sees the engine's own events.
    pub(crate) fn passes(&self) -> bool {
        self.reader.passes()
    }
}
