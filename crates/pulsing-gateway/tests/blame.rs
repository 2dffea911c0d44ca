//! Requests that are to blame themselves, and Workers that are (S5).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::engine::{Engine, Turn};
use common::{Ask, CHAT, Client, FakeCluster, STREAM, fail, get, hello, post, until};
use pulsing_core::{AppError, Error};
use pulsing_gateway::{Gateway, PolicyKind};

const POISON: &str = r#"{"model":"alias","messages":[{"role":"user","content":"poison"}]}"#;

async fn picky(ask: Ask) {
    if ask.body.windows(6).any(|window| window == b"poison") {
        fail(ask.responder, 500, "poisoned");
    } else {
        hello(ask).await;
    }
}

async fn waits_for(gateway: &Gateway, line: &str) {
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !get(gateway, "/metrics").await.body.contains(line) {
        assert!(std::time::Instant::now() < end, "{line}: {}", get(gateway, "/metrics").await.body);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn test_s5_twelve_poison_requests_cost_no_good_one_and_are_soon_answered_after_one_failure() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..4).map(|_| cluster.worker(picky)).collect();
    let gateway = cluster.gateway(|config| config.policy = PolicyKind::RoundRobin).await;
    let asked = || workers.iter().map(|worker| worker.asked()).sum::<usize>();
    for turn in 0..12 {
        let before = asked();
        let response = post(&gateway, "/v1/chat/completions", POISON).await;
        assert_eq!((response.status, response.headers["x-should-retry"].as_str()), (500, "false"));
        assert_eq!(response.json()["error"]["message"], "poisoned", "the worker's own words");
        assert_eq!(asked() - before, if turn == 0 { 2 } else { 1 }, "{turn}");
        for body in [CHAT, STREAM] {
            assert_eq!(post(&gateway, "/v1/chat/completions", body).await.status, 200);
        }
    }
    // Each one different: each fails on two, and nothing counts against the workers.
    for turn in 0..12 {
        let body = POISON.replace("poison", &format!("poison {turn}"));
        assert_eq!(post(&gateway, "/v1/chat/completions", &body).await.status, 500);
    }
    assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_workers{state=\"ready\"} 4"));
}

#[tokio::test]
async fn test_s5_a_4xx_of_a_worker_is_no_sign_of_its_health() {
    for status in [400, 404, 422, 429] {
        let cluster = FakeCluster::new();
        let worker = cluster.worker(move |ask: Ask| async move {
            if ask.body.windows(6).any(|window| window == b"poison") {
                fail(ask.responder, status, "no");
            } else {
                hello(ask).await;
            }
        });
        let gateway = cluster.gateway(|_| {}).await;
        for _ in 0..12 {
            let response = post(&gateway, "/v1/chat/completions", POISON).await;
            assert_eq!(i32::from(response.status), status);
        }
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
        assert_eq!(worker.asked(), 13);
    }
}

#[tokio::test]
async fn test_s5_a_request_that_kills_its_workers_is_known_again() {
    let cluster = FakeCluster::new();
    let gateway = cluster.gateway(|config| config.max_attempts = 2).await;
    let deadly = |ask: Ask| async move {
        if ask.body.windows(6).any(|window| window == b"poison") {
            ask.worker.die();
            ask.responder.error(Error::ConnectionLost { addr: "10.0.0.1:1".into(), reason: "reset".into() });
        } else {
            hello(ask).await;
        }
    };
    let workers: Vec<_> = (0..4).map(|_| cluster.worker(deadly)).collect();
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 4").await;
    let asked = || workers.iter().map(|worker| worker.asked()).sum::<usize>();
    for total in [2, 3] {
        let response = post(&gateway, "/v1/chat/completions", POISON).await;
        assert_eq!((response.status, response.headers["x-should-retry"].as_str()), (502, "false"));
        assert_eq!(asked(), total, "{}", response.body);
    }
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
}

/// Fails with what is no error of the worker protocol while `bad`.
fn sick(
    bad: &Arc<AtomicBool>,
) -> impl Fn(Ask) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync + use<> {
    let bad = Arc::clone(bad);
    move |ask| {
        if bad.load(Ordering::SeqCst) {
            let error = AppError { type_name: "builtins.SystemError".into(), ..AppError::default() };
            ask.responder.error(Error::App(Box::new(error)));
            Box::pin(async {})
        } else {
            Box::pin(hello(ask))
        }
    }
}

fn different(turn: usize) -> String {
    CHAT.replace("hi", &format!("hi {turn}"))
}

#[tokio::test]
async fn test_s5_a_worker_that_fails_what_others_serve_rests_and_one_trial_brings_it_back() {
    let cluster = FakeCluster::new();
    let bad = Arc::new(AtomicBool::new(true));
    let worker = cluster.worker(sick(&bad));
    let other = cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.policy = PolicyKind::RoundRobin).await;
    for turn in 0..20 {
        assert_eq!(post(&gateway, "/v1/chat/completions", &different(turn)).await.status, 200);
    }
    let tried = worker.asked();
    assert!((3..=5).contains(&tried), "three in a row, and a trial or two on a slow machine: {tried}");
    assert_eq!(other.asked(), 20);
    waits_for(&gateway, "pulsing_router_workers{state=\"tripped\"} 1").await;
    // Still broken when it is tried: one request finds out, and is served elsewhere.
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
    let tried = worker.asked();
    for turn in 20..26 {
        assert_eq!(post(&gateway, "/v1/chat/completions", &different(turn)).await.status, 200);
    }
    assert_eq!(worker.asked(), tried + 1);
    bad.store(false, Ordering::SeqCst);
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
    for turn in 26..30 {
        assert_eq!(post(&gateway, "/v1/chat/completions", &different(turn)).await.status, 200);
    }
    assert!(worker.asked() >= tried + 2);
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
}

#[tokio::test]
async fn test_s5_a_restarted_worker_starts_clean_and_a_lonely_one_never_rests() {
    let cluster = FakeCluster::new();
    let bad = Arc::new(AtomicBool::new(true));
    let worker = cluster.worker(sick(&bad));
    let gateway = cluster.gateway(|config| config.policy = PolicyKind::RoundRobin).await;
    for turn in 0..9 {
        assert_eq!(post(&gateway, "/v1/chat/completions", &different(turn)).await.status, 500);
    }
    assert_eq!(worker.asked(), 9, "nobody has shown that it could be done");
    let other = cluster.worker(hello);
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
    for turn in 10..20 {
        assert_eq!(post(&gateway, "/v1/chat/completions", &different(turn)).await.status, 200);
    }
    waits_for(&gateway, "pulsing_router_workers{state=\"tripped\"} 1").await;
    cluster.remove(&worker);
    let again = cluster.worker(hello);
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
    for turn in 20..24 {
        assert_eq!(post(&gateway, "/v1/chat/completions", &different(turn)).await.status, 200);
    }
    assert!(again.asked() >= 2 && other.asked() >= 12);
}

#[tokio::test]
async fn test_s5_a_lost_connection_with_many_requests_on_it_counts_once() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask: Ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        until("cancelled", || cancel.is_cancelled()).await;
        drop(ask);
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut clients = Vec::new();
    for turn in 0..4 {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", &different(turn)).await;
        clients.push(client);
    }
    until("all are on it", || worker.asked() == 4).await;
    cluster.worker(hello);
    worker.die();
    worker.revive();
    for mut client in clients {
        assert_eq!(client.response(true).await.status, 200);
    }
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 2").await;
}

/// How an engine answers a request that breaks it, and goes on to serve others.
const BROKEN: [(&str, &str); 5] = [
    ("garbage", "SSH-2.0-nothing of HTTP\r\n\r\n"),
    ("nothing", ""),
    ("a head without an end", "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"),
    ("no byte of the body", "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"),
    ("a head too large", "HTTP/1.1 200 OK\r\n"),
];

#[tokio::test]
async fn test_s5_an_answer_that_breaks_is_blamed_on_its_request_and_its_engine_serves_on() {
    for (what, answer) in BROKEN {
        let cluster = FakeCluster::new();
        let engine = Engine::start(move |mut turn: Turn| async move {
            if !turn.seen.body.contains("poison") {
                return turn.json(r#"{"choices":[]}"#).await;
            }
            turn.write(answer).await;
            if what == "a head too large" {
                turn.write("x-filler: y\r\n".repeat(8000)).await;
            }
            None
        })
        .await;
        engine.join(&cluster);
        let gateway = cluster.gateway(|config| config.worker_wait = Duration::ZERO).await;
        for turn in 0..6 {
            for stream in [false, true] {
                let body = POISON.replace("poison", &format!("poison {turn}"));
                let body = if stream { body.replace("{\"model\"", "{\"stream\":true,\"model\"") } else { body };
                let before = engine.asked();
                let response = post(&gateway, "/v1/chat/completions", &body).await;
                assert_eq!((response.status, response.headers["x-should-retry"].as_str()), (502, "false"), "{what}");
                assert!(engine.asked() - before <= 2, "{what}: {} tries", engine.asked() - before);
            }
            assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200, "{what}: another's request");
        }
        assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_workers{state=\"ready\"} 1"), "{what}");
    }
}

#[tokio::test]
async fn test_s5_a_stream_that_breaks_leaves_its_engine_to_others_unless_nobody_listens_there() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|mut turn: Turn| async move {
        turn.begin().await;
        turn.chunk(b"data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n").await;
        turn.write("no chunk\r\n").await;
        None
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..6 {
        let response = post(&gateway, "/v1/chat/completions", STREAM).await;
        // As the event and what breaks the stream may be read at once, the client may get a status instead of a cut.
        assert!(response.status == 502 || !response.whole, "{}", response.body);
        assert!(response.body.contains("cannot be read"), "{}", response.body);
        assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_workers{state=\"ready\"} 1"));
    }
    // One connection is kept open before it goes.
    engine.stop_listening();
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert!(response.status >= 502 || !response.whole, "{}", response.body);
    waits_for(&gateway, "pulsing_router_workers{state=\"ready\"} 0").await;
}

#[tokio::test]
async fn test_s4_a_worker_that_never_saw_the_request_is_no_loss_of_it() {
    let cluster = FakeCluster::new();
    let mut gone = Vec::new();
    for _ in 0..8 {
        let engine = Engine::start(|_: Turn| async { None }).await;
        engine.join(&cluster);
        gone.push(engine);
    }
    let good = cluster.worker(hello);
    good.report(|load| load.running = 3);
    let gateway = cluster.gateway(|_| {}).await;
    gone.iter().for_each(|engine| engine.stop_listening());
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    let tried: usize = gone.iter().map(|engine| engine.asked()).sum();
    assert!(tried > 5 && good.asked() == 1, "more than a request may cost: {tried}");
    // Nor does it stand against the next one like it.
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
}
