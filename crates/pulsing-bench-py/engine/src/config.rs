//! What a run is asked to do, strictly parsed: an unknown key or a wrong type is an error, never a default.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::BenchError;

/// The kinds of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Closed loop: `max_vus` users, each sending its next request when the last one ended.
    Throughput,
    /// Open loop at each of `rates`.
    Rate,
    /// A throughput point, then `num_rates` open-loop rates up to 120 % of the request rate it reached.
    Sweep,
    /// Closed loop at several numbers of users up to `max_vus`.
    Csweep,
}

/// How arrivals of an open loop are spaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Law {
    /// Equal gaps.
    Constant,
    /// Exponential gaps.
    Poisson,
}

/// What an open loop does with an arrival when `max_vus` requests are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFull {
    /// It waits; the wait is part of its schedule-anchored latency.
    Queue,
    /// It is dropped and counted.
    Drop,
}

/// Which API is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// Chat if the server takes it, else completions.
    Auto,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// Whether connections are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Reuse {
    /// Kept alive and used again.
    Reuse,
    /// One per request; connecting is reported apart.
    New,
}

/// Limits of one request, in seconds.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// Until the connection stands.
    pub connect: f64,
    /// From sending to the first token.
    pub first: f64,
    /// Between two reads after the first token.
    pub idle: f64,
    /// From sending to the end; none by default.
    pub total: Option<f64>,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: 5.0, first: 120.0, idle: 60.0, total: None }
    }
}

/// Latency objectives in milliseconds; a request is good when it meets all that are set.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Slo {
    /// Time to first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft: Option<f64>,
    /// Time per output token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot: Option<f64>,
    /// From sending to the last token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2e: Option<f64>,
}

impl Slo {
    /// Whether any objective is set.
    pub fn is_set(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some() || self.e2e.is_some()
    }
}

/// A number of tokens drawn evenly from `low..=high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Length {
    /// Smallest.
    pub low: u32,
    /// Largest.
    pub high: u32,
}

/// What a run is asked to do. Serialised into reports, without the key.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the model, as the server knows it.
    pub model: String,
    /// Root of the server, with or without `/v1`.
    pub url: String,
    /// Sent as a bearer token; in no report, progress or error text.
    #[serde(default, skip_serializing)]
    pub api_key: Option<String>,
    /// Which points are measured.
    #[serde(default = "defaults::kind")]
    pub kind: Kind,
    /// Users of a closed loop, and the most requests an open loop has in flight.
    #[serde(default = "defaults::max_vus")]
    pub max_vus: usize,
    /// Length of each point, seconds.
    #[serde(default = "defaults::duration")]
    pub duration: f64,
    /// Unreported load before the first point, seconds.
    #[serde(default = "defaults::warmup")]
    pub warmup: f64,
    /// How long requests in flight at the end of a point may take to finish, seconds.
    #[serde(default = "defaults::drain")]
    pub drain: f64,
    /// Requests per second, of kind rate.
    #[serde(default)]
    pub rates: Vec<f64>,
    /// Points of a sweep.
    #[serde(default = "defaults::num_rates")]
    pub num_rates: usize,
    /// Numbers of users of a csweep; empty means powers up to `max_vus`.
    #[serde(default)]
    pub concurrency: Vec<usize>,
    /// Arrival law of open loops.
    #[serde(default = "defaults::arrival")]
    pub arrival: Law,
    /// What an open loop does at `max_vus`.
    #[serde(default = "defaults::on_full")]
    pub on_full: OnFull,
    /// Threads of the load generator.
    #[serde(default = "defaults::num_workers")]
    pub num_workers: usize,
    /// Seed of prompts and arrivals; drawn when absent, and reported.
    #[serde(default)]
    pub seed: Option<u64>,
    /// Tokens of a prompt.
    #[serde(default = "defaults::input_tokens")]
    pub input_tokens: Length,
    /// `max_tokens` of a request.
    #[serde(default = "defaults::output_tokens")]
    pub output_tokens: Length,
    /// Which API.
    #[serde(default = "defaults::endpoint")]
    pub endpoint: Endpoint,
    /// Whether connections are kept.
    #[serde(default = "defaults::connection")]
    pub connection: Reuse,
    /// Limits of one request.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// Latency objectives.
    #[serde(default)]
    pub slo: Slo,
    /// Merged into every request's body.
    #[serde(default)]
    pub extra_body: serde_json::Map<String, serde_json::Value>,
    /// Keep the text of answers that carry no usage, so that a tokenizer can count it.
    #[serde(default)]
    pub keep_text: bool,
}

mod defaults {
    use super::{Endpoint, Kind, Law, Length, OnFull, Reuse};

    pub(super) fn kind() -> Kind {
        Kind::Throughput
    }
    pub(super) fn max_vus() -> usize {
        128
    }
    pub(super) fn duration() -> f64 {
        120.0
    }
    pub(super) fn warmup() -> f64 {
        30.0
    }
    pub(super) fn drain() -> f64 {
        30.0
    }
    pub(super) fn num_rates() -> usize {
        10
    }
    pub(super) fn arrival() -> Law {
        Law::Poisson
    }
    pub(super) fn on_full() -> OnFull {
        OnFull::Queue
    }
    pub(super) fn num_workers() -> usize {
        4
    }
    pub(super) fn input_tokens() -> Length {
        Length { low: 200, high: 200 }
    }
    pub(super) fn output_tokens() -> Length {
        Length { low: 128, high: 128 }
    }
    pub(super) fn endpoint() -> Endpoint {
        Endpoint::Auto
    }
    pub(super) fn connection() -> Reuse {
        Reuse::Reuse
    }
}

/// A day: longer is a slip of the unit, and keeps every sum of durations far from overflow.
const LONGEST: f64 = 86_400.0;

impl Config {
    /// Parses and checks a JSON object of the fields above.
    ///
    /// # Errors
    /// [`BenchError::Config`] naming the field, the value and the way out.
    pub fn from_json(text: &str) -> Result<Self, BenchError> {
        let config: Self = serde_json::from_str(text).map_err(|error| BenchError::Config(format!("{error}")))?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), BenchError> {
        let no = |text: String| Err(BenchError::Config(text));
        if self.model.is_empty() {
            return no("model is empty; give the name the server knows it by".into());
        }
        if !within(self.duration, 0.1) {
            return no(format!("duration={}: expected 0.1 to {LONGEST} seconds", self.duration));
        }
        for (name, value) in [("warmup", self.warmup), ("drain", self.drain)] {
            if !within(value, 0.0) {
                return no(format!("{name}={value}: expected 0 to {LONGEST} seconds"));
            }
        }
        let limits = &self.timeouts;
        for (name, value) in [
            ("connect", limits.connect),
            ("first", limits.first),
            ("idle", limits.idle),
            ("total", limits.total.unwrap_or(1.0)),
        ] {
            if !within(value, 0.001) {
                return no(format!("timeout {name}={value}: expected 0.001 to {LONGEST} seconds"));
            }
        }
        for (name, value) in [("ttft", self.slo.ttft), ("tpot", self.slo.tpot), ("e2e", self.slo.e2e)] {
            if value.is_some_and(|value| !value.is_finite() || value <= 0.0) {
                return no(format!("slo {name} must be a positive number of milliseconds"));
            }
        }
        if self.max_vus == 0 || self.max_vus > 1_000_000 {
            return no(format!("max_vus={}: expected 1 to 1000000", self.max_vus));
        }
        if self.num_workers == 0 || self.num_workers > 1024 {
            return no(format!("num_workers={}: expected 1 to 1024 threads", self.num_workers));
        }
        if self.num_rates == 0 || self.num_rates > 1000 {
            return no(format!("num_rates={}: expected 1 to 1000", self.num_rates));
        }
        for (name, length) in [("input_tokens", self.input_tokens), ("output_tokens", self.output_tokens)] {
            if length.low == 0 || length.low > length.high || length.high > 10_000_000 {
                return no(format!(
                    "{name}={}-{}: expected a number from 1 to 10000000, or LOW-HIGH with LOW <= HIGH",
                    length.low, length.high
                ));
            }
        }
        match (self.kind, self.rates.is_empty()) {
            (Kind::Rate, true) => return no("kind rate needs rates, as in: --rates 1,2,4 (requests per second)".into()),
            (Kind::Rate, false) => {}
            (kind, false) => {
                return no(format!("rates belong to kind rate, not {}; add --benchmark_kind rate", kind.name()));
            }
            (_, true) => {}
        }
        if let Some(rate) = self.rates.iter().find(|rate| !(rate.is_finite() && **rate > 0.0 && **rate <= 1e6)) {
            return no(format!("rates: {rate} is no rate; expected requests per second, more than 0, at most 1000000"));
        }
        if self.kind != Kind::Csweep && !self.concurrency.is_empty() {
            return no(format!("concurrency belongs to kind csweep, not {}; use max_vus", self.kind.name()));
        }
        if let Some(users) = self.concurrency.iter().find(|users| **users == 0 || **users > 1_000_000) {
            return no(format!("concurrency: {users} is no number of users; expected 1 to 1000000"));
        }
        for reserved in ["model", "messages", "prompt", "stream", "n"] {
            if self.extra_body.contains_key(reserved) {
                return no(format!("extra_body must not set {reserved:?}: the measurement depends on it"));
            }
        }
        Ok(())
    }
}

impl Kind {
    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Rate => "rate",
            Self::Sweep => "sweep",
            Self::Csweep => "csweep",
        }
    }
}

fn within(seconds: f64, least: f64) -> bool {
    seconds.is_finite() && seconds >= least && seconds <= LONGEST
}

/// A checked number of seconds as a duration.
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::from_secs(86_400))
}

/// A checked number of seconds as microseconds.
pub(crate) fn micros(value: f64) -> u64 {
    u64::try_from(seconds(value).as_micros()).unwrap_or(u64::MAX)
}
