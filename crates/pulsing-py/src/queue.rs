//! One queue of events for one event loop, with one wake descriptor.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use pulsing_core::net::direct::Keeper;
use pulsing_core::net::loan::{Lent, Reader};
use pulsing_core::{Call, ReplyEvent};
use pyo3::prelude::*;
use tokio::sync::Notify;

use crate::sockets::Sockets;

/// Builds the Python result of a finished operation; runs in `drain`, on the loop's thread.
pub(crate) type Build = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// What a loop is told. Holds Rust data only, so that it may be dropped on any thread.
pub(crate) enum Event {
    /// A call made with this token got an event.
    Reply(u64, ReplyEvent),
    /// A call arrived for the actor registered with `key`; `token` is what its cancellation will carry.
    Inbound { key: u64, token: u64, call: Box<Call> },
    /// The caller of the inbound call `token` gave up.
    Cancelled(u64),
    /// The stream that waits with this token may have credit.
    Credit(u64),
    /// The operation started with this token is over.
    Done(u64, Result<Build, pulsing_core::Error>),
    /// The actor registered with `key` is to end.
    Ending {
        /// Its key.
        key: u64,
        /// How.
        ending: pulsing_core::Ending,
    },
    /// What was watched with this token changed.
    Changed(u64),
    /// The actor registered with this token lost its name, as told.
    Displaced(u64, String),
}

impl Event {
    /// No loop will see it.
    fn end(self) {
        if let Self::Inbound { call, .. } = self {
            let actor = call.target;
            call.responder.error(pulsing_core::Error::ActorStopped { actor, begun: false });
        }
    }
}

/// Events on their way to a loop. Pushed from any thread, drained by one.
pub(crate) struct Queue {
    state: Mutex<State>,
    /// True from the first push after a drain on: only that push pays for a wake-up.
    armed: AtomicBool,
    wake: Wake,
    /// What the loop waits for in place of `wake` alone, where it can wait for sockets too.
    sockets: Option<Sockets>,
    /// What a test's clock waits for besides the descriptor.
    clock: Option<Arc<Notify>>,
    next_token: AtomicU64,
}

#[derive(Default)]
struct State {
    events: Vec<Event>,
    closed: bool,
}

impl Queue {
    /// An empty queue; `force_pipe` takes the portable wake descriptor even where there is a better one. `clock` is woken
    /// with the loop.
    pub(crate) fn new(force_pipe: bool, clock: Option<Arc<Notify>>) -> std::io::Result<Self> {
        let wake = Wake::new(force_pipe)?;
        // A test's network has no sockets.
        let sockets = if force_pipe || clock.is_some() { None } else { Sockets::new(&wake.read)? };
        Ok(Self {
            state: Mutex::default(),
            armed: AtomicBool::new(false),
            wake,
            sockets,
            clock,
            next_token: AtomicU64::new(1),
        })
    }
    /// A number no other event source of this queue has.
    pub(crate) fn token(&self) -> u64 {
        self.next_token.fetch_add(1, Ordering::Relaxed)
    }
    /// Hands an event to the loop. After `close` an inbound call is answered with `ActorStopped`, and others are dropped.
    pub(crate) fn push(&self, event: Event) {
        let mut state = self.state.lock();
        if state.closed {
            // Dropping an event may push others: never under the lock.
            drop(state);
            event.end();
            return;
        }
        state.events.push(event);
        drop(state);
        self.poke();
    }
    /// Wakes the loop although no event waits.
    pub(crate) fn poke(&self) {
        if !self.armed.swap(true, Ordering::AcqRel) {
            self.wake.fire();
            if let Some(clock) = &self.clock {
                clock.notify_one();
            }
        }
    }
    /// Everything pushed so far, and what is there to be read. For the loop's thread.
    pub(crate) fn take(&self) -> Vec<Event> {
        // What is read here wakes nobody: we are awake.
        let woken = self.armed.swap(true, Ordering::AcqRel);
        if let Some(sockets) = &self.sockets {
            sockets.read();
        }
        // Whoever armed the queue may be slow to fire: what comes late is found by a turn that has nothing else.
        if woken || self.state.lock().events.is_empty() {
            self.wake.clear();
        }
        // Before the events are taken: a push that comes later either is in what we take, or wakes us again.
        self.armed.store(false, Ordering::Release);
        std::mem::take(&mut self.state.lock().events)
    }
    /// The queue as one that reads for the network, if it can.
    pub(crate) fn reader(self: &Arc<Self>) -> Option<Arc<dyn Reader>> {
        self.sockets.is_some().then(|| Arc::clone(self) as Arc<dyn Reader>)
    }
    /// The loop is gone: nothing is delivered any more.
    pub(crate) fn close(&self) {
        let events = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.events)
        };
        for event in events {
            event.end();
        }
        if let Some(sockets) = &self.sockets {
            sockets.close();
        }
    }
    /// Whether the loop is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }
    /// The descriptor that becomes readable when events wait, or something is there to be read.
    pub(crate) fn fileno(&self) -> RawFd {
        self.sockets.as_ref().map_or_else(|| self.wake.read.as_raw_fd(), Sockets::fileno)
    }
}

impl Keeper for Queue {
    fn come_back(&self) {
        self.poke();
    }
}

impl Reader for Queue {
    fn lend(&self, lane: &Arc<Lent>) -> bool {
        // Under the lock: a queue that is closed gets none any more.
        let state = self.state.lock();
        !state.closed && self.sockets.as_ref().is_some_and(|sockets| sockets.lend(lane))
    }
    fn take_back(&self, lane: &Arc<Lent>) {
        if let Some(sockets) = &self.sockets {
            sockets.take_back(lane);
        }
    }
}

/// A descriptor to wake a loop with.
struct Wake {
    read: OwnedFd,
    /// `None`: the read end is an eventfd and is written to as well.
    write: Option<OwnedFd>,
}

impl Wake {
    fn new(force_pipe: bool) -> std::io::Result<Self> {
        #[cfg(target_os = "linux")]
        if !force_pipe {
            use rustix::event::{EventfdFlags, eventfd};
            return Ok(Self { read: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, write: None });
        }
        let _ = force_pipe;
        Self::pipe()
    }
    #[cfg(not(target_os = "macos"))]
    fn pipe() -> std::io::Result<Self> {
        use rustix::pipe::{PipeFlags, pipe_with};
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok(Self { read, write: Some(write) })
    }
    /// macOS has no pipe2; a socket pair from std can be made non-blocking and is close-on-exec already.
    #[cfg(target_os = "macos")]
    fn pipe() -> std::io::Result<Self> {
        let (read, write) = std::os::unix::net::UnixStream::pair()?;
        read.set_nonblocking(true)?;
        write.set_nonblocking(true)?;
        Ok(Self { read: read.into(), write: Some(write.into()) })
    }
    /// An error means that the descriptor is readable already, which is all we want.
    fn fire(&self) {
        let fd = self.write.as_ref().unwrap_or(&self.read);
        let _ = rustix::io::write(fd.as_fd(), &1u64.to_ne_bytes());
    }
    fn clear(&self) {
        let mut scratch = [0u8; 64];
        let _ = rustix::io::read(self.read.as_fd(), &mut scratch);
    }
}
