//! What the two sides of one HTTP/1 connection tell each other: the socket, and the request on it.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU8};

use hyper::body::Body;
use hyper::{Request, Version};

/// Whether an end of what the client sends is the end of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Stage {
    /// Between requests: who sends no more is gone.
    Idle = 0,
    /// A request is being read: who sends no more is gone, unless it turns out that all of it is here.
    Reading = 1,
    /// The request is whole. Who sends no more may still be waiting for the answer.
    Waiting = 2,
    /// As before, in HTTP/1.0, which knows no interim responses.
    WaitingPlainly = 3,
    /// The answer has begun.
    Answering = 4,
    /// The answer is complete, and on its way out.
    Finishing = 5,
}

/// One connection.
#[derive(Debug, Default)]
pub(super) struct Peer {
    stage: AtomicU8,
    /// The client sends no more, and something should be written to see whether it still reads.
    doubt: AtomicBool,
}

impl Peer {
    pub(super) fn stage(&self) -> Stage {
        match self.stage.load(Acquire) {
            1 => Stage::Reading,
            2 => Stage::Waiting,
            3 => Stage::WaitingPlainly,
            4 => Stage::Answering,
            5 => Stage::Finishing,
            _ => Stage::Idle,
        }
    }
    fn set(&self, stage: Stage) {
        self.stage.store(stage as u8, Release);
    }
    /// The head of a request is here. Streams of HTTP/2 end one by one, and none of this is for them.
    pub(super) fn begin<B: Body>(&self, request: &Request<B>) {
        if request.version() > Version::HTTP_11 {
            return;
        }
        self.set(Stage::Reading);
        if request.body().is_end_stream() {
            self.whole(request.version());
        }
    }
    fn whole(&self, version: Version) {
        self.set(if version == Version::HTTP_11 { Stage::Waiting } else { Stage::WaitingPlainly });
    }
    /// The head of the answer is next; all of it, if it does not `last`.
    pub(super) fn answer(&self, lasts: bool) {
        match self.stage() {
            Stage::Waiting | Stage::WaitingPlainly if lasts => self.set(Stage::Answering),
            Stage::Waiting | Stage::WaitingPlainly | Stage::Reading => self.set(Stage::Finishing),
            _ => {}
        }
    }
    /// The answer has left the house.
    pub(super) fn flushed(&self) -> bool {
        let finishing = self.stage() == Stage::Finishing;
        if finishing {
            self.set(Stage::Idle);
        }
        finishing
    }
    /// The client may be gone: something should be written to it.
    pub(super) fn doubt(&self) {
        self.doubt.store(true, Release);
    }
    /// Whether something should be written, once.
    pub(super) fn doubted(&self) -> bool {
        self.doubt.load(Acquire) && self.doubt.swap(false, AcqRel)
    }
}

/// A request that is whole, until its answer is.
#[derive(Debug)]
pub(super) struct Waiting(Arc<Peer>);

impl Waiting {
    pub(super) fn new(peer: Arc<Peer>, version: Version) -> Option<Self> {
        if version > Version::HTTP_11 {
            return None;
        }
        peer.whole(version);
        Some(Self(peer))
    }
    /// See [`Peer::doubted`].
    pub(super) fn doubted(&self) -> bool {
        self.0.doubted()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // What is no stream is handed over after this.
        if self.0.stage() == Stage::Answering {
            self.0.set(Stage::Finishing);
        }
    }
}
