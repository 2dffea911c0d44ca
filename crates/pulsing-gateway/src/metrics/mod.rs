//! Counters of the gateway and their Prometheus text. Labels take values from fixed sets only: a path out of a
//! request never becomes a label, and a model's name only if it is served here.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

mod histogram;
mod models;

pub(crate) use self::models::ModelMetrics;

use self::histogram::{GAPS, Histogram, SECONDS, SHARES, TOKENS};
use self::models::Models;
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

/// Why a request was sent to another Worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    Lost,
    Unready,
    Failed,
    TakenBack,
}

/// What a gateway holds at the moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gauges {
    /// Requests being served or waiting.
    pub(crate) in_flight: usize,
    /// Requests whose bodies are being received.
    pub(crate) receiving: usize,
    /// Requests that wait.
    pub(crate) queued: usize,
    /// Lines of the access log that were not written.
    pub(crate) lost_lines: u64,
    /// Spans that no collector got.
    pub(crate) lost_spans: u64,
}

/// All counters of one gateway.
pub(crate) struct Metrics {
    requests: [[AtomicU64; SLOTS]; Route::ALL.len()],
    ttft: Histogram,
    duration: Histogram,
    queue: Histogram,
    gaps: Histogram,
    input: Histogram,
    output: Histogram,
    cached_share: Histogram,
    models: Models,
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

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Default::default(),
            ttft: Histogram::new(SECONDS),
            duration: Histogram::new(SECONDS),
            queue: Histogram::new(SECONDS),
            gaps: Histogram::new(GAPS),
            input: Histogram::new(TOKENS),
            output: Histogram::new(TOKENS),
            cached_share: Histogram::new(SHARES),
            models: Models::default(),
            retries: Default::default(),
            prompt_tokens: AtomicU64::new(0),
            completion_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            disconnects: AtomicU64::new(0),
            broken_streams: AtomicU64::new(0),
            resumed: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            picker_late: AtomicU64::new(0),
            picker_failed: AtomicU64::new(0),
        }
    }
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
        self.ttft.took(after);
    }
    pub(crate) fn finished(&self, after: Duration, usage: Option<Usage>) {
        self.duration.took(after);
        if let Some(usage) = usage {
            self.prompt_tokens.fetch_add(u64::from(usage.prompt_tokens), Relaxed);
            self.completion_tokens.fetch_add(u64::from(usage.completion_tokens), Relaxed);
            self.cached_tokens.fetch_add(u64::from(usage.cached_tokens), Relaxed);
            self.input.observe(f64::from(usage.prompt_tokens));
            self.output.observe(f64::from(usage.completion_tokens));
            if usage.prompt_tokens > 0 {
                self.cached_share.observe(f64::from(usage.cached_tokens) / f64::from(usage.prompt_tokens));
            }
        }
    }
    /// A request waited so long for a Worker to have room.
    pub(crate) fn queued(&self, time: Duration) {
        self.queue.took(time);
    }
    /// So long after a piece of a stream came the next.
    pub(crate) fn gap(&self, time: Duration) {
        self.gaps.took(time);
    }
    /// Counts a request for a model that is served.
    pub(crate) fn model(&self, name: &str) -> Arc<ModelMetrics> {
        self.models.request(name)
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
    pub(crate) fn render(&self, now: Gauges, snapshot: &Snapshot) -> String {
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
        one("pulsing_router_in_flight", "gauge", "Generation requests being served.", now.in_flight as u64);
        one(
            "pulsing_router_receiving",
            "gauge",
            "Generation requests whose bodies are being received.",
            now.receiving as u64,
        );
        one(
            "pulsing_router_queued_requests",
            "gauge",
            "Requests that wait until a worker has room.",
            now.queued as u64,
        );
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
        one(
            "pulsing_router_access_log_dropped_total",
            "counter",
            "Lines of the access log that were not written.",
            now.lost_lines,
        );
        one("pulsing_router_spans_dropped_total", "counter", "Spans that no collector got.", now.lost_spans);
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
        let histograms = [
            ("time_to_first_token_seconds", "From request to the worker's first piece.", &self.ttft),
            ("inter_token_latency_seconds", "Between two pieces of a stream.", &self.gaps),
            ("request_duration_seconds", "From request to the last byte.", &self.duration),
            ("queue_time_seconds", "Until a worker had room.", &self.queue),
            ("input_sequence_tokens", "Prompt tokens of one request.", &self.input),
            ("output_sequence_tokens", "Completion tokens of one request.", &self.output),
            ("cached_prompt_ratio", "Part of a request's prompt that the worker had cached.", &self.cached_share),
        ];
        for (name, help, histogram) in histograms {
            let name = format!("pulsing_router_{name}");
            family(&mut out, &name, "histogram", help);
            histogram.write(&mut out, &name, "");
        }
        self.models.write(&mut out);
        out
    }
}

fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}
