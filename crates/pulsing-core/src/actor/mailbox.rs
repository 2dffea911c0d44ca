//! Waiting messages of one actor, with a lane for endings that passes them (R3, R4).

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::waiting::Waiting;
use crate::call::{Acceptance, Call, Mode};
use crate::error::Error;
use crate::id::ActorId;
use crate::moment::from_now;
use crate::observe::Metrics;
use crate::system::{DEFAULT_GRACE, Displaced, Ending, Endpoint};

/// Waiting messages a mailbox holds unless told otherwise (design R3).
pub const DEFAULT_CAPACITY: usize = 256;

/// How far an actor is on its way out; it only goes forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// It takes messages.
    Open,
    /// It finishes what waits.
    Draining,
    /// It finishes the running message, but not beyond this time.
    Stopping(Instant),
    /// It finishes nothing.
    Killed,
    /// It has ended.
    Closed,
}

struct State {
    waiting: Waiting,
    /// When to look for callers that gave up while they waited.
    prune_at: usize,
    failure: Option<String>,
}

/// A bounded queue of calls. Callers beyond its capacity wait beside it.
pub struct Mailbox {
    actor: ActorId,
    capacity: usize,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
    wake: Notify,
    phase: watch::Sender<Phase>,
}

impl Mailbox {
    pub(super) fn new(actor: ActorId, capacity: usize, metrics: Arc<Metrics>) -> Self {
        let state = State { waiting: Waiting::new(Arc::clone(&metrics)), prune_at: 2 * capacity, failure: None };
        let phase = watch::channel(Phase::Open).0;
        Self { actor, capacity, metrics, state: Mutex::new(state), wake: Notify::new(), phase }
    }

    pub(super) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// What the actor was told to fail with.
    pub(super) fn failure(&self) -> Option<String> {
        self.state.lock().failure.clone()
    }

    /// The next message in arrival order; `None` when it is to end, which passes those that wait (R4, R14).
    pub(super) async fn next(&self) -> Option<Call> {
        loop {
            {
                let mut state = self.state.lock();
                let phase = self.phase();
                if phase > Phase::Draining {
                    return None;
                }
                // A caller that gave up while waiting is not served.
                while let Some(call) = state.waiting.pop() {
                    let placed = state.waiting.get(self.capacity - 1).and_then(acceptance);
                    if let Some(placed) = placed {
                        drop(state);
                        placed.give();
                        state = self.state.lock();
                    }
                    if !call.responder.cancel_signal().is_cancelled() {
                        return Some(call);
                    }
                }
                if phase == Phase::Draining {
                    return None;
                }
            }
            self.wake.notified().await;
        }
    }

    /// Resolves when the running message must be abandoned.
    pub(super) async fn cut(&self) {
        let mut phases = self.phase.subscribe();
        loop {
            let phase = *phases.borrow_and_update();
            match phase {
                Phase::Killed | Phase::Closed => return,
                Phase::Stopping(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => return,
                        _ = phases.changed() => {}
                    }
                }
                // The sender is this mailbox's own: it does not go away.
                Phase::Open | Phase::Draining => drop(phases.changed().await),
            }
        }
    }

    /// Resolves when the actor is killed.
    pub(super) async fn killed(&self) {
        let mut phases = self.phase.subscribe();
        let _ = phases.wait_for(|phase| *phase >= Phase::Killed).await;
    }

    /// Resolves as soon as the actor is told to end in any way.
    pub(super) async fn ending(&self) {
        let mut phases = self.phase.subscribe();
        let _ = phases.wait_for(|phase| *phase > Phase::Open).await;
    }

    /// Takes no more; what still waited is refused.
    pub(super) fn close(&self) {
        self.advance(Phase::Closed);
    }

    fn advance(&self, to: Phase) {
        let refused = {
            let mut state = self.state.lock();
            self.phase.send_if_modified(|phase| {
                let further = match (*phase, to) {
                    // The shorter grace counts.
                    (Phase::Stopping(now), Phase::Stopping(then)) => then < now,
                    (now, then) => then > now,
                };
                if further {
                    *phase = to;
                }
                further
            });
            if self.phase() > Phase::Draining { state.waiting.take() } else { VecDeque::new() }
        };
        self.wake.notify_one();
        let actor = self.actor;
        for call in refused {
            self.metrics.dead_letters.inc();
            call.responder.error(Error::ActorStopped { actor, begun: false });
        }
    }
}

/// What a tell's sender waits for once it has a place.
fn acceptance(call: &Call) -> Option<Acceptance> {
    (call.mode == Mode::Tell).then(|| call.responder.acceptance())
}

impl Endpoint for Mailbox {
    fn deliver(&self, call: Call) {
        let actor = self.actor;
        let mut given_up = VecDeque::new();
        let mut placed = Vec::new();
        let refusal = {
            let mut state = self.state.lock();
            let waiting = state.waiting.len();
            if self.phase() != Phase::Open {
                self.metrics.dead_letters.inc();
                Error::ActorStopped { actor, begun: false }
            } else if call.chain.contains(&actor) {
                let chain: Vec<_> = call.chain.iter().chain([&actor]).map(ToString::to_string).collect();
                Error::Deadlock { chain: chain.join(" -> ") }
            } else if call.no_wait && waiting >= self.capacity {
                Error::MailboxFull { actor, capacity: self.capacity }
            } else {
                if waiting >= state.prune_at {
                    given_up = state.waiting.take_given_up();
                    // Those that moved up have a place, too.
                    placed.extend(state.waiting.iter().take(self.capacity).filter_map(acceptance));
                    state.prune_at = 2 * state.waiting.len().max(self.capacity);
                }
                if state.waiting.len() < self.capacity {
                    placed.extend(acceptance(&call));
                }
                state.waiting.push(call);
                drop(state);
                placed.iter().for_each(Acceptance::give);
                self.wake.notify_one();
                // Dropped only here: whom they tell may call again.
                drop(given_up);
                return;
            }
        };
        call.responder.error(refusal);
    }

    fn displaced(&self, loss: &Displaced) {
        tracing::error!("{loss}: it stops");
        self.end(Ending::Kill);
    }

    fn end(&self, ending: Ending) {
        match ending {
            Ending::Drain => self.advance(Phase::Draining),
            Ending::Stop { grace } => self.advance(Phase::Stopping(from_now(grace))),
            Ending::Kill => self.advance(Phase::Killed),
            Ending::Fail { error } => {
                self.state.lock().failure.get_or_insert(error);
                self.advance(Phase::Stopping(Instant::now() + DEFAULT_GRACE));
            }
        }
    }
}
