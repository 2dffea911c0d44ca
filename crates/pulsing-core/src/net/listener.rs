//! The one port of a node: links, membership and observers, told apart by their first byte.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};

use super::conn::Conn;
use super::control::{self, ControlEvent, Inbox};
use super::handshake::{self, Accepted, Lane, Trust};
use super::link::{LinkConfig, LinkEnd};
use super::refusals::{self, Refusals};
use super::session::{self, Pairing, SessionConfig};
use super::tls::ClusterTls;
use super::transport::{Listener, Stream};
use super::wire::MAGIC;
use crate::error::Error;
use crate::observe::{self, ObserveSource, Scope};
use crate::seldom::Seldom;

/// First byte of a TLS record.
const TLS: u8 = 0x16;

const PLAIN: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// Says in the caller's tongue that TLS is needed here, and returns what it said.
async fn turn_away(first: u8, stream: &mut Stream, from: SocketAddr, tls: &ClusterTls) -> String {
    if first == MAGIC[0] {
        return handshake::turn_away_plaintext(stream, from, tls).await;
    }
    let message = format!("this node speaks TLS only: use pulsing inspect with {}", tls.way_in());
    let body = serde_json::json!({"error": {"message": message}}).to_string();
    let answer = format!(
        "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let _ = stream.write_all(answer.as_bytes()).await;
    let _ = stream.shutdown().await;
    message
}

/// A stream whose first byte was already looked at.
struct Replay {
    first: Option<u8>,
    inner: Conn,
}

impl AsyncRead for Replay {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        if buf.remaining() > 0
            && let Some(first) = self.first.take()
        {
            buf.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Replay {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// What the listener hands connections to.
#[derive(Clone)]
pub struct ListenerConfig {
    /// Handshakes.
    pub link: LinkConfig,
    /// Call links.
    pub session: SessionConfig,
    /// Membership traffic.
    pub inbox: Inbox,
    /// What observers are told from.
    pub source: Arc<dyn ObserveSource>,
    /// Whether they are. If not, a process of this host still learns whether the node is about to free its port.
    pub observe: bool,
}

/// Connections that have not yet shown what they are, oldest first.
struct Unknown {
    all: VecDeque<Newcomer>,
    most: usize,
}

struct Newcomer {
    from: SocketAddr,
    known: Known,
    task: AbortHandle,
}

/// Set when a connection has shown what it is.
type Known = Arc<AtomicBool>;

impl Unknown {
    fn new(most: usize) -> Self {
        Self { all: VecDeque::new(), most }
    }

    /// Adds one. Beyond the limit the oldest one of the address that holds the most is closed, and returned: silent
    /// connections lock out neither the cluster nor each other.
    fn add(&mut self, newcomer: Newcomer) -> Option<SocketAddr> {
        if self.all.len() >= self.most {
            self.all.retain(|one| !one.known.load(Relaxed) && !one.task.is_finished());
        }
        let mut closed = None;
        if self.all.len() >= self.most {
            let mut held: HashMap<IpAddr, usize> = HashMap::new();
            for one in &self.all {
                *held.entry(one.from.ip()).or_default() += 1;
            }
            let most = held.values().copied().max().unwrap_or_default();
            let oldest = self.all.iter().position(|one| held.get(&one.from.ip()) == Some(&most));
            if let Some(one) = oldest.and_then(|at| self.all.remove(at)) {
                one.task.abort();
                closed = Some(one.from);
            }
        }
        self.all.push_back(newcomer);
        closed
    }
}

/// Accepts until it is dropped; dropping it closes every accepted connection.
pub async fn run(listener: Listener, config: ListenerConfig) {
    let mut unknown = Unknown::new(config.link.limits.handshakes);
    let shared = Arc::new(Shared {
        pairing: Pairing::default(),
        refusals: Refusals::default(),
        observers: Semaphore::new(config.link.limits.observers.min(Semaphore::MAX_PERMITS)),
    });
    let mut tasks = JoinSet::new();
    let mut failures = Seldom::default();
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely: pause instead of spinning.
                if let Some(more) = failures.due() {
                    tracing::warn!(%error, more, "cannot accept a connection; if too many files are open, raise `ulimit -n`");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        let known = Known::default();
        let task = tasks.spawn(welcome(stream, from, config.clone(), Arc::clone(&shared), Arc::clone(&known)));
        if let Some(closed) = unknown.add(Newcomer { from, known, task }) {
            config.link.metrics.refused.inc();
            shared.refusals.note(
                closed,
                refusals::Kind::Crowding,
                "too many connections that do not say what they are",
            );
        }
    }
}

/// What all connections of a listener have in common.
struct Shared {
    pairing: Pairing,
    refusals: Refusals,
    observers: Semaphore,
}

/// What a connection has shown itself to be.
enum Shown {
    Link(Accepted, Conn),
    Observer(Box<Replay>),
}

/// One that has not: why, for the log, or nothing to speak of.
type Unwelcome = Option<(refusals::Kind, String)>;

async fn welcome(stream: Stream, from: SocketAddr, config: ListenerConfig, shared: Arc<Shared>, known: Known) {
    let refused = |kind, reason: &str| {
        config.link.metrics.refused.inc();
        shared.refusals.note(from, kind, reason);
    };
    let limit = config.link.limits.handshake;
    // One limit for all of it: a byte now and then buys no more time.
    let shown = match tokio::time::timeout(limit, introduction(stream, from, &config)).await {
        Ok(Ok(shown)) => shown,
        Ok(Err(Some((kind, reason)))) => return refused(kind, &reason),
        Ok(Err(None)) => return,
        Err(_) => return refused(refusals::Kind::Dawdling, &format!("it did not say within {limit:?} what it is")),
    };
    known.store(true, Relaxed);
    match shown {
        Shown::Observer(stream) => {
            let scope = match config.observe {
                true => Scope::All,
                false if handshake::is_local(from.ip()) => Scope::Readiness,
                false => return,
            };
            if let Some(reason) = observe::serve_within(*stream, config.source, scope, &shared.observers).await {
                refused(refusals::Kind::Garbage, &reason);
            }
        }
        Shown::Link(accepted, stream) => match accepted.lane {
            Lane::Control => control::serve(accepted.peer, stream, config.inbox, config.link).await,
            lane => {
                if let Some((small, bulk)) = shared.pairing.pair(accepted.session, lane, stream).await {
                    session::serve(accepted.peer, small, bulk, config.session).await;
                    let _ = config.inbox.events.send(ControlEvent::Ended(accepted.peer.node, LinkEnd::Broken));
                }
            }
        },
    }
}

async fn introduction(
    mut stream: Stream,
    from: SocketAddr,
    config: &ListenerConfig,
) -> std::result::Result<Shown, Unwelcome> {
    use refusals::Kind;
    // One that comes and goes without a word is somebody's look whether the port is open.
    let first = stream.first_byte().await.ok_or(None)?;
    let mut stream = match (&config.link.cred.trust, first) {
        (Trust::Tls(tls), TLS) => {
            Conn::Tls(Box::new(tls.accept(stream).await.map_err(|reason| Some((Kind::Tls, reason)))?))
        }
        (Trust::Tls(tls), _) => {
            return Err(Some((Kind::Plaintext, turn_away(first, &mut stream, from, tls).await)));
        }
        (_, TLS) => {
            // Not a TLS record: the peer's library says that it got no TLS, which is what our dialler explains.
            let _ = stream.write_all(PLAIN).await;
            let reason = "it speaks TLS, and this node was started with neither --passphrase-file nor --cert";
            return Err(Some((Kind::TlsToPlaintext, reason.to_owned())));
        }
        _ => Conn::Plain(stream),
    };
    let under_tls = matches!(stream, Conn::Tls(_));
    let first = if under_tls { stream.read_u8().await.map_err(|_| None)? } else { first };
    let certificate = stream.certificate().cloned();
    let mut stream = Replay { first: under_tls.then_some(first), inner: stream };
    if first != MAGIC[0] {
        if first.is_ascii_uppercase() {
            return Ok(Shown::Observer(Box::new(stream)));
        }
        let _ = stream.write_all(PLAIN).await;
        return Err(Some((Kind::Garbage, "what it sends is neither a link's nor HTTP".to_owned())));
    }
    let me = *config.link.me.lock();
    match handshake::accept(&mut stream, from, me, &config.link.cred, certificate.as_ref()).await {
        Ok(accepted) => {
            tracing::trace!(peer = %accepted.peer, version = accepted.version, "accepted");
            Ok(Shown::Link(accepted, stream.inner))
        }
        Err(Error::Refused { reason, .. }) => Err(Some((Kind::Handshake, reason))),
        Err(Error::ConnectFailed { reason, .. }) => Err(Some((Kind::Garbage, reason))),
        Err(error) => Err(Some((Kind::Garbage, error.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_silent_connection_of_the_busiest_address_makes_room_and_no_other() {
        const MOST: usize = 20;
        let mut unknown = Unknown::new(MOST);
        let mut tasks = JoinSet::new();
        let mut add = |shown: bool, host: u8| {
            let task = tasks.spawn(std::future::pending::<()>());
            let from = SocketAddr::new([10, 0, 0, host].into(), 1);
            unknown.add(Newcomer { from, known: Arc::new(AtomicBool::new(shown)), task: task.clone() });
            task
        };
        let mut kept: Vec<_> = (0..10).map(|_| add(true, 1)).collect();
        kept.extend([add(false, 2), add(false, 3)]);
        let mut silent: Vec<_> = (0..MOST + 5).map(|_| add(false, 1)).collect();
        kept.extend([add(true, 1), add(false, 2)]);
        tokio::task::yield_now().await;
        let gone = silent.iter().take_while(|task| task.is_finished()).count();
        kept.extend(silent.drain(gone..));
        assert!(gone >= 7, "{gone}");
        assert!(!kept.iter().any(AbortHandle::is_finished), "who came later, is known, or comes alone, stays");
    }
}
