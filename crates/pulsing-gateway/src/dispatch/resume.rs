//! A stream whose Worker is lost goes on, on another one, from what the client has (S4).
//!
//! Where that is sound: one choice, no tools, no schema, no log probabilities (`Parsed::resume`); a Worker that says in its
//! metadata that it continues (`continue`), and another one like it: same model, same `fingerprint`; and the token ids of
//! all that was sent, for a text can be cut into tokens in more than one way.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use pulsing_core::ActorId;

use super::place::{Placed, Takers, Task};
use super::{Job, Past, Placement};
use crate::api::{ApiError, Resume as Allowed};
use crate::engine::{Sent, hindrance};
use crate::pool::{Likeness, Worker};
use crate::protocol::{Deltas, Generate};

/// An answer whose Worker is lost, or stands still.
pub(crate) struct GoOn {
    pub(crate) body: Bytes,
    pub(crate) past: Past,
    pub(crate) begun: Begun,
    pub(crate) cause: Cause,
}

/// What the client has of an answer.
pub(crate) enum Begun {
    /// Nothing, for it waits for the whole: another Worker begins anew.
    Nothing,
    /// Of an actor's stream.
    Actor(Box<Resume>),
    /// Of an engine's.
    Engine(Box<Sent>),
}

/// Why another Worker is to go on with an answer.
pub(crate) enum Cause {
    /// Its Worker is gone, and this is what the client is told where nobody goes on.
    Lost(ApiError),
    /// Nothing comes from this one, which may yet wake.
    Still(ActorId),
}

/// What the client has of an actor's stream, and who may go on with it.
#[derive(Clone, Debug)]
pub(crate) struct Resume {
    text: String,
    tokens: Vec<u32>,
    /// The client has seen the end.
    finished: bool,
    pub(super) likeness: Arc<Likeness>,
}

impl Resume {
    /// For a stream of `job` that `worker` has begun; `None` where nobody could go on with it.
    pub(super) fn of(job: &Job, worker: &Worker) -> Option<Self> {
        let sampled = match job.resume {
            Allowed::Never => return None,
            Allowed::Greedy => false,
            Allowed::Sampled => true,
        };
        let likeness = Arc::new(worker.likeness(sampled)?);
        Some(Self { text: String::new(), tokens: Vec::new(), finished: false, likeness })
    }
    /// Notes what goes to the client. False if nobody could go on after it.
    pub(super) fn add(&mut self, deltas: &Deltas) -> bool {
        for delta in &deltas.deltas {
            self.text.push_str(&delta.text);
            self.tokens.extend_from_slice(&delta.token_ids);
            self.finished |= !delta.finish_reason.is_empty();
            let plain = delta.index == 0
                && delta.reasoning.is_empty()
                && delta.tool_calls_json.is_empty()
                && delta.logprobs_json.is_empty()
                && (delta.text.is_empty() || !delta.token_ids.is_empty());
            if !plain && !self.finished {
                return false;
            }
        }
        true
    }
    /// Nothing is missing but the end of the stream.
    pub(super) fn is_finished(&self) -> bool {
        self.finished
    }
    /// Tokens that the client has.
    pub(super) fn tokens(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
    /// Asks for the rest.
    pub(super) fn ask(&self, generate: &mut Generate) {
        generate.continue_text.clone_from(&self.text);
        generate.continue_tokens.clone_from(&self.tokens);
    }
}

impl Placement {
    /// What another engine needs to go on with a stream of `job` that `worker` has begun; `None` where none could.
    pub(super) fn sent(&self, job: &Job, worker: &Worker) -> Option<Box<Sent>> {
        Sent::of(job, worker, self.pool.snapshot().own_name(&job.model))
    }
    /// Another Worker is to go on with an answer, or to begin it anew; then it is one of these `takers`.
    pub(super) async fn go_on(
        self: Arc<Self>,
        job: Arc<Job>,
        lost: Box<GoOn>,
        takers: Takers,
    ) -> Result<Placed, ApiError> {
        let GoOn { body, mut past, begun, cause } = *lost;
        let (takers, resume, sent) = match begun {
            Begun::Nothing => (takers, None, None),
            Begun::Actor(resume) => (Takers::Actors, Some(resume), None),
            Begun::Engine(mut sent) => {
                let why =
                    if sent.ends() { hindrance(job.api, &body, &sent).await } else { Some("it is more than text") };
                if let Some(why) = why {
                    tracing::info!(request_id = %job.request_id, why, "a stream of an engine is not continued");
                    return Err(match cause {
                        Cause::Lost(error) => error,
                        Cause::Still(_) => ApiError::worker_fault(why),
                    });
                }
                (Takers::Any, None, Some(sent))
            }
        };
        let goes_on = resume.is_some() || sent.is_some();
        let not = match cause {
            Cause::Lost(_) => {
                self.count_loss(&mut past, &body)?;
                None
            }
            // A take-back is no failure of the request, and there is none yet.
            Cause::Still(worker) => Some(worker),
        };
        let placed = Arc::clone(&self).place(job, Task { body, takers, past, resume, sent, not }).await;
        // Counted when somebody goes on with it, not when somebody is looked for.
        self.metrics.resumed.fetch_add(u64::from(goes_on && placed.is_ok()), Relaxed);
        placed.map_err(|error| match error.status {
            _ if !goes_on => error,
            504 => error,
            _ => ApiError::worker_fault(format!(
                "the worker was lost in the middle of its answer, and no other one goes on with it: {}",
                error.message
            )),
        })
    }
}
