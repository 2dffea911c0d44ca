//! Calls and streams between actors, in one node and across two.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use pulsing_core::actor::{Actor, Context};
use pulsing_core::{ActorSpec, Call, CallOptions, Codec, Error, Payload, Reply, Target};

#[tokio::test(flavor = "multi_thread")]
async fn an_ask_gets_its_reply_here_and_across_nodes() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    a.spawn(Echo, named("echo")).await.unwrap();
    let here = a.resolve("echo", None, Duration::ZERO).await.unwrap();
    let there = b.resolve("echo", None, Duration::from_secs(2)).await.unwrap();
    assert_eq!(here.target, there.target);
    assert_eq!(ask(&a, here.target, "x").await.unwrap().head, "x");
    assert_eq!(ask(&b, there.target, "x").await.unwrap().head, "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn large_messages_keep_their_buffers_and_their_order() {
    struct Log(Vec<usize>);
    impl Actor for Log {
        async fn receive(&mut self, call: Call, _ctx: &Context) {
            self.0.push(call.payload.buffers.first().map_or(0, Bytes::len));
            let seen: Vec<String> = self.0.iter().map(ToString::to_string).collect();
            call.responder.value(raw(seen.join(",")));
        }
    }
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let target = a.spawn(Log(vec![]), named("log")).await.unwrap().target();
    b.resolve("log", None, Duration::from_secs(2)).await.unwrap();
    // R2: small messages behind a large one of the same pair do not overtake it.
    let sizes = [10, 3 << 20, 20, 0, 1 << 20, 7];
    for size in sizes {
        let payload = raw("").with_buffers(vec![Bytes::from(vec![1; size])]);
        b.tell(target, payload, CallOptions::default()).await.unwrap();
    }
    let seen = ask(&b, target, "").await.unwrap().head;
    let expected: Vec<String> = sizes.iter().chain(&[0]).map(ToString::to_string).collect();
    assert_eq!(seen, expected.join(","));

    let echo = a.spawn(Echo, ActorSpec::default()).await.unwrap().target();
    let buffers = vec![Bytes::from(vec![7; 10 << 20]), Bytes::new(), Bytes::from_static(b"tail")];
    let payload = Payload { codec: Codec::PICKLE, head: Bytes::from_static(b"head"), buffers };
    let Reply::Value(back) = b.call(echo, payload.clone(), CallOptions::default()).await.unwrap() else { panic!() };
    assert!(back == payload);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_transfers_do_not_delay_small_calls_of_others() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let big = a.spawn(Echo, named("big")).await.unwrap().target();
    let small = a.spawn(Echo, named("small")).await.unwrap().target();
    b.resolve("small", None, Duration::from_secs(2)).await.unwrap();
    let mut jobs = Vec::new();
    for _ in 0..3 {
        let b = b.clone();
        jobs.push(tokio::spawn(async move {
            let payload = raw("").with_buffers(vec![Bytes::from(vec![0; 64 << 20])]);
            b.call(big, payload, CallOptions::default()).await.unwrap();
        }));
    }
    let mut worst = Duration::ZERO;
    for _ in 0..50 {
        let begun = Instant::now();
        ask(&b, small, "x").await.unwrap();
        worst = worst.max(begun.elapsed());
    }
    // A protocol bound, not a speed: behind 192 MB on one connection these would take longer by far.
    assert!(worst < Duration::from_millis(500), "{worst:?}");
    for job in jobs {
        job.await.unwrap();
    }
}

struct Counter {
    produced: Arc<AtomicU64>,
    cancelled: Arc<AtomicU64>,
}

impl Actor for Counter {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        let limit: u64 = std::str::from_utf8(&call.payload.head).unwrap().parse().unwrap();
        let (produced, cancelled) = (Arc::clone(&self.produced), Arc::clone(&self.cancelled));
        tokio::spawn(async move {
            let sink = call.responder.stream();
            for i in 0..limit {
                if sink.send(raw(i.to_string())).await.is_err() {
                    cancelled.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                produced.fetch_add(1, Ordering::SeqCst);
            }
            sink.end();
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_carry_credit_and_stop_when_abandoned() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let (produced, cancelled) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counter = Counter { produced: Arc::clone(&produced), cancelled: Arc::clone(&cancelled) };
    let target = a.spawn(counter, named("count")).await.unwrap().target();
    b.resolve("count", None, Duration::from_secs(2)).await.unwrap();
    for system in [&a, &b] {
        produced.store(0, Ordering::SeqCst);
        cancelled.store(0, Ordering::SeqCst);
        let options = CallOptions { window: 8, ..CallOptions::default() };
        let Reply::Stream(mut items) = system.call(target, raw("1000"), options.clone()).await.unwrap() else {
            panic!()
        };
        assert_eq!(items.next().await.unwrap().unwrap().head, "0");
        // R6: an unread stream suspends its producer within the window.
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(produced.load(Ordering::SeqCst) <= 9, "{produced:?}");
        for i in 1..1000 {
            assert_eq!(items.next().await.unwrap().unwrap().head, i.to_string());
        }
        assert!(items.next().await.is_none());

        let Reply::Stream(items) = system.call(target, raw("100000"), options).await.unwrap() else { panic!() };
        drop(items);
        eventually("the producer notices", Duration::from_secs(1), || cancelled.load(Ordering::SeqCst) == 1).await;
    }
}

struct Stuck(Arc<AtomicU64>);

impl Actor for Stuck {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        struct Gone(Arc<AtomicU64>);
        impl Drop for Gone {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        if call.payload.head == "ping" {
            call.responder.value(raw("pong"));
        } else {
            let _gone = Gone(Arc::clone(&self.0));
            std::future::pending::<()>().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlines_and_cancellation_free_the_callee() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let gone = Arc::new(AtomicU64::new(0));
    let target = a.spawn(Stuck(Arc::clone(&gone)), named("stuck")).await.unwrap().target();
    b.resolve("stuck", None, Duration::from_secs(2)).await.unwrap();
    for system in [&a, &b] {
        gone.store(0, Ordering::SeqCst);
        let options = CallOptions { timeout: Some(Duration::from_millis(100)), ..CallOptions::default() };
        let error = system.call(target, raw("hang"), options).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        eventually("the handler was cancelled", Duration::from_secs(1), || gone.load(Ordering::SeqCst) == 1).await;

        let cancelled = tokio::time::timeout(
            Duration::from_millis(50),
            system.call(target, raw("hang"), CallOptions { timeout: None, ..CallOptions::default() }),
        );
        assert!(cancelled.await.is_err());
        eventually("cancelled by drop", Duration::from_secs(1), || gone.load(Ordering::SeqCst) == 2).await;
        assert_eq!(ask(system, target, "ping").await.unwrap().head, "pong");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r5_a_small_call_behind_a_large_one_is_cancelled_too() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let (begun, gone) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let target = a.spawn(Busy(Arc::clone(&begun), Arc::clone(&gone)), named("busy")).await.unwrap().target();
    b.resolve("busy", None, Duration::from_secs(2)).await.unwrap();
    for round in 0..200 {
        let large = raw("").with_buffers(vec![Bytes::from(vec![0; 1 << 20])]);
        b.tell(target, large, CallOptions::default()).await.unwrap();
        // It follows the large one through the bulk lane; its cancellation has the small lane for itself.
        let forever = CallOptions { timeout: None, ..CallOptions::default() };
        let caller = b.clone();
        let call = tokio::spawn(async move { caller.call(target, raw("hang"), forever).await });
        let until = Instant::now() + Duration::from_micros(20) * round;
        while Instant::now() < until {
            tokio::task::yield_now().await;
        }
        call.abort();
        let _ = call.await;
    }
    // In order: what came before it has begun, or never will.
    ask(&b, target, "ping").await.unwrap();
    eventually("no handler runs for nobody", Duration::from_secs(5), || {
        begun.load(Ordering::SeqCst) == gone.load(Ordering::SeqCst)
    })
    .await;
}

/// Hangs, each call by itself, until it is given up.
struct Busy(Arc<AtomicU64>, Arc<AtomicU64>);

impl Actor for Busy {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        if call.payload.head == "hang" {
            let (begun, gone) = (Arc::clone(&self.0), Arc::clone(&self.1));
            begun.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                call.responder.cancel_signal().cancelled().await;
                gone.fetch_add(1, Ordering::SeqCst);
            });
        } else {
            call.responder.value(raw("pong"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unanswered_stopped_or_panicking_actor_is_an_error_not_silence() {
    struct Bad;
    impl Actor for Bad {
        async fn receive(&mut self, call: Call, ctx: &Context) {
            match &call.payload.head[..] {
                b"drop" => {}
                b"stop" => ctx.stop(),
                _ => panic!("as asked"),
            }
        }
    }
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    for word in ["drop", "stop", "panic"] {
        let target = a.spawn(Bad, named(word)).await.unwrap().target();
        b.resolve(word, None, Duration::from_secs(2)).await.unwrap();
        match ask(&b, target, word).await.unwrap_err() {
            Error::App(app) => assert_eq!((word, app.type_name.as_str()), ("panic", "panic")),
            error => assert!(matches!(error, Error::ActorStopped { .. }) && word != "panic", "{word}: {error}"),
        }
        if word != "drop" {
            eventually("its name is gone everywhere", Duration::from_secs(1), || b.instances(word).is_empty()).await;
            assert!(matches!(ask(&b, target, word).await, Err(Error::ActorNotFound { .. })));
        }
    }
    let nobody = Target { node: pulsing_core::NodeId(1), actor: pulsing_core::ActorId(1) };
    assert!(matches!(ask(&b, nobody, "x").await, Err(Error::NodeNotFound { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_claimed_and_freed() {
    struct Fails;
    impl Actor for Fails {
        async fn on_start(&mut self, _ctx: &Context) -> pulsing_core::Result<()> {
            Err(Error::Config("no".into()))
        }
        async fn receive(&mut self, _call: Call, _ctx: &Context) {}
    }
    let a = node(&[]).await;
    assert!(a.spawn(Fails, named("x")).await.is_err());
    let held = a.spawn(Echo, named("x")).await.unwrap();
    assert!(matches!(a.spawn(Echo, named("x")).await, Err(Error::NameTaken { .. })));
    held.stop();
    eventually("the name is free", Duration::from_secs(1), || a.instances("x").is_empty()).await;
    a.spawn(Echo, named("x")).await.unwrap();
    assert!(matches!(a.spawn(Echo, named("a b")).await, Err(Error::InvalidName { .. })));
    assert!(matches!(a.resolve("", None, Duration::from_secs(9)).await, Err(Error::InvalidName { .. })));
    let error = a.resolve("y", None, Duration::from_millis(20)).await.unwrap_err();
    assert!(error.to_string().contains("names that exist: x"), "{error}");
}

fn unique(name: &str) -> ActorSpec {
    ActorSpec { unique: true, ..named(name) }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r10_a_unique_name_has_one_holder_in_the_cluster() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let held = a.spawn(Echo, unique("leader")).await.unwrap();
    b.resolve("leader", None, Duration::from_secs(2)).await.unwrap();
    for spec in [unique("leader"), named("leader")] {
        let error = b.spawn(Echo, spec).await.map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::NameTaken { node, actor, .. } if held.target() == (Target { node, actor })));
    }
    // Nor is a plain name taken over.
    b.spawn(Echo, named("many")).await.unwrap();
    a.resolve("many", None, Duration::from_secs(2)).await.unwrap();
    assert!(matches!(a.spawn(Echo, unique("many")).await, Err(Error::NameTaken { node, .. }) if node == b.node_id()));
    a.spawn(Echo, named("many")).await.unwrap();
    held.stop();
    eventually("the name is free", Duration::from_secs(2), || b.instances("leader").is_empty()).await;
    b.spawn(Echo, unique("leader")).await.unwrap();
    let private = ActorSpec { public: false, ..unique("x") };
    assert!(matches!(a.spawn(Echo, private).await, Err(Error::Config(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r10_racing_unique_spawns_leave_one_holder() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    for round in 0..20 {
        let name = format!("race-{round}");
        let (one, two) = tokio::join!(a.spawn(Echo, unique(&name)), b.spawn(Echo, unique(&name)));
        assert!(one.is_ok() || two.is_ok());
        let holders = |system: &pulsing_core::System| system.instances(&name).into_iter().map(|i| i.target).collect();
        eventually("one holder", Duration::from_secs(3), || {
            let (here, there): (Vec<Target>, Vec<Target>) = (holders(&a), holders(&b));
            here.len() == 1 && here == there
        })
        .await;
        let target = a.resolve(&name, None, Duration::ZERO).await.unwrap().target;
        assert_eq!(ask(&b, target, "x").await.unwrap().head, "x");
        for loser in [one, two].into_iter().flatten().map(|held| held.target()).filter(|held| *held != target) {
            let mut gone = false;
            for _ in 0..500 {
                gone =
                    matches!(ask(&a, loser, "x").await, Err(Error::ActorNotFound { .. } | Error::ActorStopped { .. }));
                if gone {
                    break;
                }
            }
            assert!(gone, "the loser runs on");
        }
    }
}
