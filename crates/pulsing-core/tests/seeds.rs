//! What a seed may be, and what a node tells others of itself (M6).
#![allow(clippy::unwrap_used)]

mod common;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use common::*;
use pulsing_core::{Error, MemberState, Security, System, SystemConfig};
use tokio::net::{TcpListener, TcpStream};

fn alive(system: &System) -> usize {
    system.members().iter().filter(|m| m.state == MemberState::Alive).count()
}

fn free() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A file of seeds that goes with the test.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let file = Self(std::env::temp_dir().join(format!("pulsing-{name}-{}", std::process::id())));
        file.write(text);
        file
    }
    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }
    fn seed(&self) -> String {
        format!("file://{}", self.0.display())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn at(addr: impl ToString, seeds: &[String]) -> System {
    let config = SystemConfig { addr: Some(addr.to_string()), ..config(seeds) };
    System::start(config).await.unwrap()
}

async fn failure(config: SystemConfig) -> Error {
    System::start(config).await.map(|_| ()).unwrap_err()
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_nodes_that_all_name_each_other_become_one_cluster_however_they_start() {
    for backwards in [false, true] {
        let addrs: Vec<SocketAddr> = (0..5).map(|_| free()).collect();
        let mut seeds: Vec<String> = addrs.iter().map(ToString::to_string).collect();
        if backwards {
            seeds.reverse();
        }
        let starts: Vec<_> = addrs
            .iter()
            .map(|addr| {
                let (addr, seeds) = (*addr, seeds.clone());
                let late = Duration::from_millis(u64::from(rand::random::<u16>()) % 1000);
                tokio::spawn(async move {
                    tokio::time::sleep(late).await;
                    at(addr, &seeds).await
                })
            })
            .collect();
        let mut all = Vec::new();
        for start in starts {
            all.push(start.await.unwrap());
        }
        eventually("one cluster of five", Duration::from_secs(10), || all.iter().all(|n| alive(n) == 5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m4_clusters_that_grew_apart_meet_at_a_seed_whoever_began() {
    let [a, b, c] = [free(), free(), free()].map(|addr| addr.to_string());
    // Each is the first node of a cluster of its own before any other listens.
    let first = File::new("grew-apart", &a);
    let one = at(&a, &[first.seed()]).await;
    assert_eq!(alive(&one), 1);
    let two = at(&b, &[]).await;
    let three = at(&c, std::slice::from_ref(&b)).await;
    first.write(&format!("{a}\n{c}"));
    eventually("they are one", Duration::from_secs(8), || [&one, &two, &three].iter().all(|n| alive(n) == 3)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_a_file_of_seeds_is_read_again_until_it_names_somebody() {
    let seed = node(&[]).await;
    let file = File::new("read-again", "# nobody yet\n");
    let waiting = tokio::spawn(System::start(config(&[file.seed()])));
    let early = SystemConfig { join_timeout: Some(Duration::from_millis(300)), ..config(&[file.seed()]) };
    assert!(failure(early).await.to_string().contains("the file names no node yet"));
    assert!(!waiting.is_finished());
    file.write(&format!("{}\n{} # it\n", free(), seed.addr()));
    let joined = waiting.await.unwrap().unwrap();
    eventually("both see both", Duration::from_secs(2), || alive(&seed) == 2 && alive(&joined) == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_what_was_tried_is_told_for_each_address() {
    let (one, two) = (free(), free());
    let file = File::new("tried", &format!("{one}\n{two}\n"));
    let seeds = [file.seed(), "no.such.host.invalid:1".to_owned()];
    let error = failure(SystemConfig { join_timeout: Some(Duration::from_secs(3)), ..config(&seeds) }).await;
    let Error::JoinFailed { tried, .. } = error else { panic!("{error}") };
    for words in [
        format!("{} (", file.seed()),
        format!("{one}: "),
        format!("{two}: "),
        "refused".to_owned(),
        "no.such.host.invalid:1 (".to_owned(),
    ] {
        assert!(tried.contains(&words), "{words} is not in {tried}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_a_file_that_names_this_node_only_makes_it_the_first() {
    let addr = free();
    let file = File::new("myself", &format!("{addr}\nlocalhost:{}\n", addr.port()));
    let system = at(addr, &[file.seed()]).await;
    assert_eq!(alive(&system), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_ipv6_is_accepted_wherever_an_address_is() {
    let six = at("[::1]:0", &[]).await;
    assert!(six.addr().to_string().starts_with("[::1]:"));
    let both = at("[::]:0", &[six.addr().to_string()]).await;
    let port = both.addr().port();
    let by_four = at("127.0.0.1:0", &[format!("127.0.0.1:{port}")]).await;
    let by_six = System::start(SystemConfig { addr: None, ..config(&[format!("[::1]:{port}")]) }).await.unwrap();
    assert!(by_six.addr().to_string().starts_with("[::1]:"));
    let all = [six, both, by_four, by_six];
    eventually("all see all", Duration::from_secs(5), || all.iter().all(|n| alive(n) == 4)).await;
    all[0].spawn(Echo, named("x")).await.unwrap();
    for other in &all[1..] {
        let found = other.resolve("x", None, Duration::from_secs(2)).await.unwrap();
        assert_eq!(ask(other, found.target, "x").await.unwrap().head, "x");
    }
}

/// Forwards what arrives at a port of its own, as NAT does.
async fn forward(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut inside, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut outside = TcpStream::connect(to).await?;
                tokio::io::copy_bidirectional(&mut inside, &mut outside).await
            });
        }
    });
    addr
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_a_node_behind_nat_is_reached_at_what_it_advertises() {
    let inside = free();
    let outside = forward(inside).await;
    let told = SystemConfig {
        addr: Some(inside.to_string()),
        advertise: Some(outside.to_string()),
        ..config(&[outside.to_string()])
    };
    // It meets itself through the forwarder, too.
    let hidden = System::start(told).await.unwrap();
    assert_eq!((hidden.addr(), hidden.bound()), (outside, inside));
    hidden.spawn(Echo, named("x")).await.unwrap();
    let peer = node(&[&hidden]).await;
    let found = peer.resolve("x", None, Duration::from_secs(2)).await.unwrap();
    assert_eq!(found.addr, outside.to_string());
    assert_eq!(ask(&peer, found.target, "x").await.unwrap().head, "x");
    peer.spawn(Echo, named("y")).await.unwrap();
    let found = hidden.resolve("y", None, Duration::from_secs(2)).await.unwrap();
    assert_eq!(ask(&hidden, found.target, "y").await.unwrap().head, "y");
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_two_nodes_that_advertise_one_address_are_told() {
    let seed = node(&[]).await;
    let twin = SystemConfig {
        advertise: Some(seed.addr().to_string()),
        join_timeout: Some(Duration::from_secs(2)),
        ..config(&[seed.addr().to_string()])
    };
    let error = failure(twin).await.to_string();
    assert!(error.contains("give one of the two another --advertise"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_a_wildcard_is_known_as_the_interface_that_reaches_the_first_seed() {
    let own = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    own.connect("192.0.2.1:9").unwrap();
    let own = own.local_addr().unwrap().ip();
    let open = |addr: String, seeds: &[String]| SystemConfig {
        addr: Some(addr),
        security: Security::Insecure,
        ..config(seeds)
    };
    let seed = System::start(open(format!("{own}:0"), &[])).await.unwrap();
    let peer = System::start(open("0.0.0.0:0".into(), &[seed.addr().to_string()])).await.unwrap();
    assert_eq!(peer.addr().ip(), own);
    eventually("both see both", Duration::from_secs(2), || alive(&seed) == 2 && alive(&peer) == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_another_wire_version_is_refused_at_once_in_words() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut hello = [0; 12];
            let _ = stream.read_exact(&mut hello).await;
            let _ = stream.write_all(b"\x89PULSING\xff\xff\0\0\0\0\0\0").await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    });
    let forever = SystemConfig { join_timeout: None, ..config(&[addr.to_string()]) };
    let error = tokio::time::timeout(Duration::from_secs(4), failure(forever)).await.unwrap();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert!(error.to_string().contains("wire versions do not meet"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m6_a_node_that_cannot_be_reached_is_told_which_addresses_are_meant() {
    let nowhere = free();
    let told = SystemConfig { advertise: Some(nowhere.to_string()), ..config(&[]) };
    let seed = System::start(told).await.unwrap();
    let at = seed.bound().to_string();
    let error = failure(SystemConfig { join_timeout: Some(Duration::from_secs(2)), ..config(&[at]) }).await.to_string();
    assert!(error.contains(&format!("it advertises {nowhere}, this node 127.0.0.1:")), "{error}");
}
