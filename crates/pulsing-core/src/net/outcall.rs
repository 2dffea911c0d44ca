//! The caller's side of one call that is out: exactly one end, whatever happens first (R1, R5).

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::deadline::{DeadlineKey, Deadlines};
use super::link::Link;
use super::outbox::Key;
use crate::call::{CallControl, CancelSignal, ReplyEvent, ReplySink};
use crate::error::Error;
use crate::stream::Credit;
use crate::system::Target;

/// How the callee is reached.
pub enum Route {
    /// Across a link, under this call number, in order with the other calls of the key.
    Link(Weak<Link>, u64, Key),
    /// In this process.
    Local(CancelSignal, Arc<Credit>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Streaming,
    Done,
}

/// Guards a sink: passes on a valid sequence of events and nothing after its end.
pub struct Outcall {
    sink: Arc<dyn ReplySink>,
    phase: Mutex<Phase>,
    route: OnceLock<Route>,
    deadlines: Arc<Deadlines>,
    deadline: Mutex<Option<DeadlineKey>>,
}

impl Outcall {
    /// A call to `target` whose first reply event must come within `timeout`.
    pub fn new(
        target: Target,
        sink: Arc<dyn ReplySink>,
        timeout: Option<Duration>,
        deadlines: &Arc<Deadlines>,
    ) -> Arc<Self> {
        let call = Arc::new(Self {
            sink,
            phase: Mutex::new(Phase::Waiting),
            route: OnceLock::new(),
            deadlines: Arc::clone(deadlines),
            deadline: Mutex::new(None),
        });
        if let Some(after) = timeout {
            let weak = Arc::downgrade(&call);
            let key = deadlines.insert(Instant::now() + after, move || {
                if let Some(call) = weak.upgrade() {
                    call.expire(target, after);
                }
            });
            *call.deadline.lock() = Some(key);
        }
        call
    }

    /// Sets how to reach the callee. Once.
    pub fn set_route(&self, route: Route) {
        let _ = self.route.set(route);
        // A deadline may have passed, or the caller may have cancelled, before there was a route to cancel on.
        if *self.phase.lock() == Phase::Done {
            self.cancel_callee();
        }
    }

    /// Whether nothing may follow any more.
    pub fn is_over(&self) -> bool {
        *self.phase.lock() == Phase::Done
    }

    fn expire(&self, target: Target, after: Duration) {
        let mut phase = self.phase.lock();
        if *phase == Phase::Waiting {
            *phase = Phase::Done;
            let what = format!("actor {} on node {} did not answer", target.actor, target.node);
            self.sink.event(ReplyEvent::Error(Error::Timeout { what, after }));
            drop(phase);
            self.cancel_callee();
        }
    }

    fn cancel_callee(&self) {
        match self.route.get() {
            Some(Route::Link(link, id, key)) => {
                if let Some(link) = link.upgrade() {
                    link.cancel(*id, *key);
                }
            }
            Some(Route::Local(cancel, _)) => cancel.fire(),
            None => {}
        }
    }

    fn forget_deadline(&self) {
        let key = self.deadline.lock().take();
        if let Some(key) = key {
            self.deadlines.remove(key);
        }
    }
}

impl ReplySink for Outcall {
    fn event(&self, event: ReplyEvent) {
        let mut phase = self.phase.lock();
        let next = match (*phase, &event) {
            (Phase::Waiting, ReplyEvent::StreamStart) | (Phase::Streaming, ReplyEvent::Item(_)) => Phase::Streaming,
            (Phase::Waiting, ReplyEvent::Value(_) | ReplyEvent::Error(_))
            | (Phase::Streaming, ReplyEvent::End | ReplyEvent::Error(_)) => Phase::Done,
            // Late events of a call that has ended, or nonsense of a peer.
            _ => return,
        };
        let first = *phase == Phase::Waiting;
        *phase = next;
        self.sink.event(event);
        drop(phase);
        if first {
            self.forget_deadline();
        }
    }
}

impl CallControl for Outcall {
    fn cancel(&self) {
        let mut phase = self.phase.lock();
        if *phase == Phase::Done {
            return;
        }
        *phase = Phase::Done;
        self.sink.event(ReplyEvent::Error(Error::Cancelled));
        drop(phase);
        self.forget_deadline();
        self.cancel_callee();
    }
    fn grant(&self, items: u32) {
        match self.route.get() {
            Some(Route::Link(link, id, _)) => {
                if let Some(link) = link.upgrade() {
                    link.grant(*id, items);
                }
            }
            Some(Route::Local(_, credit)) => credit.grant(items),
            None => {}
        }
    }
}
