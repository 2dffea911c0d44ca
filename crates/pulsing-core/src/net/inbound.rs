//! Turning frames of a link into messages, and handing them to its role.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncRead;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::landing::Landing;
use super::loan::{self, Returned};
use super::outbox::SMALL;
use super::reader::{FrameReader, Head, READ_CHUNK};
use super::socket::RecvHalf;
use super::wire::{
    AcceptedHeader, CallHeader, CreditHeader, ErrorHeader, FRAME_PREFIX, Kind, Prefix, RefHeader, ReplyHeader, decode,
    decode_prefix,
};
use crate::error::{Error, Result};
use crate::observe::Metrics;
use crate::payload::{Codec, Payload};

/// A message off a link, whole.
pub enum Inbound {
    /// A call for an actor here.
    Call(CallHeader, Payload),
    /// The single value of a call.
    Value(u64, Payload),
    /// An item of a stream.
    Item(u64, Payload),
    /// A call that is larger than this node takes; its payload was passed over.
    CallTooLarge(CallHeader, Error),
    /// An answer, or an item of a stream, that is.
    AnswerTooLarge(u64, Error),
    /// A call or stream failed.
    Error(u64, Error),
    /// A stream begins.
    StreamStart(u64),
    /// A stream is complete.
    End(u64),
    /// The caller takes more items.
    Credit(CreditHeader),
    /// The caller gave up.
    Cancel(u64),
    /// Tells found a place in their mailbox.
    Accepted(AcceptedHeader),
    /// The peer has our bulk message whole.
    Arrived(u64),
}

/// The caller's or the callee's side of a link.
pub trait Role: Send + Sync + 'static {
    /// Takes a message. Must not block.
    ///
    /// # Errors
    /// `Protocol` ends the link.
    fn inbound(self: Arc<Self>, message: Inbound) -> Result<()>;
    /// Tells the peer that its bulk message is here, after it was handled.
    fn acknowledge(&self, message: u64);
    /// The event loop that everything which arrives is for, lately: it may read the small lane itself.
    fn audience(&self) -> Option<Arc<dyn loan::Reader>> {
        None
    }
}

enum Header {
    Call(CallHeader),
    Value(ReplyHeader),
    Item(ReplyHeader),
}

impl Header {
    fn parts(&self) -> (&[u64], u32, u64) {
        match self {
            Self::Call(h) => (&h.segments, h.codec, h.message),
            Self::Value(h) | Self::Item(h) => (&h.segments, h.codec, h.message),
        }
    }
    fn after(&self) -> u64 {
        match self {
            Self::Call(h) => h.after,
            Self::Value(h) | Self::Item(h) => h.after,
        }
    }
    fn refused(self, error: Error) -> Inbound {
        match self {
            Self::Call(h) => Inbound::CallTooLarge(h, error),
            Self::Value(h) | Self::Item(h) => Inbound::AnswerTooLarge(h.call, error.of_an_answer()),
        }
    }
    fn into_inbound(self, payload: Payload) -> Inbound {
        match self {
            Self::Call(h) => Inbound::Call(h, payload),
            Self::Value(h) => Inbound::Value(h.call, payload),
            Self::Item(h) => Inbound::Item(h.call, payload),
        }
    }
}

/// A bulk message of which some chunks are still to come.
struct Partial {
    header: Header,
    segments: Vec<Landing>,
    sizes: Vec<usize>,
    filling: usize,
}

/// What the two lanes of a link are read with.
pub struct Reading {
    /// Largest message accepted, in bytes.
    pub max_message: u64,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Whom messages go to.
    pub role: Arc<dyn Role>,
}

/// What the small lane is read from.
pub enum Inlet<S> {
    /// A socket, which may be lent to an event loop.
    Socket(RecvHalf),
    /// What only a task can read.
    Stream(S),
}

impl Reading {
    /// Readers of the two lanes, each a future that ends with its connection: `Ok` at a clean end, else what was wrong.
    pub fn lanes<S, B>(
        self,
        small: Inlet<S>,
        bulk: B,
    ) -> (impl Future<Output = Result<()>>, impl Future<Output = Result<()>>)
    where
        S: AsyncRead + Unpin,
        B: AsyncRead + Unpin,
    {
        let Self { max_message, metrics, role } = self;
        let count = Arc::new(Count::default());
        let plain = Plain { max_message, metrics, role, count: Arc::clone(&count) };
        let small = {
            let plain = plain.clone();
            async move {
                // However it ends, the bulk lane waits for it no longer.
                let _ended = Ended(&plain.count);
                match small {
                    Inlet::Stream(stream) => read_small(FrameReader::new(stream), &plain).await,
                    Inlet::Socket(socket) => read_socket(socket, &plain).await,
                }
            }
        };
        (small, async move {
            let mut lane = Lane::new(FrameReader::bulk(bulk), &plain, true);
            while let Some(head) = lane.reader.next().await? {
                lane.frame(head).await?;
            }
            Ok(())
        })
    }
}

/// How many ordered frames of the small lane were handled: a message on the bulk lane waits for those before it.
#[derive(Default)]
struct Count {
    handled: AtomicU64,
    waiting: AtomicUsize,
    ended: AtomicBool,
    changed: Notify,
}

impl Count {
    fn step(&self) {
        self.handled.fetch_add(1, Ordering::SeqCst);
        // Hardly ever: a notification costs more than a small frame should.
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.changed.notify_waiters();
        }
    }
    /// Waits until `after` were handled.
    async fn wait(&self, after: u64) -> Result<()> {
        if self.handled.load(Ordering::SeqCst) >= after {
            return Ok(());
        }
        let _waiting = Waiting::new(&self.waiting);
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.handled.load(Ordering::SeqCst) >= after {
                return Ok(());
            }
            if self.ended.load(Ordering::SeqCst) {
                return Err(Error::Protocol("the small lane ended".into()));
            }
            changed.await;
        }
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Ended<'a>(&'a Count);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }
}

/// Why the next frame of a lane cannot be handled on the spot.
pub enum Stop {
    /// It is not whole.
    Hungry,
    /// It takes more than a look: a task is to read it, of which the head may have been read.
    Odd(Option<Head>),
}

/// Handles small frames that are whole, on whatever thread has them.
#[derive(Clone)]
pub struct Plain {
    max_message: u64,
    metrics: Arc<Metrics>,
    role: Arc<dyn Role>,
    count: Arc<Count>,
}

impl Plain {
    /// Notes that `n` bytes arrived.
    pub fn count(&self, n: usize) {
        self.metrics.bytes_in.add(n as u64);
    }
    /// See [`Role::audience`].
    pub fn audience(&self) -> Option<Arc<dyn loan::Reader>> {
        self.role.audience()
    }

    /// Handles what stands in `buffer`, in order, up to the first frame that it cannot.
    ///
    /// # Errors
    /// `Protocol`: nothing of what follows can be trusted.
    pub fn frames(&self, buffer: &mut BytesMut) -> Result<Stop> {
        while let Some(raw) = buffer.first_chunk::<FRAME_PREFIX>() {
            let Prefix { kind, header, body } = decode_prefix(*raw)?;
            let Some(kind) = kind.filter(|_| body <= READ_CHUNK) else { return Ok(Stop::Odd(None)) };
            if buffer.len() < FRAME_PREFIX + header + body {
                break;
            }
            buffer.advance(FRAME_PREFIX);
            let header = buffer.split_to(header).freeze();
            let parsed = match kind {
                Kind::Call => Header::Call(decode(&header)?),
                Kind::Value => Header::Value(decode(&header)?),
                Kind::Item => Header::Item(decode(&header)?),
                Kind::Chunk | Kind::Abort => return Ok(Stop::Odd(Some(Head { kind, header, body }))),
                _ => {
                    buffer.advance(body);
                    self.signal(kind, &header)?;
                    continue;
                }
            };
            let (segments, codec, id) = parsed.parts();
            // Whole and of a size that is taken: a body of the length that is announced is not too large.
            if id != 0 || segments.is_empty() || sum(segments) != Some(body as u64) || body as u64 > self.max_message {
                return Ok(Stop::Odd(Some(Head { kind, header, body })));
            }
            let codec = codec_of(codec)?;
            let mut parts = segments.iter().map(|size| buffer.split_to(*size as usize).freeze());
            let payload = Payload { codec, head: parts.next().unwrap_or_default(), buffers: parts.collect() };
            Arc::clone(&self.role).inbound(parsed.into_inbound(payload))?;
            self.count.step();
        }
        Ok(Stop::Hungry)
    }

    /// Handles a frame without a body.
    fn signal(&self, kind: Kind, header: &Bytes) -> Result<()> {
        let reference = || decode::<RefHeader>(header).map(|h| h.id);
        let message = match kind {
            Kind::Error => {
                let header: ErrorHeader = decode(header)?;
                Inbound::Error(header.call, header.into_error())
            }
            Kind::StreamStart => Inbound::StreamStart(reference()?),
            Kind::End => Inbound::End(reference()?),
            Kind::Credit => Inbound::Credit(decode(header)?),
            Kind::Cancel => Inbound::Cancel(reference()?),
            Kind::Accepted => Inbound::Accepted(decode(header)?),
            Kind::Arrived => Inbound::Arrived(reference()?),
            other => return Err(Error::Protocol(format!("{other:?} frame on a call link"))),
        };
        let ordered = matches!(message, Inbound::Error(..) | Inbound::StreamStart(_) | Inbound::End(_));
        Arc::clone(&self.role).inbound(message)?;
        if ordered {
            self.count.step();
        }
        Ok(())
    }
}

/// Reads a small lane from a socket, in turn with those to whom it is lent.
async fn read_socket(RecvHalf(mut socket): RecvHalf, plain: &Plain) -> Result<()> {
    let lost = |e: std::io::Error| Error::Protocol(e.to_string());
    let mut lane = Lane::new(FrameReader::new(TcpStream::from_std(socket).map_err(lost)?), plain, false);
    while lane.small(true).await? {
        let Some(reader) = plain.audience() else { continue };
        let (stream, buffer) = lane.reader.into_parts();
        socket = stream.into_std().map_err(lost)?;
        let back = loan::lend(reader, socket, buffer, plain.clone()).await?;
        let Returned { socket, buffer, head } = back;
        let reader = FrameReader::with(TcpStream::from_std(socket).map_err(lost)?, buffer);
        lane = Lane { reader, counted: 0, ..lane };
        if let Some(head) = head {
            lane.frame(head).await?;
        }
    }
    Ok(())
}

/// Reads a small lane from a stream.
async fn read_small(reader: FrameReader<impl AsyncRead + Unpin>, plain: &Plain) -> Result<()> {
    let mut lane = Lane::new(reader, plain, false);
    while lane.small(false).await? {}
    Ok(())
}

/// A lane as its task reads it.
struct Lane<'a, R> {
    reader: FrameReader<R>,
    plain: &'a Plain,
    bulk: bool,
    partials: HashMap<u64, Partial>,
    /// Messages that are too large, with what is still to come of them.
    passed: HashMap<u64, u64>,
    counted: u64,
}

impl<'a, R: AsyncRead + Unpin> Lane<'a, R> {
    fn new(reader: FrameReader<R>, plain: &'a Plain, bulk: bool) -> Self {
        Self { reader, plain, bulk, partials: HashMap::new(), passed: HashMap::new(), counted: 0 }
    }

    /// Reads and handles frames. True: the lane is to be lent; false: it has ended.
    async fn small(&mut self, lending: bool) -> Result<bool> {
        // Not before something was read: who would not take it, or gave it back, is not asked again for nothing.
        let mut read = false;
        loop {
            let head = match self.plain.frames(self.reader.buffer())? {
                Stop::Odd(Some(head)) => head,
                Stop::Odd(None) => match self.reader.next().await? {
                    Some(head) => head,
                    None => return Ok(false),
                },
                Stop::Hungry => {
                    let whole = self.partials.is_empty() && self.passed.is_empty();
                    if lending && read && whole && self.plain.audience().is_some() {
                        return Ok(true);
                    }
                    read = true;
                    let more = self.reader.more().await?;
                    self.count();
                    if more {
                        continue;
                    }
                    return Ok(false);
                }
            };
            self.frame(head).await?;
        }
    }

    /// Handles one frame of any kind and size.
    async fn frame(&mut self, head: Head) -> Result<()> {
        let Head { kind, header, body } = head;
        let with_payload = match kind {
            Kind::Call => Some(Header::Call(decode(&header)?)),
            Kind::Value => Some(Header::Value(decode(&header)?)),
            Kind::Item => Some(Header::Item(decode(&header)?)),
            _ => None,
        };
        if let Some(header) = with_payload {
            self.message(header, body).await?;
        } else if kind == Kind::Chunk {
            let RefHeader { id } = decode(&header)?;
            self.chunk(id, body).await?;
        } else if kind == Kind::Abort {
            self.reader.skip(body).await?;
            let RefHeader { id } = decode(&header)?;
            self.partials.remove(&id);
            self.passed.remove(&id);
        } else {
            self.reader.skip(body).await?;
            self.plain.signal(kind, &header)?;
        }
        self.count();
        if body > SMALL {
            // As in the outbox: a socket that always has more must not keep this thread from the small lanes.
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    async fn message(&mut self, header: Header, body: usize) -> Result<()> {
        let (segments, codec, id) = header.parts();
        let sizes = match checked_sizes(segments, self.plain.max_message) {
            Err(error @ Error::TooLarge { size, .. }) => {
                // One message costs its own call and no other: it is passed over, never held.
                let left = size.checked_sub(body as u64).filter(|left| *left == 0 || id != 0);
                let left = left.ok_or_else(|| Error::Protocol(format!("body of {body} bytes for {size}")))?;
                self.wait(header.after()).await?;
                Arc::clone(&self.plain.role).inbound(header.refused(error))?;
                self.step();
                self.reader.skip(body).await?;
                if left > 0 {
                    self.passed.insert(id, left);
                } else if id != 0 {
                    self.plain.role.acknowledge(id);
                }
                return Ok(());
            }
            sizes => sizes?,
        };
        let total: usize = sizes.iter().sum();
        if body == total {
            let codec = codec_of(codec)?;
            let mut segments = Vec::with_capacity(sizes.len());
            for size in sizes {
                segments.push(self.reader.take(size).await?);
            }
            self.wait(header.after()).await?;
            Arc::clone(&self.plain.role).inbound(header.into_inbound(payload(codec, segments)))?;
            self.step();
            if id != 0 {
                self.plain.role.acknowledge(id);
            }
        } else if id != 0 && body < total {
            let segments = Vec::with_capacity(sizes.len());
            let mut partial = Partial { header, segments, sizes, filling: 0 };
            partial.fill(&mut self.reader, body).await?;
            if self.partials.insert(id, partial).is_some() {
                return Err(Error::Protocol(format!("message {id} begun twice")));
            }
        } else {
            return Err(Error::Protocol(format!("body of {body} bytes for segments of {total}")));
        }
        Ok(())
    }

    async fn chunk(&mut self, id: u64, body: usize) -> Result<()> {
        if let Some(left) = self.passed.remove(&id) {
            let left = left.checked_sub(body as u64).ok_or_else(|| Error::Protocol("a message is too long".into()))?;
            self.reader.skip(body).await?;
            if left > 0 {
                self.passed.insert(id, left);
            } else {
                self.plain.role.acknowledge(id);
            }
            return Ok(());
        }
        let Some(mut partial) = self.partials.remove(&id) else {
            return Err(Error::Protocol(format!("chunk of unknown message {id}")));
        };
        partial.fill(&mut self.reader, body).await?;
        if partial.is_complete() {
            let codec = codec_of(partial.header.parts().1)?;
            let segments = partial.segments.into_iter().map(Landing::freeze).collect();
            self.wait(partial.header.after()).await?;
            Arc::clone(&self.plain.role).inbound(partial.header.into_inbound(payload(codec, segments)))?;
            self.plain.role.acknowledge(id);
        } else {
            self.partials.insert(id, partial);
        }
        Ok(())
    }

    fn step(&self) {
        if !self.bulk {
            self.plain.count.step();
        }
    }

    async fn wait(&mut self, after: u64) -> Result<()> {
        if self.bulk { self.plain.count.wait(after).await } else { Ok(()) }
    }

    fn count(&mut self) {
        self.plain.count((self.reader.read - self.counted) as usize);
        self.counted = self.reader.read;
    }
}

impl Partial {
    async fn fill(&mut self, reader: &mut FrameReader<impl AsyncRead + Unpin>, mut body: usize) -> Result<()> {
        while body > 0 {
            let Some(size) = self.sizes.get(self.filling).copied() else {
                return Err(Error::Protocol("a message is longer than announced".into()));
            };
            if self.segments.len() == self.filling {
                self.segments.push(Landing::new(size)?);
            }
            let segment = &mut self.segments[self.filling];
            let n = body.min(size - segment.len());
            reader.land(segment, n).await?;
            body -= n;
            self.advance()?;
        }
        Ok(())
    }
    /// Steps over full (and empty) segments.
    fn advance(&mut self) -> Result<()> {
        while let Some(size) = self.sizes.get(self.filling) {
            if self.segments.len() == self.filling {
                if *size > 0 {
                    break;
                }
                self.segments.push(Landing::new(0)?);
            }
            if !self.segments[self.filling].is_full() {
                break;
            }
            self.filling += 1;
        }
        Ok(())
    }
    fn is_complete(&self) -> bool {
        self.filling == self.sizes.len()
    }
}

fn checked_sizes(segments: &[u64], max_message: u64) -> Result<Vec<usize>> {
    match sum(segments) {
        Some(total) if total <= max_message && !segments.is_empty() => {
            Ok(segments.iter().map(|s| *s as usize).collect())
        }
        Some(total) if total > max_message => Err(Error::TooLarge {
            what: "a message that arrived".into(),
            size: total,
            limit: max_message,
            setting: "max_message".into(),
        }),
        _ => Err(Error::Protocol("a message without segments".into())),
    }
}

fn sum(segments: &[u64]) -> Option<u64> {
    segments.iter().try_fold(0u64, |sum, size| sum.checked_add(*size))
}

fn codec_of(code: u32) -> Result<Codec> {
    u8::try_from(code).map(Codec).map_err(|_| Error::Protocol(format!("codec {code}")))
}

fn payload(codec: Codec, segments: Vec<Bytes>) -> Payload {
    let mut segments = segments.into_iter();
    let head = segments.next().unwrap_or_default();
    Payload { codec, head, buffers: segments.collect() }
}

/// Segment lengths as headers carry them.
pub fn segments_of(payload: &Payload) -> Vec<u64> {
    std::iter::once(&payload.head).chain(&payload.buffers).map(|s| s.len() as u64).collect()
}
