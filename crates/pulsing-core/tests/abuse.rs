//! What strangers may do to a node's port: little, not for long, and told of once; nothing else is disturbed.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use common::*;
use pulsing_core::{MemberState, Passphrase, Security, System, SystemConfig, Target};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// How long a node of these tests waits for strangers.
const PATIENCE: Duration = Duration::from_millis(1500);
/// When a stranger must be gone, on a machine that does other work too.
const GONE: Duration = Duration::from_secs(8);
const MAGIC: &[u8] = b"\x89PULSING";

/// The warnings of this process.
struct Warnings(Mutex<Vec<String>>);

impl tracing::Subscriber for &'static Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                write!(self.0, "{field}={value:?} ").unwrap();
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn warnings() -> &'static Warnings {
    static ALL: OnceLock<&'static Warnings> = OnceLock::new();
    ALL.get_or_init(|| {
        let all: &'static Warnings = Box::leak(Box::new(Warnings(Mutex::default())));
        tracing::subscriber::set_global_default(all).unwrap();
        all
    })
}

/// How many warnings speak of `words` and of a stranger from `host`, where each test has its own.
fn said(host: &str, words: &str) -> usize {
    let from = format!("from={host}:");
    warnings().0.lock().unwrap().iter().filter(|text| text.contains(&from) && text.contains(words)).count()
}

/// Connects from an address of its own, so that tests of one process are told apart.
async fn connect(from: &str, to: SocketAddr) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    socket.connect(to).await.unwrap()
}

/// Sends `bytes` and returns what comes back until the node closes the connection, which it must.
async fn throw(from: &str, to: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(from, to).await;
    // The node may have closed it half way.
    let _ = stream.write_all(bytes).await;
    gone(stream).await
}

async fn gone(mut stream: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    let end = tokio::time::timeout(GONE, stream.read_to_end(&mut answer)).await;
    assert!(end.is_ok(), "a stranger is still connected after {GONE:?}; it was told {answer:?}");
    answer
}

/// Asks again and again; every answer must come.
struct Good {
    done: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Good {
    fn start(from: &System, to: Target) -> Self {
        let (done, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let task = tokio::spawn({
            let (from, done, stop) = (from.clone(), Arc::clone(&done), Arc::clone(&stop));
            async move {
                while !stop.load(Relaxed) {
                    ask(&from, to, "x").await.unwrap();
                    done.fetch_add(1, Relaxed);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        });
        Self { done, stop, task }
    }

    /// Further calls succeed from here on.
    async fn goes_on(&self) {
        let before = self.done.load(Relaxed);
        eventually("good peers are served", GONE, || self.done.load(Relaxed) > before + 20).await;
    }

    async fn end(self) {
        self.goes_on().await;
        self.stop.store(true, Relaxed);
        self.task.await.unwrap();
    }
}

fn guarded(seeds: &[&System]) -> SystemConfig {
    let seeds: Vec<_> = seeds.iter().map(|s| s.addr().to_string()).collect();
    SystemConfig { handshake_timeout: PATIENCE, max_handshakes: 128, max_observers: 16, ..config(&seeds) }
}

async fn pair(security: &Security) -> (System, System, Target) {
    let config = |seeds: &[&System]| SystemConfig { security: security.clone(), ..guarded(seeds) };
    let one = System::start(config(&[])).await.unwrap();
    let two = System::start(config(&[&one])).await.unwrap();
    one.spawn(Echo, named("echo")).await.unwrap();
    let there = two.resolve("echo", None, GONE).await.unwrap().target;
    (one, two, there)
}

fn alive(system: &System) -> usize {
    system.members().iter().filter(|m| m.state == MemberState::Alive).count()
}

/// Memory of this process, in bytes.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[tokio::test(flavor = "multi_thread")]
async fn rubbish_is_refused_within_a_bound_and_logged_once() {
    let host = "127.0.0.31";
    warnings();
    let (one, two, there) = pair(&Security::Local).await;
    let to = one.addr();
    let good = Good::start(&two, there);
    let mut hello_that_lies = MAGIC.to_vec();
    hello_that_lies.extend_from_slice(&[1, 1, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    let mut hello_of_noise = MAGIC.to_vec();
    hello_of_noise.extend_from_slice(&[1, 1, 0, 0, 64, 0, 0, 0]);
    hello_of_noise.extend_from_slice(&[0xee; 64]);
    let mut huge = b"GET /health HTTP/1.1\r\nx: ".to_vec();
    huge.resize(1 << 20, b'a');
    for _ in 0..30 {
        let (_, noise, _, _, _, tls) = tokio::join!(
            throw(host, to, b"\0\0\0\0\0"),
            throw(host, to, &hello_of_noise),
            throw(host, to, &hello_that_lies),
            throw(host, to, b"rubbish\r\n\r\n"),
            throw(host, to, b"RUBBISH\r\n\r\n"),
            throw(host, to, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        );
        assert!(noise.starts_with(MAGIC), "who speaks our language is told why: {noise:?}");
        assert!(tls.starts_with(b"HTTP/1.1 400"), "{tls:?}");
    }
    let told = throw(host, to, &huge).await;
    assert!(told.starts_with(b"HTTP/1.1 431") || told.is_empty(), "{}", String::from_utf8_lossy(&told));
    good.goes_on().await;
    for words in ["neither a link's nor HTTP", "it speaks TLS"] {
        assert!(said(host, words) <= 1, "{words}");
    }
    // Of all these three kinds: one line each.
    assert_eq!(said(host, "a peer was refused"), 3, "{:?}", warnings().0.lock().unwrap());
    assert!(one.metrics().refused.get() >= 150);
    good.end().await;
    assert_eq!((alive(&one), alive(&two)), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_dawdles_is_shown_the_door() {
    let host = "127.0.0.32";
    warnings();
    let (one, two, there) = pair(&Security::Local).await;
    let to = one.addr();
    let good = Good::start(&two, there);
    let mut opening = MAGIC.to_vec();
    opening.extend_from_slice(&[1, 1, 0, 0, 100, 0, 0, 0]);
    opening.resize(112, b'x');
    let begun = Instant::now();
    // Half a handshake, and a byte now and then.
    let mut half = Vec::new();
    for cut in [1, 8, 12, 60] {
        let mut stream = connect(host, to).await;
        stream.write_all(&opening[..cut]).await.unwrap();
        half.push(stream);
    }
    let slow = |bytes: Vec<u8>| async move {
        let mut stream = connect(host, to).await;
        for byte in bytes {
            if stream.write_all(&[byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            if begun.elapsed() > GONE {
                break;
            }
        }
        gone(stream).await;
    };
    tokio::join!(slow(opening.clone()), slow(opening.clone()), async {
        for stream in half {
            gone(stream).await;
        }
    });
    assert!(begun.elapsed() < GONE, "{:?}", begun.elapsed());
    assert_eq!(said(host, "it did not say within 1.5s what it is"), 1);
    good.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_idle_connections_keep_nobody_out() {
    let host = "127.0.0.33";
    warnings();
    let (one, two, there) = pair(&Security::Local).await;
    let to = one.addr();
    let good = Good::start(&two, there);
    let before = resident();
    let mut held = VecDeque::new();
    for at in 0..1000 {
        held.push_back(connect(host, to).await);
        // This process has descriptors for so many; the node closes the oldest before.
        if held.len() > 400 {
            gone(held.pop_front().unwrap()).await;
        }
        if at == 500 {
            let three = System::start(guarded(&[&one])).await.unwrap();
            assert_eq!(ask(&three, there, "x").await.unwrap().head, "x");
            three.shutdown().await;
        }
    }
    good.goes_on().await;
    let grown = resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes for 1,000 idle connections");
    // Nobody is held longer than agreed, and who could not be held at all is one line.
    for stream in held {
        gone(stream).await;
    }
    assert_eq!(said(host, "too many connections"), 1);
    let answer = throw(host, to, b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with(b"HTTP/1.1 200"), "observers are served: {}", String::from_utf8_lossy(&answer));
    good.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_hidden_in_another_is_never_answered() {
    let host = "127.0.0.34";
    warnings();
    let (one, two, there) = pair(&Security::Local).await;
    let good = Good::start(&two, there);
    let hidden = "GET /actors HTTP/1.1\r\nhost: x\r\n\r\n";
    for head in [
        format!("POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{hidden}", hidden.len()),
        format!(
            "GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!("GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n{hidden}"),
        format!("GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n{hidden}"),
        format!("GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n{hidden}"),
    ] {
        let mut stream = connect(host, one.addr()).await;
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let answer = gone(stream).await;
        let text = String::from_utf8_lossy(&answer);
        assert!(!text.contains("\"local\""), "{head:?} was taken for two: {text}");
    }
    good.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_tls_is_as_patient() {
    let host = "127.0.0.35";
    warnings();
    let secret = Security::Passphrase(Passphrase::new("correct horse").unwrap());
    let (one, two, there) = pair(&secret).await;
    let to = one.addr();
    let good = Good::start(&two, there);
    let mut client_hello_that_never_ends = vec![0x16, 0x03, 0x01, 0x40, 0x00];
    client_hello_that_never_ends.resize(4096, 1);
    let hello = [MAGIC, &[1, 1, 0, 0, 0, 0, 0, 0]].concat();
    for _ in 0..10 {
        let (http, link, _, noise) = tokio::join!(
            throw(host, to, b"GET /health HTTP/1.1\r\n\r\n"),
            throw(host, to, &hello),
            throw(host, to, b"\0\0\0\0"),
            throw(host, to, b"\x16\x03\x01\x00\x05\xff\xff\xff\xff\xff"),
        );
        assert!(http.starts_with(b"HTTP/1.1 403"), "{http:?}");
        assert!(String::from_utf8_lossy(&link).contains("this cluster uses TLS"), "{link:?}");
        assert!(noise.len() < 64, "an alert at most: {noise:?}");
    }
    throw(host, to, &client_hello_that_never_ends).await;
    good.goes_on().await;
    // Plaintext, TLS that is none, and dawdling: one line each.
    assert_eq!(said(host, "a peer was refused"), 3, "{:?}", warnings().0.lock().unwrap());
    good.end().await;
}
