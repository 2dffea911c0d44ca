//! Workers that hang, and Workers that are only slow (S5).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Ask, CHAT, Client, FakeCluster, FakeWorker, STREAM, done, get, hello, post, send, text, until};
use pulsing_gateway::{Gateway, GatewayConfig, PolicyKind};

const POLICIES: [PolicyKind; 6] = [
    PolicyKind::StreamLoad,
    PolicyKind::RoundRobin,
    PolicyKind::Random,
    PolicyKind::PowerOfTwo,
    PolicyKind::ConsistentHash,
    PolicyKind::CacheAware,
];

/// A worker whose requests wait until `go`.
fn gated(cluster: &FakeCluster) -> (Arc<FakeWorker>, Arc<AtomicBool>) {
    let go = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&go);
    let worker = cluster.worker(move |ask: Ask| {
        let go = Arc::clone(&opened);
        async move {
            let cancel = ask.responder.cancel_signal().clone();
            until("it may go on, or is cancelled", || go.load(Ordering::SeqCst) || cancel.is_cancelled()).await;
            if !cancel.is_cancelled() {
                hello(ask).await;
            }
        }
    });
    (worker, go)
}

fn quick(config: &mut GatewayConfig) {
    config.worker_silence = Duration::from_millis(400);
    config.worker_standstill = Duration::from_millis(400);
}

async fn counted(gateway: &Gateway, line: &str) -> bool {
    get(gateway, "/metrics").await.body.contains(line)
}

async fn waits_for(gateway: &Gateway, line: &str) {
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !counted(gateway, line).await {
        assert!(std::time::Instant::now() < end, "{line}: {}", get(gateway, "/metrics").await.body);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn test_s5_requests_without_an_answer_are_taken_back_from_a_silent_worker_under_every_policy() {
    for policy in POLICIES {
        let cluster = FakeCluster::new();
        let (hung, go) = gated(&cluster);
        let gateway = cluster
            .gateway(|config| {
                quick(config);
                config.policy = policy;
            })
            .await;
        let mut clients = Vec::new();
        for body in [CHAT, STREAM, CHAT, STREAM] {
            let mut client = Client::connect(&gateway).await;
            client.post("/v1/chat/completions", body).await;
            clients.push(client);
        }
        until("all four are on it", || hung.asked() == 4).await;
        let other = cluster.worker(hello);
        hung.hush(true);
        for mut client in clients {
            let response = client.response(true).await;
            assert_eq!((response.status, response.whole), (200, true), "{policy}: {}", response.body);
        }
        until("it is told to stop", || hung.cancelled.load(Ordering::SeqCst) == 4).await;
        for _ in 0..4 {
            assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
        }
        assert_eq!((hung.asked(), other.asked()), (4, 8), "{policy}: nobody is sent to the silent one");
        waits_for(&gateway, "pulsing_router_retries_total{reason=\"taken_back\"} 4").await;
        assert!(counted(&gateway, "pulsing_router_workers{state=\"silent\"} 1").await);
        assert!(counted(&gateway, "pulsing_router_retries_total{reason=\"lost\"} 0").await, "no strike against it");

        go.store(true, Ordering::SeqCst);
        hung.hush(false);
        waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
        cluster.remove(&other);
        until("only one is left", || cluster.count("worker") == 1).await;
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200, "it is used again");
    }
}

#[tokio::test]
async fn test_s5_without_another_worker_requests_wait_on_and_are_answered_when_it_wakes() {
    let cluster = FakeCluster::new();
    let (hung, go) = gated(&cluster);
    let gateway = cluster.gateway(quick).await;
    let mut sent = Client::connect(&gateway).await;
    sent.post("/v1/chat/completions", CHAT).await;
    until("it has the first", || hung.asked() == 1).await;
    hung.hush(true);
    waits_for(&gateway, "pulsing_router_workers{state=\"silent\"} 1").await;
    let mut later = Client::connect(&gateway).await;
    later.post("/v1/chat/completions", CHAT).await;
    waits_for(&gateway, "pulsing_router_in_flight 2").await;
    assert_eq!((hung.asked(), hung.cancelled.load(Ordering::SeqCst)), (1, 0));
    assert_eq!(get(&gateway, "/ready").await.status, 503);
    go.store(true, Ordering::SeqCst);
    hung.hush(false);
    for mut client in [sent, later] {
        assert_eq!(client.response(true).await.status, 200);
    }
    assert_eq!(hung.asked(), 2);
}

#[tokio::test]
async fn test_s5_an_unstreamed_answer_is_taken_back_in_its_middle_and_a_stream_is_left_alone() {
    let cluster = FakeCluster::new();
    let go = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&go);
    let hung = cluster.worker(move |ask: Ask| {
        let go = Arc::clone(&opened);
        async move {
            let cancel = ask.responder.cancel_signal().clone();
            let stream = ask.responder.stream();
            send(&stream, vec![text("half")]).await;
            until("it may go on, or is cancelled", || go.load(Ordering::SeqCst) || cancel.is_cancelled()).await;
            send(&stream, vec![text(" more"), done("stop")]).await;
            stream.end();
        }
    });
    let gateway = cluster.gateway(quick).await;
    let (mut whole, mut stream) = (Client::connect(&gateway).await, Client::connect(&gateway).await);
    whole.post("/v1/chat/completions", CHAT).await;
    stream.post("/v1/chat/completions", STREAM).await;
    waits_for(&gateway, "pulsing_router_time_to_first_token_seconds_count 2").await;
    let other = cluster.worker(hello);
    hung.hush(true);
    let response = whole.response(true).await;
    assert_eq!(response.json()["choices"][0]["message"]["content"], "Hé you", "nothing of the first half");
    assert_eq!(other.asked(), 1);
    go.store(true, Ordering::SeqCst);
    let response = stream.response(true).await;
    assert!(response.whole && response.body.contains(" more"), "{}", response.body);
}

#[tokio::test]
async fn test_s5_a_worker_without_progress_gets_nothing_more_and_slow_is_not_hung() {
    let cluster = FakeCluster::new();
    let (slow, go) = gated(&cluster);
    let gateway = cluster.gateway(quick).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", CHAT).await;
    until("it has it", || slow.asked() == 1).await;
    let other = cluster.worker(hello);
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
    for age in [100, 200, 300, 399] {
        let told = slow.told.load(Ordering::SeqCst);
        slow.report(|load| (load.running, load.progress_age_ms) = (1, age));
        until("two reports are out", || slow.told.load(Ordering::SeqCst) > told + 1).await;
    }
    assert_eq!(slow.cancelled.load(Ordering::SeqCst), 0, "slow is not hung");
    slow.report(|load| load.progress_age_ms = 500);
    assert_eq!(client.response(true).await.status, 200);
    until("it is told to stop", || slow.cancelled.load(Ordering::SeqCst) == 1).await;
    assert!(counted(&gateway, "pulsing_router_workers{state=\"stuck\"} 1").await);
    assert_eq!(other.asked(), 1);

    // With nobody else it is better than none.
    cluster.remove(&other);
    until("only one is left", || cluster.count("worker") == 1).await;
    go.store(true, Ordering::SeqCst);
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    slow.report(|load| (load.running, load.progress_age_ms) = (0, 0));
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 1").await;
}
