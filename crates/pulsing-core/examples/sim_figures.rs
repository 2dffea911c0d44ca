//! Figures of simulated clusters: time to detect and to disseminate, suspicions, false deaths, bytes.
//!
//! `cargo run --profile ci -p pulsing-core --example sim_figures -- [--times N] [--sizes 10,100] [--json FILE] [--write FILE]`
//! prints a Markdown table; `--write` puts it into the section "Simulated" of a document, `--json` writes the numbers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr, dead_code, missing_docs)]

#[path = "../tests/cluster_sim/sim/mod.rs"]
mod sim;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use pulsing_core::cluster::{MemberEvent, Preset};
use pulsing_core::{MemberState, NodeId};
use serde_json::{Value, json};

use sim::{Sim, Weather, ms};

/// Seeds at 10, 100 and 1,000 nodes, and losses of each kind that one seed shows.
const SIZES: [(usize, u64, usize); 3] = [(10, 200, 1), (100, 20, 4), (1000, 1, 4)];
/// How long each weather lasts.
const SPELL: Duration = Duration::from_secs(20);
const HEADING: &str = "## Simulated";

/// Seconds, sorted.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn add(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64());
    }

    fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    fn json(&self) -> Value {
        if self.0.is_empty() {
            return Value::Null;
        }
        json!({"n": self.0.len(), "p50": self.at(0.5), "p99": self.at(0.99), "max": self.at(1.0)})
    }
}

#[derive(Default)]
struct Spell {
    node_seconds: f64,
    suspicions: usize,
    false_deaths: usize,
    refuted: Times,
    packets: u64,
    membership: u64,
    registry: u64,
}

impl Spell {
    fn watch(&mut self, sim: &mut Sim, weather: Weather) {
        sim.weather = weather;
        let (start, before) = (sim.now(), sim.traffic);
        sim.run(SPELL);
        self.node_seconds += sim.living().len() as f64 * SPELL.as_secs_f64();
        self.packets += sim.traffic.packets - before.packets;
        self.membership += sim.traffic.membership - before.membership;
        self.registry += sim.traffic.registry - before.registry;
        // What is still suspected when the weather clears may refute then.
        sim.weather = Weather::FAIR;
        sim.run(ms(5000));
        self.false_deaths += sim.deaths(start).len();
        for host in sim.living() {
            let mut suspected: BTreeMap<NodeId, Duration> = BTreeMap::new();
            for (at, event) in sim.process(host).log.iter().filter(|(at, _)| *at >= start) {
                match event {
                    MemberEvent::Suspect(who) => {
                        self.suspicions += 1;
                        suspected.insert(who.node, *at);
                    }
                    MemberEvent::Refuted(who) => {
                        if let Some(since) = suspected.remove(&who.node) {
                            self.refuted.add(*at - since);
                        }
                    }
                    _ => {}
                }
            }
        }
        assert!(sim.agreed(), "a cluster that lost nobody agrees");
    }

    fn json(&self) -> Value {
        json!({
            "node_seconds": self.node_seconds,
            "suspicions": self.suspicions,
            "false_deaths": self.false_deaths,
            "refuted_s": self.refuted.json(),
            "packets_per_node_s": self.packets as f64 / self.node_seconds,
            "membership_bytes_per_node_s": self.membership as f64 / self.node_seconds,
            "registry_bytes_per_node_s": self.registry as f64 / self.node_seconds,
        })
    }
}

#[derive(Default)]
struct Loss {
    first: Times,
    all: Times,
}

impl Loss {
    fn watch(&mut self, sim: &mut Sim, n: usize, end: impl FnOnce(&mut Sim, usize) -> NodeId) {
        let wait = ms(17 * sim.pick(60) as u64);
        sim.run(ms(1000) + wait);
        let living = sim.living();
        let victim = living[sim.pick(living.len())];
        let start = sim.now();
        let dead = end(sim, victim);
        sim.expect("all see the loss", ms(60_000), |sim| sim.all_see(dead, MemberState::Down));
        let mut seen: Vec<Duration> = Vec::with_capacity(n);
        for host in sim.living() {
            let log = &sim.process(host).log;
            let down = |event: &MemberEvent| matches!(event, MemberEvent::Down(who, _) if who.node == dead);
            seen.extend(log.iter().find(|(_, event)| down(event)).map(|(at, _)| *at - start));
        }
        self.first.add(*seen.iter().min().expect("observers"));
        self.all.add(*seen.iter().max().expect("observers"));
    }

    fn json(&self) -> Value {
        json!({"first_s": self.first.json(), "all_s": self.all.json()})
    }
}

fn figures(n: usize, seeds: u64, losses: usize) -> Value {
    let weathers = [
        ("idle", Weather::FAIR),
        ("loaded", Weather::LOADED),
        ("loss_10", Weather::losing(0.1)),
        ("loss_30", Weather::losing(0.3)),
    ];
    let mut spells: BTreeMap<&str, Spell> = BTreeMap::new();
    let (mut crash, mut silent, mut formed) = (Loss::default(), Loss::default(), Times::default());
    for seed in 1..=seeds {
        let mut sim = Sim::formed(n, Preset::Lan, Weather::FAIR, seed);
        formed.add(sim.now());
        for (name, weather) in weathers {
            spells.entry(name).or_default().watch(&mut sim, weather);
        }
        for _ in 0..losses {
            crash.watch(&mut sim, n, Sim::kill);
            silent.watch(&mut sim, n, Sim::power_off);
        }
        eprint!("\r{n} nodes: seed {seed} of {seeds}  ");
    }
    eprintln!();
    let spells: BTreeMap<&str, Value> = spells.iter().map(|(name, spell)| (*name, spell.json())).collect();
    json!({
        "nodes": n, "seeds": seeds, "preset": "lan", "formed_s": formed.json(),
        "weather": spells, "crash": crash.json(), "silent_loss": silent.json(),
    })
}

fn table(all: &[Value]) -> String {
    let mut out = String::new();
    let head: Vec<String> = all.iter().map(|one| format!("{} nodes", one["nodes"])).collect();
    let _ = writeln!(out, "| preset `lan` | {} |", head.join(" | "));
    let _ = writeln!(out, "|---|{}", "---:|".repeat(all.len()));
    let mut row = |what: &str, cell: &dyn Fn(&Value) -> String| {
        let cells: Vec<String> = all.iter().map(cell).collect();
        let _ = writeln!(out, "| {what} | {} |", cells.join(" | "));
    };
    let times = |value: &Value| match (value["p50"].as_f64(), value["p99"].as_f64(), value["max"].as_f64()) {
        (Some(p50), Some(p99), Some(max)) if max < 0.1 => {
            format!("{:.0} / {:.0} / {:.0} ms", p50 * 1e3, p99 * 1e3, max * 1e3)
        }
        (Some(p50), Some(p99), Some(max)) => format!("{p50:.2} / {p99:.2} / {max:.2} s"),
        _ => "none".to_owned(),
    };
    row("seeds", &|one| one["seeds"].to_string());
    row("crash on a host that answers: first to know, p50 / p99 / max", &|one| times(&one["crash"]["first_s"]));
    row("all know", &|one| times(&one["crash"]["all_s"]));
    row("silent loss: first to know", &|one| times(&one["silent_loss"]["first_s"]));
    row("all know", &|one| times(&one["silent_loss"]["all_s"]));
    for (name, what) in [
        ("idle", "idle"),
        ("loaded", "loaded (stalls up to 1 s, timers up to 100 ms late)"),
        ("loss_10", "10 % of messages lost"),
        ("loss_30", "30 % of messages lost"),
    ] {
        row(&format!("{what}: false deaths / suspicions per node and hour"), &|one| {
            let spell = &one["weather"][name];
            if spell.is_null() {
                return "not run".to_owned();
            }
            let hours = spell["node_seconds"].as_f64().unwrap_or(f64::NAN) / 3600.0;
            format!("{} / {:.0}", spell["false_deaths"], spell["suspicions"].as_f64().unwrap_or(f64::NAN) / hours)
        });
        if name != "idle" {
            row("refuted after", &|one| times(&one["weather"][name]["refuted_s"]));
        }
    }
    row("idle: membership, registry bytes per node and second", &|one| {
        let spell = &one["weather"]["idle"];
        let bytes = |name: &str| spell[name].as_f64().unwrap_or(f64::NAN);
        format!("{:.0}, {:.0}", bytes("membership_bytes_per_node_s"), bytes("registry_bytes_per_node_s"))
    });
    row("idle: packets per node and second", &|one| {
        format!("{:.1}", one["weather"]["idle"]["packets_per_node_s"].as_f64().unwrap_or(f64::NAN))
    });
    out
}

/// Replaces the section, which ends at the next heading of its level, or puts it at the end.
fn put_section(path: &str, section: &str) {
    let text = std::fs::read_to_string(path).unwrap_or_else(|_| "# Clusters\n".to_owned());
    let (before, after) = match text.split_once(HEADING) {
        Some((before, rest)) => (before, rest.find("\n## ").map_or("", |at| &rest[at + 1..])),
        None => (text.as_str(), ""),
    };
    let gap = if after.is_empty() { "" } else { "\n" };
    std::fs::write(path, format!("{}\n\n{section}{gap}{after}", before.trim_end()))
        .expect("a file that can be written");
}

fn main() {
    let mut options: BTreeMap<String, String> = BTreeMap::new();
    let mut words = std::env::args().skip(1);
    while let Some(name) = words.next() {
        let known = ["--times", "--sizes", "--json", "--write"].contains(&name.as_str());
        assert!(known, "{name}: the options are --times N, --sizes 10,100,1000, --json FILE and --write FILE");
        options.insert(name, words.next().expect("a value for each option"));
    }
    let times: u64 = options.get("--times").map_or(1, |text| text.parse().expect("--times takes a whole number"));
    let sizes = options.get("--sizes").cloned().unwrap_or_else(|| "10,100,1000".to_owned());
    let wanted = |n: usize| sizes.split(',').any(|size| size.trim() == n.to_string());
    let sizes = SIZES.iter().filter(|(n, ..)| wanted(*n));
    let all: Vec<Value> = sizes.map(|(n, seeds, losses)| figures(*n, seeds * times, *losses)).collect();
    let table = table(&all);
    println!("{table}");
    if let Some(path) = options.get("--json") {
        std::fs::write(path, serde_json::to_string_pretty(&all).expect("numbers")).expect("a file that can be written");
    }
    if let Some(path) = options.get("--write") {
        let section = format!(
            "{HEADING}\n\n`make sim-figures`: the membership state machine of every node under a virtual clock, over ordered links with latencies \
             of 0.05 to 2 ms;\nno network, no TLS. Bytes are those of frame bodies. Times are p50 / p99 / max over all losses of all seeds.\n\n{table}"
        );
        put_section(path, &section);
    }
}
