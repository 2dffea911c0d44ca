//! A connection to an engine that only its EngineWorker's host reaches: a request's bytes there, and its answer's bytes back,
//! through the cluster.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use pulsing_core::{CallOptions, Error, ItemStream, Reply, Result, Target};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::cluster::{BoxFuture, Cluster};
use crate::protocol;

/// With which code an EngineWorker says that the engine lets nobody connect.
const NOT_CONNECTED: i32 = 503;

/// Who relays.
pub(crate) struct Relay {
    cluster: Arc<dyn Cluster>,
    target: Target,
}

impl Relay {
    /// By that EngineWorker.
    pub(crate) fn new(cluster: Arc<dyn Cluster>, target: Target) -> Self {
        Self { cluster, target }
    }

    /// Whether the engine lets itself be connected to from there.
    ///
    /// # Errors
    /// Why not, in the EngineWorker's words or the cluster's.
    pub(crate) async fn knock(&self, limit: Duration) -> io::Result<()> {
        match self.ask(Bytes::new(), Some(limit)).await {
            Ok(Reply::Value(_)) => Ok(()),
            Ok(Reply::Stream(_)) => Err(io::Error::other("its EngineWorker relays an answer where none was due")),
            Err(error) => Err(io::Error::other(error)),
        }
    }
    /// A way for one request.
    pub(crate) fn open(self: &Arc<Self>) -> Tunnel {
        Tunnel { relay: Arc::clone(self), request: Vec::new(), state: State::Writing, rest: Bytes::new() }
    }

    fn ask(&self, request: Bytes, timeout: Option<Duration>) -> BoxFuture<Result<Reply>> {
        let options = CallOptions { timeout, ..CallOptions::default() };
        self.cluster.call(self.target, protocol::relay(request), options)
    }
}

/// One request's way to the engine and back. Dropping it closes the connection at the other end, too.
pub(crate) struct Tunnel {
    relay: Arc<Relay>,
    /// Written, and not on its way yet.
    request: Vec<u8>,
    state: State,
    /// Of the answer, what has arrived and was not read.
    rest: Bytes,
}

enum State {
    /// Until the answer is first asked for: the request is sent as a whole.
    Writing,
    Asked(BoxFuture<Result<Reply>>),
    Answering(ItemStream),
    /// The engine has closed its side.
    Over,
}

impl AsyncRead for Tunnel {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let tunnel = self.get_mut();
        loop {
            if !tunnel.rest.is_empty() {
                let count = tunnel.rest.len().min(buf.remaining());
                buf.put_slice(&tunnel.rest[..count]);
                tunnel.rest.advance(count);
                return Poll::Ready(Ok(()));
            }
            match &mut tunnel.state {
                State::Over => return Poll::Ready(Ok(())),
                // Nothing is said unasked.
                State::Writing if tunnel.request.is_empty() => return Poll::Pending,
                State::Writing => {
                    // The gateway has limits of its own for how long it waits.
                    let request = std::mem::take(&mut tunnel.request).into();
                    tunnel.state = State::Asked(tunnel.relay.ask(request, None));
                }
                State::Asked(reply) => match ready!(reply.as_mut().poll(cx)) {
                    Ok(Reply::Stream(stream)) => tunnel.state = State::Answering(stream),
                    // The engine has closed the connection without a word.
                    Ok(Reply::Value(_)) => tunnel.state = State::Over,
                    Err(error) => return tunnel.broken(error),
                },
                State::Answering(stream) => match ready!(stream.poll_next(cx)) {
                    Some(Ok(piece)) => tunnel.rest = piece.head,
                    Some(Err(error)) => return tunnel.broken(error),
                    None => tunnel.state = State::Over,
                },
            }
        }
    }
}

impl Tunnel {
    fn broken(&mut self, error: Error) -> Poll<io::Result<()>> {
        self.state = State::Over;
        Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionReset, error)))
    }
}

/// What became of the way itself, where that is why nothing came: the cluster's error, or that of the EngineWorker to which
/// its engine let nobody connect. `None` where it was the engine that broke off.
pub(crate) fn blocked(error: &io::Error) -> Option<&Error> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    match error {
        Error::App(app) => (app.code == NOT_CONNECTED).then_some(error),
        other => Some(other),
    }
}

impl AsyncWrite for Tunnel {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        debug_assert!(matches!(self.state, State::Writing), "one request a tunnel");
        self.request.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        debug_assert!(matches!(self.state, State::Writing), "one request a tunnel");
        bufs.iter().for_each(|buf| self.request.extend_from_slice(buf));
        Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()))
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
