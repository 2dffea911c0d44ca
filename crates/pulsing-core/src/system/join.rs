//! Finding the cluster through its seeds, and finding it again (M4, M6).

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use super::address;
use super::driver::Input;
use super::node::Inner;
use crate::cluster::Identity;
use crate::error::{Error, Result};
use crate::id::NodeId;
use crate::net::conn;
use crate::net::handshake::Lane;
use crate::net::wire::{EmptyHeader, Kind, encode};

/// Pause between two rounds over the seeds.
const RETRY: Duration = Duration::from_millis(500);
/// How often the user is told what is waited for.
const NOTICE: Duration = Duration::from_secs(5);
/// How often seeds that are not members are dialled again, joined or not: two halves that lost each other meet there.
const REDIAL: Duration = Duration::from_secs(2);

/// Joins through the seeds, or finds that this is the first node.
///
/// # Errors
/// `JoinFailed` at the timeout with what was tried; `Refused` at once, since waiting does not help.
pub(super) async fn join(inner: &Arc<Inner>, timeout: Option<Duration>) -> Result<()> {
    let begun = Instant::now();
    let mut noticed = begun;
    let mut seeds: BTreeSet<String> = inner.config.seeds.iter().cloned().collect();
    let mut tried: BTreeMap<String, String> = BTreeMap::new();
    let mut changes = inner.changes.subscribe();
    while !seeds.is_empty() {
        for seed in seeds.clone() {
            match meet(inner, &seed).await {
                Ok(Met::Myself) => {
                    seeds.remove(&seed);
                    tried.remove(&seed);
                }
                Ok(Met::Peer(_)) => {
                    tried.insert(seed, "it answered, but does not know us yet".into());
                }
                Err(error @ (Error::Refused { .. } | Error::Config(_))) => return Err(error),
                Err(error) => {
                    tried.insert(seed, error.to_string());
                }
            }
        }
        // An answer of a seed makes it a member within moments.
        let pause = tokio::time::sleep(RETRY);
        tokio::pin!(pause);
        loop {
            if inner.has_peers() {
                return Ok(());
            }
            tokio::select! {
                biased;
                changed = changes.changed() => if changed.is_err() { return Err(Error::ShutDown) },
                () = &mut pause => break,
            }
        }
        let waited = begun.elapsed();
        let list = || tried.iter().map(|(seed, why)| format!("{seed} ({why})")).collect::<Vec<_>>().join("; ");
        if let Some(after) = timeout.filter(|t| waited >= *t) {
            return Err(Error::JoinFailed { after, tried: list() });
        }
        if noticed.elapsed() >= NOTICE && !seeds.is_empty() {
            noticed = Instant::now();
            tracing::warn!("still waiting for the cluster after {} s: {}", waited.as_secs(), list());
        }
    }
    Ok(())
}

/// Keeps dialling seeds that are not members, for as long as the node lives.
pub(super) async fn keep(inner: Weak<Inner>) {
    let mut known: BTreeMap<String, NodeId> = BTreeMap::new();
    loop {
        tokio::time::sleep(REDIAL).await;
        let Some(inner) = inner.upgrade() else { return };
        for seed in &inner.config.seeds {
            if known.get(seed).is_some_and(|node| inner.is_member(*node) || *node == inner.id) {
                continue;
            }
            match meet(&inner, seed).await {
                Ok(Met::Myself) => {
                    known.insert(seed.clone(), inner.id);
                }
                Ok(Met::Peer(peer)) => {
                    known.insert(seed.clone(), peer.node);
                }
                Err(error) => tracing::debug!(seed, %error, "a seed is away"),
            }
        }
    }
}

enum Met {
    Myself,
    Peer(Identity),
}

/// Asks whoever answers at a seed who it is, and asks to join it.
async fn meet(inner: &Arc<Inner>, seed: &str) -> Result<Met> {
    let mut last = None;
    for addr in address::resolve(seed, &inner.config.transport).await? {
        match ask(inner, addr).await {
            Ok(peer) if peer.node == inner.id => return Ok(Met::Myself),
            Ok(peer) => {
                let _ = inner.driver.send(Input::Join(peer));
                return Ok(Met::Peer(peer));
            }
            Err(error @ Error::Refused { .. }) => return Err(error),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| Error::InvalidAddress { value: seed.to_owned(), reason: "no address".into() }))
}

async fn ask(inner: &Arc<Inner>, addr: SocketAddr) -> Result<Identity> {
    let (mut stream, peer) = conn::dial(addr, Lane::Control, 0, &inner.link_config).await.map_err(|e| e.error)?;
    let _ = stream.write_all(&encode(Kind::Bye, &EmptyHeader {}, 0)).await;
    let _ = stream.shutdown().await;
    Ok(peer)
}
