//! [`System`]: the public face of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::actors::Actors;
use super::changes::{Changes, Counted};
use super::driver::{Driver, Input};
use super::names::Listeners;
use super::service::NODE_ACTOR;
use super::watching::Watching;
use super::{Member, MemberState, Security, Seed, SystemConfig, Target};
use super::{address, check, join, observe, port, reply, service};
use crate::call::{Call, CallHandle, CallOptions, CancelSignal, Mode, Reply, ReplyEvent, ReplySink, Responder};
use crate::cluster::{Identity, MemberInfo, Membership, Registry, Touched};
use crate::error::{Error, Result};
use crate::fault;
use crate::id::{ActorId, NodeId};
use crate::moment::from_now;
use crate::net::control::{Control, Inbox};
use crate::net::deadline::Deadlines;
use crate::net::guests;
use crate::net::handshake::{Credentials, Trust};
use crate::net::link::{Limits, Link, LinkConfig};
use crate::net::listener::{self, ListenerConfig};
use crate::net::loan::Reader;
use crate::net::outcall::{Outcall, Route};
use crate::net::pki;
use crate::net::secret::Secret;
use crate::net::session::{Closing, Deliver, SessionConfig};
use crate::net::tells::{PendingTell, TellQueue, Tells, Ticket};
use crate::net::tls::ClusterTls;
use crate::net::transport::Transport;
use crate::observe::{Events, Metrics, ObserveSource, Readiness};
use crate::payload::Payload;
use crate::stream::Credit;

/// A running node. Clones share it.
#[derive(Clone)]
pub struct System(pub(super) Arc<Inner>);

/// What the parts of a node share.
pub(super) struct Inner {
    pub(super) id: NodeId,
    pub(super) me: Arc<Mutex<Identity>>,
    pub(super) config: SystemConfig,
    pub(super) metrics: Arc<Metrics>,
    pub(super) events: Events,
    pub(super) started: Instant,
    pub(super) readiness: Mutex<Readiness>,
    pub(super) registry: Mutex<Registry>,
    pub(super) actors: RwLock<Actors>,
    pub(super) driver: mpsc::UnboundedSender<Input>,
    pub(super) seeds: Vec<Seed>,
    pub(super) bound: SocketAddr,
    observed_at: Option<SocketAddr>,
    /// The user was told that its seeds cannot reach this node.
    pub(super) warned: AtomicBool,
    pub(super) link_config: LinkConfig,
    pub(super) changes: Counted,
    pub(super) listeners: Listeners,
    members: RwLock<BTreeMap<NodeId, MemberInfo>>,
    links: Mutex<BTreeMap<NodeId, Arc<Link>>>,
    local_tells: Tells<Call>,
    deadlines: Arc<Deadlines>,
    pub(super) turns: AtomicUsize,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    closing: Arc<Closing>,
    pub(super) watching: Watching,
    pub(super) runtime: Handle,
    pub(super) myself: Weak<Inner>,
}

/// How long a departure waits until answers already given are written.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// How long the link to a node that left may take to end.
const RETIRE_LIMIT: Duration = Duration::from_secs(3);

impl System {
    /// Binds, joins the seeds, and starts serving. Call it inside a tokio runtime, which must outlive the system.
    ///
    /// # Errors
    /// `Bind`, `InvalidAddress`, `Config`, `JoinFailed`, or `Refused` when a seed says why it will not have us.
    pub async fn start(config: SystemConfig) -> Result<Self> {
        check::check_cluster(&config.cluster)?;
        let seeds = config.seeds.iter().map(|text| Seed::parse(text)).collect::<Result<Vec<_>>>()?;
        let binding = address::choose(&config, &seeds).await?;
        let trust = match &config.security {
            Security::Local => Trust::Secret(Secret::load(config.secret_file.as_deref())?),
            Security::Passphrase(passphrase) => {
                let (passphrase, cluster) = (passphrase.clone(), config.cluster.clone());
                let derived = tokio::task::spawn_blocking(move || ClusterTls::new(&passphrase, &cluster)).await;
                Trust::Tls(derived.map_err(|e| Error::Config(e.to_string()))??)
            }
            Security::Pki(files) => {
                Trust::Tls(ClusterTls::from_files(files, &config.cluster, Some(binding.advertise))?)
            }
            Security::Insecure => {
                if matches!(config.transport, Transport::Tcp) {
                    tracing::warn!("--insecure: any host that reaches this node can run code in it");
                }
                Trust::Anyone
            }
        };
        let transport = config.transport.clone();
        let listener = port::listen(binding.bind, "--addr", &transport, &trust).await?;
        let port = listener.port().map_err(|e| Error::Config(e.to_string()))?;
        let guests = observe::listen(&config, &transport).await?;
        let id = transport.node_id();
        let told = SocketAddr::new(binding.advertise, binding.port.unwrap_or(port));
        let identity = Identity::new(id, told, transport.epoch());

        let metrics = Arc::new(Metrics::default());
        let (driver, inputs) = mpsc::unbounded_channel();
        let (inbox, events, names) = Inbox::new();
        let (synced_tx, mut synced) = watch::channel(false);
        let me = Arc::new(Mutex::new(identity));
        let link_config = LinkConfig {
            me: Arc::clone(&me),
            transport: transport.clone(),
            cred: Arc::new(Credentials { cluster: config.cluster.clone(), trust, versions: config.versions }),
            metrics: Arc::clone(&metrics),
            max_message: config.max_message,
            limits: Limits {
                handshake: config.handshake_timeout,
                handshakes: config.max_handshakes,
                observers: config.max_observers,
            },
        };
        let inner = Arc::new_cyclic(|myself| Inner {
            id,
            me,
            metrics: Arc::clone(&metrics),
            events: Events::default(),
            started: Instant::now(),
            readiness: Mutex::new(Readiness::Joining),
            registry: Mutex::new(Registry::new(id)),
            actors: RwLock::default(),
            driver,
            seeds,
            bound: SocketAddr::new(binding.bind.ip(), port),
            observed_at: guests.as_ref().map(|(_, at)| *at),
            warned: AtomicBool::new(false),
            link_config: link_config.clone(),
            changes: Counted::default(),
            listeners: Listeners::default(),
            members: RwLock::default(),
            links: Mutex::default(),
            local_tells: Tells::new(true),
            deadlines: Arc::new(Deadlines::start()),
            turns: AtomicUsize::new(0),
            tasks: Mutex::default(),
            closing: Arc::default(),
            watching: Watching::default(),
            runtime: Handle::current(),
            myself: Weak::clone(myself),
            config,
        });
        let deliver: Arc<dyn Deliver> = Arc::clone(&inner) as Arc<dyn Deliver>;
        if let (Security::Pki(files), Trust::Tls(tls)) = (&inner.config.security, &link_config.cred.trust) {
            let me = Arc::clone(&link_config.me);
            let keeper = transport.spawn(pki::keep(tls.clone(), files.clone(), move || me.lock().addr.ip()));
            inner.tasks.lock().push(keeper);
        }
        let session = SessionConfig {
            deliver: Arc::downgrade(&deliver),
            deadlines: Arc::clone(&inner.deadlines),
            metrics,
            max_message: inner.config.max_message,
            closing: Arc::clone(&inner.closing),
        };
        let source = Arc::clone(&inner) as Arc<dyn ObserveSource>;
        let accept = ListenerConfig {
            link: link_config.clone(),
            session,
            inbox: inbox.clone(),
            source: Arc::clone(&source),
            observe: inner.config.observe,
        };
        if let Some((listener, at)) = guests {
            tracing::info!(addr = %at, "observers are answered without TLS and without a secret");
            inner.tasks.lock().push(transport.spawn(guests::run(listener, link_config.clone(), source)));
        }
        let membership = Membership::new(identity, inner.config.preset(), transport.random());
        let control = Control::new(link_config, inbox.events);
        let driver = Driver::new(Arc::clone(&inner), membership, control, synced_tx);
        {
            let mut tasks = inner.tasks.lock();
            tasks.push(transport.spawn(listener::run(listener, accept)));
            tasks.push(transport.spawn(driver.run(inputs, events, names)));
        }

        let system = Self(inner);
        let mut starting = Starting(Some(system.clone()));
        if let Err(error) = join::join(&system.0, system.0.config.join_timeout).await {
            system.shutdown().await;
            return Err(error);
        }
        if system.0.has_peers() {
            // The names of the cluster are known when `start` returns; a peer that does not answer is no reason to fail.
            let _ = tokio::time::timeout(Duration::from_secs(2), synced.wait_for(|done| *done)).await;
        }
        let keeper = transport.spawn(join::keep(Arc::downgrade(&system.0)));
        system.0.tasks.lock().push(keeper);
        *system.0.readiness.lock() = Readiness::Ready;
        starting.0 = None;
        Ok(system)
    }

    /// This node's id.
    pub fn node_id(&self) -> NodeId {
        self.0.id
    }
    /// The address others reach this node at.
    pub fn addr(&self) -> SocketAddr {
        self.0.me.lock().addr
    }
    /// The address it listens on; another one than `addr` for a wildcard, and where it advertises another.
    pub fn bound(&self) -> SocketAddr {
        self.0.bound
    }
    /// Where it answers observers besides; `None` = on its port only.
    pub fn observed_at(&self) -> Option<SocketAddr> {
        self.0.observed_at
    }
    /// The counters of this node.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.0.metrics
    }

    /// Its network, and where its chances come from.
    pub(crate) fn transport(&self) -> &Transport {
        &self.0.config.transport
    }

    /// Members of the cluster, this node included.
    pub fn members(&self) -> Vec<Member> {
        self.0.all_members()
    }
    /// Tells whenever `instances`, `names` or `members` may answer differently.
    pub fn changes(&self) -> Changes {
        self.0.changes.follow()
    }

    /// Sends a call and returns at once. Every outcome, an unreachable node included, reaches `sink`; the deadline in
    /// `options` is kept here: it cancels the callee and ends the call with `Timeout`.
    pub fn dispatch(
        &self,
        target: Target,
        payload: Payload,
        options: CallOptions,
        sink: Arc<dyn ReplySink>,
    ) -> CallHandle {
        let timed = (target.node != self.0.id).then(|| Arc::clone(&self.0.metrics));
        let outcall = Outcall::new(target, sink, &options, self.0.config.stream_idle, &self.0.deadlines, timed);
        if options.idempotent && target.node != self.0.id {
            let (node, payload, options) = (Weak::clone(&self.0.myself), payload.clone(), options.clone());
            outcall.resend_with(options.resends, self.transport(), move |outcall, timeout| {
                let Some(node) = node.upgrade() else { return outcall.event(ReplyEvent::Error(Error::ShutDown)) };
                node.route(target, payload.clone(), CallOptions { timeout, ..options.clone() }, outcall);
            });
        }
        self.0.route(target, payload, options, &outcall);
        CallHandle(outcall as _)
    }

    /// [`dispatch`](Self::dispatch) as a future. Dropping it cancels the callee.
    ///
    /// # Errors
    /// Whatever the call ended with.
    pub async fn call(&self, target: Target, payload: Payload, options: CallOptions) -> Result<Reply> {
        reply::wait(options.window, |sink| self.dispatch(target, payload, options, sink)).await
    }

    /// Sends without a reply; returns once the message is on its way. It waits while the actor has no room: at most
    /// [`TELL_WINDOW`](crate::net::tells::TELL_WINDOW) messages of this node are under way to one actor without a place in its
    /// mailbox (R3).
    ///
    /// # Errors
    /// `ShutDown`, `NodeNotFound`, `ActorNotFound` for a local target; `TooLarge`; `MailboxFull` with `no_wait`; `ActorStopped`,
    /// `ConnectFailed`, `ConnectionLost` while it waited. Nothing was sent.
    pub async fn tell(&self, target: Target, payload: Payload, options: CallOptions) -> Result<()> {
        match self.start_tell(target, payload, options)? {
            None => Ok(()),
            Some(pending) => pending.sent().await,
        }
    }

    /// [`tell`](Self::tell) without a future: `None` when the message is on its way.
    ///
    /// # Errors
    /// As [`tell`](Self::tell), for what is known at once.
    pub fn start_tell(&self, target: Target, payload: Payload, options: CallOptions) -> Result<Option<PendingTell>> {
        if *self.0.readiness.lock() == Readiness::Leaving {
            Err(Error::ShutDown)
        } else if target.node == self.0.id {
            self.0.tell_here(target.actor, payload, options)
        } else {
            payload.check("a message", self.0.config.max_message)?;
            self.0.link_to(target.node)?.tell(target.actor, payload, &options)
        }
    }

    /// Says that the node is about to leave, while its actors finish: `/ready` answers 503, and who wants its port waits.
    pub fn drain(&self) {
        let mut readiness = self.0.readiness.lock();
        if *readiness != Readiness::Leaving {
            *readiness = Readiness::Draining;
        }
    }

    /// Leaves the cluster: names withdrawn, departure announced, links closed. Actors must be stopped before.
    pub async fn shutdown(&self) {
        {
            let mut readiness = self.0.readiness.lock();
            if *readiness == Readiness::Leaving {
                return;
            }
            *readiness = Readiness::Leaving;
        }
        self.0.listeners.poke_all(&Touched::All);
        self.0.stop_watching();
        let (tx, rx) = oneshot::channel();
        if self.0.driver.send(Input::Leave(tx)).is_ok() {
            let _ = rx.await;
        }
        self.0.closing.close(FLUSH_LIMIT).await;
        let links: Vec<_> = std::mem::take(&mut *self.0.links.lock()).into_iter().collect();
        for (_, link) in links {
            link.close(&Error::ShutDown);
        }
        let tasks: Vec<_> = self.0.tasks.lock().drain(..).collect();
        for task in tasks {
            task.abort();
            // The port is free when this returns.
            let _ = task.await;
        }
        self.0.changed();
    }
}

/// A node that is starting. Whoever stops waiting for it has no node: it stops dialling and frees its port.
struct Starting(Option<System>);

impl Drop for Starting {
    fn drop(&mut self) {
        let Some(System(inner)) = self.0.take() else { return };
        *inner.readiness.lock() = Readiness::Leaving;
        for task in inner.tasks.lock().drain(..) {
            task.abort();
        }
        let links: Vec<_> = std::mem::take(&mut *inner.links.lock()).into_iter().collect();
        for (_, link) in links {
            link.close(&Error::ShutDown);
        }
    }
}

impl Inner {
    pub(super) fn set_members(&self, members: Vec<MemberInfo>) {
        let members: BTreeMap<_, _> = members.into_iter().map(|m| (m.identity.node, m)).collect();
        let (differs, moved) = {
            let mut held = self.members.write();
            let differs = held.len() != members.len()
                || held
                    .iter()
                    .zip(&members)
                    .any(|((a, x), (b, y))| a != b || x.identity != y.identity || x.state != y.state);
            let place = |members: &BTreeMap<_, MemberInfo>, node| {
                members.get(node).filter(|m| lives(m)).map(|m| m.identity.addr)
            };
            let nodes = if differs { held.keys().chain(members.keys()).collect() } else { BTreeSet::new() };
            let moved: BTreeSet<_> =
                nodes.into_iter().filter(|node| place(&held, node) != place(&members, node)).copied().collect();
            *held = members;
            (differs, moved)
        };
        if !moved.is_empty() {
            self.listeners.poke_all(&Touched::of(moved));
        }
        if differs {
            self.changed();
        }
    }

    pub(super) fn living(&self, node: NodeId) -> Option<Identity> {
        let members = self.members.read();
        let member = members.get(&node)?;
        lives(member).then_some(member.identity)
    }

    /// How a node is seen from here; `None` if it is unknown, or forgotten.
    pub(super) fn seen_as(&self, node: NodeId) -> Option<MemberState> {
        self.members.read().get(&node).map(|member| member.state)
    }

    pub(super) fn is_member(&self, node: NodeId) -> bool {
        self.living(node).is_some()
    }

    /// The living members by the addresses that they advertise.
    pub(super) fn living_at(&self) -> BTreeMap<SocketAddr, Identity> {
        let members = self.members.read();
        let living = members.values().filter(|m| lives(m));
        living.map(|m| (m.identity.addr, m.identity)).collect()
    }

    pub(super) fn has_peers(&self) -> bool {
        self.members.read().values().any(lives)
    }

    pub(super) fn all_members(&self) -> Vec<Member> {
        let me = *self.me.lock();
        let state = if *self.readiness.lock() == Readiness::Leaving { MemberState::Left } else { MemberState::Alive };
        let mut all = vec![Member { node: me.node, addr: me.addr.to_string(), state, me: true }];
        all.extend(self.members.read().values().map(|m| Member {
            node: m.identity.node,
            addr: m.identity.addr.to_string(),
            state: m.state,
            me: false,
        }));
        all
    }

    fn link_to(&self, node: NodeId) -> Result<Arc<Link>> {
        let mut links = self.links.lock();
        if let Some(link) = links.get(&node).filter(|link| !link.is_closed()) {
            return Ok(Arc::clone(link));
        }
        let peer = self.living(node).ok_or(Error::NodeNotFound { node })?;
        let (myself, hearer) = (Weak::clone(&self.myself), Weak::clone(&self.myself));
        let missing = move |actor| {
            if let Some(inner) = hearer.upgrade()
                && inner.registry.lock().bury(node, actor)
            {
                inner.changed();
            }
        };
        let link = Link::open(peer, self.link_config.clone(), missing, move |link, end| {
            if let Some(node) = myself.upgrade() {
                node.links.lock().retain(|_, held| !Arc::ptr_eq(held, link));
                let _ = node.driver.send(Input::Ended(link.peer.node, end));
            }
        });
        links.insert(node, Arc::clone(&link));
        Ok(link)
    }

    /// Lets the link to a node that left end by itself: the last answers may still be on their way.
    pub(super) fn retire_link(&self, node: NodeId, error: Error) {
        let Some(link) = self.links.lock().remove(&node) else { return };
        tokio::spawn(async move {
            tokio::time::sleep(RETIRE_LIMIT).await;
            link.close(&error);
        });
    }

    pub(super) fn close_link(&self, node: NodeId, error: &Error) {
        let link = self.links.lock().remove(&node);
        if let Some(link) = link {
            link.close(error);
        }
    }

    /// Sends a call on its way to its node.
    fn route(&self, target: Target, payload: Payload, options: CallOptions, outcall: &Arc<Outcall>) {
        let sent = if *self.readiness.lock() == Readiness::Leaving {
            Err(Error::ShutDown)
        } else if target.node == self.id {
            self.call_here(target.actor, payload, options, Arc::clone(outcall));
            Ok(())
        } else {
            payload
                .check("a message", self.config.max_message)
                .and_then(|()| self.link_to(target.node))
                .map(|link| link.call(outcall, target.actor, payload, &options))
        };
        if let Err(error) = sent {
            outcall.event(ReplyEvent::Error(error));
        }
    }

    fn call_here(&self, actor: ActorId, payload: Payload, options: CallOptions, outcall: Arc<Outcall>) {
        let cancel = CancelSignal::new();
        let credit = Arc::new(Credit::new(options.window));
        outcall.set_route(Route::Local(cancel.clone(), Arc::clone(&credit)));
        let sender = options.sender;
        let call = here(actor, Mode::Ask, payload, options, Responder::new(actor, outcall, credit, cancel));
        if let Some(call) = self.local_tells.ask(actor, sender, call) {
            drop(self.deliver(call));
        }
    }

    fn tell_here(&self, actor: ActorId, payload: Payload, options: CallOptions) -> Result<Option<PendingTell>> {
        if !self.actors.read().by_id.contains_key(&actor) {
            self.metrics.dead_letters.inc();
            return Err(Error::ActorNotFound { actor, node: self.id });
        }
        let sink = Arc::new(LocalTell {
            node: Weak::clone(&self.myself),
            actor,
            done: AtomicBool::new(false),
            full: Mutex::new(None),
        });
        let responder = Responder::new(actor, Arc::clone(&sink) as _, Arc::new(Credit::new(0)), CancelSignal::new());
        let (sender, no_wait) = (options.sender, options.no_wait);
        let options = CallOptions { timeout: None, ..options };
        let call = here(actor, Mode::Tell, payload, options, responder);
        let ticket = self.local_tells.tell(actor, sender, call, no_wait, |call| drop(self.deliver(call)))?;
        if let Some(error) = sink.full.lock().take() {
            return Err(error);
        }
        let queue: Weak<dyn TellQueue> = Weak::clone(&self.myself) as _;
        Ok(ticket.map(|ticket| PendingTell::new(queue, actor, ticket)))
    }
}

fn lives(member: &MemberInfo) -> bool {
    matches!(member.state, MemberState::Alive | MemberState::Suspect)
}

fn here(actor: ActorId, mode: Mode, payload: Payload, options: CallOptions, responder: Responder) -> Call {
    Call {
        target: actor,
        mode,
        payload,
        deadline: options.timeout.map(from_now),
        sender: options.sender,
        chain: options.chain,
        trace: options.trace,
        no_wait: options.no_wait,
        responder,
    }
}

/// Replies to a tell within the node; see [`Tells`].
struct LocalTell {
    node: Weak<Inner>,
    actor: ActorId,
    done: AtomicBool,
    /// Its mailbox was full, and the tell would not wait.
    full: Mutex<Option<Error>>,
}

impl ReplySink for LocalTell {
    fn event(&self, event: ReplyEvent) {
        if let ReplyEvent::Error(error @ Error::MailboxFull { .. }) = &event {
            *self.full.lock() = Some(error.clone());
        }
        let ended = matches!(event, ReplyEvent::Error(Error::ActorStopped { .. } | Error::ActorNotFound { .. }));
        if !ended {
            self.accepted();
        } else if !self.done.swap(true, Ordering::AcqRel)
            && let Some(node) = self.node.upgrade()
        {
            node.local_tells.ended(self.actor, |call| drop(node.deliver(call)));
        }
    }
    fn accepted(&self) {
        if !self.done.swap(true, Ordering::AcqRel)
            && let Some(node) = self.node.upgrade()
        {
            node.local_tells.granted(self.actor, 1, |call| drop(node.deliver(call)));
        }
    }
}

impl TellQueue for Inner {
    fn withdraw(&self, actor: ActorId, ticket: &Arc<Ticket>) {
        self.local_tells.withdraw(actor, ticket);
        self.local_tells.granted(actor, 0, |call| drop(self.deliver(call)));
    }
}

impl Deliver for Inner {
    fn deliver(&self, call: Call) -> Option<Arc<dyn Reader>> {
        if call.target == NODE_ACTOR {
            match self.myself.upgrade() {
                Some(node) => service::serve(&node, call),
                None => call.responder.error(Error::ShutDown),
            }
            return None;
        }
        let actor = self.actors.read().by_id.get(&call.target).cloned();
        if let Some(actor) = actor {
            self.metrics.messages.inc();
            let id = call.target;
            if let Err(panic) = fault::catch(|| actor.endpoint.deliver(call)) {
                tracing::error!(actor = %id, panic = fault::words(&*panic), "an endpoint panicked over a call");
            }
            actor.endpoint.reader()
        } else {
            self.metrics.dead_letters.inc();
            let error = Error::ActorNotFound { actor: call.target, node: self.id };
            call.responder.error(error);
            None
        }
    }
}
