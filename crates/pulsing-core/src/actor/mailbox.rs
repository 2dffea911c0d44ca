//! Waiting messages of one actor, with a lane for stop and kill that passes them (R3, R4).

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::call::Call;
use crate::error::Error;
use crate::id::ActorId;
use crate::system::{Displaced, Endpoint};

/// Waiting messages a mailbox holds unless told otherwise (design R3).
pub const DEFAULT_CAPACITY: usize = 256;

#[derive(Default)]
struct State {
    waiting: VecDeque<Call>,
    stopping: bool,
    killed: bool,
    closed: bool,
}

/// A bounded queue of calls.
pub struct Mailbox {
    actor: ActorId,
    capacity: usize,
    state: Mutex<State>,
    wake: Notify,
    kill: Notify,
}

impl Mailbox {
    pub(super) fn new(actor: ActorId, capacity: usize) -> Self {
        Self { actor, capacity, state: Mutex::default(), wake: Notify::new(), kill: Notify::new() }
    }

    /// The next message in arrival order; `None` when it is to stop, which passes those that wait (R4, R14).
    pub(super) async fn next(&self) -> Option<Call> {
        loop {
            {
                let mut state = self.state.lock();
                if state.stopping {
                    return None;
                }
                // A caller that gave up while waiting is not served.
                while let Some(call) = state.waiting.pop_front() {
                    if !call.responder.cancel_signal().is_cancelled() {
                        return Some(call);
                    }
                }
            }
            self.wake.notified().await;
        }
    }

    pub(super) fn stop(&self, kill: bool) {
        {
            let mut state = self.state.lock();
            state.stopping = true;
            state.killed |= kill;
        }
        self.wake.notify_one();
        if kill {
            self.kill.notify_one();
        }
    }

    /// Resolves when the running message must be abandoned.
    pub(super) async fn killed(&self) {
        while !self.state.lock().killed {
            self.kill.notified().await;
        }
    }

    /// Takes no more; returns what still waited.
    pub(super) fn close(&self) -> VecDeque<Call> {
        let mut state = self.state.lock();
        state.closed = true;
        std::mem::take(&mut state.waiting)
    }
}

impl Endpoint for Mailbox {
    fn deliver(&self, call: Call) {
        let actor = self.actor;
        let refusal = {
            let mut state = self.state.lock();
            if state.closed || state.stopping {
                Error::ActorStopped { actor }
            } else if call.chain.contains(&actor) {
                let chain: Vec<_> = call.chain.iter().chain([&actor]).map(ToString::to_string).collect();
                Error::Deadlock { chain: chain.join(" -> ") }
            } else if call.no_wait && state.waiting.len() >= self.capacity {
                Error::MailboxFull { actor, capacity: self.capacity }
            } else {
                state.waiting.push_back(call);
                drop(state);
                self.wake.notify_one();
                return;
            }
        };
        call.responder.error(refusal);
    }
    fn displaced(&self, loss: &Displaced) {
        tracing::error!("{loss}: it stops");
        self.stop(true);
    }
}
