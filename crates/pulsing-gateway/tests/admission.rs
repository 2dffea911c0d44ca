//! Who may ask, how much, and in which order (S6, S7).
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::engine::Engine;
use common::{
    Ask, CHAT, Client, FakeCluster, Response, STREAM, answer, done, get, hello, post, post_with, send, text, until,
};
use parking_lot::Mutex;
use pulsing_gateway::{Gateway, GatewayConfig};
use tokio::sync::Semaphore;

/// A file of keys that goes with the test.
struct Keys(PathBuf);

impl Keys {
    fn new(text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pulsing-keys-{:032x}", rand::random::<u128>()));
        let keys = Self(path);
        keys.write(text);
        keys
    }
    fn write(&self, text: &str) {
        fs::write(&self.0, text).unwrap();
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn code(response: &Response) -> (u16, String) {
    (response.status, response.json()["error"]["code"].as_str().unwrap().to_owned())
}

async fn chat_as(gateway: &Gateway, key: &str) -> Response {
    post_with(gateway, "/v1/chat/completions", &format!("authorization: Bearer {key}\r\n"), CHAT).await
}

#[tokio::test]
async fn s7_without_a_key_there_is_a_401_and_only_health_and_preflights_are_open() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let keys = Keys::new("ours:sk-ours\n");
    let gateway = cluster.gateway(|config| config.api_keys_file = Some(keys.0.clone())).await;
    for headers in ["", "authorization: Bearer sk-wrong\r\n", "authorization: Basic sk-ours\r\n", "x-api-key: no\r\n"] {
        let response = post_with(&gateway, "/v1/chat/completions", headers, CHAT).await;
        assert_eq!(code(&response), (401, "invalid_api_key".into()), "{headers}");
        assert_eq!(response.headers["www-authenticate"], "Bearer realm=\"pulsing\"");
        assert!(response.headers.contains_key("x-request-id"));
        assert!(!response.body.contains("sk-"), "{}", response.body);
    }
    for path in ["/v1/models", "/models/alias", "/metrics"] {
        assert_eq!(get(&gateway, path).await.status, 401, "{path}");
    }
    for path in ["/", "/health", "/ready"] {
        assert_eq!(get(&gateway, path).await.status, 200, "{path}");
    }
    let mut client = Client::connect(&gateway).await;
    client.write(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\norigin: https://a\r\n\r\n").await;
    assert_eq!(client.response(true).await.status, 204);
    assert_eq!(worker.asked(), 0);
    for headers in ["authorization: Bearer sk-ours\r\n", "authorization: bearer  sk-ours\r\n", "x-api-key: sk-ours\r\n"]
    {
        assert_eq!(post_with(&gateway, "/v1/chat/completions", headers, CHAT).await.status, 200, "{headers}");
    }
    let open = cluster
        .gateway(|config| {
            config.api_key = Some("sk-one".into());
            config.metrics_open = true;
        })
        .await;
    assert_eq!(get(&open, "/metrics").await.status, 200);
    assert_eq!((chat_as(&open, "sk-two").await.status, chat_as(&open, "sk-one").await.status), (401, 200));
}

#[tokio::test]
async fn s7_a_large_body_without_a_key_is_not_read_into_memory_and_still_gets_its_answer() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.api_key = Some("sk-one".into())).await;
    let body = "x".repeat(3 << 20);
    assert_eq!(post(&gateway, "/v1/chat/completions", &body).await.status, 401);
}

#[tokio::test]
async fn s7_keys_are_read_again_when_the_file_changes_and_a_broken_file_changes_nothing() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let keys = Keys::new("a:sk-old");
    let gateway = cluster.gateway(|config| config.api_keys_file = Some(keys.0.clone())).await;
    assert_eq!(chat_as(&gateway, "sk-old").await.status, 200);
    keys.write("a:sk-newer");
    let end = Instant::now() + Duration::from_secs(10);
    while chat_as(&gateway, "sk-newer").await.status != 200 {
        assert!(Instant::now() < end, "the key is not taken");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(chat_as(&gateway, "sk-old").await.status, 401);
    keys.write("nonsense");
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(chat_as(&gateway, "sk-newer").await.status, 200);
}

#[tokio::test]
async fn s7_a_file_that_all_can_read_a_missing_one_and_two_ways_at_once_are_refused_without_the_key() {
    let keys = Keys::new("a:sk-secret");
    let file = Some(keys.0.clone());
    let start = |api_keys_file: Option<PathBuf>, api_key: Option<&str>| {
        let api_key = api_key.map(str::to_owned);
        let config =
            GatewayConfig { host: "127.0.0.1".into(), port: 0, api_keys_file, api_key, ..GatewayConfig::default() };
        assert!(!format!("{config:?}").contains("sk-"));
        Gateway::start_on(Arc::new(FakeCluster::new()), config).err().map(|error| error.to_string()).unwrap_or_default()
    };
    fs::set_permissions(&keys.0, fs::Permissions::from_mode(0o644)).unwrap();
    let error = start(file.clone(), None);
    assert!(error.contains("mode 644") && error.contains("chmod 600") && !error.contains("sk-"), "{error}");
    fs::set_permissions(&keys.0, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(start(file.clone(), None), "");
    assert!(start(Some("/nowhere/keys".into()), None).contains("/nowhere/keys"));
    assert!(start(file, Some("sk-x")).contains("exclude each other"));
    assert!(start(None, Some(" ")).contains("visible ASCII"));
}

#[tokio::test]
async fn s7_the_clients_key_is_not_passed_on_to_engines_once_the_router_has_keys() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn| turn.json(r#"{"choices":[]}"#)).await;
    engine.join(&cluster);
    let open = cluster.gateway(|_| {}).await;
    chat_as(&open, "sk-theirs").await;
    assert_eq!(engine.last().header("authorization"), Some("Bearer sk-theirs"));
    let locked = cluster.gateway(|config| config.api_key = Some("sk-ours".into())).await;
    assert_eq!(chat_as(&locked, "sk-ours").await.status, 200);
    let head = engine.last().head;
    assert!(!head.contains("sk-ours"), "{head}");
}

#[tokio::test]
async fn s6_a_key_over_its_rate_is_told_when_to_come_back_and_others_are_not_touched() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let keys = Keys::new("a:sk-a rps=0.5\nb:sk-b rps=100");
    let gateway = cluster.gateway(|config| config.api_keys_file = Some(keys.0.clone())).await;
    let first = chat_as(&gateway, "sk-a").await;
    assert_eq!(first.status, 200);
    assert_eq!(first.headers["x-ratelimit-limit-requests"], "1");
    assert_eq!(first.headers["x-ratelimit-remaining-requests"], "0");
    assert!(first.headers["x-ratelimit-reset-requests"].starts_with("2.0"), "{:?}", first.headers);
    let second = chat_as(&gateway, "sk-a").await;
    assert_eq!(code(&second), (429, "rate_limit_exceeded".into()));
    assert_eq!(second.headers["retry-after"], "2");
    assert_eq!(second.headers["x-ratelimit-remaining-requests"], "0");
    let other = chat_as(&gateway, "sk-b").await;
    assert_eq!((other.status, other.headers["x-ratelimit-remaining-requests"].as_str()), (200, "99"));
}

/// A worker that finishes one request for each permit, in the order in which it got them.
fn gated(cluster: &FakeCluster, capacity: u32) -> (Arc<common::FakeWorker>, Arc<Semaphore>, Arc<Mutex<Vec<String>>>) {
    let go = Arc::new(Semaphore::new(0));
    let order = Arc::new(Mutex::new(Vec::new()));
    let (permits, seen) = (Arc::clone(&go), Arc::clone(&order));
    let worker = cluster.worker(move |ask: Ask| {
        let (permits, seen) = (Arc::clone(&permits), Arc::clone(&seen));
        async move {
            let body: serde_json::Value = serde_json::from_slice(&ask.body).unwrap();
            seen.lock().push(body["messages"][0]["content"].as_str().unwrap().to_owned());
            permits.acquire().await.unwrap().forget();
            answer(ask, vec![text("x"), done("stop")]).await;
        }
    });
    worker.report(|load| load.capacity = capacity);
    (worker, go, order)
}

fn body(content: &str) -> String {
    format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}]}}"#)
}

async fn queued(gateway: &Gateway, count: usize) {
    let line = format!("pulsing_router_queued_requests {count}\n");
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let metrics = get(gateway, "/metrics").await.body;
        if metrics.contains(&line) {
            return;
        }
        assert!(Instant::now() < end, "not {line}{metrics}");
    }
}

#[tokio::test]
async fn s6_a_key_has_no_more_requests_at_once_than_it_may_and_gets_its_places_back() {
    let cluster = FakeCluster::new();
    let (worker, go, _) = gated(&cluster, 8);
    let keys = Keys::new("a:sk-a concurrency=1");
    let gateway = cluster.gateway(|config| config.api_keys_file = Some(keys.0.clone())).await;
    let mut first = Client::connect(&gateway).await;
    first.post_with("/v1/chat/completions", "x-api-key: sk-a\r\n", CHAT).await;
    until("it runs", || worker.asked() == 1).await;
    let second = chat_as(&gateway, "sk-a").await;
    assert_eq!(code(&second), (429, "rate_limit_exceeded".into()));
    assert!(second.headers.contains_key("retry-after"));
    go.add_permits(2);
    assert_eq!(first.response(true).await.status, 200);
    assert_eq!(chat_as(&gateway, "sk-a").await.status, 200);
}

#[tokio::test]
async fn s6_the_queue_is_exact_and_what_is_over_is_refused_with_a_time() {
    let cluster = FakeCluster::new();
    let (worker, go, _) = gated(&cluster, 1);
    let gateway = cluster.gateway(|config| config.max_queue = 3).await;
    let mut clients = Vec::new();
    // One runs, one more is there for when it ends, three wait.
    for count in 1..=5 {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", CHAT).await;
        clients.push(client);
        if count <= 2 {
            until("the worker has it", || worker.asked() == count).await;
        } else {
            queued(&gateway, count - 2).await;
        }
    }
    for _ in 0..3 {
        let refused = post(&gateway, "/v1/chat/completions", CHAT).await;
        assert_eq!(code(&refused), (503, "overloaded".into()));
        assert!((1..=60).contains(&refused.headers["retry-after"].parse::<u32>().unwrap()));
    }
    assert_eq!(worker.asked(), 2, "nothing went past the queue");
    go.add_permits(5);
    for client in &mut clients {
        assert_eq!(client.response(true).await.status, 200);
    }
    queued(&gateway, 0).await;
    go.add_permits(1);
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
}

/// Asks without sending the body; the status, and whether the body was wanted.
async fn offer(gateway: &Gateway, headers: &str) -> (u16, bool) {
    let mut client = Client::connect(gateway).await;
    let head = format!("content-length: 50000000\r\nexpect: 100-continue\r\n{headers}");
    client.write(format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n").as_bytes()).await;
    let (status, _) = tokio::time::timeout(Duration::from_secs(5), client.head()).await.unwrap();
    (status, status == 100)
}

#[tokio::test]
async fn s6_what_is_refused_is_refused_before_its_body_is_asked_for() {
    let cluster = FakeCluster::new();
    let (worker, go, _) = gated(&cluster, 1);
    let keys = Keys::new("a:sk-a rps=0.001\nb:sk-b concurrency=1\nc:sk-c");
    let key = |name: &str| format!("x-api-key: sk-{name}\r\n");
    let gateway = cluster
        .gateway(|config| {
            (config.api_keys_file, config.metrics_open) = (Some(keys.0.clone()), true);
            config.max_queue = 1;
        })
        .await;
    assert_eq!(offer(&gateway, &key("a")).await, (100, true), "what is let in is asked for");
    let mut clients = Vec::new();
    // One runs, one more is there for when it ends, one waits.
    for (count, name) in ["b", "c", "c"].into_iter().enumerate() {
        let mut client = Client::connect(&gateway).await;
        client.post_with("/v1/chat/completions", &key(name), CHAT).await;
        clients.push(client);
        if count < 2 {
            until("the worker has it", || worker.asked() == count + 1).await;
        } else {
            queued(&gateway, 1).await;
        }
    }
    let full = cluster.gateway(|config| config.max_requests = 1).await;
    let mut holder = Client::connect(&full).await;
    holder.post("/v1/chat/completions", CHAT).await;
    let end = Instant::now() + Duration::from_secs(5);
    while !get(&full, "/metrics").await.body.contains("pulsing_router_in_flight 1\n") {
        assert!(Instant::now() < end, "it is not let in");
    }
    let asked = worker.asked();
    for (what, gateway, headers, status) in [
        ("over its rate", &gateway, key("a"), 429),
        ("its places are taken", &gateway, key("b"), 429),
        ("the queue is full", &gateway, key("c"), 503),
        ("the house is full", &full, String::new(), 503),
        ("no key", &gateway, String::new(), 401),
    ] {
        for _ in 0..3 {
            assert_eq!(offer(gateway, &headers).await, (status, false), "{what}");
        }
        let metrics = get(gateway, "/metrics").await.body;
        assert!(metrics.contains("pulsing_router_receiving 0\n"), "{what}: {metrics}");
    }
    assert_eq!(worker.asked(), asked, "no worker hears of it");
    go.add_permits(4);
    for client in clients.iter_mut().chain([&mut holder]) {
        assert_eq!(client.response(true).await.status, 200);
    }
}

#[tokio::test]
async fn s6_one_keys_flood_does_not_hold_up_another_key() {
    let cluster = FakeCluster::new();
    let (worker, go, order) = gated(&cluster, 1);
    let keys = Keys::new("a:sk-a\nb:sk-b");
    let gateway = cluster
        .gateway(|config| {
            config.api_keys_file = Some(keys.0.clone());
            // The length of the queue is read without a key.
            config.metrics_open = true;
        })
        .await;
    let mut clients = Vec::new();
    for count in 1..=12 {
        let mut client = Client::connect(&gateway).await;
        client.post_with("/v1/chat/completions", "x-api-key: sk-a\r\n", &body("a")).await;
        clients.push(client);
        if count <= 2 {
            until("the worker has it", || worker.asked() == count).await;
        } else {
            queued(&gateway, count - 2).await;
        }
    }
    for count in 1..=2 {
        let mut client = Client::connect(&gateway).await;
        client.post_with("/v1/chat/completions", "x-api-key: sk-b\r\n", &body("b")).await;
        clients.push(client);
        queued(&gateway, 10 + count).await;
    }
    go.add_permits(14);
    for client in &mut clients {
        assert_eq!(client.response(true).await.status, 200);
    }
    let order = order.lock().clone();
    let last = order.iter().rposition(|one| one == "b").unwrap();
    assert!(last <= 5, "b waited behind a's flood: {order:?}");
}

#[tokio::test]
async fn c2_who_leaves_the_queue_takes_no_turn_and_leaves_no_place_behind() {
    let cluster = FakeCluster::new();
    let (worker, go, order) = gated(&cluster, 1);
    let gateway = cluster.gateway(|_| {}).await;
    let mut clients = Vec::new();
    for count in 1..=6 {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", &body(&count.to_string())).await;
        clients.push(client);
        if count <= 2 {
            until("the worker has it", || worker.asked() == count).await;
        } else {
            queued(&gateway, count - 2).await;
        }
    }
    // Those of 3 and 5 leave.
    drop(clients.remove(4));
    drop(clients.remove(2));
    queued(&gateway, 2).await;
    go.add_permits(10);
    for client in &mut clients {
        assert_eq!(client.response(true).await.status, 200);
    }
    assert_eq!(*order.lock(), ["1", "2", "4", "6"]);
    assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_in_flight 0\n"));
}

#[tokio::test]
async fn s6_who_waits_too_long_is_told_so() {
    let cluster = FakeCluster::new();
    let (worker, _go, _) = gated(&cluster, 1);
    let gateway = cluster.gateway(|config| config.queue_timeout = Duration::from_millis(50)).await;
    let mut clients = Vec::new();
    for count in 1..=2 {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", STREAM).await;
        clients.push(client);
        until("the worker has it", || worker.asked() == count).await;
    }
    let late = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!(code(&late), (503, "overloaded".into()));
    assert!(late.body.contains("busy") && late.headers.contains_key("retry-after"), "{}", late.body);
}

#[tokio::test]
async fn s6_a_worker_that_frees_up_elsewhere_or_joins_takes_who_waits() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    // Another Router's requests fill it.
    worker.report(|load| {
        load.capacity = 1;
        load.running = 9;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut waiting = Client::connect(&gateway).await;
    waiting.post("/v1/chat/completions", CHAT).await;
    queued(&gateway, 1).await;
    worker.report(|load| load.running = 0);
    assert_eq!(waiting.response(true).await.status, 200);
    worker.report(|load| load.running = 9);
    let mut waiting = Client::connect(&gateway).await;
    let end = Instant::now() + Duration::from_secs(5);
    // Its report takes a moment.
    while worker.asked() < 100 {
        waiting.post("/v1/chat/completions", CHAT).await;
        let answered = tokio::time::timeout(Duration::from_millis(100), waiting.response(true)).await;
        if answered.is_err() {
            break;
        }
        assert!(Instant::now() < end);
    }
    cluster.worker(|ask| async move {
        let stream = ask.responder.stream();
        send(&stream, vec![text("second"), done("stop")]).await;
        stream.end();
    });
    assert!(waiting.response(true).await.body.contains("second"));
    assert_eq!(worker.active.load(Ordering::SeqCst), 0);
}
