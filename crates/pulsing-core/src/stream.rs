//! Streams of items with credit: a consumer that stops taking suspends its producer (R6).

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::call::{CallHandle, CancelSignal, ReplyEvent, ReplySink};
use crate::error::{Error, Result};
use crate::fault;
use crate::id::ActorId;
use crate::payload::Payload;

type Waker = Box<dyn FnOnce() + Send>;

/// Permits that a producer spends, one an item, and its consumer grants.
#[derive(Default)]
pub struct Credit(Mutex<CreditState>);

#[derive(Default)]
struct CreditState {
    permits: u64,
    closed: bool,
    wakers: Vec<Waker>,
}

impl Credit {
    /// Starts with `permits` items.
    pub fn new(permits: u32) -> Self {
        Self(Mutex::new(CreditState { permits: u64::from(permits), ..CreditState::default() }))
    }
    /// Spends one permit if there is one. A closed credit always says yes: what is sent then goes nowhere.
    pub fn try_take(&self) -> bool {
        let mut state = self.0.lock();
        if state.closed {
            return true;
        }
        if state.permits == 0 {
            return false;
        }
        state.permits -= 1;
        true
    }
    /// Adds permits and wakes who waits.
    pub fn grant(&self, items: u32) {
        self.update(|state| state.permits += u64::from(items));
    }
    /// Nobody will take items any more: wakes every waiter.
    pub fn close(&self) {
        self.update(|state| state.closed = true);
    }
    /// Runs `waker` as soon as a permit may be there; at once if it is. Must not block.
    pub fn on_available(&self, waker: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        if state.closed || state.permits > 0 {
            drop(state);
            waker();
        } else {
            state.wakers.push(Box::new(waker));
        }
    }
    fn update(&self, change: impl FnOnce(&mut CreditState)) {
        let wakers = {
            let mut state = self.0.lock();
            change(&mut state);
            std::mem::take(&mut state.wakers)
        };
        for waker in wakers {
            waker();
        }
    }
    /// Waits for a permit and spends it.
    pub async fn take(&self) {
        while !self.try_take() {
            let (tx, rx) = tokio::sync::oneshot::channel();
            self.on_available(move || {
                let _ = tx.send(());
            });
            let _ = rx.await;
        }
    }
}

/// The producer's end of a stream. Dropped without [`end`](Self::end) it fails the stream with `ActorStopped`: a stream
/// never ends silently.
pub struct StreamSink {
    actor: ActorId,
    sink: Arc<dyn ReplySink>,
    credit: Arc<Credit>,
    cancel: CancelSignal,
    done: bool,
}

impl StreamSink {
    pub(crate) fn new(actor: ActorId, sink: Arc<dyn ReplySink>, credit: Arc<Credit>, cancel: CancelSignal) -> Self {
        let wake = Arc::clone(&credit);
        cancel.on_cancel(move || wake.close());
        Self { actor, sink, credit, cancel, done: false }
    }
    /// Fires when the consumer abandons the stream.
    pub fn cancel_signal(&self) -> &CancelSignal {
        &self.cancel
    }
    /// The credit that items spend.
    pub fn credit(&self) -> &Arc<Credit> {
        &self.credit
    }
    /// Sends one item, waiting for credit.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the consumer has gone.
    pub async fn send(&self, item: Payload) -> Result<()> {
        self.credit.take().await;
        self.push(item)
    }
    /// Sends one item if there is credit; gives it back otherwise.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the consumer has gone.
    pub fn try_send(&self, item: Payload) -> Result<Option<Payload>> {
        if self.credit.try_take() { self.push(item).map(|()| None) } else { Ok(Some(item)) }
    }
    /// Says something about the stream itself, ahead of its items: it travels like an item, but spends no credit.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the consumer has gone.
    pub fn announce(&self, header: Payload) -> Result<()> {
        self.push(header)
    }
    fn push(&self, item: Payload) -> Result<()> {
        if self.cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        self.sink.event(ReplyEvent::Item(item));
        Ok(())
    }
    /// The stream is complete.
    pub fn end(mut self) {
        self.finish(ReplyEvent::End);
    }
    /// The stream failed.
    pub fn error(mut self, error: Error) {
        self.finish(ReplyEvent::Error(error));
    }
    fn finish(&mut self, event: ReplyEvent) {
        self.done = true;
        self.sink.event(event);
    }
}

impl Drop for StreamSink {
    fn drop(&mut self) {
        if !self.done {
            fault::unanswered(&self.sink, Error::ActorStopped { actor: self.actor, begun: true });
        }
    }
}

/// The consumer's end of a stream. Dropping it cancels the producer (R6).
#[derive(Debug)]
pub struct ItemStream {
    events: mpsc::UnboundedReceiver<ReplyEvent>,
    handle: CallHandle,
    window: u32,
    taken: u32,
    finished: bool,
}

impl ItemStream {
    /// The stream behind a call whose `StreamStart` has been taken from `events`; `window` items were granted to it.
    pub fn new(events: mpsc::UnboundedReceiver<ReplyEvent>, handle: CallHandle, window: u32) -> Self {
        Self { events, handle, window, taken: 0, finished: false }
    }
    /// The next item; `None` once the stream is complete.
    ///
    /// # Errors
    /// What the producer failed with, or how the connection to it was lost. Nothing follows an error.
    pub async fn next(&mut self) -> Option<Result<Payload>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
    /// [`next`](Self::next) for those who poll, such as an HTTP body.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Payload>>> {
        if self.finished {
            return Poll::Ready(None);
        }
        let Poll::Ready(event) = self.events.poll_recv(cx) else { return Poll::Pending };
        let item = match event {
            Some(ReplyEvent::Item(item)) => {
                self.taken += 1;
                // Half a window at a time: one grant frame for many items, and the producer never runs dry.
                if self.taken * 2 >= self.window {
                    self.handle.grant(std::mem::take(&mut self.taken));
                }
                return Poll::Ready(Some(Ok(item)));
            }
            Some(ReplyEvent::Error(error)) => Some(Err(error)),
            Some(ReplyEvent::End) => None,
            Some(ReplyEvent::Value(_) | ReplyEvent::StreamStart) => {
                Some(Err(Error::Protocol("a reply arrived inside a stream".to_owned())))
            }
            None => Some(Err(Error::ShutDown)),
        };
        self.finished = true;
        Poll::Ready(item)
    }
}

impl Drop for ItemStream {
    fn drop(&mut self) {
        if !self.finished {
            self.handle.cancel();
        }
    }
}
