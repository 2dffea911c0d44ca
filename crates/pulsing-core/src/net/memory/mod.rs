//! A network in memory, for tests: named hosts, ordered byte links, and faults drawn from one seed.
//!
//! A link behaves as TCP does under the same fault: bytes keep their order, a lost segment is a stall of a retransmission
//! time, and a partition stalls what is on its way until it heals or the link gives up. Everything runs on tokio's clock, so
//! that a runtime whose clock is paused plays minutes in milliseconds.
//!
//! Each direction of each connection draws from a generator of its own, derived from the seed, the two hosts and how many
//! connections there were between them: what happens on one does not depend on how others interleave with it.

mod faults;
mod link;

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

pub use faults::Faults;
use link::{Link, Stall};
pub use link::{ReadHalf, Stream, WriteHalf};

use crate::error::{Error, Result};

/// The port a host listens on unless its node asks for another.
pub const PORT: u16 = 7000;
/// Wall-clock time at the beginning of every network, in milliseconds: 2026-01-01 00:00 UTC.
const EPOCH: u64 = 1_767_225_600_000;

/// Several hosts and what connects them. Clones share it.
#[derive(Clone)]
pub struct Network(Arc<Shared>);

struct Shared {
    seed: u64,
    began: Instant,
    state: Mutex<State>,
    /// Tells of changes of the state, in the order in which they were waited for: a `watch` wakes its waiters in a random one.
    changes: Notify,
}

#[derive(Default)]
struct State {
    faults: Faults,
    between: BTreeMap<(IpAddr, IpAddr), Faults>,
    hosts: BTreeMap<String, HostState>,
    /// Directions in which nothing passes; true = dials are refused instead of hanging.
    cut: BTreeMap<(IpAddr, IpAddr), Cut>,
    dials: BTreeMap<(IpAddr, IpAddr), u64>,
    links: Vec<Weak<Link>>,
}

#[derive(Clone, Copy)]
struct Cut {
    since: Instant,
    refuse: bool,
}

struct HostState {
    ip: IpAddr,
    generation: u64,
    up: bool,
    paused: bool,
    listeners: BTreeMap<u16, mpsc::UnboundedSender<(Stream, SocketAddr)>>,
}

/// One life of one host: what its node binds and dials through.
#[derive(Clone)]
pub struct Host {
    network: Network,
    name: Arc<str>,
    ip: IpAddr,
    generation: u64,
    rng: Arc<Mutex<StdRng>>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Host({} at {})", self.name, self.ip)
    }
}

impl Network {
    /// An empty network without faults or delays. Call it inside the tokio runtime whose clock it is to follow.
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Shared { seed, began: Instant::now(), state: Mutex::default(), changes: Notify::new() }))
    }

    /// Time since the network began.
    pub fn elapsed(&self) -> Duration {
        self.0.began.elapsed()
    }

    /// When the network began.
    pub fn began(&self) -> Instant {
        self.0.began
    }

    /// A generator of its own for everything that `parts` names.
    fn rng(&self, parts: &[&[u8]]) -> StdRng {
        let mut hash = Sha256::new().chain_update(self.0.seed.to_le_bytes());
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        StdRng::from_seed(hash.finalize().into())
    }

    /// A host, or the next life of one whose former has ended; its address is the same in every life.
    ///
    /// # Errors
    /// `Config` while the former life goes on, or for a name that cannot be one.
    pub fn host(&self, name: &str) -> Result<Host> {
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
            return Err(Error::Config(format!(
                "a host's name consists of letters, digits, '-', '_' and '.', not {name:?}"
            )));
        }
        let mut state = self.0.state.lock();
        let next = state.hosts.len() as u32 + 1;
        let (ip, generation) = match state.hosts.get(name) {
            Some(host) if host.up && !host.listeners.is_empty() => {
                return Err(Error::Config(format!(
                    "host {name:?} is up: end its system before you start another there"
                )));
            }
            Some(host) => (host.ip, host.generation + 1),
            None => (IpAddr::V4(Ipv4Addr::from(0x0a4d_0000 + next)), 1),
        };
        let rng = self.rng(&[b"host", name.as_bytes(), &generation.to_le_bytes()]);
        let host = HostState { ip, generation, up: true, paused: false, listeners: BTreeMap::new() };
        state.hosts.insert(name.to_owned(), host);
        Ok(Host { network: self.clone(), name: name.into(), ip, generation, rng: Arc::new(Mutex::new(rng)) })
    }

    /// The faults of every pair of hosts that has none of its own.
    ///
    /// # Errors
    /// `Config` for faults that make no sense.
    pub fn set_faults(&self, faults: Faults) -> Result<()> {
        faults.check()?;
        self.change(|state| {
            state.faults = faults;
            Ok(())
        })
    }

    /// The faults between two hosts, in both directions; `None`: those of every pair.
    ///
    /// # Errors
    /// `Config` for faults that make no sense, and for hosts that do not exist.
    pub fn set_faults_between(&self, a: &str, b: &str, faults: Option<Faults>) -> Result<()> {
        faults.as_ref().map_or(Ok(()), Faults::check)?;
        self.change(|state| {
            let (a, b) = (state.ip(a)?, state.ip(b)?);
            for pair in [(a, b), (b, a)] {
                match &faults {
                    Some(faults) => drop(state.between.insert(pair, faults.clone())),
                    None => drop(state.between.remove(&pair)),
                }
            }
            Ok(())
        })
    }

    /// Lets nothing pass from any of `a` to any of `b`, nor back unless `one_way`. What is on its way waits for the heal;
    /// dials hang, or are refused at once with `refuse`.
    ///
    /// # Errors
    /// `Config` for hosts that do not exist.
    pub fn partition(&self, a: &[String], b: &[String], one_way: bool, refuse: bool) -> Result<()> {
        let since = Instant::now();
        self.change(|state| {
            let side = |names: &[String]| names.iter().map(|name| state.ip(name)).collect::<Result<Vec<_>>>();
            let (a, b) = (side(a)?, side(b)?);
            for &x in &a {
                for &y in b.iter().filter(|y| **y != x) {
                    state.cut.entry((x, y)).or_insert(Cut { since, refuse }).refuse = refuse;
                    if !one_way {
                        state.cut.entry((y, x)).or_insert(Cut { since, refuse }).refuse = refuse;
                    }
                }
            }
            Ok(())
        })
    }

    /// Ends every partition.
    pub fn heal(&self) {
        let _ = self.change(|state| {
            state.cut.clear();
            Ok(())
        });
    }

    /// Ends a host as a power cut of its process would: links are reset, dials refused, nothing is announced.
    ///
    /// # Errors
    /// `Config` for a host that does not exist.
    pub fn kill(&self, name: &str) -> Result<()> {
        let ended = self.change(|state| {
            let host = state.host(name)?;
            host.up = false;
            host.paused = false;
            Ok((std::mem::take(&mut host.listeners), host.ip, host.generation))
        });
        let (listeners, ip, generation) = ended?;
        for link in self.links() {
            link.reset(ip, generation);
        }
        // Connections that nobody has accepted yet end here, outside the lock that their ends take.
        drop(listeners);
        Ok(())
    }

    /// Stops a host as SIGSTOP would, as far as the network sees: its kernel takes connections and bytes, its node reads
    /// and answers nothing and its membership stands still, until [`resume`](Self::resume).
    ///
    /// # Errors
    /// `Config` for a host that does not exist.
    pub fn pause(&self, name: &str) -> Result<()> {
        self.set_paused(name, true)
    }

    /// Ends a pause.
    ///
    /// # Errors
    /// `Config` for a host that does not exist.
    pub fn resume(&self, name: &str) -> Result<()> {
        self.set_paused(name, false)
    }

    fn set_paused(&self, name: &str, paused: bool) -> Result<()> {
        self.change(|state| {
            state.host(name)?.paused = paused;
            Ok(())
        })
    }

    fn links(&self) -> Vec<Arc<Link>> {
        self.0.state.lock().links.iter().filter_map(Weak::upgrade).collect()
    }

    /// Changes the state and tells every link and every dial what follows from it.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        // Ends of a link that drop take its lock and their host's: they are dropped after ours.
        let mut links = Vec::new();
        let done = {
            let mut state = self.0.state.lock();
            let done = change(&mut state)?;
            state.links.retain(|link| link.strong_count() > 0);
            links.extend(state.links.iter().filter_map(Weak::upgrade));
            for link in &links {
                state.update(link);
            }
            done
        };
        self.0.changes.notify_waiters();
        drop(links);
        Ok(done)
    }
}

impl State {
    fn host(&mut self, name: &str) -> Result<&mut HostState> {
        let known = self.hosts.keys().cloned().collect::<Vec<_>>().join(", ");
        self.hosts
            .get_mut(name)
            .ok_or_else(|| Error::Config(format!("the network has no host {name:?}; it has: {known}")))
    }

    fn ip(&self, name: &str) -> Result<IpAddr> {
        self.hosts.get(name).map(|host| host.ip).ok_or_else(|| {
            let known = self.hosts.keys().cloned().collect::<Vec<_>>().join(", ");
            Error::Config(format!("the network has no host {name:?}; it has: {known}"))
        })
    }

    fn at(&self, ip: IpAddr) -> Option<&HostState> {
        self.hosts.values().find(|host| host.ip == ip)
    }

    fn faults(&self, from: IpAddr, to: IpAddr) -> &Faults {
        self.between.get(&(from, to)).unwrap_or(&self.faults)
    }

    fn update(&self, link: &Link) {
        let paused: BTreeSet<IpAddr> = self.hosts.values().filter(|host| host.paused).map(|host| host.ip).collect();
        link.update(|from, to| {
            let stall = match self.cut.get(&(from, to)) {
                Some(cut) => Stall::Cut(cut.since),
                None if paused.contains(&from) || paused.contains(&to) => Stall::Paused,
                None => Stall::No,
            };
            (stall, self.faults(from, to).clone())
        });
    }
}

impl Host {
    /// Where its node is reached, on port [`PORT`].
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::new(self.ip, PORT)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The state of this life; `None` once it has ended.
    fn mine<'a>(&self, state: &'a mut State) -> Option<&'a mut HostState> {
        state.hosts.get_mut(&*self.name).filter(|host| host.up && host.generation == self.generation)
    }

    pub(super) fn random(&self) -> u64 {
        self.rng.lock().next_u64()
    }

    pub(super) fn epoch(&self) -> u64 {
        EPOCH + self.network.elapsed().as_millis() as u64
    }

    pub(super) fn lookup(&self, text: &str) -> io::Result<Vec<SocketAddr>> {
        if let Ok(addr) = text.parse() {
            return Ok(vec![addr]);
        }
        let (name, port) = text.rsplit_once(':').unwrap_or((text, ""));
        let port = port.parse().map_err(|_| io::Error::other(format!("{port:?} is no port")))?;
        let ip = self.network.0.state.lock().ip(name).map_err(|e| io::Error::other(e.to_string()))?;
        Ok(vec![SocketAddr::new(ip, port)])
    }

    pub(super) fn bind(&self, addr: SocketAddr) -> io::Result<Listener> {
        let mut state = self.network.0.state.lock();
        let gone = || io::Error::other("the host was killed");
        let host = self.mine(&mut state).ok_or_else(gone)?;
        if addr.ip() != host.ip && !addr.ip().is_unspecified() {
            let text = format!("{} is no address of this host, which has {}", addr.ip(), host.ip);
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
        }
        let port = if addr.port() == 0 { PORT } else { addr.port() };
        if host.listeners.contains_key(&port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (tx, rx) = mpsc::unbounded_channel();
        host.listeners.insert(port, tx);
        Ok(Listener { host: self.clone(), port, arrivals: tokio::sync::Mutex::new(rx) })
    }

    pub(super) async fn connect(&self, addr: SocketAddr) -> io::Result<Stream> {
        let to = addr.ip();
        let (number, mut rng, faults) = {
            let mut state = self.network.0.state.lock();
            let number = state.dials.entry((self.ip, to)).or_default();
            *number += 1;
            let number = *number;
            let rng = self.network.rng(&[b"dial", &octets(self.ip), &octets(to), &number.to_le_bytes()]);
            (number, rng, state.faults(self.ip, to).clone())
        };
        // There and back.
        tokio::time::sleep(faults.dial(&mut rng)).await;
        loop {
            let change = self.network.0.changes.notified();
            {
                let mut state = self.network.0.state.lock();
                let Some(me) = self.mine(&mut state) else {
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the host was killed"));
                };
                let paused = me.paused;
                let cut = [(self.ip, to), (to, self.ip)].iter().find_map(|pair| state.cut.get(pair)).copied();
                let refused = || io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens there");
                match cut {
                    Some(Cut { refuse: true, .. }) => return Err(refused()),
                    Some(_) => {}
                    None if paused => {}
                    None => return self.open(&mut state, addr, number).ok_or_else(refused),
                }
            }
            change.await;
        }
    }

    /// Makes a connection with whoever listens at `addr`.
    fn open(&self, state: &mut State, addr: SocketAddr, number: u64) -> Option<Stream> {
        let peer = state.at(addr.ip()).filter(|host| host.up)?;
        let listener = peer.listeners.get(&addr.port())?.clone();
        let ends = [(self.ip, self.generation), (addr.ip(), peer.generation)];
        let rng = |way: &[u8]| {
            self.network.rng(&[
                way,
                &octets(self.ip),
                &octets(addr.ip()),
                &addr.port().to_le_bytes(),
                &number.to_le_bytes(),
            ])
        };
        let link = Link::new(ends, [rng(b"forth"), rng(b"back")]);
        state.update(&link);
        state.links.push(Arc::downgrade(&link));
        let (mine, theirs) = link.ends();
        // As from an ephemeral port; each connection between two hosts has its own.
        let from = SocketAddr::new(self.ip, 32_768 + (number % 28_000) as u16);
        // A listener that is being dropped refuses; its stream must not be dropped under the lock.
        match listener.send((theirs, from)) {
            Ok(()) => Some(mine),
            Err(mpsc::error::SendError((theirs, _))) => {
                drop((mine, theirs));
                None
            }
        }
    }

    /// Runs `work` with pauses of this host: while it is paused, `work` is not polled.
    pub(super) async fn scheduled<F: Future>(self, work: F) -> F::Output {
        let mut work = pin!(work);
        loop {
            let mut change = pin!(self.network.0.changes.notified());
            if !self.is_paused() {
                let done = poll_fn(|cx| {
                    // A pause that began since the last poll must stop this one.
                    if change.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(None);
                    }
                    work.as_mut().poll(cx).map(Some)
                })
                .await;
                if let Some(done) = done {
                    return done;
                }
            } else {
                change.await;
            }
        }
    }

    fn is_paused(&self) -> bool {
        let mut state = self.network.0.state.lock();
        self.mine(&mut state).is_some_and(|host| host.paused)
    }
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// Where a host's connections arrive.
pub struct Listener {
    host: Host,
    port: u16,
    arrivals: tokio::sync::Mutex<mpsc::UnboundedReceiver<(Stream, SocketAddr)>>,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listener({:?}, port {})", self.host, self.port)
    }
}

impl Listener {
    pub(super) async fn accept(&self) -> (Stream, SocketAddr) {
        match self.arrivals.lock().await.recv().await {
            Some(arrived) => arrived,
            // The host was killed: nothing ever arrives here again.
            None => std::future::pending().await,
        }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.host.network.0.state.lock();
        let listener = self.host.mine(&mut state).and_then(|host| host.listeners.remove(&self.port));
        drop(state);
        drop(listener);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_heal_is_heard_of_in_the_order_in_which_it_was_waited_for() {
        let network = Network::new(1);
        let listener = network.host("to").unwrap();
        let _listening = listener.bind(listener.addr()).unwrap();
        let (to, done) = (listener.addr(), Arc::new(Mutex::new(Vec::new())));
        let names: Vec<_> = (0..40).map(|n| format!("h{n}")).collect();
        let hosts: Vec<_> = names.iter().map(|name| network.host(name).unwrap()).collect();
        network.partition(&names, &["to".to_owned()], false, false).unwrap();
        for host in hosts {
            let done = Arc::clone(&done);
            tokio::spawn(async move {
                let met = host.connect(to).await;
                done.lock().push(host.name().to_owned());
                met
            });
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(done.lock().is_empty());
        network.heal();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*done.lock(), names);
    }
}
