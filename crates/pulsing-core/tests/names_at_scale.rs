//! Many names: none is lost, and membership does not notice them (M5).
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::*;
use pulsing_core::net::memory::{Faults, Network};
use pulsing_core::{ActorId, ActorSpec, Call, Ending, Endpoint, Security, System, SystemConfig, Transport};
use std::sync::Arc;
use tokio::time::{Instant, sleep};

struct Nobody;

impl Endpoint for Nobody {
    fn deliver(&self, _: Call) {}
    fn end(&self, _: Ending) {}
}

fn publish(system: &System, name: &str) -> ActorId {
    let actor = ActorId::generate();
    let spec: ActorSpec = named(name);
    system.register(actor, spec, Arc::new(Nobody)).unwrap();
    actor
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

/// Of the network's own time.
async fn until(what: &str, limit: Duration, mut check: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < limit, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(20)).await;
    }
    begun.elapsed()
}

fn count(system: &System) -> usize {
    system.first_names(0).0
}

#[tokio::test(start_paused = true)]
async fn m5_what_a_full_queue_dropped_is_repaired() {
    let network = Network::new(11);
    let ms = Duration::from_millis;
    network.set_faults(Faults { delay: (ms(1), ms(2)), ..Faults::default() }).unwrap();
    let a = on(&network, "a", &[]).await;
    let b = on(&network, "b", &["a"]).await;
    let doomed = publish(&a, "doomed");
    until("the first name is known", ms(1000), || b.instances("doomed").len() == 1).await;
    network.pause("b").unwrap();
    for n in 0..6000 {
        publish(&a, &format!("name-{n}"));
        // Each is pushed on its own.
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
    }
    a.withdraw(doomed);
    until("frames were dropped", ms(1000), || a.metrics().control_dropped.get() > 0).await;
    network.resume("b").unwrap();
    until("all is known", ms(5000), || count(&b) == 6000).await;
    assert!(b.instances("doomed").is_empty(), "and what ended is gone");
}

#[tokio::test(start_paused = true)]
async fn m5_names_in_bulk_cause_no_suspicion_and_a_joiner_knows_them_at_once() {
    let network = Network::new(12);
    let ms = Duration::from_millis;
    network.set_faults(Faults { delay: (ms(1), ms(2)), ..Faults::default() }).unwrap();
    let mut all = vec![on(&network, "h0", &[]).await];
    for n in 1..4 {
        all.push(on(&network, &format!("h{n}"), &["h0"]).await);
    }
    let total = 4 * 1000;
    for (host, system) in all.iter().enumerate() {
        for n in 0..1000 {
            publish(system, &format!("name-{host}-{n}"));
        }
    }
    until("everybody knows all", ms(2000), || all.iter().all(|one| count(one) == total)).await;
    let before: Vec<u64> = all.iter().map(|one| one.metrics().bytes_out.get()).collect();
    let begun = Instant::now();
    let late = on(&network, "late", &["h0"]).await;
    assert_eq!(count(&late), total, "`start` returns with the names of the cluster");
    assert!(begun.elapsed() < ms(2000), "{:?}", begun.elapsed());
    sleep(ms(3000)).await;
    let sent: u64 = all.iter().zip(before).map(|(one, before)| one.metrics().bytes_out.get() - before).sum();
    assert!(sent < 2 * total as u64 * 100, "{sent} bytes: every name travels about once");
    let last = publish(&all[1], "last");
    until("it is known", ms(1000), || late.instances("last").len() == 1).await;
    all[1].withdraw(last);
    until("it is gone", ms(1000), || late.instances("last").is_empty()).await;
    assert!(all.iter().all(|one| one.metrics().suspicions.get() == 0), "probes waited behind names");
}
