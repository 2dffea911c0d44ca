//! Streams of pairs whose decode half is lost in the middle (S4).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::engine::{Engine, Turn};
use common::story::{ALIKE, Script, USAGE, VLLM, chat, engine, events, join, serve};
use common::{Ask, Client, FakeCluster, Response, done, get, post, send, until};
use pulsing_gateway::protocol::{Delta, Usage};
use serde_json::{Value, json};
use tokio::net::TcpStream;

fn half<'a>(role: &'a str, pd: &'a str) -> Vec<(&'a str, &'a str)> {
    [&ALIKE[..], &[("role", role), ("pd", pd)]].concat()
}

/// Reads prompts, as vLLM hands them over or as SGLang meets its other half; what it was asked is seen in order.
async fn prefill() -> Arc<Engine> {
    Engine::start(|turn: Turn| async move {
        let asked: Value = serde_json::from_str(&turn.seen.body).unwrap();
        if turn.seen.head.contains("tokenize") {
            return serve(turn, VLLM, Arc::default()).await;
        }
        if asked["stream"] == true {
            // Its own stream is nobody's.
            return serve(turn, VLLM, Arc::new(AtomicUsize::new(9))).await;
        }
        let read = asked["messages"].as_array().unwrap().len();
        turn.json(&json!({"choices": [], "kv_transfer_params": {"read": read}}).to_string()).await
    })
    .await
}

/// Generates from what was read; `streams` counts those of all.
async fn decode(script: Script, streams: &Arc<AtomicUsize>) -> Arc<Engine> {
    let streams = Arc::clone(streams);
    Engine::start(move |turn: Turn| {
        let streams = Arc::clone(&streams);
        async move {
            let asked: Value = serde_json::from_str(&turn.seen.body).unwrap();
            if !turn.seen.head.contains("tokenize") && asked["bootstrap_room"].is_null() {
                let messages = asked["messages"].as_array().unwrap().len();
                assert_eq!(asked["kv_transfer_params"]["read"], messages, "what is gone on with was read");
            }
            serve(turn, script, streams).await
        }
    })
    .await
}

async fn undisturbed() -> Response {
    let cluster = FakeCluster::new();
    let one = engine(VLLM, &Arc::default()).await;
    join(&one, &cluster, &ALIKE);
    post(&cluster.gateway(|_| {}).await, "/v1/chat/completions", &chat(USAGE)).await
}

#[tokio::test]
async fn test_s4_a_stream_whose_decode_engine_is_lost_goes_on_on_another_pair_wherever_it_is_cut() {
    let expected = undisturbed().await;
    for pd in ["sequential", "concurrent"] {
        for cut in 1..expected.events().len() {
            let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
            let reads = prefill().await;
            let generate =
                [decode(Script { cut, ..VLLM }, &streams).await, decode(Script { cut, ..VLLM }, &streams).await];
            join(&reads, &cluster, &half("prefill", pd));
            for one in &generate {
                join(one, &cluster, &half("decode", pd));
            }
            let gateway = cluster.gateway(|_| {}).await;
            let response = post(&gateway, "/v1/chat/completions", &chat(USAGE)).await;
            assert_eq!((response.whole, response.body.as_str()), (true, expected.body.as_str()), "{pd}, {cut}");
            let metrics = get(&gateway, "/metrics").await.body;
            assert!(metrics.contains("pulsing_router_resumed_streams_total 1"), "{metrics}");
            assert!(metrics.contains("pulsing_router_in_flight 0"), "{metrics}");
        }
    }
}

#[tokio::test]
async fn test_s4_a_stream_of_a_pair_goes_on_on_a_whole_worker_and_one_of_a_whole_worker_on_a_pair() {
    let expected = undisturbed().await;
    for pair_first in [true, false] {
        let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
        let cut = Script { cut: 4, ..VLLM };
        let (reads, generates, all) = (prefill().await, decode(cut, &streams).await, engine(cut, &streams).await);
        let of_pair = || {
            [
                join(&reads, &cluster, &half("prefill", "sequential")),
                join(&generates, &cluster, &half("decode", "sequential")),
            ]
        };
        let whole = || join(&all, &cluster, &ALIKE);
        if pair_first {
            of_pair();
        } else {
            whole();
        }
        let gateway = cluster.gateway(|_| {}).await;
        (if pair_first { &generates } else { &all }).stop_listening();
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", &chat(USAGE)).await;
        assert_eq!(client.head().await.0, 200);
        if pair_first {
            whole();
        } else {
            of_pair();
        }
        let mut body = String::new();
        while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
            body.push_str(&String::from_utf8(chunk).unwrap());
        }
        assert_eq!(body, expected.body, "{pair_first}");
    }
}

#[tokio::test]
async fn test_s5_a_stream_whose_decode_engine_hangs_goes_on_on_another_pair() {
    let expected = undisturbed().await;
    let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
    let reads = prefill().await;
    let hung = Engine::start(|mut turn: Turn| async move {
        turn.begin().await;
        for event in &events(VLLM, &serde_json::from_str(&turn.seen.body).unwrap(), 0)[..4] {
            turn.chunk(event.as_bytes()).await;
        }
        turn.gone().await;
        None
    })
    .await;
    streams.store(1, Ordering::SeqCst);
    join(&reads, &cluster, &half("prefill", "sequential"));
    let silent = join(&hung, &cluster, &half("decode", "sequential"));
    let gateway = cluster.gateway(|config| config.worker_silence = Duration::from_millis(300)).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &chat(USAGE)).await;
    assert_eq!(client.head().await.0, 200);
    let other = decode(VLLM, &streams).await;
    join(&other, &cluster, &half("decode", "sequential"));
    silent.report(|report| report.answer_age_ms = 60_000);
    let mut body = String::new();
    while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
        body.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert_eq!(body, expected.body);
    until("its connection is closed", || hung.left.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn test_s4_a_prefill_half_that_dies_behind_its_part_costs_nothing() {
    let expected = undisturbed().await;
    for pd in ["sequential", "concurrent"] {
        let (cluster, gone) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
        let told = Arc::clone(&gone);
        let reads = Engine::start(move |mut turn: Turn| {
            let gone = Arc::clone(&told);
            async move {
                if !turn.seen.body.contains("\"stream\":true") {
                    return turn.json(r#"{"choices":[],"kv_transfer_params":{"read":1}}"#).await;
                }
                // It breaks off when the other half has begun to answer.
                turn.begin().await;
                until("the client has something", || gone.load(Ordering::SeqCst) == 1).await;
                None::<TcpStream>
            }
        })
        .await;
        let told = Arc::clone(&gone);
        let generates = Engine::start(move |mut turn: Turn| {
            let gone = Arc::clone(&told);
            async move {
                turn.begin().await;
                for (at, event) in events(VLLM, &serde_json::from_str(&turn.seen.body).unwrap(), 0).iter().enumerate() {
                    turn.chunk(event.as_bytes()).await;
                    if at == 2 {
                        until("the other half is gone", || gone.load(Ordering::SeqCst) == 2).await;
                    }
                }
                turn.end().await
            }
        })
        .await;
        let worker = join(&reads, &cluster, &half("prefill", pd));
        join(&generates, &cluster, &half("decode", pd));
        let gateway = cluster.gateway(|_| {}).await;
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", &chat(USAGE)).await;
        assert_eq!(client.head().await.0, 200);
        gone.store(1, Ordering::SeqCst);
        reads.stop_listening();
        cluster.remove(&worker);
        until("it is gone", || cluster.count("worker") == 1).await;
        gone.store(2, Ordering::SeqCst);
        let mut body = String::new();
        while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
            body.push_str(&String::from_utf8(chunk).unwrap());
        }
        assert_eq!(body, expected.body, "{pd}");
        assert_eq!(generates.asked(), 1, "{pd}");
    }
}

/// Reads what there is, and hands over how many words of the answer were among it.
async fn reading(ask: Ask) {
    let read = ask.generate.continue_tokens.len();
    let stream = ask.responder.stream();
    send(&stream, vec![Delta { handoff: vec![7, read as u8].into(), ..done("length") }]).await;
    stream.end();
}

/// Says `w0 w1 ...` from where the client is; stops before word `at` for ever.
async fn counting(ask: Ask, at: usize, hands: bool) {
    let done = ask.generate.continue_tokens.len();
    if hands {
        assert_eq!(&ask.generate.handoff[..], [7, done as u8], "what is gone on with was read");
    }
    let cancel = ask.responder.cancel_signal().clone();
    let stream = ask.responder.stream();
    for word in done..8 {
        if word == at {
            until("it is cancelled", || cancel.is_cancelled()).await;
            return;
        }
        let piece = Delta { text: format!("w{word} "), token_ids: vec![word as u32], ..Delta::default() };
        send(&stream, vec![piece]).await;
    }
    let usage = Usage { prompt_tokens: 3, completion_tokens: (8 - done) as u32, cached_tokens: 0 };
    send(&stream, vec![Delta { finish_reason: "stop".into(), usage: Some(usage), ..Delta::default() }]).await;
    stream.end();
}

#[tokio::test]
async fn test_s4_a_stream_whose_decode_worker_is_lost_or_hangs_goes_on_on_another_pair_or_a_whole_worker() {
    let words: String = (0..8).map(|at| format!("w{at} ")).collect();
    for (whole, hangs) in [(false, false), (true, false), (false, true)] {
        let cluster = FakeCluster::new();
        let metadata = |role: &'static str| {
            let mut all = vec![("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready")];
            all.extend([("continue", "greedy"), ("fingerprint", "f1")]);
            if role != "aggregated" {
                all.extend([("role", role), ("pd", "sequential")]);
            }
            all
        };
        let reads = cluster.worker_with("worker", &metadata("prefill"), reading);
        let dying = cluster.worker_with("worker", &metadata("decode"), |ask| counting(ask, 3, true));
        let gateway = cluster.gateway(|config| config.worker_silence = Duration::from_millis(400)).await;
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", &chat(USAGE)).await;
        assert_eq!(client.head().await.0, 200);
        let mut body = String::new();
        while !body.contains("w2 ") {
            body.push_str(&String::from_utf8(client.chunk().await.unwrap()).unwrap());
        }
        let role = if whole { "aggregated" } else { "decode" };
        let other = cluster.worker_with("worker", &metadata(role), move |ask| counting(ask, 99, !whole));
        until("it is known", || cluster.count("worker") == 3).await;
        if whole {
            reads.die();
        }
        if hangs {
            dying.hush(true);
        } else {
            dying.die();
        }
        while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
            body.push_str(&String::from_utf8(chunk).unwrap());
        }
        assert!(body.ends_with("data: [DONE]\n\n"), "{whole} {hangs}: {body}");
        let deltas = body.split("\n\n").filter_map(|event| {
            let event: Value = serde_json::from_str(event.strip_prefix("data: ")?).ok()?;
            Some(event["choices"][0]["delta"]["content"].as_str()?.to_owned())
        });
        assert_eq!(deltas.collect::<String>(), words, "{whole} {hangs}");
        assert!(body.contains("\"completion_tokens\":8"), "{whole} {hangs}: {body}");
        assert_eq!((other.asked(), reads.asked()), (1, if whole { 1 } else { 2 }), "{whole} {hangs}");
    }
}
