//! `/events`: a response that goes on, in the form of server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, timeout};

use super::events::Event;

/// Media type of the events.
pub(super) const CONTENT_TYPE: &str = "text/event-stream";
/// Pieces between who collects them and the connection; what does not fit waits in the backlog.
const AHEAD: usize = 16;

/// The body of one answer. It ends with the node, or with its connection.
pub(super) struct Following {
    pieces: mpsc::Receiver<Bytes>,
    /// When the connection last took something: while it does, it is no idle one.
    taken: watch::Sender<Instant>,
}

impl Following {
    /// Begins with `first`, an event that says who tells, and has a comment line in each `pause` without an event.
    pub(super) fn new(
        mut events: broadcast::Receiver<Arc<Event>>,
        first: &Value,
        pause: Duration,
        taken: watch::Sender<Instant>,
    ) -> Self {
        let (ahead, pieces) = mpsc::channel(AHEAD);
        let first = piece("node", first);
        tokio::spawn(async move {
            let mut next = first;
            while ahead.send(next).await.is_ok() {
                let event = tokio::select! {
                    biased;
                    () = ahead.closed() => break,
                    event = timeout(pause, events.recv()) => event,
                };
                next = match event {
                    Ok(Ok(event)) => piece(event.kind, &event.data),
                    Ok(Err(RecvError::Lagged(count))) => piece("missed", &json!({"count": count})),
                    Ok(Err(RecvError::Closed)) => break,
                    Err(_) => Bytes::from_static(b":\n\n"),
                };
            }
        });
        Self { pieces, taken }
    }
}

/// JSON has no line breaks of its own, so that one line holds it.
fn piece(kind: &str, data: &Value) -> Bytes {
    format!("event: {kind}\ndata: {data}\n\n").into()
}

impl Body for Following {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = std::task::ready!(self.pieces.poll_recv(cx));
        self.taken.send_replace(Instant::now());
        Poll::Ready(next.map(|piece| Ok(Frame::data(piece))))
    }
}
