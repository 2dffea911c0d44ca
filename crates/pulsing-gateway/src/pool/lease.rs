//! A request's place on a Worker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::clock::Grant;
use super::{Companion, Worker};

/// A place on a Worker: given back when dropped, whatever happens to the request.
#[derive(Debug)]
pub struct Lease {
    worker: Arc<Worker>,
    report: u64,
    bytes: usize,
    begun: Instant,
    /// What the Worker was granted for it, until its first token.
    unanswered: Option<Grant>,
    /// What goes on elsewhere for the same request.
    companion: Option<Companion>,
    /// See [`Worker::admit`].
    trial: bool,
}

impl Lease {
    /// Whose place.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }
    /// The first piece of the answer is here.
    pub(crate) fn answered(&mut self) {
        if let Some(grant) = self.unanswered.take() {
            let now = Instant::now();
            self.worker.clocks.release(grant);
            self.worker.clocks.learn(self.bytes, now.saturating_duration_since(self.begun), now);
            self.worker.gave(now);
            self.worker.breaker.answered();
            self.trial = false;
        }
    }
    /// The Worker's only request, until it is answered.
    pub(crate) fn tries(&mut self) {
        self.trial = true;
    }
    /// `companion` ends with it.
    pub(crate) fn keep(&mut self, companion: Companion) {
        self.companion = Some(companion);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(grant) = self.unanswered.take() {
            self.worker.clocks.release(grant);
        }
        if self.trial {
            self.worker.breaker.untried();
        }
        self.worker.in_flight.fetch_sub(1, Ordering::AcqRel);
        if self.worker.reports.load(Ordering::Acquire) == self.report {
            self.worker.unreported.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Worker {
    /// Counts a request on it until the lease is dropped.
    pub fn lease(self: &Arc<Self>) -> Lease {
        self.lease_for(0, Duration::ZERO)
    }
    /// Counts a request of `bytes` on it until the lease is dropped; `waited` is how long the request has waited for
    /// its first token on other Workers.
    pub(crate) fn lease_for(self: &Arc<Self>, bytes: usize, waited: Duration) -> Lease {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let report = self.reports.load(Ordering::Acquire);
        self.unreported.fetch_add(1, Ordering::AcqRel);
        let begun = Instant::now();
        let grant = self.clocks.grant(bytes, waited, begun);
        Lease { worker: Arc::clone(self), report, bytes, begun, unanswered: Some(grant), companion: None, trial: false }
    }
}
