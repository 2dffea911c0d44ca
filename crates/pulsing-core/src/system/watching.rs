//! Who waits for the end of which actor, here and on other nodes (R9).
//!
//! Watches of one actor share one call to its node, whatever their number. A broken link is not yet the end of a node: the
//! calls are made again until membership says that the node is down or has left.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::ends::Ends;
use super::node::{Inner, System};
use super::service::{self, Ask, NODE_ACTOR};
use super::{Ending, MemberState, Reason, Target, Terminated};
use crate::call::{CallHandle, Reply, ReplyEvent, ReplySink};
use crate::error::{Error, Result};
use crate::fault;
use crate::id::{ActorId, NodeId};
use crate::observe::Readiness;

/// The wait before a broken watch is made again doubles from the first to the last.
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_secs(1);
/// A watch that held this long has proved the link to be good.
const SETTLED: Duration = Duration::from_secs(5);
/// How long a node that is no member may take to become one: a reference can be faster than the news of its node.
const STRANGER_LIMIT: Duration = Duration::from_secs(1);
/// How long the last words of a node that left may take.
const LAST_WORDS: Duration = Duration::from_millis(700);

type LocalHook = Box<dyn FnOnce(Reason) + Send>;
type Hook = Box<dyn FnOnce(Result<Terminated>) + Send>;

/// The watches of one node.
#[derive(Default)]
pub(super) struct Watching {
    pub(super) state: Mutex<State>,
    next: AtomicU64,
}

#[derive(Default)]
pub(super) struct State {
    here: BTreeMap<ActorId, BTreeMap<u64, LocalHook>>,
    ends: Ends,
    there: BTreeMap<NodeId, Node>,
    pub(super) links: BTreeMap<ActorId, BTreeMap<Target, WatchGuard>>,
}

/// The watched actors of another node.
struct Node {
    actors: BTreeMap<ActorId, Watched>,
    failures: u32,
    asked: Instant,
    retrying: bool,
}

struct Watched {
    hooks: BTreeMap<u64, Hook>,
    call: Option<CallHandle>,
    /// Which of the calls made for it counts; 0 = none is out.
    round: u64,
}

/// Ends a watch when dropped.
pub struct WatchGuard {
    node: Weak<Inner>,
    target: Target,
    id: u64,
    here: bool,
}

impl WatchGuard {
    /// Lets the watch live as long as its actor.
    pub fn keep(mut self) {
        self.node = Weak::new();
    }
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        let Some(node) = self.node.upgrade() else { return };
        let mut state = node.watching.state.lock();
        if self.here {
            let Some(hooks) = state.here.get_mut(&self.target.actor) else { return };
            let hook = hooks.remove(&self.id);
            if hooks.is_empty() {
                state.here.remove(&self.target.actor);
            }
            drop(state);
            // A hook may own what locks when it goes.
            drop(hook);
            return;
        }
        let Some(peer) = state.there.get_mut(&self.target.node) else { return };
        let Some(watched) = peer.actors.get_mut(&self.target.actor) else { return };
        let hook = watched.hooks.remove(&self.id);
        let mut call = None;
        if watched.hooks.is_empty() {
            call = peer.actors.remove(&self.target.actor).and_then(|watched| watched.call);
            if peer.actors.is_empty() {
                state.there.remove(&self.target.node);
            }
        }
        drop(state);
        drop(hook);
        if let Some(call) = call {
            call.cancel();
        }
    }
}

/// Resolves once, when the watched actor has ended. Dropping it ends the watch.
///
/// The error is [`Error::ShutDown`] when this node is shut down first, or [`Error::Protocol`] when the actor's node runs a
/// version that cannot be watched.
pub struct Watch {
    target: Target,
    ended: oneshot::Receiver<Result<Terminated>>,
    _guard: WatchGuard,
}

impl Watch {
    /// Who is watched.
    pub fn target(&self) -> Target {
        self.target
    }
}

impl Future for Watch {
    type Output = Result<Terminated>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.ended).poll(cx).map(|ended| ended.unwrap_or(Err(Error::ShutDown)))
    }
}

impl System {
    /// Waits for the end of an actor, here or on another node (R9). Resolves at once for one that has ended.
    ///
    /// Call it inside the system's tokio runtime.
    pub fn watch(&self, target: Target) -> Watch {
        let (tx, ended) = oneshot::channel();
        let guard = self.on_end(target, move |outcome| {
            let _ = tx.send(outcome);
        });
        Watch { target, ended, _guard: guard }
    }

    /// [`watch`](Self::watch) with a callback instead of a future. It must not block, and may run before this returns.
    pub fn on_end(&self, target: Target, hook: impl FnOnce(Result<Terminated>) + Send + 'static) -> WatchGuard {
        if target.node == self.0.id {
            self.0.on_end_here(target.actor, move |reason| hook(Ok(Terminated { target, reason })))
        } else {
            self.0.on_end_there(target, Box::new(hook))
        }
    }

    /// Ends an actor, here or on another node, and returns when it has ended; `NotFound` is no error. Its own handler must
    /// not wait for it: see [`signal`](Self::signal).
    ///
    /// # Errors
    /// `ShutDown`, `NodeNotFound`, or how the connection to its node was lost.
    pub async fn end(&self, target: Target, ending: Ending) -> Result<Terminated> {
        let reason = if target.node == self.0.id {
            let watch = self.watch(target);
            self.0.end_here(target.actor, ending);
            watch.await?.reason
        } else {
            self.ask_node(target.node, &Ask::End(target.actor, ending)).await?.unwrap_or(Reason::NotFound)
        };
        Ok(Terminated { target, reason })
    }

    /// [`end`](Self::end) without waiting. A node that cannot be reached learns nothing of it.
    pub fn signal(&self, target: Target, ending: Ending) {
        if target.node == self.0.id {
            self.0.end_here(target.actor, ending);
            return;
        }
        let node = Target { node: target.node, actor: NODE_ACTOR };
        let system = self.clone();
        // The way to the node may have to be opened first.
        self.0.runtime.spawn(async move {
            if let Err(error) = system.tell(node, Ask::End(target.actor, ending).payload(), service::options()).await {
                tracing::warn!(actor = %target.actor, node = %target.node, %error, "an actor could not be told to end");
            }
        });
    }

    pub(super) async fn ask_node(&self, node: NodeId, ask: &Ask) -> Result<Option<Reason>> {
        let target = Target { node, actor: NODE_ACTOR };
        match self.call(target, ask.payload(), service::options()).await? {
            Reply::Value(payload) => service::read_answer(&payload),
            Reply::Stream(_) => Err(Error::Protocol("a node answered with a stream".to_owned())),
        }
    }
}

impl Inner {
    fn watch_id(&self) -> u64 {
        self.watching.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Runs `hook` when an actor of this node has ended; at once if it has.
    pub(super) fn on_end_here(
        self: &Arc<Self>,
        actor: ActorId,
        hook: impl FnOnce(Reason) + Send + 'static,
    ) -> WatchGuard {
        let id = self.watch_id();
        let target = Target { node: self.id, actor };
        let guard = WatchGuard { node: Arc::downgrade(self), target, id, here: true };
        let reason = {
            // An end takes the same lock: it is either seen here, or sees this hook.
            let mut state = self.watching.state.lock();
            if self.actors.read().by_id.contains_key(&actor) {
                state.here.entry(actor).or_default().insert(id, Box::new(hook));
                return guard;
            }
            state.ends.of(actor).unwrap_or(Reason::NotFound)
        };
        hook(reason);
        guard
    }

    /// Notes the end of an actor: `remove` takes it off the node, under the lock that watches are made under.
    pub(super) fn ended_here<T>(
        &self,
        actor: ActorId,
        reason: Reason,
        remove: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        let (removed, hooks, links) = {
            let mut state = self.watching.state.lock();
            let removed = remove()?;
            state.ends.push(actor, reason.clone());
            (removed, state.here.remove(&actor), state.links.remove(&actor))
        };
        drop(links);
        for hook in hooks.into_iter().flat_map(BTreeMap::into_values) {
            hook(reason.clone());
        }
        Some(removed)
    }

    /// Tells an actor of this node to end; nothing happens when it is not here.
    pub(super) fn end_here(&self, actor: ActorId, ending: Ending) {
        let found = self.actors.read().by_id.get(&actor).cloned();
        if let Some(found) = found
            && let Err(panic) = fault::catch(|| found.endpoint.end(ending))
        {
            tracing::error!(%actor, panic = fault::words(&*panic), "an endpoint panicked when told to end");
        }
    }

    fn on_end_there(self: &Arc<Self>, target: Target, hook: Hook) -> WatchGuard {
        let id = self.watch_id();
        let guard = WatchGuard { node: Arc::downgrade(self), target, id, here: false };
        let round = {
            let mut state = self.watching.state.lock();
            // Checked under the lock under which the shutdown takes what is there.
            if *self.readiness.lock() == Readiness::Leaving {
                drop(state);
                hook(Err(Error::ShutDown));
                return guard;
            }
            let now = Instant::now();
            let peer = state.there.entry(target.node).or_insert_with(|| Node {
                actors: BTreeMap::new(),
                failures: 0,
                asked: now,
                retrying: false,
            });
            let fresh = !peer.actors.contains_key(&target.actor);
            let round = if fresh && !peer.retrying { self.watch_id() } else { 0 };
            let watched = peer.actors.entry(target.actor).or_insert_with(|| Watched {
                hooks: BTreeMap::new(),
                call: None,
                round,
            });
            watched.hooks.insert(id, hook);
            round
        };
        if round != 0 {
            self.ask_watch(target, round);
        }
        guard
    }

    fn ask_watch(self: &Arc<Self>, target: Target, round: u64) {
        let sink = Arc::new(WatchSink { node: Arc::downgrade(self), target, round });
        let node = Target { node: target.node, actor: NODE_ACTOR };
        let payload = Ask::Watch(target.actor).payload();
        let call = System(Arc::clone(self)).dispatch(node, payload, service::options(), sink);
        let unwanted = {
            let mut state = self.watching.state.lock();
            match watched(&mut state, target, round) {
                Some(watched) => watched.call.replace(call),
                None => Some(call),
            }
        };
        if let Some(call) = unwanted {
            call.cancel();
        }
    }

    fn watch_answered(&self, target: Target, round: u64, outcome: &Result<Terminated>) {
        let hooks = {
            let mut state = self.watching.state.lock();
            if watched(&mut state, target, round).is_none() {
                return;
            }
            let Some(peer) = state.there.get_mut(&target.node) else { return };
            let found = peer.actors.remove(&target.actor);
            if peer.actors.is_empty() {
                state.there.remove(&target.node);
            }
            found
        };
        for hook in hooks.into_iter().flat_map(|watched| watched.hooks.into_values()) {
            hook(outcome.clone());
        }
    }

    fn watch_broke(self: &Arc<Self>, target: Target, round: u64) {
        let mut state = self.watching.state.lock();
        let Some(watched) = watched(&mut state, target, round) else { return };
        watched.round = 0;
        let call = watched.call.take();
        if let Some(peer) = state.there.get_mut(&target.node)
            && !peer.retrying
        {
            peer.retrying = true;
            if peer.asked.elapsed() > SETTLED {
                peer.failures = 0;
            }
            self.runtime.spawn(retry(Arc::downgrade(self), target.node));
        }
        drop(state);
        drop(call);
    }

    /// Makes the watches of a node again, or finds out that it is no more. True: there is nothing more to do.
    fn watch_again(self: &Arc<Self>, node: NodeId, stranger_since: &mut Option<Instant>) -> bool {
        match self.seen_as(node) {
            Some(MemberState::Down) => {
                self.node_ended(node, &Reason::NodeLost);
                true
            }
            Some(MemberState::Left) => {
                self.node_ended(node, &Reason::NodeLeft);
                true
            }
            Some(MemberState::Alive | MemberState::Suspect) => {
                let again: Vec<_> = {
                    let mut state = self.watching.state.lock();
                    let Some(peer) = state.there.get_mut(&node) else { return true };
                    (peer.retrying, peer.asked) = (false, Instant::now());
                    let broken = peer.actors.iter_mut().filter(|(_, watched)| watched.round == 0);
                    broken
                        .map(|(actor, watched)| {
                            watched.round = self.watch_id();
                            (*actor, watched.round)
                        })
                        .collect()
                };
                for (actor, round) in again {
                    self.ask_watch(Target { node, actor }, round);
                }
                true
            }
            None => {
                let since = *stranger_since.get_or_insert_with(Instant::now);
                if since.elapsed() < STRANGER_LIMIT {
                    return false;
                }
                self.node_ended(node, &Reason::NodeLost);
                true
            }
        }
    }

    fn watch_delay(&self, node: NodeId) -> Option<Duration> {
        let mut state = self.watching.state.lock();
        let peer = state.there.get_mut(&node)?;
        let delay = FIRST_RETRY.saturating_mul(1 << peer.failures.min(10)).min(LAST_RETRY);
        peer.failures += 1;
        Some(delay)
    }

    /// Every actor of a node ended with it.
    pub(super) fn node_ended(&self, node: NodeId, reason: &Reason) {
        let Some(peer) = self.watching.state.lock().there.remove(&node) else { return };
        for (actor, watched) in peer.actors {
            let target = Target { node, actor };
            for hook in watched.hooks.into_values() {
                hook(Ok(Terminated { target, reason: reason.clone() }));
            }
            if let Some(call) = watched.call {
                call.cancel();
            }
        }
    }

    /// A node said goodbye. How its actors ended may still be on its way.
    pub(super) fn node_leaves(self: &Arc<Self>, node: NodeId) {
        if !self.watching.state.lock().there.contains_key(&node) {
            return;
        }
        let weak = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::time::sleep(LAST_WORDS).await;
            if let Some(inner) = weak.upgrade() {
                inner.node_ended(node, &Reason::NodeLeft);
            }
        });
    }

    /// This node leaves: who watches its actors is told so, and who watches others from here learns nothing more.
    pub(super) fn stop_watching(&self) {
        let (here, there, links) = {
            let mut state = self.watching.state.lock();
            (std::mem::take(&mut state.here), std::mem::take(&mut state.there), std::mem::take(&mut state.links))
        };
        drop(links);
        for hook in here.into_values().flat_map(BTreeMap::into_values) {
            hook(Reason::NodeLeft);
        }
        for watched in there.into_values().flat_map(|node| node.actors.into_values()) {
            for hook in watched.hooks.into_values() {
                hook(Err(Error::ShutDown));
            }
        }
    }
}

fn watched(state: &mut State, target: Target, round: u64) -> Option<&mut Watched> {
    let watched = state.there.get_mut(&target.node)?.actors.get_mut(&target.actor)?;
    (watched.round == round).then_some(watched)
}

async fn retry(inner: Weak<Inner>, node: NodeId) {
    let mut stranger_since = None;
    // What has ended needs no wait; what has not is given one, however often its link breaks.
    if let Some(inner) = inner.upgrade()
        && !matches!(inner.seen_as(node), Some(MemberState::Alive | MemberState::Suspect))
        && inner.watch_again(node, &mut stranger_since)
    {
        return;
    }
    loop {
        let Some(delay) = inner.upgrade().and_then(|inner| inner.watch_delay(node)) else { return };
        tokio::time::sleep(delay).await;
        let Some(inner) = inner.upgrade() else { return };
        if inner.watch_again(node, &mut stranger_since) {
            return;
        }
    }
}

/// Takes the answer to the call that a remote watch is.
struct WatchSink {
    node: Weak<Inner>,
    target: Target,
    round: u64,
}

impl ReplySink for WatchSink {
    fn event(&self, event: ReplyEvent) {
        let Some(node) = self.node.upgrade() else { return };
        let (target, round) = (self.target, self.round);
        match event {
            ReplyEvent::Value(payload) => {
                let outcome = service::read_answer(&payload)
                    .map(|reason| Terminated { target, reason: reason.unwrap_or(Reason::NotFound) });
                node.watch_answered(target, round, &outcome);
            }
            ReplyEvent::Error(Error::ActorNotFound { actor: NODE_ACTOR, .. }) => {
                let why = format!("node {} runs a version whose actors cannot be watched", target.node);
                node.watch_answered(target, round, &Err(Error::Protocol(why)));
            }
            ReplyEvent::Error(error @ Error::Protocol(_)) => node.watch_answered(target, round, &Err(error)),
            ReplyEvent::Error(_) => node.watch_broke(target, round),
            ReplyEvent::StreamStart | ReplyEvent::Item(_) | ReplyEvent::End => {}
        }
    }
}

#[cfg(test)]
#[path = "watching_tests.rs"]
mod tests;
