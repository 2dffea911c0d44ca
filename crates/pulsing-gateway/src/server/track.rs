//! What a request leaves behind, however it ends.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Instant;

use super::Core;
use crate::api::ApiError;
use crate::metrics::Route;
use crate::protocol::Usage;

/// A place in the house (S6) and the numbers of one request. Dropped before the end, it counts a client that left.
pub(crate) struct Tracker {
    core: Arc<Core>,
    route: Route,
    pub(super) started: Instant,
    first_token: bool,
    /// A status went out.
    answered: bool,
    over: bool,
}

impl Tracker {
    /// Takes a place.
    ///
    /// # Errors
    /// 503 when the house is full. Costs next to nothing: the body has not been read.
    pub(super) fn admit(core: &Arc<Core>, route: Route) -> Result<Self, ApiError> {
        let limit = core.placement.config.max_requests;
        let mut tracker = Self {
            core: Arc::clone(core),
            route,
            started: Instant::now(),
            first_token: false,
            answered: false,
            over: false,
        };
        if core.in_flight.fetch_add(1, AcqRel) < limit {
            return Ok(tracker);
        }
        core.placement.metrics.rejected.fetch_add(1, Relaxed);
        tracker.over = true;
        Err(ApiError::overloaded(limit))
    }
    /// Returns when the gateway waits no longer.
    pub(super) fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        self.core.cut()
    }
    /// The first piece of the answer is here.
    pub(super) fn first_token(&mut self) {
        if !self.first_token {
            self.first_token_at(Instant::now());
        }
    }
    /// The first piece of the answer came then.
    pub(super) fn first_token_at(&mut self, then: Instant) {
        if !std::mem::replace(&mut self.first_token, true) {
            self.core.placement.metrics.first_token(then.saturating_duration_since(self.started));
        }
    }
    /// The status line is out; the stream follows.
    pub(super) fn answered(&mut self) {
        self.answered = true;
    }
    /// The whole answer is out.
    pub(super) fn complete(&mut self, usage: Option<Usage>) {
        self.over = true;
        self.core.placement.metrics.finished(self.started.elapsed(), usage);
    }
    /// The request ended with an error instead of a stream.
    pub(super) fn refused(&mut self) {
        self.over = true;
        self.core.placement.metrics.finished(self.started.elapsed(), None);
    }
    /// The stream ended with an error event.
    pub(super) fn broken(&mut self, usage: Option<Usage>, error: &ApiError) {
        tracing::warn!(error = %error.message, "a stream was broken off");
        self.core.placement.metrics.broken_streams.fetch_add(1, Relaxed);
        self.complete(usage);
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        self.core.in_flight.fetch_sub(1, AcqRel);
        if self.over {
            return;
        }
        let metrics = &self.core.placement.metrics;
        metrics.disconnects.fetch_add(1, Relaxed);
        metrics.finished(self.started.elapsed(), None);
        if !self.answered {
            metrics.request(self.route, 499);
        }
    }
}
