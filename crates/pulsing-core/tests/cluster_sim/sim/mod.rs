//! A cluster in one thread under a virtual clock: many [`Membership`]s and [`Registry`]s, driven the way the network layer
//! drives them, over ordered links that stall, break and lose. One seed, one history.

mod node;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::SocketAddr;
use std::time::Duration;

use pulsing_core::cluster::{DownReason, Identity, MemberEvent, Preset, Registry};
use pulsing_core::{ActorId, MemberState, NodeId};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub use self::node::Process;
use self::node::{Input, Packet};

const PORT: u16 = 8000;

/// Milliseconds.
pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// How bad the network and the hosts are.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// One way.
    pub latency: (Duration, Duration),
    /// Chance that a packet finds its link stalled, and for how long at most; all behind it wait, too.
    pub stall: (f64, Duration),
    /// Chance that a packet is lost for good.
    pub loss: f64,
    /// Chance that a segment is lost and sent again, as the kernel does it, and the longest that it waits before. Each loss
    /// in a row doubles the wait; what is behind on the link waits, too.
    pub resend: (f64, Duration),
    /// How late timers fire at most.
    pub late: Duration,
}

/// The kernel's first wait before a segment is sent again, on links this quick.
const FIRST_WAIT: Duration = ms_const(200);

impl Weather {
    /// An idle data centre.
    pub const FAIR: Self = Self {
        latency: (Duration::from_micros(50), ms_const(2)),
        stall: (0.0, ms_const(0)),
        loss: 0.0,
        resend: (0.0, FIRST_WAIT),
        late: ms_const(3),
    };
    /// A fair day between continents.
    pub const WIDE: Self = Self {
        latency: (ms_const(40), ms_const(150)),
        stall: (0.001, ms_const(1500)),
        late: ms_const(5),
        ..Self::FAIR
    };
    /// Busy hosts: links stall up to a second now and then, a packet in two thousand is lost, timers run late.
    pub const LOADED: Self = Self {
        latency: (Duration::from_micros(50), ms_const(10)),
        stall: (0.01, ms_const(1000)),
        loss: 0.0005,
        late: ms_const(100),
        ..Self::FAIR
    };

    /// An idle data centre that loses this share of all packets for good. Links are ordered and repeat what is lost, so this
    /// is a network that breaks connections all the time.
    pub fn losing(loss: f64) -> Self {
        Self { loss, ..Self::FAIR }
    }

    /// The same, but connections hold: what is lost is sent again after `longest` at most.
    pub fn resending(loss: f64, longest: Duration) -> Self {
        Self { resend: (loss, longest), ..Self::FAIR }
    }
}

/// What was sent by all processes so far, in bytes of frame bodies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    pub packets: u64,
    pub membership: u64,
    pub registry: u64,
}

const fn ms_const(n: u64) -> Duration {
    Duration::from_millis(n)
}

struct Host {
    process: Option<Process>,
    /// Without power nobody answers a dial, not even with a refusal.
    powered: bool,
    group: u32,
    /// By how much its wall clock is wrong, in milliseconds.
    skew: i64,
    /// What advertises this host's address answers here; it differs for a process that gives a wrong address.
    bound: bool,
}

#[derive(Default)]
struct Link {
    runs: [u64; 2],
    /// By direction: nothing arrives before what was sent earlier.
    free_at: [Duration; 2],
    /// By direction: the wait before what is lost next is sent again.
    wait: [Duration; 2],
}

struct Event {
    at: Duration,
    order: u64,
    host: usize,
    run: u64,
    input: Input,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Event {}
impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// The cluster.
pub struct Sim {
    seed: u64,
    preset: Preset,
    pub weather: Weather,
    rng: StdRng,
    now: Duration,
    order: u64,
    runs: u64,
    queue: BinaryHeap<Reverse<Event>>,
    hosts: Vec<Host>,
    links: BTreeMap<(usize, usize), Link>,
    /// From, to: nothing passes in this direction, and nobody is told.
    blocked: BTreeSet<(usize, usize)>,
    /// Who dials, whose address: who answers there instead.
    routes: BTreeMap<(usize, usize), usize>,
    pub traffic: Traffic,
}

impl Drop for Sim {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let test = std::thread::current().name().unwrap_or("").to_owned();
            eprintln!(
                "failed at {:?} with seed {seed}, which repeats it: PULSING_SIM_SEED={seed} cargo test -p pulsing-core {test}",
                self.now,
                seed = self.seed
            );
            for (n, host) in self.hosts.iter().enumerate().take(20) {
                let Some(process) = &host.process else { continue };
                let tail = process.log.iter().rev().take(8).collect::<Vec<_>>();
                eprintln!("  host {n} ({}), latest first: {tail:?}", process.node);
            }
        }
    }
}

/// Runs a scenario under `default` seeds times `PULSING_SIM_TIMES`, from `PULSING_SIM_FROM` on, or under
/// `PULSING_SIM_SEED` alone.
pub fn for_seeds(default: u64, scenario: impl Fn(u64)) {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    if let Some(seed) = number("PULSING_SIM_SEED") {
        return scenario(seed);
    }
    let first = number("PULSING_SIM_FROM").unwrap_or(1);
    for seed in first..first + default * number("PULSING_SIM_TIMES").unwrap_or(1) {
        scenario(seed);
    }
}

impl Sim {
    /// `n` hosts without processes.
    pub fn new(n: usize, preset: Preset, weather: Weather, seed: u64) -> Self {
        let mut sim = Self {
            seed,
            preset,
            weather,
            rng: StdRng::seed_from_u64(seed),
            now: Duration::ZERO,
            order: 0,
            runs: 0,
            queue: BinaryHeap::new(),
            hosts: Vec::new(),
            links: BTreeMap::new(),
            blocked: BTreeSet::new(),
            routes: BTreeMap::new(),
            traffic: Traffic::default(),
        };
        (0..n).for_each(|_| sim.add_host());
        sim
    }

    /// A cluster of `n` that has found together.
    pub fn formed(n: usize, preset: Preset, weather: Weather, seed: u64) -> Self {
        let mut sim = Self::new(n, preset, weather, seed);
        let gap = if n > 100 { 2 } else { 20 };
        for host in 0..n {
            sim.start(host, &[0]);
            sim.run(ms(gap));
        }
        sim.expect("all know all", ms(40_000), |sim| {
            (0..n).all(|host| sim.process(host).membership.active_members() == n - 1)
        });
        sim
    }

    pub fn now(&self) -> Duration {
        self.now
    }

    pub fn pick(&mut self, below: usize) -> usize {
        self.rng.random_range(0..below)
    }

    /// Starts a process on a host; it greets its seeds.
    pub fn start(&mut self, host: usize, seeds: &[usize]) -> NodeId {
        self.start_as(host, address(host), seeds)
    }

    /// Starts a process that gives `advertised` as its address, whoever listens there.
    pub fn start_as(&mut self, host: usize, advertised: SocketAddr, seeds: &[usize]) -> NodeId {
        self.runs += 1;
        // The epoch is a wall clock in milliseconds, as in the network layer.
        let wall = 100_000_000 + self.now.as_millis() as i64 + self.hosts[host].skew;
        let identity = Identity::new(NodeId(self.rng.random()), advertised, wall.unsigned_abs());
        let process = Process::new(identity, self.runs, self.preset, self.rng.random(), seeds);
        self.hosts[host].process = Some(process);
        self.hosts[host].powered = true;
        self.at(self.now, host, self.runs, Input::Redial);
        self.at(self.now, host, self.runs, Input::Sync);
        identity.node
    }

    /// kill -9: the kernel closes its links and refuses new ones.
    pub fn kill(&mut self, host: usize) -> NodeId {
        let process = self.hosts[host].process.take().expect("a process to kill");
        self.close_links(host, Some(process.node));
        process.node
    }

    /// The host loses power: silence.
    pub fn power_off(&mut self, host: usize) -> NodeId {
        let process = self.hosts[host].process.take().expect("a process to cut");
        self.hosts[host].powered = false;
        self.close_links(host, None);
        process.node
    }

    pub fn pause(&mut self, host: usize) {
        self.process(host).paused = true;
    }

    pub fn is_alive(&self, host: usize) -> bool {
        self.hosts[host].process.is_some()
    }

    pub fn resume_all(&mut self) {
        for host in self.living() {
            if self.process(host).paused {
                self.resume(host);
            }
        }
    }

    /// One more host without a process; its number is the number of hosts before.
    pub fn add_host(&mut self) {
        self.hosts.push(Host { process: None, powered: true, group: 0, skew: 0, bound: true });
    }

    pub fn resume(&mut self, host: usize) {
        let process = self.process(host);
        process.paused = false;
        let mut waiting = std::mem::take(&mut process.waiting);
        let run = process.run;
        // What wakes first, sockets or timers, is chance; links keep their own order.
        if self.rng.random() {
            waiting.sort_by_key(|input| !matches!(input, Input::Timer(_)));
        }
        for input in waiting {
            self.handle(host, run, input);
        }
    }

    /// Announces the leave, lets the announcement go out, ends the process.
    pub fn leave(&mut self, host: usize) -> NodeId {
        let run = self.process(host).run;
        self.handle(host, run, Input::Leave);
        let process = self.hosts[host].process.take().expect("a process that leaves");
        self.close_links(host, Some(process.node));
        process.node
    }

    /// Cuts the hosts into groups that do not reach each other.
    pub fn partition(&mut self, group: impl Fn(usize) -> u32) {
        for (n, host) in self.hosts.iter_mut().enumerate() {
            host.group = group(n);
        }
    }

    /// Ends all partitions; links that crossed one have broken meanwhile.
    pub fn heal(&mut self) {
        let crossing: Vec<(usize, usize)> =
            self.links.keys().copied().filter(|pair| self.cut(pair.0, pair.1)).collect();
        for pair in crossing {
            self.break_link(pair.0, pair.1);
        }
        self.partition(|_| 0);
    }

    /// Nothing that `from` sends reaches `to`, and dials time out.
    pub fn block(&mut self, from: usize, to: usize) {
        self.blocked.insert((from, to));
    }

    /// What `from` sends to the address of `addressed` reaches `instead`.
    pub fn route(&mut self, from: usize, addressed: usize, instead: usize) {
        self.routes.insert((from, addressed), instead);
    }

    fn reached(&self, from: usize, addr: SocketAddr) -> usize {
        let addressed = host_of(addr);
        self.routes.get(&(from, addressed)).copied().unwrap_or(addressed)
    }

    pub fn unblock_all(&mut self) {
        self.blocked.clear();
    }

    /// Sets a host's wall clock: processes that start later take their epoch from it.
    pub fn jump_clock(&mut self, host: usize, by: Duration, back: bool) {
        let by = i64::try_from(by.as_millis()).expect("a jump of less than ages");
        self.hosts[host].skew += if back { -by } else { by };
    }

    /// Every dial of this host is refused, while what it dials itself works.
    pub fn unbind(&mut self, host: usize) {
        self.hosts[host].bound = false;
    }

    /// Breaks the link of two hosts, if there is one; both notice.
    pub fn break_link(&mut self, a: usize, b: usize) {
        if self.links.remove(&(a.min(b), a.max(b))).is_some() {
            for (here, there) in [(a, b), (b, a)] {
                if let (Some(me), Some(peer)) = (&self.hosts[here].process, &self.hosts[there].process) {
                    let (run, node) = (me.run, peer.node);
                    self.at(self.now + ms(1), here, run, Input::LinkClosed(node));
                }
            }
        }
    }

    /// Lets time pass.
    pub fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.queue.peek().is_some_and(|Reverse(event)| event.at <= end) {
            let Some(Reverse(event)) = self.queue.pop() else { break };
            self.now = event.at;
            self.handle(event.host, event.run, event.input);
        }
        self.now = end;
    }

    /// Lets time pass until something holds; returns how long it took.
    pub fn expect(&mut self, what: &str, within: Duration, mut holds: impl FnMut(&mut Self) -> bool) -> Duration {
        let start = self.now;
        while !holds(self) {
            assert!(self.now < start + within, "not within {within:?}: {what}");
            self.run(ms(10));
        }
        self.now - start
    }

    pub fn process(&mut self, host: usize) -> &mut Process {
        self.hosts[host].process.as_mut().expect("a living process")
    }

    /// True if every living process but the node's own sees it in this state.
    pub fn all_see(&mut self, node: NodeId, state: MemberState) -> bool {
        self.living().into_iter().all(|host| {
            let process = self.process(host);
            process.node == node || process.membership.state_of(node) == Some(state)
        })
    }

    pub fn registry(&mut self, host: usize) -> &mut Registry {
        &mut self.process(host).registry
    }

    /// Hosts with a process.
    pub fn living(&self) -> Vec<usize> {
        (0..self.hosts.len()).filter(|n| self.hosts[*n].process.is_some()).collect()
    }

    /// Nodes that a host's process holds for active.
    pub fn alive_at(&mut self, host: usize) -> BTreeSet<NodeId> {
        self.in_state(host, &[MemberState::Alive, MemberState::Suspect])
    }

    pub fn in_state(&mut self, host: usize, states: &[MemberState]) -> BTreeSet<NodeId> {
        let members = self.process(host).membership.members();
        members.iter().filter(|info| states.contains(&info.state)).map(|info| info.identity.node).collect()
    }

    /// True if every living process holds exactly the living ones for active.
    pub fn agreed(&mut self) -> bool {
        let living = self.living();
        let others = living.len() - 1;
        if living.iter().any(|host| self.process(*host).membership.active_members() != others) {
            return false;
        }
        let nodes: BTreeMap<usize, NodeId> = living.iter().map(|host| (*host, self.process(*host).node)).collect();
        living.iter().all(|host| {
            let others: BTreeSet<NodeId> =
                nodes.iter().filter(|(other, _)| *other != host).map(|(_, node)| *node).collect();
            self.alive_at(*host) == others
        })
    }

    /// All deaths that living processes reported since `since`: who reported, who died, why.
    pub fn deaths(&self, since: Duration) -> Vec<(usize, NodeId, DownReason)> {
        let processes = self.hosts.iter().enumerate().filter_map(|(n, host)| Some((n, host.process.as_ref()?)));
        processes
            .flat_map(|(n, process)| {
                process.log.iter().filter(move |(at, _)| *at >= since).filter_map(move |(_, event)| match event {
                    MemberEvent::Down(who, why) => Some((n, who.node, *why)),
                    _ => None,
                })
            })
            .collect()
    }

    /// Publishes an actor on a host under a name.
    pub fn publish(&mut self, host: usize, name: &str) -> ActorId {
        self.claim(host, name, false)
    }

    /// `publish` for one holder in the cluster, without a look at who holds the name.
    pub fn publish_unique(&mut self, host: usize, name: &str) -> ActorId {
        self.claim(host, name, true)
    }

    fn claim(&mut self, host: usize, name: &str, unique: bool) -> ActorId {
        let actor = ActorId(self.rng.random());
        let run = self.process(host).run;
        self.handle(host, run, Input::Publish(name.to_owned(), actor, unique));
        actor
    }

    pub fn withdraw(&mut self, host: usize, actor: ActorId) {
        let run = self.process(host).run;
        self.handle(host, run, Input::Withdraw(actor));
    }

    fn handle(&mut self, host: usize, run: u64, input: Input) {
        let (now, n) = (self.now, self.hosts.len());
        let Some(process) = self.hosts[host].process.as_mut().filter(|process| process.run == run) else { return };
        if process.paused {
            return process.waiting.push(input);
        }
        let effects = process.handle(now, input, n, &mut self.rng);
        for (after, input) in effects.later {
            let late = match self.weather.late {
                Duration::ZERO => Duration::ZERO,
                late => self.rng.random_range(Duration::ZERO..late),
            };
            self.at(now + after + late, host, run, input);
        }
        for addr in effects.dials {
            self.dial(host, run, addr);
        }
        for (to, packet) in effects.sends {
            self.send(host, run, to, packet);
        }
    }

    /// A connection attempt that only wants to know who is there.
    fn dial(&mut self, from: usize, run: u64, addr: SocketAddr) {
        let to = self.reached(from, addr);
        if to != from
            && !self.cut(from, to)
            && !self.blocked.contains(&(from, to))
            && self.hosts[to].bound
            && let Some(peer) = &self.hosts[to].process
            && !peer.paused
        {
            let identity = peer.membership.me();
            self.at(self.now + ms(2), from, run, Input::Greeted(identity));
        }
    }

    fn send(&mut self, from: usize, run: u64, to: Identity, packet: Packet) {
        let host = self.reached(from, to.addr);
        self.traffic.packets += 1;
        match &packet {
            Packet::Membership(data) => self.traffic.membership += data.len() as u64,
            // An eight-byte root; the sender is known from the handshake.
            Packet::Root(..) => self.traffic.registry += 8,
            Packet::Digest(_, data) | Packet::Delta(data) => self.traffic.registry += data.len() as u64,
        }
        if host == from || self.cut(from, host) || self.blocked.contains(&(from, host)) || !self.hosts[host].powered {
            return;
        }
        let Some(peer) = self.hosts[host].process.as_ref().filter(|_| self.hosts[host].bound) else {
            return self.at(self.now + ms(1), from, run, Input::Refused(to.node));
        };
        let (peer_run, peer_node) = (peer.run, peer.node);
        if peer_node != to.node {
            // The handshake shows another process at this address: who was dialled does not listen there.
            return self.at(self.now + ms(2), from, run, Input::Refused(to.node));
        }
        if self.rng.random_bool(self.weather.loss) {
            return;
        }
        let side = usize::from(from > host);
        let runs = if side == 0 { [run, peer_run] } else { [peer_run, run] };
        let link = self.links.entry((from.min(host), from.max(host))).or_default();
        if link.runs != runs {
            *link = Link { runs, free_at: [self.now + ms(1); 2], wait: [FIRST_WAIT; 2] };
        }
        let mut arrival = self.now + self.rng.random_range(self.weather.latency.0..self.weather.latency.1);
        if self.rng.random_bool(self.weather.stall.0) {
            arrival += self.rng.random_range(Duration::ZERO..self.weather.stall.1);
        }
        let (loss, longest) = self.weather.resend;
        if loss > 0.0 {
            let mut wait = link.wait[side];
            let mut lost = false;
            while self.rng.random_bool(loss) {
                arrival += wait;
                wait = (wait * 2).min(longest);
                lost = true;
            }
            // Only an answer to what was sent once shows how long answers take.
            let answered = !lost && link.free_at[side] <= self.now && !self.rng.random_bool(loss);
            link.wait[side] = if answered { FIRST_WAIT } else { wait };
        }
        let arrival = arrival.max(link.free_at[side]);
        link.free_at[side] = arrival;
        self.at(arrival, host, peer_run, Input::Packet(packet));
    }

    fn close_links(&mut self, host: usize, notice: Option<NodeId>) {
        let pairs: Vec<(usize, usize)> = self.links.keys().copied().filter(|(a, b)| *a == host || *b == host).collect();
        for (a, b) in pairs {
            let Some(link) = self.links.remove(&(a, b)) else { continue };
            let peer = if a == host { b } else { a };
            if let Some(node) = notice
                && !self.cut(a, b)
                && let Some(process) = &self.hosts[peer].process
            {
                // What was sent before arrives before.
                let at = link.free_at[usize::from(host > peer)].max(self.now + ms(1));
                self.at(at, peer, process.run, Input::LinkClosed(node));
            }
        }
    }

    fn cut(&self, a: usize, b: usize) -> bool {
        self.hosts[a].group != self.hosts[b].group
    }

    fn at(&mut self, at: Duration, host: usize, run: u64, input: Input) {
        self.order += 1;
        self.queue.push(Reverse(Event { at, order: self.order, host, run, input }));
    }
}

/// The address of a host.
pub fn address(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, (host >> 8) as u8, host as u8], PORT))
}

fn host_of(addr: SocketAddr) -> usize {
    match addr.ip() {
        std::net::IpAddr::V4(ip) => usize::from(ip.octets()[2]) << 8 | usize::from(ip.octets()[3]),
        std::net::IpAddr::V6(_) => unreachable!("hosts have IPv4 addresses"),
    }
}
