//! When an answer that has begun stands still, and another Worker had better go on with it (S5).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Job, Placement};
use crate::cluster::BoxFuture;
use crate::pool::{LONGEST, Likeness, OVERSLEPT, State, Worker};

/// How many times its own longest pause a stream may stand still before that means anything.
const MARGIN: u32 = 3;

/// Watches one answer that another Worker could go on with, or begin anew.
pub(crate) struct Stall {
    placement: Arc<Placement>,
    worker: Arc<Worker>,
    job: Arc<Job>,
    /// Who could go on with it; `None`: anybody may begin it anew.
    like: Option<Arc<Likeness>>,
    pulse: Arc<Pulse>,
    /// Ends when the stream stands still; made when there is first something to wait for.
    still: Option<BoxFuture<()>>,
    bell: Arc<Bell>,
    /// That wakes `bell`.
    rings: Waker,
    /// Who is woken by it.
    task: Option<Waker>,
    /// That it stands still has been told.
    told: bool,
}

/// What a watch waits for has news: to look at it with every token would cost more than all the rest of the watch.
#[derive(Default)]
struct Bell {
    rung: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        let task = self.task.lock().clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// When something came of an answer.
struct Pulse {
    born: Instant,
    /// Milliseconds after `born`.
    last: AtomicU64,
    /// Longest pause between two pieces, in milliseconds.
    gap: AtomicU64,
}

impl Pulse {
    fn at(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.born).as_millis() as u64
    }
    fn last(&self) -> Instant {
        self.born + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
    fn gap(&self) -> Duration {
        Duration::from_millis(self.gap.load(Ordering::Relaxed))
    }
    /// Nothing is said of the time before `now`.
    fn restart(&self, now: Instant) {
        self.last.store(self.at(now), Ordering::Relaxed);
    }
}

impl Stall {
    /// For an answer to `job` that `worker` has begun; those of that likeness could go on with it, or without one anybody
    /// could begin it anew.
    pub(super) fn new(
        placement: &Arc<Placement>,
        worker: &Arc<Worker>,
        job: &Arc<Job>,
        like: Option<&Arc<Likeness>>,
    ) -> Self {
        let bell = Arc::<Bell>::default();
        let pulse = Pulse { born: Instant::now(), last: AtomicU64::new(0), gap: AtomicU64::new(0) };
        Self {
            placement: Arc::clone(placement),
            worker: Arc::clone(worker),
            job: Arc::clone(job),
            like: like.map(Arc::clone),
            pulse: Arc::new(pulse),
            still: None,
            rings: Waker::from(Arc::clone(&bell)),
            bell,
            task: None,
            told: false,
        }
    }
    /// A piece came.
    pub(crate) fn beat(&mut self, now: Instant) {
        self.told = false;
        let at = self.pulse.at(now);
        // One task has the stream.
        let pause = at.saturating_sub(self.pulse.last.swap(at, Ordering::Relaxed));
        self.pulse.gap.fetch_max(pause, Ordering::Relaxed);
    }
    /// How long nothing has come.
    pub(super) fn since(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.pulse.last())
    }
    /// Nobody else went on with it: for a while it is not worth another try.
    pub(crate) fn again_after(&mut self, pause: Duration) {
        self.pulse.restart(Instant::now() + pause);
        self.told = false;
    }
    /// Ready when the answer stands still and somebody could go on with it: once, until something comes.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.told {
            return Poll::Pending;
        }
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            self.bell.task.lock().clone_from(&self.task);
        }
        // Who is woken from now on looks again.
        if !self.bell.rung.swap(false, Ordering::AcqRel) && self.still.is_some() {
            return Poll::Pending;
        }
        let still = self.still.get_or_insert_with(|| {
            let (placement, worker, job) =
                (Arc::clone(&self.placement), Arc::clone(&self.worker), Arc::clone(&self.job));
            Box::pin(placement.still(worker, job, self.like.clone(), Arc::clone(&self.pulse)))
        });
        std::task::ready!(still.as_mut().poll(&mut Context::from_waker(&self.rings)));
        (self.still, self.told) = (None, true);
        Poll::Ready(())
    }
}

impl Placement {
    async fn still(
        self: Arc<Self>,
        worker: Arc<Worker>,
        job: Arc<Job>,
        like: Option<Arc<Likeness>>,
        pulse: Arc<Pulse>,
    ) {
        let mut versions = self.pool.versions();
        loop {
            versions.mark_unchanged();
            let until = self.stands_until(&worker, &pulse, like.is_some());
            let until = until.filter(|_| self.has_other(&worker, &job, like.as_deref()));
            let changed = if let Some(until) = until {
                if Instant::now() >= until {
                    return;
                }
                let changed = tokio::time::timeout_at(until.into(), versions.changed()).await.unwrap_or(Ok(()));
                // Who was not running, or could not write to its client and did not read, has heard nothing.
                let now = Instant::now();
                if now.saturating_duration_since(until) > OVERSLEPT {
                    pulse.restart(now);
                }
                changed
            } else {
                versions.changed().await
            };
            if changed.is_err() {
                // The pool is no more; the answer goes on.
                return std::future::pending().await;
            }
        }
    }

    /// Until when the answer is its Worker's, as things are; `None`: as long as they are so.
    fn stands_until(&self, worker: &Worker, pulse: &Pulse, goes_on: bool) -> Option<Instant> {
        let (last, own) = (pulse.last(), pulse.gap() * MARGIN);
        match (worker.state(), worker.endpoint()) {
            // What says that it hangs comes from within an actor, and from beside an engine: there the answer has also the
            // time that the engine was seen to need.
            (State::Silent | State::Stuck, None) | (State::Silent | State::Stuck | State::Failed, Some(_)) => {
                let limit = self.config.take_back;
                let seen = worker.endpoint().map_or(Duration::ZERO, |_| worker.notice().unwrap_or(limit));
                Some(last + seen.max(own).max(self.config.worker_silence).min(limit))
            }
            // By its own account it serves. While others get on there, this one may have to wait for its turn. To begin
            // anew for that would cost more than it saves.
            _ if goes_on => {
                let needed = worker.patience().max(own).min(LONGEST);
                Some((last.max(worker.given_at()) + needed).min(last + LONGEST))
            }
            _ => None,
        }
    }
}
