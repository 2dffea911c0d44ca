//! The Workers as they are now.
//!
//! A few tasks' worth of writers (a registry watcher for each name, one load subscription a Worker) and any number of readers:
//! readers take an immutable [`Snapshot`] and look at atomics in it.

mod breaker;
mod clock;
mod companion;
mod lease;
mod likeness;
mod lockout;
mod role;
mod served;
mod snapshot;
mod state;
mod worker;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use pulsing_core::{ActorId, CallOptions, Error, Instance, NameChange, Reply, Result};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::cluster::Cluster;
use crate::dial::{self, Trust};
use crate::policy::Policy;
use crate::protocol::{self, BlockNews, Description, LoadReport};
use crate::tunnel::Relay;

pub(crate) use breaker::Fault;
pub(crate) use clock::LONGEST;
pub use clock::Limits;
pub use companion::Companion;
pub use lease::Lease;
pub(crate) use likeness::{Continues, Likeness};
pub use role::{Pairing, Role};
pub use served::Served;
pub use snapshot::Snapshot;
use snapshot::{Group, NAMES_SHOWN};
pub use state::State;
pub use worker::Worker;

/// First pause before a lost load subscription is tried again; doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Between two looks at the Workers' clocks: what it adds to the time in which a silent one is found out.
const TICK: Duration = Duration::from_millis(100);
/// A look that comes later than this says that this process was not running, and nothing of the Workers.
pub(crate) const OVERSLEPT: Duration = Duration::from_millis(500);
/// How long an EngineWorker may take to say what it is.
const DESCRIBE: Duration = Duration::from_secs(2);

/// Watches the names that Workers serve under and keeps the picture of who is there.
pub struct Pool {
    cluster: Arc<dyn Cluster>,
    served: Vec<Served>,
    limits: Limits,
    snapshot: ArcSwap<Snapshot>,
    /// One for each worker name, in order of mention.
    entries: Mutex<Vec<Entries>>,
    version: watch::Sender<u64>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// Who hears what Workers tell of their caches.
    policy: Option<Arc<dyn Policy>>,
    /// Whom engines under https are believed by, if not whom the system trusts.
    trust: OnceLock<Trust>,
}

#[derive(Default)]
struct Entries {
    worker_name: String,
    /// In order of appearance, which decides what a public name means among mixed models.
    workers: Vec<Entry>,
    /// Instances under the name that are no Workers, with what they are.
    strangers: BTreeMap<ActorId, String>,
    /// The model that a public name without one stands for.
    primary: Option<String>,
}

impl Entries {
    fn group(&self) -> Group {
        let workers = self.workers.iter().map(|entry| Arc::clone(&entry.worker)).collect();
        let strangers = self.strangers.values().cloned().collect();
        Group::new(self.worker_name.clone(), workers, strangers, self.primary.clone())
    }
    fn forget(&mut self, actor: ActorId) {
        self.strangers.remove(&actor);
        self.workers.retain(|entry| entry.worker.target().actor != actor);
    }
}

/// How far a Worker's news of its cache has been heard.
#[derive(Default)]
struct Heard {
    /// Number of the last one on this subscription.
    seq: u64,
    /// On this one or another.
    before: bool,
}

struct Entry {
    worker: Arc<Worker>,
    subscription: JoinHandle<()>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.subscription.abort();
    }
}

impl Pool {
    /// Starts watching the name that each of `served` stands for. A client that names no model means the first of them.
    /// `limits` say when a Worker hangs; `policy` hears what Workers tell of their caches, if it wants to. Call it inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// `InvalidName` when nobody can serve under one of the names.
    pub fn start(
        cluster: Arc<dyn Cluster>,
        served: Vec<Served>,
        limits: Limits,
        policy: Option<Arc<dyn Policy>>,
    ) -> Result<Arc<Self>> {
        let mut entries: Vec<Entries> = Vec::new();
        let mut watched = Vec::new();
        for one in &served {
            if entries.iter().all(|entries| entries.worker_name != one.worker_name) {
                watched.push(cluster.watch_name(&one.worker_name)?);
                entries.push(Entries { worker_name: one.worker_name.clone(), ..Entries::default() });
            }
        }
        let pool = Arc::new(Self {
            cluster,
            served,
            limits,
            snapshot: ArcSwap::from_pointee(Snapshot::default()),
            entries: Mutex::new(entries),
            version: watch::Sender::new(0),
            tasks: Mutex::default(),
            policy: policy.filter(|policy| policy.wants_news()),
            trust: OnceLock::new(),
        });
        for (group, mut instances) in watched.into_iter().enumerate() {
            pool.apply(group, instances.take());
            let weak = Arc::downgrade(&pool);
            let watcher = tokio::spawn(async move {
                while instances.changed().await.is_ok() {
                    let Some(pool) = weak.upgrade() else { return };
                    pool.apply(group, instances.take());
                }
            });
            pool.tasks.lock().push(watcher);
        }
        let ticker = tokio::spawn(tick(Arc::downgrade(&pool)));
        pool.tasks.lock().push(ticker);
        Ok(pool)
    }

    /// Believes engines under https by these authorities only. To be called once, right after the start.
    pub(crate) fn trust(&self, trust: Trust) {
        let _ = self.trust.set(Arc::clone(&trust));
        for entry in self.entries.lock().iter().flat_map(|entries| &entries.workers) {
            if let Some(endpoint) = entry.worker.endpoint() {
                endpoint.trust(&trust);
            }
        }
    }

    /// Stops watching; requests under way keep their Workers.
    pub fn stop(&self) {
        self.tasks.lock().drain(..).for_each(|task| task.abort());
        self.entries.lock().iter_mut().for_each(|entries| entries.workers.clear());
    }

    /// The public names, the one for clients that name no model first.
    pub fn served(&self) -> &[Served] {
        &self.served
    }
    /// The Workers now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }
    /// Changes whenever the snapshot does.
    pub fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// A call to this Worker failed on the way: nobody is sent there until it reports again.
    pub fn suspect(&self, worker: &Worker) {
        worker.doubt(true);
        worker.set_reachable(false);
        // That it is no news says only that somebody else is about to publish it; who returns from here must not choose the
        // same Worker again.
        let published = {
            let _entries = self.entries.lock();
            !worker.is_shown_wrong()
        };
        if !published {
            self.publish();
        }
    }

    /// This Worker's engine refused the key that its EngineWorker has: nobody is sent there until it has another one, or for
    /// a moment.
    pub(crate) fn lock_out(&self, worker: &Worker) {
        tracing::warn!(worker = %worker.target().actor, "an engine refuses the key that its EngineWorker has");
        worker.lock_out(Instant::now());
        self.publish();
    }

    /// May a request go to this Worker? `Some(true)`: as the one trial of it, which its lease is to be told.
    pub(crate) fn admit(&self, worker: &Worker) -> Option<bool> {
        let admitted = worker.admit();
        if admitted == Some(true) {
            self.publish();
        }
        admitted
    }
    /// A request that was sent to this Worker at `sent` failed there, and was served elsewhere.
    pub(crate) fn failed(&self, worker: &Worker, sent: Instant, fault: Fault) {
        if worker.failed(sent, fault) {
            tracing::warn!(worker = %worker.target().actor, "a worker fails requests that others serve; it gets a rest");
            self.publish();
        }
    }

    fn reached(&self, worker: &Worker) {
        if worker.set_reachable(true) {
            self.publish();
        }
    }

    /// Why nobody can serve `model` now, as the rest of a sentence that starts "No available workers".
    pub fn explain(&self, model: &str) -> String {
        let (count, first) = self.cluster.first_names(NAMES_SHOWN);
        self.snapshot().explain(model, count, &first)
    }

    fn apply(self: &Arc<Self>, group: usize, mut changes: Vec<NameChange>) {
        // Of Workers that are found together the same comes first for every Router.
        changes.sort_by_key(|change| change.instance().target.actor);
        if let Some(entries) = self.entries.lock().get_mut(group) {
            for change in changes {
                match change {
                    NameChange::Added(instance) | NameChange::Updated(instance) => self.enter(entries, &instance),
                    NameChange::Removed(instance) => entries.forget(instance.target.actor),
                }
            }
        }
        self.publish();
    }

    fn enter(self: &Arc<Self>, entries: &mut Entries, instance: &Instance) {
        let actor = instance.target.actor;
        let kind = instance.metadata.get("kind").map_or("actor", String::as_str);
        if kind != "worker" {
            entries.forget(actor);
            entries.strangers.insert(actor, kind.to_owned());
        } else if let Some(entry) = entries.workers.iter().find(|entry| entry.worker.target().actor == actor) {
            entry.worker.set_metadata(&instance.metadata);
        } else {
            entries.strangers.remove(&actor);
            let worker = Arc::new(Worker::within(instance, self.limits));
            if let (Some(trust), Some(endpoint)) = (self.trust.get(), worker.endpoint()) {
                endpoint.trust(trust);
            }
            if let Some(endpoint) = worker.endpoint()
                && endpoint.is_of_its_host()
                && instance.metadata.contains_key("relay")
                && !self.cluster.is_on_this_host(&instance.addr)
            {
                endpoint.relay(Relay::new(Arc::clone(&self.cluster), instance.target));
            }
            let subscription = tokio::spawn(subscribe(Arc::downgrade(self), Arc::clone(&worker)));
            tracing::info!(worker = %actor, addr = %instance.addr, "worker appeared");
            entries.workers.push(Entry { worker, subscription });
        }
    }

    fn publish(&self) {
        let mut entries = self.entries.lock();
        entries.iter().flat_map(|entries| &entries.workers).for_each(|entry| entry.worker.show());
        let groups = entries.iter().map(Entries::group).collect();
        let snapshot = Snapshot::new(groups, &self.served);
        for (entries, group) in entries.iter_mut().zip(snapshot.groups()) {
            if entries.primary.as_deref() == group.primary() {
                continue;
            }
            if let (Some(model), true) = (group.primary(), group.is_mixed()) {
                tracing::warn!(
                    worker_name = %entries.worker_name, %model,
                    "workers under one name serve different models; a public name that chooses none of them means the first one seen"
                );
            }
            entries.primary = group.primary().map(str::to_owned);
        }
        self.snapshot.store(Arc::new(snapshot));
        drop(entries);
        self.version.send_modify(|version| *version += 1);
    }

    /// A Worker tells of its cache. False if it has told something that was not `heard`.
    fn news(&self, worker: &Worker, news: &BlockNews, heard: &mut Heard) -> bool {
        let Some(policy) = &self.policy else { return true };
        let follows = news.seq == heard.seq + 1 && (heard.seq > 0 || news.reset);
        if heard.before && (news.reset || !follows) {
            worker.renew_cache();
            // Views of the Workers know their caches by number.
            self.publish();
        }
        *heard = Heard { seq: news.seq, before: true };
        if follows {
            policy.told(worker, news);
        }
        follows
    }

    fn report(&self, worker: &Worker, report: LoadReport) {
        let before = worker.state();
        if worker.set_report(report) {
            let state = worker.state();
            if before != state && (before, state) != (State::Unreachable, State::Ready) {
                // Clients are not told all of it.
                let detail = worker.detail();
                tracing::info!(worker = %worker.target().actor, %before, %state, %detail, "a worker's state has changed");
            }
            self.publish();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Looks at the Workers' clocks for as long as there is a pool.
async fn tick(pool: std::sync::Weak<Pool>) {
    let mut last = Instant::now();
    loop {
        tokio::time::sleep(TICK).await;
        let Some(pool) = pool.upgrade() else { return };
        let now = Instant::now();
        let slept = now.duration_since(last) > OVERSLEPT;
        last = now;
        let mut wrong = false;
        for worker in pool.snapshot().all() {
            if worker.tick(now, slept) {
                tracing::warn!(worker = %worker.target().actor, "a worker has stopped to report; its requests go elsewhere");
            }
            wrong |= worker.is_shown_wrong();
        }
        if wrong {
            pool.publish();
        }
    }
}

/// How often a Worker's news was lost lately. One that cannot count must not be asked again and again without a pause; its
/// load is heard all the while.
#[derive(Default)]
struct Losses {
    pause: Duration,
    due: Option<Instant>,
}

impl Losses {
    /// One more. Returns when to ask anew: at once, and then later and later.
    fn count(&mut self, now: Instant) -> Instant {
        let calm = self.due.is_none_or(|due| now.saturating_duration_since(due) > RETRY_MAX * 2);
        self.pause = if calm { Duration::ZERO } else { (self.pause * 2).clamp(RETRY_MIN, RETRY_MAX) };
        let due = now + self.pause;
        self.due = Some(due);
        due
    }
}

/// Keeps one Worker's load coming for as long as it is registered.
async fn subscribe(pool: std::sync::Weak<Pool>, worker: Arc<Worker>) {
    let mut pause = RETRY_MIN;
    let mut heard = Heard::default();
    let mut losses = Losses::default();
    'subscribed: loop {
        let Some(call) = pool.upgrade().map(|pool| {
            let options = CallOptions { timeout: None, ..CallOptions::default() };
            pool.cluster.call(worker.target(), protocol::subscribe_load(pool.policy.is_some()), options)
        }) else {
            return;
        };
        heard.seq = 0;
        // Until when news is let pass, after some was lost.
        let mut deaf: Option<Instant> = None;
        let lost = match call.await {
            Ok(Reply::Stream(mut reports)) => loop {
                match reports.next().await {
                    Some(Ok(item)) => {
                        let report = match protocol::decode::<LoadReport>(&item) {
                            Ok(report) => Ok(checked(&pool, &worker, report).await),
                            Err(error) => Err(error),
                        };
                        let Some(pool) = pool.upgrade() else { return };
                        match report {
                            Ok(mut report) => {
                                pause = RETRY_MIN;
                                let news = report.blocks.take();
                                pool.report(&worker, report);
                                if deaf.is_none() && news.is_some_and(|news| !pool.news(&worker, &news, &mut heard)) {
                                    tracing::warn!(worker = %worker.target().actor, "news of a worker's cache was lost; asking again");
                                    deaf = Some(losses.count(Instant::now()));
                                }
                                if deaf.is_some_and(|until| until <= Instant::now()) {
                                    continue 'subscribed;
                                }
                            }
                            Err(error) => tracing::warn!(worker = %worker.target().actor, error, "bad load report"),
                        }
                    }
                    Some(Err(error)) => break Some(error),
                    // Load reports end with the worker.
                    None => break Some(Error::ActorStopped { actor: worker.target().actor, begun: true }),
                }
            },
            Ok(Reply::Value(_)) => None,
            Err(error) => Some(error),
        };
        match lost {
            // A Worker that does not report load is known by its metadata and by what we sent it.
            None | Some(Error::App(_)) => {
                pause = RETRY_MAX;
                let Some(pool) = pool.upgrade() else { return };
                pool.reached(&worker);
            }
            Some(error) => {
                tracing::debug!(worker = %worker.target().actor, %error, "load reports lost");
                let Some(pool) = pool.upgrade() else { return };
                pool.suspect(&worker);
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

/// What an EngineWorker reports, held against what this Router sees itself: it must reach the engine and have its key.
async fn checked(pool: &std::sync::Weak<Pool>, worker: &Worker, mut report: LoadReport) -> LoadReport {
    let Some(endpoint) = worker.endpoint() else { return report };
    endpoint.prune();
    if report.state != "ready" {
        // Whatever comes back under this address is another process, maybe with another key.
        worker.doubt(true);
        worker.want_key();
        worker.let_in();
        return report;
    }
    let mut wrong = None;
    if worker.wants_key() {
        let Some(call) = pool.upgrade().map(|pool| {
            let options = CallOptions { timeout: Some(DESCRIBE), ..CallOptions::default() };
            pool.cluster.call(worker.target(), protocol::describe(), options)
        }) else {
            return report;
        };
        match call.await {
            Ok(Reply::Value(value)) => match protocol::decode::<Description>(&value) {
                Ok(description) => {
                    if endpoint.set_authorization(&description.authorization) {
                        worker.let_in();
                    }
                    worker.has_key();
                }
                Err(error) => wrong = Some(error),
            },
            Ok(Reply::Stream(_)) => wrong = Some("it describes itself by a stream".to_owned()),
            Err(error) => wrong = Some(format!("it does not describe itself: {error}")),
        }
    }
    if worker.is_doubted() {
        match endpoint.knock().await {
            Ok(()) => worker.doubt(false),
            Err(error) if dial::is_ours(&error) => {}
            Err(error) => {
                endpoint.forget();
                wrong = Some(format!("this Router cannot connect to its engine at {}: {error}", endpoint.url()));
            }
        }
    }
    if let Some(wrong) = wrong {
        report.state = "failed".to_owned();
        report.detail = wrong;
    }
    report
}

#[cfg(test)]
mod tests {
    use std::future::{Future, pending};
    use std::pin::Pin;
    use std::thread;

    use pulsing_core::{NodeId, Payload, Target};

    use super::*;
    use crate::api::Api;
    use crate::cluster::{BoxFuture, Instances};

    /// A cluster of one Worker, which is never called.
    struct One(Instance);
    /// It, once.
    struct Once(Option<Instance>);

    impl Cluster for One {
        fn watch_name(&self, _: &str) -> Result<Box<dyn Instances>> {
            Ok(Box::new(Once(Some(self.0.clone()))))
        }
        fn first_names(&self, _: usize) -> (usize, Vec<Instance>) {
            (1, vec![self.0.clone()])
        }
        fn is_on_this_host(&self, _: &str) -> bool {
            true
        }
        fn call(&self, _: Target, _: Payload, _: CallOptions) -> BoxFuture<Result<Reply>> {
            Box::pin(pending())
        }
    }
    impl Instances for Once {
        fn changed(&mut self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
            Box::pin(pending())
        }
        fn take(&mut self) -> Vec<NameChange> {
            self.0.take().map(NameChange::Added).into_iter().collect()
        }
    }

    /// With one Worker, which is ready.
    fn pool() -> (Arc<Pool>, Arc<Worker>) {
        let metadata = [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny")];
        let instance = Instance {
            name: "worker".into(),
            target: Target { node: NodeId(1), actor: ActorId(2) },
            addr: "127.0.0.1:1".into(),
            class: String::new(),
            metadata: metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            unique: false,
        };
        let served = vec![Served::new("tiny", "worker")];
        let pool = Pool::start(Arc::new(One(instance)), served, Limits::default(), None).unwrap();
        let worker = Arc::clone(&pool.snapshot().all()[0]);
        (pool, worker)
    }
    fn ready(pool: &Pool, worker: &Worker) {
        pool.report(worker, LoadReport { state: "ready".into(), capacity: 1, ..LoadReport::default() });
        assert!(chooses(pool));
    }
    fn chooses(pool: &Pool) -> bool {
        !pool.snapshot().candidates("tiny", Api::Chat).is_empty()
    }

    #[tokio::test]
    async fn test_s4_who_finds_a_worker_unreachable_second_does_not_choose_it_again_either() {
        let (pool, worker) = pool();
        ready(&pool, &worker);
        // The first one has found it out and is about to publish it.
        worker.set_reachable(false);
        assert!(chooses(&pool));
        pool.suspect(&worker);
        assert!(!chooses(&pool));
    }

    #[tokio::test]
    async fn test_s4_nobody_chooses_a_worker_again_that_others_find_unreachable_at_the_same_time() {
        let (pool, worker) = pool();
        for _ in 0..200 {
            ready(&pool, &worker);
            thread::scope(|scope| {
                let find = || {
                    pool.suspect(&worker);
                    chooses(&pool)
                };
                let found = [(); 4].map(|()| scope.spawn(find));
                found.into_iter().for_each(|chosen| assert!(!chosen.join().unwrap()));
            });
        }
    }
}
