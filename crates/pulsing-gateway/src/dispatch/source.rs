//! The pieces of an answer, from one Worker or from several.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pulsing_core::Error;

use super::attempt::{Again, Past, Upstream};
use super::place::{Placed, Takers, Task};
use super::{Begun, Cause, Failure, GoOn, Job, Placement};
use crate::api::{ApiError, no_such_choice};
use crate::cluster::BoxFuture;
use crate::engine::{Engine, EngineStream, Head, Passed, Whole};
use crate::metrics::Retry;
use crate::pool::Worker;
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
    Waiting(Placing),
    Live(Live, Option<Relief>),
    Done,
}

type Placing = BoxFuture<Result<Placed, ApiError>>;

/// An answer that has begun.
enum Live {
    Actor(Box<Upstream>),
    Engine(Box<EngineStream>),
}

/// Another Worker is being asked for an answer that stands still. Whichever says something first has it.
struct Relief {
    placing: Placing,
    /// It is asked for all of it.
    anew: bool,
}

enum Step {
    Piece(Piece),
    Divide,
    /// Another Worker answers from the beginning.
    Anew,
    /// Another Worker is to go on, or to begin anew.
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

    /// What came of a sub-request does not count.
    fn anew(&self, at: usize) -> Piece {
        let first = at as u32 * self.n;
        Piece::Again(first..first + self.n)
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
                    Poll::Ready(Some(Ok(Step::Anew))) => return Poll::Ready(Some(Ok(self.anew(at)))),
                    Poll::Ready(Some(Ok(Step::GoOn(lost)))) => {
                        let (still, anew) =
                            (matches!(lost.cause, Cause::Still(_)), matches!(lost.begun, Begun::Nothing));
                        // An engine's whole answer is no part of another.
                        let takers = if count == 1 { Takers::Any } else { Takers::Actors };
                        let placing: Placing =
                            Box::pin(Arc::clone(&self.placement).go_on(Arc::clone(&self.job), lost, takers));
                        match &mut self.subs[at] {
                            Sub::Live(_, relief) if still => *relief = Some(Relief { placing, anew }),
                            lost => {
                                *lost = Sub::Waiting(placing);
                                if anew {
                                    return Poll::Ready(Some(Ok(self.anew(at))));
                                }
                            }
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
                    Poll::Ready(Ok(Placed::Actor(upstream))) => *self = Self::Live(Live::Actor(upstream), None),
                    Poll::Ready(Ok(Placed::Engine(Engine::Whole(whole)))) => {
                        *self = Self::Done;
                        return piece(Piece::Whole(whole));
                    }
                    Poll::Ready(Ok(Placed::Engine(Engine::Deltas(deltas)))) => {
                        *self = Self::Done;
                        return piece(Piece::Deltas(deltas));
                    }
                    Poll::Ready(Ok(Placed::Engine(Engine::Stream(stream)))) => {
                        *self = Self::Live(Live::Engine(stream), None)
                    }
                    Poll::Ready(Ok(Placed::Divide)) => {
                        *self = Self::Done;
                        return Poll::Ready(Some(Ok(Step::Divide)));
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(error))),
                },
                Self::Live(live, relief) => {
                    let next = live.poll_next(cx, placement);
                    match (&next, relief.as_mut()) {
                        (Poll::Pending, Some(asked)) => match asked.placing.as_mut().poll(cx) {
                            Poll::Pending => return Poll::Pending,
                            Poll::Ready(Ok(placed)) => {
                                let (worker, anew) = (live.worker().target().actor, asked.anew);
                                tracing::info!(%worker, "an answer that stood still is taken back from its worker");
                                placement.metrics.retry(Retry::TakenBack);
                                *self = Self::Waiting(Box::pin(std::future::ready(Ok(placed))));
                                if anew {
                                    return Poll::Ready(Some(Ok(Step::Anew)));
                                }
                                continue;
                            }
                            Poll::Ready(Err(error)) => {
                                let worker = live.worker().target().actor;
                                tracing::info!(%worker, error = %error.message, "an answer stands still, and nobody else goes on with it");
                                *relief = None;
                                live.stays(placement.config.worker_standstill);
                                continue;
                            }
                        },
                        // Gone for good, and somebody has been asked already.
                        (Poll::Ready(Some(Ok(Passed::GoOn(_)))), Some(_)) => {
                            if let Some(Relief { placing, anew }) = relief.take() {
                                placement.metrics.retry(Retry::Lost);
                                *self = Self::Waiting(placing);
                                if anew {
                                    return Poll::Ready(Some(Ok(Step::Anew)));
                                }
                            }
                            continue;
                        }
                        (Poll::Pending, None) => {}
                        // It is alive.
                        (Poll::Ready(_), _) => *relief = None,
                    }
                    return match next {
                        Poll::Pending => Poll::Pending,
                        Poll::Ready(Some(Ok(Passed::Events(bytes)))) => piece(Piece::Events(bytes, live.take_head())),
                        Poll::Ready(Some(Ok(Passed::Deltas(deltas)))) => piece(Piece::Deltas(deltas)),
                        Poll::Ready(Some(Ok(Passed::GoOn(lost)))) => Poll::Ready(Some(Ok(Step::GoOn(lost)))),
                        Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
                        Poll::Ready(None) => {
                            let complete = live.complete();
                            *self = Self::Done;
                            complete.map_or(Poll::Ready(None), piece)
                        }
                    };
                }
            }
        }
    }
}

impl Live {
    fn worker(&self) -> &Arc<Worker> {
        match self {
            Self::Actor(upstream) => upstream.lease.worker(),
            Self::Engine(stream) => stream.worker(),
        }
    }
    /// What came next; `None` at the end of a complete answer.
    fn poll_next(&mut self, cx: &mut Context<'_>, placement: &Placement) -> Poll<Option<Result<Passed, ApiError>>> {
        match self {
            Self::Actor(upstream) => upstream.poll_next(cx, placement),
            Self::Engine(stream) => stream.poll_next(cx, placement),
        }
    }
    /// Nobody else went on with it while it stood still.
    fn stays(&mut self, pause: Duration) {
        match self {
            Self::Actor(upstream) => {
                if let Some(again) = &mut upstream.again {
                    again.stall.again_after(pause);
                }
            }
            Self::Engine(stream) => stream.stays(pause),
        }
    }
    /// Status and headers of an engine, once.
    fn take_head(&mut self) -> Option<Head> {
        match self {
            Self::Actor(_) => None,
            Self::Engine(stream) => stream.take_head(),
        }
    }
    /// What is to be said of its end.
    fn complete(&self) -> Option<Piece> {
        match self {
            Self::Engine(stream) if stream.passes() => Some(Piece::Complete(stream.usage())),
            Self::Actor(_) | Self::Engine(_) => None,
        }
    }
}

impl Upstream {
    /// What came next; `None` at the end of a complete answer.
    fn poll_next(&mut self, cx: &mut Context<'_>, placement: &Placement) -> Poll<Option<Result<Passed, ApiError>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Passed::Deltas(self.note(first)))));
        }
        let Some(stream) = &mut self.stream else { return Poll::Ready(None) };
        match stream.poll_next(cx) {
            Poll::Pending => self.poll_still(cx),
            Poll::Ready(Some(Ok(item))) => {
                let now = Instant::now();
                self.lease.worker().gave(now);
                if let Some(again) = &mut self.again {
                    again.stall.beat(now);
                }
                let deltas = protocol::decode(&item).map_err(ApiError::worker_fault);
                Poll::Ready(Some(deltas.map(|deltas| Passed::Deltas(self.note(deltas)))))
            }
            Poll::Ready(Some(Err(_))) if self.is_finished() => Poll::Ready(None),
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(self.failed(error, placement))),
            Poll::Ready(None) => Poll::Ready(None),
        }
    }
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

    /// Nothing comes: ready if the answer stands still.
    fn poll_still(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Passed, ApiError>>> {
        let finished = self.is_finished();
        let Some(again) = &mut self.again else { return Poll::Pending };
        std::task::ready!(again.stall.poll(cx));
        if finished {
            // What hangs is only the end of the stream.
            return Poll::Ready(None);
        }
        let waited = again.past.waited.max(again.stall.since(Instant::now()));
        let still = GoOn {
            body: again.body.clone(),
            past: Past { waited, ..again.past },
            begun: again.resume.clone().map_or(Begun::Nothing, Begun::Actor),
            cause: Cause::Still(self.lease.worker().target().actor),
        };
        Poll::Ready(Some(Ok(Passed::GoOn(Box::new(still)))))
    }

    /// What a failure in the middle comes to.
    fn failed(&mut self, error: Error, placement: &Placement) -> Result<Passed, ApiError> {
        // No item for as long as a stream may be idle: it hangs, whatever its Worker says.
        let idle = matches!(error, Error::Timeout { .. });
        let (worker, failure) = (self.lease.worker(), placement.classify(error));
        let lost = match &failure {
            Failure::Lost(error) | Failure::Unreached(error) => Some(error.as_str()),
            _ => idle.then_some("nothing came for too long"),
        };
        match (self.again.take(), lost) {
            (Some(Again { body, past, resume, .. }), Some(error)) => {
                if !idle {
                    placement.pool.suspect(worker);
                }
                tracing::info!(worker = %worker.target().actor, %error, "lost before its answer was whole; trying another worker");
                let begun = resume.map_or(Begun::Nothing, Begun::Actor);
                let cause = Cause::Lost(ApiError::worker_fault("the worker was lost in the middle of its answer"));
                Ok(Passed::GoOn(Box::new(GoOn { body, past, begun, cause })))
            }
            _ => Err(placement.cut(worker, failure)),
        }
    }
}
