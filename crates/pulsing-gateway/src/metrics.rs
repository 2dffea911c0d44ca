//! Counters of the gateway and their Prometheus text. Labels take values from fixed sets only: a path or model name out of
//! a request never becomes a label.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::pool::{Snapshot, State};
use crate::protocol::Usage;

/// What a request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completions,
    Embeddings,
    Tokenize,
    Responses,
    Models,
    Health,
    Metrics,
    Other,
}

impl Route {
    const ALL: [Self; 9] = [
        Self::Chat,
        Self::Completions,
        Self::Embeddings,
        Self::Tokenize,
        Self::Responses,
        Self::Models,
        Self::Health,
        Self::Metrics,
        Self::Other,
    ];
    fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Tokenize => "tokenize",
            Self::Responses => "responses",
            Self::Models => "models",
            Self::Health => "health",
            Self::Metrics => "metrics",
            Self::Other => "other",
        }
    }
}

/// Statuses counted one by one; any other is counted by its class.
const STATUSES: [u16; 14] = [200, 204, 400, 401, 404, 405, 408, 413, 429, 499, 500, 502, 503, 504];
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
const SLOTS: usize = STATUSES.len() + CLASSES.len();

/// Seconds.
const BOUNDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];

#[derive(Default)]
struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

impl Histogram {
    fn observe(&self, value: Duration) {
        let seconds = value.as_secs_f64();
        let slot = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[slot].fetch_add(1, Relaxed);
        self.micros.fetch_add(value.as_micros() as u64, Relaxed);
    }
    fn write(&self, out: &mut String, name: &str, help: &str) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut total = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            total += bucket.load(Relaxed);
            let bound = BOUNDS.get(index).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}");
        }
        let seconds = self.micros.load(Relaxed) as f64 / 1e6;
        let _ = writeln!(out, "{name}_sum {seconds}\n{name}_count {total}");
    }
}

/// Why a request was sent to another Worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    Lost,
    Unready,
    Failed,
    TakenBack,
}

/// All counters of one gateway.
#[derive(Default)]
pub(crate) struct Metrics {
    requests: [[AtomicU64; SLOTS]; Route::ALL.len()],
    ttft: Histogram,
    duration: Histogram,
    retries: [AtomicU64; 4],
    prompt_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    pub(crate) disconnects: AtomicU64,
    pub(crate) broken_streams: AtomicU64,
    pub(crate) resumed: AtomicU64,
    pub(crate) rejected: AtomicU64,
    pub(crate) picker_late: AtomicU64,
    pub(crate) picker_failed: AtomicU64,
}

impl Metrics {
    pub(crate) fn request(&self, route: Route, status: u16) {
        let slot = STATUSES
            .iter()
            .position(|known| *known == status)
            .unwrap_or_else(|| STATUSES.len() + usize::from((status / 100).clamp(1, 5) - 1));
        self.requests[route as usize][slot].fetch_add(1, Relaxed);
    }
    pub(crate) fn first_token(&self, after: Duration) {
        self.ttft.observe(after);
    }
    pub(crate) fn finished(&self, after: Duration, usage: Option<Usage>) {
        self.duration.observe(after);
        if let Some(usage) = usage {
            self.prompt_tokens.fetch_add(u64::from(usage.prompt_tokens), Relaxed);
            self.completion_tokens.fetch_add(u64::from(usage.completion_tokens), Relaxed);
            self.cached_tokens.fetch_add(u64::from(usage.cached_tokens), Relaxed);
        }
    }
    pub(crate) fn retry(&self, why: Retry) {
        self.retries[why as usize].fetch_add(1, Relaxed);
    }
    /// Generation requests answered, in whatever way.
    pub(crate) fn generations(&self) -> u64 {
        [Route::Chat, Route::Completions, Route::Responses]
            .iter()
            .flat_map(|route| &self.requests[*route as usize])
            .map(|count| count.load(Relaxed))
            .sum()
    }

    /// Prometheus text 0.0.4.
    pub(crate) fn render(&self, in_flight: usize, queued: usize, snapshot: &Snapshot) -> String {
        let mut out = String::with_capacity(8192);
        family(&mut out, "pulsing_router_requests_total", "counter", "Responses by route and status.");
        for route in Route::ALL {
            for (slot, count) in self.requests[route as usize].iter().enumerate() {
                let count = count.load(Relaxed);
                if count > 0 {
                    let status =
                        STATUSES.get(slot).map_or_else(|| CLASSES[slot - STATUSES.len()].to_owned(), u16::to_string);
                    let _ = writeln!(
                        out,
                        "pulsing_router_requests_total{{route=\"{}\",status=\"{status}\"}} {count}",
                        route.label()
                    );
                }
            }
        }
        let mut one = |name: &str, kind: &str, help: &str, value: u64| {
            family(&mut out, name, kind, help);
            let _ = writeln!(out, "{name} {value}");
        };
        one("pulsing_router_in_flight", "gauge", "Generation requests being served.", in_flight as u64);
        one("pulsing_router_queued_requests", "gauge", "Requests that wait until a worker has room.", queued as u64);
        one(
            "pulsing_router_rejected_total",
            "counter",
            "Requests refused because the house or the queue was full.",
            self.rejected.load(Relaxed),
        );
        one(
            "pulsing_router_disconnects_total",
            "counter",
            "Clients that left before the end.",
            self.disconnects.load(Relaxed),
        );
        one(
            "pulsing_router_broken_streams_total",
            "counter",
            "Streams that ended with an error event.",
            self.broken_streams.load(Relaxed),
        );
        one(
            "pulsing_router_resumed_streams_total",
            "counter",
            "Streams that went on, on another worker.",
            self.resumed.load(Relaxed),
        );
        let mut labelled = |name: &str, kind: &str, help: &str, label: &str, values: &[(&str, u64)]| {
            family(&mut out, name, kind, help);
            for (key, value) in values {
                let _ = writeln!(out, "{name}{{{label}=\"{key}\"}} {value}");
            }
        };
        labelled(
            "pulsing_router_retries_total",
            "counter",
            "Requests sent to another worker, by reason.",
            "reason",
            &[
                ("lost", self.retries[0].load(Relaxed)),
                ("unready", self.retries[1].load(Relaxed)),
                ("failed", self.retries[2].load(Relaxed)),
                ("taken_back", self.retries[3].load(Relaxed)),
            ],
        );
        labelled(
            "pulsing_router_tokens_total",
            "counter",
            "Tokens as reported by workers.",
            "kind",
            &[
                ("prompt", self.prompt_tokens.load(Relaxed)),
                ("completion", self.completion_tokens.load(Relaxed)),
                ("cached", self.cached_tokens.load(Relaxed)),
            ],
        );
        labelled(
            "pulsing_router_scheduler_fallbacks_total",
            "counter",
            "Requests placed by the policy because the plugged-in scheduler was late or failed.",
            "reason",
            &[("late", self.picker_late.load(Relaxed)), ("failed", self.picker_failed.load(Relaxed))],
        );
        let workers = State::ALL.map(|state| (state.name(), snapshot.count(state) as u64));
        labelled("pulsing_router_workers", "gauge", "Workers by state.", "state", &workers);
        self.ttft.write(
            &mut out,
            "pulsing_router_time_to_first_token_seconds",
            "From request to the worker's first piece.",
        );
        self.duration.write(&mut out, "pulsing_router_request_duration_seconds", "From request to the last byte.");
        out
    }
}

fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}
