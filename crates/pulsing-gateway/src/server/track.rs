//! What a request leaves behind, however it ends.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::Instant;

use hyper::{Request, Version};

use super::Core;
use super::peer::{Peer, Waiting};
use crate::admit::{Client, Place};
use crate::api::ApiError;
use crate::metrics::{ModelMetrics, Route};
use crate::protocol::Usage;
use crate::trail::Trail;

/// English text has about four bytes a token: what a request costs its key until its tokens are known.
const BYTES_A_TOKEN: f64 = 4.0;

/// Where a request counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before the door, until its body is there: who sends slowly takes nobody's place in the house.
    Door,
    /// In the house.
    House,
}

/// Bodies of this size in bytes are taken whatever the others have. As many as may come fit into the memory of a small machine.
const SMALL: usize = 64 << 10;

/// A place in the house (S6) and the numbers of one request. Dropped before the end, it counts a client that left.
pub(crate) struct Tracker {
    core: Arc<Core>,
    at: At,
    route: Route,
    pub(super) started: Instant,
    pub(super) client: Client,
    pub(super) trail: Arc<Trail>,
    /// What the key was charged beforehand, in tokens.
    expected: f64,
    first_token: bool,
    model: Option<Arc<ModelMetrics>>,
    /// When a piece of a stream came last.
    piece: Option<Instant>,
    /// A status went out.
    answered: bool,
    over: bool,
    /// Bytes of its body that are here.
    held: usize,
    /// The connection that it came on, until its body is there.
    peer: Option<(Arc<Peer>, Version)>,
    /// From then on.
    waiting: Option<Waiting>,
    /// One of the places of its key.
    _place: Place,
}

impl Tracker {
    /// Takes a place before the door.
    ///
    /// # Errors
    /// 429 when all places of the client's key are taken, 503 when the house is full, or all places before it. Costs next to nothing: the body has
    /// not been read.
    pub(super) fn admit<B>(
        core: &Arc<Core>,
        route: Route,
        request: &Request<B>,
        client: Client,
        peer: &Arc<Peer>,
    ) -> Result<Self, ApiError> {
        let peer = Some((Arc::clone(peer), request.version()));
        let place = client.enter()?;
        let mut tracker = Self {
            core: Arc::clone(core),
            at: At::Door,
            route,
            started: Instant::now(),
            client,
            trail: request.extensions().get::<Arc<Trail>>().cloned().unwrap_or_default(),
            expected: 0.0,
            first_token: false,
            model: None,
            piece: None,
            answered: false,
            over: false,
            held: 0,
            peer,
            waiting: None,
            _place: place,
        };
        let config = &core.placement.config;
        let full = if core.receiving.fetch_add(1, AcqRel) >= config.max_receiving {
            let why = format!("it receives {} requests already; try again later", config.max_receiving);
            Some(ApiError::overloaded(why, core.gate.retry_after()))
        } else if core.in_flight.load(Acquire) >= config.max_requests {
            Some(tracker.full_house())
        } else {
            core.gate.check().err()
        };
        match full {
            None => Ok(tracker),
            Some(error) => {
                core.placement.metrics.rejected.fetch_add(1, Relaxed);
                tracker.over = true;
                Err(error)
            }
        }
    }
    fn full_house(&self) -> ApiError {
        let limit = self.core.placement.config.max_requests;
        let why = format!("it holds {limit} requests already; try again later");
        ApiError::overloaded(why, self.core.gate.retry_after())
    }
    /// Takes `count` more bytes of the body. A small one is always taken: large ones, which few can fill the memory with, must
    /// not keep everybody out.
    ///
    /// # Errors
    /// 503 when all bodies together are too large.
    pub(super) fn hold(&mut self, count: usize) -> Result<(), ApiError> {
        self.held += count;
        let all = self.core.held.fetch_add(count, AcqRel) + count;
        let limit = self.core.placement.config.max_bodies;
        if all <= limit || self.held <= SMALL {
            return Ok(());
        }
        self.core.held.fetch_sub(std::mem::take(&mut self.held), AcqRel);
        self.core.placement.metrics.rejected.fetch_add(1, Relaxed);
        let why = format!("its requests have bodies of {limit} bytes already; try again later");
        Err(ApiError::overloaded(why, self.core.gate.retry_after()).last())
    }
    /// Takes a place in the house: the body is there.
    ///
    /// # Errors
    /// 503 when the house has filled up meanwhile.
    pub(super) fn received(&mut self) -> Result<(), ApiError> {
        self.core.receiving.fetch_sub(1, AcqRel);
        self.at = At::House;
        if self.core.in_flight.fetch_add(1, AcqRel) < self.core.placement.config.max_requests {
            return Ok(());
        }
        self.core.placement.metrics.rejected.fetch_add(1, Relaxed);
        Err(self.full_house())
    }
    /// Waits until a Worker has room for a request of `body` bytes, all of which are there.
    ///
    /// # Errors
    /// 503 when too many wait already, or when its turn does not come in time.
    pub(super) async fn queue(&mut self, model: &str, body: usize, deadline: Instant) -> Result<(), ApiError> {
        self.waiting = self.peer.take().and_then(|(peer, version)| Waiting::new(peer, version));
        self.expected = body as f64 / BYTES_A_TOKEN;
        let entered = self.core.gate.enter(model, &self.client, self.expected, deadline).await;
        let (ticket, waited) = entered.inspect_err(|_| {
            self.core.placement.metrics.rejected.fetch_add(1, Relaxed);
        })?;
        let metrics = &self.core.placement.metrics;
        metrics.queued(waited);
        self.model = Some(metrics.model(model));
        self.trail.note(|notes| notes.queued = Some(waited));
        self.trail.let_through(ticket);
        Ok(())
    }
    /// Returns when the gateway waits no longer.
    pub(super) fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        self.core.cut()
    }
    /// The client sends no more: something should be written, once, to see whether it still reads.
    pub(super) fn doubted(&self) -> bool {
        self.waiting.as_ref().is_some_and(Waiting::doubted)
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
            self.trail.note(|notes| notes.first = Some(then));
            let after = then.saturating_duration_since(self.started);
            self.core.placement.metrics.first_token(after);
            if let Some(model) = &self.model {
                model.first_token(after);
            }
        }
    }
    /// A piece of a stream is here.
    pub(super) fn piece(&mut self) {
        let now = Instant::now();
        if let Some(last) = self.piece.replace(now) {
            self.core.placement.metrics.gap(now - last);
            if let Some(model) = &self.model {
                model.gap(now - last);
            }
        } else {
            self.first_token_at(now);
        }
    }
    /// The status line is out; the stream follows.
    pub(super) fn answered(&mut self) {
        self.answered = true;
    }
    /// The whole answer is out.
    pub(super) fn complete(&mut self, usage: Option<Usage>) {
        self.over = true;
        if let Some(usage) = &usage {
            self.trail.note(|notes| notes.usage = Some(*usage));
            if let Some(model) = &self.model {
                model.used(usage);
            }
            let tokens = f64::from(usage.prompt_tokens) + f64::from(usage.completion_tokens);
            // Nothing is given back: others were placed behind what was charged.
            self.client.account.charge(self.client.cost((tokens - self.expected).max(0.0)));
        }
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
        self.core.held.fetch_sub(self.held, AcqRel);
        match self.at {
            At::Door => {
                self.core.receiving.fetch_sub(1, AcqRel);
            }
            At::House => {
                self.core.in_flight.fetch_sub(1, AcqRel);
                self.core.gate.ended();
            }
        }
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
