//! The numbers of one point, by the definitions in [`crate::report::DEFINITIONS`].

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use crate::config::{Config, Slo};
use crate::phase::{PhaseResult, Shape};
use crate::record::{Outcome, Record, Source, between};
use crate::stats::{Summary, Values, summary};
use crate::verdict::{self, State, Verdict};

/// One point of a report. Latencies in milliseconds, lengths in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// For example `rate 4/s`.
    pub label: String,
    /// What was asked.
    pub target: Value,
    /// Seconds from the start of the point to its deadline, or to the interruption.
    pub length_s: f64,
    /// Seconds from the first send to the last token inside the point.
    pub window_s: f64,
    /// Whether Ctrl-C ended it.
    pub interrupted: bool,
    /// What became of the requests.
    pub counts: Counts,
    /// Per failure class.
    pub errors: BTreeMap<String, ErrorClass>,
    /// Load as it came about.
    pub achieved: Achieved,
    /// Rates over the window.
    pub throughput: Throughput,
    /// None without objectives.
    pub goodput: Option<Goodput>,
    /// Token numbers.
    pub tokens: Tokens,
    /// Distributions, of whole answers only.
    pub latency_ms: Latency,
    /// The same over the part of the point in which the load stood.
    pub steady: Option<Steady>,
    /// How this client did.
    pub client: ClientSide,
    /// Whether to believe it.
    pub verdict: Verdict,
    /// What to know before quoting these numbers.
    pub warnings: Vec<String>,
}

/// sent = ok + failed + cut; due = sent + dropped + unsent.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Counts {
    pub due: u64,
    pub sent: u64,
    pub ok: u64,
    pub failed: u64,
    pub timed_out: u64,
    pub cut: u64,
    pub dropped: u64,
    pub unsent: u64,
    /// Ok, but finished after the deadline, within the drain.
    pub late: u64,
    /// Ok without a single token.
    pub empty: u64,
    pub resent: u64,
    pub missing_done: u64,
}

/// One class of failures. Their latencies are kept apart from those of answers.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct ErrorClass {
    pub count: u64,
    /// The first one, in words.
    pub reason: String,
    pub retry_after: Option<String>,
    /// From taking up to the failure.
    pub after_ms: Option<Summary>,
    /// Tokens that came before the failure.
    pub tokens: u64,
}

/// Load as it came about.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Achieved {
    pub sent_per_s: f64,
    pub in_flight_mean: f64,
    pub in_flight_peak: u64,
}

/// Totals over the window.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Throughput {
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    pub input_tokens_per_s: Option<f64>,
    pub total_tokens_per_s: Option<f64>,
}

/// Requests that met all objectives.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Goodput {
    pub slo_ms: Slo,
    pub good: u64,
    pub share: Option<f64>,
    pub requests_per_s: f64,
}

/// Token numbers of whole answers.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Tokens {
    pub output: u64,
    pub output_in_window: f64,
    pub reasoning: Option<u64>,
    pub input: Option<u64>,
    pub cached: Option<u64>,
    pub output_asked_mean: Option<f64>,
    pub output_mean: Option<f64>,
    pub input_mean: Option<f64>,
    /// Requests by where their number of output tokens comes from.
    pub source: BTreeMap<Source, u64>,
    pub per_event: Option<f64>,
    pub events_per_read: Option<f64>,
}

/// Distributions in milliseconds; null where nothing was measured.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Latency {
    pub ttft: Option<Summary>,
    pub ttft_sched: Option<Summary>,
    pub ttfo: Option<Summary>,
    pub tpot: Option<Summary>,
    pub itl: Option<Summary>,
    pub icl: Option<Summary>,
    pub e2e: Option<Summary>,
    pub e2e_sched: Option<Summary>,
    pub normalised: Option<Summary>,
    pub head: Option<Summary>,
    pub stream_end: Option<Summary>,
    pub queue: Option<Summary>,
    pub connect: Option<Summary>,
}

/// The part of a point in which its load stood.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Steady {
    pub from_s: f64,
    pub to_s: f64,
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    pub ttft: Option<Summary>,
    pub tpot: Option<Summary>,
    pub e2e: Option<Summary>,
}

/// How this client did.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct ClientSide {
    pub lag_ms: Option<Summary>,
    pub timer_lag_ms: Option<Summary>,
    pub cpu_s: f64,
    /// Of all cores of this machine.
    pub cpu_share: f64,
    pub reanchored: u64,
}

impl Point {
    pub(crate) fn of(phase: &PhaseResult, config: &Config) -> Self {
        let records = &phase.records;
        let ok: Vec<&Record> = records.iter().filter(|record| record.is_ok()).collect();
        let counts = counts(phase);
        let length_s = phase.ended.saturating_sub(phase.began) as f64 / 1e6;
        let window = window(phase);
        let window_s = (window.1 - window.0) as f64 / 1e6;
        let tokens = tokens(records, &ok);
        let latency_ms = latency(&ok);
        let verdict = verdict::judge(phase);
        let mut point = Self {
            label: phase.label.clone(),
            target: target(phase.shape),
            length_s,
            window_s,
            interrupted: phase.interrupted,
            errors: errors(records),
            achieved: achieved(phase, window),
            throughput: throughput(&ok, &tokens, window_s, phase.ended),
            goodput: config.slo.is_set().then(|| goodput(&config.slo, &ok, &counts, phase.ended, window_s)),
            steady: steady(phase, &ok),
            client: ClientSide {
                lag_ms: summary(records.iter().map(|record| record.start.saturating_sub(record.sched))),
                timer_lag_ms: summary(phase.timer_lag.iter().copied()),
                cpu_s: round(phase.cpu),
                cpu_share: round(verdict::cpu_share(phase.cpu, length_s)),
                reanchored: phase.reanchored,
            },
            counts,
            tokens,
            latency_ms,
            verdict,
            warnings: Vec::new(),
        };
        point.warnings = point.warn();
        point
    }

    /// Requests per second the server can finish, from the tokens it made: answers in progress count by what is done of them, so
    /// that short points of long answers are not far off.
    pub fn capacity(&self) -> f64 {
        let made =
            self.steady.as_ref().map_or(self.throughput.output_tokens_per_s, |steady| steady.output_tokens_per_s);
        match self.tokens.output_mean {
            Some(mean) if mean > 0.0 && made > 0.0 => round(made / mean),
            _ => self.throughput.requests_per_s,
        }
    }

    fn warn(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.verdict.state == State::ClientLimited {
            warnings.push(format!(
                "client-limited: these numbers say nothing about the server ({})",
                self.verdict.reasons.join("; ")
            ));
        }
        if let Some(e2e) = &self.latency_ms.e2e
            && self.length_s * 1000.0 < 3.0 * e2e.p95
        {
            warnings.push(format!(
                "the point lasted {:.1} s and its requests {:.1} s (p95): too short to judge; use a longer --duration",
                self.length_s,
                e2e.p95 / 1000.0
            ));
        }
        if self.counts.ok > 0 && self.latency_ms.ttft.as_ref().is_some_and(|ttft| ttft.weak_p99) {
            warnings.push(format!("{} answers: p99 is weak below 1000", self.counts.ok));
        }
        if self.tokens.source.keys().any(|source| *source == Source::Events) {
            warnings.push(
                "the server told no usage for some answers: each event counts as one token there; \
                 --tokenizer_name counts exactly"
                    .into(),
            );
        }
        if let (Some(cached), Some(input)) = (self.tokens.cached, self.tokens.input)
            && cached as f64 > 0.05 * input as f64
        {
            warnings.push(format!(
                "{:.0} % of the prompt tokens came from the server's cache",
                100.0 * cached as f64 / input as f64
            ));
        }
        if self.tokens.events_per_read.is_some_and(|events| events > 1.5) {
            warnings.push("events come in clumps: ITL and ICL show the buffering of a server or proxy".into());
        }
        if let (Some(asked), Some(got)) = (self.tokens.output_asked_mean, self.tokens.output_mean)
            && (got - asked).abs() > 0.1 * asked
        {
            warnings.push(format!("answers had {got:.0} tokens on average, {asked:.0} were asked"));
        }
        if self.counts.empty > 0 {
            warnings.push(format!("{} answers held no token; they have no latency", self.counts.empty));
        }
        warnings
    }
}

pub(crate) fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn per(total: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { round(total / seconds) } else { 0.0 }
}

fn target(shape: Shape) -> Value {
    match shape {
        Shape::Closed { users } => json!({"loop": "closed", "concurrency": users}),
        Shape::Open { rate, law, cap, on_full } => {
            json!({"loop": "open", "rate_per_s": rate, "arrival": law, "max_in_flight": cap, "on_full": on_full})
        }
    }
}

fn counts(phase: &PhaseResult) -> Counts {
    let mut counts = Counts { dropped: phase.dropped, unsent: phase.unsent, ..Counts::default() };
    for record in &phase.records {
        counts.sent += 1;
        counts.resent += u64::from(record.resent);
        counts.missing_done += u64::from(record.missing_done);
        match &record.outcome {
            Outcome::Ok => {
                counts.ok += 1;
                counts.empty += u64::from(record.first.is_none());
                counts.late += u64::from(record.closed > phase.ended);
            }
            Outcome::Failed(failure) => {
                counts.failed += 1;
                counts.timed_out += u64::from(failure.class.name().starts_with("timeout"));
            }
            Outcome::Cut => counts.cut += 1,
        }
    }
    counts.due = counts.sent + counts.dropped + counts.unsent;
    counts
}

fn errors(records: &[Record]) -> BTreeMap<String, ErrorClass> {
    let mut classes: BTreeMap<String, (ErrorClass, Vec<u64>)> = BTreeMap::new();
    for record in records {
        if let Outcome::Failed(failure) = &record.outcome {
            let (class, after) = classes.entry(failure.class.name()).or_default();
            if class.count == 0 {
                class.reason.clone_from(&failure.reason);
            }
            class.retry_after = class.retry_after.take().or_else(|| failure.retry_after.clone());
            class.count += 1;
            class.tokens += record.tokens;
            after.push(record.closed.saturating_sub(record.start));
        }
    }
    classes
        .into_iter()
        .map(|(name, (class, after))| (name, ErrorClass { after_ms: summary(after.into_iter()), ..class }))
        .collect()
}

/// First send to last token inside the point.
fn window(phase: &PhaseResult) -> (u64, u64) {
    let from = phase.records.iter().filter_map(|record| record.send).min().unwrap_or(phase.began);
    let last = |record: &Record| {
        let mut at = record.first?;
        if at > phase.ended {
            return None;
        }
        for gap in &record.gaps {
            if at + u64::from(*gap) > phase.ended {
                break;
            }
            at += u64::from(*gap);
        }
        Some(at)
    };
    let to = phase.records.iter().filter_map(last).max().unwrap_or(phase.ended);
    (from, to.max(from))
}

fn achieved(phase: &PhaseResult, window: (u64, u64)) -> Achieved {
    let busy: u64 = phase
        .records
        .iter()
        .filter_map(|record| {
            let from = record.send?.max(window.0);
            record.closed.min(window.1).checked_sub(from)
        })
        .sum();
    let length = (window.1 - window.0) as f64;
    let sent = phase.records.iter().filter(|record| record.send.is_some()).count() as f64;
    Achieved {
        sent_per_s: per(sent, phase.ended.saturating_sub(phase.began) as f64 / 1e6),
        in_flight_mean: if length > 0.0 { round(busy as f64 / length) } else { 0.0 },
        in_flight_peak: phase.peak,
    }
}

fn throughput(ok: &[&Record], tokens: &Tokens, window_s: f64, ended: u64) -> Throughput {
    let done: Vec<&&Record> = ok.iter().filter(|record| record.closed <= ended).collect();
    let input = tokens.input.map(|_| done.iter().filter_map(|record| record.prompt).sum::<u64>() as f64);
    Throughput {
        requests_per_s: per(done.len() as f64, window_s),
        output_tokens_per_s: per(tokens.output_in_window, window_s),
        input_tokens_per_s: input.map(|input| per(input, window_s)),
        total_tokens_per_s: input.map(|input| per(input + tokens.output_in_window, window_s)),
    }
}

fn goodput(slo: &Slo, ok: &[&Record], counts: &Counts, ended: u64, window_s: f64) -> Goodput {
    let meets = |value: Option<f64>, limit: Option<f64>| match limit {
        Some(limit) => value.is_some_and(|value| value / 1000.0 <= limit),
        None => true,
    };
    let is_good = |record: &&&Record| {
        let since_due = |at: Option<u64>| between(Some(record.sched), at).map(|micros| micros as f64);
        meets(since_due(record.first), slo.ttft)
            && meets(since_due(record.last), slo.e2e)
            // One token has no time per token to miss.
            && (record.tokens == 1 || meets(record.tpot(), slo.tpot))
    };
    let good = ok.iter().filter(is_good).count() as u64;
    // As a rate, only what finished inside: like the throughput it is part of.
    let inside = ok.iter().filter(|record| record.closed <= ended).filter(is_good).count();
    let of = counts.ok + counts.failed + counts.dropped;
    Goodput {
        slo_ms: slo.clone(),
        good,
        share: (of > 0).then(|| round(good as f64 / of as f64)),
        requests_per_s: per(inside as f64, window_s),
    }
}

fn tokens(records: &[Record], ok: &[&Record]) -> Tokens {
    let total = |of: fn(&Record) -> Option<u64>| {
        let known: Vec<u64> = ok.iter().filter_map(|record| of(record)).collect();
        (!known.is_empty()).then(|| known.iter().sum::<u64>())
    };
    let mean = |sum: f64, n: usize| (n > 0).then(|| round(sum / n as f64));
    let output: u64 = ok.iter().map(|record| record.tokens).sum();
    let input = total(|record| record.prompt);
    let mut source = BTreeMap::new();
    for record in ok {
        *source.entry(record.source).or_default() += 1;
    }
    let events: u64 = ok.iter().filter(|record| record.first.is_some()).map(|r| r.gaps.len() as u64 + 1).sum();
    let reads: u64 = ok.iter().map(|record| u64::from(record.token_reads)).sum();
    Tokens {
        output,
        // Tokens of requests that failed or were cut off were made within the window too.
        output_in_window: round(records.iter().map(|record| record.tokens as f64 * record.in_window).sum()),
        reasoning: total(|record| record.reasoning),
        input,
        cached: total(|record| record.cached),
        output_asked_mean: mean(ok.iter().map(|record| f64::from(record.asked)).sum(), ok.len()),
        output_mean: mean(output as f64, ok.len()),
        input_mean: input
            .and_then(|input| mean(input as f64, ok.iter().filter(|record| record.prompt.is_some()).count())),
        source,
        per_event: (events > 0).then(|| round(output as f64 / events as f64)),
        events_per_read: (reads > 0).then(|| round(events as f64 / reads as f64)),
    }
}

fn latency(ok: &[&Record]) -> Latency {
    let of = |get: fn(&Record) -> Option<u64>| summary(ok.iter().filter_map(|record| get(record)));
    let mut itl = Values::default();
    let mut icl = Values::default();
    for record in ok {
        for gap in &record.gaps {
            itl.push(f64::from(*gap));
            icl.push(f64::from(*gap));
        }
        itl.push_zeros(record.zero_gaps());
    }
    Latency {
        ttft: of(Record::ttft),
        ttft_sched: of(|record| between(Some(record.sched), record.first)),
        ttfo: of(Record::ttfo),
        tpot: ok.iter().filter_map(|record| record.tpot()).collect::<Values>().summary(),
        itl: itl.summary(),
        icl: icl.summary(),
        e2e: of(Record::e2e),
        e2e_sched: of(|record| between(Some(record.sched), record.last)),
        normalised: ok
            .iter()
            .filter(|record| record.tokens > 0)
            .filter_map(|record| Some(record.e2e()? as f64 / record.tokens as f64))
            .collect::<Values>()
            .summary(),
        head: of(|record| between(record.send, record.head)),
        stream_end: of(|record| between(record.send, record.end)),
        queue: of(Record::queue),
        connect: of(|record| record.connect_us),
    }
}

/// Closed loop: from the first to the last moment with nine tenths of the users in flight. Open loop: without its first tenth.
fn steady(phase: &PhaseResult, ok: &[&Record]) -> Option<Steady> {
    let (from, to) = match phase.shape {
        Shape::Open { .. } => (phase.began + phase.ended.saturating_sub(phase.began) / 10, phase.ended),
        Shape::Closed { users } => {
            let mut steps: Vec<(u64, i64)> = phase
                .records
                .iter()
                .filter_map(|record| Some([(record.send?, 1), (record.closed, -1)]))
                .flatten()
                .collect();
            // Ends before starts: a user's next request begins when its last one ended.
            steps.sort_unstable();
            let enough = (users as f64 * 0.9).ceil() as i64;
            let (mut now, mut from, mut to) = (0, None, None);
            for (at, step) in steps.into_iter().take_while(|step| step.0 <= phase.ended) {
                let before = now;
                now += step;
                if now >= enough {
                    from = from.or(Some(at));
                    to = Some(phase.ended);
                } else if before >= enough {
                    to = Some(at);
                }
            }
            (from?, to?)
        }
    };
    let seconds = to.checked_sub(from).filter(|length| *length > 0)? as f64 / 1e6;
    let done = ok.iter().filter(|record| (from..=to).contains(&record.closed)).count();
    let made: f64 = phase
        .records
        .iter()
        .filter_map(|record| {
            let mut at = record.first?;
            let events = record.gaps.len() as u64 + 1;
            let mut inside = u64::from((from..=to).contains(&at));
            for gap in &record.gaps {
                at += u64::from(*gap);
                inside += u64::from((from..=to).contains(&at));
            }
            Some(record.tokens as f64 * inside as f64 / events as f64)
        })
        .sum();
    let sent: Vec<&&Record> =
        ok.iter().filter(|record| record.send.is_some_and(|send| (from..=to).contains(&send))).collect();
    Some(Steady {
        from_s: round((from - phase.began.min(from)) as f64 / 1e6),
        to_s: round((to - phase.began.min(to)) as f64 / 1e6),
        requests_per_s: per(done as f64, seconds),
        output_tokens_per_s: per(made, seconds),
        ttft: summary(sent.iter().filter_map(|record| record.ttft())),
        tpot: sent.iter().filter_map(|record| record.tpot()).collect::<Values>().summary(),
        e2e: summary(sent.iter().filter_map(|record| record.e2e())),
    })
}
