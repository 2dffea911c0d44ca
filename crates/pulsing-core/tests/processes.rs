//! Real processes, kill -9 and SIGSTOP: what M2 and M3 promise. The test binary runs itself as the nodes.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::*;
use pulsing_core::{CallOptions, Error, MemberState, Reason, System, observe};

/// Not a test: a node for the tests below, which run it in processes of its own.
#[test]
fn node_process() {
    let Ok(seed) = std::env::var("PULSING_TEST_SEED") else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let secret = std::env::var("PULSING_TEST_SECRET").unwrap().into();
        let config = pulsing_core::SystemConfig { secret_file: Some(secret), ..config(&[seed]) };
        let system = System::start(config).await.unwrap();
        struct Silent;
        impl pulsing_core::actor::Actor for Silent {
            async fn receive(&mut self, call: pulsing_core::Call, _ctx: &pulsing_core::actor::Context) {
                let _held = call;
                std::future::pending::<()>().await;
            }
        }
        system.spawn(Silent, named(&std::env::var("PULSING_TEST_NAME").unwrap())).await.unwrap();
        println!("\nnode at {}", system.addr());
        std::future::pending::<()>().await;
    });
}

struct Node {
    child: Child,
    addr: String,
}

impl Node {
    fn start(seed: &System, name: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "node_process", "--nocapture"])
            .env("PULSING_TEST_SEED", seed.addr().to_string())
            .env("PULSING_TEST_SECRET", secret_file())
            .env("PULSING_TEST_NAME", name)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let addr = lines.map(Result::unwrap).find_map(|l| l.strip_prefix("node at ").map(str::to_owned)).unwrap();
        Self { child, addr }
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// How this node sees another.
    async fn sees(&self, other: &str) -> Option<MemberState> {
        let response = observe::get(&self.addr, "/cluster/members", Duration::from_secs(2)).await.ok()?;
        let members: Vec<serde_json::Value> = response.json().ok()?;
        let state = members.iter().find(|m| m["addr"] == other)?["state"].as_str()?.to_owned();
        [MemberState::Alive, MemberState::Suspect, MemberState::Down, MemberState::Left]
            .into_iter()
            .find(|s| s.to_string() == state)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn until_all(nodes: &[Node], other: &str, wanted: fn(Option<MemberState>) -> bool, limit: Duration) -> Duration {
    let begun = std::time::Instant::now();
    loop {
        let mut all = true;
        for node in nodes {
            all &= wanted(node.sees(other).await);
        }
        if all {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < limit, "not all see {other} so within {limit:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_is_seen_by_all_and_fails_the_calls_that_were_out() {
    let seed = node(&[]).await;
    let mut nodes: Vec<_> = (0..5).map(|i| Node::start(&seed, &format!("n{i}"))).collect();
    let victim = nodes.pop().unwrap();
    until_all(&nodes, &victim.addr, |s| s == Some(MemberState::Alive), Duration::from_secs(5)).await;
    let target = seed.resolve("n4", None, Duration::from_secs(2)).await.unwrap().target;
    let watch = seed.watch(target);
    let mut asks = Vec::new();
    for _ in 0..100 {
        let seed = seed.clone();
        asks.push(tokio::spawn(async move { seed.call(target, raw("x"), CallOptions::default()).await }));
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    victim.signal("-9");
    let begun = std::time::Instant::now();
    for ask in asks {
        let error = ask.await.unwrap().unwrap_err();
        assert!(matches!(error, Error::ConnectionLost { .. }), "{error}");
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "in-flight calls took {:?} to fail", begun.elapsed());
    let down = |s: Option<MemberState>| matches!(s, None | Some(MemberState::Down));
    let took = until_all(&nodes, &victim.addr, down, Duration::from_secs(2)).await;
    eventually("its name is gone", Duration::from_secs(1), || seed.instances("n4").is_empty()).await;
    // R9: whoever watched its actor was told the same.
    let ended = tokio::time::timeout(Duration::from_secs(1), watch).await.unwrap().unwrap();
    assert_eq!(ended.reason, Reason::NodeLost);
    println!("seen by all after {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_process_kills_nobody_and_comes_back() {
    let seed = node(&[]).await;
    let mut nodes: Vec<_> = (0..3).map(|i| Node::start(&seed, &format!("p{i}"))).collect();
    let paused = nodes.pop().unwrap();
    until_all(&nodes, &paused.addr, |s| s == Some(MemberState::Alive), Duration::from_secs(5)).await;
    let silent = seed.resolve("p2", None, Duration::from_secs(2)).await.unwrap().target;
    let watch = seed.watch(silent);
    paused.signal("-STOP");
    let down = |s: Option<MemberState>| matches!(s, None | Some(MemberState::Down));
    until_all(&nodes, &paused.addr, down, Duration::from_secs(8)).await;
    let ended = tokio::time::timeout(Duration::from_secs(8), watch).await.unwrap().unwrap();
    assert_eq!(ended.reason, Reason::NodeLost);
    paused.signal("-CONT");
    // Others must never be seen as down while it finds out (M2).
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        for (a, b) in [(0, 1), (1, 0)] {
            assert_ne!(nodes[a].sees(&nodes[b].addr).await, Some(MemberState::Down));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    until_all(&nodes, &paused.addr, |s| s == Some(MemberState::Alive), Duration::from_secs(8)).await;
    eventually("its name is back", Duration::from_secs(3), || seed.instances("p2").len() == 1).await;
}
