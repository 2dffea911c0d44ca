//! What one request went through; it outlives the request's tasks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use pulsing_core::ActorId;

use crate::admit::Ticket;
use crate::explain::Decision;
use crate::pool::Worker;
use crate::protocol::Usage;
use crate::telemetry::Context;

/// A client that sets it to `routing` is told where its request went and why.
const DEBUG: HeaderName = HeaderName::from_static("x-pulsing-debug");
const WORKER: HeaderName = HeaderName::from_static("x-pulsing-worker");
const POLICY: HeaderName = HeaderName::from_static("x-pulsing-policy");
const ROUTING: HeaderName = HeaderName::from_static("x-pulsing-routing");
const OVERHEAD: HeaderName = HeaderName::from_static("x-router-overhead-us");
const TIMING: HeaderName = HeaderName::from_static("server-timing");

/// The way of one request.
#[derive(Default)]
pub(crate) struct Trail {
    ticket: OnceLock<Ticket>,
    told: OnceLock<Told>,
    /// Kept where somebody wants to be told.
    notes: Option<Mutex<Notes>>,
    /// Of the request itself.
    context: Option<Context>,
}

/// What logs and traces tell.
#[derive(Default)]
pub(crate) struct Notes {
    /// The name of the API key.
    pub(crate) key: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) stream: bool,
    /// One Worker after the other, not several at once.
    pub(crate) sequential: bool,
    pub(crate) queued: Option<Duration>,
    /// When the first piece of the answer was there.
    pub(crate) first: Option<Instant>,
    pub(crate) usage: Option<Usage>,
    /// Of its body, as much as is logged.
    pub(crate) body: Vec<u8>,
    /// Workers that it was sent to, in order.
    pub(crate) attempts: Vec<Attempt>,
}

/// One Worker that the request was sent to.
pub(crate) struct Attempt {
    pub(crate) worker: ActorId,
    /// Of its engine.
    pub(crate) url: Option<String>,
    pub(crate) started: Instant,
    pub(crate) context: Option<Context>,
}

impl Notes {
    /// How often it was sent to another Worker.
    pub(crate) fn retries(&self) -> usize {
        if self.sequential { self.attempts.len().saturating_sub(1) } else { 0 }
    }
}

/// What the client asked to be told.
struct Told {
    begun: Instant,
    /// Microseconds of each stage.
    spent: [AtomicU64; Stage::ALL.len()],
    decisions: Mutex<Vec<Arc<Decision>>>,
}

/// Where a request's time goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Until the client has sent its body.
    Body,
    /// Reading what the Router must know of it.
    Parse,
    /// Waiting for a Worker to have room.
    Queue,
    /// From the Worker's getting it to its first piece, or to its whole answer if no stream was asked for.
    Worker,
}

impl Stage {
    const ALL: [Self; 4] = [Self::Body, Self::Parse, Self::Queue, Self::Worker];
    fn name(self) -> &'static str {
        match self {
            Self::Body => "body",
            Self::Parse => "parse",
            Self::Queue => "queue",
            Self::Worker => "worker",
        }
    }
}

impl Trail {
    /// It was let through to dispatch.
    pub(crate) fn let_through(&self, ticket: Ticket) {
        let _ = self.ticket.set(ticket);
    }
    /// One of which notes are taken. `context` is that of the request, if it is traced.
    pub(crate) fn recording(context: Option<Context>) -> Self {
        Self { notes: Some(Mutex::default()), context, ..Self::default() }
    }
    /// Takes a note.
    pub(crate) fn note(&self, note: impl FnOnce(&mut Notes)) {
        if let Some(notes) = &self.notes {
            note(&mut notes.lock());
        }
    }
    /// What the Worker that it is sent to is told of its trace; `None` if it is none of ours.
    pub(crate) fn traceparent(&self) -> Option<String> {
        let context = self.context?;
        let mut last = None;
        self.note(|notes| last = notes.attempts.last().and_then(|attempt| attempt.context));
        Some(last.unwrap_or(context).to_string())
    }
    /// A Worker counts it from here on.
    pub(crate) fn attempt(&self, worker: &Worker) {
        self.note(|notes| {
            notes.attempts.push(Attempt {
                worker: worker.target().actor,
                url: worker.endpoint().map(|endpoint| endpoint.url()),
                started: Instant::now(),
                context: self.context.map(Context::child),
            });
        });
        if let Some(ticket) = self.ticket.get() {
            ticket.placed();
        }
    }

    /// The request began then; `headers` may ask for an explanation.
    pub(crate) fn begin(&self, headers: &HeaderMap, begun: Instant) {
        let wanted = headers.get(DEBUG).and_then(|value| value.to_str().ok());
        if wanted.is_some_and(|wanted| wanted.split(',').any(|one| one.trim().eq_ignore_ascii_case("routing"))) {
            let _ = self.told.set(Told { begun, spent: Default::default(), decisions: Mutex::default() });
        }
    }
    /// Now, where somebody wants to be told: a look at the clock is a twentieth of what the Router does for a request.
    pub(crate) fn clock(&self) -> Option<Instant> {
        self.told.get().map(|_| Instant::now())
    }
    /// A stage took from `since` until now.
    pub(crate) fn spent(&self, stage: Stage, since: Option<Instant>) {
        if let (Some(told), Some(since)) = (self.told.get(), since) {
            told.spent[stage as usize].fetch_add(since.elapsed().as_micros() as u64, Relaxed);
        }
    }
    /// A Worker was chosen.
    pub(crate) fn decided(&self, decision: &Arc<Decision>) {
        if let Some(told) = self.told.get() {
            told.decisions.lock().push(Arc::clone(decision));
        }
    }
    /// Adds what the client asked to be told to an answer's headers.
    pub(crate) fn tell(&self, policy: &'static str, headers: &mut HeaderMap) {
        let Some(told) = self.told.get() else { return };
        let decisions = told.decisions.lock();
        // Ids and sentences of our own: always fit for a header.
        let mut set = |name: HeaderName, text: &str| {
            if let Ok(value) = HeaderValue::from_str(text) {
                headers.insert(name, value);
            }
        };
        if let Some(last) = decisions.last() {
            set(WORKER, &last.worker);
            let lines: Vec<String> = decisions.iter().map(|decision| decision.line()).collect();
            set(ROUTING, &lines.join(" | then "));
        }
        set(POLICY, policy);
        let total = told.begun.elapsed();
        let of = |stage: Stage| Duration::from_micros(told.spent[stage as usize].load(Relaxed));
        // The rest is others' time: the client's, the Workers'.
        let others = of(Stage::Body) + of(Stage::Queue) + of(Stage::Worker);
        set(OVERHEAD, &total.saturating_sub(others).as_micros().to_string());
        let entry = |name: &str, took: Duration| format!("{name};dur={:.3}", took.as_secs_f64() * 1e3);
        let mut timing: Vec<String> = Stage::ALL.map(|stage| entry(stage.name(), of(stage))).into();
        timing.push(entry("total", total));
        set(TIMING, &timing.join(", "));
    }
}
