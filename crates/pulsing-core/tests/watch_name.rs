//! Watching a name: every change, or what they come to (M5, R10).
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::*;
use pulsing_core::actor::ActorRef;
use pulsing_core::net::memory::{Faults, Network};
use pulsing_core::{
    ActorSpec, Ending, Error, Instance, NameChange, NameWatch, NodeId, Security, System, SystemConfig, Transport,
};

const LIMIT: Duration = Duration::from_secs(10);

async fn end(system: &System, actor: &ActorRef) {
    system.end(actor.target(), Ending::stop()).await.unwrap();
}

async fn next(watch: &mut NameWatch) -> NameChange {
    tokio::time::timeout(LIMIT, watch.next()).await.expect("a change in time").unwrap()
}

/// What a watch told, put together: the instances that there should be.
async fn follow(watch: &mut NameWatch, known: &mut Known, limit: Duration, done: impl Fn(&Known) -> bool) {
    while !done(known) {
        match tokio::time::timeout(limit, watch.next()).await.expect("a change in time").unwrap() {
            NameChange::Added(one) => assert!(known.insert(one.target.node, one).is_none(), "added twice"),
            NameChange::Updated(one) => assert!(known.insert(one.target.node, one).is_some(), "updated before it came"),
            NameChange::Removed(one) => assert!(known.remove(&one.target.node).is_some(), "removed before it came"),
        }
    }
}

type Known = BTreeMap<NodeId, Instance>;

fn state(state: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("state".to_owned(), state.to_owned())])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m5_a_watch_tells_what_there_is_and_every_end_of_it() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let here = a.spawn(Echo, named("worker")).await.unwrap();
    let mut watch = a.watch_name("worker").unwrap();
    let NameChange::Added(first) = next(&mut watch).await else { panic!("the snapshot comes first") };
    assert_eq!(first.target, here.target());
    assert_eq!(first.addr, a.addr().to_string());

    let there = b.spawn(Echo, named("worker")).await.unwrap();
    a.spawn(Echo, named("another")).await.unwrap();
    let NameChange::Added(second) = next(&mut watch).await else { panic!("one more came") };
    assert_eq!((second.target, second.addr.clone()), (there.target(), b.addr().to_string()));

    b.set_metadata(there.target().actor, state("ready")).unwrap();
    let change = next(&mut watch).await;
    assert!(matches!(&change, NameChange::Updated(one) if one.metadata == state("ready")), "{change:?}");

    end(&a, &here).await;
    let change = next(&mut watch).await;
    assert!(matches!(&change, NameChange::Removed(one) if one.target == here.target()), "{change:?}");

    b.shutdown().await;
    let change = next(&mut watch).await;
    assert!(matches!(&change, NameChange::Removed(one) if one.target == there.target()), "{change:?}");

    a.shutdown().await;
    assert_eq!(tokio::time::timeout(LIMIT, watch.next()).await.unwrap(), Err(Error::ShutDown));
    assert_eq!(watch.next().await, Err(Error::ShutDown), "and goes on saying so");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r10_a_private_name_is_watched_on_its_own_node_only() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let (mut here, mut there) = (a.watch_name("mine").unwrap(), b.watch_name("mine").unwrap());
    let secret = a.spawn(Echo, ActorSpec { public: false, ..named("mine") }).await.unwrap();
    assert!(matches!(next(&mut here).await, NameChange::Added(one) if one.target == secret.target()));
    end(&a, &secret).await;
    assert!(matches!(next(&mut here).await, NameChange::Removed(_)));
    // Names of one node arrive in order: what the private one would have been told by comes before this.
    let public = a.spawn(Echo, named("mine")).await.unwrap();
    assert!(matches!(next(&mut there).await, NameChange::Added(one) if one.target == public.target()));
    assert!(a.watch_name("").is_err(), "a name that cannot be one");
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m5_a_slow_watcher_is_told_the_sum_and_never_misses_the_end() {
    let a = node(&[]).await;
    let mut watch = a.watch_name("busy").unwrap();
    let keeper = a.spawn(Echo, named("busy")).await.unwrap();
    assert!(matches!(next(&mut watch).await, NameChange::Added(_)));
    for round in 0..1000 {
        a.set_metadata(keeper.target().actor, state(&round.to_string())).unwrap();
    }
    let change = watch.take();
    assert!(matches!(&change[..], [NameChange::Updated(one)] if one.metadata == state("999")), "{change:?}");
    // What came and went unseen is not told at all.
    end(&a, &keeper).await;
    for _ in 0..100 {
        let other = a.spawn(Echo, named("busy")).await.unwrap();
        end(&a, &other).await;
    }
    let last = a.spawn(Echo, named("busy")).await.unwrap();
    let changes = watch.take();
    assert_eq!(changes.len(), 2, "{changes:?}");
    assert!(matches!(&changes[0], NameChange::Removed(one) if one.target == keeper.target()));
    assert!(matches!(&changes[1], NameChange::Added(one) if one.target == last.target()));
    assert!(watch.take().is_empty());
    a.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m5_a_wait_cut_short_loses_no_change() {
    let a = node(&[]).await;
    let mut watch = a.watch_name("x").unwrap();
    let (mut told, mut cut) = (0, 0);
    for _ in 0..50 {
        let one = a.spawn(Echo, named("x")).await.unwrap();
        // Polled once and dropped, wherever in its course it was.
        tokio::select! {
            biased;
            change = watch.next() => { told += i32::from(matches!(change, Ok(NameChange::Added(_)))); }
            () = std::future::ready(()) => {
                cut += 1;
                assert!(matches!(next(&mut watch).await, NameChange::Added(_)));
                told += 1;
            }
        }
        end(&a, &one).await;
        assert!(matches!(next(&mut watch).await, NameChange::Removed(_)));
    }
    assert_eq!(told, 50);
    assert!(cut > 0);
    a.shutdown().await;
}

async fn on(network: &Network, name: &str, seeds: &[&str]) -> System {
    let config = SystemConfig {
        seeds: seeds.iter().map(|seed| format!("{seed}:7000")).collect(),
        security: Security::Insecure,
        transport: Transport::Memory(network.host(name).unwrap()),
        ..SystemConfig::default()
    };
    System::start(config).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn m5_a_watch_follows_a_lost_node_and_its_return() {
    let network = Network::new(5);
    let ms = Duration::from_millis;
    network.set_faults(Faults { delay: (ms(1), ms(5)), ..Faults::default() }).unwrap();
    let a = on(&network, "a", &[]).await;
    let b = on(&network, "b", &["a"]).await;
    let c = on(&network, "c", &["a"]).await;
    let (two, three) = (b.spawn(Echo, named("worker")).await.unwrap(), c.spawn(Echo, named("worker")).await.unwrap());
    let mut watch = a.watch_name("worker").unwrap();
    let mut known = BTreeMap::new();
    let (b_id, c_id) = (b.node_id(), c.node_id());
    // Of the paused clock.
    let limit = Duration::from_secs(60);
    follow(&mut watch, &mut known, limit, |known| known.len() == 2).await;
    assert_eq!((known[&b_id].target, known[&c_id].target), (two.target(), three.target()));
    let (near, far) = (["a".to_owned(), "b".to_owned()], ["c".to_owned()]);
    network.partition(&near, &far, false, false).unwrap();
    follow(&mut watch, &mut known, limit, |known| !known.contains_key(&c_id)).await;
    assert!(known.contains_key(&b_id));
    network.heal();
    follow(&mut watch, &mut known, limit, |known| known.contains_key(&c_id)).await;
    assert_eq!(known[&c_id].target, three.target());
}
