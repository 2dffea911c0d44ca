//! What engines answer that is no answer: other people's pages, lines without an end, keys that are refused.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::engine::{Engine, Turn};
use common::{CHAT, Client, FakeCluster, STREAM, get, post, until};
use pulsing_gateway::Served;
use tokio::net::TcpStream;

const ANSWER: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}"#;
const EVENTS: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// Streams or not, as the client wishes.
async fn good(turn: Turn) -> Option<TcpStream> {
    if turn.seen.body.contains("\"stream\":true") { turn.events(EVENTS).await } else { turn.json(ANSWER).await }
}

#[tokio::test]
async fn a_key_that_the_engine_refuses_is_asked_for_again_and_never_shown() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn: Turn| async move {
        if turn.seen.header("authorization") == Some("Bearer new") {
            return good(turn).await;
        }
        turn.answer("401 Unauthorized", "", r#"{"error":{"message":"Incorrect API key: old"}}"#).await
    })
    .await;
    let worker = engine.join(&cluster);
    "Bearer old".clone_into(&mut worker.authorization.lock());
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert!(response.status == 502 && !response.body.contains("old"), "{}", response.body);
    "Bearer new".clone_into(&mut worker.authorization.lock());
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while post(&gateway, "/v1/chat/completions", CHAT).await.status != 200 {
        assert!(std::time::Instant::now() < end, "the new key is not used");
    }
}

/// An engine that wants `key`.
async fn guarded(status: &'static str, key: &'static str) -> std::sync::Arc<Engine> {
    Engine::start(move |turn: Turn| async move {
        if turn.seen.header("authorization") == Some(key) {
            return good(turn).await;
        }
        turn.answer(status, "", r#"{"error":{"message":"Incorrect API key: old"}}"#).await
    })
    .await
}

#[tokio::test]
async fn an_engine_with_a_wrong_key_is_no_clients_fault_and_others_serve() {
    for status in ["401 Unauthorized", "403 Forbidden"] {
        let cluster = FakeCluster::new();
        let mut refusing = Vec::new();
        for _ in 0..3 {
            let engine = guarded(status, "Bearer new").await;
            "Bearer old".clone_into(&mut engine.join(&cluster).authorization.lock());
            refusing.push(engine);
        }
        let healthy = Engine::start(good).await;
        healthy.join(&cluster).report(|load| load.running = 3);
        let gateway = cluster.gateway(|_| {}).await;
        for body in [CHAT, STREAM] {
            let response = post(&gateway, "/v1/chat/completions", body).await;
            assert_eq!((response.status, response.whole), (200, true), "{status}: {}", response.body);
        }
        let asked: usize = refusing.iter().map(|engine| engine.asked()).sum();
        assert!(asked >= 3, "more than two refusals are no fault of the request");
        if status.starts_with("403") {
            // It may have been about a request, until enough of them were served elsewhere.
            for _ in 0..6 {
                assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
            }
            assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_workers{state=\"tripped\"} 3"));
        } else {
            assert_eq!(asked, 3, "an engine that refuses its key is left alone");
            assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_workers{state=\"failed\"} 3"));
        }
    }
}

#[tokio::test]
async fn an_engine_that_forbids_what_nobody_else_serves_is_a_502_in_words() {
    let cluster = FakeCluster::new();
    let engine = guarded("403 Forbidden", "Bearer new").await;
    "Bearer old".clone_into(&mut engine.join(&cluster).authorization.lock());
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert!(response.status == 502 && response.body.contains("forbids this to the key"), "{}", response.body);
    assert!(!response.body.contains("old") && response.headers["x-should-retry"] == "false");
}

#[tokio::test]
async fn clients_are_not_told_where_engines_are_and_who_runs_the_house_is() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    let place = engine.url.trim_start_matches("http://");
    let (host, port) = place.split_once(':').unwrap();
    let detail = format!("{}: cannot connect: [Errno 111] to {place}, which is ({host:?}, 1)", engine.url);
    engine.join(&cluster).report(|load| (load.state, load.detail) = ("failed".into(), detail.clone()));
    let unreadable = [("kind", "worker"), ("protocol", "1..1"), ("state", "ready"), ("url", "http://inside:port")];
    cluster.worker_with("worker", &unreadable, |_| async {});
    let gateway = cluster.gateway(|config| config.debug_routing = true).await;
    until("both are known", || cluster.count("worker") == 2).await;
    let refused = post(&gateway, "/v1/chat/completions", CHAT).await;
    let ready = get(&gateway, "/ready").await;
    for told in [&refused, &ready] {
        assert_eq!(told.status, 503);
        assert!(told.body.contains("its engine: cannot connect"), "{}", told.body);
        assert!(![host, port, "inside"].iter().any(|part| told.body.contains(part)), "{}", told.body);
    }
    let routing = get(&gateway, "/v1/_routing").await.json();
    let details: Vec<&str> =
        routing["workers"].as_array().unwrap().iter().filter_map(|one| one["detail"].as_str()).collect();
    assert!(details.contains(&&*detail) && details.iter().any(|detail| detail.contains("inside")), "{details:?}");
}

#[tokio::test]
async fn an_engine_without_the_key_it_wants_is_a_502_behind_a_router_with_keys() {
    let cluster = FakeCluster::new();
    let engine = guarded("401 Unauthorized", "Bearer new").await;
    let worker = engine.join(&cluster);
    let gateway = cluster.gateway(|config| config.api_key = Some("house".into())).await;
    let ask = async || {
        let mut client = Client::connect(&gateway).await;
        let head = format!("content-length: {}\r\nauthorization: Bearer house\r\n\r\n{CHAT}", CHAT.len());
        client.write(format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}").as_bytes()).await;
        client.response(true).await
    };
    let response = ask().await;
    assert!(response.status == 502 && response.body.contains("started with none"), "{}", response.body);
    let response = ask().await;
    assert!(response.status == 503 && response.body.contains("refuses the key"), "{}", response.body);
    "Bearer new".clone_into(&mut worker.authorization.lock());
    worker.report(|load| load.state = "ready".into());
    let end = std::time::Instant::now() + Duration::from_secs(4);
    while ask().await.status != 200 {
        assert!(std::time::Instant::now() < end, "the new key is not used");
    }
}

#[tokio::test]
async fn an_answer_that_is_no_json_or_no_events_is_no_answer() {
    const PAGE: &str = "<html>Sign in</html>";
    for (kind, bodies) in [
        ("content-type: text/html; charset=utf-8\r\n", &[CHAT, STREAM][..]),
        ("content-type: application/json\r\n", &[STREAM]),
        ("content-type: text/event-stream\r\n", &[CHAT]),
        ("", &[STREAM]),
    ] {
        let cluster = FakeCluster::new();
        let proxy = Engine::start(move |turn: Turn| turn.answer("200 OK", kind, PAGE)).await;
        proxy.join(&cluster);
        let gateway = cluster.gateway(|_| {}).await;
        for body in bodies {
            let response = post(&gateway, "/v1/chat/completions", body).await;
            assert_eq!(response.status, 502, "{kind}: {}", response.body);
            let named = kind.split([' ', ';', '\r']).nth(1).unwrap_or("nothing that says what it is");
            assert!(response.body.contains(named) && !response.body.contains("Sign in"), "{}", response.body);
        }
        let healthy = Engine::start(good).await;
        healthy.join(&cluster).report(|load| load.running = 3);
        until("it is there", || healthy.connections.load(Ordering::SeqCst) > 0).await;
        let mut status = 0;
        for turn in 0..200 {
            // Another body each time: a request that failed on two Workers is known.
            let body = bodies[0].replace("hi", &format!("hi {turn}"));
            status = post(&gateway, "/v1/chat/completions", &body).await.status;
            if status == 200 {
                break;
            }
        }
        assert_eq!(status, 200, "{kind}: another engine serves");
    }
}

#[tokio::test]
async fn a_line_without_an_end_ends_its_stream() {
    let cluster = FakeCluster::new();
    let endless = |mut turn: Turn| async move {
        turn.begin().await;
        turn.chunk(b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"").await;
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..40 {
            turn.chunk(&piece).await;
        }
        turn.end().await
    };
    let engine = Engine::start(endless).await;
    for (model, normalize) in [("tiny", ""), ("formed", "1")] {
        let metadata = [
            ("kind", "worker"),
            ("protocol", "1..1"),
            ("model", model),
            ("state", "ready"),
            ("url", &engine.url),
            ("normalize", normalize),
        ];
        cluster.worker_with(model, &metadata, |_| async {});
    }
    let gateway = cluster
        .gateway(|config| {
            config.worker_name = "tiny".into();
            config.models = vec![Served::new("formed", "formed")];
        })
        .await;
    for model in ["alias", "formed"] {
        let response = post(&gateway, "/v1/chat/completions", &STREAM.replace("alias", model)).await;
        assert!(response.status == 502 || !response.whole, "{model}");
        assert!(response.body.contains("more than 16777216 bytes in a line"), "{model}: {}", response.body.len());
    }
}
