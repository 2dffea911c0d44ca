//! A client's socket, as the HTTP server sees it.
//!
//! Two things are done here that a server of whole requests has no place for. A client may close its sending side and still
//! read: until its answer is complete that is no reason to drop it, unless the kernel says that nobody is there any more. And
//! what is no HTTP at all is answered in the API's own shape.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
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

/// Whether the kernel knows that the client sends no more, whatever of it is still to be read.
fn is_ended(tcp: &TcpStream) -> bool {
    let ready = pin!(tcp.ready(Interest::READABLE)).poll(&mut Context::from_waker(Waker::noop()));
    matches!(ready, Poll::Ready(Ok(ready)) if ready.is_read_closed())
}

/// Counts answers that no request of ours led to: the status.
pub(super) type Refused = Box<dyn Fn(u16) + Send>;

/// The client has closed its sending side.
struct HalfClosed {
    /// All that it sent before that has been read.
    read: bool,
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

impl HalfClosed {
    fn new(waker: &Waker) -> Self {
        Self {
            read: false,
            timer: Box::pin(tokio::time::sleep(LOOK_MIN)),
            pause: LOOK_MIN,
            probed: None,
            between: PROBE,
            rest: &[],
            waker: waker.clone(),
            patience: PATIENCE,
        }
    }
}

pub(super) struct Socket<S> {
    inner: S,
    peer: Arc<Peer>,
    half: Option<HalfClosed>,
    /// The server waits for what the client sends, and so hears its end.
    listening: bool,
    /// When to look for that end where it does not.
    look: Option<Pin<Box<Sleep>>>,
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
        Self { inner, peer, half: None, listening: false, look: None, blocked: false, ahead: 0, instead: None, refused }
    }

    /// Whether a client is gone that has sent its next request ahead: the server keeps that one, and reads no further
    /// until the answer is out.
    fn look(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if !matches!(self.peer.stage(), Stage::Waiting | Stage::WaitingPlainly | Stage::Answering) {
            self.look = None;
            return Ok(());
        }
        while self.half.is_none() {
            let look = self.look.get_or_insert_with(|| Box::pin(tokio::time::sleep(LOOK_MAX)));
            if look.as_mut().poll(cx).is_pending() {
                return Ok(());
            }
            self.look = None;
            self.half = is_ended(self.inner.tcp()).then(|| HalfClosed::new(cx.waker()));
        }
        match self.poll_gone(cx) {
            Poll::Ready(gone) => gone,
            Poll::Pending => Ok(()),
        }
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
    fn note(&mut self, buf: &[u8]) {
        if let Some(status) = respond::bare_error(buf) {
            (self.refused)(status);
            self.instead = Some((respond::unreadable(status), buf.len()));
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Tcp> AsyncRead for Socket<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.half.as_ref().is_some_and(|half| half.read) {
            return self.poll_gone(cx);
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        self.listening = read.is_pending();
        ready!(read)?;
        if buf.filled().len() > before || buf.remaining() == 0 || self.peer.stage() == Stage::Idle {
            return Poll::Ready(Ok(()));
        }
        // From now on its end is looked for here.
        self.listening = true;
        self.half.get_or_insert_with(|| HalfClosed::new(cx.waker())).read = true;
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
            socket.note(one);
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
        Poll::Ready(if self.listening { Ok(()) } else { self.look(cx) })
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
