//! When a request that has no answer yet is taken back from its Worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Job, Placement};
use crate::pool::{Likeness, Role, State, Worker};

impl Placement {
    /// Ends when what the Worker has is better sent to another one, and there is another one; with `like`, one that can go
    /// on with what this one has begun.
    pub(super) async fn gone(self: Arc<Self>, worker: Arc<Worker>, job: Arc<Job>, like: Option<Arc<Likeness>>) {
        let mut versions = self.pool.versions();
        let mut since = None;
        loop {
            versions.mark_unchanged();
            let changed = match self.notice(&worker).filter(|_| self.has_other(&worker, &job, like.as_deref())) {
                None => {
                    since = None;
                    versions.changed().await
                }
                Some(notice) => {
                    let until = *since.get_or_insert_with(Instant::now) + notice;
                    if Instant::now() >= until {
                        return;
                    }
                    tokio::time::timeout_at(until.into(), versions.changed()).await.unwrap_or(Ok(()))
                }
            };
            if changed.is_err() {
                // The pool is no more; the request goes on.
                return std::future::pending().await;
            }
        }
    }

    /// How long the Worker must stay as it is before requests are taken back from it; `None`: it keeps them.
    fn notice(&self, worker: &Worker) -> Option<Duration> {
        match (worker.state(), worker.endpoint()) {
            (State::Silent | State::Stuck, None) => Some(Duration::ZERO),
            // Reports come from beside an engine, not from within it, and a connection to a process that hangs says
            // nothing of it: one that is only busy gets the time that it was seen to need.
            (State::Silent | State::Stuck | State::Failed, Some(_)) => {
                let limit = self.config.take_back;
                Some(worker.notice().map_or(limit, |notice| notice.min(limit)))
            }
            // Who has failed, drains or is out of reach ends its calls itself.
            _ => None,
        }
    }

    /// Somebody else is there who serves this; with `like`, one that can go on with what this one has begun.
    pub(super) fn has_other(&self, worker: &Arc<Worker>, job: &Job, like: Option<&Likeness>) -> bool {
        let snapshot = self.pool.snapshot();
        let others = match worker.role() {
            Role::Decode(_) if like.is_none() => snapshot.decoders_for(&job.model),
            _ => snapshot.ready_for(&job.model).unwrap_or_default(),
        };
        let fits = |other: &Arc<Worker>| {
            !Arc::ptr_eq(other, worker) && other.serves(job.api) && like.is_none_or(|like| other.is_like(like))
        };
        // Who goes on needs another half that does, and that is not the one to be left.
        let whole = |other: &Arc<Worker>| {
            let halves = like.is_some() && matches!(other.role(), Role::Prefill(_));
            !halves || !self.decoders(job, other, fits).is_empty()
        };
        others.iter().any(|other| fits(other) && whole(other))
    }
}
