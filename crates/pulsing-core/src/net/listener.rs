//! The one port of a node: links, membership and observers, told apart by their first byte.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::conn;
use super::control::{self, ControlEvent};
use super::handshake::{self, Lane};
use super::link::{LinkConfig, LinkEnd};
use super::session::{self, Pairing, SessionConfig};
use super::wire::MAGIC;
use crate::error::{Error, Result};
use crate::observe::{self, ObserveSource};

/// A connection that says nothing for this long is closed.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that have not yet shown what they are; beyond, new ones wait in the kernel.
const UNKNOWN_LIMIT: usize = 512;
/// First byte of a TLS record.
const TLS: u8 = 0x16;

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

/// Listens on `addr`.
///
/// # Errors
/// `Bind` with the system's words.
pub fn bind(addr: SocketAddr) -> Result<TcpListener> {
    let make = || -> std::io::Result<TcpListener> {
        let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None)?;
        // A restart on the same port must not wait for the kernel to forget old connections.
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&addr.into())?;
        socket.listen(1024)?;
        TcpListener::from_std(socket.into())
    };
    make().map_err(|e| {
        let reason = if e.kind() == std::io::ErrorKind::AddrInUse {
            "the port is in use; choose another --addr or stop its holder".to_owned()
        } else {
            e.to_string()
        };
        Error::Bind { addr: addr.to_string(), reason }
    })
}

/// Accepts until it is dropped; dropping it closes every accepted connection.
pub async fn run(listener: TcpListener, config: ListenerConfig) {
    let unknown = Arc::new(Semaphore::new(UNKNOWN_LIMIT));
    let pairing = Arc::new(Pairing::default());
    let mut tasks = JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&unknown).acquire_owned().await else { return };
        let (stream, from) = match listener.accept().await {
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
        tasks.spawn(async move {
            conn::prepare(&stream);
            if let Ok(Some(first)) = tokio::time::timeout(FIRST_BYTE_TIMEOUT, first_byte(&stream)).await {
                route(first, stream, from, config, pairing, permit).await;
            }
        });
    }
}

async fn first_byte(stream: &TcpStream) -> Option<u8> {
    let mut byte = [0];
    (stream.peek(&mut byte).await.ok()? == 1).then_some(byte[0])
}

async fn route(
    first: u8,
    mut stream: TcpStream,
    from: SocketAddr,
    config: ListenerConfig,
    pairing: Arc<Pairing>,
    permit: tokio::sync::OwnedSemaphorePermit,
) {
    if first == TLS {
        tracing::warn!(%from, "a TLS connection was refused: TLS is off on this node");
        return;
    }
    if first != MAGIC[0] {
        drop(permit);
        if let Some(source) = config.observe {
            observe::serve(stream, source).await;
        }
        return;
    }
    let me = *config.link.me.lock();
    let accepted = match handshake::accept(&mut stream, from, me, &config.link.cred).await {
        Ok(accepted) => accepted,
        Err(error) => {
            config.link.metrics.refused.inc();
            if matches!(error, Error::Refused { .. }) {
                tracing::warn!(%from, %error, "a peer was refused");
            } else {
                tracing::debug!(%from, %error, "a handshake failed");
            }
            return;
        }
    };
    drop(permit);
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
