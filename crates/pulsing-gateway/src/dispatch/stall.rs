//! When a stream of an engine stands still, and another engine had better go on with it (S5).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::{Job, Placement};
use crate::cluster::BoxFuture;
use crate::pool::{LONGEST, Likeness, OVERSLEPT, State, Worker};

/// How many times its own longest pause a stream may stand still before that means anything.
const MARGIN: u32 = 3;

/// Watches one stream that another engine could go on with.
pub(crate) struct Stall {
    placement: Arc<Placement>,
    worker: Arc<Worker>,
    job: Arc<Job>,
    like: Arc<Likeness>,
    pulse: Arc<Pulse>,
    /// Ends when the stream stands still; made when there is first something to wait for.
    still: Option<BoxFuture<()>>,
    /// That it stands still has been told.
    told: bool,
}

/// When something came of a stream.
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
    /// For a stream of `job` that `worker` has begun; those of that likeness could go on with it.
    pub(super) fn new(placement: &Arc<Placement>, worker: &Arc<Worker>, job: &Arc<Job>, like: &Arc<Likeness>) -> Self {
        let pulse = Pulse { born: Instant::now(), last: AtomicU64::new(0), gap: AtomicU64::new(0) };
        Self {
            placement: Arc::clone(placement),
            worker: Arc::clone(worker),
            job: Arc::clone(job),
            like: Arc::clone(like),
            pulse: Arc::new(pulse),
            still: None,
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
    /// Nobody else went on with it: for a while it is not worth another try.
    pub(crate) fn again_after(&mut self, pause: Duration) {
        self.pulse.restart(Instant::now() + pause);
        self.told = false;
    }
    /// Ready when the stream stands still and somebody could go on with it: once, until something comes.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.told {
            return Poll::Pending;
        }
        let still = self.still.get_or_insert_with(|| {
            let (placement, worker, job) =
                (Arc::clone(&self.placement), Arc::clone(&self.worker), Arc::clone(&self.job));
            Box::pin(placement.still(worker, job, Arc::clone(&self.like), Arc::clone(&self.pulse)))
        });
        std::task::ready!(still.as_mut().poll(cx));
        (self.still, self.told) = (None, true);
        Poll::Ready(())
    }
}

impl Placement {
    async fn still(self: Arc<Self>, worker: Arc<Worker>, job: Arc<Job>, like: Arc<Likeness>, pulse: Arc<Pulse>) {
        let mut versions = self.pool.versions();
        loop {
            versions.mark_unchanged();
            let changed = if self.has_other(&worker, &job, Some(&like)) {
                let until = self.stands_until(&worker, &pulse);
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
                // The pool is no more; the stream goes on.
                return std::future::pending().await;
            }
        }
    }

    /// Until when the stream is its engine's, as things are.
    fn stands_until(&self, worker: &Worker, pulse: &Pulse) -> Instant {
        let (last, own) = (pulse.last(), pulse.gap() * MARGIN);
        match worker.state() {
            // What says that it hangs comes from beside it: the stream has the time that engine and stream were seen to
            // need.
            State::Silent | State::Stuck | State::Failed => {
                let limit = self.config.take_back;
                let needed = worker.notice().unwrap_or(limit).max(own).max(self.config.worker_silence);
                last + needed.min(limit)
            }
            // By its own account it serves. While others get on there, this one may have to wait for its turn.
            _ => {
                let needed = worker.patience().max(own).min(LONGEST);
                (last.max(worker.given_at()) + needed).min(last + LONGEST)
            }
        }
    }
}
