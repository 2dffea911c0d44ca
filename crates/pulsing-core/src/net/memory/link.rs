//! One connection between two hosts: an ordered pipe in each direction.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::faults::Faults;

/// Bytes under way in one direction before a writer waits, as socket buffers would hold.
const CAPACITY: usize = 256 << 10;
/// Longest segment: one write of the runtime is one or a few of them.
const SEGMENT: usize = 64 << 10;

/// Whether bytes move.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stall {
    /// They do.
    No,
    /// Not since this moment: the link may give up.
    Cut(Instant),
    /// Not: a host is stopped, but its kernel keeps the link.
    Paused,
}

/// One life of one host.
pub(super) type End = (IpAddr, u64);

/// What both ends share. End 0 dialled; it writes pipe 0 and reads pipe 1.
pub(super) struct Link {
    ends: [End; 2],
    state: Mutex<State>,
}

struct State {
    pipes: [Pipe; 2],
    /// Why an end can use the connection no more.
    broken: [Option<io::ErrorKind>; 2],
    /// An end was killed; the other learns of it when bytes move.
    reset: bool,
}

struct Pipe {
    segments: VecDeque<Segment>,
    waiting: usize,
    /// When the segment before the next one arrives.
    last: Instant,
    stall: Stall,
    faults: Faults,
    rng: StdRng,
    reader: Option<Waker>,
    writer: Option<Waker>,
    reader_gone: bool,
}

struct Segment {
    at: Instant,
    /// Sent into a cut.
    held: bool,
    /// `None`: the end of the stream.
    data: Option<Bytes>,
}

impl Pipe {
    fn new(rng: StdRng) -> Self {
        Self {
            segments: VecDeque::new(),
            waiting: 0,
            last: Instant::now(),
            stall: Stall::No,
            faults: Faults::default(),
            rng,
            reader: None,
            writer: None,
            reader_gone: false,
        }
    }

    /// False when the link gives up on it.
    fn push(&mut self, data: Option<Bytes>) -> bool {
        let takes = self.faults.segment(&mut self.rng);
        self.last = self.last.max(Instant::now() + takes);
        self.waiting += data.as_ref().map_or(0, Bytes::len);
        let held = matches!(self.stall, Stall::Cut(_));
        self.segments.push_back(Segment { at: self.last, held, data });
        wake(&mut self.reader);
        takes <= self.faults.break_after
    }

    /// Whether the next segment has arrived; `None` without one.
    fn arrived(&self, now: Instant) -> Option<bool> {
        let first = self.segments.front()?;
        Some(match self.stall {
            Stall::No => first.at <= now,
            // What had arrived before is there still.
            Stall::Cut(since) => !first.held && first.at <= since,
            Stall::Paused => false,
        })
    }

    /// Bytes move again: what was under way is sent anew.
    fn resume(&mut self, since: Instant) {
        let now = Instant::now();
        // What had arrived before the cut is there; the rest follows its first segment.
        if let Some(late) = self.segments.iter().position(|segment| segment.held || segment.at > since) {
            let sent = self.segments[late].at.max(since);
            let mut at = (sent + Faults::resent_after(now.saturating_duration_since(sent))).max(now);
            for segment in self.segments.iter_mut().skip(late) {
                at = at.max(segment.at);
                (segment.at, segment.held) = (at, false);
            }
            self.last = self.last.max(at);
        }
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

impl State {
    fn wake_all(&mut self) {
        for pipe in &mut self.pipes {
            wake(&mut pipe.reader);
            wake(&mut pipe.writer);
        }
    }

    fn break_all(&mut self, kind: io::ErrorKind) {
        for broken in &mut self.broken {
            broken.get_or_insert(kind);
        }
        self.wake_all();
    }

    fn moves(&self) -> bool {
        self.pipes.iter().all(|pipe| pipe.stall == Stall::No)
    }

    fn check(&self, end: usize) -> io::Result<()> {
        self.broken[end].map_or(Ok(()), |kind| Err(kind.into()))
    }
}

impl Link {
    pub(super) fn new(ends: [End; 2], [forth, back]: [StdRng; 2]) -> Arc<Self> {
        let state = State { pipes: [Pipe::new(forth), Pipe::new(back)], broken: [None; 2], reset: false };
        Arc::new(Self { ends, state: Mutex::new(state) })
    }

    /// The dialler's and the listener's stream. Once.
    pub(super) fn ends(self: &Arc<Self>) -> (Stream, Stream) {
        let stream = |end| Stream {
            read: ReadHalf { link: Arc::clone(self), end, timer: None },
            write: WriteHalf { link: Arc::clone(self), end, closed: false },
        };
        (stream(0), stream(1))
    }

    /// Takes over what the network says of each direction.
    pub(super) fn update(&self, says: impl Fn(IpAddr, IpAddr) -> (Stall, Faults)) {
        let mut state = self.state.lock();
        for way in 0..2 {
            let (stall, faults) = says(self.ends[way].0, self.ends[1 - way].0);
            let pipe = &mut state.pipes[way];
            if let (Stall::Cut(since), Stall::No | Stall::Paused) = (pipe.stall, stall) {
                pipe.resume(since);
            }
            pipe.stall = stall;
            pipe.faults = faults;
        }
        if state.reset && state.moves() {
            state.break_all(io::ErrorKind::ConnectionReset);
        }
        // Readers look again at when their next segment arrives.
        state.wake_all();
    }

    /// One life of a host has ended: its end breaks at once, the other's when it can learn of it.
    pub(super) fn reset(&self, ip: IpAddr, generation: u64) {
        let mut state = self.state.lock();
        for end in 0..2 {
            if self.ends[end] == (ip, generation) {
                state.reset = true;
                state.broken[end].get_or_insert(io::ErrorKind::ConnectionReset);
            }
        }
        if state.reset {
            if state.moves() {
                state.break_all(io::ErrorKind::ConnectionReset);
            }
            state.wake_all();
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Stream {
    read: ReadHalf,
    write: WriteHalf,
}

/// Its reading half.
pub struct ReadHalf {
    link: Arc<Link>,
    end: usize,
    timer: Option<Pin<Box<Sleep>>>,
}

/// Its writing half.
pub struct WriteHalf {
    link: Arc<Link>,
    end: usize,
    closed: bool,
}

impl std::fmt::Debug for ReadHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReadHalf({})", self.link.ends[self.end].0)
    }
}

impl std::fmt::Debug for WriteHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WriteHalf({})", self.link.ends[self.end].0)
    }
}

impl Stream {
    /// Splits for a reader and a writer task.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// Waits for the first byte and leaves it where it is.
    pub async fn peek(&mut self) -> io::Result<Option<u8>> {
        let mut first = None;
        std::future::poll_fn(|cx| {
            self.read.poll_with(cx, |pipe| {
                first = pipe.segments.front().and_then(|s| s.data.as_ref()).and_then(|data| data.first().copied());
            })
        })
        .await?;
        Ok(first)
    }
}

impl ReadHalf {
    /// Runs `take` once the next segment has arrived.
    fn poll_with(&mut self, cx: &mut Context<'_>, take: impl FnOnce(&mut Pipe)) -> Poll<io::Result<()>> {
        let link = Arc::clone(&self.link);
        loop {
            let (wait, gives_up) = {
                let mut state = link.state.lock();
                state.check(self.end)?;
                let pipe = &mut state.pipes[1 - self.end];
                if pipe.arrived(Instant::now()) == Some(true) {
                    take(pipe);
                    return Poll::Ready(Ok(()));
                }
                pipe.reader = Some(cx.waker().clone());
                match (pipe.stall, pipe.segments.front()) {
                    (Stall::Cut(since), _) => (since + pipe.faults.break_after, true),
                    (Stall::No, Some(first)) => (first.at, false),
                    (Stall::No, None) | (Stall::Paused, _) => return Poll::Pending,
                }
            };
            // Outside the lock: a timer that fires wakes tasks.
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(wait)));
            if timer.deadline() != wait {
                timer.as_mut().reset(wait);
            }
            ready!(timer.as_mut().poll(cx));
            self.timer = None;
            if gives_up {
                link.state.lock().break_all(io::ErrorKind::TimedOut);
            }
        }
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_with(cx, |pipe| {
            let now = Instant::now();
            // Everything that has arrived, as a socket would give it.
            while buf.remaining() > 0 && pipe.arrived(now) == Some(true) {
                let Some(data) = pipe.segments.front_mut().and_then(|segment| segment.data.as_mut()) else { break };
                let n = data.len().min(buf.remaining());
                buf.put_slice(&data[..n]);
                data.advance(n);
                pipe.waiting -= n;
                if data.is_empty() {
                    pipe.segments.pop_front();
                }
            }
            wake(&mut pipe.writer);
        })
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.link.state.lock();
        state.check(self.end)?;
        let pipe = &mut state.pipes[self.end];
        if self.closed || (pipe.reader_gone && pipe.stall == Stall::No) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = CAPACITY.saturating_sub(pipe.waiting);
        if room == 0 {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let n = buf.len().min(room).min(SEGMENT);
        if n > 0 && !pipe.push(Some(Bytes::copy_from_slice(&buf[..n]))) {
            state.break_all(io::ErrorKind::TimedOut);
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Ready(Ok(n))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().close();
        Poll::Ready(Ok(()))
    }
}

impl WriteHalf {
    fn close(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        let mut state = self.link.state.lock();
        let pipe = &mut state.pipes[self.end];
        let _ = pipe.push(None);
    }
}

impl Drop for WriteHalf {
    fn drop(&mut self) {
        self.close();
    }
}

impl Drop for ReadHalf {
    fn drop(&mut self) {
        let mut state = self.link.state.lock();
        let pipe = &mut state.pipes[1 - self.end];
        pipe.reader_gone = true;
        wake(&mut pipe.writer);
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().read).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().write).poll_write(cx, buf)
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().write).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().write).poll_shutdown(cx)
    }
}
