//! Everything that a peer can send to a node's port, changed at random: no panic, no hang, whatever arrives.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use super::handshake::{self, Credentials, Lane, Trust};
use super::inbound::{Inbound, Inlet, Reading, Role};
use super::secret::Secret;
use super::wire::{
    AcceptedHeader, CallHeader, CreditHeader, DigestHeader, ErrorHeader, FRAME_PREFIX, RefHeader, ReplyHeader,
    RootHeader, Versions, decode, decode_prefix,
};
use crate::cluster::{Delta, Digest, Identity, Membership, MembershipTimer, Preset, Registry};
use crate::error::Result;
use crate::id::NodeId;
use crate::mutate::{fuzz, golden};
use crate::observe::{self, Events, LocalActor, Metrics, NodeStatus, ObserveSource, Readiness};
use crate::system::{Instance, Member};

/// Far more than any input takes, on any machine.
const HANG: Duration = Duration::from_secs(60);

fn identity(node: u128) -> Identity {
    Identity::new(NodeId(node), SocketAddr::new([192, 0, 2, 9].into(), 8000), 5)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn credentials() -> Credentials {
    let file = std::env::temp_dir().join(format!("pulsing-fuzz-{}/secret", std::process::id()));
    let trust = Trust::Secret(Secret::load(Some(&file)).unwrap());
    Credentials { cluster: "default".into(), trust, versions: Versions::KNOWN }
}

/// Everything that `work` is sent, then the end.
async fn fed<T>(input: &[u8], work: impl AsyncFnOnce(&mut tokio::io::DuplexStream) -> T) -> T {
    let (mut near, mut far) = tokio::io::duplex(1 << 17);
    far.write_all(input).await.unwrap();
    far.shutdown().await.unwrap();
    tokio::time::timeout(HANG, work(&mut near)).await.expect("it hangs")
}

#[test]
fn the_listeners_half_of_the_handshake() {
    let (runtime, cred) = (runtime(), credentials());
    let here: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let corpus = [golden("v1", |name| name == "hello"), golden("v1", |name| name == "proof")].concat().concat();
    fuzz("listener", &[corpus], 4000, |input| {
        let met = runtime.block_on(fed(input, async |io| handshake::accept(io, here, identity(1), &cred, None).await));
        // Who does not know the secret cannot prove it.
        assert!(met.is_err());
    });
}

#[test]
fn the_diallers_half_of_the_handshake() {
    let (runtime, cred) = (runtime(), credentials());
    let here: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let mut corpus = golden("v1", |name| name == "reject");
    corpus.push([golden("v1", |name| name == "challenge"), golden("v1", |name| name == "welcome")].concat().concat());
    fuzz("dialler", &corpus, 4000, |input| {
        let dial =
            async |io: &mut _| handshake::dial(io, here, identity(1), Lane::Small, 7, &cred, None).await.map(|_| ());
        assert!(runtime.block_on(fed(input, dial)).is_err());
    });
}

/// Takes what comes.
struct Anything;

impl Role for Anything {
    fn inbound(self: Arc<Self>, message: Inbound) -> Result<()> {
        if let Inbound::Error(_, error) = message {
            let _ = error.to_string();
        }
        Ok(())
    }
    fn acknowledge(&self, _: u64) {}
}

#[test]
fn frames_of_both_lanes() {
    let runtime = runtime();
    let frames = golden("v1", |name| !["hello", "challenge", "reject", "proof", "welcome"].contains(&name));
    let mut corpus = frames.clone();
    corpus.push(frames.concat());
    fuzz("frames", &corpus, 6000, |input| {
        let role: Arc<dyn Role> = Arc::new(Anything);
        let reading = Reading { max_message: 1 << 20, metrics: Arc::new(Metrics::default()), role };
        let (one, other) = input.split_at(input.len() / 2);
        for (small, bulk) in [(input, &b""[..]), (b"", input), (one, other)] {
            let reading = Reading { metrics: Arc::default(), role: Arc::clone(&reading.role), ..reading };
            let (small, bulk) = reading.lanes(Inlet::Stream(small), bulk);
            let both = async { tokio::time::timeout(HANG, async { tokio::join!(small, bulk) }).await };
            let _ = runtime.block_on(both).expect("it hangs");
        }
    });
}

#[test]
fn headers_of_every_kind() {
    let corpus: Vec<Vec<u8>> =
        golden("v1", |name| !["hello", "challenge", "reject", "proof", "welcome"].contains(&name))
            .into_iter()
            .map(|frame| frame[FRAME_PREFIX..].to_vec())
            .filter(|header| !header.is_empty())
            .collect();
    fuzz("headers", &corpus, 20_000, |input| {
        let _ = decode::<CallHeader>(input);
        let _ = decode::<ReplyHeader>(input);
        let _ = decode::<RefHeader>(input);
        let _ = decode::<CreditHeader>(input);
        let _ = decode::<AcceptedHeader>(input);
        let _ = decode::<DigestHeader>(input);
        let _ = decode::<RootHeader>(input);
        if let Ok(error) = decode::<ErrorHeader>(input) {
            let _ = error.into_error().to_string();
        }
        if let Some(Ok(prefix)) = input.first_chunk().map(|raw| decode_prefix(*raw)) {
            assert!(prefix.header + prefix.body <= u32::MAX as usize);
        }
        let _ = Identity::decode(input);
    });
}

fn bodies(wanted: &str) -> Vec<Vec<u8>> {
    let body = |frame: Vec<u8>| {
        let prefix = decode_prefix(*frame.first_chunk().unwrap()).unwrap();
        frame[FRAME_PREFIX + prefix.header..].to_vec()
    };
    golden("v1", |name| name == wanted).into_iter().map(body).collect()
}

#[test]
fn registry_deltas_and_digests() {
    let mut registry = Registry::new(NodeId(1));
    registry.node_up(NodeId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f01));
    let corpus = [bodies("delta"), bodies("digest")].concat();
    fuzz("registry", &corpus, 20_000, |input| {
        if let Ok(delta) = Delta::decode(input) {
            assert_eq!(Delta::decode(&delta.encode()).unwrap(), delta);
            registry.apply(delta);
        }
        if let Ok(digest) = Digest::decode(input) {
            let _ = registry.missing(&digest);
            let _ = registry.behind(&digest);
        }
        let _ = (registry.root(), registry.gaps(), registry.conflicts(), registry.digest());
        if registry.len() > 10_000 {
            registry = Registry::new(NodeId(1));
        }
    });
}

#[test]
fn membership_datagrams() {
    // What a lively member says and hears: foca's packets and notes of every kind that five minutes bring.
    let (mut one, mut two) = (Membership::new(identity(1), Preset::Local, 1), other_member());
    let mut corpus: Vec<Vec<u8>> = Vec::new();
    let mut timers: Vec<(Duration, bool, MembershipTimer)> = Vec::new();
    one.join(Duration::ZERO, two.me());
    let mut now = Duration::ZERO;
    for _ in 0..400 {
        for of_one in [true, false] {
            loop {
                let (from, to) = if of_one { (&mut one, &mut two) } else { (&mut two, &mut one) };
                let Some(output) = from.poll() else { break };
                match output {
                    crate::cluster::MembershipOutput::Send { data, .. } => {
                        corpus.push(data.to_vec());
                        // One in four is lost, so that they doubt each other.
                        if !corpus.len().is_multiple_of(4) {
                            let _ = to.handle_data(now, &data);
                        }
                    }
                    crate::cluster::MembershipOutput::Timer { after, timer } => {
                        timers.push((now + after, of_one, timer))
                    }
                    crate::cluster::MembershipOutput::Event(_) => {}
                }
            }
        }
        timers.sort_by_key(|(at, ..)| *at);
        if timers.is_empty() {
            break;
        }
        let (at, of_one, timer) = timers.remove(0);
        now = now.max(at);
        if of_one { one.handle_timer(now, timer) } else { two.handle_timer(now, timer) }
    }
    corpus.extend(bodies("datagram"));
    corpus.extend(golden("v1/membership", |_| true));
    corpus.sort();
    corpus.dedup();
    assert!(corpus.len() > 10, "{}", corpus.len());
    let mut victim = Membership::new(identity(1), Preset::Local, 1);
    let mut now = Duration::ZERO;
    fuzz("membership", &corpus, 20_000, |input| {
        now += Duration::from_millis(1);
        let _ = victim.handle_data(now, input);
        while victim.poll().is_some() {}
        if victim.footprint() > 10_000 {
            victim = Membership::new(identity(1), Preset::Local, 1);
        }
    });
}

fn other_member() -> Membership {
    let addr = SocketAddr::new([192, 0, 2, 10].into(), 8000);
    Membership::new(Identity::new(NodeId(2), addr, 6), Preset::Local, 2)
}

struct Nothing;

impl ObserveSource for Nothing {
    fn status(&self) -> NodeStatus {
        let addr = "127.0.0.1:1".parse().unwrap();
        NodeStatus { node: NodeId(1), addr, uptime: Duration::ZERO, readiness: Readiness::Ready }
    }
    fn members(&self) -> Vec<Member> {
        Vec::new()
    }
    fn local_actors(&self) -> Vec<LocalActor> {
        Vec::new()
    }
    fn names(&self) -> BTreeMap<String, Vec<Instance>> {
        BTreeMap::new()
    }
    fn metrics(&self) -> Arc<Metrics> {
        Arc::default()
    }
    fn events(&self) -> &Events {
        static NONE: LazyLock<Events> = LazyLock::new(Events::default);
        &NONE
    }
}

#[test]
fn requests_of_observers() {
    let runtime = runtime();
    let corpus = [
        &b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"[..],
        b"GET /actors?all=true HTTP/1.1\r\nhost: x\r\n\r\nGET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        // HTTP/2: preface, settings, headers of a GET.
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x0d\x01\x05\x00\x00\x00\x01\x82\x84\x86\x41\x8a\xa0\xe4\x1d\x13\x9d\x09\xb8\xf0",
    ]
    .map(<[u8]>::to_vec);
    fuzz("observers", &corpus, 2000, |input| {
        let (near, mut far) = tokio::io::duplex(1 << 17);
        let asked = async {
            let _ = far.write_all(input).await;
            let _ = far.shutdown().await;
            let mut answer = Vec::new();
            let _ = far.read_to_end(&mut answer).await;
        };
        let all = Semaphore::new(1);
        let served = observe::serve_within(near, Arc::new(Nothing), observe::Scope::All, &all);
        runtime.block_on(async {
            tokio::time::timeout(HANG, async { tokio::join!(asked, served) }).await.expect("it hangs");
        });
    });
}
