//! An answer on its way to the client, event by event.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::time::Sleep;

use super::body::Aborted;
use super::track::Tracker;
use crate::api::{ApiError, StreamWriter, Writer};
use crate::dispatch::{Piece, Source};
use crate::protocol::Deltas;

/// Pieces that are already there go out in one write up to this size; nothing ever waits for more to come.
const WRITE: usize = 16 * 1024;
/// Between an error event and the cut of the connection, so that the event is on the wire.
const LINGER: Duration = Duration::from_millis(20);

/// The body of a streamed answer. hyper polls it; there is no task and no queue in between. Dropping it, as happens when
/// the client leaves, cancels the Workers.
pub(crate) struct EventStream {
    source: Source,
    writer: Writer,
    first: Option<Piece>,
    /// An engine's events on their way, as they are.
    passing: Option<Bytes>,
    state: State,
    /// Fires for a ping or the deadline; made at the first silence.
    timer: Option<Pin<Box<Sleep>>>,
    last_output: Instant,
    ping_interval: Duration,
    deadline: Instant,
    limit: Duration,
    tracker: Tracker,
    /// Ready when the gateway waits no longer.
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
}

enum State {
    Open,
    Lingering(Pin<Box<Sleep>>),
    Done,
}

impl EventStream {
    pub(super) fn new(
        source: Source,
        writer: Writer,
        first: Option<Piece>,
        ping_interval: Duration,
        deadline: Instant,
        limit: Duration,
        tracker: Tracker,
    ) -> Self {
        let cut = Box::pin(tracker.cut());
        Self {
            source,
            writer,
            first,
            passing: None,
            state: State::Open,
            timer: None,
            last_output: Instant::now(),
            ping_interval,
            deadline,
            limit,
            tracker,
            cut,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Aborted>>> {
        match &mut self.state {
            State::Done => return Poll::Ready(None),
            State::Lingering(sleep) => {
                return match sleep.as_mut().poll(cx) {
                    Poll::Pending => Poll::Pending,
                    Poll::Ready(()) => {
                        self.state = State::Done;
                        Poll::Ready(Some(Err(Aborted)))
                    }
                };
            }
            State::Open => {}
        }
        let mut out = Vec::new();
        if let Err(error) = self.fill(&mut out, cx) {
            self.writer.error(&mut out, &error);
            self.tracker.broken(self.writer.usage(), &error);
            self.state = State::Lingering(Box::pin(tokio::time::sleep(LINGER)));
        }
        if let Some(events) = self.passing.take() {
            self.last_output = Instant::now();
            return Poll::Ready(Some(Ok(events)));
        }
        if out.is_empty() && self.is_done() {
            return Poll::Ready(None);
        }
        if out.is_empty() {
            match self.poll_silence(cx) {
                Poll::Pending if self.tracker.doubted() => StreamWriter::ping(&mut out),
                Poll::Pending => return Poll::Pending,
                Poll::Ready(()) => StreamWriter::ping(&mut out),
            }
        }
        self.last_output = Instant::now();
        Poll::Ready(Some(Ok(out.into())))
    }

    /// Takes what is there.
    fn fill(&mut self, out: &mut Vec<u8>, cx: &mut Context<'_>) -> Result<(), ApiError> {
        if self.cut.as_mut().poll(cx).is_ready() {
            return Err(ApiError::draining());
        }
        if Instant::now() >= self.deadline {
            return Err(ApiError::deadline(self.limit.as_secs_f64()));
        }
        while out.len() < WRITE && self.passing.is_none() {
            let piece = match self.first.take() {
                Some(first) => first,
                None => match self.source.poll_next(cx) {
                    Poll::Pending => return Ok(()),
                    Poll::Ready(Some(piece)) => piece?,
                    Poll::Ready(None) => {
                        self.writer.finish(out)?;
                        self.tracker.complete(self.writer.usage());
                        self.state = State::Done;
                        return Ok(());
                    }
                },
            };
            match piece {
                Piece::Deltas(deltas) => {
                    self.tracker.piece();
                    self.write(out, &deltas)?;
                }
                Piece::Events(events, _) => {
                    self.tracker.piece();
                    self.passing = Some(events);
                }
                Piece::Complete(usage) => {
                    self.tracker.complete(usage);
                    self.state = State::Done;
                    return Ok(());
                }
                // Its status line is out already, and so are pieces.
                Piece::Whole(_) | Piece::Again(_) => {
                    return Err(ApiError::worker_fault("the engine answered without a stream where one was due"));
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, out: &mut Vec<u8>, deltas: &Deltas) -> Result<(), ApiError> {
        deltas.deltas.iter().try_for_each(|delta| self.writer.push(out, delta))
    }

    /// Ready when a ping is due. Wakes for the deadline too.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let due = self.last_output + self.ping_interval;
            if Instant::now() >= due {
                return Poll::Ready(());
            }
            let wake = due.min(self.deadline);
            // Armed once a silence, not once a token: it looks again when it fires.
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(wake.into())));
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            if Instant::now() >= self.deadline {
                // The next poll reports it.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            timer.as_mut().reset(wake.into());
        }
    }
}
