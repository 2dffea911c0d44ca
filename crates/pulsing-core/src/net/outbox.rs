//! Sending on a link: small frames on one connection, large messages in interleaved chunks on another.
//!
//! Order (R2): messages of one key (a sender-receiver pair, or the events of one call) must arrive in order although the two
//! connections race. A key that has a large message under way sends everything through the bulk lane, behind it, until the
//! peer says that it arrived; other keys are not held up. A bulk message carries the number of ordered frames that left on
//! the small lane before it, and the receiver handles it after those.
//!
//! A large message whose call is given up goes no further: its memory is its owner's again, and the lane is free.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::{Buf, Bytes};
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::lane::{self, Frame, Outlet};
use super::wire::{Kind, RefHeader, encode};
use crate::id::ActorId;
use crate::observe::Metrics;
use crate::payload::Payload;

/// Messages up to this many bytes travel whole on the small lane.
pub const SMALL: usize = 64 << 10;
/// Larger ones in pieces of this many bytes, one piece of each message in turn.
const CHUNK: usize = 256 << 10;

/// What must stay in order among itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// Calls of one sender to one actor.
    Pair(Option<ActorId>, ActorId),
    /// Reply events of one call.
    Call(u64),
}

struct BulkMessage {
    key: Key,
    call: u64,
    id: u64,
    frame: Bytes,
    first: usize,
    segments: VecDeque<Bytes>,
    left: usize,
}

impl BulkMessage {
    /// A frame without a body.
    fn bare(key: Key, frame: Bytes) -> Self {
        Self { key, call: 0, id: 0, frame, first: 0, segments: VecDeque::new(), left: 0 }
    }
}

enum Bulk {
    Message(BulkMessage),
    /// Messages of this call are no longer wanted.
    Abandon(u64),
}

#[derive(Default)]
struct Order {
    next: u64,
    small_sent: u64,
    outstanding: HashMap<Key, u32>,
    messages: HashMap<u64, Key>,
}

/// The sending side of a link; dropping it ends its writers once they have sent what is queued.
pub struct Outbox {
    small: lane::Sender,
    bulk: mpsc::UnboundedSender<Bulk>,
    order: Arc<Mutex<Order>>,
}

/// The queue ends that the two writer tasks drain.
pub struct Queues {
    small: lane::Receiver,
    bulk: mpsc::UnboundedReceiver<Bulk>,
    order: Arc<Mutex<Order>>,
}

impl Outbox {
    /// An outbox and the queues to be written out.
    pub fn new() -> (Self, Queues) {
        let (small, small_rx) = lane::lane();
        let (bulk, bulk_rx) = mpsc::unbounded_channel();
        let order = Arc::new(Mutex::default());
        (Self { small, bulk, order: Arc::clone(&order) }, Queues { small: small_rx, bulk: bulk_rx, order })
    }

    /// Sends a message of `call` that has a payload. `header` is told the message number (0 = whole in one frame) and how
    /// many small frames came before.
    pub fn send<M: Message>(
        &self,
        key: Key,
        call: u64,
        kind: Kind,
        payload: Payload,
        header: impl FnOnce(u64, u64) -> M,
    ) {
        let total = payload.len();
        // The lock is held over the push: two senders of one key must queue in the order they were numbered.
        let mut order = self.order.lock();
        if total <= SMALL && !order.outstanding.contains_key(&key) {
            order.small_sent += 1;
            let head = encode(kind, &header(0, 0), total);
            self.small.send(Frame::new(head, payload));
            return;
        }
        order.next += 1;
        let id = order.next;
        *order.outstanding.entry(key).or_default() += 1;
        order.messages.insert(id, key);
        let first = total.min(CHUNK);
        let frame = encode(kind, &header(id, order.small_sent), first);
        let segments = std::iter::once(payload.head).chain(payload.buffers).filter(|s| !s.is_empty()).collect();
        let _ = self.bulk.send(Bulk::Message(BulkMessage { key, call, id, frame, first, segments, left: total }));
    }

    /// Sends a frame without a body, after everything of its key.
    pub fn send_after(&self, key: Key, kind: Kind, header: &impl Message) {
        let mut order = self.order.lock();
        let head = encode(kind, header, 0);
        if order.outstanding.contains_key(&key) {
            let _ = self.bulk.send(Bulk::Message(BulkMessage::bare(key, head)));
        } else {
            order.small_sent += 1;
            self.small.send(Frame::bare(head));
        }
    }

    /// Tells the peer that `call`, one of `key`'s, is given up.
    ///
    /// At once, so that a handler ends although its caller still sends something large. And where the call itself may be on its
    /// way through the bulk lane, once more behind it: the first one overtook it and meant nothing to the peer, whose
    /// handler would run on for nobody (R5).
    pub fn cancel(&self, key: Key, call: u64) {
        let order = self.order.lock();
        let frame = encode(Kind::Cancel, &RefHeader { id: call }, 0);
        // Most calls have nothing under way there.
        if !order.messages.is_empty() {
            let _ = self.bulk.send(Bulk::Abandon(call));
        }
        if order.outstanding.contains_key(&key) {
            let _ = self.bulk.send(Bulk::Message(BulkMessage::bare(key, frame.clone())));
        }
        self.small.send(Frame::bare(frame));
    }

    /// Sends a frame without a body at once: credit and receipts are ordered with nothing.
    pub fn send_now(&self, kind: Kind, header: &impl Message) {
        self.small.send(Frame::bare(encode(kind, header, 0)));
    }

    /// Large messages of `call` go no further.
    pub fn abandon(&self, call: u64) {
        // Most calls have none under way.
        if !self.order.lock().messages.is_empty() {
            let _ = self.bulk.send(Bulk::Abandon(call));
        }
    }

    /// The peer has this bulk message whole.
    pub fn arrived(&self, message: u64) {
        self.order.lock().arrived(message);
    }
}

impl Order {
    /// This message holds up its key no longer.
    fn arrived(&mut self, message: u64) {
        let Some(key) = self.messages.remove(&message) else { return };
        if let Some(count) = self.outstanding.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.outstanding.remove(&key);
            }
        }
    }
}

impl Queues {
    /// Splits into the small and the bulk writer, each a future that ends with its queue or its connection.
    pub fn writers<B>(
        self,
        small: Outlet,
        bulk: B,
        metrics: Arc<Metrics>,
    ) -> (impl Future<Output = std::io::Result<()>>, impl Future<Output = std::io::Result<()>>)
    where
        B: AsyncWrite + Unpin + Send,
    {
        (self.small.write_to(small, Arc::clone(&metrics)), write_bulk(bulk, self.bulk, self.order, metrics))
    }
}

async fn write_bulk(
    mut io: impl AsyncWrite + Unpin,
    mut queue: mpsc::UnboundedReceiver<Bulk>,
    order: Arc<Mutex<Order>>,
    metrics: Arc<Metrics>,
) -> std::io::Result<()> {
    let mut turns = Turns::default();
    loop {
        let next = if turns.keys.is_empty() { queue.recv().await } else { queue.try_recv().ok() };
        match next {
            Some(Bulk::Message(message)) => {
                turns.push(message);
                continue;
            }
            Some(Bulk::Abandon(call)) => {
                for BulkMessage { id, frame, .. } in turns.abandon(call) {
                    // The peer has begun to put together what was begun.
                    if frame.is_empty() {
                        let abort = encode(Kind::Abort, &RefHeader { id }, 0);
                        io.write_all(&abort).await?;
                        io.flush().await?;
                        metrics.bytes_out.add(abort.len() as u64);
                    }
                    order.lock().arrived(id);
                }
                continue;
            }
            None => {}
        }
        let Some(message) = turns.next() else { break };
        write_piece(&mut io, message, &metrics).await?;
        turns.done();
        // A socket that takes everything would keep this thread: tokio's own budget counts operations, and these are long.
        tokio::task::yield_now().await;
    }
    io.shutdown().await
}

/// Messages under way: those of one key one after the other, a piece of each key's first in turn.
#[derive(Default)]
struct Turns {
    waiting: HashMap<Key, VecDeque<BulkMessage>>,
    keys: VecDeque<Key>,
}

impl Turns {
    fn push(&mut self, message: BulkMessage) {
        let key = message.key;
        let queue = self.waiting.entry(key).or_default();
        queue.push_back(message);
        if queue.len() == 1 {
            self.keys.push_back(key);
        }
    }
    /// The message whose turn it is.
    fn next(&mut self) -> Option<&mut BulkMessage> {
        self.waiting.get_mut(self.keys.front()?)?.front_mut()
    }
    /// A piece of it was sent: the next key's turn.
    fn done(&mut self) {
        let Some(key) = self.keys.pop_front() else { return };
        if let Some(queue) = self.waiting.get_mut(&key) {
            if queue.front().is_some_and(|message| message.left == 0) {
                queue.pop_front();
            }
            if queue.is_empty() {
                self.waiting.remove(&key);
            } else {
                self.keys.push_back(key);
            }
        }
    }
    /// Takes out the messages of a call.
    fn abandon(&mut self, call: u64) -> Vec<BulkMessage> {
        let mut out = Vec::new();
        for queue in self.waiting.values_mut() {
            let (gone, stay) = queue.drain(..).partition(|message| message.call == call);
            *queue = stay;
            out.extend::<VecDeque<_>>(gone);
        }
        let waiting = &mut self.waiting;
        waiting.retain(|_, queue| !queue.is_empty());
        self.keys.retain(|key| waiting.contains_key(key));
        out
    }
}

async fn write_piece(
    io: &mut (impl AsyncWrite + Unpin),
    message: &mut BulkMessage,
    metrics: &Metrics,
) -> std::io::Result<()> {
    let begun = message.frame.is_empty();
    let mut size = if begun { message.left.min(CHUNK) } else { message.first };
    let frame = std::mem::take(&mut message.frame);
    let mut head = if begun { encode(Kind::Chunk, &RefHeader { id: message.id }, size) } else { frame };
    metrics.bytes_out.add((head.len() + size) as u64);
    message.left -= size;
    while size > 0 {
        let Some(segment) = message.segments.front_mut() else {
            debug_assert!(false, "segments hold what `left` counts");
            break;
        };
        let mut piece = segment.split_to(size.min(segment.len()));
        size -= piece.len();
        if segment.is_empty() {
            message.segments.pop_front();
        }
        // The head of the frame goes out with the first part of its body.
        io.write_all_buf(&mut (&mut head).chain(&mut piece)).await?;
    }
    io.write_all(&head).await?;
    io.flush().await
}
