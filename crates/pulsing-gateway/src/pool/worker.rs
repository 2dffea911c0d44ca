//! One Worker as the Router sees it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use pulsing_core::{Instance, Target};

use crate::api::Api;
use crate::engine::Endpoint;
use crate::protocol::{self, LoadReport};

use super::breaker::{Breaker, Fault};
use super::clock::{Clocks, Limits};
use super::likeness::{Continues, Likeness};
use super::lockout::Lockout;
use super::state::State;
use super::{Pairing, Role};

/// The next Worker's number.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// What changes seldom.
#[derive(Clone, Debug, Default, PartialEq)]
struct Facts {
    /// `state` in the metadata.
    published: String,
    /// `protocol` in the metadata.
    protocol: String,
    /// `model` in the metadata.
    model: Option<String>,
    role: Role,
    /// What is wrong with it.
    bad_role: Option<String>,
    /// `apis` in the metadata, by place in [`Api::ALL`]; a Worker that does not say generates text.
    apis: [bool; Api::ALL.len()],
    /// `normalize` in the metadata.
    normalizes: bool,
    /// `state` in the last report.
    reported: Option<String>,
    /// `models` in the last report.
    models: Vec<String>,
    detail: String,
    max_model_len: u64,
    /// `continue` in the metadata: `greedy`, `any`, or nothing; of an engine `vllm`, `sglang`, or nothing.
    continues: String,
    /// `fingerprint` in the metadata.
    fingerprint: String,
}

/// One Worker: an instance id; a restarted one is another Worker.
pub struct Worker {
    target: Target,
    /// Of its node.
    host: String,
    /// The engine's own server, if requests go there; or what is wrong with its address.
    engine: Option<Result<Arc<Endpoint>, String>>,
    /// The engine's key is not known yet, or was refused.
    wants_key: AtomicBool,
    /// The engine was not reached by this Router yet, or the last attempt failed. Its EngineWorker's word is not enough.
    doubted: AtomicBool,
    lockout: Lockout,
    pub(super) clocks: Clocks,
    pub(super) breaker: Breaker,
    /// Its state in the snapshot that everybody sees.
    shown: AtomicU8,
    /// Tells its cache from all others.
    cache: AtomicU32,
    facts: ArcSwap<Facts>,
    reachable: AtomicBool,
    running: AtomicU32,
    waiting: AtomicU32,
    capacity: AtomicU32,
    /// Bits of an `f32`.
    kv_usage: AtomicU32,
    /// Milliseconds without a token, as reported.
    progress_age: AtomicU64,
    /// Counts reports.
    pub(super) reports: AtomicU64,
    /// Requests of this Router on it.
    pub(super) in_flight: AtomicU32,
    /// Of those, how many were sent since the last report, which cannot know of them.
    pub(super) unreported: AtomicI64,
}

impl Worker {
    /// A Worker known by its registry entry.
    pub fn new(instance: &Instance) -> Self {
        Self::within(instance, Limits::default())
    }
    /// [`new`](Self::new); `limits` say when it hangs.
    pub(super) fn within(instance: &Instance, limits: Limits) -> Self {
        let worker = Self {
            target: instance.target,
            host: instance.addr.rsplit_once(':').map_or("", |(host, _)| host).trim_matches(['[', ']']).to_owned(),
            engine: instance.metadata.get("url").map(|url| Endpoint::parse(url).map(Arc::new)),
            wants_key: AtomicBool::new(true),
            doubted: AtomicBool::new(true),
            lockout: Lockout::default(),
            clocks: Clocks::new(limits),
            breaker: Breaker::new(),
            shown: AtomicU8::new(u8::MAX),
            cache: AtomicU32::new(NEXT.fetch_add(1, Ordering::Relaxed)),
            facts: ArcSwap::default(),
            // Until it answers the load subscription: who cannot be reached for that cannot serve, and a Worker of unknown
            // capacity would be misjudged beside others.
            reachable: AtomicBool::new(false),
            running: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            capacity: AtomicU32::new(0),
            kv_usage: AtomicU32::new(0),
            progress_age: AtomicU64::new(0),
            reports: AtomicU64::new(0),
            in_flight: AtomicU32::new(0),
            unreported: AtomicI64::new(0),
        };
        worker.set_metadata(&instance.metadata);
        worker
    }

    /// Where it is.
    pub fn target(&self) -> Target {
        self.target
    }
    /// The engine to dial, for a Worker that stands for one.
    pub(crate) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.engine.as_ref().and_then(|engine| engine.as_ref().ok())
    }
    /// The engine's key is to be asked for (again).
    pub(crate) fn want_key(&self) {
        self.wants_key.store(true, Ordering::Release);
    }
    pub(super) fn wants_key(&self) -> bool {
        self.wants_key.load(Ordering::Acquire)
    }
    pub(super) fn has_key(&self) {
        self.wants_key.store(false, Ordering::Release);
    }
    /// The engine refused its key at `now`.
    pub(super) fn lock_out(&self, now: Instant) {
        self.lockout.shut(now);
    }
    /// The key, or the engine, is another one.
    pub(super) fn let_in(&self) {
        self.lockout.open();
    }
    pub(super) fn is_doubted(&self) -> bool {
        self.doubted.load(Ordering::Acquire)
    }
    pub(super) fn doubt(&self, doubted: bool) {
        self.doubted.store(doubted, Ordering::Release);
    }
    /// A number of its own, for hashing.
    pub(crate) fn seed(&self) -> u64 {
        let id = self.target.actor.0;
        (id >> 64) as u64 ^ id as u64
    }
    /// The number of its prompt cache: another Worker has another one, and so has this one after its engine was away.
    pub fn cache(&self) -> u32 {
        self.cache.load(Ordering::Relaxed)
    }
    /// What is known of its prompt cache is void.
    pub(super) fn renew_cache(&self) {
        self.cache.store(NEXT.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }
    /// What it is doing. The report is newer than the metadata, which has to travel; but who says anywhere that it goes
    /// does go.
    pub fn state(&self) -> State {
        let facts = self.facts.load();
        if !protocol::speaks_our_version(&facts.protocol) {
            return State::Incompatible;
        }
        if matches!(self.engine, Some(Err(_))) || facts.bad_role.is_some() {
            return State::Failed;
        }
        let published = State::parse(&facts.published);
        let state = match &facts.reported {
            Some(reported) if published != State::Draining => State::parse(reported),
            _ => published,
        };
        match state {
            State::Ready if self.lockout.is_shut() => State::Failed,
            State::Ready if !self.reachable.load(Ordering::Acquire) => State::Unreachable,
            State::Ready if self.clocks.is_silent() => State::Silent,
            State::Ready if self.clocks.is_stuck() => State::Stuck,
            State::Ready if self.breaker.is_open() => State::Tripped,
            state => state,
        }
    }
    /// The models it serves, the main one first.
    pub fn models(&self) -> Vec<String> {
        let facts = self.facts.load();
        let mut models: Vec<String> = facts.model.iter().cloned().collect();
        for model in &facts.models {
            if !models.contains(model) {
                models.push(model.clone());
            }
        }
        models
    }
    /// What its engine streams is to be brought into form.
    pub(crate) fn normalizes(&self) -> bool {
        self.facts.load().normalizes
    }
    /// It answers such requests. Of an engine only the engine knows.
    pub fn serves(&self, api: Api) -> bool {
        self.engine.is_some() || self.facts.load().apis[api as usize]
    }
    /// Its own name for what its like call `wanted`; `None` if it names no model.
    pub(crate) fn model_for(&self, wanted: Option<&str>) -> Option<String> {
        let facts = self.facts.load();
        let has =
            |model: &str| facts.model.as_deref() == Some(model) || facts.models.iter().any(|other| other == model);
        let wanted = wanted.filter(|wanted| has(wanted)).map(str::to_owned);
        wanted.or_else(|| facts.model.clone()).or_else(|| facts.models.first().cloned())
    }
    /// What another Worker must be like to go on with what this one has begun; `None` where nobody can. `sampled`: tokens
    /// are drawn.
    pub(crate) fn likeness(&self, sampled: bool) -> Option<Likeness> {
        let facts = self.facts.load();
        let continues = facts.continues == "any" || (facts.continues == "greedy" && !sampled);
        (continues && self.engine.is_none() && !facts.fingerprint.is_empty()).then(|| Likeness {
            model: facts.model.clone(),
            fingerprint: facts.fingerprint.clone(),
            sampled,
            continues: None,
        })
    }
    /// The same for an engine that serves `model`, where tokens are not drawn.
    pub(crate) fn engine_likeness(&self, model: String) -> Option<Likeness> {
        let facts = self.facts.load();
        let continues = match facts.continues.as_str() {
            "vllm" => Continues::Vllm,
            "sglang" => Continues::Sglang,
            _ => return None,
        };
        self.endpoint()?;
        let (continues, fingerprint) = (Some(continues), facts.fingerprint.clone());
        Some(Likeness { model: Some(model), fingerprint, sampled: false, continues })
    }
    /// It goes on with what one of that likeness has begun.
    pub(crate) fn is_like(&self, other: &Likeness) -> bool {
        let like = match (other.continues, &other.model) {
            (Some(_), Some(model)) => {
                self.model_for(Some(model)).filter(|own| own == model).and_then(|own| self.engine_likeness(own))
            }
            _ => self.likeness(other.sampled),
        };
        like.as_ref() == Some(other)
    }
    /// Why it failed, how far loading is.
    pub fn detail(&self) -> String {
        match &self.engine {
            Some(Err(wrong)) => wrong.clone(),
            Some(Ok(endpoint)) if self.lockout.is_shut() => {
                format!("its engine at {} refuses the key that its EngineWorker was started with", endpoint.url())
            }
            _ => {
                let facts = self.facts.load();
                facts.bad_role.clone().unwrap_or_else(|| facts.detail.clone())
            }
        }
    }
    /// [`detail`](Self::detail) for clients of the API, whom the addresses of engines are no business of.
    pub(super) fn told(&self) -> String {
        let detail = self.detail();
        match &self.engine {
            Some(Ok(endpoint)) => endpoint.hide(&detail),
            // A URL that cannot be read cannot be found in the sentence that says so, either.
            Some(Err(_)) => "the url of its engine cannot be used".to_owned(),
            None => detail,
        }
    }
    /// What part of a request it does.
    pub fn role(&self) -> Role {
        self.facts.load().role.clone()
    }
    /// How it meets its other half; `None` if it does all of a request.
    pub fn pairing(&self) -> Option<Pairing> {
        match self.role() {
            Role::Aggregated => None,
            Role::Prefill(pairing) | Role::Decode(pairing) => Some(pairing),
        }
    }
    /// The host that it is reached at.
    pub(crate) fn host(&self) -> &str {
        self.endpoint().map_or(&self.host, |endpoint| endpoint.host())
    }
    /// Longest context in tokens; 0 = unknown.
    pub fn max_model_len(&self) -> u64 {
        self.facts.load().max_model_len
    }

    /// Replaces what the registry says. True if the Worker's facts changed.
    pub(super) fn set_metadata(&self, metadata: &BTreeMap<String, String>) -> bool {
        let text = |key: &str| metadata.get(key).cloned().unwrap_or_default();
        self.update(|facts| {
            facts.published = text("state");
            facts.protocol = text("protocol");
            facts.model = metadata.get("model").filter(|model| !model.is_empty()).cloned();
            facts.continues = text("continue");
            facts.fingerprint = text("fingerprint");
            facts.normalizes = !text("normalize").is_empty();
            (facts.role, facts.bad_role) = match Role::read(metadata) {
                Ok(role) => (role, None),
                Err(wrong) => (Role::Aggregated, Some(wrong)),
            };
            let apis = metadata.get("apis").map(|apis| apis.split(',').collect::<Vec<_>>());
            facts.apis = Api::ALL.map(|api| match &apis {
                // Routers make chats of them.
                Some(apis) if api == Api::Responses => apis.contains(&Api::Chat.wire_name()),
                Some(apis) => apis.contains(&api.wire_name()),
                None => api.generates(),
            });
        })
    }
    /// Takes a report. True if the Worker's facts, its reach or its state changed.
    pub(super) fn set_report(&self, report: LoadReport) -> bool {
        let before = self.facts.load().reported.as_deref().map(State::parse);
        if State::parse(&report.state) == State::Ready && before != Some(State::Ready) {
            // What serves from now on starts clean.
            self.clocks.forget();
            self.breaker.reset();
        }
        let now = Instant::now();
        let judged = self.clocks.heard(&report, now);
        if self.engine.is_none() && report.running > 0 {
            // Its engine gets on with something, if not with what this Router waits for.
            self.clocks.gave(now.checked_sub(Duration::from_millis(report.progress_age_ms)).unwrap_or(now));
        }
        self.reports.fetch_add(1, Ordering::AcqRel);
        self.unreported.store(0, Ordering::Release);
        self.running.store(report.running, Ordering::Relaxed);
        self.waiting.store(report.waiting, Ordering::Relaxed);
        self.capacity.store(report.capacity, Ordering::Relaxed);
        self.kv_usage.store(report.kv_usage.to_bits(), Ordering::Relaxed);
        self.progress_age.store(report.progress_age_ms, Ordering::Relaxed);
        let served = self.facts.load().reported.as_deref().is_some_and(|state| State::parse(state) == State::Ready);
        if served && matches!(State::parse(&report.state), State::Loading | State::Failed) {
            // What comes back is another process, or has lost what it had.
            self.renew_cache();
        }
        let reached = self.set_reachable(true);
        let changed = self.update(|facts| {
            facts.reported = Some(report.state);
            facts.models = report.models;
            facts.detail = report.detail;
            facts.max_model_len = report.max_model_len;
        });
        reached || judged || changed
    }
    /// Looks at the clocks; `slept` if this Router itself was not running. True if the Worker has fallen silent.
    pub(super) fn tick(&self, now: Instant, slept: bool) -> bool {
        if slept {
            self.clocks.excuse(now);
        }
        self.breaker.tick(now);
        self.lockout.tick(now);
        self.clocks.tick(now)
    }
    /// How long what it has not begun to answer is left to it once it may hang; `None`: nothing was learned of it.
    pub(crate) fn notice(&self) -> Option<Duration> {
        self.clocks.notice()
    }
    /// How long it may go without a token now.
    pub(crate) fn patience(&self) -> Duration {
        self.clocks.patience()
    }
    /// It sent something of an answer to this Router.
    pub(crate) fn gave(&self, now: Instant) {
        self.clocks.gave(now);
    }
    /// When it last did.
    pub(crate) fn given_at(&self) -> Instant {
        self.clocks.given_at()
    }
    /// Its state is about to be seen by all.
    pub(super) fn show(&self) {
        self.shown.store(self.state() as u8, Ordering::Release);
    }
    /// Its state is not what all see.
    pub(super) fn is_shown_wrong(&self) -> bool {
        self.shown.load(Ordering::Acquire) != self.state() as u8
    }
    /// May a request go there? `Some(true)`: as the trial by which a tripped Worker is used again.
    pub(super) fn admit(&self) -> Option<bool> {
        self.breaker.admit()
    }
    /// A request sent at `sent` failed here, and was served elsewhere. True if the Worker is given a rest.
    pub(super) fn failed(&self, sent: Instant, fault: Fault) -> bool {
        self.breaker.failed(sent, fault, Instant::now())
    }
    /// True if that is news.
    pub(super) fn set_reachable(&self, reachable: bool) -> bool {
        self.reachable.swap(reachable, Ordering::AcqRel) != reachable
    }
    fn update(&self, change: impl FnOnce(&mut Facts)) -> bool {
        let old = self.facts.load_full();
        let mut new = Facts::clone(&old);
        change(&mut new);
        if new == *old {
            return false;
        }
        self.facts.store(Arc::new(new));
        true
    }

    /// Requests on it, as well as can be told from here: what it reported plus what it cannot have counted yet, and never
    /// less than what this Router alone has there. A stale report counts for nothing.
    pub fn load(&self) -> u32 {
        self.load_at(Instant::now())
    }
    /// [`load`](Self::load), for who asks many Workers at one time.
    pub(crate) fn load_at(&self, now: Instant) -> u32 {
        let own = self.in_flight.load(Ordering::Acquire);
        if !self.clocks.is_fresh(now) {
            return own;
        }
        let reported = self.running.load(Ordering::Relaxed).saturating_add(self.waiting.load(Ordering::Relaxed));
        let unreported = self.unreported.load(Ordering::Acquire).clamp(0, i64::from(u32::MAX)) as u32;
        reported.saturating_add(unreported).max(own)
    }
    /// Requests it takes at once; a Worker that does not say takes one.
    pub fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed).max(1)
    }
    /// It has said what it takes at once.
    pub fn has_capacity(&self) -> bool {
        self.capacity.load(Ordering::Relaxed) != 0
    }
    /// Load, the next request included, in units of its capacity: up to 1 a request starts at once.
    pub fn pressure(&self) -> f64 {
        self.pressure_at(Instant::now())
    }
    /// [`pressure`](Self::pressure), for who asks many Workers at one time.
    pub(crate) fn pressure_at(&self, now: Instant) -> f64 {
        f64::from(self.load_at(now).saturating_add(1)) / f64::from(self.capacity())
    }
    /// The next request would wait.
    pub fn is_full(&self) -> bool {
        self.is_full_at(Instant::now())
    }
    /// [`is_full`](Self::is_full), for who asks many Workers at one time.
    pub(crate) fn is_full_at(&self, now: Instant) -> bool {
        // A Worker that never said what it takes is not full at one.
        self.capacity.load(Ordering::Relaxed) != 0 && self.load_at(now) >= self.capacity()
    }
    /// Share of its KV cache in use, 0..1; 0 = unknown.
    pub fn kv_usage(&self) -> f32 {
        let usage = f32::from_bits(self.kv_usage.load(Ordering::Relaxed));
        if usage.is_finite() { usage.clamp(0.0, 1.0) } else { 0.0 }
    }
    /// Requests that it reported to be serving.
    pub fn running(&self) -> u32 {
        self.running.load(Ordering::Relaxed)
    }
    /// Requests that it reported to be waiting.
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }
    /// Time without a token when it last reported.
    pub fn progress_age(&self) -> Duration {
        Duration::from_millis(self.progress_age.load(Ordering::Relaxed))
    }
    /// How long ago it last reported; `None`: it never did.
    pub fn report_age(&self, now: Instant) -> Option<Duration> {
        self.clocks.since_heard(now)
    }
    /// Requests of this Router on it.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("target", &self.target).field("state", &self.state()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use pulsing_core::{ActorId, NodeId};

    use super::super::Lease;
    use super::*;

    fn worker(metadata: &[(&str, &str)]) -> Arc<Worker> {
        Arc::new(Worker::new(&Instance {
            name: "worker".into(),
            target: Target { node: NodeId(1), actor: ActorId(2) },
            addr: "127.0.0.1:1".into(),
            class: String::new(),
            metadata: metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            unique: false,
        }))
    }
    fn report(state: &str, running: u32, capacity: u32) -> LoadReport {
        LoadReport { state: state.into(), running, capacity, ..LoadReport::default() }
    }

    #[test]
    fn the_report_overrules_the_metadata_except_when_leaving() {
        let ready = worker(&[("protocol", "1..1"), ("state", "loading")]);
        assert_eq!(ready.state(), State::Loading);
        assert!(ready.set_report(report("ready", 0, 1)));
        assert_eq!(ready.state(), State::Ready);
        assert!(!ready.set_report(report("ready", 1, 1)), "numbers alone are no news");
        ready.set_metadata(&BTreeMap::from([("protocol".into(), "1..3".into()), ("state".into(), "draining".into())]));
        assert_eq!(ready.state(), State::Draining);
        assert_eq!(worker(&[("protocol", "2..3")]).state(), State::Incompatible);
        assert_eq!(worker(&[]).state(), State::Incompatible);
    }

    #[test]
    fn load_is_the_report_plus_what_it_cannot_know_and_never_below_our_own() {
        let worker = worker(&[("protocol", "1..1")]);
        let first = worker.lease();
        assert_eq!(worker.load(), 1, "without a report our own count");
        worker.set_report(report("ready", 3, 4));
        assert_eq!(worker.load(), 3, "the report has seen the first one");
        let second = worker.lease();
        assert_eq!((worker.load(), worker.is_full()), (4, true));
        drop(first);
        assert_eq!(worker.load(), 4, "the reported one is taken back by the next report, not by us");
        drop(second);
        assert_eq!(worker.load(), 3);
        let held: Vec<Lease> = (0..5).map(|_| worker.lease()).collect();
        worker.set_report(report("ready", 0, 4));
        assert_eq!(worker.load(), 5);
        drop(held);
        assert_eq!((worker.load(), worker.in_flight()), (0, 0));
    }
}
