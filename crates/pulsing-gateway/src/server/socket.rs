//! A client's socket, as the HTTP server sees it.
//!
//! Two things are done here that a server of whole requests has no place for. A client may close its sending side and still
//! read: until its answer is complete that is no reason to drop it, unless the kernel says that nobody is there any more. And
//! what is no HTTP at all is answered in the API's own shape.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::peer::{Peer, Stage};
use super::respond;

/// First pause before a half-closed connection is looked at; doubles up to [`LOOK_MAX`]. On one host an answer to the probe
/// takes microseconds.
const LOOK_MIN: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_millis(100);
/// Pause between two probes.
const PROBE: Duration = Duration::from_secs(1);
/// One would do: whatever has come of a body is handed over at once.
const PATIENCE: u8 = 4;
/// What every client of HTTP/1.1 must take and ignore, and a closed one's kernel answers with a reset.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// What every answer begins with. HTTP/1.0 has nothing to be ignored: its clients get of this byte by byte, and what is out
/// is left out of the answer.
const BEGINNING: &[u8] = b"HTTP/1.";

/// A stream with a TCP socket at its end.
pub(super) trait Tcp {
    fn tcp(&self) -> &TcpStream;
}

impl Tcp for TcpStream {
    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl Tcp for tokio_rustls::server::TlsStream<TcpStream> {
    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// Counts answers that no request of ours led to: the status.
pub(super) type Refused = Box<dyn Fn(u16) + Send>;

/// The client has closed its sending side.
struct HalfClosed {
    timer: Pin<Box<Sleep>>,
    pause: Duration,
    /// When something was written last that a closed client would have refused.
    probed: Option<Instant>,
    /// Until the next time.
    between: Duration,
    /// Part of an interim response that is still to be written.
    rest: &'static [u8],
    waker: Waker,
    /// Polls of the connection that a request gets to show that it is whole.
    patience: u8,
}

pub(super) struct Socket<S> {
    inner: S,
    peer: Arc<Peer>,
    half: Option<HalfClosed>,
    /// Bytes of a response did not fit in the socket: nothing may be put in between.
    blocked: bool,
    /// Bytes of the next answer's beginning that are out already.
    ahead: usize,
    /// What is written in place of the server's own bare error, and how long that is.
    instead: Option<(Bytes, usize)>,
    refused: Refused,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Tcp> Socket<S> {
    pub(super) fn new(inner: S, peer: Arc<Peer>, refused: Refused) -> Self {
        Self { inner, peer, half: None, blocked: false, ahead: 0, instead: None, refused }
    }

    /// Whether the client that sends no more is gone.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(half) = &mut self.half else { return Poll::Ready(Ok(())) };
        half.waker.clone_from(cx.waker());
        loop {
            let stage = self.peer.stage();
            match stage {
                Stage::Idle => return Poll::Ready(Ok(())),
                // Its handler takes what is there of it; that the rest will not come is told after it has been polled.
                Stage::Reading if half.patience == 0 => return Poll::Ready(Ok(())),
                Stage::Reading => {
                    half.patience -= 1;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                _ => half.patience = PATIENCE,
            }
            let due = half.probed.is_none_or(|last| last.elapsed() >= half.between);
            if due && stage == Stage::Waiting && !self.blocked {
                half.rest = INTERIM;
            } else if due && stage == Stage::WaitingPlainly && !self.blocked {
                // There is little of it: pauses grow.
                half.between *= 2;
                half.rest = BEGINNING.get(self.ahead..=self.ahead).unwrap_or_default();
                self.ahead += half.rest.len();
            } else if due && stage == Stage::Answering {
                self.peer.doubt();
                cx.waker().wake_by_ref();
            }
            if due {
                half.probed = Some(Instant::now());
            }
            while !half.rest.is_empty() {
                match Pin::new(&mut self.inner).poll_write(cx, half.rest) {
                    Poll::Ready(Ok(count)) => half.rest = &half.rest[count..],
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => break,
                }
            }
            if half.rest.is_empty() {
                let _ = Pin::new(&mut self.inner).poll_flush(cx)?;
            }
            if let Some(error) = self.inner.tcp().take_error()? {
                return Poll::Ready(Err(error));
            }
            ready!(half.timer.as_mut().poll(cx));
            half.pause = (half.pause * 2).min(LOOK_MAX);
            half.timer.as_mut().reset(tokio::time::Instant::now() + half.pause);
        }
    }
    fn poll_instead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        while let Some((rest, length)) = &mut self.instead {
            let count = ready!(Pin::new(&mut self.inner).poll_write(cx, rest))?;
            let _ = rest.split_to(count);
            if rest.is_empty() {
                let length = *length;
                self.instead = None;
                return Poll::Ready(Ok(length));
            }
        }
        Poll::Ready(Ok(0))
    }
    /// Notes what the server says by itself about a request that it could not read.
    fn look(&mut self, buf: &[u8]) {
        if let Some(status) = respond::bare_error(buf) {
            (self.refused)(status);
            self.instead = Some((respond::unreadable(status), buf.len()));
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Tcp> AsyncRead for Socket<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.half.is_some() {
            return self.poll_gone(cx);
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if buf.filled().len() > before || buf.remaining() == 0 || self.peer.stage() == Stage::Idle {
            return Poll::Ready(Ok(()));
        }
        let (timer, pause) = (Box::pin(tokio::time::sleep(LOOK_MIN)), LOOK_MIN);
        self.half = Some(HalfClosed {
            timer,
            pause,
            probed: None,
            between: PROBE,
            rest: &[],
            waker: cx.waker().clone(),
            patience: PATIENCE,
        });
        self.poll_gone(cx)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Tcp> AsyncWrite for Socket<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let socket = &mut *self;
        // What has begun to be said is said first.
        while let Some(half) = socket.half.as_mut().filter(|half| !half.rest.is_empty()) {
            let count = ready!(Pin::new(&mut socket.inner).poll_write(cx, half.rest))?;
            half.rest = &half.rest[count..];
        }
        if let Some(first) = bufs.iter().find(|buf| !buf.is_empty()).filter(|_| socket.ahead > 0) {
            let count = socket.ahead.min(first.len());
            socket.ahead -= count;
            return Poll::Ready(Ok(count));
        }
        if let [one] = bufs
            && socket.instead.is_none()
            && !socket.blocked
        {
            socket.look(one);
        }
        if socket.instead.is_some() {
            return socket.poll_instead(cx);
        }
        let whole: usize = bufs.iter().map(|buf| buf.len()).sum();
        let written = match bufs {
            [one] => Pin::new(&mut socket.inner).poll_write(cx, one),
            _ => Pin::new(&mut socket.inner).poll_write_vectored(cx, bufs),
        };
        socket.blocked = !matches!(written, Poll::Ready(Ok(count)) if count == whole);
        written
    }
    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
        if self.peer.flushed()
            && let Some(half) = &self.half
        {
            // The answer is out: now the end of what the client sends is the end.
            half.waker.wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
