//! Why requests went where they went, for whoever asks: `x-pulsing-debug: routing` on a request, `GET /v1/_routing`. Off unless
//! the Router was started with `debug_routing`; then nothing is kept and nothing is told.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::GatewayConfig;
use crate::policy::{Policy, Why};
use crate::pool::{Pool, Worker};

/// Choices that are remembered.
const LAST: usize = 64;
/// Workers whose load is told with a choice.
const SHOWN: usize = 8;

/// One choice of a Worker.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Decision {
    /// Milliseconds of Unix time.
    at_ms: u64,
    request_id: String,
    model: String,
    /// Actor id.
    pub(crate) worker: String,
    node: String,
    /// The policy's reason.
    why: String,
    /// Workers that were chosen from.
    candidates: usize,
    /// Load and capacity of the first of them, the chosen one before all others, by actor id.
    loads: Vec<(String, u32, u32)>,
}

impl Decision {
    pub(crate) fn new(
        request_id: &str,
        model: &str,
        chosen: &Arc<Worker>,
        why: Why,
        candidates: &[Arc<Worker>],
    ) -> Self {
        let now = Instant::now();
        let others = candidates.iter().filter(|worker| !Arc::ptr_eq(worker, chosen));
        let load = |worker: &Arc<Worker>| (worker.target().actor.to_string(), worker.load_at(now), worker.capacity());
        Self {
            at_ms: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64),
            request_id: request_id.to_owned(),
            model: model.to_owned(),
            worker: chosen.target().actor.to_string(),
            node: chosen.target().node.to_string(),
            why: why.to_string(),
            candidates: candidates.len(),
            loads: std::iter::once(chosen).chain(others).take(SHOWN).map(load).collect(),
        }
    }
    /// In a line: `2/3 blocks cached; 4 candidates; load 1/8 chosen, 5/8, 0/8, ...`.
    pub(crate) fn line(&self) -> String {
        let mut line = format!("{}; {} candidates; load", self.why, self.candidates);
        for (at, (_, load, capacity)) in self.loads.iter().enumerate() {
            let _ = write!(line, "{}{load}/{capacity}", if at == 0 { " " } else { ", " });
            if at == 0 {
                line.push_str(" chosen");
            }
        }
        if self.candidates > self.loads.len() {
            line.push_str(", ...");
        }
        line
    }
}

/// The choices made last.
#[derive(Default)]
pub(crate) struct Decisions(Mutex<VecDeque<Arc<Decision>>>);

impl Decisions {
    pub(crate) fn add(&self, decision: Arc<Decision>) {
        let mut last = self.0.lock();
        if last.len() == LAST {
            last.pop_front();
        }
        last.push_back(decision);
    }
    fn newest_first(&self) -> Vec<Arc<Decision>> {
        self.0.lock().iter().rev().cloned().collect()
    }
}

/// What `GET /v1/_routing` answers.
pub(crate) fn page(config: &GatewayConfig, policy: &dyn Policy, pool: &Pool, decisions: &Decisions) -> Value {
    let snapshot = pool.snapshot();
    let now = Instant::now();
    let holdings = policy.holdings();
    let worker = |worker: &Arc<Worker>| {
        let target = worker.target();
        json!({
            "instance": target.actor.to_string(),
            "node": target.node.to_string(),
            "state": worker.state().name(),
            "role": worker.role().name(),
            "detail": worker.detail(),
            "models": worker.models(),
            "url": worker.endpoint().map(|endpoint| endpoint.url()),
            "load": worker.load_at(now),
            "in_flight": worker.in_flight(),
            "running": worker.running(),
            "waiting": worker.waiting(),
            "capacity": worker.capacity(),
            "pressure": worker.pressure_at(now),
            "kv_usage": worker.kv_usage(),
            "report_age_ms": worker.report_age(now).map(|age| age.as_millis() as u64),
            "progress_age_ms": worker.progress_age().as_millis() as u64,
            "cached_blocks": holdings.get(&worker.cache()).copied().unwrap_or(0),
        })
    };
    json!({
        "policy": config.policy.name(),
        "scheduler": config.picker.is_some(),
        "session_headers": config.session_headers,
        "balance": {"absolute": config.balance_absolute, "relative": config.balance_relative},
        "index": policy.index().map(|index| json!({
            "blocks": index.blocks, "bytes": index.bytes, "limit_bytes": config.cache_index,
        })),
        "workers": snapshot.all().iter().map(worker).collect::<Vec<_>>(),
        "decisions": decisions.newest_first().iter().map(|one| &**one).collect::<Vec<_>>(),
    })
}
