//! What one request went through; it outlives the request's tasks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;

use crate::admit::Ticket;
use crate::explain::Decision;

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
    /// A Worker counts it from here on.
    pub(crate) fn attempt(&self) {
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
    /// A stage took from `since` until now.
    pub(crate) fn spent(&self, stage: Stage, since: Instant) {
        if let Some(told) = self.told.get() {
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
