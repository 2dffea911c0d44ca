//! Which worker takes a request, and which model names are known.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{CHAT, Client, FakeCluster, FakeWorker, STREAM, get, hello, post, post_with, send, text, until};
use parking_lot::Mutex;
use pulsing_core::ActorId;
use pulsing_gateway::{ExternalPicker, Gateway, GatewayConfig, PickRequest, PolicyKind, Served};
use serde_json::json;
use tokio::sync::oneshot;

fn asked(workers: &[Arc<FakeWorker>]) -> Vec<usize> {
    workers.iter().map(|worker| worker.asked()).collect()
}

/// Starts streams that stay open until their clients are dropped.
async fn open(gateway: &Gateway, count: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = Client::connect(gateway).await;
        client.post("/v1/chat/completions", STREAM).await;
        client.head().await;
        clients.push(client);
    }
    clients
}

async fn hold(ask: common::Ask) {
    let cancel = ask.responder.cancel_signal().clone();
    let stream = ask.responder.stream();
    send(&stream, vec![text("x")]).await;
    until("cancelled", || cancel.is_cancelled()).await;
}

#[tokio::test]
async fn every_policy_uses_every_worker() {
    for name in PolicyKind::NAMES {
        let cluster = FakeCluster::new();
        let workers: Vec<_> = (0..3).map(|_| cluster.worker(hello)).collect();
        let gateway = cluster.gateway(|config| config.policy = name.parse().unwrap()).await;
        for user in 0..60 {
            let body = CHAT.replace("\"model\"", &format!("\"user\":\"u{user}\",\"model\""));
            assert_eq!(post(&gateway, "/v1/chat/completions", &body).await.status, 200);
        }
        let counts = asked(&workers);
        assert!(counts.iter().all(|count| *count >= 5), "{name}: {counts:?}");
    }
    let error = "cache_awful".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(PolicyKind::NAMES.iter().all(|name| error.contains(name)), "{error}");
}

#[tokio::test]
async fn requests_spread_by_load_at_once_even_before_any_report() {
    for policy in [PolicyKind::StreamLoad, PolicyKind::RoundRobin] {
        let cluster = FakeCluster::new();
        let workers: Vec<_> = (0..4).map(|_| cluster.worker(hold)).collect();
        let gateway = cluster.gateway(|config| config.policy = policy).await;
        let clients = open(&gateway, 8).await;
        assert_eq!(asked(&workers), [2, 2, 2, 2], "{policy}");
        drop(clients);
    }
}

#[tokio::test]
async fn a_worker_that_reports_no_load_is_used_by_what_we_sent_it() {
    let cluster = FakeCluster::new();
    let mute = [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready"), ("mute", "")];
    let workers: Vec<_> = (0..2).map(|_| cluster.worker_with("worker", &mute, hold)).collect();
    let gateway = cluster.gateway(|_| {}).await;
    let _clients = open(&gateway, 6).await;
    assert_eq!(asked(&workers), [3, 3]);
}

#[tokio::test]
async fn load_that_other_routers_cause_counts_relative_to_capacity() {
    let cluster = FakeCluster::new();
    let busy = cluster.worker(hold);
    let large = cluster.worker(hold);
    busy.report(|load| load.running = 2);
    large.report(|load| (load.running, load.capacity) = (4, 100));
    let gateway = cluster.gateway(|_| {}).await;
    let _clients = open(&gateway, 6).await;
    assert_eq!((busy.asked(), large.asked()), (0, 6));
}

#[tokio::test]
async fn a_full_worker_is_the_last_choice_but_a_choice() {
    for name in PolicyKind::NAMES {
        let cluster = FakeCluster::new();
        let full = cluster.worker(hello);
        let free = cluster.worker(hello);
        full.report(|load| load.waiting = 4);
        let gateway = cluster.gateway(|config| config.policy = name.parse().unwrap()).await;
        for _ in 0..10 {
            post(&gateway, "/v1/chat/completions", CHAT).await;
        }
        assert_eq!((full.asked(), free.asked()), (0, 10), "{name}");
        cluster.remove(&free);
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while full.asked() == 0 {
            assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200, "{name}");
            assert!(std::time::Instant::now() < end, "{name}");
        }
    }
}

#[tokio::test]
async fn a_conversation_stays_on_its_worker_and_moves_only_when_that_goes() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..4).map(|_| cluster.worker(hello)).collect();
    let gateway = cluster.gateway(|config| config.policy = PolicyKind::ConsistentHash).await;
    let ask = |session: usize| {
        let gateway = &gateway;
        async move {
            let mut client = Client::connect(gateway).await;
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-session-id: s{session}\r\ncontent-length: {}\r\n\r\n{CHAT}",
                CHAT.len()
            );
            client.write(head.as_bytes()).await;
            assert_eq!(client.response(true).await.status, 200);
        }
    };
    let mut homes = Vec::new();
    for session in 0..20 {
        let before = asked(&workers);
        for _ in 0..3 {
            ask(session).await;
        }
        let after = asked(&workers);
        let moved: Vec<usize> = (0..4).filter(|at| after[*at] > before[*at]).collect();
        assert_eq!(moved.len(), 1, "session {session} is on {moved:?}");
        homes.push(moved[0]);
    }
    cluster.remove(&workers[0]);
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while get(&gateway, "/health").await.json()["total_workers"] != 3 {
        assert!(std::time::Instant::now() < end);
    }
    for (session, home) in homes.into_iter().enumerate().filter(|(_, home)| *home != 0) {
        let before = workers[home].asked();
        ask(session).await;
        assert_eq!(workers[home].asked(), before + 1, "session {session} moved without need");
    }
}

#[tokio::test]
async fn model_names_are_the_alias_and_the_workers_own() {
    let cluster = FakeCluster::new();
    let tiny = cluster.worker(hello);
    tiny.report(|load| load.max_model_len = 2048);
    let gateway = cluster.gateway(|_| {}).await;
    let other = [("kind", "worker"), ("protocol", "1..1"), ("model", "org/big"), ("state", "ready")];
    cluster.worker_with("worker", &other, hello);
    let end = std::time::Instant::now() + Duration::from_secs(5);
    let listed = loop {
        let listed = get(&gateway, "/v1/models").await.json();
        if listed["data"].as_array().unwrap().len() == 3 {
            break listed;
        }
        assert!(std::time::Instant::now() < end, "{listed}");
    };
    let ids: Vec<&str> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["alias", "tiny", "org/big"]);
    assert_eq!(listed["data"][0]["max_model_len"], 2048);
    assert!(listed["data"][0]["created"].is_u64() && listed["data"][0]["owned_by"] == "pulsing");
    for path in ["/v1/models/org/big", "/v1/models/org%2Fbig"] {
        assert_eq!(get(&gateway, path).await.json()["id"], "org/big");
    }
    for (model, expected) in [("alias", 5), ("tiny", 5), ("org/big", 0)] {
        let before = tiny.asked();
        for _ in 0..5 {
            let value = post(&gateway, "/v1/chat/completions", &CHAT.replace("alias", model)).await.json();
            assert_eq!(value["model"], json!(model), "the name that was asked for comes back");
        }
        assert_eq!(tiny.asked() - before, expected, "{model}");
    }
    let without = post(&gateway, "/v1/chat/completions", r#"{"model":null,"messages":[{}]}"#).await;
    assert_eq!((without.status, without.json()["model"].as_str()), (200, Some("alias")));
}

fn served(name: &str, worker_name: &str, model: Option<&str>) -> Served {
    Served { model: model.map(str::to_owned), ..Served::new(name, worker_name) }
}

#[tokio::test]
async fn one_router_serves_several_worker_names_and_every_public_name_means_its_own() {
    let cluster = FakeCluster::new();
    let metadata = |model| [("kind", "worker"), ("protocol", "1..1"), ("model", model), ("state", "ready")];
    let one = |name: &str, model| cluster.worker_with(name, &metadata(model), hello);
    let workers =
        [one("worker", "tiny"), one("big", "org/big"), one("mixed", "a"), one("mixed", "b:7b"), one("big", "org/big")];
    let gateway = cluster
        .gateway(|config| {
            config.models = vec![
                served("gpt", "big", None),
                served("b", "mixed", Some("b:7b")),
                served("any", "mixed", None),
                served("lost", "mixed", Some("not-there")),
                served("later", "nobody-yet", None),
            ];
        })
        .await;
    let listed = get(&gateway, "/v1/models").await.json();
    let ids: Vec<&str> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["alias", "gpt", "b", "any", "lost", "later", "tiny", "org/big", "a", "b:7b"]);
    for (model, takers) in [
        ("alias", &[0][..]),
        ("tiny", &[0]),
        ("gpt", &[1, 4]),
        ("org/big", &[1, 4]),
        ("b", &[3]),
        ("b:7b", &[3]),
        ("any", &[2]),
        ("a", &[2]),
    ] {
        let before = asked(&workers);
        for _ in 0..20 {
            let value = post(&gateway, "/v1/chat/completions", &CHAT.replace("alias", model)).await.json();
            assert_eq!(value["model"], model);
        }
        let took: Vec<usize> = (0..5).filter(|at| workers[*at].asked() > before[*at]).collect();
        assert_eq!(took, takers, "{model}");
    }
    let unknown = post(&gateway, "/v1/chat/completions", &CHAT.replace("alias", "nope")).await;
    assert_eq!((unknown.status, unknown.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
    let message = unknown.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(ids.iter().all(|id| message.contains(id)), "{message}");
    for (model, why) in [("later", "\"nobody-yet\""), ("lost", "\"mixed\"")] {
        let response = post(&gateway, "/v1/chat/completions", &CHAT.replace("alias", model)).await;
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(response.status == 503 && message.contains(why), "{model}: {message}");
    }
}

#[tokio::test]
async fn models_that_are_asked_for_by_turns_use_all_their_workers() {
    let cluster = FakeCluster::new();
    let metadata = |model| [("kind", "worker"), ("protocol", "1..1"), ("model", model), ("state", "ready")];
    let models = ["a", "a", "b", "b"];
    let workers: Vec<_> = models.iter().map(|model| cluster.worker_with(model, &metadata(model), hello)).collect();
    let gateway = cluster
        .gateway(|config| {
            config.policy = PolicyKind::RoundRobin;
            config.models = ["a", "b"].map(|model| Served::new(format!("the-{model}"), model)).to_vec();
        })
        .await;
    for _ in 0..6 {
        for model in ["the-a", "the-b"] {
            assert_eq!(post(&gateway, "/v1/chat/completions", &CHAT.replace("alias", model)).await.status, 200);
        }
    }
    assert_eq!(asked(&workers), [3; 4]);
}

#[test]
fn a_table_of_models_that_says_a_name_twice_is_refused() {
    for (models, says) in [
        (vec![served("pulsing-model", "x", None)], "given twice"),
        (vec![served("a", "x", None), served("a", "y", None)], "given twice"),
        (vec![served("", "x", None)], "empty"),
        (vec![served("a", "x", Some(""))], "empty"),
    ] {
        let error = GatewayConfig { models, ..GatewayConfig::default() }.served().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[tokio::test]
async fn a_restarted_worker_takes_requests_as_soon_as_it_is_ready() {
    let cluster = FakeCluster::new();
    let first = cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    first.die();
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 503);
    cluster.remove(&first);
    let second = cluster.worker(hello);
    let end = std::time::Instant::now() + Duration::from_secs(1);
    while post(&gateway, "/v1/chat/completions", CHAT).await.status != 200 {
        assert!(std::time::Instant::now() < end, "still avoided");
    }
    assert_eq!(second.asked(), 1);
}

/// Answers as told, and remembers what it was told.
#[derive(Default)]
struct Scripted {
    seen: Mutex<Vec<PickRequest>>,
    answer: Mutex<Option<Option<ActorId>>>,
    held: Mutex<Vec<oneshot::Sender<Option<ActorId>>>>,
}

impl ExternalPicker for Scripted {
    fn pick(&self, request: PickRequest, answer: oneshot::Sender<Option<ActorId>>) {
        self.seen.lock().push(request);
        match *self.answer.lock() {
            Some(pick) => {
                let _ = answer.send(pick);
            }
            None => self.held.lock().push(answer),
        }
    }
}

#[tokio::test]
async fn a_scheduler_outside_decides_and_a_slow_one_is_passed_over_and_counted() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..3).map(|_| cluster.worker(hello)).collect();
    let picker = Arc::new(Scripted::default());
    let plugged = Arc::clone(&picker);
    let gateway = cluster.gateway(move |config| config.picker = Some(plugged)).await;
    *picker.answer.lock() = Some(Some(workers[1].id));
    for _ in 0..5 {
        post(&gateway, "/v1/chat/completions", CHAT).await;
    }
    assert_eq!(asked(&workers), [0, 5, 0]);
    let seen = picker.seen.lock()[0].clone();
    assert_eq!((seen.text.as_str(), seen.headers["host"].as_str()), ("hi", "x"));
    let more = "authorization: Bearer k\r\nproxy-authorization: k\r\nx-api-key: k\r\ncookie: k\r\nx-tenant: t\r\n";
    post_with(&gateway, "/v1/chat/completions", more, CHAT).await;
    let headers = picker.seen.lock().last().unwrap().headers.clone();
    assert_eq!(headers["x-tenant"], "t");
    assert!(
        headers.values().all(|value| !value.contains('k')),
        "a client's keys are none of its business: {headers:?}"
    );

    for (answer, metric) in [
        (None, "{reason=\"late\"} 1"),
        (Some(Some(ActorId(999))), "{reason=\"failed\"} 1"),
        (Some(None), "{reason=\"failed\"} 1"),
    ] {
        *picker.answer.lock() = answer;
        let started = std::time::Instant::now();
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
        assert!(started.elapsed() < Duration::from_secs(2));
        let metrics = get(&gateway, "/metrics").await.body;
        assert!(metrics.contains(&format!("pulsing_router_scheduler_fallbacks_total{metric}")), "{metrics}");
    }
}

#[tokio::test]
async fn metrics_count_what_happened_under_labels_no_client_can_invent() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    for path in ["/v1/chat/completions", "/x1", "/x2", "/x3"] {
        post(&gateway, path, CHAT).await;
    }
    post(&gateway, "/v1/chat/completions", STREAM).await;
    post(&gateway, "/v1/completions", r#"{"model":"invented","prompt":"x"}"#).await;
    let metrics = get(&gateway, "/metrics").await;
    assert_eq!(metrics.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    for line in [
        "pulsing_router_requests_total{route=\"chat_completions\",status=\"200\"} 2",
        "pulsing_router_requests_total{route=\"completions\",status=\"404\"} 1",
        "pulsing_router_requests_total{route=\"other\",status=\"404\"} 3",
        "pulsing_router_time_to_first_token_seconds_count 2",
        "pulsing_router_request_duration_seconds_count 3",
        "pulsing_router_tokens_total{kind=\"completion\"} 4",
        "pulsing_router_workers{state=\"ready\"} 1",
        "pulsing_router_in_flight 0",
    ] {
        assert!(metrics.body.contains(line), "{line} in {}", metrics.body);
    }
    assert!(!metrics.body.contains("invented") && !metrics.body.contains("x1"));
}

/// A chat body with these messages by turns of user and assistant.
fn turns(texts: &[String]) -> String {
    let messages: Vec<_> = texts
        .iter()
        .enumerate()
        .map(|(at, text)| json!({"role": if at % 2 == 0 { "user" } else { "assistant" }, "content": text}))
        .collect();
    json!({"model": "alias", "messages": messages}).to_string()
}

#[tokio::test]
async fn cache_aware_keeps_growing_conversations_where_their_prefix_is() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..3).map(|_| cluster.worker(hello)).collect();
    let gateway = cluster.gateway(|config| config.policy = PolicyKind::CacheAware).await;
    let mut homes = Vec::new();
    let mut conversations: Vec<Vec<String>> =
        (0..12).map(|who| vec![format!("I am number {who}. ").repeat(40)]).collect();
    for conversation in &mut conversations {
        let mut home = None;
        for turn in 0..4 {
            let before = asked(&workers);
            assert_eq!(post(&gateway, "/v1/chat/completions", &turns(conversation)).await.status, 200);
            let took = (0..3).find(|at| workers[*at].asked() > before[*at]);
            assert_eq!(*home.get_or_insert(took), took, "turn {turn} went elsewhere");
            conversation.extend([format!("answer {turn}"), format!("question {turn}")]);
        }
        homes.extend(home.flatten());
    }
    assert!((0..3).all(|at| homes.contains(&at)), "all conversations are on {homes:?}");

    // What a worker knew goes with it; another instance begins with nothing.
    cluster.remove(&workers[0]);
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while get(&gateway, "/health").await.json()["total_workers"] != 2 {
        assert!(std::time::Instant::now() < end);
    }
    for (conversation, home) in conversations.iter().zip(homes) {
        let before = asked(&workers);
        assert_eq!(post(&gateway, "/v1/chat/completions", &turns(conversation)).await.status, 200);
        let took = (0..3).find(|at| workers[*at].asked() > before[*at]);
        assert!(home == 0 || took == Some(home), "{home} to {took:?}");
    }
}

#[tokio::test]
async fn a_prompt_that_all_send_does_not_pile_up_on_one_worker() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..4).map(|_| cluster.worker(hold)).collect();
    for worker in &workers {
        worker.report(|load| load.capacity = 64);
    }
    let gateway = cluster.gateway(|config| config.policy = PolicyKind::CacheAware).await;
    let mut clients = Vec::new();
    for _ in 0..32 {
        let mut client = Client::connect(&gateway).await;
        let body = turns(&["the same for all ".repeat(100)]).replace("\"model\"", "\"stream\":true,\"model\"");
        client.post("/v1/chat/completions", &body).await;
        client.head().await;
        clients.push(client);
    }
    let counts = asked(&workers);
    assert!(
        counts.iter().sum::<usize>() == 32 && counts.iter().all(|count| *count <= 16),
        "more than twice the mean: {counts:?}"
    );
}

#[tokio::test]
async fn the_headers_that_name_a_conversation_are_a_setting() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..4).map(|_| cluster.worker(hello)).collect();
    let gateway = cluster
        .gateway(|config| {
            config.policy = PolicyKind::ConsistentHash;
            config.session_headers = vec!["x-tenant".to_owned()];
        })
        .await;
    for (headers, body, one_home) in [
        ("x-tenant: t\r\nx-session-id: s$\r\n", CHAT.to_owned(), true),
        ("x-session-id: s$\r\n", CHAT.replace("\"model\"", "\"user\":\"u\",\"model\""), true),
        ("x-tenant: t$\r\n", CHAT.replace("\"model\"", "\"user\":\"u\",\"model\""), false),
    ] {
        let before = asked(&workers);
        for number in 0..30 {
            let mut client = Client::connect(&gateway).await;
            let headers = headers.replace('$', &number.to_string());
            let length = body.len();
            let request = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n{body}"
            );
            client.write(request.as_bytes()).await;
            assert_eq!(client.response(true).await.status, 200);
        }
        let used = asked(&workers).iter().zip(before).filter(|(after, before)| *after > before).count();
        assert_eq!(used == 1, one_home, "{headers:?} went to {used} workers");
    }
}

#[tokio::test]
async fn of_equally_loaded_workers_the_one_with_more_cache_left_is_taken() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..3).map(|_| cluster.worker(hello)).collect();
    for (worker, usage) in workers.iter().zip([0.9, 0.2, 0.5]) {
        worker.report(|load| load.kv_usage = usage);
    }
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..5 {
        post(&gateway, "/v1/chat/completions", CHAT).await;
    }
    assert_eq!(asked(&workers), [0, 5, 0]);
}
