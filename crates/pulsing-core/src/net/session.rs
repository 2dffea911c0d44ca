//! The callee's side of a link: calls from one node to the actors here.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::conn::Conn;
use super::deadline::{DeadlineKey, Deadlines};
use super::handshake::Lane;
use super::inbound::{Inbound, Reading, Role, segments_of};
use super::loan::{Audience, Reader};
use super::numbers::ByNumber;
use super::outbox::{Key, Outbox};
use super::tells::TELL_WINDOW;
use super::wire::{AcceptedHeader, CallHeader, ErrorHeader, Kind, RefHeader, ReplyHeader};
use crate::call::{Call, CancelSignal, Mode, ReplyEvent, ReplySink, Responder};
use crate::cluster::Identity;
use crate::error::{Error, Result};
use crate::id::ActorId;
use crate::moment::from_now;
use crate::observe::Metrics;
use crate::payload::Payload;
use crate::stream::Credit;

/// Tells that found a place are told of after this long at the latest.
const ACCEPTED_AFTER: Duration = Duration::from_millis(200);
/// How long the second lane of a link may take to follow the first.
const PAIRING_TIMEOUT: Duration = Duration::from_secs(10);

/// Takes calls off links.
pub trait Deliver: Send + Sync + 'static {
    /// Hands a call to its actor, or fails it. Returns the event loop of an actor that has one.
    fn deliver(&self, call: Call) -> Option<Arc<dyn Reader>>;
}

struct Inflight {
    cancel: CancelSignal,
    credit: Arc<Credit>,
    deadline: Option<DeadlineKey>,
}

/// The callee's side of one link.
pub struct Session {
    peer: Identity,
    outbox: Mutex<Option<Outbox>>,
    calls: Mutex<ByNumber<Inflight>>,
    /// Tells that found a place and were not told of yet.
    accepted: Mutex<BTreeMap<ActorId, u32>>,
    telling: AtomicBool,
    deliver: Weak<dyn Deliver>,
    deadlines: Arc<Deadlines>,
    metrics: Arc<Metrics>,
    max_message: u64,
    audience: Audience,
}

/// Lanes that arrived and wait for the other lane of their link.
#[derive(Default)]
pub struct Pairing(Mutex<HashMap<u128, (Lane, oneshot::Sender<Conn>)>>);

/// What sessions need of their node.
#[derive(Clone)]
pub struct SessionConfig {
    /// Where calls go.
    pub deliver: Weak<dyn Deliver>,
    /// Timers.
    pub deadlines: Arc<Deadlines>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Largest message accepted, in bytes.
    pub max_message: u64,
    /// Sessions that are open, and the end of all of them.
    pub closing: Arc<Closing>,
}

/// Ends sessions once what they still have to say is written: an answer given before the departure must arrive.
#[derive(Default)]
pub struct Closing {
    open: AtomicUsize,
    told: AtomicBool,
    /// Wakes sessions in the order of their beginning, so that their ends are part of a run that a seed repeats.
    closing: Notify,
}

impl Closing {
    /// Ends every session, waiting for `limit` at most until their answers are written.
    pub async fn close(&self, limit: Duration) {
        self.told.store(true, Ordering::Release);
        self.closing.notify_waiters();
        let all = async {
            while self.open.load(Ordering::Acquire) > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let _ = tokio::time::timeout(limit, all).await;
    }

    async fn told(&self) {
        let closing = self.closing.notified();
        if !self.told.load(Ordering::Acquire) {
            closing.await;
        }
    }
}

impl Pairing {
    /// Takes a lane of link `session`. Returns both lanes, small first, to whoever came first; `None` to the other, or when
    /// the second never came.
    pub async fn pair(&self, session: u128, lane: Lane, stream: Conn) -> Option<(Conn, Conn)> {
        let other = {
            let mut waiting = self.0.lock();
            match waiting.remove(&session) {
                Some((have, tx)) if have != lane => {
                    let _ = tx.send(stream);
                    return None;
                }
                Some(_) => return None,
                None => {
                    let (tx, rx) = oneshot::channel();
                    waiting.insert(session, (lane, tx));
                    rx
                }
            }
        };
        match tokio::time::timeout(PAIRING_TIMEOUT, other).await {
            Ok(Ok(second)) if lane == Lane::Small => Some((stream, second)),
            Ok(Ok(second)) => Some((second, stream)),
            _ => {
                self.0.lock().remove(&session);
                None
            }
        }
    }
}

/// Serves one link until it breaks.
pub async fn serve(peer: Identity, small: Conn, bulk: Conn, config: SessionConfig) {
    let (outbox, queues) = Outbox::new();
    let session = Arc::new(Session {
        peer,
        outbox: Mutex::new(Some(outbox)),
        calls: Mutex::default(),
        accepted: Mutex::default(),
        telling: AtomicBool::new(false),
        deliver: config.deliver,
        deadlines: config.deadlines,
        metrics: Arc::clone(&config.metrics),
        max_message: config.max_message,
        audience: Audience::default(),
    });
    config.closing.open.fetch_add(1, Ordering::AcqRel);
    let closing = Arc::clone(&config.closing);
    let guard = CloseOnDrop(Arc::clone(&session), config.closing);
    let (small_in, small_out) = match small.lane() {
        Ok(halves) => halves,
        Err(error) => {
            tracing::warn!(peer = %session.peer.addr, %error, "a link from a peer cannot be served");
            return;
        }
    };
    let (bulk_in, bulk_out) = bulk.halves();
    let (write_small, write_bulk) = queues.writers(small_out, bulk_out, Arc::clone(&config.metrics));
    let role: Arc<dyn Role> = Arc::clone(&session) as Arc<dyn Role>;
    let reading = Reading { max_message: config.max_message, metrics: config.metrics, role };
    let (read_small, read_bulk) = reading.lanes(small_in, bulk_in);
    let writing = async { tokio::try_join!(write_small, write_bulk) };
    tokio::pin!(writing);
    let ended = tokio::select! {
        biased;
        done = &mut writing => done.err().map(|e| e.to_string()),
        done = read_small => done.err().map(|e| e.to_string()),
        done = read_bulk => done.err().map(|e| e.to_string()),
        () = closing.told() => {
            session.send_all_accepted();
            // The writers end with what is queued.
            session.outbox.lock().take();
            writing.await.err().map(|e| e.to_string())
        }
    };
    if let Some(reason) = ended {
        tracing::debug!(peer = %session.peer.addr, reason, "link from a peer ended");
    }
    drop(guard);
}

/// Callers that are gone want nothing: their calls are cancelled however the session ends.
struct CloseOnDrop(Arc<Session>, Arc<Closing>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.outbox.lock().take();
        let mut calls: Vec<_> = self.0.calls.lock().drain().collect();
        calls.sort_unstable_by_key(|(id, _)| *id);
        for (_, call) in calls {
            call.cancel.fire();
            call.credit.close();
            if let Some(key) = call.deadline {
                self.0.deadlines.remove(key);
            }
        }
        self.1.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Session {
    fn call(self: &Arc<Self>, header: CallHeader, payload: Payload) -> Result<()> {
        let actor = ActorId::from_bytes(&header.actor)?;
        let id = header.call;
        let cancel = CancelSignal::new();
        let credit = Arc::new(Credit::new(header.window));
        let deadline = header.timeout_ms.map(|ms| from_now(Duration::from_millis(ms)));
        let sink: Arc<dyn ReplySink> = if header.tell {
            Arc::new(TellSink { session: Arc::clone(self), actor, done: AtomicBool::new(false) })
        } else {
            let after = Duration::from_millis(header.timeout_ms.unwrap_or_default());
            let key = deadline.map(|at| {
                let session = Arc::downgrade(self);
                self.deadlines.insert(at, move || {
                    if let Some(session) = session.upgrade() {
                        session.expire(id, actor, after);
                    }
                })
            });
            let inflight = Inflight { cancel: cancel.clone(), credit: Arc::clone(&credit), deadline: key };
            if self.calls.lock().insert(id, inflight).is_some() {
                return Err(Error::Protocol(format!("call {id} made twice")));
            }
            Arc::new(RemoteSink { session: Arc::clone(self), call: id })
        };
        let chain = header.chain.iter().map(|raw| ActorId::from_bytes(raw)).collect::<Result<_>>()?;
        let sender = if header.sender.is_empty() { None } else { Some(ActorId::from_bytes(&header.sender)?) };
        let call = Call {
            target: actor,
            mode: if header.tell { Mode::Tell } else { Mode::Ask },
            payload,
            deadline,
            sender,
            chain,
            trace: (!header.trace.is_empty()).then_some(header.trace),
            no_wait: header.no_wait,
            responder: Responder::new(actor, sink, credit, cancel),
        };
        match self.deliver.upgrade() {
            Some(node) => self.audience.note(node.deliver(call)),
            None => call.responder.error(Error::ShutDown),
        }
        Ok(())
    }

    /// The callee enforces the deadline too: a caller that is stuck must not keep it busy (R5).
    fn expire(&self, id: u64, actor: ActorId, after: Duration) {
        let Some(call) = self.calls.lock().remove(&id) else { return };
        if let Some(outbox) = &*self.outbox.lock() {
            let error = Error::Timeout { what: format!("actor {actor} did not answer"), after };
            outbox.send_after(Key::Call(id), Kind::Error, &ErrorHeader::from_error(id, &error));
        }
        call.cancel.fire();
        call.credit.close();
    }

    /// A tell to `actor` found its place. Half a window at a time is told at once: one frame for many, and the caller never
    /// runs dry; the rest a little later, so that neither side keeps books on actors nobody tells anything.
    fn accepted(self: &Arc<Self>, actor: ActorId) {
        let due = {
            let mut accepted = self.accepted.lock();
            let count = accepted.entry(actor).or_default();
            *count += 1;
            if *count * 2 >= TELL_WINDOW { accepted.remove(&actor) } else { None }
        };
        if let Some(count) = due {
            self.send_accepted(actor, count, false);
        } else if !self.telling.swap(true, Ordering::AcqRel) {
            let session = Arc::downgrade(self);
            self.deadlines.insert(Instant::now() + ACCEPTED_AFTER, move || {
                if let Some(session) = session.upgrade() {
                    session.telling.store(false, Ordering::Release);
                    session.send_all_accepted();
                }
            });
        }
    }

    fn send_all_accepted(&self) {
        let accepted = std::mem::take(&mut *self.accepted.lock());
        for (actor, count) in accepted {
            self.send_accepted(actor, count, false);
        }
    }

    fn send_accepted(&self, actor: ActorId, count: u32, ended: bool) {
        let actor = Bytes::copy_from_slice(&actor.to_bytes());
        if let Some(outbox) = &*self.outbox.lock() {
            outbox.send_now(Kind::Accepted, &AcceptedHeader { actor, count, ended });
        }
    }

    /// An answer that is too large to be sent ends its call; a stream's producer is cancelled.
    fn refuse_answer(&self, id: u64, what: &str, payload: &Payload) -> bool {
        let Err(error) = payload.check(what, self.max_message) else { return false };
        let Some(call) = self.calls.lock().remove(&id) else { return true };
        if let Some(key) = call.deadline {
            self.deadlines.remove(key);
        }
        if let Some(outbox) = &*self.outbox.lock() {
            outbox.send_after(Key::Call(id), Kind::Error, &ErrorHeader::from_error(id, &error.of_an_answer()));
        }
        call.cancel.fire();
        call.credit.close();
        true
    }

    /// Notes a reply event; false if nobody waits for it any more.
    fn replied(&self, call: u64, terminal: bool) -> bool {
        let key = {
            let mut calls = self.calls.lock();
            if terminal {
                let Some(inflight) = calls.remove(&call) else { return false };
                inflight.deadline
            } else {
                let Some(inflight) = calls.get_mut(&call) else { return false };
                inflight.deadline.take()
            }
        };
        if let Some(key) = key {
            self.deadlines.remove(key);
        }
        true
    }
}

impl Role for Session {
    fn inbound(self: Arc<Self>, message: Inbound) -> Result<()> {
        match message {
            Inbound::Call(header, payload) => self.call(header, payload)?,
            Inbound::CallTooLarge(header, error) => {
                let actor = ActorId::from_bytes(&header.actor)?;
                if header.tell {
                    tracing::warn!(peer = %self.peer.addr, %actor, %error, "a message sent by tell was not taken");
                    self.metrics.dead_letters.inc();
                    self.accepted(actor);
                } else if let Some(outbox) = &*self.outbox.lock() {
                    let id = header.call;
                    outbox.send_after(Key::Call(id), Kind::Error, &ErrorHeader::from_error(id, &error));
                }
            }
            Inbound::Credit(credit) => {
                let held = self.calls.lock().get(&credit.call).map(|c| Arc::clone(&c.credit));
                if let Some(held) = held {
                    held.grant(credit.items);
                }
            }
            Inbound::Cancel(id) => {
                let call = self.calls.lock().remove(&id);
                if let Some(call) = call {
                    if let Some(key) = call.deadline {
                        self.deadlines.remove(key);
                    }
                    call.cancel.fire();
                    call.credit.close();
                }
                if let Some(outbox) = &*self.outbox.lock() {
                    outbox.abandon(id);
                }
            }
            Inbound::Arrived(message) => {
                if let Some(outbox) = &*self.outbox.lock() {
                    outbox.arrived(message);
                }
            }
            _ => return Err(Error::Protocol("a caller sent what only callees send".into())),
        }
        Ok(())
    }

    fn acknowledge(&self, message: u64) {
        if let Some(outbox) = &*self.outbox.lock() {
            outbox.send_now(Kind::Arrived, &RefHeader { id: message });
        }
    }

    fn audience(&self) -> Option<Arc<dyn Reader>> {
        self.audience.only()
    }
}

/// Answers across the link.
struct RemoteSink {
    session: Arc<Session>,
    call: u64,
}

impl ReplySink for RemoteSink {
    fn event(&self, event: ReplyEvent) {
        let terminal = event.is_terminal();
        let refused = match &event {
            ReplyEvent::Value(payload) => self.session.refuse_answer(self.call, "an answer", payload),
            ReplyEvent::Item(payload) => self.session.refuse_answer(self.call, "an item of a stream", payload),
            _ => false,
        };
        if refused {
            return;
        }
        if !self.session.replied(self.call, terminal) {
            return;
        }
        if matches!(event, ReplyEvent::StreamStart) {
            self.session.metrics.streams.inc();
        }
        let guard = self.session.outbox.lock();
        let Some(outbox) = &*guard else { return };
        let call = self.call;
        let key = Key::Call(call);
        match event {
            ReplyEvent::Value(p) | ReplyEvent::Item(p) => {
                let (codec, segments) = (u32::from(p.codec.0), segments_of(&p));
                let kind = if terminal { Kind::Value } else { Kind::Item };
                outbox.send(key, call, kind, p, |message, after| ReplyHeader { call, codec, segments, message, after });
            }
            ReplyEvent::Error(e) => outbox.send_after(key, Kind::Error, &ErrorHeader::from_error(call, &e)),
            ReplyEvent::StreamStart => outbox.send_after(key, Kind::StreamStart, &RefHeader { id: call }),
            ReplyEvent::End => outbox.send_after(key, Kind::End, &RefHeader { id: call }),
        }
    }
}

/// Replies to a tell: whether it found a place, and whether its actor has ended.
struct TellSink {
    session: Arc<Session>,
    actor: ActorId,
    done: AtomicBool,
}

impl ReplySink for TellSink {
    fn event(&self, event: ReplyEvent) {
        let ended = matches!(
            event,
            ReplyEvent::Error(Error::ActorStopped { .. } | Error::ActorNotFound { .. } | Error::ShutDown)
        );
        if !ended {
            self.accepted();
        } else if !self.done.swap(true, Ordering::AcqRel) {
            let count = self.session.accepted.lock().remove(&self.actor).unwrap_or_default();
            self.session.send_accepted(self.actor, count, true);
        }
    }
    fn accepted(&self) {
        if !self.done.swap(true, Ordering::AcqRel) {
            self.session.accepted(self.actor);
        }
    }
}
