//! Nodes on a network in memory and a paused clock: faults that no loopback shows, and hours that take no time.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use parking_lot::Mutex;
use pulsing_core::actor::{Actor, Context, RestartPolicy, SpawnOptions, Supervision};
use pulsing_core::net::memory::{Faults, Network};
use pulsing_core::{ActorId, Call, Error, MemberState, Security, System, SystemConfig, Target, Transport};
use tokio::time::{Instant, sleep};

const MS: fn(u64) -> Duration = Duration::from_millis;

async fn start(network: &Network, name: &str, seeds: &[&str]) -> System {
    let config = SystemConfig {
        seeds: seeds.iter().map(|seed| format!("{seed}:7000")).collect(),
        security: Security::Insecure,
        transport: Transport::Memory(network.host(name).unwrap()),
        ..SystemConfig::default()
    };
    System::start(config).await.unwrap()
}

fn names(all: &[&str]) -> Vec<String> {
    all.iter().map(|name| (*name).to_owned()).collect()
}

fn sees(system: &System, peer: &System) -> bool {
    let living = |state| matches!(state, MemberState::Alive | MemberState::Suspect);
    system.members().iter().any(|m| m.node == peer.node_id() && living(m.state))
}

async fn until(what: &str, limit: Duration, mut check: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < limit, "not within {limit:?}: {what}");
        sleep(MS(5)).await;
    }
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_call_takes_the_links_delay() {
    let network = Network::new(1);
    network.set_faults(Faults { delay: (MS(100), MS(100)), ..Faults::default() }).unwrap();
    let a = start(&network, "a", &[]).await;
    let b = start(&network, "b", &["a"]).await;
    let echo = b.spawn(Echo, named("echo")).await.unwrap();
    until("the name is known", MS(1000), || a.instances("echo").len() == 1).await;
    let target = Target { node: b.node_id(), actor: echo.target().actor };
    ask(&a, target, "warm").await.unwrap();
    let begun = Instant::now();
    assert_eq!(ask(&a, target, "hello").await.unwrap().head, "hello");
    assert!((MS(200)..MS(205)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn m4_the_halves_of_a_partition_find_each_other_again() {
    let network = Network::new(2);
    network.set_faults(Faults { delay: (MS(1), MS(10)), ..Faults::default() }).unwrap();
    let a = start(&network, "a", &[]).await;
    let b = start(&network, "b", &["a"]).await;
    let c = start(&network, "c", &["a"]).await;
    let all = [&a, &b, &c];
    until("all meet", MS(5000), || all.iter().all(|x| all.iter().all(|y| sees(x, y)))).await;
    network.partition(&names(&["a", "b"]), &names(&["c"]), false, false).unwrap();
    until("the halves lose each other", MS(30_000), || !sees(&a, &c) && !sees(&b, &c) && !sees(&c, &a)).await;
    assert!(sees(&a, &b), "one half holds together");
    sleep(MS(300_000)).await;
    network.heal();
    let took = until("they find each other", MS(15_000), || all.iter().all(|x| all.iter().all(|y| sees(x, y)))).await;
    sleep(MS(60_000)).await;
    assert!(all.iter().all(|x| all.iter().all(|y| sees(x, y))), "and stay together (after {took:?})");
}

#[tokio::test(start_paused = true)]
async fn a_killed_host_fails_its_calls_and_a_new_life_takes_its_address() {
    let network = Network::new(3);
    let a = start(&network, "a", &[]).await;
    let b = start(&network, "b", &["a"]).await;
    until("a meets b", MS(1000), || sees(&a, &b)).await;
    let echo = b.spawn(Echo, named("echo")).await.unwrap();
    let target = Target { node: b.node_id(), actor: echo.target().actor };
    ask(&a, target, "warm").await.unwrap();
    network.kill("b").unwrap();
    let error = ask(&a, target, "lost").await.unwrap_err();
    assert!(
        matches!(error, Error::ConnectionLost { .. } | Error::NodeNotFound { .. } | Error::ConnectFailed { .. }),
        "{error}"
    );
    until("b is missed", MS(2000), || !sees(&a, &b)).await;
    let again = start(&network, "b", &["a"]).await;
    assert_eq!(again.addr(), b.addr());
    until("the new life is known", MS(2000), || sees(&a, &again)).await;
}

#[tokio::test(start_paused = true)]
async fn m2_a_host_that_was_stopped_declares_nobody_dead() {
    let network = Network::new(4);
    network.set_faults(Faults { delay: (MS(1), MS(5)), ..Faults::default() }).unwrap();
    let a = start(&network, "a", &[]).await;
    let b = start(&network, "b", &["a"]).await;
    let c = start(&network, "c", &["a"]).await;
    let all = [&a, &b, &c];
    until("all meet", MS(5000), || all.iter().all(|x| all.iter().all(|y| sees(x, y)))).await;
    network.pause("c").unwrap();
    until("the others miss it", MS(30_000), || !sees(&a, &c) && !sees(&b, &c)).await;
    sleep(MS(30_000)).await;
    network.resume("c").unwrap();
    for _ in 0..2000 {
        sleep(MS(5)).await;
        assert!(sees(&c, &a) && sees(&c, &b), "c, which slept, believes the others dead");
    }
    until("it is back", MS(10_000), || sees(&a, &c) && sees(&b, &c)).await;
}

/// What one seed did: when the members of three hosts changed under loss.
async fn history(seed: u64) -> Vec<(u128, Vec<usize>)> {
    let network = Network::new(seed);
    let faults = Faults { delay: (MS(1), MS(40)), loss: 0.2, reorder: 0.1, ..Faults::default() };
    network.set_faults(faults).unwrap();
    let mut all = vec![start(&network, "a", &[]).await];
    for name in ["b", "c"] {
        all.push(start(&network, name, &["a"]).await);
    }
    let mut history = Vec::new();
    for _ in 0..20_000 {
        let counts: Vec<usize> = all.iter().map(|x| all.iter().filter(|y| sees(x, y)).count()).collect();
        if history.last().is_none_or(|(_, last)| *last != counts) {
            history.push((network.elapsed().as_millis(), counts));
        }
        sleep(MS(1)).await;
    }
    history
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(work)
}

#[test]
fn one_seed_is_one_history() {
    let first = run(history(7));
    assert_eq!(first, run(history(7)));
    assert_ne!(first, run(history(8)));
}

/// Starts once, fails at its first message, and does not start again.
struct Brittle {
    network: Network,
    starts: Arc<Mutex<Vec<u128>>>,
}

impl Actor for Brittle {
    async fn on_start(&mut self, _ctx: &Context) -> pulsing_core::Result<()> {
        let mut starts = self.starts.lock();
        starts.push(self.network.elapsed().as_millis());
        if starts.len() == 1 { Ok(()) } else { Err(Error::Config("once only".to_owned())) }
    }
    async fn receive(&mut self, _call: Call, ctx: &Context) {
        ctx.fail("as asked");
    }
}

/// Which ids actors got, and when each was started again.
async fn restarts(seed: u64) -> Vec<(ActorId, Vec<u128>)> {
    let network = Network::new(seed);
    let system = start(&network, "a", &[]).await;
    let supervision = Supervision { policy: RestartPolicy::OnFailure, max_restarts: 4, ..Supervision::default() };
    let mut all = Vec::new();
    for _ in 0..3 {
        let starts = Arc::<Mutex<Vec<u128>>>::default();
        let (one, network) = (Arc::clone(&starts), network.clone());
        let make = move || Brittle { network: network.clone(), starts: Arc::clone(&one) };
        let options = SpawnOptions { supervision: supervision.clone(), ..SpawnOptions::default() };
        let actor = system.spawn_with(make, pulsing_core::ActorSpec::default(), options).await.unwrap();
        assert!(ask(&system, actor.target(), "fail").await.is_err());
        all.push((actor.target().actor, starts));
    }
    until("all were given up", Duration::from_secs(600), || all.iter().all(|(_, starts)| starts.lock().len() == 5))
        .await;
    all.into_iter().map(|(actor, starts)| (actor, starts.lock().clone())).collect()
}

#[test]
fn one_seed_gives_actors_the_same_ids_and_the_same_restarts() {
    let first = run(restarts(7));
    assert_eq!(first, run(restarts(7)));
    assert_ne!(first, run(restarts(8)));
}
