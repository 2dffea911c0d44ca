//! One call: from the caller's options to the single event that ends it (R1).
//!
//! A call is answered through a [`ReplySink`] that the *caller* supplies. The same sink serves a callee in this process and
//! one across a link, and it is called from whatever thread the answer arrives on, so it must not block. Rust callers use
//! [`System::call`](crate::System::call), which wraps a sink in a future; the Python bridge pushes events to its loop's queue.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::error::Error;
use crate::fault;
use crate::id::ActorId;
use crate::net::loan::Reader;
use crate::payload::Payload;
use crate::stream::{Credit, ItemStream, StreamSink};

/// What the caller wants back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One reply: a value or a stream, as the callee decides.
    Ask,
    /// Nothing, not even an error.
    Tell,
}

/// How one call is made.
#[derive(Clone, Debug)]
pub struct CallOptions {
    /// Time until the first reply event; `None` waits for ever. Default 30 s (R5).
    pub timeout: Option<Duration>,
    /// The calling actor, if any: orders its messages (R2).
    pub sender: Option<ActorId>,
    /// The actors already waiting in this chain of calls, outermost first (R11).
    pub chain: Vec<ActorId>,
    /// W3C `traceparent`, passed on untouched.
    pub trace: Option<String>,
    /// Raise `MailboxFull` instead of waiting (R3).
    pub no_wait: bool,
    /// Stream items the caller takes before it grants more (R6).
    pub window: u32,
    /// The call may run twice: it is sent again when its way breaks before an answer, within its timeout.
    pub idempotent: bool,
    /// How often an idempotent call is sent again at most. Default 1.
    pub resends: u32,
}

/// Default deadline of a call (design R5).
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Default stream window, in items.
pub const DEFAULT_WINDOW: u32 = 64;

impl Default for CallOptions {
    fn default() -> Self {
        Self {
            timeout: Some(DEFAULT_TIMEOUT),
            sender: None,
            chain: Vec::new(),
            trace: None,
            no_wait: false,
            window: DEFAULT_WINDOW,
            idempotent: false,
            resends: 1,
        }
    }
}

/// What a caller learns, in this order: `Value` | `Error` | (`StreamStart`, `Item`*, (`End` | `Error`)).
#[derive(Debug)]
pub enum ReplyEvent {
    /// The single reply. Terminal.
    Value(Payload),
    /// The call or the stream failed. Terminal.
    Error(Error),
    /// The reply is a stream.
    StreamStart,
    /// One item of the stream.
    Item(Payload),
    /// The stream is complete. Terminal.
    End,
}

impl ReplyEvent {
    /// Nothing follows a terminal event.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Value(_) | Self::Error(_) | Self::End)
    }
}

/// Where the events of one call go. Called from any thread; must not block.
pub trait ReplySink: Send + Sync + 'static {
    /// Takes the next event. Exactly one terminal event arrives, and it is the last.
    fn event(&self, event: ReplyEvent);
    /// A tell has a place in its actor's mailbox. Comes once, before the end.
    fn accepted(&self) {}
    /// The event loop that the events go to, if it can read for the network.
    fn reader(&self) -> Option<Arc<dyn Reader>> {
        None
    }
}

/// The caller's control over a call that is out.
pub trait CallControl: Send + Sync + 'static {
    /// The caller no longer wants the answer; the callee's handler is cancelled (R5). Idempotent.
    fn cancel(&self);
    /// The caller can take `items` more stream items.
    fn grant(&self, items: u32);
}

/// A clonable handle on a call that is out. Dropping it does nothing.
#[derive(Clone)]
pub struct CallHandle(pub Arc<dyn CallControl>);

impl CallHandle {
    /// See [`CallControl::cancel`].
    pub fn cancel(&self) {
        self.0.cancel();
    }
    /// See [`CallControl::grant`].
    pub fn grant(&self, items: u32) {
        self.0.grant(items);
    }
}

impl fmt::Debug for CallHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallHandle")
    }
}

type CancelHook = Box<dyn FnOnce() + Send>;

/// Tells the callee that its caller gave up (cancelled, timed out, or is gone).
#[derive(Clone, Default)]
pub struct CancelSignal(Arc<CancelInner>);

#[derive(Default)]
struct CancelInner {
    fired: AtomicBool,
    hooks: Mutex<Hooks>,
}

/// Most calls have one hook: it needs no list.
#[derive(Default)]
struct Hooks {
    first: Option<CancelHook>,
    others: Vec<CancelHook>,
}

impl CancelSignal {
    /// A signal that has not fired.
    pub fn new() -> Self {
        Self::default()
    }
    /// Whether the caller has given up.
    pub fn is_cancelled(&self) -> bool {
        self.0.fired.load(Ordering::Acquire)
    }
    /// Runs `hook` when the signal fires; at once if it has. Hooks must not block.
    pub fn on_cancel(&self, hook: impl FnOnce() + Send + 'static) {
        let mut hooks = self.0.hooks.lock();
        if self.is_cancelled() {
            drop(hooks);
            hook();
        } else {
            let hook: CancelHook = Box::new(hook);
            if hooks.first.is_none() && hooks.others.is_empty() {
                hooks.first = Some(hook);
            } else {
                hooks.others.push(hook);
            }
        }
    }
    /// Resolves when the signal fires.
    pub async fn cancelled(&self) {
        let (tx, rx) = tokio::sync::oneshot::channel();
        self.on_cancel(move || {
            let _ = tx.send(());
        });
        // The sender goes unused when the call ends first: then there is nothing to wait for.
        if rx.await.is_err() && !self.is_cancelled() {
            std::future::pending::<()>().await;
        }
    }
    /// Fires the signal. Idempotent.
    pub fn fire(&self) {
        let hooks = {
            let mut hooks = self.0.hooks.lock();
            self.0.fired.store(true, Ordering::Release);
            std::mem::take(&mut *hooks)
        };
        for hook in hooks.first.into_iter().chain(hooks.others) {
            hook();
        }
    }
    /// Forgets the hooks: the call is over.
    fn clear(&self) {
        // What they hold may call back: not under the lock.
        let hooks = std::mem::take(&mut *self.0.hooks.lock());
        drop(hooks);
    }
}

/// A call as the callee sees it.
pub struct Call {
    /// The actor it is for.
    pub target: ActorId,
    /// What the caller wants back.
    pub mode: Mode,
    /// The message.
    pub payload: Payload,
    /// When the caller stops waiting for the first reply event.
    pub deadline: Option<Instant>,
    /// The calling actor.
    pub sender: Option<ActorId>,
    /// Actors waiting in this chain, outermost first.
    pub chain: Vec<ActorId>,
    /// W3C `traceparent`.
    pub trace: Option<String>,
    /// The caller prefers `MailboxFull` to waiting.
    pub no_wait: bool,
    /// Where the answer goes.
    pub responder: Responder,
}

impl Call {
    /// Time left until the deadline; `None` = no deadline, zero = passed.
    pub fn remaining(&self) -> Option<Duration> {
        self.deadline.map(|d| d.saturating_duration_since(Instant::now()))
    }
}

/// Says that a tell has a place in its mailbox. Not to be called under a lock of the mailbox: it may deliver the next.
pub struct Acceptance(Arc<dyn ReplySink>);

impl Acceptance {
    /// The message has its place. Idempotent.
    pub fn give(&self) {
        self.0.accepted();
    }
}

/// The callee's end of a call. Dropped without an answer it fails the call with `ActorStopped`, so that a caller always
/// learns something (R1).
pub struct Responder {
    actor: ActorId,
    sink: Arc<dyn ReplySink>,
    credit: Arc<Credit>,
    cancel: CancelSignal,
    done: bool,
}

impl Responder {
    /// A responder that sends events to `sink`; stream items spend `credit`; `cancel` fires when the caller gives up.
    pub fn new(actor: ActorId, sink: Arc<dyn ReplySink>, credit: Arc<Credit>, cancel: CancelSignal) -> Self {
        Self { actor, sink, credit, cancel, done: false }
    }
    /// Fires when the caller gives up.
    pub fn cancel_signal(&self) -> &CancelSignal {
        &self.cancel
    }
    /// What to call when the message has a place in the mailbox: whoever sent a tell may then send another (R3). Ending the
    /// call does the same.
    pub fn acceptance(&self) -> Acceptance {
        Acceptance(Arc::clone(&self.sink))
    }
    /// Answers with one value.
    pub fn value(mut self, payload: Payload) {
        self.finish(ReplyEvent::Value(payload));
    }
    /// Answers with an error.
    pub fn error(mut self, error: Error) {
        self.finish(ReplyEvent::Error(error));
    }
    /// Answers with a stream.
    pub fn stream(mut self) -> StreamSink {
        self.done = true;
        self.sink.event(ReplyEvent::StreamStart);
        StreamSink::new(self.actor, Arc::clone(&self.sink), Arc::clone(&self.credit), self.cancel.clone())
    }
    fn finish(&mut self, event: ReplyEvent) {
        debug_assert!(!self.done, "a responder answers once");
        self.done = true;
        self.cancel.clear();
        self.sink.event(event);
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.done {
            self.cancel.clear();
            fault::unanswered(&self.sink, Error::ActorStopped { actor: self.actor, begun: true });
        }
    }
}

/// The reply of [`System::call`](crate::System::call).
#[derive(Debug)]
pub enum Reply {
    /// One value.
    Value(Payload),
    /// A stream of items.
    Stream(ItemStream),
}
