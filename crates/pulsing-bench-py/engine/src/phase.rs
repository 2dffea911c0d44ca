//! One point of a run: load of one shape for one length of time, then a drain.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::body::{self, Dialect};
use crate::clock::{Clock, cpu_seconds};
use crate::config::{Config, Law, OnFull, micros};
use crate::exchange::Client;
use crate::live::Live;
use crate::prompt::{Calibration, Prompts};
use crate::record::{Outcome, Record};
use crate::trace::Trace;
use crate::{closed, open};

/// The shape of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shape {
    /// So many users, each with one request at a time.
    Closed { users: usize },
    /// So many requests per second, whatever the server does, with a cap on those in flight.
    Open { rate: f64, law: Law, cap: usize, on_full: OnFull },
}

/// What all requests of a run share.
pub(crate) struct Setting {
    pub(crate) config: Config,
    pub(crate) seed: u64,
    pub(crate) clock: Clock,
    pub(crate) client: Client,
    pub(crate) dialect: Dialect,
    pub(crate) path: String,
    pub(crate) scale: Calibration,
    pub(crate) prompts: Prompts,
    pub(crate) live: Arc<Live>,
    /// Numbers requests over all points, so that no two of a run are the same.
    pub(crate) next: AtomicU64,
}

/// What a point yielded.
#[derive(Debug)]
pub(crate) struct PhaseResult {
    pub(crate) label: String,
    pub(crate) shape: Shape,
    pub(crate) began: u64,
    /// When the window closed: at the deadline, or earlier when the run was interrupted.
    pub(crate) ended: u64,
    pub(crate) records: Vec<Record>,
    pub(crate) dropped: u64,
    /// Due within the window, never sent.
    pub(crate) unsent: u64,
    pub(crate) reanchored: u64,
    pub(crate) peak: u64,
    pub(crate) cpu: f64,
    /// How late a 10 ms timer was, microseconds.
    pub(crate) timer_lag: Vec<u64>,
    pub(crate) interrupted: bool,
}

/// A point while it runs.
pub(crate) struct Phase {
    pub(crate) setting: Arc<Setting>,
    pub(crate) began: u64,
    pub(crate) deadline: u64,
    closing: AtomicBool,
    stopped: AtomicBool,
    cut: watch::Sender<bool>,
    records: Mutex<Vec<Record>>,
}

impl Phase {
    /// Whether new requests may start.
    pub(crate) fn is_open(&self) -> bool {
        !self.closing.load(Ordering::Acquire) && self.setting.clock.now() < self.deadline
    }

    /// Whether the run was interrupted: what is due will not be sent.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// One request, due at `sched` and taken up at `start`. Returns whether it could connect.
    pub(crate) async fn request(&self, sched: u64, start: u64) -> bool {
        let setting = &self.setting;
        let config = &setting.config;
        let index = setting.next.fetch_add(1, Ordering::Relaxed);
        let (prompt, max_tokens) =
            setting.prompts.draw(index, config.input_tokens, config.output_tokens, setting.scale);
        let body = body::encode(&setting.dialect, &config.model, prompt, max_tokens, &config.extra_body);
        let mut trace = Trace::new(sched, start, config.keep_text);
        trace.asked = max_tokens;
        setting.live.started();
        let mut cut = self.cut.subscribe();
        let outcome = tokio::select! {
            biased;
            answered = setting.client.stream(&setting.path, &body, &mut trace) => match answered {
                Ok(()) => Outcome::Ok,
                Err(failure) => Outcome::Failed(failure),
            },
            // The sender lives as long as the phase, so only a cut ends this.
            _ = cut.wait_for(|cut| *cut) => Outcome::Cut,
        };
        let connected = !matches!(&outcome, Outcome::Failed(failure) if failure.class.is_connect());
        let record = trace.finish(outcome, setting.clock.now(), self.deadline);
        setting.live.ended(&record);
        self.records.lock().push(record);
        connected
    }
}

/// Runs one point. `stop` ends it early: nothing new starts and what is in flight is cut off.
pub(crate) async fn run(
    setting: &Arc<Setting>,
    label: String,
    shape: Shape,
    length: f64,
    mut stop: watch::Receiver<bool>,
) -> PhaseResult {
    let clock = setting.clock;
    let cpu = cpu_seconds();
    let began = clock.now();
    let phase = Arc::new(Phase {
        setting: Arc::clone(setting),
        began,
        deadline: began + micros(length),
        closing: AtomicBool::new(false),
        stopped: AtomicBool::new(false),
        cut: watch::channel(false).0,
        records: Mutex::default(),
    });
    let timer = tokio::spawn(timer_lag(Arc::clone(&phase)));
    let mut load = match shape {
        Shape::Closed { users } => Load::Closed(closed::start(&phase, users)),
        Shape::Open { rate, law, cap, on_full } => Load::Open(open::Pacer::start(&phase, rate, law, cap, on_full)),
    };
    let deadline = tokio::time::Instant::from_std(clock.instant(phase.deadline));
    let stopped = tokio::select! {
        () = tokio::time::sleep_until(deadline) => false,
        _ = stop.wait_for(|stop| *stop) => true,
    };
    phase.stopped.store(stopped, Ordering::Release);
    phase.closing.store(true, Ordering::Release);
    let ended = clock.now().min(phase.deadline);
    load.close();
    let drain = Duration::from_micros(micros(setting.config.drain));
    let interrupted = stopped
        || tokio::select! {
            () = load.finished() => false,
            () = tokio::time::sleep(drain) => false,
            _ = stop.wait_for(|stop| *stop) => true,
        };
    // Without receivers there is nothing left to cut.
    let _ = phase.cut.send(true);
    load.finished().await;
    let timer_lag = timer.await.unwrap_or_default();
    let (dropped, unsent, reanchored) = load.counts();
    let records = std::mem::take(&mut *phase.records.lock());
    PhaseResult {
        label,
        shape,
        began,
        ended,
        records,
        dropped,
        unsent,
        reanchored,
        peak: setting.live.peak.load(Ordering::Relaxed),
        cpu: cpu_seconds() - cpu,
        timer_lag,
        interrupted,
    }
}

enum Load {
    Closed(closed::Users),
    Open(open::Pacer),
}

impl Load {
    fn close(&mut self) {
        if let Self::Open(pacer) = self {
            pacer.close();
        }
    }

    async fn finished(&mut self) {
        match self {
            Self::Closed(users) => users.finished().await,
            Self::Open(pacer) => pacer.finished().await,
        }
    }

    fn counts(&self) -> (u64, u64, u64) {
        match self {
            Self::Closed(_) => (0, 0, 0),
            Self::Open(pacer) => pacer.counts(),
        }
    }
}

/// How late timers fire: tells a slow client from a slow server.
async fn timer_lag(phase: Arc<Phase>) -> Vec<u64> {
    const STEP: u64 = 10_000;
    let clock = phase.setting.clock;
    let mut lags = Vec::new();
    while phase.is_open() {
        let due = clock.now() + STEP;
        tokio::time::sleep_until(clock.instant(due).into()).await;
        lags.push(clock.now().saturating_sub(due));
    }
    lags
}
