//! What is counted for one API key, and its limits.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::AcqRel;
use std::time::{Duration, Instant};

use hyper::http::HeaderValue;
use parking_lot::Mutex;

use crate::api::ApiError;

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limits {
    /// Requests a second; `None` = any number. Up to a second's worth may come at once.
    pub(crate) rps: Option<f64>,
    /// Requests at once; `None` = any number.
    pub(crate) concurrency: Option<u32>,
    /// Its share while there is not enough for all, in proportion to the others'.
    pub(crate) weight: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { rps: None, concurrency: None, weight: 1.0 }
    }
}

impl Limits {
    fn burst(rps: f64) -> f64 {
        rps.ceil().max(1.0)
    }
}

/// One name in the keys' file. It outlives a reload of the file, and so do its counts.
#[derive(Debug)]
pub(crate) struct Account {
    name: String,
    bucket: Mutex<Option<Bucket>>,
    running: AtomicU32,
    /// Tokens it was given, each divided by its weight: who has the least is next.
    served: Mutex<f64>,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

/// Where a key stands, as `x-ratelimit-*` headers have it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate {
    limit: u64,
    remaining: u64,
    reset: Duration,
}

impl Rate {
    /// Name after `x-ratelimit-`, value.
    pub(crate) fn headers(&self) -> [(&'static str, HeaderValue); 3] {
        let seconds = format!("{:.3}s", self.reset.as_secs_f64());
        [
            ("x-ratelimit-limit-requests", HeaderValue::from(self.limit)),
            ("x-ratelimit-remaining-requests", HeaderValue::from(self.remaining)),
            ("x-ratelimit-reset-requests", HeaderValue::from_str(&seconds).unwrap_or(HeaderValue::from_static("0s"))),
        ]
    }
}

impl Account {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), bucket: Mutex::default(), running: AtomicU32::new(0), served: Mutex::new(0.0) }
    }
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
    /// Its place in the queue: the least is next.
    pub(super) fn served(&self) -> f64 {
        *self.served.lock()
    }
    /// Charges what something costs.
    pub(crate) fn charge(&self, cost: f64) {
        *self.served.lock() += cost;
    }
    /// Who comes back after a while gets no more than its share: what was not used is not saved up.
    pub(super) fn lift(&self, to: f64) {
        let mut served = self.served.lock();
        *served = served.max(to);
    }

    /// Takes a token from the bucket.
    ///
    /// # Errors
    /// How long until there is one.
    fn take(&self, rps: f64, now: Instant) -> Result<Rate, (Rate, Duration)> {
        let burst = Limits::burst(rps);
        let mut bucket = self.bucket.lock();
        let bucket = bucket.get_or_insert(Bucket { tokens: burst, at: now });
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        bucket.tokens = (bucket.tokens + since * rps).min(burst);
        bucket.at = now;
        let enough = bucket.tokens >= 1.0;
        if enough {
            bucket.tokens -= 1.0;
        }
        let reset = Duration::from_secs_f64((burst - bucket.tokens) / rps);
        let rate = Rate { limit: burst as u64, remaining: bucket.tokens as u64, reset };
        if enough { Ok(rate) } else { Err((rate, Duration::from_secs_f64((1.0 - bucket.tokens) / rps))) }
    }
}

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) account: Arc<Account>,
    pub(crate) limits: Limits,
}

impl Client {
    /// Everybody, where there are no keys.
    pub(crate) fn anybody(account: &Arc<Account>) -> Self {
        Self { account: Arc::clone(account), limits: Limits::default() }
    }

    /// Counts a request.
    ///
    /// # Errors
    /// 429 when it is one too many; where the key stands comes with both outcomes.
    pub(crate) fn count(&self) -> (Option<Rate>, Result<(), ApiError>) {
        let Some(rps) = self.limits.rps else { return (None, Ok(())) };
        match self.account.take(rps, Instant::now()) {
            Ok(rate) => (Some(rate), Ok(())),
            Err((rate, wait)) => {
                let why = format!("Rate limit reached for this API key: {rps} requests per second");
                (Some(rate), Err(ApiError::rate_limited(why, wait)))
            }
        }
    }
    /// Takes one of the places that the key has.
    ///
    /// # Errors
    /// 429 when all are taken.
    pub(crate) fn enter(&self) -> Result<Place, ApiError> {
        let place = Place(Arc::clone(&self.account));
        let before = self.account.running.fetch_add(1, AcqRel);
        match self.limits.concurrency {
            Some(limit) if before >= limit => {
                let why = format!("Concurrency limit reached for this API key: {limit} requests at once");
                Err(ApiError::rate_limited(why, Duration::from_secs(1)))
            }
            _ => Ok(place),
        }
    }
    /// What so many tokens cost this key.
    pub(crate) fn cost(&self, tokens: f64) -> f64 {
        tokens / self.limits.weight
    }
}

/// One of the places of a key; given back when dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<Account>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Acquire;

    use super::*;

    #[test]
    fn s6_a_bucket_lets_a_second_of_requests_through_at_once_and_then_its_rate() {
        let account = Account::new("a");
        let start = Instant::now();
        for left in (0..4).rev() {
            assert_eq!(account.take(4.0, start).unwrap().remaining, left);
        }
        let (rate, wait) = account.take(4.0, start).unwrap_err();
        assert_eq!((rate.limit, rate.remaining, rate.reset), (4, 0, Duration::from_secs(1)));
        assert_eq!(wait, Duration::from_millis(250));
        assert!(account.take(4.0, start + Duration::from_millis(251)).is_ok());
        assert!(account.take(4.0, start + Duration::from_millis(252)).is_err());
        // What was not used in an hour is no more than a second's worth.
        let later = start + Duration::from_secs(3600);
        assert_eq!((0..10).filter(|_| account.take(4.0, later).is_ok()).count(), 4);
        // Less than one a second still lets one through.
        assert!(Account::new("b").take(0.1, start).is_ok());
    }

    #[test]
    fn s6_places_come_back_however_a_request_ends() {
        let limits = Limits { concurrency: Some(2), ..Limits::default() };
        let client = Client { account: Arc::new(Account::new("a")), limits };
        let held = [client.enter().unwrap(), client.enter().unwrap()];
        let error = client.enter().unwrap_err();
        assert_eq!(
            (error.status, error.code.as_deref(), error.retry_after),
            (429, Some("rate_limit_exceeded"), Some(1))
        );
        drop(held);
        assert_eq!(client.account.running.load(Acquire), 0);
        assert!(client.enter().is_ok());
    }
}
