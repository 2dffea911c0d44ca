//! The caller's side of one call that is out: exactly one end, whatever happens first (R1, R5).

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::deadline::{DeadlineKey, Deadlines};
use super::link::Link;
use super::loan::Reader;
use super::outbox::Key;
use super::transport::Transport;
use crate::call::{CallControl, CallOptions, CancelSignal, ReplyEvent, ReplySink};
use crate::error::Error;
use crate::moment::later;
use crate::observe::Metrics;
use crate::stream::Credit;
use crate::system::Target;

/// Pause before a call is sent again: random around this, so that callers who lost one node do not come back as one.
const RESEND_AFTER: Duration = Duration::from_millis(50);

/// How the callee is reached.
#[derive(Clone)]
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

struct Progress {
    phase: Phase,
    /// Items the consumer can still take.
    credit: u64,
    /// Since when it could take one and none came.
    since: Instant,
    /// Whether a timer looks after that.
    watched: bool,
}

type Send = Box<dyn Fn(&Arc<Outcall>, Option<Duration>) + std::marker::Send + Sync>;

/// How an idempotent call is sent again.
struct Resend {
    left: u32,
    transport: Transport,
    send: Arc<Send>,
}

/// Guards a sink: passes on a valid sequence of events and nothing after its end.
pub struct Outcall {
    target: Target,
    sink: Arc<dyn ReplySink>,
    progress: Mutex<Progress>,
    route: Mutex<Option<Route>>,
    resend: Mutex<Option<Resend>>,
    deadlines: Arc<Deadlines>,
    /// Where the time to its first answer is counted, if it is.
    timed: Option<Arc<Metrics>>,
    deadline: Mutex<Option<DeadlineKey>>,
    expires: Option<Instant>,
    window: u32,
    idle: Option<Duration>,
    myself: Weak<Outcall>,
}

impl Outcall {
    /// A call to `target` whose first reply event must come within the timeout of `options`, and each further item of a
    /// stream, once it may be sent, within `idle`.
    pub fn new(
        target: Target,
        sink: Arc<dyn ReplySink>,
        options: &CallOptions,
        idle: Option<Duration>,
        deadlines: &Arc<Deadlines>,
        timed: Option<Arc<Metrics>>,
    ) -> Arc<Self> {
        let now = Instant::now();
        let expires = options.timeout.map(|after| later(now, after));
        let call = Arc::new_cyclic(|myself| Self {
            target,
            sink,
            progress: Mutex::new(Progress { phase: Phase::Waiting, credit: 0, since: now, watched: false }),
            route: Mutex::new(None),
            resend: Mutex::new(None),
            deadlines: Arc::clone(deadlines),
            timed,
            deadline: Mutex::new(None),
            expires,
            window: options.window,
            idle,
            myself: Weak::clone(myself),
        });
        if let (Some(after), Some(at)) = (options.timeout, expires) {
            let weak = Weak::clone(&call.myself);
            let key = deadlines.insert(at, move || {
                if let Some(call) = weak.upgrade() {
                    call.expire(after);
                }
            });
            *call.deadline.lock() = Some(key);
        }
        call
    }

    /// Whom it is for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Lets `send` send the call again, given what is left of its timeout, up to `times` if its way breaks before an answer.
    /// After how long is for `transport` to draw.
    pub fn resend_with(
        &self,
        times: u32,
        transport: &Transport,
        send: impl Fn(&Arc<Outcall>, Option<Duration>) + std::marker::Send + Sync + 'static,
    ) {
        *self.resend.lock() =
            Some(Resend { left: times, transport: transport.clone(), send: Arc::new(Box::new(send)) });
    }

    /// Sets how to reach the callee.
    pub fn set_route(&self, route: Route) {
        *self.route.lock() = Some(route);
        // A deadline may have passed, or the caller may have cancelled, before there was a route to cancel on.
        if self.is_over() {
            self.cancel_callee();
        }
    }

    /// Ends the call with `error`, and the callee with it.
    pub fn fail(&self, error: Error) {
        self.event(ReplyEvent::Error(error));
        self.cancel_callee();
    }

    /// The event loop that waits for it, if one does.
    pub fn reader(&self) -> Option<Arc<dyn Reader>> {
        self.sink.reader()
    }

    /// Whether nothing may follow any more.
    pub fn is_over(&self) -> bool {
        self.progress.lock().phase == Phase::Done
    }

    fn expire(&self, after: Duration) {
        let mut progress = self.progress.lock();
        if progress.phase == Phase::Waiting {
            progress.phase = Phase::Done;
            self.count(&progress);
            let Target { actor, node } = self.target;
            let what = format!("actor {actor} on node {node} did not answer");
            self.sink.event(ReplyEvent::Error(Error::Timeout { what, after }));
            drop(progress);
            self.cancel_callee();
        }
    }

    /// Ends a stream whose consumer could take an item for `idle` and got none (R5).
    fn check_idle(&self, idle: Duration) {
        let mut progress = self.progress.lock();
        progress.watched = false;
        if progress.phase != Phase::Streaming || progress.credit == 0 {
            return;
        }
        if progress.since + idle > Instant::now() {
            self.watch_idle(&mut progress, idle);
            return;
        }
        progress.phase = Phase::Done;
        let what = "the next item of a stream (its idle limit, stream_idle)".to_owned();
        self.sink.event(ReplyEvent::Error(Error::Timeout { what, after: idle }));
        drop(progress);
        self.cancel_callee();
    }

    fn watch_idle(&self, progress: &mut Progress, idle: Duration) {
        progress.watched = true;
        let weak = Weak::clone(&self.myself);
        let key = self.deadlines.insert(progress.since + idle, move || {
            if let Some(call) = weak.upgrade() {
                call.check_idle(idle);
            }
        });
        *self.deadline.lock() = Some(key);
    }

    /// Books an event; true if the clock of a stream is to be started.
    fn book(&self, progress: &mut Progress, event: &ReplyEvent) -> bool {
        match event {
            ReplyEvent::StreamStart => progress.credit = u64::from(self.window),
            ReplyEvent::Item(_) => progress.credit = progress.credit.saturating_sub(1),
            _ => return false,
        }
        progress.since = Instant::now();
        !progress.watched && progress.credit > 0
    }

    /// Counts the time that a call waited, when it no longer does.
    fn count(&self, progress: &Progress) {
        if let Some(metrics) = &self.timed {
            metrics.answers.add(progress.since.elapsed());
        }
    }

    /// Whether a call that failed with `error` is sent again instead.
    fn sent_again(&self, error: &Error) -> bool {
        let mut resend = self.resend.lock();
        let Some(Resend { left, transport, send }) =
            resend.as_mut().filter(|resend| resend.left > 0 && error.passing())
        else {
            return false;
        };
        let at = Instant::now() + RESEND_AFTER.mul_f64(transport.random_between(0.5, 1.5));
        if self.expires.is_some_and(|expires| expires <= at) {
            return false;
        }
        let Some(call) = self.myself.upgrade() else { return false };
        *left -= 1;
        let send = Arc::clone(send);
        *self.route.lock() = None;
        tracing::debug!(actor = %self.target.actor, %error, "an idempotent call is sent again");
        self.deadlines.insert(at, move || {
            if !call.is_over() {
                send(&call, call.expires.map(|expires| expires.saturating_duration_since(Instant::now())));
            }
        });
        true
    }

    fn cancel_callee(&self) {
        let route = self.route.lock().clone();
        match route {
            Some(Route::Link(link, id, key)) => {
                if let Some(link) = link.upgrade() {
                    link.cancel(id, key);
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
        let mut progress = self.progress.lock();
        let next = match (progress.phase, &event) {
            (Phase::Waiting, ReplyEvent::Error(error)) if self.sent_again(error) => return,
            (Phase::Waiting, ReplyEvent::StreamStart) | (Phase::Streaming, ReplyEvent::Item(_)) => Phase::Streaming,
            (Phase::Waiting, ReplyEvent::Value(_) | ReplyEvent::Error(_))
            | (Phase::Streaming, ReplyEvent::End | ReplyEvent::Error(_)) => Phase::Done,
            // Late events of a call that has ended, or nonsense of a peer.
            _ => return,
        };
        let first = progress.phase == Phase::Waiting;
        progress.phase = next;
        if first {
            self.count(&progress);
        }
        if first || next == Phase::Done {
            self.forget_deadline();
        }
        if let Some(idle) = self.idle
            && self.book(&mut progress, &event)
        {
            self.watch_idle(&mut progress, idle);
        }
        self.sink.event(event);
    }
}

impl CallControl for Outcall {
    fn cancel(&self) {
        let mut progress = self.progress.lock();
        if progress.phase == Phase::Done {
            return;
        }
        progress.phase = Phase::Done;
        self.sink.event(ReplyEvent::Error(Error::Cancelled));
        drop(progress);
        self.forget_deadline();
        self.cancel_callee();
    }
    fn grant(&self, items: u32) {
        if let Some(idle) = self.idle {
            let mut progress = self.progress.lock();
            if progress.credit == 0 {
                progress.since = Instant::now();
            }
            progress.credit += u64::from(items);
            if progress.phase == Phase::Streaming && !progress.watched {
                self.watch_idle(&mut progress, idle);
            }
        }
        let route = self.route.lock().clone();
        match route {
            Some(Route::Link(link, id, _)) => {
                if let Some(link) = link.upgrade() {
                    link.grant(id, items);
                }
            }
            Some(Route::Local(_, credit)) => credit.grant(items),
            None => {}
        }
    }
}
