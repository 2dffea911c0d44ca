//! The one port of a node: links, membership and observers, told apart by their first byte.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::conn::Conn;
use super::control::{self, ControlEvent};
use super::handshake::{self, Lane, Trust};
use super::link::{LinkConfig, LinkEnd};
use super::session::{self, Pairing, SessionConfig};
use super::tls::ClusterTls;
use super::transport::{Listener, Stream};
use super::wire::MAGIC;
use crate::error::Error;
use crate::observe::{self, ObserveSource};

/// A connection that says nothing for this long is closed.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that have not yet shown what they are; beyond, the oldest is closed for each new one, so that silent ones
/// cannot lock out the cluster.
const UNKNOWN_LIMIT: usize = 512;
/// First byte of a TLS record.
const TLS: u8 = 0x16;

const PLAIN: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// Says in the caller's tongue that TLS is needed here.
async fn turn_away(first: u8, mut stream: Stream, from: SocketAddr, tls: &ClusterTls) {
    if first == MAGIC[0] {
        let reason = handshake::turn_away_plaintext(&mut stream, from, tls).await;
        tracing::warn!(%from, reason, "a plaintext peer was refused");
    } else {
        let message = format!("this node speaks TLS only: use pulsing inspect with {}", tls.way_in());
        let body = serde_json::json!({"error": {"message": message}}).to_string();
        let answer = format!(
            "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        let _ = stream.write_all(answer.as_bytes()).await;
    }
    let _ = stream.shutdown().await;
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
    pub events: mpsc::UnboundedSender<ControlEvent>,
    /// Observers; `None` = they are turned away.
    pub observe: Option<Arc<dyn ObserveSource>>,
}

/// Connections that have not yet shown what they are, oldest first.
#[derive(Default)]
struct Unknown(VecDeque<(Known, AbortHandle)>);

/// Set when a connection has shown what it is.
type Known = Arc<AtomicBool>;

impl Unknown {
    fn add(&mut self, known: Known, task: AbortHandle) {
        if self.0.len() >= UNKNOWN_LIMIT {
            self.0.retain(|(known, task)| !known.load(Relaxed) && !task.is_finished());
        }
        if self.0.len() >= UNKNOWN_LIMIT
            && let Some((_, oldest)) = self.0.pop_front()
        {
            oldest.abort();
        }
        self.0.push_back((known, task));
    }
}

/// Accepts until it is dropped; dropping it closes every accepted connection.
pub async fn run(listener: Listener, config: ListenerConfig) {
    let mut unknown = Unknown::default();
    let pairing = Arc::new(Pairing::default());
    let mut tasks = JoinSet::new();
    loop {
        let (mut stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely: pause instead of spinning.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        let (config, pairing) = (config.clone(), Arc::clone(&pairing));
        let known = Known::default();
        let shown = Arc::clone(&known);
        let task = tasks.spawn(async move {
            if let Ok(Some(first)) = tokio::time::timeout(FIRST_BYTE_TIMEOUT, stream.first_byte()).await {
                route(first, stream, from, config, pairing, shown).await;
            }
        });
        unknown.add(known, task);
    }
}

async fn route(
    first: u8,
    mut stream: Stream,
    from: SocketAddr,
    config: ListenerConfig,
    pairing: Arc<Pairing>,
    known: Known,
) {
    let mut stream = match (&config.link.cred.trust, first) {
        (Trust::Tls(tls), TLS) => {
            let accepted = tokio::time::timeout(handshake::HANDSHAKE_TIMEOUT, tls.accept(stream)).await;
            match accepted.unwrap_or_else(|_| Err("it dawdled over the TLS handshake".into())) {
                Ok(stream) => Conn::Tls(Box::new(stream)),
                Err(reason) => {
                    config.link.metrics.refused.inc();
                    tracing::warn!(%from, reason, "a peer was refused");
                    return;
                }
            }
        }
        (Trust::Tls(tls), _) => {
            config.link.metrics.refused.inc();
            turn_away(first, stream, from, tls).await;
            return;
        }
        (_, TLS) => {
            config.link.metrics.refused.inc();
            tracing::warn!(%from, "a peer was refused: it speaks TLS, and this node was started with neither --passphrase-file nor --cert");
            // Not a TLS record: the peer's library says that it got no TLS, which is what our dialler explains.
            let _ = stream.write_all(PLAIN).await;
            return;
        }
        _ => Conn::Plain(stream),
    };
    let first = if matches!(stream, Conn::Tls(_)) {
        match tokio::time::timeout(FIRST_BYTE_TIMEOUT, stream.read_u8()).await {
            Ok(Ok(byte)) => byte,
            _ => return,
        }
    } else {
        first
    };
    let under_tls = matches!(stream, Conn::Tls(_));
    let shown = stream.certificate().cloned();
    let mut stream = Replay { first: under_tls.then_some(first), inner: stream };
    if first != MAGIC[0] {
        known.store(true, Relaxed);
        if let Some(source) = config.observe {
            observe::serve(stream, source).await;
        }
        return;
    }
    let me = *config.link.me.lock();
    let accepted = match handshake::accept(&mut stream, from, me, &config.link.cred, shown.as_ref()).await {
        Ok(accepted) => accepted,
        Err(error) => {
            config.link.metrics.refused.inc();
            if let Error::Refused { reason, .. } = error {
                tracing::warn!(%from, reason, "a peer was refused");
            } else {
                tracing::debug!(%from, %error, "a handshake failed");
            }
            return;
        }
    };
    tracing::trace!(peer = %accepted.peer, version = accepted.version, "accepted");
    known.store(true, Relaxed);
    let stream = stream.inner;
    match accepted.lane {
        Lane::Control => control::serve(accepted.peer, stream, config.events, config.link).await,
        lane => {
            if let Some((small, bulk)) = pairing.pair(accepted.session, lane, stream).await {
                session::serve(accepted.peer, small, bulk, config.session).await;
                let _ = config.events.send(ControlEvent::Ended(accepted.peer.node, LinkEnd::Broken));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_silent_connection_makes_room_and_no_other() {
        let mut unknown = Unknown::default();
        let mut tasks = JoinSet::new();
        let mut add = |shown: bool| {
            let known = Arc::new(AtomicBool::new(shown));
            let task = tasks.spawn(std::future::pending::<()>());
            unknown.add(known, task.clone());
            task
        };
        let mut proven: Vec<_> = (0..10).map(|_| add(true)).collect();
        let mut silent: Vec<_> = (0..UNKNOWN_LIMIT + 5).map(|_| add(false)).collect();
        proven.push(add(true));
        tokio::task::yield_now().await;
        let kept = silent.split_off(6);
        assert!(silent.iter().all(AbortHandle::is_finished), "the six oldest have gone");
        assert!(!kept.iter().chain(&proven).any(AbortHandle::is_finished), "who came later, or is known, stays");
    }
}
