//! One request to one engine.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use super::endpoint::Endpoint;
use super::exchange::Exchange;
use super::message::{Forward, Head, error_of, with_model};
use super::sse::Gate;
use crate::api::ApiError;
use crate::dispatch::{Failure, Job, Placement, broken};
use crate::pool::{Lease, Worker};
use crate::protocol::Usage;

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
}

/// A complete answer.
pub(crate) struct Whole {
    pub(crate) head: Head,
    pub(crate) body: Bytes,
    pub(crate) first_byte: Instant,
}

/// An answer that goes on. Dropping it closes the connection.
pub(crate) struct EngineStream {
    exchange: Exchange,
    gate: Gate,
    head: Option<Head>,
    first: Option<Bytes>,
    lease: Lease,
    ended: bool,
}

impl Placement {
    /// Sends the client's `body` to an engine and waits for the first byte of its answer; for all of it if the client
    /// wants no stream, so that an engine that dies on the way costs the client nothing.
    pub(crate) async fn attempt_engine(
        &self,
        worker: &Arc<Worker>,
        endpoint: &Arc<Endpoint>,
        job: &Job,
        body: Bytes,
        trial: bool,
    ) -> Result<Engine, Failure> {
        let mut lease = worker.lease_for(body.len(), Duration::ZERO);
        if trial {
            lease.tries();
        }
        job.trail.attempt();
        let body = match worker.model_for(self.pool.snapshot().own_name(&job.model)) {
            Some(model) if !job.names_model || model != job.model => with_model(&body, job.model_at.clone(), &model),
            _ => body,
        };
        let forward = Forward {
            api: job.api,
            headers: &job.headers,
            request_id: &job.request_id,
            traceparent: job.traceparent.as_deref(),
        };
        let mut fresh = false;
        let (parts, exchange) = loop {
            let request = forward.request(endpoint, body.clone()).map_err(Failure::Failed)?;
            let (wire, reused) = endpoint.connection(fresh).await.map_err(|error| {
                endpoint.forget();
                Failure::Lost(format!("cannot connect to the engine: {error}"))
            })?;
            match wire.send(request, endpoint).await {
                Ok(answer) => break answer,
                // The engine may have closed a kept connection at the very moment it was used: no fault of anyone.
                Err(error) if reused => {
                    tracing::debug!(%error, "a kept connection to an engine was closed");
                    fresh = true;
                }
                Err(error) => return Err(lost(&error)),
            }
        };
        let head = Head::new(&parts);
        if !head.status.is_success() {
            return Err(refused(worker, endpoint, job, &head, exchange).await);
        }
        if job.stream && head.is_event_stream() {
            return stream(head, exchange, lease).await;
        }
        let answer = whole(head, exchange).await;
        if answer.is_ok() {
            lease.answered();
        }
        answer
    }
}

async fn stream(head: Head, mut exchange: Exchange, mut lease: Lease) -> Result<Engine, Failure> {
    match exchange.data().await {
        Some(Ok(first)) => {
            lease.answered();
            let (gate, head, first) = (Gate::default(), Some(head), Some(first));
            Ok(Engine::Stream(Box::new(EngineStream { exchange, gate, head, first, lease, ended: false })))
        }
        Some(Err(error)) => Err(lost(&error)),
        None => Err(broken("the engine ended its stream without an answer")),
    }
}

async fn whole(head: Head, mut exchange: Exchange) -> Result<Engine, Failure> {
    let mut first_byte = None;
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(data) = exchange.data().await {
        let data = data.map_err(|error| lost(&error))?;
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

/// What an answer other than 2xx means.
async fn refused(worker: &Worker, endpoint: &Endpoint, job: &Job, head: &Head, mut exchange: Exchange) -> Failure {
    let mut body = BytesMut::new();
    while let Some(Ok(data)) = exchange.data().await {
        if body.len() + data.len() > MAX_ERROR {
            break;
        }
        body.extend_from_slice(&data);
    }
    let error = error_of(head, &body.freeze());
    match head.status.as_u16() {
        401 | 403 if endpoint.authorization().is_some() => {
            // The key is the EngineWorker's, not the client's. It may have been changed: ask for it again.
            worker.want_key();
            broken("the engine refused the key that its EngineWorker was started with")
        }
        404 | 405 | 501 if !job.api.generates() && !error.message.contains("model") => {
            let workers = "its engine does not know that path";
            Failure::Final(ApiError::unsupported_endpoint(&job.model, job.api.path(), workers))
        }
        503 => Failure::Unready(error),
        // What has no error in OpenAI's shape comes from something that is no engine, or from one that is in pieces.
        500.. if error.body.is_none() => Failure::Broken(error),
        500.. => Failure::Failed(error),
        400..500 => Failure::Final(error),
        other => broken(&format!("the engine answered with status {other}, which says nothing to an API client")),
    }
}

fn lost(error: &hyper::Error) -> Failure {
    let mut text = format!("the engine broke off: {error}");
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    Failure::Lost(text)
}

impl EngineStream {
    /// Status and headers, once.
    pub(crate) fn take_head(&mut self) -> Option<Head> {
        self.head.take()
    }

    /// The next whole events; `None` at the end of a complete answer.
    pub(crate) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        placement: &Placement,
    ) -> Poll<Option<Result<Bytes, ApiError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            let data = match self.first.take() {
                Some(first) => first,
                None => match std::task::ready!(self.exchange.poll_data(cx)) {
                    Some(Ok(data)) => data,
                    // Everything was there already.
                    Some(Err(_)) if self.gate.is_done() => {
                        self.ended = true;
                        return Poll::Ready(None);
                    }
                    Some(Err(error)) => {
                        self.ended = true;
                        return Poll::Ready(Some(Err(placement.cut(self.lease.worker(), lost(&error)))));
                    }
                    None => {
                        self.ended = true;
                        return Poll::Ready(match self.gate.finish() {
                            Some(rest) if rest.is_empty() => None,
                            Some(rest) => Some(Ok(rest)),
                            None => Some(Err(ApiError::worker_fault(
                                "the engine ended its stream before the answer was complete",
                            ))),
                        });
                    }
                },
            };
            if let Some(out) = self.gate.push(data) {
                return Poll::Ready(Some(Ok(out)));
            }
        }
    }

    /// Tokens, if the engine said so near the end.
    pub(crate) fn usage(&self) -> Option<Usage> {
        self.gate.usage()
    }
}
