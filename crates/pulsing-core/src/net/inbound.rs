//! Turning frames of a link into messages, and handing them to its role.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::AsyncRead;
use tokio::sync::watch;

use super::landing::Landing;
use super::outbox::SMALL;
use super::reader::{FrameReader, Head};
use super::wire::{AcceptedHeader, CallHeader, CreditHeader, ErrorHeader, Kind, RefHeader, ReplyHeader, decode};
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

/// How far the small lane got: it counts there, and the bulk lane waits for it.
enum Progress {
    Small(watch::Sender<u64>),
    Bulk(watch::Receiver<u64>),
}

impl Reading {
    /// Readers of the two lanes, each a future that ends with its connection: `Ok` at a clean end, else what was wrong.
    pub fn lanes<S, B>(self, small: S, bulk: B) -> (impl Future<Output = Result<()>>, impl Future<Output = Result<()>>)
    where
        S: AsyncRead + Unpin,
        B: AsyncRead + Unpin,
    {
        let Self { max_message, metrics, role } = self;
        let (count, counted) = watch::channel(0);
        (
            read_lane(small, max_message, Arc::clone(&metrics), Arc::clone(&role), Progress::Small(count)),
            read_lane(bulk, max_message, metrics, role, Progress::Bulk(counted)),
        )
    }
}

impl Progress {
    /// An ordered frame was handled.
    fn step(&self) {
        if let Self::Small(count) = self {
            count.send_modify(|n| *n += 1);
        }
    }
    /// Waits until `after` ordered frames of the small lane were handled.
    async fn wait(&mut self, after: u64) -> Result<()> {
        if let Self::Bulk(counted) = self {
            counted.wait_for(|n| *n >= after).await.map_err(|_| Error::Protocol("the small lane ended".into()))?;
        }
        Ok(())
    }
}

async fn read_lane(
    io: impl AsyncRead + Unpin,
    max_message: u64,
    metrics: Arc<Metrics>,
    role: Arc<dyn Role>,
    mut progress: Progress,
) -> Result<()> {
    let mut reader = match &progress {
        Progress::Small(_) => FrameReader::new(io),
        Progress::Bulk(_) => FrameReader::bulk(io),
    };
    let mut partials: HashMap<u64, Partial> = HashMap::new();
    // Messages that are too large, with what is still to come of them.
    let mut passed: HashMap<u64, u64> = HashMap::new();
    let mut counted = 0;
    while let Some(Head { kind, header, body }) = reader.next().await? {
        let with_payload = match kind {
            Kind::Call => Some(Header::Call(decode(&header)?)),
            Kind::Value => Some(Header::Value(decode(&header)?)),
            Kind::Item => Some(Header::Item(decode(&header)?)),
            _ => None,
        };
        if let Some(header) = with_payload {
            let (segments, codec, id) = header.parts();
            let sizes = match checked_sizes(segments, max_message) {
                Err(error @ Error::TooLarge { size, .. }) => {
                    // One message costs its own call and no other: it is passed over, never held.
                    let left = size.checked_sub(body as u64).filter(|left| *left == 0 || id != 0);
                    let left = left.ok_or_else(|| Error::Protocol(format!("body of {body} bytes for {size}")))?;
                    progress.wait(header.after()).await?;
                    Arc::clone(&role).inbound(header.refused(error))?;
                    progress.step();
                    reader.skip(body).await?;
                    if left > 0 {
                        passed.insert(id, left);
                    } else if id != 0 {
                        role.acknowledge(id);
                    }
                    metrics.bytes_in.add(reader.read - counted);
                    counted = reader.read;
                    continue;
                }
                sizes => sizes?,
            };
            let total: usize = sizes.iter().sum();
            if body == total {
                let codec = codec_of(codec)?;
                let mut segments = Vec::with_capacity(sizes.len());
                for size in sizes {
                    segments.push(reader.take(size).await?);
                }
                progress.wait(header.after()).await?;
                Arc::clone(&role).inbound(header.into_inbound(payload(codec, segments)))?;
                progress.step();
                if id != 0 {
                    role.acknowledge(id);
                }
            } else if id != 0 && body < total {
                let segments = Vec::with_capacity(sizes.len());
                let mut partial = Partial { header, segments, sizes, filling: 0 };
                partial.fill(&mut reader, body).await?;
                if partials.insert(id, partial).is_some() {
                    return Err(Error::Protocol(format!("message {id} begun twice")));
                }
            } else {
                return Err(Error::Protocol(format!("body of {body} bytes for segments of {total}")));
            }
        } else if kind == Kind::Chunk {
            let RefHeader { id } = decode(&header)?;
            if let Some(left) = passed.remove(&id) {
                let left =
                    left.checked_sub(body as u64).ok_or_else(|| Error::Protocol("a message is too long".into()))?;
                reader.skip(body).await?;
                if left > 0 {
                    passed.insert(id, left);
                } else {
                    role.acknowledge(id);
                }
                metrics.bytes_in.add(reader.read - counted);
                counted = reader.read;
                continue;
            }
            let Some(mut partial) = partials.remove(&id) else {
                return Err(Error::Protocol(format!("chunk of unknown message {id}")));
            };
            partial.fill(&mut reader, body).await?;
            if partial.is_complete() {
                let codec = codec_of(partial.header.parts().1)?;
                let segments = partial.segments.into_iter().map(Landing::freeze).collect();
                progress.wait(partial.header.after()).await?;
                Arc::clone(&role).inbound(partial.header.into_inbound(payload(codec, segments)))?;
                role.acknowledge(id);
            } else {
                partials.insert(id, partial);
            }
        } else if kind == Kind::Abort {
            reader.skip(body).await?;
            let RefHeader { id } = decode(&header)?;
            partials.remove(&id);
            passed.remove(&id);
        } else {
            reader.skip(body).await?;
            let reference = || decode::<RefHeader>(&header).map(|h| h.id);
            let message = match kind {
                Kind::Error => {
                    let header: ErrorHeader = decode(&header)?;
                    Inbound::Error(header.call, header.into_error())
                }
                Kind::StreamStart => Inbound::StreamStart(reference()?),
                Kind::End => Inbound::End(reference()?),
                Kind::Credit => Inbound::Credit(decode(&header)?),
                Kind::Cancel => Inbound::Cancel(reference()?),
                Kind::Accepted => Inbound::Accepted(decode(&header)?),
                Kind::Arrived => Inbound::Arrived(reference()?),
                other => return Err(Error::Protocol(format!("{other:?} frame on a call link"))),
            };
            let ordered = matches!(message, Inbound::Error(..) | Inbound::StreamStart(_) | Inbound::End(_));
            Arc::clone(&role).inbound(message)?;
            if ordered {
                progress.step();
            }
        }
        metrics.bytes_in.add(reader.read - counted);
        counted = reader.read;
        if body > SMALL {
            // As in the outbox: a socket that always has more must not keep this thread from the small lanes.
            tokio::task::yield_now().await;
        }
    }
    Ok(())
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
    let total = segments.iter().try_fold(0u64, |sum, s| sum.checked_add(*s));
    match total {
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
