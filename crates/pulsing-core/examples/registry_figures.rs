//! Figures of the registry at scale: time, bytes, CPU and memory of each name.
//!
//! `cargo run --release -p pulsing-core --example registry_figures -- [--processes 10x10000] [--simulated 100x1000]
//! [--write FILE]` prints a Markdown table; `--write` puts it into the section "Registry at scale" of a document.
//!
//! `--processes`: so many processes of one node each, over TCP on this machine, that publish so many names each.
//! `--simulated`: so many nodes in this process, on the network in memory (1 to 2 ms a way), whose clock is virtual.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr, missing_docs)]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pulsing_core::net::memory::{Faults, Network};
use pulsing_core::{ActorId, ActorSpec, Call, Ending, Endpoint, Reason, Security, System, SystemConfig, Transport};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

const HEADING: &str = "## Registry at scale";
const LIMIT: Duration = Duration::from_secs(300);
const LAST: &str = "the-last-name";

struct Nobody;

impl Endpoint for Nobody {
    fn deliver(&self, _: Call) {}
    fn end(&self, _: Ending) {}
}

fn publish(system: &System, name: String) -> ActorId {
    let (actor, name) = (ActorId::generate(), Some(name));
    let spec = ActorSpec { name, public: true, class: "Worker".into(), ..ActorSpec::default() };
    system.register(actor, spec, Arc::new(Nobody)).unwrap();
    actor
}

fn count(system: &System) -> usize {
    system.first_names(0).0
}

async fn until(step: Duration, mut check: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < LIMIT, "not within {LIMIT:?}");
        sleep(step).await;
    }
    begun.elapsed()
}

/// CPU seconds and resident MB of this process.
fn costs() -> (f64, f64) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // Linux counts both in hundredths of a second, user and system time.
    let ticks: f64 = [11, 12].iter().map(|at| fields[*at].parse::<f64>().unwrap()).sum();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    (ticks / 100.0, line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1e3)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

// -- one process of many ----------------------------------------------------------------------------------------------

/// One node, told on stdin what to do: `publish N`, `know N`, `stop`, `forget`, `rest`; says on stdout when it is done.
async fn child(seed: Option<String>) {
    let begun = now();
    let config = SystemConfig {
        addr: Some("127.0.0.1:0".into()),
        seeds: seed.into_iter().collect(),
        secret_file: Some(std::env::temp_dir().join("pulsing-registry-figures/secret")),
        ..SystemConfig::default()
    };
    let system = System::start(config).await.unwrap();
    let say = |what: Value| {
        let (cpu, rss) = costs();
        let metrics = system.metrics();
        let said = json!({"at": now(), "cpu_s": cpu, "rss_mb": rss, "bytes": metrics.bytes_out.get(),
            "suspicions": metrics.suspicions.get(), "said": what});
        println!("{said}");
        std::io::stdout().flush().unwrap();
    };
    say(json!({"addr": system.addr().to_string(), "took": now() - begun, "known": count(&system)}));
    let (tx, mut lines) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).all(|line| tx.send(line).is_ok()));
    let mut last = None;
    while let Some(line) = lines.recv().await {
        let mut words = line.split_whitespace();
        let (order, number) = (words.next().unwrap(), words.next().map_or(0, |n| n.parse().unwrap()));
        match order {
            "rest" => sleep(Duration::from_secs(20)).await,
            "publish" => {
                for n in 0..number {
                    publish(&system, format!("worker-{:08x}-{n}", system.node_id().0 as u32));
                    if n % 256 == 255 {
                        tokio::task::yield_now().await;
                    }
                }
            }
            "last" => last = Some(publish(&system, LAST.into())),
            "know" => drop(until(Duration::from_millis(5), || count(&system) >= number).await),
            "stop" => drop(system.unregister(last.unwrap(), Reason::Stopped)),
            "forget" => drop(until(Duration::from_millis(1), || system.instances(LAST).is_empty()).await),
            _ => panic!("{line}"),
        }
        say(json!(order));
    }
    system.shutdown().await;
}

struct Node {
    process: Child,
    said: BufReader<ChildStdout>,
}

impl Node {
    fn start(seed: Option<&str>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("--child").args(seed);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(process.stdout.take().unwrap());
        Self { process, said }
    }
    fn tell(&mut self, order: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{order}").unwrap();
    }
    fn hear(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.said.read_line(&mut line).unwrap() > 0, "a node ended");
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What all said after an order to all.
fn all(nodes: &mut [Node], order: &str) -> Vec<Value> {
    nodes.iter_mut().for_each(|node| node.tell(order));
    nodes.iter_mut().map(Node::hear).collect()
}

fn sum(said: &[Value], key: &str) -> f64 {
    said.iter().map(|one| one[key].as_f64().unwrap()).sum()
}

fn latest(said: &[Value]) -> f64 {
    said.iter().map(|one| one["at"].as_f64().unwrap()).fold(0.0, f64::max)
}

fn processes(size: usize, each: usize) -> Vec<(&'static str, String)> {
    let mut first = Node::start(None);
    let seed = first.hear()["said"]["addr"].as_str().unwrap().to_owned();
    let mut nodes = vec![first];
    for _ in 1..size {
        nodes.push(Node::start(Some(&seed)));
        nodes.last_mut().unwrap().hear();
    }
    let total = size * each;
    let before = all(&mut nodes, "know 0");
    let begun = now();
    all(&mut nodes, &format!("publish {each}"));
    let published = now() - begun;
    let after = all(&mut nodes, &format!("know {total}"));
    let converged = latest(&after) - begun;
    let per = |key: &str, unit: f64| (sum(&after, key) - sum(&before, key)) * unit / (total * size) as f64;
    let (bytes, cpu, memory) = (per("bytes", 1.0), per("cpu_s", 1e6), per("rss_mb", 1e6));
    nodes[0].tell("last");
    nodes[0].hear();
    all(&mut nodes, &format!("know {}", total + 1));
    let begun = now();
    nodes[0].tell("stop");
    nodes[0].hear();
    let gone = latest(&all(&mut nodes[1..], "forget")) - begun;
    let mut late = Node::start(Some(&seed));
    let said = late.hear();
    assert_eq!(said["said"]["known"], total, "`start` returns with the names of the cluster");
    let joined = said["said"]["took"].as_f64().unwrap();
    let rest = all(&mut nodes, "know 0");
    std::thread::sleep(Duration::from_secs(20));
    let idle = all(&mut nodes, "know 0");
    let idle_cpu = (sum(&idle, "cpu_s") - sum(&rest, "cpu_s")) / size as f64 / 20.0 * 100.0;
    let idle_bytes = (sum(&idle, "bytes") - sum(&rest, "bytes")) / size as f64 / 20.0;
    vec![
        ("all published (all processes at once)", format!("{published:.2} s")),
        ("all known everywhere, from the first publication on", format!("{converged:.2} s")),
        ("sent, a name and replica", format!("{bytes:.0} bytes")),
        ("CPU, a name and replica (publishing included)", format!("{cpu:.1} us")),
        ("memory, a name and replica (RSS)", format!("{memory:.0} bytes")),
        ("a stopped name: gone everywhere", format!("{:.1} ms", gone * 1e3)),
        ("a node joins: it knows all names", format!("{joined:.2} s")),
        ("afterwards, a node: CPU of a core; sent", format!("{idle_cpu:.2} %; {idle_bytes:.0} bytes/s")),
        ("suspicions", format!("{}", sum(&idle, "suspicions"))),
    ]
}

// -- all in one process, on a virtual clock ---------------------------------------------------------------------------

async fn on(network: &Network, name: &str, seeds: &[&str]) -> System {
    let config = SystemConfig {
        seeds: seeds.iter().map(|seed| format!("{seed}:7000")).collect(),
        security: Security::Insecure,
        transport: Transport::Memory(network.host(name).unwrap()),
        ..SystemConfig::default()
    };
    System::start(config).await.unwrap()
}

async fn simulated(size: usize, each: usize) -> Vec<(&'static str, String)> {
    let network = Network::new(1);
    let ms = Duration::from_millis;
    network.set_faults(Faults { delay: (ms(1), ms(2)), ..Faults::default() }).unwrap();
    let mut nodes = vec![on(&network, "h0", &[]).await];
    for n in 1..size {
        nodes.push(on(&network, &format!("h{n}"), &["h0"]).await);
    }
    let sent = |nodes: &[System]| nodes.iter().map(|one| one.metrics().bytes_out.get()).sum::<u64>() as f64;
    let total = size * each;
    let (before, (cpu, rss), begun) = (sent(&nodes), costs(), Instant::now());
    // A tenth of them every tenth of a second.
    for tenth in 0..10 {
        for (at, node) in nodes.iter().enumerate() {
            for n in (tenth * each / 10)..((tenth + 1) * each / 10) {
                publish(node, format!("worker-{at}-{n}"));
            }
        }
        sleep(ms(100)).await;
    }
    let published = begun.elapsed();
    until(ms(10), || nodes.iter().all(|one| count(one) == total)).await;
    let converged = begun.elapsed();
    let per = (total * size) as f64;
    let (cpu, rss, bytes) = ((costs().0 - cpu) / per, (costs().1 - rss) / per, (sent(&nodes) - before) / per);
    let last = publish(&nodes[0], LAST.into());
    until(ms(10), || nodes.iter().all(|one| count(one) > total)).await;
    nodes[0].withdraw(last);
    let gone = until(ms(1), || nodes.iter().all(|one| one.instances(LAST).is_empty())).await;
    let begun = Instant::now();
    let late = on(&network, "late", &["h0"]).await;
    assert_eq!(count(&late), total, "`start` returns with the names of the cluster");
    let joined = begun.elapsed();
    let before = sent(&nodes);
    let real = costs().0;
    sleep(Duration::from_secs(20)).await;
    let idle = (sent(&nodes) - before) / size as f64 / 20.0;
    let idle_cpu = (costs().0 - real) / size as f64 / 20.0 * 100.0;
    let suspicions: u64 = nodes.iter().map(|one| one.metrics().suspicions.get()).sum();
    vec![
        ("all published (a tenth every 100 ms)", format!("{:.2} s", published.as_secs_f64())),
        ("all known everywhere, from the first publication on", format!("{:.2} s", converged.as_secs_f64())),
        ("sent, a name and replica", format!("{bytes:.0} bytes")),
        ("CPU, a name and replica (publishing included)", format!("{:.1} us", cpu * 1e6)),
        ("memory, a name and replica (RSS)", format!("{:.0} bytes", rss * 1e6)),
        ("a stopped name: gone everywhere", format!("{:.0} ms", gone.as_secs_f64() * 1e3)),
        ("a node joins: it knows all names", format!("{:.2} s", joined.as_secs_f64())),
        ("afterwards, a node: CPU of a core; sent", format!("{idle_cpu:.2} %; {idle:.0} bytes/s")),
        ("suspicions", suspicions.to_string()),
    ]
}

// -- the report -------------------------------------------------------------------------------------------------------

fn table(text: &mut String, title: &str, rows: &[(&str, String)]) {
    let _ = writeln!(text, "\n| {title} | |\n|---|---:|");
    for (what, value) in rows {
        let _ = writeln!(text, "| {what} | {value} |");
    }
}

fn put(path: &str, section: &str) {
    let whole = std::fs::read_to_string(path).unwrap();
    let (before, rest) = whole.split_once(HEADING).unwrap_or((&whole, ""));
    let after = rest.find("\n## ").map_or("", |at| &rest[at..]);
    std::fs::write(path, format!("{}\n\n{}{after}", before.trim_end(), section.trim_end().to_owned() + "\n")).unwrap();
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| arguments.iter().position(|one| one == name).and_then(|at| arguments.get(at + 1));
    let size = |name: &str, default: &str| {
        let text = value(name).map_or(default, String::as_str);
        let (nodes, names) = text.split_once('x').expect("nodes x names of each");
        (nodes.parse().unwrap(), names.parse().unwrap())
    };
    if arguments.first().is_some_and(|one| one == "--child") {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        return runtime.block_on(child(arguments.get(1).cloned()));
    }
    let profile = if cfg!(debug_assertions) { "with debug assertions" } else { "optimised" };
    let mut text = format!(
        "{HEADING}\n\n`make bench-registry` (`examples/registry_figures.rs`), {profile}, {} cores shared with other work.\n\
         A name and replica is one name as one of the nodes holds it: 100,000 names on 100 nodes are ten million.\n",
        std::thread::available_parallelism().unwrap()
    );
    let (nodes, names) = size("--processes", "10x10000");
    if nodes > 0 {
        let rows = processes(nodes, names);
        table(&mut text, &format!("{nodes} processes over TCP, {names} names each"), &rows);
    }
    let (nodes, names) = size("--simulated", "100x1000");
    if nodes > 0 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let rows = runtime.block_on(simulated(nodes, names));
        let title =
            format!("{nodes} nodes in one process, 1-2 ms a way, {names} names each; times of the virtual clock");
        table(&mut text, &title, &rows);
    }
    println!("{text}");
    if let Some(path) = value("--write") {
        put(path, &text);
    }
}
