//! Joining, leaving, refusing (M3, M4, M6).
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::*;
use pulsing_core::{Error, MemberState, System, SystemConfig};

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
    assert!(error.to_string().contains("the port is in use"), "{error}");
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
