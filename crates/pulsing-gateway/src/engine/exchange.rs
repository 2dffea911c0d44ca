//! The body of an engine's answer on its connection.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};

use super::chunks::Chunks;
use super::endpoint::Endpoint;
use super::wire::{Wire, WireError};

/// Room for one read of a large body.
const READ: usize = 256 * 1024;

/// Up to this size a copy costs less than the new room for reading that is needed while somebody holds a part of the old.
const SMALL: usize = 4 * 1024;

/// Where a body ends.
pub(super) enum Framing {
    /// After so many bytes more.
    Length(u64),
    /// Where its chunks say.
    Chunked(Chunks),
    /// With the connection.
    UntilClosed,
}

/// An answer whose head is here.
pub(super) struct Exchange {
    /// Given back when the answer is complete.
    wire: Option<Wire>,
    framing: Framing,
    keep: bool,
    endpoint: Arc<Endpoint>,
}

impl Exchange {
    pub(super) fn new(wire: Wire, framing: Framing, keep: bool, endpoint: &Arc<Endpoint>) -> Self {
        Self { wire: Some(wire), framing, keep, endpoint: Arc::clone(endpoint) }
    }

    /// The next bytes of the body, as many as are there; `None` at its proper end. Nothing follows an error.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, WireError>>> {
        let Some(wire) = &mut self.wire else { return Poll::Ready(None) };
        let error = loop {
            let (data, complete) = match &mut self.framing {
                Framing::Length(left) => {
                    let count = usize::try_from(*left).map_or(wire.read.len(), |left| left.min(wire.read.len()));
                    *left -= count as u64;
                    let data = if count <= SMALL {
                        let data = Bytes::copy_from_slice(&wire.read[..count]);
                        wire.read.advance(count);
                        data
                    } else {
                        wire.read.split_to(count).freeze()
                    };
                    (data, *left == 0)
                }
                Framing::Chunked(chunks) => match chunks.take(&mut wire.read) {
                    Ok(data) => (data.unwrap_or_default(), chunks.is_complete()),
                    Err(why) => break WireError::Unreadable(why.to_owned()),
                },
                Framing::UntilClosed => (wire.read.split().freeze(), false),
            };
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(data)));
            }
            if complete {
                // Something unasked behind the answer would be taken for the next one.
                if let Some(wire) = self.wire.take().filter(|wire| self.keep && wire.read.is_empty()) {
                    self.endpoint.give_back(wire);
                }
                return Poll::Ready(None);
            }
            let room =
                if matches!(self.framing, Framing::Length(left) if left > READ as u64) { READ } else { READ / 16 };
            match ready!(wire.poll_read(cx, room)) {
                Ok(0) if matches!(self.framing, Framing::UntilClosed) => {
                    self.wire = None;
                    return Poll::Ready(None);
                }
                Ok(0) => break WireError::Closed("in the middle of its answer"),
                Ok(_) => {}
                Err(error) => break error.into(),
            }
        };
        self.wire = None;
        Poll::Ready(Some(Err(error)))
    }
    pub(super) async fn data(&mut self) -> Option<Result<Bytes, WireError>> {
        poll_fn(|cx| self.poll_data(cx)).await
    }
}
