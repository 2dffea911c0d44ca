//! Joining, leaving, refusing (M3, M4, M6).
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::*;
use pulsing_core::net::wire::Versions;
use pulsing_core::{ActorSpec, Error, MemberState, Passphrase, Security, System, SystemConfig};

fn alive(system: &System) -> usize {
    system.members().iter().filter(|m| m.state == MemberState::Alive).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_nodes_meet_and_a_leave_is_seen_at_once() {
    let first = node(&[]).await;
    let mut all = vec![first.clone()];
    for _ in 0..9 {
        all.push(node(&[&first]).await);
    }
    eventually("all see all", Duration::from_secs(5), || all.iter().all(|n| alive(n) == 10)).await;
    all[3].spawn(Echo, named("x")).await.unwrap();
    eventually("the name is everywhere", Duration::from_secs(1), || all.iter().all(|n| n.instances("x").len() == 1))
        .await;
    let leaver = all.remove(3);
    let (_, took) = tokio::join!(
        leaver.shutdown(),
        eventually("the leave is seen", Duration::from_secs(1), || all.iter().all(|n| alive(n) == 9)),
    );
    assert!(all.iter().all(|n| n.instances("x").is_empty()), "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_that_is_this_node_is_dropped() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = SystemConfig { addr: Some(free.to_string()), ..config(&[free.to_string()]) };
    let system = System::start(config).await.unwrap();
    assert_eq!(system.members().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_waits_for_its_seed() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let waiting = tokio::spawn(System::start(config(&[free.to_string()])));
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!waiting.is_finished());
    let seed = System::start(SystemConfig { addr: Some(free.to_string()), ..config(&[]) }).await.unwrap();
    let joined = waiting.await.unwrap().unwrap();
    eventually("both see both", Duration::from_secs(2), || alive(&seed) == 2 && alive(&joined) == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_a_seed_is_not_waited_for() {
    for bad in ["127.0.0.1", "seed:port", "seed:65536", ""] {
        let forever = SystemConfig { join_timeout: None, ..config(&[bad.to_owned()]) };
        let started = tokio::time::timeout(Duration::from_secs(5), System::start(forever)).await.unwrap();
        let error = started.map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::InvalidAddress { value, .. } if value == bad), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn joining_fails_loudly() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let late = SystemConfig { join_timeout: Some(Duration::from_millis(300)), ..config(&[free.to_string()]) };
    let error = System::start(late).await.map(|_| ()).unwrap_err();
    assert!(matches!(&error, Error::JoinFailed { tried, .. } if tried.contains(&free.to_string())), "{error}");

    let seed = node(&[]).await;
    let seeds = [seed.addr().to_string()];
    let other = SystemConfig { cluster: "other".into(), ..config(&seeds) };
    let error = System::start(other).await.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("cluster \"default\", not \"other\""), "{error}");

    let secret = common::secret_file().with_extension("other");
    let stranger = SystemConfig { secret_file: Some(secret), ..config(&seeds) };
    let error = System::start(stranger).await.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("could not prove this user's secret"), "{error}");
    assert_eq!(alive(&seed), 1);

    let error = System::start(SystemConfig { addr: Some(seed.addr().to_string()), ..config(&[]) })
        .await
        .map(|_| ())
        .unwrap_err();
    let holder = format!("the port is in use by Pulsing node {}", seed.node_id());
    assert!(error.to_string().contains(&holder), "{error}");
    let error =
        System::start(SystemConfig { addr: Some("nonsense".into()), ..config(&[]) }).await.map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::InvalidAddress { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_that_restarts_is_joined_again() {
    let seed = node(&[]).await;
    let addr = seed.addr().to_string();
    let member = node(&[&seed]).await;
    member.spawn(Echo, named("x")).await.unwrap();
    seed.shutdown().await;
    drop(seed);
    let again = System::start(SystemConfig { addr: Some(addr), ..config(&[]) }).await.unwrap();
    eventually("they met again", Duration::from_secs(8), || alive(&again) == 2 && alive(&member) == 2).await;
    eventually("names too", Duration::from_secs(2), || again.instances("x").len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m4_a_restart_waits_for_the_port_of_its_former_self_and_replaces_it_at_once() {
    let member = node(&[]).await;
    let old = node(&[&member]).await;
    let addr = old.addr().to_string();
    old.spawn(Echo, named("x")).await.unwrap();
    old.drain();
    let restart = SystemConfig { addr: Some(addr.clone()), ..config(&[member.addr().to_string()]) };
    let mut waiting = tokio::spawn(System::start(restart));
    // Longer than a port may be held by somebody who does not leave.
    assert!(tokio::time::timeout(Duration::from_millis(1500), &mut waiting).await.is_err());
    old.shutdown().await;
    let new = tokio::time::timeout(Duration::from_secs(2), waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(new.addr().to_string(), addr);
    new.spawn(Echo, named("x")).await.unwrap();
    eventually("the name is the new one's", Duration::from_secs(1), || {
        let found = member.instances("x");
        alive(&member) == 2 && found.len() == 1 && found[0].target.node == new.node_id()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r10_two_halves_that_meet_keep_the_older_holder_of_a_unique_name() {
    let unique = || ActorSpec { unique: true, ..named("leader") };
    let seed = node(&[]).await;
    let addr = seed.addr().to_string();
    let member = node(&[&seed]).await;
    seed.shutdown().await;
    let old = member.spawn(Echo, unique()).await.unwrap().target();
    let again = System::start(SystemConfig { addr: Some(addr), ..config(&[]) }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2)).await;
    let young = again.spawn(Echo, unique()).await.unwrap().target();
    let only = |system: &System, target| {
        let found = system.instances("leader");
        found.len() == 1 && found[0].target == target
    };
    assert!(only(&again, young) && only(&member, old));
    eventually("one holder", Duration::from_secs(8), || only(&again, old) && only(&member, old)).await;
    assert_eq!(ask(&again, old, "x").await.unwrap().head, "x");
    eventually("the loser has stopped", Duration::from_secs(2), || again.metrics().actors_stopped.get() == 1).await;
    eventually("the winner hears of it", Duration::from_secs(2), || member.metrics().claims_won.get() == 1).await;
    assert_eq!(again.metrics().claims_lost.get(), 1);
    assert!(matches!(ask(&member, young, "x").await, Err(Error::ActorNotFound { .. })));
}

fn secured(passphrase: &str, seeds: &[String]) -> SystemConfig {
    SystemConfig { security: Security::Passphrase(Passphrase::new(passphrase).unwrap()), ..config(seeds) }
}

async fn refusal(config: SystemConfig) -> String {
    let error = System::start(SystemConfig { join_timeout: Some(Duration::from_secs(5)), ..config })
        .await
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    error.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_passphrase_makes_a_tls_cluster_that_others_are_told_to_keep_out_of() {
    let seed = System::start(secured("one", &[])).await.unwrap();
    let plain = node(&[]).await;
    let (seeds, plain_seeds) = ([seed.addr().to_string()], [plain.addr().to_string()]);

    let member = System::start(secured("one", &seeds)).await.unwrap();
    seed.spawn(Echo, named("echo")).await.unwrap();
    let there = member.resolve("echo", None, Duration::from_secs(2)).await.unwrap();
    let large = vec![3u8; 3 << 20];
    assert!(ask(&member, there.target, large.clone()).await.unwrap().head == large);

    assert!(refusal(secured("two", &seeds)).await.contains("check the passphrase and --cluster"));
    let other = SystemConfig { cluster: "other".into(), ..secured("one", &seeds) };
    assert!(refusal(other).await.contains("check the passphrase and --cluster"));
    assert!(refusal(config(&seeds)).await.contains("this cluster uses TLS"));
    assert!(refusal(secured("one", &plain_seeds)).await.contains("it answers without TLS"));
    assert_eq!((alive(&seed), alive(&plain)), (2, 1));
    // A refusal disturbs nobody.
    assert_eq!(ask(&member, there.target, "x").await.unwrap().head, "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn rubbish_on_the_port_disturbs_nobody() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let seed = node(&[]).await;
    let mut held = Vec::new();
    for rubbish in [
        &b"\x89PULSING"[..],
        b"\x89PULSING\x09\x09\0\0\0\0\0\0",
        b"\x89PULSING\x01\x01\0\0\xff\xff\xff\xff",
        b"\x16\x03\x01\x02\0\x01",
        b"\0\0\0\0\0",
        b"GARBAGE\r\n\r\n",
    ] {
        let mut stream = tokio::net::TcpStream::connect(seed.addr()).await.unwrap();
        stream.write_all(rubbish).await.unwrap();
        held.push(stream);
    }
    for _ in 0..300 {
        held.push(tokio::net::TcpStream::connect(seed.addr()).await.unwrap());
    }
    let member = node(&[&seed]).await;
    eventually("the cluster works meanwhile", Duration::from_secs(2), || alive(&member) == 2).await;
    let mut answer = Vec::new();
    held[1].read_to_end(&mut answer).await.unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("wire versions do not meet"), "{answer:?}");
}

fn speaking(lowest: u8, highest: u8, seeds: &[&System]) -> SystemConfig {
    let seeds: Vec<_> = seeds.iter().map(|s| s.addr().to_string()).collect();
    SystemConfig { versions: Versions { lowest, highest }, ..config(&seeds) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_talks_to_the_one_before_and_refuses_older_ones_in_words() {
    let old = System::start(speaking(1, 1, &[])).await.unwrap();
    old.spawn(Echo, named("old")).await.unwrap();
    let new = System::start(speaking(1, 2, &[&old])).await.unwrap();
    new.spawn(Echo, named("new")).await.unwrap();
    for (from, name) in [(&old, "new"), (&new, "old")] {
        let there = from.resolve(name, None, Duration::from_secs(5)).await.unwrap();
        let large = vec![3u8; 3 << 20];
        assert!(ask(from, there.target, large.clone()).await.unwrap().head == large);
    }
    let told = refusal(speaking(2, 3, &[&old])).await;
    let addr = old.addr();
    assert!(told.contains(&format!("{addr} speaks 1..1; upgrade Pulsing at {addr}")), "{told}");
    assert!(told.contains("speaks 2..3"), "{told}");
    assert_eq!((alive(&old), alive(&new)), (2, 2));
}
