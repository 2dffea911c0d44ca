//! One request to one actor Worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pulsing_core::{CallOptions, Error, ItemStream, Reply, StateChange};

use super::place::Task;
use super::resume::Resume;
use super::{Failure, Job, Placement, Stall};
use crate::api::ApiError;
use crate::cluster::BoxFuture;
use crate::pool::{Lease, Likeness, Worker};
use crate::protocol::{self, Deltas, Generate, Kind, Request};

/// A Worker's answer that has begun.
pub(super) struct Upstream {
    /// What follows; `None`: all of it is here.
    pub(super) stream: Option<ItemStream>,
    pub(super) first: Option<Deltas>,
    pub(super) lease: Lease,
    /// Tokens that the client had before.
    pub(super) had: u32,
    /// To go on with elsewhere; `None` where that cannot be.
    pub(super) again: Option<Again>,
}

/// What it takes to go on with another Worker.
pub(super) struct Again {
    pub(super) body: Bytes,
    pub(super) past: Past,
    /// What the client has; `None`: it has nothing, and all begins anew.
    pub(super) resume: Option<Box<Resume>>,
    pub(super) stall: Stall,
}

/// What a request has been through.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Past {
    /// Workers that were lost while they had it.
    pub(super) lost: u32,
    /// Longest time that it has waited for an answer on a Worker from which it was taken back.
    pub(crate) waited: Duration,
}

impl Placement {
    pub(super) async fn attempt(
        self: &Arc<Self>,
        worker: &Arc<Worker>,
        job: &Arc<Job>,
        task: &mut Task,
        trial: bool,
    ) -> Result<Box<Upstream>, Failure> {
        let mut lease = worker.lease_for(task.body.len(), task.past.waited);
        if trial {
            lease.tries();
        }
        job.trail.attempt(worker);
        let like = task.resume.as_ref().map(|resume| Arc::clone(&resume.likeness));
        let mut gone: BoxFuture<()> = Box::pin(Arc::clone(self).gone(Arc::clone(worker), Arc::clone(job), like));
        let begun = tokio::select! {
            biased;
            begun = self.begin(worker, job, task) => begun,
            () = &mut gone => Err(Failure::TakenBack),
        };
        let (stream, first) = begun?;
        lease.answered();
        let had = task.resume.as_ref().map_or(0, |resume| resume.tokens());
        let (body, past) = (task.body.clone(), task.past);
        let stall = |like: Option<&Arc<Likeness>>| Stall::new(self, worker, job, like);
        let begun = task.resume.take();
        let again = match job.stream {
            _ if stream.is_none() => None,
            false => Some(Again { body, past, resume: None, stall: stall(None) }),
            // From here on only those will do that can go on with it.
            true => begun.or_else(|| Resume::of(job, worker).map(Box::new)).map(|resume| {
                let stall = stall(Some(&resume.likeness));
                Again { body, past, resume: Some(resume), stall }
            }),
        };
        Ok(Box::new(Upstream { stream, first: Some(first), lease, had, again }))
    }

    /// Calls the Worker and waits for the first piece; without a stream behind it, it is the only one.
    async fn begin(&self, worker: &Worker, job: &Job, task: &Task) -> Result<(Option<ItemStream>, Deltas), Failure> {
        let left = job.deadline.saturating_duration_since(Instant::now());
        let trace = job.trace();
        let mut generate = Generate {
            api: job.api.wire_name().to_owned(),
            request_id: job.request_id.clone(),
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            traceparent: trace.clone().unwrap_or_default(),
            handoff: job.handoff.clone(),
            whole: !job.stream,
            ..Generate::default()
        };
        if let Some(resume) = &task.resume {
            resume.ask(&mut generate);
        }
        let request = Request { version: protocol::VERSION, kind: Some(Kind::Generate(generate)) };
        let options = CallOptions { timeout: Some(left), trace, ..CallOptions::default() };
        let payload = protocol::payload(&request, Some(task.body.clone()));
        let reply = self.cluster.call(worker.target(), payload, options).await;
        let mut stream = match reply.map_err(|error| self.classify(error))? {
            Reply::Stream(stream) => stream,
            Reply::Value(value) if !job.stream => {
                return Ok((None, protocol::decode::<Deltas>(&value).map_err(|error| broken(&error))?));
            }
            Reply::Value(_) => return Err(broken("the worker answered with a value where a stream was due")),
        };
        match stream.next().await {
            Some(Ok(item)) => Ok((Some(stream), protocol::decode::<Deltas>(&item).map_err(|error| broken(&error))?)),
            Some(Err(error)) => Err(self.classify(error)),
            None => Err(broken("the worker ended without an answer")),
        }
    }

    /// What it means that a call came to nothing.
    pub(crate) fn classify(&self, error: Error) -> Failure {
        match error {
            Error::ActorNotFound { .. }
            | Error::ActorStopped { .. }
            | Error::NodeNotFound { .. }
            | Error::ConnectFailed { .. }
            | Error::ConnectionLost { .. }
            | Error::Refused { .. } => match error.state_change() {
                StateChange::No => Failure::Unreached(error.to_string()),
                _ => Failure::Lost(error.to_string()),
            },
            Error::Timeout { .. } => Failure::Final(ApiError::deadline(self.config.request_timeout.as_secs_f64())),
            Error::ShutDown => Failure::Final(ApiError::draining()),
            Error::MailboxFull { .. } => Failure::Unready(ApiError::worker_fault("its mailbox is full")),
            Error::TooLarge { limit, .. } => {
                Failure::Final(ApiError::too_large(usize::try_from(limit).unwrap_or(usize::MAX)))
            }
            Error::App(error) => {
                let named = names_itself(&error.data);
                let error = ApiError::from_worker(&error);
                match error.status {
                    503 => Failure::Unready(error),
                    500.. if named => Failure::Failed(error),
                    500.. => Failure::Broken(error),
                    _ => Failure::Final(error),
                }
            }
            other => broken(&format!("the call to the worker failed: {}", other.kind())),
        }
    }

    /// What a failure in the middle of a stream tells the client.
    pub(crate) fn cut(&self, worker: &Worker, failure: Failure) -> ApiError {
        match failure {
            Failure::Lost(error) | Failure::Unreached(error) => {
                tracing::warn!(worker = %worker.target().actor, %error, "worker lost in the middle of a stream");
                self.pool.suspect(worker);
                ApiError::worker_fault("the worker was lost in the middle of its answer")
            }
            Failure::TakenBack => ApiError::worker_fault("the worker hangs in the middle of its answer"),
            Failure::Unready(error)
            | Failure::Refused(error, _)
            | Failure::Failed(error)
            | Failure::Broken(error)
            | Failure::Final(error) => error,
        }
    }
}

/// The data of a Worker's error are an error object, as its protocol has it.
fn names_itself(data: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(data).is_ok_and(|body| {
        let error = body.get("error").unwrap_or(&body);
        error.get("message").is_some_and(serde_json::Value::is_string)
    })
}

pub(super) fn lost_too_often(lost: u32) -> ApiError {
    let mut error = ApiError::worker_fault(match lost {
        1 => {
            "a worker was lost while it worked on this request, as others were that had the same one lately".to_owned()
        }
        _ => format!("{lost} times a worker was lost while it worked on this request"),
    });
    error.no_retry = true;
    error
}

pub(crate) fn broken(message: &str) -> Failure {
    Failure::Broken(ApiError::worker_fault(message))
}
