//! Reading a request body within limits.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Request;
use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderMap};
use tokio::time::error::Elapsed;

use crate::api::ApiError;

/// Most that is set aside for a body before as much of it is there, in bytes: its length is only a word.
const AHEAD: usize = 1 << 20;
/// How long the rest of an oversized body is read and dropped. Answering at once would reset the connection under a client
/// that is still sending, which then never sees the 413.
const DISCARD: Duration = Duration::from_secs(5);
/// And how much of it.
const DISCARD_BYTES: usize = 256 << 20;

/// What a body may take.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Bytes.
    pub(super) size: usize,
    /// Between two pieces.
    pub(super) pause: Duration,
    /// When all of it has to be there: who sends a byte now and then never pauses for too long.
    pub(super) end: Instant,
}

/// The whole body; `hold` is told of each piece's length before it is kept.
///
/// # Errors
/// 415 or 501 for one that is compressed, 413 for one that is too large, 408 for one that comes too slowly, 400 when it
/// breaks off; what `hold` says.
pub(super) async fn read(
    headers: &HeaderMap,
    mut body: Incoming,
    Limits { size: limit, pause, end }: Limits,
    mut hold: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    let expects_continue = headers.contains_key(header::EXPECT);
    if let Some(error) = coded(headers) {
        if !expects_continue {
            discard(body).await;
        }
        return Err(error);
    }
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        // A client that waits for `100 Continue` has sent nothing.
        if !expects_continue {
            discard(body).await;
        }
        return Err(ApiError::too_large(limit));
    }
    let mut first = Bytes::new();
    let mut rest = Vec::new();
    loop {
        let data = match next_within(&mut body, pause, end).await {
            Err(_) => return Err(ApiError::slow_body()),
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(ApiError::broken_body(&error)),
            Ok(Some(Ok(data))) => data,
        };
        let fits = if first.len() + rest.len() + data.len() > limit {
            Err(ApiError::too_large(limit))
        } else {
            hold(data.len())
        };
        if let Err(error) = fits {
            drop((first, rest));
            discard(body).await;
            return Err(error);
        }
        if first.is_empty() && rest.is_empty() {
            first = data;
        } else {
            if rest.is_empty() {
                make_room(&mut rest, first.len(), announced.min(AHEAD));
                rest.extend_from_slice(&std::mem::take(&mut first));
            }
            make_room(&mut rest, data.len(), announced);
            rest.extend_from_slice(&data);
        }
    }
    Ok(if rest.is_empty() { first } else { rest.into() })
}

/// Makes room in `body` for `more` bytes; where there is none, for all of the `announced` ones at once: growing by and by
/// costs a body of 20 MB two thirds of its time. What is set aside takes no memory until it is written to.
fn make_room(body: &mut Vec<u8>, more: usize, announced: usize) {
    if body.capacity() - body.len() >= more {
        return;
    }
    let due = announced.saturating_sub(body.len());
    if due < more || body.try_reserve_exact(due).is_err() {
        body.reserve(more);
    }
}

/// What is wrong with a body whose bytes are not what its sender means. What was compressed is not undone here: a body of some
/// kilobytes would become one of gigabytes.
fn coded(headers: &HeaderMap) -> Option<ApiError> {
    let other = |name, plain: &str| {
        let values = headers.get_all(name).iter();
        values
            .map(|value| String::from_utf8_lossy(value.as_bytes()))
            .find(|value| value.split(',').any(|one| !one.trim().is_empty() && !one.trim().eq_ignore_ascii_case(plain)))
    };
    if let Some(coding) = other(header::CONTENT_ENCODING, "identity") {
        return Some(ApiError::coded_body(415, "Content-Encoding", &coding));
    }
    other(header::TRANSFER_ENCODING, "chunked").map(|coding| ApiError::coded_body(501, "Transfer-Encoding", &coding))
}

/// The next data, unless they do not come within `pause`, or before `end`.
async fn next_within(
    body: &mut Incoming,
    pause: Duration,
    end: Instant,
) -> Result<Option<Result<Bytes, hyper::Error>>, Elapsed> {
    // A body that came with its head is handed over when it was asked for once: it needs no timer.
    let mut asked = false;
    let soon = poll_fn(|cx| match pin!(next(body)).poll(cx) {
        Poll::Ready(data) => Poll::Ready(Some(data)),
        Poll::Pending if asked => Poll::Ready(None),
        Poll::Pending => {
            asked = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    });
    match soon.await {
        Some(data) => Ok(data),
        None => tokio::time::timeout_at((Instant::now() + pause).min(end).into(), next(body)).await,
    }
}

async fn next(body: &mut Incoming) -> Option<Result<Bytes, hyper::Error>> {
    loop {
        match poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            None => return None,
            Some(Err(error)) => return Some(Err(error)),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Some(Ok(data));
                }
            }
        }
    }
}

/// Drops a body that nobody wants, so that its sender gets to read the answer.
pub(super) async fn skip(request: Request<Incoming>) {
    if !request.body().is_end_stream() && !request.headers().contains_key(header::EXPECT) {
        discard(request.into_body()).await;
    }
}

async fn discard(mut body: Incoming) {
    let _ = tokio::time::timeout(DISCARD, async {
        let mut seen = 0;
        while let Some(Ok(data)) = next(&mut body).await {
            seen += data.len();
            if seen > DISCARD_BYTES {
                break;
            }
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_moved_once_at_most_and_a_word_about_its_length_sets_aside_little() {
        for (announced, length) in [(20 << 20, 20 << 20), (AHEAD, AHEAD), (usize::MAX, 3 << 20), (10, 10), (0, 5 << 20)]
        {
            let (mut body, mut rooms) = (Vec::new(), Vec::new());
            make_room(&mut body, 1, announced.min(AHEAD));
            while body.len() < length {
                let piece = (length - body.len()).min(400 << 10);
                make_room(&mut body, piece, announced);
                assert!(body.len() >= AHEAD - piece || body.capacity() <= 2 * AHEAD, "{announced}");
                body.resize(body.len() + piece, 7);
                rooms.push(body.capacity());
            }
            rooms.dedup();
            if announced == length {
                assert!(rooms.len() <= 2 && rooms.last() == Some(&length), "{announced}: {rooms:?}");
            }
        }
    }
}
