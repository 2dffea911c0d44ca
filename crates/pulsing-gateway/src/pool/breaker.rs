//! Rests a Worker that fails requests which others serve.
//!
//! Only a request that was served elsewhere speaks against a Worker, once: one that fails everywhere is to blame itself.
//! A restarted Worker is another instance, and has a breaker of its own.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// First rest; doubles with each trial that fails.
const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(30);
/// Weight of the failures in a row at which it opens: three that only a broken Worker explains, or six that it named
/// itself.
const LIMIT: u32 = 6;

/// What a failure says of the Worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It broke off, broke its protocol, or answered 5xx without an error that can be read.
    Broken,
    /// It answered 5xx with an error of its own: it may as well be the request's luck.
    Named,
}

const CLOSED: u8 = 0;
const OPEN: u8 = 1;
const HALF: u8 = 2;
const TRYING: u8 = 3;

/// The breaker of one Worker instance.
#[derive(Debug)]
pub(super) struct Breaker {
    state: AtomicU8,
    /// Of the failures since the last success.
    weight: AtomicU32,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// When the last failure was counted.
    last: Option<Instant>,
    until: Instant,
    rest: Duration,
}

impl Breaker {
    pub(super) fn new() -> Self {
        let inner = Inner { last: None, until: Instant::now(), rest: REST_MIN };
        Self { state: AtomicU8::new(CLOSED), weight: AtomicU32::new(0), inner: Mutex::new(inner) }
    }

    /// It gets no requests.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state.load(Ordering::Acquire), OPEN | TRYING)
    }
    /// May a request go there? `Some(true)`: as the one trial.
    pub(super) fn admit(&self) -> Option<bool> {
        match self.state.load(Ordering::Acquire) {
            CLOSED => Some(false),
            HALF => {
                self.state.compare_exchange(HALF, TRYING, Ordering::AcqRel, Ordering::Acquire).is_ok().then_some(true)
            }
            _ => None,
        }
    }
    /// The trial ended without a verdict.
    pub(super) fn untried(&self) {
        let _ = self.state.compare_exchange(TRYING, HALF, Ordering::AcqRel, Ordering::Acquire);
    }
    /// It answered a request.
    pub(super) fn answered(&self) {
        if self.state.load(Ordering::Acquire) == CLOSED && self.weight.load(Ordering::Acquire) == 0 {
            return;
        }
        self.reset();
    }
    /// What serves here from now on has failed at nothing.
    pub(super) fn reset(&self) {
        let mut inner = self.inner.lock();
        (inner.last, inner.rest) = (None, REST_MIN);
        self.weight.store(0, Ordering::Release);
        self.state.store(CLOSED, Ordering::Release);
    }
    /// A request that was sent here at `sent` failed, and was served elsewhere. True if the breaker opens by that.
    pub(super) fn failed(&self, sent: Instant, fault: Fault, now: Instant) -> bool {
        let mut inner = self.inner.lock();
        // What fails together has one cause.
        if inner.last.is_some_and(|last| sent < last) {
            return false;
        }
        inner.last = Some(now);
        let weight = match fault {
            Fault::Broken => 2,
            Fault::Named => 1,
        };
        let weight = self.weight.fetch_add(weight, Ordering::AcqRel) + weight;
        match self.state.load(Ordering::Acquire) {
            HALF | TRYING => inner.rest = (inner.rest * 2).min(REST_MAX),
            CLOSED if weight >= LIMIT => {}
            _ => return false,
        }
        inner.until = now + inner.rest;
        self.state.store(OPEN, Ordering::Release);
        true
    }
    /// Looks at the clock.
    pub(super) fn tick(&self, now: Instant) {
        if self.state.load(Ordering::Acquire) == OPEN && now >= self.inner.lock().until {
            let _ = self.state.compare_exchange(OPEN, HALF, Ordering::AcqRel, Ordering::Acquire);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_s5_failures_in_a_row_open_it_and_one_trial_closes_it() {
        let breaker = Breaker::new();
        let mut now = Instant::now();
        let mut fail = |fault| {
            now += Duration::from_millis(10);
            breaker.failed(now, fault, now)
        };
        assert!(!fail(Fault::Broken) && !fail(Fault::Broken));
        breaker.answered();
        assert!(!fail(Fault::Broken) && !fail(Fault::Broken), "a success between starts anew");
        assert!(fail(Fault::Broken));
        assert!(breaker.is_open() && breaker.admit().is_none());
        breaker.tick(now + Duration::from_millis(999));
        assert!(breaker.is_open());
        now += Duration::from_secs(1);
        breaker.tick(now);
        assert!(!breaker.is_open());
        assert_eq!((breaker.admit(), breaker.admit()), (Some(true), None), "one trial");
        breaker.untried();
        assert_eq!(breaker.admit(), Some(true), "a client that left says nothing");
        now += Duration::from_millis(10);
        assert!(breaker.failed(now, Fault::Named, now));
        breaker.tick(now + Duration::from_millis(1999));
        assert!(breaker.is_open(), "twice as long");
        breaker.tick(now + Duration::from_secs(2));
        assert_eq!(breaker.admit(), Some(true));
        breaker.answered();
        assert_eq!(breaker.admit(), Some(false));
    }

    #[test]
    fn test_s5_what_fails_together_counts_once() {
        let breaker = Breaker::new();
        let sent = Instant::now();
        let now = sent + Duration::from_millis(50);
        assert!((0..20).all(|_| !breaker.failed(sent, Fault::Broken, now)), "one lost connection, twenty requests");
        assert_eq!(breaker.admit(), Some(false));
    }
}
