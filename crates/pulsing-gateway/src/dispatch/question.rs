//! One request to one actor Worker that is answered in one piece.

use std::sync::Arc;
use std::time::Instant;

use pulsing_core::{CallOptions, Reply};

use super::place::Task;
use super::{Failure, Job, Placement, broken};
use crate::api::Question;
use crate::engine::{Head, Whole};
use crate::pool::Worker;
use crate::protocol::{self, Answer, Kind, Request};

impl Placement {
    /// Asks and writes the answer down as the client is to have it.
    pub(super) async fn ask(
        &self,
        worker: &Arc<Worker>,
        job: &Job,
        question: &Question,
        task: &Task,
        trial: bool,
    ) -> Result<Box<Whole>, Failure> {
        let mut lease = worker.lease_for(task.body.len(), task.past.waited);
        if trial {
            lease.tries();
        }
        job.trail.attempt(worker);
        let trace = job.trace();
        let left = job.deadline.saturating_duration_since(Instant::now());
        let asked = protocol::Question {
            api: job.api.wire_name().to_owned(),
            request_id: job.request_id.clone(),
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            traceparent: trace.clone().unwrap_or_default(),
        };
        let request = Request { version: protocol::VERSION, kind: Some(Kind::Question(asked)) };
        let options = CallOptions { timeout: Some(left), trace, ..CallOptions::default() };
        let reply =
            self.cluster.call(worker.target(), protocol::payload(&request, Some(task.body.clone())), options).await;
        let Reply::Value(value) = reply.map_err(|error| self.classify(error))? else {
            return Err(broken("the worker answered with a stream where a value was due"));
        };
        let answer: Answer = protocol::decode(&value).map_err(|error| broken(&error))?;
        lease.answered();
        let body = question.body(&answer, &job.model).map_err(Failure::Failed)?;
        Ok(Box::new(Whole { head: Head::json(), body: body.into(), first_byte: Instant::now() }))
    }
}
