//! What a caller does when nothing comes: idempotent calls are sent again, streams have an idle limit, starts can be given up.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{config, eventually, raw};
use parking_lot::Mutex;
use pulsing_core::net::memory::{Faults, Network};
use pulsing_core::{
    ActorId, ActorSpec, Call, CallOptions, Endpoint, Error, Reply, Security, StreamSink, System, SystemConfig, Target,
    Transport,
};
use tokio::time::{Instant, sleep};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// Keeps what it gets, to be answered by the test.
#[derive(Clone, Default)]
struct Held(Arc<Mutex<Vec<Call>>>);

impl Endpoint for Held {
    fn deliver(&self, call: Call) {
        self.0.lock().push(call);
    }
    fn end(&self, _ending: pulsing_core::Ending) {}
}

impl Held {
    async fn next(&self) -> Call {
        let begun = Instant::now();
        loop {
            if let Some(call) = self.0.lock().pop() {
                return call;
            }
            assert!(begun.elapsed() < MS(60_000), "no call arrived");
            sleep(MS(1)).await;
        }
    }
}

struct Pair {
    network: Network,
    caller: System,
    held: Held,
    target: Target,
    _callee: System,
}

async fn pair(seed: u64, stream_idle: Option<Duration>) -> Pair {
    let network = Network::new(seed);
    network.set_faults(Faults { break_after: MS(50), ..Faults::default() }).unwrap();
    let start = |name: &str, seeds: &[&str]| {
        System::start(SystemConfig {
            seeds: seeds.iter().map(|seed| format!("{seed}:7000")).collect(),
            security: Security::Insecure,
            transport: Transport::Memory(network.host(name).unwrap()),
            stream_idle,
            ..SystemConfig::default()
        })
    };
    let callee = start("callee", &[]).await.unwrap();
    let caller = start("caller", &["callee"]).await.unwrap();
    let (held, actor) = (Held::default(), ActorId::generate());
    callee.register(actor, ActorSpec::default(), Arc::new(held.clone())).unwrap();
    Pair { caller, held, target: Target { node: callee.node_id(), actor }, network, _callee: callee }
}

impl Pair {
    fn call(&self, options: CallOptions) -> tokio::task::JoinHandle<Result<Reply, Error>> {
        let (caller, target) = (self.caller.clone(), self.target);
        tokio::spawn(async move { caller.call(target, raw("x"), options).await })
    }
    /// Cuts the two apart for so long that what is under way breaks, and no longer.
    async fn cut(&self) {
        self.network.partition(&["caller".into()], &["callee".into()], false, false).unwrap();
        sleep(MS(55)).await;
        self.network.heal();
    }
}

fn idempotent() -> CallOptions {
    CallOptions { idempotent: true, ..CallOptions::default() }
}

#[tokio::test(start_paused = true)]
async fn an_idempotent_call_is_sent_again_once_when_its_link_breaks_and_no_other() {
    let pair = pair(1, None).await;
    let call = pair.call(idempotent());
    let first = pair.held.next().await;
    pair.cut().await;
    let second = pair.held.next().await;
    assert!(first.responder.cancel_signal().is_cancelled(), "its caller is gone for the first");
    let (left, given) = (second.remaining().unwrap(), first.remaining().unwrap());
    assert!(left < MS(30_000) && left.abs_diff(given) < MS(50), "the deadline stays: {left:?}");
    second.responder.value(raw("again"));
    let Reply::Value(answer) = call.await.unwrap().unwrap() else { panic!() };
    assert_eq!(answer.head, "again");

    // Once, by default.
    let call = pair.call(idempotent());
    for _ in 0..2 {
        let _held = pair.held.next().await;
        pair.cut().await;
    }
    assert!(matches!(call.await.unwrap().unwrap_err(), Error::ConnectionLost { .. }));

    // Unmarked: never.
    let call = pair.call(CallOptions::default());
    let _held = pair.held.next().await;
    pair.cut().await;
    assert!(matches!(call.await.unwrap().unwrap_err(), Error::ConnectionLost { .. }));
    sleep(MS(1000)).await;
    assert!(pair.held.0.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_has_begun_is_not_sent_again_nor_a_call_that_failed_at_its_callee() {
    let pair = pair(2, None).await;
    let call = pair.call(idempotent());
    let stream = pair.held.next().await.responder.stream();
    stream.send(raw("1")).await.unwrap();
    let Reply::Stream(mut items) = call.await.unwrap().unwrap() else { panic!() };
    pair.cut().await;
    assert_eq!(items.next().await.unwrap().unwrap().head, "1");
    assert!(matches!(items.next().await.unwrap().unwrap_err(), Error::ConnectionLost { .. }));
    sleep(MS(1000)).await;
    assert!(pair.held.0.lock().is_empty());

    let call = pair.call(idempotent());
    pair.held.next().await.responder.error(Error::Config("no".into()));
    assert!(call.await.unwrap().is_err());
    // What would come too late is not tried.
    let call = pair.call(CallOptions { timeout: Some(MS(70)), ..idempotent() });
    let _held = pair.held.next().await;
    pair.cut().await;
    assert!(call.await.unwrap().is_err());
    sleep(MS(1000)).await;
    assert!(pair.held.0.lock().is_empty());
}

async fn stream_of(pair: &Pair, system: &System) -> (StreamSink, pulsing_core::ItemStream) {
    let (caller, target) = (system.clone(), pair.target);
    let options = CallOptions { window: 4, ..CallOptions::default() };
    let call = tokio::spawn(async move { caller.call(target, raw("x"), options).await });
    let sink = pair.held.next().await.responder.stream();
    let Reply::Stream(items) = call.await.unwrap().unwrap() else { panic!() };
    (sink, items)
}

#[tokio::test(start_paused = true)]
async fn test_r5_a_stream_that_brings_nothing_ends_with_its_idle_limit_and_its_producer_with_it() {
    let limit = Duration::from_secs(300);
    let pair = pair(3, SystemConfig::default().stream_idle).await;
    for system in [&pair.caller, &pair._callee] {
        let (sink, mut items) = stream_of(&pair, system).await;
        for n in 0..3 {
            // Just in time, each.
            sleep(limit - MS(1000)).await;
            sink.send(raw(n.to_string())).await.unwrap();
            assert_eq!(items.next().await.unwrap().unwrap().head, n.to_string());
        }
        let begun = Instant::now();
        let error = items.next().await.unwrap().unwrap_err();
        assert!(matches!(&error, Error::Timeout { after, what } if *after == limit && what.contains("stream_idle")));
        assert!((limit..limit + MS(100)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        assert!(items.next().await.is_none());
        sink.cancel_signal().cancelled().await;
    }
}

#[tokio::test(start_paused = true)]
async fn test_r5_a_slow_consumer_does_not_run_into_the_idle_limit() {
    let pair = pair(4, Some(MS(1000))).await;
    let (sink, mut items) = stream_of(&pair, &pair.caller).await;
    for n in 0..4 {
        sink.send(raw(n.to_string())).await.unwrap();
    }
    // All credit is spent: the producer cannot send, and that is not its fault.
    sleep(MS(60_000)).await;
    for n in 0..4 {
        assert_eq!(items.next().await.unwrap().unwrap().head, n.to_string());
    }
    // From the grant on it can.
    let begun = Instant::now();
    assert!(matches!(items.next().await.unwrap(), Err(Error::Timeout { .. })));
    assert!((MS(1000)..MS(1100)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    sink.cancel_signal().cancelled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_given_up_stops_dialling_and_frees_its_port() {
    let seed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let seeds = [seed.local_addr().unwrap().to_string()];
    let waiting = SystemConfig { addr: Some(port.to_string()), join_timeout: None, ..config(&seeds) };
    let start = tokio::spawn(System::start(waiting));
    seed.set_nonblocking(true).unwrap();
    // It dials: the connection is taken, and closed unanswered.
    eventually("it dials", Duration::from_secs(5), || seed.accept().is_ok()).await;
    start.abort();
    assert!(start.await.is_err());
    eventually("its port is free", Duration::from_secs(5), || std::net::TcpListener::bind(port).is_ok()).await;
    while seed.accept().is_ok() {}
    // Twice the pause between two rounds over the seeds.
    tokio::time::sleep(MS(1000)).await;
    assert!(seed.accept().is_err(), "it dials on");
}
