//! Many nodes in one process over loopback: what they suspect and declare dead while nothing is wrong, and what that costs.
//!
//! `cargo run --release -p pulsing-core --example cluster_crowd -- [--nodes 60] [--seconds 600]` prints one line of JSON;
//! exit code 1 when anybody was declared dead.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pulsing_core::{MemberState, NodeId, System, SystemConfig};
use serde_json::json;

/// What one node saw of the others.
#[derive(Default)]
struct Seen {
    suspicions: usize,
    refuted: Vec<f64>,
    deaths: usize,
}

/// Follows the members of a node until `end`.
async fn follow(system: System, end: Instant) -> Seen {
    let mut changes = system.changes();
    let mut states: BTreeMap<NodeId, (MemberState, Instant)> = BTreeMap::new();
    let mut seen = Seen::default();
    loop {
        for member in system.members() {
            let now = Instant::now();
            let before = states.get(&member.node).copied();
            if before.is_some_and(|(state, _)| state == member.state) {
                continue;
            }
            states.insert(member.node, (member.state, now));
            match (before, member.state) {
                (_, MemberState::Suspect) => seen.suspicions += 1,
                (Some((MemberState::Suspect, since)), MemberState::Alive) => {
                    seen.refuted.push((now - since).as_secs_f64());
                }
                (_, MemberState::Down | MemberState::Left) => seen.deaths += 1,
                _ => {}
            }
        }
        let changed = tokio::time::timeout_at(end.into(), changes.changed());
        if !matches!(changed.await, Ok(Ok(()))) {
            return seen;
        }
    }
}

fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or("").split(' ').collect();
    // Fields 14 and 15 of the whole line, in hundredths of a second.
    fields[11..13].iter().map(|text| text.parse::<f64>().expect("a number") / 100.0).sum()
}

fn rss_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
    line.split_whitespace().nth(1).expect("a size").parse::<f64>().expect("a number") / 1e3
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    let mut options: BTreeMap<String, u64> = BTreeMap::new();
    let mut words = std::env::args().skip(1);
    while let Some(name) = words.next() {
        assert!(["--nodes", "--seconds"].contains(&name.as_str()), "{name}: the options are --nodes N and --seconds N");
        options.insert(name, words.next().and_then(|text| text.parse().ok()).expect("a whole number"));
    }
    let nodes = options.get("--nodes").copied().unwrap_or(60) as usize;
    let seconds = options.get("--seconds").copied().unwrap_or(600);
    let begun = Instant::now();
    let mut systems: Vec<System> = Vec::new();
    for _ in 0..nodes {
        let seeds = systems.iter().take(1).map(|first| first.addr().to_string()).collect();
        let config = SystemConfig { addr: Some("127.0.0.1:0".to_owned()), seeds, ..SystemConfig::default() };
        systems.push(System::start(config).await.expect("a node that joins"));
    }
    let alive = |system: &System| system.members().iter().filter(|m| m.state == MemberState::Alive).count();
    while systems.iter().any(|system| alive(system) != nodes) {
        assert!(begun.elapsed() < Duration::from_secs(120), "{nodes} nodes did not find each other in two minutes");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let formed = begun.elapsed().as_secs_f64();
    eprintln!("{nodes} nodes see each other after {formed:.1} s");
    let count = |pick: fn(&System) -> u64| systems.iter().map(pick).sum::<u64>();
    let (cpu, bytes) = (cpu_seconds(), count(|system| system.metrics().bytes_out.get()));
    let end = Instant::now() + Duration::from_secs(seconds);
    let watchers: Vec<_> = systems.iter().map(|system| tokio::spawn(follow(system.clone(), end))).collect();
    let mut seen = Seen::default();
    for watcher in watchers {
        let one = watcher.await.expect("a watcher that ends");
        seen.suspicions += one.suspicions;
        seen.refuted.extend(one.refuted);
        seen.deaths += one.deaths;
    }
    let span = seconds as f64 * nodes as f64;
    let line = json!({
        "nodes": nodes, "seconds": seconds, "formed_s": formed,
        "deaths": seen.deaths, "suspicions": seen.suspicions, "refuted_s": seen.refuted,
        "cpu_percent": (cpu_seconds() - cpu) / span * 100.0,
        "bytes_out": (count(|system| system.metrics().bytes_out.get()) - bytes) as f64 / span,
        "rss_mb": rss_mb(),
    });
    println!("{line}");
    if seen.deaths > 0 {
        std::process::exit(1);
    }
}
