//! What choosing a Worker costs, and what the index of prompts weighs: `cargo bench -p pulsing-gateway --bench selection`.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use pulsing_core::{ActorId, Instance, NodeId, Target};
use pulsing_gateway::policy::{Hints, Policy, chain};
use pulsing_gateway::pool::Worker;
use pulsing_gateway::{PolicyKind, PolicyOptions};

fn workers(count: u128) -> Arc<[Arc<Worker>]> {
    let one = |number: u128| {
        Arc::new(Worker::new(&Instance {
            name: "worker".into(),
            target: Target {
                node: NodeId(1),
                actor: ActorId(number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)),
            },
            addr: "127.0.0.1:1".into(),
            class: String::new(),
            metadata: BTreeMap::from([("protocol".into(), "1..1".into())]),
            unique: false,
        }))
    };
    (1..=count).map(one).collect()
}

/// A chat of `bytes` bytes that no other has.
fn messages(number: usize, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 100);
    while text.len() < bytes {
        text.push_str(&format!("prompt {number} at {} ", text.len()));
    }
    text.truncate(bytes);
    format!(r#"[{{"role":"user","content":"{text}"}}]"#)
}

/// Time that this thread was on a core, so that other work on the machine does not count; without Linux, time that passed.
fn spent(start: Instant) -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or_else(|| start.elapsed().as_nanos() as f64)
}

fn nanos(rounds: usize, mut run: impl FnMut(usize)) -> f64 {
    let start = Instant::now();
    let before = spent(start);
    (0..rounds).for_each(&mut run);
    (spent(start) - before) / rounds as f64
}

fn rss() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

fn main() {
    println!("ns a choice (64 blocks of prompt known to one worker, a session key):");
    for count in [4, 64, 4000] {
        let workers = workers(count);
        for name in PolicyKind::NAMES {
            let policy: Box<dyn Policy> = name.parse::<PolicyKind>().unwrap().build(PolicyOptions::default());
            let prefixes: Vec<Vec<u64>> =
                (0..256).map(|number| chain::of_chat(messages(number, 16 << 10).as_bytes(), None).finish()).collect();
            for (number, prefix) in prefixes.iter().enumerate() {
                policy.sent(&workers[number % workers.len()], Hints { affinity: None, prefix });
            }
            let time = nanos(20_000, |round| {
                let hints = Hints { affinity: Some("session"), prefix: &prefixes[round % 256] };
                black_box(policy.pick(&workers, hints));
            });
            println!("{name:>18} {count:>5} workers {time:>9.0}");
        }
    }
    for bytes in [200, 16 << 10, 220 << 10] {
        let messages = messages(1, bytes);
        let time = nanos(2000, |_| drop(black_box(chain::of_chat(messages.as_bytes(), None).finish())));
        println!("ns to hash a prompt of {bytes} bytes: {time:.0}");
    }
    let workers = workers(4);
    let policy = PolicyKind::CacheAware.build(PolicyOptions::default());
    let before = rss();
    let time = nanos(100_000, |number| {
        let prefix = chain::of_chat(messages(number, 16 << 10).as_bytes(), None).finish();
        policy.sent(&workers[number % 4], Hints { affinity: None, prefix: &prefix });
    });
    let grown = rss().saturating_sub(before) as f64 / f64::from(1 << 20);
    println!("100,000 prompts of 16 KiB: {grown:.1} MiB more resident, {:?}, {time:.0} ns each", policy.index());
}
