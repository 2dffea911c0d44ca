//! The pieces of an answer, from one Worker or from several.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use bytes::Bytes;
use pulsing_core::Error;

use super::attempt::{Again, Past, Upstream};
use super::place::{Placed, Takers, Task};
use super::{Failure, Job, Placement};
use crate::api::{ApiError, no_such_choice};
use crate::cluster::BoxFuture;
use crate::engine::{Cause, Engine, EngineStream, GoOn, Head, Passed, Whole};
use crate::metrics::Retry;
use crate::protocol::{self, Deltas, Usage};

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
    Engine(Box<EngineStream>, Option<Relief>),
    Done,
}

/// Another engine is being asked to go on with a stream that stands still. Whichever says something first has the stream.
type Relief = BoxFuture<Result<Placed, ApiError>>;

enum Step {
    Piece(Piece),
    Divide,
    /// Another Worker is to answer from the beginning.
    Again(Bytes, Past),
    /// Another Worker is to go on.
    Resume(Again),
    /// Another engine is to go on.
    GoOn(Box<GoOn>),
}

impl Source {
    /// Places one sub-request a part; choice `c` of part `p` comes out as choice `p * n + c`. Engines get the client's
    /// `body` whole.
    pub(crate) fn new(placement: &Arc<Placement>, job: &Arc<Job>, body: Bytes, parts: Vec<Bytes>, n: u32) -> Self {
        let (placement, job) = (Arc::clone(placement), Arc::clone(job));
        let mut source = Self { placement, job, subs: Vec::new(), parts, n, next: 0 };
        let ready = source.placement.pool.snapshot().ready_for(&source.job.model).unwrap_or_default();
        if source.parts.len() == 1 {
            source.subs = vec![source.waiting(body, Takers::Any, Past::default())];
        } else if ready.iter().any(|worker| worker.endpoint().is_some()) {
            source.subs = vec![source.waiting(body, Takers::Undivided, Past::default())];
        } else {
            source.divide();
        }
        source
    }

    fn waiting(&self, body: Bytes, takers: Takers, past: Past) -> Sub {
        let task = Task { body, takers, past, resume: None, sent: None, not: None };
        Sub::Waiting(Box::pin(Arc::clone(&self.placement).place(Arc::clone(&self.job), task)))
    }
    fn divide(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        self.subs = parts.into_iter().map(|part| self.waiting(part, Takers::Actors, Past::default())).collect();
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
                    Poll::Ready(Some(Ok(Step::Again(body, past)))) => {
                        // An engine's whole answer is no part of another.
                        let takers = if count == 1 { Takers::Any } else { Takers::Actors };
                        self.subs[at] = self.waiting(body, takers, past);
                        let first = at as u32 * self.n;
                        return Poll::Ready(Some(Ok(Piece::Again(first..first + self.n))));
                    }
                    Poll::Ready(Some(Ok(Step::Resume(Again { body, past, resume, .. })))) => {
                        let task = Task { body, takers: Takers::Actors, past, resume, sent: None, not: None };
                        let going_on = Arc::clone(&self.placement).resume(Arc::clone(&self.job), task);
                        self.subs[at] = Sub::Waiting(Box::pin(going_on));
                        continue 'again;
                    }
                    Poll::Ready(Some(Ok(Step::GoOn(lost)))) => {
                        let still = matches!(lost.cause, Cause::Still(_));
                        let going_on = Arc::clone(&self.placement).go_on(Arc::clone(&self.job), lost);
                        match &mut self.subs[at] {
                            Sub::Engine(_, relief) if still => *relief = Some(Box::pin(going_on)),
                            lost => *lost = Sub::Waiting(Box::pin(going_on)),
                        }
                        continue 'again;
                    }
                    Poll::Ready(Some(Ok(Step::Piece(mut piece)))) => {
                        if let Piece::Deltas(deltas) = &mut piece {
                            // An undivided request has the choices of all its prompts.
                            let own = self.n * self.parts.len().max(1) as u32;
                            for delta in &mut deltas.deltas {
                                // It must not pass for another sub-request's.
                                if delta.index >= own {
                                    self.subs.clear();
                                    return Poll::Ready(Some(Err(no_such_choice(delta.index, own))));
                                }
                                delta.index += at as u32 * own;
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
                    Poll::Ready(Ok(Placed::Engine(Engine::Deltas(deltas)))) => {
                        *self = Self::Done;
                        return piece(Piece::Deltas(deltas));
                    }
                    Poll::Ready(Ok(Placed::Engine(Engine::Stream(stream)))) => *self = Self::Engine(stream, None),
                    Poll::Ready(Ok(Placed::Divide)) => {
                        *self = Self::Done;
                        return Poll::Ready(Some(Ok(Step::Divide)));
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(error))),
                },
                Self::Live(upstream) => {
                    if let Some(first) = upstream.first.take() {
                        return piece(Piece::Deltas(upstream.note(first)));
                    }
                    let Some(stream) = &mut upstream.stream else {
                        *self = Self::Done;
                        return Poll::Ready(None);
                    };
                    return match stream.poll_next(cx) {
                        Poll::Pending => match upstream.poll_gone(cx) {
                            Poll::Pending => Poll::Pending,
                            Poll::Ready(again) => {
                                let worker = upstream.lease.worker();
                                tracing::info!(worker = %worker.target().actor, "taken back from a worker that hangs");
                                placement.metrics.retry(Retry::TakenBack);
                                Poll::Ready(Some(Ok(again.step(placement))))
                            }
                        },
                        Poll::Ready(Some(Ok(item))) => match protocol::decode(&item) {
                            Ok(deltas) => piece(Piece::Deltas(upstream.note(deltas))),
                            Err(error) => Poll::Ready(Some(Err(ApiError::worker_fault(error)))),
                        },
                        Poll::Ready(Some(Err(_))) if upstream.is_finished() => {
                            *self = Self::Done;
                            Poll::Ready(None)
                        }
                        Poll::Ready(Some(Err(error))) => Poll::Ready(Some(upstream.failed(error, placement))),
                        Poll::Ready(None) => {
                            *self = Self::Done;
                            Poll::Ready(None)
                        }
                    };
                }
                Self::Engine(stream, relief) => {
                    let next = stream.poll_next(cx, placement);
                    match (&next, relief.as_mut()) {
                        (Poll::Pending, Some(asked)) => match asked.as_mut().poll(cx) {
                            Poll::Pending => return Poll::Pending,
                            Poll::Ready(Ok(placed)) => {
                                let worker = stream.worker().target().actor;
                                tracing::info!(%worker, "a stream that stood still is taken back from its engine");
                                placement.metrics.retry(Retry::TakenBack);
                                placement.metrics.resumed.fetch_add(1, Relaxed);
                                *self = Self::Waiting(Box::pin(std::future::ready(Ok(placed))));
                                continue;
                            }
                            Poll::Ready(Err(error)) => {
                                let worker = stream.worker().target().actor;
                                tracing::info!(%worker, error = %error.message, "a stream stands still, and nobody else goes on with it");
                                *relief = None;
                                stream.stays(placement.config.worker_standstill);
                                continue;
                            }
                        },
                        // Gone for good, and somebody has been asked already.
                        (Poll::Ready(Some(Ok(Passed::GoOn(_)))), Some(_)) => {
                            if let Some(asked) = relief.take() {
                                placement.metrics.retry(Retry::Lost);
                                placement.metrics.resumed.fetch_add(1, Relaxed);
                                *self = Self::Waiting(asked);
                            }
                            continue;
                        }
                        (Poll::Pending, None) => {}
                        // It is alive.
                        (Poll::Ready(_), _) => *relief = None,
                    }
                    return match next {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Some(Ok(Passed::Events(bytes)))) => piece(Piece::Events(bytes, stream.take_head())),
                        Poll::Ready(Some(Ok(Passed::Deltas(deltas)))) => piece(Piece::Deltas(deltas)),
                        Poll::Ready(Some(Ok(Passed::GoOn(lost)))) => Poll::Ready(Some(Ok(Step::GoOn(lost)))),
                        Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
                        Poll::Ready(None) if !stream.passes() => {
                            *self = Self::Done;
                            Poll::Ready(None)
                        }
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

impl Again {
    fn step(self, placement: &Placement) -> Step {
        if self.resume.is_none() {
            return Step::Again(self.body, self.past);
        }
        placement.metrics.resumed.fetch_add(1, Relaxed);
        Step::Resume(self)
    }
}

impl Upstream {
    /// Notes what the client is about to get, and counts its tokens from the beginning of the answer.
    fn note(&mut self, mut deltas: Deltas) -> Deltas {
        if let Some(resume) = self.again.as_mut().and_then(|again| again.resume.as_mut())
            && !resume.add(&deltas)
        {
            self.again = None;
        }
        for usage in deltas.deltas.iter_mut().filter_map(|delta| delta.usage.as_mut()) {
            usage.completion_tokens = usage.completion_tokens.saturating_add(self.had);
        }
        deltas
    }
    /// The client has all of a stream.
    fn is_finished(&self) -> bool {
        self.again.as_ref().and_then(|again| again.resume.as_ref()).is_some_and(|resume| resume.is_finished())
    }

    /// Ready when what it takes to begin again is to be taken elsewhere.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<Again> {
        let gone =
            !self.is_finished() && self.again.as_mut().is_some_and(|again| again.gone.as_mut().poll(cx).is_ready());
        match self.again.take_if(|_| gone) {
            Some(mut again) => {
                again.past.waited = again.past.waited.max(self.lease.begun().elapsed());
                Poll::Ready(again)
            }
            None => Poll::Pending,
        }
    }

    /// What a failure in the middle comes to.
    fn failed(&mut self, error: Error, placement: &Placement) -> Result<Step, ApiError> {
        let (worker, failure) = (self.lease.worker(), placement.classify(error));
        match (self.again.take(), failure) {
            (Some(mut again), Failure::Lost(error) | Failure::Unreached(error)) => {
                placement.pool.suspect(worker);
                placement.count_loss(&mut again.past, &again.body)?;
                tracing::info!(worker = %worker.target().actor, %error, "lost before its answer was whole; trying another worker");
                Ok(again.step(placement))
            }
            (_, failure) => Err(placement.cut(worker, failure)),
        }
    }
}
