//! Finding the cluster through its seeds, and finding it again (M4, M6).

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use super::driver::Input;
use super::node::Inner;
use super::seed::Seed;
use crate::cluster::Identity;
use crate::error::{Error, Result};
use crate::net::conn;
use crate::net::handshake::{self, Lane};
use crate::net::wire::{EmptyHeader, Kind, encode};

/// Pause between two rounds over the seeds.
const RETRY: Duration = Duration::from_millis(500);
/// How often the user is told what is waited for.
const NOTICE: Duration = Duration::from_secs(5);
/// How often seeds that are not members are dialled again, joined or not: two halves that lost each other meet there.
const REDIAL: Duration = Duration::from_secs(2);
/// How long a node that has peers believes a name server; alone it asks at every round.
const BELIEVE: Duration = Duration::from_secs(10);
/// Addresses dialled at once.
const AT_ONCE: usize = 64;

/// Joins through the seeds, or finds that this is the first node.
///
/// # Errors
/// `JoinFailed` at the timeout with what was tried; `Refused` at once, since waiting does not help.
pub(super) async fn join(inner: &Arc<Inner>, timeout: Option<Duration>) -> Result<()> {
    let begun = Instant::now();
    let mut notice = tokio::time::interval_at(begun + NOTICE, NOTICE);
    let mut changes = inner.changes.follow();
    let mut search = Search::default();
    let mut told: BTreeMap<String, String> = BTreeMap::new();
    let dialled = Arc::clone(&search.dialled);
    let list = |told: &BTreeMap<String, String>| {
        let silent = |seed: &String| match dialled.lock().get(seed) {
            Some(addrs) => addrs.iter().map(|addr| format!("{addr}: no answer yet")).collect::<Vec<_>>().join(", "),
            None => "its name has not been resolved yet".to_owned(),
        };
        let all = inner.seeds.iter().map(ToString::to_string).filter(|seed| told.contains_key(seed) || told.is_empty());
        all.map(|seed| format!("{seed} ({})", told.get(&seed).cloned().unwrap_or_else(|| silent(&seed))))
            .collect::<Vec<_>>()
            .join("; ")
    };
    let deadline = async {
        match timeout {
            Some(after) => {
                tokio::time::sleep_until(begun + after).await;
                after
            }
            None => std::future::pending().await,
        }
    };
    tokio::pin!(deadline);
    loop {
        let round = async {
            let found = search.round(inner).await;
            (found, search)
        };
        tokio::pin!(round);
        let mut pause = std::pin::pin!(tokio::time::sleep(RETRY));
        let mut ended = None;
        loop {
            // An answer of a seed makes it a member within moments.
            if inner.has_peers() {
                return Ok(());
            }
            tokio::select! {
                biased;
                changed = changes.changed() => changed?,
                (found, back) = &mut round, if ended.is_none() => {
                    let found = found?;
                    if found.values().all(|seen| !seen.is_empty() && seen.iter().all(|(_, seen)| *seen == Seen::Myself)) {
                        return Ok(());
                    }
                    told = found.into_iter().filter_map(|(seed, seen)| Some((seed, words(inner, &seen)?))).collect();
                    pause.as_mut().reset(Instant::now() + RETRY);
                    ended = Some(back);
                }
                () = &mut pause, if ended.is_some() => break,
                after = &mut deadline => return Err(Error::JoinFailed { after, tried: list(&told) }),
                _ = notice.tick() => {
                    tracing::warn!("still waiting for the cluster after {} s: {}", begun.elapsed().as_secs(), list(&told));
                }
            }
        }
        search = ended.unwrap_or_default();
    }
}

/// What became of a seed's addresses, but for this node's own; `None` when there is no other.
fn words(inner: &Inner, seen: &[(Option<SocketAddr>, Seen)]) -> Option<String> {
    let me = inner.me.lock().addr;
    let one = |(addr, seen): &(Option<SocketAddr>, Seen)| {
        let what = match seen {
            Seen::Myself => return None,
            Seen::Peer(peer) => format!(
                "it answered, but one of the two does not reach the other: it advertises {}, this node {me}; open the way, or \
                 give --advertise what the other can reach",
                peer.addr
            ),
            Seen::Nobody(reason) => reason.clone(),
        };
        Some(addr.map_or_else(|| what.clone(), |addr| format!("{addr}: {what}")))
    };
    let all: Vec<String> = seen.iter().filter_map(one).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Keeps dialling seeds that are not members, for as long as the node lives.
pub(super) async fn keep(inner: Weak<Inner>) {
    let mut search = Search { patient: true, ..Search::default() };
    loop {
        tokio::time::sleep(REDIAL).await;
        let Some(inner) = inner.upgrade() else { return };
        if let Err(error) = search.round(&inner).await {
            tracing::debug!(%error, "the seeds were not asked");
        }
    }
}

/// What was found behind an address.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Myself,
    Peer(Identity),
    Nobody(String),
}

type Found = BTreeMap<String, Vec<(Option<SocketAddr>, Seen)>>;

/// The rounds over the seeds of one node.
#[derive(Default)]
struct Search {
    /// What the seeds stood for, and since when.
    resolved: BTreeMap<usize, (Instant, Vec<SocketAddr>)>,
    known: BTreeMap<SocketAddr, Identity>,
    /// A refusal is logged once, and the others are asked; it does not end the search.
    patient: bool,
    /// What is being dialled for each seed.
    dialled: Arc<Mutex<BTreeMap<String, Vec<SocketAddr>>>>,
    complained: BTreeSet<String>,
}

impl Search {
    /// Asks at every address of every seed that is no member; says what is behind each.
    ///
    /// # Errors
    /// `Refused` as soon as one says so, unless the search is patient.
    async fn round(&mut self, inner: &Arc<Inner>) -> Result<Found> {
        let mut found = Found::new();
        let mut dial: BTreeMap<SocketAddr, Vec<String>> = BTreeMap::new();
        let looked = together(inner.seeds.iter().enumerate().map(|(index, seed)| {
            let held = self.resolved.get(&index);
            let fresh = |since: Instant| !seed.may_change() || inner.has_peers() && since.elapsed() < BELIEVE;
            let held = held.filter(|(since, _)| fresh(*since)).cloned();
            async move {
                match held {
                    Some(held) => Ok((index, Ok(held))),
                    None => Ok((index, look_up(inner, seed).await)),
                }
            }
        }))
        .await?;
        let living = inner.living_at();
        for (index, answer) in looked {
            let seed = inner.seeds[index].to_string();
            match answer {
                Err(error) => {
                    let reason = match error {
                        Error::InvalidAddress { value, reason } if value == seed => reason,
                        error => error.to_string(),
                    };
                    found.entry(seed).or_default().push((None, Seen::Nobody(reason)));
                }
                Ok((since, addrs)) => {
                    for addr in &addrs {
                        match living.get(addr).or_else(|| self.known.get(addr)) {
                            Some(peer) if inner.is_member(peer.node) => {
                                found.entry(seed.clone()).or_default().push((Some(*addr), Seen::Peer(*peer)));
                            }
                            Some(peer) if peer.node == inner.id && is_mine(inner, *addr) => {
                                found.entry(seed.clone()).or_default().push((Some(*addr), Seen::Myself));
                            }
                            _ => dial.entry(*addr).or_default().push(seed.clone()),
                        }
                    }
                    self.dialled.lock().insert(seed, addrs.clone());
                    self.resolved.insert(index, (since, addrs));
                }
            }
        }
        let addrs: Vec<SocketAddr> = dial.keys().copied().collect();
        for some in addrs.chunks(AT_ONCE) {
            let patient = self.patient;
            let met = some.iter().map(|addr| async move {
                match meet(inner, *addr).await {
                    Err(error) if !patient => Err(error),
                    met => Ok((*addr, met)),
                }
            });
            for (addr, met) in together(met).await? {
                let seen = met.unwrap_or_else(|error| {
                    let reason = error.to_string();
                    if self.complained.insert(reason.clone()) {
                        tracing::warn!(%error, "a seed will not have this node");
                    }
                    Seen::Nobody(reason)
                });
                match &seen {
                    Seen::Myself => self.known.insert(addr, *inner.me.lock()),
                    Seen::Peer(peer) => self.known.insert(addr, *peer),
                    Seen::Nobody(_) => self.known.remove(&addr),
                };
                for seed in &dial[&addr] {
                    found.entry(seed.clone()).or_default().push((Some(addr), seen.clone()));
                }
            }
        }
        self.known.retain(|addr, _| self.resolved.values().any(|(_, addrs)| addrs.contains(addr)));
        Ok(found)
    }
}

async fn look_up(inner: &Inner, seed: &Seed) -> Result<(Instant, Vec<SocketAddr>)> {
    Ok((Instant::now(), seed.resolve(&inner.config.transport).await?))
}

/// Whether only this node can answer there. Behind the address of a load balancer somebody else may answer next time.
fn is_mine(inner: &Inner, addr: SocketAddr) -> bool {
    addr == inner.me.lock().addr || addr.port() == inner.bound.port() && handshake::is_local(addr.ip())
}

/// Asks whoever answers at an address who it is, and asks to join it.
///
/// # Errors
/// `Refused` only.
async fn meet(inner: &Arc<Inner>, addr: SocketAddr) -> Result<Seen> {
    let peer = match ask(inner, addr).await {
        Ok(peer) if peer.node == inner.id => return Ok(Seen::Myself),
        Ok(peer) => peer,
        Err(error @ Error::Refused { .. }) => return Err(error),
        Err(Error::ConnectFailed { reason, .. }) => return Ok(Seen::Nobody(reason)),
        Err(error) => return Ok(Seen::Nobody(error.to_string())),
    };
    let me = inner.me.lock().addr;
    let here = handshake::is_local(addr.ip());
    if let Some(reason) = unreachable(me, peer.addr, addr, here) {
        return Ok(Seen::Nobody(reason));
    }
    if !here && me.ip().is_loopback() && !inner.warned.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "this node advertises {me}, which only this host can reach, and its seed {addr} is elsewhere: give it \
             --advertise HOST:PORT, or an --addr that others can reach"
        );
    }
    let _ = inner.driver.send(Input::Join(peer));
    Ok(Seen::Peer(peer))
}

/// Why what a peer says of itself cannot be true, or of no use here.
///
/// `here` = it was dialled on this host.
fn unreachable(me: SocketAddr, peer: SocketAddr, dialled: SocketAddr, here: bool) -> Option<String> {
    if peer == me {
        Some(format!("it advertises {me} as this node does; give one of the two another --advertise"))
    } else if !here && peer.ip().is_loopback() {
        Some(format!("it advertises {peer}, which only its own host can reach; start it with --advertise {dialled}"))
    } else {
        None
    }
}

async fn ask(inner: &Arc<Inner>, addr: SocketAddr) -> Result<Identity> {
    let (mut stream, peer) = conn::dial(addr, Lane::Control, 0, &inner.link_config).await.map_err(|e| e.error)?;
    let _ = stream.write_all(&encode(Kind::Bye, &EmptyHeader {}, 0)).await;
    let _ = stream.shutdown().await;
    Ok(peer)
}

/// Awaits all of them at once, or the first error. They are polled in their order: one seed of a test is one run.
async fn together<T>(all: impl Iterator<Item = impl Future<Output = Result<T>>>) -> Result<Vec<T>> {
    let mut waiting: Vec<Pin<Box<_>>> = all.map(Box::pin).collect();
    let mut done: Vec<Option<T>> = waiting.iter().map(|_| None).collect();
    poll_fn(|cx| {
        let mut all = true;
        for (work, done) in waiting.iter_mut().zip(&mut done).filter(|(_, done)| done.is_none()) {
            match work.as_mut().poll(cx) {
                Poll::Ready(Ok(value)) => *done = Some(value),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => all = false,
            }
        }
        if all { Poll::Ready(Ok(done.iter_mut().filter_map(Option::take).collect())) } else { Poll::Pending }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_m6_an_address_that_cannot_be_a_peers_says_what_to_do() {
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (me, dialled) = (addr("10.0.0.1:8000"), addr("10.0.0.2:8000"));
        assert_eq!(unreachable(me, dialled, dialled, false), None);
        assert_eq!(unreachable(me, addr("127.0.0.1:8000"), dialled, true), None);
        let twin = unreachable(me, me, dialled, false).unwrap();
        assert!(twin.contains("10.0.0.1:8000 as this node does"), "{twin}");
        let loopback = unreachable(me, addr("[::1]:8000"), dialled, false).unwrap();
        assert!(loopback.contains("--advertise 10.0.0.2:8000"), "{loopback}");
    }

    #[tokio::test(start_paused = true)]
    async fn all_are_awaited_at_once_and_the_first_error_ends_it() {
        let begun = Instant::now();
        let after = |ms: u64, fails: bool| async move {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            if fails { Err(Error::ShutDown) } else { Ok(ms) }
        };
        assert_eq!(together([30, 10, 20].map(|ms| after(ms, false)).into_iter()).await.unwrap(), [30, 10, 20]);
        assert_eq!(begun.elapsed(), Duration::from_millis(30));
        assert!(together([(50, false), (1, true)].map(|(ms, fails)| after(ms, fails)).into_iter()).await.is_err());
        assert_eq!(begun.elapsed(), Duration::from_millis(31));
    }
}
