//! Which Worker takes a request, and which one next.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;
use pulsing_core::ActorId;
use tokio::sync::{oneshot, watch};

use super::attempt::{Past, Upstream, lost_too_often};
use super::resume::Resume;
use super::{Failure, Job, Placement, Stall};
use crate::api::ApiError;
use crate::engine::{Engine, Sent};
use crate::metrics::Retry;
use crate::policy::Why;
use crate::pool::{Fault, Likeness, Role, State, Worker};
use crate::trail::Stage;

/// Who may take a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Takers {
    Any,
    /// It has several prompts and is still whole, which suits engines: when the choice falls on an actor it is to be
    /// divided.
    Undivided,
    /// It is one of several prompts.
    Actors,
}

/// What is to be placed.
pub(crate) struct Task {
    pub(crate) body: Bytes,
    pub(super) takers: Takers,
    pub(crate) past: Past,
    /// Of a stream that an actor has begun: what the client has.
    pub(super) resume: Option<Box<Resume>>,
    /// Of one that an engine has begun.
    pub(crate) sent: Option<Box<Sent>>,
    /// Not this one, from which nothing comes.
    pub(super) not: Option<ActorId>,
}

impl Task {
    /// Who can go on with it, where it has begun.
    pub(super) fn like(&self) -> Option<Arc<Likeness>> {
        let resume = self.resume.as_ref().map(|resume| &resume.likeness);
        resume.or_else(|| self.sent.as_ref().map(|sent| &sent.likeness)).map(Arc::clone)
    }
}

/// Where a request went.
pub(super) enum Placed {
    Actor(Box<Upstream>),
    Engine(Engine),
    /// Nowhere: see [`Takers::Undivided`].
    Divide,
}

impl Placement {
    /// Sends the request to a Worker and waits for the first piece of its answer.
    pub(super) async fn place(self: Arc<Self>, job: Arc<Job>, mut task: Task) -> Result<Placed, ApiError> {
        let mut excluded: Vec<ActorId> = task.not.into_iter().collect();
        let mut failed: Option<ApiError> = None;
        let mut refused: Option<ApiError> = None;
        let mut last_words: Option<String> = None;
        let mut suspects: Vec<(Arc<Worker>, Instant, Fault)> = Vec::new();
        let mut patience = None;
        let mut missed = false;
        // Only who has to wait follows the pool's changes.
        let mut versions = None;
        loop {
            if let Some(versions) = &mut versions {
                watch::Receiver::mark_unchanged(versions);
            }
            let ready = self.pool.snapshot().candidates(&job.model, job.api);
            let Some(worker) = self.choose(&ready, &excluded, &job, &task).await else {
                if let Some(error) = failed.take().or_else(|| refused.take()) {
                    return Err(error);
                }
                let Some(versions) = &mut versions else {
                    // Looks once more, so that no change is missed.
                    versions = Some(self.pool.versions());
                    continue;
                };
                // Waiting pays only when somebody has just been lost: then another may be coming, or a silent one wakes.
                let snapshot = self.pool.snapshot();
                let silent = snapshot.count(State::Silent) > 0;
                let lost = missed || task.past.lost > 0 || snapshot.count(State::Unreachable) > 0;
                let hurt = silent || lost || last_words.is_some();
                let wait = if silent { self.config.silence_wait } else { self.config.worker_wait };
                let until = *patience.get_or_insert_with(Instant::now) + wait;
                if hurt && tokio::time::timeout_at(until.into(), versions.changed()).await.is_ok_and(|ok| ok.is_ok()) {
                    continue;
                }
                let mut why = self.pool.explain(&job.model);
                if let Some(words) = last_words {
                    why = format!("{why} The last one tried said: {words}");
                }
                return Err(ApiError::no_workers(&why));
            };
            let pairs = matches!(worker.role(), Role::Prefill(_)) && job.question.is_none();
            let like = task.like();
            let decoder = if pairs { self.decoder(&job, &worker, &excluded, like.as_deref()) } else { None };
            if pairs && decoder.is_none() {
                excluded.push(worker.target().actor);
                last_words.get_or_insert_with(|| "there is no other half for it".to_owned());
                continue;
            }
            // One that rests and was chosen for want of a better one is tried by anybody.
            let trial = self.pool.admit(&worker).unwrap_or(false);
            self.policy.sent(&worker, job.hints());
            let mut tried = Arc::clone(&worker);
            let sent = Instant::now();
            let attempt = match (worker.endpoint(), &decoder) {
                (None, _) if task.takers == Takers::Undivided => return Ok(Placed::Divide),
                (_, Some(decoder)) => {
                    // As large as all the others together, and seldom needed.
                    let attempt = Box::pin(self.attempt_pair(&worker, decoder, &job, &mut task, trial)).await;
                    attempt.map_err(|(failure, which)| {
                        tried = which;
                        failure
                    })
                }
                (Some(endpoint), None) => {
                    tokio::select! {
                    answer = self.attempt_engine(&worker, endpoint, &job, &task, trial) => answer.map(Placed::Engine),
                    () = Arc::clone(&self).gone(Arc::clone(&worker), Arc::clone(&job), like) => Err(Failure::TakenBack),
                    }
                }
                (None, None) => match &job.question {
                    Some(question) => tokio::select! {
                        whole = self.ask(&worker, &job, question, &task, trial) => whole.map(|whole| Placed::Engine(Engine::Whole(whole))),
                        () = Arc::clone(&self).gone(Arc::clone(&worker), Arc::clone(&job), None) => Err(Failure::TakenBack),
                    },
                    None => self.attempt(&worker, &job, &mut task, trial).await.map(Placed::Actor),
                },
            };
            job.trail.spent(Stage::Worker, Some(sent));
            let worker = tried;
            let (error, fault) = match attempt {
                Ok(mut placed) => {
                    let generates = decoder.as_ref().unwrap_or(&worker);
                    if let Placed::Engine(Engine::Stream(stream)) = &mut placed
                        && let Some(sent) = task.sent.take().or_else(|| self.sent(&job, generates))
                    {
                        let stall = Stall::new(&self, generates, &job, Some(&sent.likeness));
                        stream.note(&task.body, task.past, sent, stall);
                    }
                    self.served_elsewhere(&suspects, &worker, &task.body);
                    return Ok(placed);
                }
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Lost(error)) => {
                    tracing::info!(request_id = %job.request_id, worker = %worker.target().actor, %error, "lost before the first piece; trying another worker");
                    self.pool.suspect(&worker);
                    self.count_loss(&mut task.past, &task.body)?;
                    suspects.push((worker, sent, Fault::Broken));
                    continue;
                }
                Err(Failure::Unreached(error)) => {
                    tracing::info!(request_id = %job.request_id, worker = %worker.target().actor, %error, "never saw the request; trying another worker");
                    self.pool.suspect(&worker);
                    self.metrics.retry(Retry::Lost);
                    missed = true;
                    continue;
                }
                Err(Failure::TakenBack) => {
                    tracing::info!(request_id = %job.request_id, worker = %worker.target().actor, "taken back from a worker that hangs");
                    task.past.waited = task.past.waited.max(sent.elapsed());
                    self.metrics.retry(Retry::TakenBack);
                    continue;
                }
                Err(Failure::Unready(error)) => {
                    excluded.push(worker.target().actor);
                    last_words = Some(error.message);
                    self.metrics.retry(Retry::Unready);
                    continue;
                }
                Err(Failure::Refused(error, fault)) => {
                    excluded.push(worker.target().actor);
                    suspects.extend(fault.map(|fault| (Arc::clone(&worker), sent, fault)));
                    refused = Some(ApiError { no_retry: true, ..error });
                    self.metrics.retry(Retry::Unready);
                    continue;
                }
                Err(Failure::Failed(error)) => (error, Fault::Named),
                Err(Failure::Broken(error)) => (error, Fault::Broken),
            };
            let (actor, error) = (worker.target().actor, ApiError { no_retry: true, ..error });
            if self.blame.failed(self.blame.fingerprint(&task.body), actor, Instant::now()) || failed.is_some() {
                // The same failure on two Workers is the request's own: do not carry it through the fleet.
                return Err(error);
            }
            tracing::info!(request_id = %job.request_id, worker = %actor, error = %error.message, "worker failed; trying another");
            excluded.push(actor);
            suspects.push((worker, sent, fault));
            failed = Some(error);
            self.metrics.retry(Retry::Failed);
        }
    }

    /// One more Worker was lost while it had the request.
    ///
    /// # Errors
    /// It must not cost another one.
    pub(super) fn count_loss(&self, past: &mut Past, body: &[u8]) -> Result<(), ApiError> {
        past.lost += 1;
        let request = self.blame.fingerprint(body);
        if past.lost >= self.config.max_attempts {
            self.blame.convict(request, Instant::now());
            return Err(lost_too_often(past.lost));
        }
        if self.blame.is_guilty(request, Instant::now()) {
            return Err(lost_too_often(past.lost));
        }
        self.metrics.retry(Retry::Lost);
        Ok(())
    }

    /// The request was served by `worker`: that it failed on others was not its own fault.
    fn served_elsewhere(&self, suspects: &[(Arc<Worker>, Instant, Fault)], worker: &Arc<Worker>, body: &[u8]) {
        if suspects.is_empty() {
            return;
        }
        self.blame.acquit(self.blame.fingerprint(body));
        for (suspect, sent, fault) in suspects.iter().filter(|(suspect, ..)| !Arc::ptr_eq(suspect, worker)) {
            self.pool.failed(suspect, *sent, *fault);
        }
    }

    async fn choose(
        &self,
        ready: &Arc<[Arc<Worker>]>,
        excluded: &[ActorId],
        job: &Job,
        task: &Task,
    ) -> Option<Arc<Worker>> {
        let takers = task.takers;
        let begun = task.like();
        let goes_on = |worker: &Worker| begun.as_ref().is_none_or(|like| worker.is_like(like));
        let all = excluded.is_empty() && begun.is_none() && takers != Takers::Actors;
        let kept: Arc<[Arc<Worker>]>;
        let candidates: &Arc<[Arc<Worker>]> = if all {
            ready
        } else {
            let fits = |worker: &Worker| goes_on(worker) && (takers != Takers::Actors || worker.endpoint().is_none());
            let left = ready.iter().filter(|worker| !excluded.contains(&worker.target().actor) && fits(worker));
            kept = left.cloned().collect();
            &kept
        };
        if candidates.is_empty() {
            return None;
        }
        let (worker, why) = match self.ask_picker(candidates, job).await {
            Some(worker) => (worker, Why::Scheduler),
            None => {
                let choice = self.policy.pick(candidates, job.hints());
                (Arc::clone(candidates.get(choice.index)?), choice.why)
            }
        };
        self.explain(job, &worker, why, candidates);
        Some(worker)
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
}
