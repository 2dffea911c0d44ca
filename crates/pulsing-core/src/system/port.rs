//! Taking a node's port, also from its former self that still leaves (M4).

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::net::handshake::Trust;
use crate::net::transport::{Listener, Transport};
use crate::observe::{Protocol, Readiness, get_with};

/// How long a port may stay taken. Somebody who was just told to stop may not have begun to.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a node that leaves may take to: the drain of `pulsing actor` lasts half of it.
const DEPARTURE: Duration = Duration::from_secs(60);
/// Pause between two tries.
const AGAIN: Duration = Duration::from_millis(50);
/// What the holder of the port gets to say who it is.
const ANSWER: Duration = Duration::from_millis(500);

/// Listens on `addr`, which `flag` chose. A port held by a node that leaves is waited for.
///
/// # Errors
/// `Bind` with the system's words, or saying who holds the port.
pub(super) async fn listen(addr: SocketAddr, flag: &str, transport: &Transport, trust: &Trust) -> Result<Listener> {
    let failed = |reason: String| Error::Bind { addr: addr.to_string(), reason };
    let begun = Instant::now();
    // When there was last reason to wait: one that leaves does not answer in its last moment, nor always in time before.
    let mut hope = begun;
    let mut told = false;
    loop {
        let error = match transport.bind(addr) {
            Ok(listener) => return Ok(listener),
            Err(error) => error,
        };
        if error.kind() != ErrorKind::AddrInUse {
            return Err(failed(error.to_string()));
        }
        let holder = if matches!(transport, Transport::Tcp) { ask(addr, trust).await } else { None };
        let leaves = holder.as_ref().is_some_and(|holder| holder.leaves);
        if leaves {
            hope = Instant::now();
        }
        let over = hope.elapsed() >= PATIENCE || begun.elapsed() >= DEPARTURE;
        if !matches!(transport, Transport::Tcp) || over {
            let whose = match holder {
                Some(Holder { node, leaves: false }) => format!(" by Pulsing node {node}"),
                Some(Holder { node, leaves: true }) => {
                    format!(" by Pulsing node {node}, which began to leave but did not within {DEPARTURE:?}")
                }
                None => String::new(),
            };
            return Err(failed(format!("the port is in use{whose}; choose another {flag} or stop its holder")));
        }
        if leaves && !told {
            told = true;
            tracing::info!("{addr} is held by a node that leaves: waiting for it");
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Who has the port.
struct Holder {
    node: String,
    leaves: bool,
}

/// Asks the holder of a port who it is; `None` if it is no node, or does not talk to us.
async fn ask(addr: SocketAddr, trust: &Trust) -> Option<Holder> {
    let ip = match addr.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let tls = match trust {
        Trust::Tls(tls) => Some(tls),
        Trust::Secret(_) | Trust::Anyone => None,
    };
    let place = SocketAddr::new(ip, addr.port()).to_string();
    let answer = get_with(&place, "/ready", ANSWER, Protocol::Http1, tls).await.ok()?;
    let body: serde_json::Value = answer.json().ok()?;
    let text = |key: &str| body.get(key)?.as_str().map(str::to_owned);
    Some(Holder { node: text("node_id")?, leaves: text("status")? == Readiness::Leaving.as_str() })
}
