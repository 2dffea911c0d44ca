//! Whoever asks is told where a request went and why, if the Router was started for that.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{CHAT, Client, FakeCluster, Response, STREAM, answer, done, fail, get, hello, post, text, until};
use pulsing_gateway::{Gateway, PolicyKind};

async fn ask(gateway: &Gateway, headers: &str, body: &str) -> Response {
    let mut client = Client::connect(gateway).await;
    let length = body.len();
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n{body}");
    client.write(head.as_bytes()).await;
    client.response(true).await
}

const DEBUG: &str = "x-pulsing-debug: routing\r\nx-request-id: r1\r\n";
const TOLD: [&str; 5] =
    ["x-pulsing-worker", "x-pulsing-policy", "x-pulsing-routing", "x-router-overhead-us", "server-timing"];

#[tokio::test]
async fn an_answer_says_who_gave_it_and_why_if_it_was_asked_to() {
    let cluster = FakeCluster::new();
    let busy = cluster.worker(hello);
    let free = cluster.worker(hello);
    busy.report(|load| load.running = 3);
    let gateway = cluster.gateway(|config| config.debug_routing = true).await;
    for body in [CHAT, STREAM] {
        let told = ask(&gateway, DEBUG, body).await;
        assert_eq!(told.headers["x-pulsing-worker"], free.id.to_string());
        assert_eq!(told.headers["x-pulsing-policy"], "stream_load");
        assert_eq!(told.headers["x-pulsing-routing"], "least loaded; 2 candidates; load 0/4 chosen, 3/4");
        let untold = ask(&gateway, "x-pulsing-debug: other\r\n", body).await;
        assert!(TOLD.iter().all(|name| !untold.headers.contains_key(*name)), "{:?}", untold.headers);
    }
}

#[tokio::test]
async fn every_worker_that_was_tried_is_told_also_with_an_error() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..2).map(|_| cluster.worker(|ask| async { fail(ask.responder, 500, "no") })).collect();
    let gateway =
        cluster.gateway(|config| (config.debug_routing, config.policy) = (true, PolicyKind::RoundRobin)).await;
    let told = ask(&gateway, DEBUG, CHAT).await;
    assert_eq!(told.status, 500);
    assert_eq!(told.headers["x-pulsing-worker"], workers[1].id.to_string());
    assert!(told.headers["x-pulsing-routing"].contains(" | then its turn; 1 candidates"), "{:?}", told.headers);
}

#[tokio::test]
async fn overhead_is_the_routers_own_time() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let stream = ask.responder.stream();
        common::send(&stream, vec![text("a")]).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        common::send(&stream, vec![done("stop")]).await;
        stream.end();
    });
    let gateway = cluster.gateway(|config| config.debug_routing = true).await;
    let told = ask(&gateway, DEBUG, CHAT).await;
    let overhead: u64 = told.headers["x-router-overhead-us"].parse().unwrap();
    let timing = &told.headers["server-timing"];
    let stage = |name: &str| {
        let entry = timing.split(", ").find_map(|entry| entry.strip_prefix(&format!("{name};dur=")));
        entry.unwrap().parse::<f64>().unwrap()
    };
    assert!(stage("worker") >= 600.0 && stage("total") >= stage("worker"), "{timing}");
    assert!(overhead > 0 && overhead as f64 / 1e3 <= stage("total") - stage("worker"), "{overhead}: {timing}");
    assert!(stage("parse") > 0.0 && stage("queue") >= 0.0 && stage("body") >= 0.0, "{timing}");
}

#[tokio::test]
async fn the_routing_page_lists_workers_and_the_last_choices() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask| answer(ask, vec![text("x"), done("stop")]));
    worker.report(|load| {
        (load.running, load.waiting, load.kv_usage, load.progress_age_ms) = (2, 1, 0.5, 40);
    });
    let gateway =
        cluster.gateway(|config| (config.debug_routing, config.policy) = (true, PolicyKind::CacheAware)).await;
    let long = "say this again ".repeat(100);
    for _ in 0..70 {
        post(&gateway, "/v1/chat/completions", &CHAT.replace("hi", &long)).await;
    }
    let page = get(&gateway, "/v1/_routing").await;
    assert_eq!(page.status, 200);
    let page = page.json();
    assert_eq!((page["policy"].as_str(), page["scheduler"].as_bool()), (Some("cache_aware"), Some(false)));
    assert_eq!(page["index"]["blocks"], 5);
    let row = &page["workers"][0];
    assert_eq!(row["instance"], worker.id.to_string());
    assert_eq!((row["state"].as_str(), row["kv_usage"].as_f64()), (Some("ready"), Some(0.5)));
    assert_eq!(
        ["running", "waiting", "capacity", "load", "in_flight", "progress_age_ms", "cached_blocks"]
            .map(|key| row[key].as_u64()),
        [2, 1, 4, 3, 0, 40, 5].map(Some)
    );
    let decisions = page["decisions"].as_array().unwrap();
    assert_eq!(decisions.len(), 64);
    assert_eq!(decisions[0]["why"], "5/5 blocks cached");
    assert_eq!(decisions[0]["worker"], worker.id.to_string());
    assert!(decisions[0]["at_ms"].as_u64() >= decisions[63]["at_ms"].as_u64(), "the last one first");
    // Who went is not shown for long, and its blocks are forgotten.
    cluster.remove(&worker);
    until("the worker is gone", || cluster.count("worker") == 0).await;
    let end = std::time::Instant::now() + Duration::from_secs(5);
    loop {
        let page = get(&gateway, "/v1/_routing").await.json();
        if page["workers"].as_array().unwrap().is_empty() && page["index"]["blocks"] == 0 {
            break;
        }
        assert!(std::time::Instant::now() < end, "{page}");
    }
}

#[tokio::test]
async fn nothing_is_told_unless_the_router_was_started_for_it() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let untold = ask(&gateway, DEBUG, CHAT).await;
    assert!(
        untold.status == 200 && TOLD.iter().all(|name| !untold.headers.contains_key(*name)),
        "{:?}",
        untold.headers
    );
    assert_eq!(get(&gateway, "/v1/_routing").await.status, 404);
}
