//! When a connection may be closed without cutting off a request that is on its way.
//!
//! A client that has just got an answer may send its next request at any moment, and one that crosses our close on the
//! wire is lost. So a closing gateway first answers with `Connection: close` what comes, and closes by itself only what
//! has been quiet for a while.

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use hyper::header::{self, HeaderValue};
use hyper::{Response, Version};

use super::body::{Aborted, Body};

/// Quiet for this long, a connection may go. Clients that mean to go on do so at once.
pub(super) const QUIET: Duration = Duration::from_secs(1);
/// How often a connection that is to go is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What is under way on one connection.
pub(super) struct Traffic {
    opened: Instant,
    requests: AtomicU32,
    /// Milliseconds after `opened` at which the last answer ended, at least one; 0: none has.
    ended: AtomicU64,
    http2: AtomicBool,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            opened: Instant::now(),
            requests: AtomicU32::new(0),
            ended: AtomicU64::new(0),
            http2: AtomicBool::new(false),
        }
    }
}

impl Traffic {
    /// Counts a request until the body of its answer is gone.
    pub(super) fn begin(self: &Arc<Self>, version: Version) -> Request {
        self.requests.fetch_add(1, Ordering::AcqRel);
        let http2 = version == Version::HTTP_2;
        if http2 {
            self.http2.store(true, Ordering::Relaxed);
        }
        Request { traffic: Arc::clone(self), http2 }
    }

    /// For how long nothing has been under way; `None` while something is.
    pub(super) fn idle(&self) -> Option<Duration> {
        let ended = self.opened + Duration::from_millis(self.ended.load(Ordering::Acquire));
        (self.requests.load(Ordering::Acquire) == 0).then(|| ended.elapsed())
    }

    /// Returns when no request has begun for `patience` after the connection was opened. The HTTP library counts the time of a
    /// head, but only when it knows which HTTP it is.
    pub(super) async fn silent(&self, patience: Duration) {
        tokio::time::sleep(patience).await;
        if self.requests.load(Ordering::Acquire) > 0 || self.ended.load(Ordering::Acquire) > 0 {
            pending().await
        }
    }

    /// Returns when the connection of a closing gateway may go: at once where the protocol itself tells the client what
    /// was taken (HTTP/2), else when it has been quiet for a second, or for `patience` if that is less.
    pub(super) async fn quiet(&self, patience: Duration) {
        let (since, patience) = (Instant::now(), patience.min(QUIET));
        loop {
            let quiet = self.idle().is_some_and(|idle| idle.min(since.elapsed()) >= patience);
            if self.http2.load(Ordering::Relaxed) || quiet {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// A request under way.
pub(super) struct Request {
    traffic: Arc<Traffic>,
    http2: bool,
}

impl Request {
    /// The answer, which is under way until its body is gone. From a `closing` gateway it says that it is the last one.
    pub(super) fn answer(self, mut response: Response<Body>, closing: bool) -> Response<Counted> {
        if closing && !self.http2 {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.map(|body| Counted { body, _request: self })
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let ended = u64::try_from(self.traffic.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.traffic.ended.store(ended.max(1), Ordering::Release);
        self.traffic.requests.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A body that is counted.
pub(super) struct Counted {
    body: Body,
    _request: Request,
}

impl hyper::body::Body for Counted {
    type Data = Bytes;
    type Error = Aborted;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Aborted>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
