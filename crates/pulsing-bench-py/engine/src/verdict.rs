//! Whether a point may be believed: what the server did, or what this client could not.

use serde::Serialize;

use crate::phase::{PhaseResult, Shape};
use crate::record::{Class, Outcome, Record};
use crate::stats;

/// How late the 99th percentile of requests may be taken up, microseconds.
const LAG: f64 = 5_000.0;
/// How late the 99th percentile of a 10 ms timer may be, microseconds.
const TIMER_LAG: f64 = 10_000.0;
/// Share of the machine's cores this process may use.
const CPU: f64 = 0.9;

/// What a point shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The server kept up with an open loop, or was measured in a closed one.
    Stable,
    /// More came in than the server finished: waiting and time to first token both grew.
    Saturated,
    /// This client was the limit; the numbers say nothing about the server.
    ClientLimited,
}

/// A state and why.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// The state.
    pub state: State,
    /// Why, in words; empty for a stable point.
    pub reasons: Vec<String>,
}

/// Share of all cores that `cpu` seconds over `wall` seconds are.
pub(crate) fn cpu_share(cpu: f64, wall: f64) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if wall > 0.0 { cpu / wall / cores as f64 } else { 0.0 }
}

pub(crate) fn judge(phase: &PhaseResult) -> Verdict {
    let client = client_limits(phase);
    if !client.is_empty() {
        return Verdict { state: State::ClientLimited, reasons: client };
    }
    let server = saturation(phase);
    let state = if server.is_empty() { State::Stable } else { State::Saturated };
    Verdict { state, reasons: server }
}

fn p99(values: impl Iterator<Item = u64>) -> (usize, f64) {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    let at = (values.len().saturating_sub(1) as f64 * 0.99).floor() as usize;
    (values.len(), values.get(at).copied().unwrap_or(0) as f64)
}

fn client_limits(phase: &PhaseResult) -> Vec<String> {
    let mut reasons = Vec::new();
    let (n, lag) = p99(phase.records.iter().map(|record| record.start.saturating_sub(record.sched)));
    if n >= 20 && lag > LAG {
        reasons.push(format!("requests were taken up {:.1} ms late (p99; limit {} ms)", lag / 1e3, LAG / 1e3));
    }
    let (n, lag) = p99(phase.timer_lag.iter().copied());
    if n >= 20 && lag > TIMER_LAG {
        reasons.push(format!("timers fired {:.1} ms late (p99; limit {} ms)", lag / 1e3, TIMER_LAG / 1e3));
    }
    let share = cpu_share(phase.cpu, phase.ended.saturating_sub(phase.began) as f64 / 1e6);
    if share > CPU {
        reasons.push(format!("the client used {:.0} % of this machine's cores", share * 100.0));
    }
    let no_ports = phase.records.iter().filter(|record| failed_with(record, Class::NoPorts)).count();
    if no_ports > 0 {
        reasons.push(format!("{no_ports} connections failed for lack of ports or descriptors (see ulimit -n)"));
    }
    if phase.reanchored > 0 {
        reasons.push(format!("the schedule stalled and was moved {} times", phase.reanchored));
    }
    reasons
}

fn failed_with(record: &Record, class: Class) -> bool {
    matches!(&record.outcome, Outcome::Failed(failure) if failure.class == class)
}

fn saturation(phase: &PhaseResult) -> Vec<String> {
    if !matches!(phase.shape, Shape::Open { .. }) {
        return Vec::new();
    }
    let mut reasons = Vec::new();
    if phase.unsent > 0 {
        reasons.push(format!("{} requests were due and never found a free slot", phase.unsent));
    }
    if phase.dropped > 0 {
        reasons.push(format!("{} arrivals found all slots taken and were dropped", phase.dropped));
    }
    if let Some(growth) = backlog_growth(phase)
        && first_token_rises(phase)
    {
        reasons.push(format!("waiting requests grew by {growth:.0} and the time to first token with them"));
    }
    reasons
}

/// How far the number of unfinished requests rose over the last four fifths of the window, when it did.
fn backlog_growth(phase: &PhaseResult) -> Option<f64> {
    const SAMPLES: u64 = 40;
    let length = phase.ended.saturating_sub(phase.began);
    let from = phase.began + length / 5;
    let mut due: Vec<u64> = phase.records.iter().map(|record| record.sched).collect();
    let mut closed: Vec<u64> = phase.records.iter().map(|record| record.closed).collect();
    due.sort_unstable();
    closed.sort_unstable();
    let points: Vec<(f64, f64)> = (0..=SAMPLES)
        .map(|at| {
            let time = from + (phase.ended - from) * at / SAMPLES;
            let came = due.partition_point(|due| *due <= time) as f64;
            let went = closed.partition_point(|closed| *closed <= time) as f64;
            (time as f64, came - went)
        })
        .collect();
    let (slope, weight) = stats::slope(&points)?;
    let growth = slope * (phase.ended - from) as f64;
    let mean = points.iter().map(|point| point.1).sum::<f64>() / points.len() as f64;
    (weight > 3.0 && growth >= 3.0 && growth >= 0.2 * mean).then_some(growth)
}

/// Whether the last third of requests waited longer for its first token than the first third; one that never got any did.
fn first_token_rises(phase: &PhaseResult) -> bool {
    let mut all: Vec<(u64, u64)> = phase
        .records
        .iter()
        .map(|record| (record.sched, record.first.map_or(u64::MAX, |first| first.saturating_sub(record.sched))))
        .collect();
    all.sort_unstable();
    let third = all.len() / 3;
    let median = |part: &[(u64, u64)]| {
        let mut waits: Vec<u64> = part.iter().map(|item| item.1).collect();
        waits.sort_unstable();
        waits.get(waits.len() / 2).copied().unwrap_or(0)
    };
    third > 0 && median(&all[all.len() - third..]) as f64 > 1.25 * median(&all[..third]) as f64
}
