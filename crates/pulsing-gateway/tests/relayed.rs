//! Engines on the loopback of other hosts: reached through their EngineWorkers.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::engine::{Engine, Turn};
use common::{CHAT, Client, FakeCluster, STREAM, get, hello, post, until};
use tokio::net::TcpStream;

const ANSWER: &str = r#"{"id":"e-1","model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"far"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}"#;
const EVENTS: &str = "data: {\"id\":\"e-1\",\"model\":\"tiny\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"far\"},\"finish_reason\":null}]}\n\n\
    data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

async fn good(turn: Turn) -> Option<TcpStream> {
    if turn.seen.body.contains("\"stream\":true") { turn.events(EVENTS).await } else { turn.json(ANSWER).await }
}

#[tokio::test]
async fn requests_and_answers_pass_as_they_are() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    let worker = engine.join_from_afar(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let large = CHAT.replacen('{', &format!("{{\"padding\":{:?},", "x".repeat(1 << 20)), 1);
    for body in [CHAT, large.as_str(), CHAT] {
        let response = post(&gateway, "/v1/chat/completions", body).await;
        assert_eq!((response.status, response.body.as_str()), (200, ANSWER));
        assert_eq!(engine.last().body, body.replace("alias", "tiny"));
    }
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert_eq!((response.status, response.whole, response.body.as_str()), (200, true, EVENTS));
    // The first one asked whether the engine is there; none served two requests.
    assert_eq!(worker.relayed.load(Ordering::SeqCst), 5);
    assert_eq!(engine.connections.load(Ordering::SeqCst), 5);
}

#[tokio::test]
async fn where_the_worker_relays_nothing_the_engine_is_dialled() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    let worker = engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    assert_eq!(worker.relayed.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn test_s4_an_engine_that_is_gone_costs_the_client_nothing() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    let worker = engine.join_from_afar(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    engine.stop_listening();
    let other = cluster.worker(hello);
    until("the other one is there", || cluster.count("worker") == 2).await;
    let end = Instant::now() + Duration::from_secs(5);
    while other.asked() == 0 {
        assert!(Instant::now() < end, "nobody else was asked");
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    }
    assert!(worker.relayed.load(Ordering::SeqCst) >= 2);
}

#[tokio::test]
async fn test_s5_an_engine_that_let_nobody_connect_has_not_failed_the_request() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    let worker = engine.join_from_afar(&cluster);
    let gateway = cluster.gateway(|config| config.worker_wait = Duration::from_secs(5)).await;
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    // As while a server is started anew: gone for this one connection, and there for the question that follows.
    worker.refuse_relays(1);
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.body, ANSWER);
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("retries_total{reason=\"lost\"} 1"), "{metrics}");
    assert!(metrics.contains("retries_total{reason=\"failed\"} 0"), "{metrics}");
}

#[tokio::test]
async fn an_engine_that_its_worker_cannot_reach_is_not_ready_and_says_why() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    engine.stop_listening();
    engine.join_from_afar(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let end = Instant::now() + Duration::from_secs(5);
    while !get(&gateway, "/ready").await.body.contains("cannot connect") {
        assert!(Instant::now() < end, "{}", get(&gateway, "/ready").await.body);
    }
}

#[tokio::test]
async fn test_s3_a_worker_that_dies_in_the_middle_ends_the_stream_with_an_error_and_a_cut() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|mut turn: Turn| async move {
        turn.begin().await;
        turn.chunk(b"data: {}\n\n").await;
        turn.gone().await;
        None
    })
    .await;
    let worker = engine.join_from_afar(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", STREAM).await;
    client.head().await;
    client.chunk().await.unwrap();
    worker.die();
    let rest = client.response_body().await;
    assert!(rest.contains("\"error\"") && !rest.contains("[DONE]"), "{rest}");
}
