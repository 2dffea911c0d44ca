//! The way to the Workers: open while they have room, else a queue that is fair between keys.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::account::{Account, Client};
use super::lane::{Lane, Waiting};
use crate::api::ApiError;
use crate::pool::{Pool, Worker};

/// While somebody waits, how often Workers are looked at that other Routers use too. Ends of our own requests are told.
const LOOK: Duration = Duration::from_millis(50);
/// Ends of requests that the drain rate is measured over.
const ENDS: usize = 64;
/// Ends that lie further back say nothing about now.
const ENDS_AGE: Duration = Duration::from_secs(60);
/// Longest `Retry-After`, in seconds.
const RETRY_MAX: f64 = 60.0;

/// Lets requests through to dispatch.
pub(crate) struct Gate {
    pool: Arc<Pool>,
    /// Requests that may wait; 0 = none ever does, and Workers queue for themselves.
    max: usize,
    timeout: Duration,
    inner: Mutex<Inner>,
    /// Somebody has begun to wait.
    waiting: Notify,
    ends: Mutex<VecDeque<Instant>>,
}

#[derive(Default)]
struct Inner {
    lanes: HashMap<String, Lane>,
    /// By model: let through, and not counted by a Worker yet.
    placing: HashMap<String, u32>,
    waiting: usize,
    next: u64,
}

/// One request let through. It counts as on its way until [`placed`](Self::placed), or until it is dropped.
pub(crate) struct Ticket {
    gate: Arc<Gate>,
    model: String,
    placed: AtomicBool,
}

impl Ticket {
    /// A Worker counts the request.
    pub(crate) fn placed(&self) {
        if !self.placed.swap(true, AcqRel) {
            self.gate.forget_placing(&self.model);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.placed();
    }
}

/// What a Worker may be sent: a little more than it takes at once, so that it does not stand idle until it hears of the next.
fn limit(worker: &Worker) -> u32 {
    worker.capacity() + (worker.capacity() / 8).max(1)
}

impl Gate {
    pub(crate) fn new(pool: Arc<Pool>, max: usize, timeout: Duration) -> Self {
        let (inner, ends) = (Mutex::default(), Mutex::default());
        Self { pool, max, timeout, inner, waiting: Notify::new(), ends }
    }

    /// Requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.inner.lock().waiting
    }

    /// How many more of `model` its Workers can be sent. Without a Worker it is for dispatch to say so.
    fn room(&self, model: &str, placing: u32) -> u32 {
        let ready = self.pool.snapshot().ready_for(model).unwrap_or_default();
        if ready.is_empty() || ready.iter().any(|worker| !worker.has_capacity()) {
            return u32::MAX;
        }
        let room: u32 = ready.iter().map(|worker| limit(worker).saturating_sub(worker.load())).sum();
        room.saturating_sub(placing)
    }

    /// Whether a request of any model would be turned away, so that its body need not be read.
    ///
    /// # Errors
    /// 503, as [`enter`](Self::enter) would say it.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if self.max == 0 || self.waiting() < self.max {
            return Ok(());
        }
        let snapshot = self.pool.snapshot();
        let ready = snapshot.all().iter().filter(|worker| worker.state() == crate::pool::State::Ready);
        if ready.clone().count() > 0
            && ready.clone().all(|worker| worker.has_capacity() && worker.load() >= limit(worker))
        {
            return Err(self.full());
        }
        Ok(())
    }

    fn full(&self) -> ApiError {
        ApiError::overloaded(format!("{} requests are waiting already; try again later", self.max), self.retry_after())
    }

    /// Waits until a Worker for `model` has room. `tokens` is what the request is expected to cost; it is charged to its key.
    /// With the ticket comes how long that took.
    ///
    /// # Errors
    /// 503 when the queue is full, or when its turn does not come in time.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        model: &str,
        client: &Client,
        tokens: f64,
        deadline: Instant,
    ) -> Result<(Ticket, Duration), ApiError> {
        if self.max == 0 {
            let ticket = self.ticket(model);
            ticket.placed.store(true, Relaxed);
            return Ok((ticket, Duration::ZERO));
        }
        let cost = client.cost(tokens);
        let (id, turn) = {
            let mut inner = self.inner.lock();
            let placing = inner.placing.get(model).copied().unwrap_or(0);
            let queued = inner.lanes.get(model).map_or(0, Lane::len);
            if queued == 0 && self.room(model, placing) > 0 {
                // The names are there but for the first time.
                match inner.lanes.get_mut(model) {
                    Some(lane) => lane.passed(&client.account),
                    None => inner.lanes.entry(model.to_owned()).or_default().passed(&client.account),
                }
                match inner.placing.get_mut(model) {
                    Some(placing) => *placing += 1,
                    None => *inner.placing.entry(model.to_owned()).or_default() += 1,
                }
                client.account.charge(cost);
                drop(inner);
                return Ok((self.ticket(model), Duration::ZERO));
            }
            if inner.waiting >= self.max {
                drop(inner);
                return Err(self.full());
            }
            let (go, turn) = oneshot::channel();
            let id = inner.next;
            inner.next += 1;
            inner.waiting += 1;
            inner.lanes.entry(model.to_owned()).or_default().push(&client.account, Waiting { id, cost, go });
            (id, turn)
        };
        self.waiting.notify_one();
        let _leaving = Leaving { gate: self, model, account: &client.account, id };
        let since = Instant::now();
        let until = deadline.min(since + self.timeout);
        match tokio::time::timeout_at(until.into(), turn).await {
            Ok(Ok(ticket)) => Ok((ticket, since.elapsed())),
            _ => Err(ApiError::overloaded(
                format!("every worker for this model is busy; waited {} s for one", self.timeout.as_secs_f64()),
                self.retry_after(),
            )),
        }
    }

    fn ticket(self: &Arc<Self>, model: &str) -> Ticket {
        Ticket { gate: Arc::clone(self), model: model.to_owned(), placed: AtomicBool::new(false) }
    }

    /// Lets through whoever there is room for.
    pub(crate) fn poke(self: &Arc<Self>) {
        loop {
            let mut next = Vec::new();
            {
                let mut inner = self.inner.lock();
                if inner.waiting == 0 {
                    return;
                }
                let Inner { lanes, placing, waiting, .. } = &mut *inner;
                for (model, lane) in lanes.iter_mut().filter(|(_, lane)| lane.len() > 0) {
                    let on_the_way = placing.entry(model.clone()).or_default();
                    for _ in 0..self.room(model, *on_the_way) {
                        let Some(one) = lane.pop() else { break };
                        *waiting -= 1;
                        *on_the_way += 1;
                        next.push((model.clone(), one.go));
                    }
                }
            }
            let mut left = false;
            for (model, go) in next {
                // Who has left in this very moment drops the ticket, and with it the room that it took.
                left |= go.send(self.ticket(&model)).is_err();
            }
            if !left {
                return;
            }
        }
    }

    fn forget_placing(&self, model: &str) {
        let mut inner = self.inner.lock();
        if let Some(count) = inner.placing.get_mut(model) {
            *count = count.saturating_sub(1);
        }
    }

    /// A request has ended: there is room for another.
    pub(crate) fn ended(self: &Arc<Self>) {
        {
            let mut ends = self.ends.lock();
            if ends.len() == ENDS {
                ends.pop_front();
            }
            ends.push_back(Instant::now());
        }
        self.poke();
    }

    /// Seconds until one more request should find a place, at the rate at which requests have ended lately.
    pub(crate) fn retry_after(&self) -> u16 {
        let waiting = self.waiting();
        let now = Instant::now();
        let ends = self.ends.lock();
        let lately = ends.iter().filter(|end| now.duration_since(**end) < ENDS_AGE).count();
        let oldest = ends.iter().find(|end| now.duration_since(**end) < ENDS_AGE);
        retry_after(waiting, lately, oldest.map_or(ENDS_AGE, |oldest| now.duration_since(*oldest)))
    }

    /// Looks at the Workers for those that wait, until it is dropped.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut versions = self.pool.versions();
        loop {
            if self.waiting() == 0 {
                self.waiting.notified().await;
            }
            self.poke();
            let _ = tokio::time::timeout(LOOK, versions.changed()).await;
        }
    }
}

fn retry_after(waiting: usize, ends: usize, over: Duration) -> u16 {
    if ends < 2 {
        // Nothing ends: no telling.
        return if ends == 0 { 5 } else { 2 };
    }
    let rate = ends as f64 / over.as_secs_f64().max(1e-3);
    ((waiting + 1) as f64 / rate).ceil().clamp(1.0, RETRY_MAX) as u16
}

/// Takes a request out of the queue, wherever it stands, when its client leaves or its time is over.
struct Leaving<'a> {
    gate: &'a Gate,
    model: &'a str,
    account: &'a Arc<Account>,
    id: u64,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut inner = self.gate.inner.lock();
        if inner.lanes.get_mut(self.model).is_some_and(|lane| lane.remove(self.account, self.id)) {
            inner.waiting -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s6_retry_after_is_what_the_measured_rate_says() {
        assert_eq!(retry_after(99, 50, Duration::from_secs(5)), 10);
        assert_eq!(retry_after(0, 64, Duration::from_millis(640)), 1);
        assert_eq!(retry_after(100_000, 2, Duration::from_secs(1)), 60);
        assert_eq!(retry_after(3, 0, ENDS_AGE), 5);
    }
}
