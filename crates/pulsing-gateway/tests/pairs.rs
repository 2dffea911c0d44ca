//! Prefill and decode on two workers, paired by the Router.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::engine::{Engine, Turn};
use common::{CHAT, FakeCluster, FakeWorker, STREAM, answer, done, fail, get, hello, post, send, text, until};
use pulsing_gateway::protocol::Delta;
use serde_json::{Value, json};
use tokio::net::TcpStream;

const PARAMS: &str =
    r#"{"do_remote_prefill": true, "remote_block_ids": [[1, 2]], "remote_port": 12345678901234567890}"#;
const WHOLE: &str =
    r#"{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}"#;
const EVENTS: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"ok\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

fn join(cluster: &FakeCluster, engine: &Engine, role: &str, pd: &str, more: &[(&str, &str)]) -> Arc<FakeWorker> {
    let mut metadata = vec![
        ("kind", "worker"),
        ("protocol", "1..1"),
        ("model", "tiny"),
        ("state", "ready"),
        ("role", role),
        ("pd", pd),
        ("url", engine.url.as_str()),
    ];
    metadata.extend(more);
    cluster.worker_with("worker", &metadata, |_| async { panic!("an engine's worker gets no requests") })
}
fn actor<F: Future<Output = ()> + Send + 'static>(
    cluster: &FakeCluster,
    role: &str,
    pd: &str,
    handler: impl Fn(common::Ask) -> F + Send + Sync + 'static,
) -> Arc<FakeWorker> {
    let metadata =
        [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready"), ("role", role), ("pd", pd)];
    cluster.worker_with("worker", &metadata, handler)
}
async fn prefill(turn: Turn) -> Option<TcpStream> {
    turn.json(&format!(r#"{{"choices":[],"kv_transfer_params": {PARAMS} }}"#)).await
}
async fn decode(turn: Turn) -> Option<TcpStream> {
    if turn.seen.body.contains("\"stream\":true") { turn.events(EVENTS).await } else { turn.json(WHOLE).await }
}
fn body(engine: &Engine) -> Value {
    serde_json::from_str(&engine.last().body).unwrap()
}

#[tokio::test]
async fn vllm_engines_are_asked_one_after_the_other_and_params_pass_as_they_are() {
    let cluster = FakeCluster::new();
    let (reads, generates) = (Engine::start(prefill).await, Engine::start(decode).await);
    join(&cluster, &reads, "prefill", "sequential", &[]);
    join(&cluster, &generates, "decode", "sequential", &[]);
    let gateway = cluster.gateway(|_| {}).await;
    let sent = r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true},
        "max_tokens":50, "max_completion_tokens" :60,"min_tokens":7,"big":12345678901234567890}"#;
    let streamed = post(&gateway, "/v1/chat/completions", sent).await;
    assert_eq!((streamed.status, streamed.body.as_str(), streamed.whole), (200, EVENTS, true));
    let asked = body(&reads);
    let of = |key: &str| asked[key].clone();
    assert_eq!(
        [of("max_tokens"), of("max_completion_tokens"), of("min_tokens"), of("stream")],
        [json!(1), json!(1), json!(0), json!(false)]
    );
    assert!(asked["stream_options"].is_null());
    assert_eq!(
        (&asked["kv_transfer_params"]["do_remote_decode"], &asked["kv_transfer_params"]["remote_host"]),
        (&json!(true), &Value::Null)
    );
    assert!(reads.last().body.contains("\"big\":12345678901234567890"));
    assert_eq!(generates.last().body, sent.replacen('{', &format!("{{\"kv_transfer_params\":{PARAMS},"), 1));
    assert_eq!(reads.last().header("x-request-id"), generates.last().header("x-request-id"));

    let whole = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!((whole.status, whole.body.as_str()), (200, WHOLE));
    assert_eq!((body(&reads)["model"].as_str(), body(&generates)["model"].as_str()), (Some("tiny"), Some("tiny")));
    assert_eq!((reads.asked(), generates.asked()), (2, 2));
}

#[tokio::test]
async fn sglang_engines_are_asked_at_once_and_meet_in_one_room() {
    let cluster = FakeCluster::new();
    // Prefill answers only after decode has been asked: one after the other would hang.
    let generates = Engine::start(decode).await;
    let seen = Arc::clone(&generates);
    let before = Arc::new(AtomicUsize::new(0));
    let reads = Engine::start(move |turn| {
        let (seen, before) = (Arc::clone(&seen), Arc::clone(&before));
        async move {
            let known = before.fetch_add(1, Ordering::SeqCst);
            until("decode is asked", || seen.asked() > known).await;
            decode(turn).await
        }
    })
    .await;
    join(&cluster, &reads, "prefill", "concurrent", &[("bootstrap_port", "9001")]);
    join(&cluster, &generates, "decode", "concurrent", &[]);
    let gateway = cluster.gateway(|_| {}).await;
    let mut rooms = Vec::new();
    for (sent, expected) in [(STREAM, EVENTS), (CHAT, WHOLE)] {
        let told = post(&gateway, "/v1/chat/completions", sent).await;
        assert_eq!((told.status, told.body.as_str()), (200, expected));
        until("both are asked", || reads.asked() == generates.asked()).await;
        assert_eq!(reads.last().body, generates.last().body);
        let asked = body(&reads);
        assert_eq!(
            (asked["bootstrap_host"].as_str(), asked["bootstrap_port"].as_u64()),
            (Some("127.0.0.1"), Some(9001))
        );
        rooms.push(asked["bootstrap_room"].as_i64().unwrap());
    }
    assert_ne!(rooms[0], rooms[1]);
    // A batch has a room for each of its parts.
    post(&gateway, "/v1/completions", r#"{"model":"tiny","prompt":["a","b","c"]}"#).await;
    until("both are asked", || reads.asked() == generates.asked()).await;
    let asked = body(&generates);
    assert_eq!(asked["bootstrap_host"], json!(["127.0.0.1", "127.0.0.1", "127.0.0.1"]));
    let rooms = asked["bootstrap_room"].as_array().unwrap();
    assert!(rooms.len() == 3 && rooms[0] != rooms[1] && rooms[1] != rooms[2], "{rooms:?}");
}

#[tokio::test]
async fn a_client_that_leaves_ends_both_halves() {
    let cluster = FakeCluster::new();
    let hang = |turn: Turn| async move {
        turn.gone().await;
        None
    };
    let (reads, generates) = (Engine::start(hang).await, Engine::start(hang).await);
    join(&cluster, &reads, "prefill", "concurrent", &[]);
    join(&cluster, &generates, "decode", "concurrent", &[]);
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = common::Client::connect(&gateway).await;
    client.post("/v1/chat/completions", STREAM).await;
    until("both are asked", || reads.asked() == 1 && generates.asked() == 1).await;
    drop(client);
    until("both are left", || reads.left.load(Ordering::SeqCst) == 1 && generates.left.load(Ordering::SeqCst) == 1)
        .await;
}

#[tokio::test]
async fn a_half_that_fails_is_replaced_and_a_refusal_is_the_clients() {
    let cluster = FakeCluster::new();
    let broken = |turn: Turn| async move {
        turn.answer("500 X", "content-type: application/json\r\n", r#"{"error":{"message":"no"}}"#).await
    };
    let (reads, bad, good) = (Engine::start(prefill).await, Engine::start(broken).await, Engine::start(decode).await);
    join(&cluster, &reads, "prefill", "sequential", &[]);
    let first = join(&cluster, &bad, "decode", "sequential", &[]);
    let second = join(&cluster, &good, "decode", "sequential", &[]);
    first.report(|load| load.capacity = 100);
    second.report(|load| load.running = 1);
    let gateway = cluster.gateway(|_| {}).await;
    let told = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!((told.status, told.body.as_str()), (200, WHOLE));
    assert_eq!((bad.asked(), good.asked(), reads.asked()), (1, 1, 2));

    for pd in ["sequential", "concurrent"] {
        let cluster = FakeCluster::new();
        let refuse = |turn: Turn| async move {
            turn.answer("400 X", "content-type: application/json\r\n", r#"{"error":{"message":"too long"}}"#).await
        };
        let hang = |turn: Turn| async move {
            turn.gone().await;
            None
        };
        let (reads, generates) = (Engine::start(refuse).await, Engine::start(hang).await);
        join(&cluster, &reads, "prefill", pd, &[]);
        join(&cluster, &generates, "decode", pd, &[]);
        let gateway = cluster.gateway(|_| {}).await;
        let told = post(&gateway, "/v1/chat/completions", CHAT).await;
        assert_eq!((told.status, told.json()["error"]["message"].as_str()), (400, Some("too long")), "{pd}");
        if pd == "concurrent" {
            until("decode is left", || generates.left.load(Ordering::SeqCst) == 1).await;
        }
    }
}

#[tokio::test]
async fn halves_without_the_other_half_are_told_and_whole_workers_serve() {
    let cluster = FakeCluster::new();
    let reads = Engine::start(prefill).await;
    join(&cluster, &reads, "prefill", "sequential", &[]);
    let other = Engine::start(decode).await;
    join(&cluster, &other, "decode", "concurrent", &[]);
    let gateway = cluster.gateway(|_| {}).await;
    let told = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!(told.status, 503);
    assert!(told.body.contains("1 prefill and 1 decode worker(s) are ready"), "{}", told.body);
    cluster.worker(hello);
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while post(&gateway, "/v1/chat/completions", CHAT).await.status != 200 {
        assert!(std::time::Instant::now() < end);
    }
    assert_eq!((reads.asked(), other.asked()), (0, 0));
    // A role that nobody knows is told, too.
    actor(&cluster, "chef", "", hello);
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !get(&gateway, "/metrics").await.body.contains("pulsing_router_workers{state=\"failed\"} 1") {
        assert!(std::time::Instant::now() < end);
    }
}

#[tokio::test]
async fn actors_hand_over_what_they_say_or_meet_where_they_are_told() {
    let cluster = FakeCluster::new();
    let reads = actor(&cluster, "prefill", "sequential", |ask| async move {
        assert!(ask.generate.handoff.is_empty());
        let last = Delta { handoff: vec![1, 2, 3].into(), ..done("length") };
        answer(ask, vec![text("x"), last]).await;
    });
    actor(&cluster, "decode", "sequential", |ask| async move {
        let said = format!("{:?}", &ask.generate.handoff[..]);
        answer(ask, vec![text(&said), done("stop")]).await;
    });
    let gateway = cluster.gateway(|config| config.debug_routing = true).await;
    let told = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!(told.json()["choices"][0]["message"]["content"], "[1, 2, 3]");
    let page = get(&gateway, "/v1/_routing").await.json();
    assert_eq!(page["decisions"][0]["why"], "decodes: least loaded");
    assert_eq!(page["workers"][0]["role"], "prefill");
    assert_eq!(reads.asked(), 1);

    let cluster = FakeCluster::new();
    let reads = actor(&cluster, "prefill", "concurrent", |ask| async move {
        let stream = ask.responder.stream();
        send(&stream, vec![done("length")]).await;
        stream.end();
    });
    actor(&cluster, "decode", "concurrent", |ask| async move {
        let told: Value = serde_json::from_slice(&ask.generate.handoff).unwrap();
        let said = format!("{} {} {}", told["bootstrap_host"], told["bootstrap_port"], told["bootstrap_room"].is_u64());
        answer(ask, vec![text(&said), done("stop")]).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let told = post(&gateway, "/v1/chat/completions", CHAT).await;
    let node = format!("\"10.0.0.{}\" 8998 true", reads.id.0);
    assert_eq!(told.json()["choices"][0]["message"]["content"], node);
}

#[tokio::test]
async fn a_prefill_actor_that_hands_nothing_over_has_failed() {
    let cluster = FakeCluster::new();
    actor(&cluster, "prefill", "sequential", hello);
    let generates = actor(&cluster, "decode", "sequential", hello);
    let gateway = cluster.gateway(|_| {}).await;
    let told = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert!(told.status >= 500 && told.body.contains("without a handoff"), "{}", told.body);
    assert_eq!(generates.asked(), 0);

    let cluster = FakeCluster::new();
    actor(&cluster, "prefill", "sequential", |ask| async { fail(ask.responder, 400, "no such prompt") });
    actor(&cluster, "decode", "sequential", hello);
    let gateway = cluster.gateway(|_| {}).await;
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 400);
}

#[tokio::test]
async fn a_response_is_the_chat_of_a_pair() {
    let cluster = FakeCluster::new();
    let (reads, generates) = (Engine::start(prefill).await, Engine::start(decode).await);
    join(&cluster, &reads, "prefill", "sequential", &[]);
    join(&cluster, &generates, "decode", "sequential", &[]);
    let gateway = cluster.gateway(|_| {}).await;
    for stream in ["false", "true"] {
        let told =
            post(&gateway, "/v1/responses", &format!(r#"{{"model":"tiny","input":"hi","stream":{stream}}}"#)).await;
        assert_eq!(told.status, 200, "{}", told.body);
        assert!(told.body.contains("\"text\":\"ok\""), "{}", told.body);
        assert_eq!(body(&generates)["kv_transfer_params"]["do_remote_prefill"], true);
        assert!(generates.last().head.starts_with("POST /v1/chat/completions"), "{}", generates.last().head);
    }
    assert_eq!((reads.asked(), generates.asked()), (2, 2));
}
