//! Streams that lose their Worker in the middle (S4), or whose Worker hangs there (S5).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Ask, CHAT, Client, FakeCluster, FakeWorker, Response, fail, get, post, send, until};
use pulsing_gateway::protocol::{Delta, Usage};
use pulsing_gateway::{Gateway, GatewayConfig};

const WORDS: usize = 12;

/// Says `w0 w1 ...`, a token a word, from where the client is; stops before word `at` until its cluster wants more.
fn counting(cluster: &FakeCluster, metadata: &[(&str, &str)], at: usize) -> (Arc<FakeWorker>, Arc<AtomicUsize>) {
    let limit = Arc::new(AtomicUsize::new(at));
    let allowed = Arc::clone(&limit);
    let mut all = vec![("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready")];
    all.extend_from_slice(metadata);
    let worker = cluster.worker_with("worker", &all, move |ask: Ask| {
        let allowed = Arc::clone(&allowed);
        async move { count(ask, &allowed).await }
    });
    (worker, limit)
}

async fn count(ask: Ask, allowed: &AtomicUsize) {
    let (done, text) = (&ask.generate.continue_tokens, &ask.generate.continue_text);
    let words = |range: std::ops::Range<usize>| range.map(|at| format!("w{at} ")).collect::<String>();
    assert_eq!(*text, words(0..done.len()), "what the client has");
    assert!(done.iter().copied().eq(0..done.len() as u32), "{done:?}");
    let first = done.len();
    let cancel = ask.responder.cancel_signal().clone();
    let stream = ask.responder.stream();
    for at in first..WORDS {
        until("it may go on", || allowed.load(Ordering::SeqCst) > at || cancel.is_cancelled()).await;
        let piece = Delta { text: format!("w{at} "), token_ids: vec![at as u32], ..Delta::default() };
        if cancel.is_cancelled() || !send(&stream, vec![piece]).await {
            return;
        }
    }
    until("it may end", || allowed.load(Ordering::SeqCst) > WORDS || cancel.is_cancelled()).await;
    let usage = Usage { prompt_tokens: 3, completion_tokens: (WORDS - first) as u32 + 1, cached_tokens: 0 };
    send(&stream, vec![Delta { finish_reason: "stop".into(), usage: Some(usage), ..Delta::default() }]).await;
    stream.end();
}

const ALIKE: [(&str, &str); 2] = [("continue", "greedy"), ("fingerprint", "f1")];
const FREE: usize = usize::MAX;

fn body(extra: &str) -> String {
    format!(
        r#"{{"model":"alias","messages":[{{"role":"user","content":"hi"}}],"stream":true,"stream_options":{{"include_usage":true}},{extra}}}"#
    )
}

/// The same in every run.
fn comparable(response: &Response) -> Vec<serde_json::Value> {
    let events = response.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{}", response.body);
    let strip = |event: &String| {
        let mut event: serde_json::Value = serde_json::from_str(event).unwrap();
        for key in ["id", "created"] {
            event.as_object_mut().unwrap().remove(key);
        }
        event
    };
    events[..events.len() - 1].iter().map(strip).collect()
}

/// Reads until word `at - 1` has come.
async fn begun(gateway: &Gateway, body: &str, at: usize) -> (Client, String) {
    let mut client = Client::connect(gateway).await;
    client.post("/v1/chat/completions", body).await;
    let (status, _) = client.head().await;
    assert_eq!(status, 200);
    let mut seen = String::new();
    while !seen.contains(&format!("w{} ", at - 1)) {
        seen.push_str(&String::from_utf8(client.chunk().await.unwrap()).unwrap());
    }
    (client, seen)
}

async fn rest(mut client: Client, mut body: String) -> Response {
    let whole = loop {
        match client.chunk().await {
            None => break false,
            Some(chunk) if chunk.is_empty() => break true,
            Some(chunk) => body.push_str(&String::from_utf8(chunk).unwrap()),
        }
    };
    Response { status: 200, headers: std::collections::BTreeMap::new(), body, whole }
}

async fn undisturbed(extra: &str) -> Vec<serde_json::Value> {
    let cluster = FakeCluster::new();
    counting(&cluster, &ALIKE, FREE);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", &body(extra)).await;
    assert!(response.whole);
    comparable(&response)
}

#[tokio::test]
async fn test_s4_a_greedy_stream_goes_on_elsewhere_as_if_nothing_had_happened_wherever_it_is_cut() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    assert_eq!(expected.last().unwrap()["usage"]["completion_tokens"], WORDS + 1);
    for at in 1..=WORDS {
        let cluster = FakeCluster::new();
        let (dying, _) = counting(&cluster, &ALIKE, at);
        let gateway = cluster.gateway(|_| {}).await;
        let (client, seen) = begun(&gateway, &body(extra), at).await;
        let (other, _) = counting(&cluster, &ALIKE, FREE);
        dying.die();
        let response = rest(client, seen).await;
        assert!(response.whole, "{at}: {}", response.body);
        assert_eq!(comparable(&response), expected, "{at}");
        assert_eq!((dying.asked(), other.asked()), (1, 1));
        let metrics = get(&gateway, "/metrics").await.body;
        assert!(metrics.contains("pulsing_router_resumed_streams_total 1"), "{metrics}");
        assert!(metrics.contains("pulsing_router_broken_streams_total 0"), "{metrics}");
    }
}

#[tokio::test]
async fn a_stream_that_nobody_goes_on_with_is_none_that_outlived_its_worker() {
    let cluster = FakeCluster::new();
    let (dying, _) = counting(&cluster, &ALIKE, 3);
    let gateway = cluster.gateway(|config| config.worker_wait = Duration::from_millis(50)).await;
    let (client, seen) = begun(&gateway, &body(r#""temperature":0"#), 3).await;
    dying.die();
    cluster.remove(&dying);
    let response = rest(client, seen).await;
    assert!(!response.whole && response.body.contains("no other one goes on with it"), "{}", response.body);
    counted(&gateway, &["pulsing_router_resumed_streams_total 0", "pulsing_router_broken_streams_total 1"]).await;
}

#[tokio::test]
async fn test_s4_a_stream_survives_one_worker_after_the_other() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    let cluster = FakeCluster::new();
    let (mut dying, _) = counting(&cluster, &ALIKE, 2);
    let gateway = cluster.gateway(|_| {}).await;
    let (mut client, mut seen) = begun(&gateway, &body(extra), 2).await;
    for at in [4, 5, 9] {
        let (next, _) = counting(&cluster, &ALIKE, at);
        dying.die();
        while !seen.contains(&format!("w{} ", at - 1)) {
            seen.push_str(&String::from_utf8(client.chunk().await.unwrap()).unwrap());
        }
        dying = next;
    }
    counting(&cluster, &ALIKE, FREE);
    dying.die();
    assert_eq!(comparable(&rest(client, seen).await), expected);
}

#[tokio::test]
async fn test_s4_a_greedy_stream_is_taken_from_a_worker_that_hangs() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    let quick = |config: &mut GatewayConfig| config.worker_silence = Duration::from_millis(400);
    let cluster = FakeCluster::new();
    let (hung, go) = counting(&cluster, &ALIKE, 5);
    // Ready, but nobody that could go on.
    let (stranger, _) = counting(&cluster, &[("continue", "greedy"), ("fingerprint", "f2")], FREE);
    stranger.report(|load| load.running = 4);
    let gateway = cluster.gateway(quick).await;
    let (client, seen) = begun(&gateway, &body(extra), 5).await;
    hung.hush(true);
    let silent = "pulsing_router_workers{state=\"silent\"} 1";
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !get(&gateway, "/metrics").await.body.contains(silent) {
        assert!(std::time::Instant::now() < end, "its silence is not seen");
    }
    assert_eq!(hung.cancelled.load(Ordering::SeqCst), 0, "it may wake");
    let (other, _) = counting(&cluster, &ALIKE, FREE);
    let response = rest(client, seen).await;
    assert_eq!(comparable(&response), expected);
    assert_eq!((stranger.asked(), other.asked()), (0, 1));
    until("it is told to stop", || hung.cancelled.load(Ordering::SeqCst) == 1).await;
    go.store(FREE, Ordering::SeqCst);
}

fn quick(config: &mut GatewayConfig) {
    config.worker_silence = Duration::from_millis(300);
    config.worker_standstill = Duration::from_millis(400);
    config.worker_wait = Duration::from_millis(50);
}

async fn counted(gateway: &Gateway, lines: &[&str]) {
    let metrics = get(gateway, "/metrics").await.body;
    for line in lines {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

const KEPT: [&str; 3] = [
    "pulsing_router_retries_total{reason=\"taken_back\"} 0",
    "pulsing_router_resumed_streams_total 0",
    "pulsing_router_broken_streams_total 0",
];
const TAKEN_BACK: [&str; 5] = [
    "pulsing_router_retries_total{reason=\"taken_back\"} 1",
    "pulsing_router_retries_total{reason=\"lost\"} 0",
    "pulsing_router_resumed_streams_total 1",
    "pulsing_router_broken_streams_total 0",
    "pulsing_router_in_flight 0",
];

#[tokio::test]
async fn test_s5_a_worker_that_wakes_before_another_one_answers_keeps_its_stream() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    let cluster = FakeCluster::new();
    let (hung, go) = counting(&cluster, &ALIKE, 5);
    let gateway = cluster.gateway(quick).await;
    let (client, seen) = begun(&gateway, &body(extra), 5).await;
    let (late, _) = counting(&cluster, &ALIKE, 5);
    hung.hush(true);
    until("another one is asked", || late.asked() == 1).await;
    assert_eq!(hung.cancelled.load(Ordering::SeqCst), 0, "it may wake");
    go.store(6, Ordering::SeqCst);
    until("the other one is told to stop", || late.cancelled.load(Ordering::SeqCst) == 1).await;
    hung.hush(false);
    go.store(FREE, Ordering::SeqCst);
    assert_eq!(comparable(&rest(client, seen).await), expected);
    counted(&gateway, &KEPT).await;
}

#[tokio::test]
async fn test_s5_a_worker_that_wakes_before_another_one_answers_keeps_an_answer_that_is_no_stream() {
    let cluster = FakeCluster::new();
    let (hung, go) = counting(&cluster, &ALIKE, 5);
    let gateway = cluster.gateway(quick).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", CHAT).await;
    let first = "pulsing_router_time_to_first_token_seconds_count 1";
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !get(&gateway, "/metrics").await.body.contains(first) {
        assert!(std::time::Instant::now() < end, "it has not begun");
    }
    let (late, _) = counting(&cluster, &ALIKE, 0);
    hung.hush(true);
    until("another one is asked", || late.asked() == 1).await;
    assert_eq!(hung.cancelled.load(Ordering::SeqCst), 0, "it may wake");
    go.store(FREE, Ordering::SeqCst);
    let response = client.response(true).await;
    let said = response.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(said, (0..WORDS).map(|at| format!("w{at} ")).collect::<String>());
    until("the other one is told to stop", || late.cancelled.load(Ordering::SeqCst) == 1).await;
    counted(&gateway, &KEPT[..1]).await;
}

#[tokio::test]
async fn test_s5_a_worker_that_dies_while_another_one_is_asked_costs_nothing_either() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    let cluster = FakeCluster::new();
    let (hung, _) = counting(&cluster, &ALIKE, 5);
    let gateway = cluster.gateway(quick).await;
    let (client, seen) = begun(&gateway, &body(extra), 5).await;
    let (late, go) = counting(&cluster, &ALIKE, 5);
    hung.hush(true);
    until("another one is asked", || late.asked() == 1).await;
    hung.die();
    go.store(FREE, Ordering::SeqCst);
    assert_eq!(comparable(&rest(client, seen).await), expected);
    assert_eq!(late.asked(), 1);
    counted(&gateway, &["pulsing_router_resumed_streams_total 1", "pulsing_router_broken_streams_total 0"]).await;
}

#[tokio::test]
async fn test_s5_a_stream_whose_relief_fails_waits_for_its_worker_and_for_who_comes() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    for wakes in [true, false] {
        let cluster = FakeCluster::new();
        let (hung, go) = counting(&cluster, &ALIKE, 5);
        let gateway = cluster.gateway(quick).await;
        let (client, seen) = begun(&gateway, &body(extra), 5).await;
        let mut metadata = vec![("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready")];
        metadata.extend_from_slice(&ALIKE);
        let refuses =
            cluster.worker_with("worker", &metadata, |ask: Ask| async { fail(ask.responder, 400, "not this") });
        hung.hush(true);
        until("it refuses", || refuses.asked() == 1).await;
        assert_eq!(hung.cancelled.load(Ordering::SeqCst), 0);
        if wakes {
            go.store(FREE, Ordering::SeqCst);
        } else {
            cluster.remove(&refuses);
            counting(&cluster, &ALIKE, FREE);
        }
        assert_eq!(comparable(&rest(client, seen).await), expected, "{wakes}");
        counted(&gateway, if wakes { &KEPT } else { &TAKEN_BACK }).await;
    }
}

#[tokio::test]
async fn test_s5_a_stream_goes_on_elsewhere_when_nothing_comes_though_its_worker_says_it_serves() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    let cluster = FakeCluster::new();
    let (hung, _) = counting(&cluster, &ALIKE, 5);
    // While it gets on with something, this stream may have to wait for its turn.
    hung.report(|load| load.running = 1);
    let gateway = cluster.gateway(quick).await;
    let (client, seen) = begun(&gateway, &body(extra), 5).await;
    let (other, _) = counting(&cluster, &ALIKE, FREE);
    let told = hung.told.load(Ordering::SeqCst);
    until("it has said so for longer than it may stand still", || hung.told.load(Ordering::SeqCst) > told + 8).await;
    assert_eq!(other.asked(), 0);
    hung.report(|load| load.running = 0);
    assert_eq!(comparable(&rest(client, seen).await), expected);
    until("it is told to stop", || hung.cancelled.load(Ordering::SeqCst) == 1).await;
    counted(&gateway, &TAKEN_BACK).await;
}

#[tokio::test]
async fn test_s5_a_slow_worker_keeps_its_stream_whatever_it_says_of_itself() {
    let extra = r#""temperature":0"#;
    let expected = undisturbed(extra).await;
    let cluster = FakeCluster::new();
    let mut metadata = vec![("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready")];
    metadata.extend_from_slice(&ALIKE);
    // Between two words it needs longer than it may be silent.
    let slow = cluster.worker_with("worker", &metadata, |ask: Ask| async move {
        let allowed = Arc::new(AtomicUsize::new(2));
        let opened = Arc::clone(&allowed);
        let opening = tokio::spawn(async move {
            for pause in [250, 400, 400] {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                opened.fetch_add(1, Ordering::SeqCst);
            }
            opened.store(FREE, Ordering::SeqCst);
        });
        count(ask, &allowed).await;
        opening.abort();
    });
    let gateway = cluster.gateway(quick).await;
    let (client, seen) = begun(&gateway, &body(extra), 3).await;
    let (other, _) = counting(&cluster, &ALIKE, FREE);
    slow.hush(true);
    assert_eq!(comparable(&rest(client, seen).await), expected);
    assert_eq!((slow.cancelled.load(Ordering::SeqCst), other.asked()), (0, 0));
}

#[tokio::test]
async fn test_s4_where_going_on_would_not_be_sound_the_stream_ends_with_an_error_and_a_cut() {
    let (greedy, any) = (ALIKE, [("continue", "any"), ("fingerprint", "f1")]);
    let none: [(&str, &str); 2] = [("fingerprint", "f1"), ("x", "y")];
    let unmarked = [("continue", "greedy"), ("x", "y")];
    let other_model = [("continue", "greedy"), ("fingerprint", "f1"), ("model", "other")];
    for (extra, first, second) in [
        (r#""temperature":0.7"#, &greedy[..], &any[..]),
        (r#""x":1"#, &greedy[..], &greedy[..]),
        (r#""temperature":0,"tools":[{"type":"function"}]"#, &greedy[..], &greedy[..]),
        (r#""temperature":0,"response_format":{"type":"json_object"}"#, &greedy[..], &greedy[..]),
        (r#""temperature":0,"logprobs":true"#, &greedy[..], &greedy[..]),
        (r#""temperature":0"#, &none[..], &greedy[..]),
        (r#""temperature":0"#, &greedy[..], &none[..]),
        (r#""temperature":0"#, &unmarked[..], &unmarked[..]),
        (r#""temperature":0"#, &greedy[..], &other_model[..]),
    ] {
        let cluster = FakeCluster::new();
        let (dying, _) = counting(&cluster, first, 3);
        let gateway = cluster.gateway(|config| config.worker_wait = Duration::from_millis(50)).await;
        let (client, seen) = begun(&gateway, &body(extra), 3).await;
        let (other, _) = counting(&cluster, second, FREE);
        until("both are known", || cluster.count("worker") == 2).await;
        dying.die();
        let response = rest(client, seen).await;
        assert!(!response.whole && !response.body.contains("[DONE]"), "{extra}: {}", response.body);
        assert!(response.events().last().unwrap().contains("lost in the middle"), "{extra}: {}", response.body);
        assert_eq!(other.asked(), 0, "{extra}");
    }
}

#[tokio::test]
async fn test_s4_a_sampled_stream_goes_on_where_workers_draw_by_position() {
    let any = [("continue", "any"), ("fingerprint", "f1")];
    let extra = r#""temperature":1,"seed":7"#;
    let expected = undisturbed(extra).await;
    let cluster = FakeCluster::new();
    let (dying, _) = counting(&cluster, &any, 6);
    let gateway = cluster.gateway(|_| {}).await;
    let (client, seen) = begun(&gateway, &body(extra), 6).await;
    counting(&cluster, &any, FREE);
    dying.die();
    assert_eq!(comparable(&rest(client, seen).await), expected);
}

#[tokio::test]
async fn test_s4_text_without_tokens_cannot_be_gone_on_with() {
    let cluster = FakeCluster::new();
    let mut metadata = vec![("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready")];
    metadata.extend_from_slice(&ALIKE);
    let dying = cluster.worker_with("worker", &metadata, |ask: Ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        let stream = ask.responder.stream();
        send(&stream, vec![common::text("w0 ")]).await;
        until("cancelled", || cancel.is_cancelled()).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let (client, seen) = begun(&gateway, &body(r#""temperature":0"#), 1).await;
    let (other, _) = counting(&cluster, &ALIKE, FREE);
    dying.die();
    let response = rest(client, seen).await;
    assert!(!response.whole && response.body.contains("lost in the middle"), "{}", response.body);
    assert_eq!(other.asked(), 0);
}

#[tokio::test]
async fn test_s4_a_stream_that_lacks_only_its_end_is_complete() {
    let cluster = FakeCluster::new();
    let mut metadata = vec![("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready")];
    metadata.extend_from_slice(&ALIKE);
    let dying = cluster.worker_with("worker", &metadata, |ask: Ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        let stream = ask.responder.stream();
        let piece =
            Delta { text: "w0 ".into(), token_ids: vec![0], finish_reason: "length".into(), ..Delta::default() };
        send(&stream, vec![piece]).await;
        until("cancelled", || cancel.is_cancelled()).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let (client, seen) = begun(&gateway, &body(r#""temperature":0"#), 1).await;
    dying.die();
    let response = rest(client, seen).await;
    assert!(response.whole && response.body.ends_with("data: [DONE]\n\n"), "{}", response.body);
}
