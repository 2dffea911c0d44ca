//! The caller's side of a link: dials two lanes to a node and carries every call of this node to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::conn::{self, DialError};
use super::handshake::{Credentials, Lane};
use super::inbound::{Inbound, Reading, Role, segments_of};
use super::loan::{Audience, Reader};
use super::numbers::ByNumber;
use super::outbox::{Key, Outbox};
use super::outcall::{Outcall, Route};
use super::tells::{PendingTell, TellQueue, Tells, Ticket};
use super::transport::Transport;
use super::wire::{CallHeader, CreditHeader, Kind, RefHeader};
use crate::call::{CallOptions, Mode, ReplyEvent, ReplySink};
use crate::cluster::Identity;
use crate::error::{Error, Result};
use crate::id::ActorId;
use crate::observe::Metrics;
use crate::payload::{Codec, Payload};

/// How long one lane is still read once the other has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How a link ended, for the membership to judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// Nobody listens at the peer's address.
    Refused,
    /// The connection broke.
    Broken,
}

enum State {
    Dialling(Vec<Queued>),
    Open(Outbox),
    Closed(Error),
}

struct Queued {
    key: Key,
    header: CallHeader,
    payload: Payload,
}

/// A link to one node.
pub struct Link {
    /// The node at the other end.
    pub peer: Identity,
    state: Mutex<State>,
    calls: Mutex<ByNumber<Arc<Outcall>>>,
    tells: Tells<Queued>,
    next: AtomicU64,
    tasks: Mutex<Vec<AbortHandle>>,
    metrics: Arc<Metrics>,
    missing: Missing,
    audience: Audience,
}

/// Told of an actor of which the peer says that it has none such, or that it takes nothing more.
type Missing = Box<dyn Fn(ActorId) + Send + Sync>;

/// What links need of their node.
#[derive(Clone)]
pub struct LinkConfig {
    /// Who this node is; renewed when it was declared down by mistake.
    pub me: Arc<Mutex<Identity>>,
    /// What carries its connections.
    pub transport: Transport,
    /// How it proves that.
    pub cred: Arc<Credentials>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Largest message accepted, in bytes.
    pub max_message: u64,
    /// What strangers may take.
    pub limits: Limits,
}

/// What connections may take that have not proved to be of the cluster.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long one may take to prove it.
    pub handshake: Duration,
    /// How many there may be.
    pub handshakes: usize,
    /// How many observers are served at once.
    pub observers: usize,
}

impl Link {
    /// Starts dialling `peer`; calls may be made at once. `ended` runs when the link breaks by itself, `missing` before a call
    /// ends because the peer has no such actor any more, and when a tell was refused because of that.
    pub fn open(
        peer: Identity,
        config: LinkConfig,
        missing: impl Fn(ActorId) + Send + Sync + 'static,
        ended: impl FnOnce(&Arc<Link>, LinkEnd) + Send + 'static,
    ) -> Arc<Self> {
        let link = Arc::new(Self {
            peer,
            state: Mutex::new(State::Dialling(Vec::new())),
            calls: Mutex::default(),
            tells: Tells::new(false),
            next: AtomicU64::new(1),
            tasks: Mutex::default(),
            metrics: Arc::clone(&config.metrics),
            missing: Box::new(missing),
            audience: Audience::default(),
        });
        let run = Arc::clone(&link);
        let task = tokio::spawn(async move {
            let end = run.run(config).await;
            ended(&run, end);
        });
        link.tasks.lock().push(task.abort_handle());
        link
    }

    /// Whether calls on it can still succeed.
    pub fn is_closed(&self) -> bool {
        matches!(*self.state.lock(), State::Closed(_))
    }

    /// Sends a call; whatever becomes of it reaches `outcall`.
    pub fn call(self: &Arc<Self>, outcall: &Arc<Outcall>, actor: ActorId, payload: Payload, options: &CallOptions) {
        let message = self.message(actor, Mode::Ask, payload, options);
        self.audience.note(outcall.reader());
        let (id, key) = (message.header.call, message.key);
        self.calls.lock().insert(id, Arc::clone(outcall));
        outcall.set_route(Route::Link(Arc::downgrade(self), id, key));
        let Some(message) = self.tells.ask(actor, options.sender, message) else { return };
        if let Err(error) = self.send(message) {
            self.calls.lock().remove(&id);
            outcall.event(ReplyEvent::Error(error));
        } else if outcall.is_over() {
            // Given up before it was sent: what told the callee so came before the call.
            self.cancel(id, key);
        }
    }

    /// Sends a tell, or lets it wait.
    ///
    /// # Errors
    /// `MailboxFull` with `no_wait` when it would have to wait for room; how the link ended.
    pub fn tell(
        self: &Arc<Self>,
        actor: ActorId,
        payload: Payload,
        options: &CallOptions,
    ) -> Result<Option<PendingTell>> {
        let message = self.message(actor, Mode::Tell, payload, options);
        let mut failed = None;
        let ticket = self.tells.tell(actor, options.sender, message, options.no_wait, |message| {
            failed = self.send(message).err();
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        // Closed while it queued: nobody else will end it.
        if let (Some(_), State::Closed(error)) = (&ticket, &*self.state.lock()) {
            return Err(error.clone());
        }
        let queue: Weak<dyn TellQueue> = Arc::downgrade(&(Arc::clone(self) as Arc<dyn TellQueue>));
        Ok(ticket.map(|ticket| PendingTell::new(queue, actor, ticket)))
    }

    fn message(&self, actor: ActorId, mode: Mode, payload: Payload, options: &CallOptions) -> Queued {
        let header = CallHeader {
            call: self.next.fetch_add(1, Ordering::Relaxed),
            actor: id_bytes(actor),
            tell: mode == Mode::Tell,
            codec: u32::from(payload.codec.0),
            segments: segments_of(&payload),
            timeout_ms: options
                .timeout
                .filter(|_| mode == Mode::Ask)
                .map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
            sender: options.sender.map(id_bytes).unwrap_or_default(),
            chain: options.chain.iter().copied().map(id_bytes).collect(),
            trace: options.trace.clone().unwrap_or_default(),
            // A tell that has credit is kept beside a full mailbox: its sender has been told that it is on its way.
            no_wait: options.no_wait && mode == Mode::Ask,
            window: options.window,
            message: 0,
            after: 0,
        };
        Queued { key: Key::Pair(options.sender, actor), header, payload }
    }

    fn send(&self, message: Queued) -> Result<()> {
        let mut state = self.state.lock();
        match &mut *state {
            State::Dialling(queue) => queue.push(message),
            State::Open(outbox) => send(outbox, message),
            State::Closed(error) => return Err(error.clone()),
        }
        self.metrics.messages_sent.inc();
        Ok(())
    }

    /// Sends what waited for credit. An ask that finds the link closed was ended with it.
    fn send_late(&self, message: Queued) {
        let (id, key, tell) = (message.header.call, message.key, message.header.tell);
        if self.send(message).is_ok() && !tell && !self.calls.lock().contains_key(&id) {
            // As in `call`.
            self.cancel(id, key);
        }
    }

    /// Tells the callee that nobody waits for this call any more.
    pub fn cancel(&self, id: u64, key: Key) {
        self.calls.lock().remove(&id);
        self.tells.forget_asks(|waiting| waiting.header.call == id);
        let mut state = self.state.lock();
        match &mut *state {
            State::Dialling(queue) => queue.retain(|q| q.header.call != id),
            State::Open(outbox) => {
                outbox.cancel(key, id);
            }
            State::Closed(_) => {}
        }
    }

    /// Lets the callee send further items.
    pub fn grant(&self, id: u64, items: u32) {
        if let State::Open(outbox) = &*self.state.lock() {
            outbox.send_now(Kind::Credit, &CreditHeader { call: id, items });
        }
    }

    /// Closes the link: every call on it fails with `error`.
    pub fn close(&self, error: &Error) {
        let old = {
            let mut state = self.state.lock();
            if matches!(*state, State::Closed(_)) {
                return;
            }
            std::mem::replace(&mut *state, State::Closed(error.clone()))
        };
        drop(old);
        let under_way = self.tells.close(error);
        // Who shuts its own node down knows what it told last.
        if under_way > 0 && *error != Error::ShutDown {
            tracing::warn!(peer = %self.peer.addr, %error, "up to {under_way} messages sent by tell may be lost");
        }
        // In the order they were made, so that a failure runs its course in one way.
        let mut calls: Vec<_> = self.calls.lock().drain().collect();
        calls.sort_unstable_by_key(|(id, _)| *id);
        for (_, call) in calls {
            call.event(ReplyEvent::Error(error.clone()));
        }
        for task in self.tasks.lock().drain(..) {
            task.abort();
        }
    }

    async fn run(self: &Arc<Self>, config: LinkConfig) -> LinkEnd {
        let addr = self.peer.addr;
        let session: u128 = rand::random();
        let dialled = tokio::try_join!(
            conn::dial(addr, Lane::Small, session, &config),
            conn::dial(addr, Lane::Bulk, session, &config),
        );
        let ((small, peer), (bulk, _)) = match dialled {
            Ok(both) => both,
            Err(DialError { error, refused }) => {
                self.fail(&error);
                return if refused { LinkEnd::Refused } else { LinkEnd::Broken };
            }
        };
        if peer.node != self.peer.node {
            self.fail(&Error::ConnectFailed {
                addr: addr.to_string(),
                reason: format!("node {} lives there now, not {}", peer.node, self.peer.node),
            });
            return LinkEnd::Refused;
        }
        let (small_in, small_out) = match small.lane() {
            Ok(halves) => halves,
            Err(e) => {
                self.fail(&Error::ConnectionLost { addr: addr.to_string(), reason: e.to_string() });
                return LinkEnd::Broken;
            }
        };
        let (bulk_in, bulk_out) = bulk.halves();
        let (outbox, queues) = Outbox::new();
        let (write_small, write_bulk) = queues.writers(small_out, bulk_out, Arc::clone(&config.metrics));
        {
            let mut state = self.state.lock();
            let State::Dialling(queue) = &mut *state else { return LinkEnd::Broken };
            for message in std::mem::take(queue) {
                send(&outbox, message);
            }
            *state = State::Open(outbox);
        }
        self.tells.open(|message| self.send_late(message));
        let role: Arc<dyn Role> = Arc::clone(self) as Arc<dyn Role>;
        let reading = Reading { max_message: config.max_message, metrics: config.metrics, role };
        let (read_small, read_bulk) = reading.lanes(small_in, bulk_in);
        let reason = tokio::select! {
            biased;
            done = write_small => done.err().map(|e| e.to_string()),
            done = write_bulk => done.err().map(|e| e.to_string()),
            done = both(read_small, read_bulk) => done.err().map(|e| e.to_string()),
        };
        let reason = reason.unwrap_or_else(|| "the peer closed it".to_owned());
        self.fail(&Error::ConnectionLost { addr: addr.to_string(), reason });
        LinkEnd::Broken
    }

    /// Closes from inside the link's own task, which must live on to report the end.
    fn fail(&self, error: &Error) {
        self.tasks.lock().clear();
        self.close(error);
    }
}

/// Reads two lanes to their ends. A peer that leaves closes both after its last answers, and the end of the idle lane is
/// seen before the answers on the other.
async fn both<E>(
    small: impl Future<Output = std::result::Result<(), E>>,
    bulk: impl Future<Output = std::result::Result<(), E>>,
) -> std::result::Result<(), E> {
    tokio::pin!(small, bulk);
    let rest = tokio::select! {
        biased;
        done = &mut small => {
            done?;
            tokio::time::timeout(LAST_WORDS, bulk).await
        }
        done = &mut bulk => {
            done?;
            tokio::time::timeout(LAST_WORDS, small).await
        }
    };
    rest.unwrap_or(Ok(()))
}

impl Role for Link {
    fn inbound(self: Arc<Self>, message: Inbound) -> Result<()> {
        let call = |id: u64| self.calls.lock().get(&id).cloned();
        let last = |id: u64| self.calls.lock().remove(&id);
        // A call that was cancelled or timed out is gone: what arrives for it is dropped.
        match message {
            Inbound::Value(id, payload) => {
                if let Some(call) = last(id) {
                    call.event(ReplyEvent::Value(payload));
                }
            }
            Inbound::Error(id, error) => {
                if let Some(call) = last(id) {
                    let gone = match error {
                        Error::ActorNotFound { actor, node } => (node == self.peer.node).then_some(actor),
                        // With a message that had begun the actor may have been restarted.
                        Error::ActorStopped { actor, begun: false } => Some(actor),
                        _ => None,
                    };
                    if let Some(actor) = gone.filter(|actor| *actor == call.target().actor) {
                        (self.missing)(actor);
                    }
                    call.event(ReplyEvent::Error(error));
                }
            }
            Inbound::AnswerTooLarge(id, error) => {
                if let Some(call) = last(id) {
                    call.fail(error);
                }
            }
            Inbound::End(id) => {
                if let Some(call) = last(id) {
                    call.event(ReplyEvent::End);
                }
            }
            Inbound::StreamStart(id) => {
                if let Some(call) = call(id) {
                    call.event(ReplyEvent::StreamStart);
                }
            }
            Inbound::Item(id, payload) => {
                if let Some(call) = call(id) {
                    // Without a body it is a header of the stream, not an item.
                    if payload.codec != Codec::RAW || !payload.buffers.is_empty() {
                        self.metrics.stream_items.inc();
                    }
                    call.event(ReplyEvent::Item(payload));
                }
            }
            Inbound::Arrived(message) => {
                if let State::Open(outbox) = &*self.state.lock() {
                    outbox.arrived(message);
                }
            }
            Inbound::Accepted(header) => {
                let actor = ActorId::from_bytes(&header.actor)?;
                self.tells.granted(actor, header.count, |message| self.send_late(message));
                if header.ended {
                    (self.missing)(actor);
                    self.tells.ended(actor, |message| self.send_late(message));
                }
            }
            Inbound::Call(..) | Inbound::CallTooLarge(..) | Inbound::Credit(_) | Inbound::Cancel(_) => {
                return Err(Error::Protocol("a callee sent what only callers send".into()));
            }
        }
        Ok(())
    }

    fn acknowledge(&self, message: u64) {
        if let State::Open(outbox) = &*self.state.lock() {
            outbox.send_now(Kind::Arrived, &RefHeader { id: message });
        }
    }

    fn audience(&self) -> Option<Arc<dyn Reader>> {
        self.audience.only()
    }
}

impl TellQueue for Link {
    fn withdraw(&self, actor: ActorId, ticket: &Arc<Ticket>) {
        self.tells.withdraw(actor, ticket);
        // An ask behind it may be free to go.
        self.tells.granted(actor, 0, |message| self.send_late(message));
    }
}

fn send(outbox: &Outbox, message: Queued) {
    let Queued { key, header, payload } = message;
    outbox.send(key, header.call, Kind::Call, payload, |message, after| CallHeader { message, after, ..header });
}

fn id_bytes(id: ActorId) -> Bytes {
    Bytes::copy_from_slice(&id.to_bytes())
}
