//! Streams of engine servers that break, and go on on another engine (S4).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::engine::{Engine, Turn};
use common::story::{
    ALIKE, FREE, GREEDY, Script, USAGE, VLLM, WORDS, chat, completion, engine, events, join, serve, words,
};
use common::{Client, FakeCluster, FakeWorker, Response, get, post, until};
use pulsing_gateway::{Gateway, PolicyKind};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

/// Two engines of this script in front of a Router.
async fn two(script: Script, metadata: &[(&str, &str)]) -> (Gateway, [Arc<Engine>; 2], FakeCluster) {
    let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
    let engines = [engine(script, &streams).await, engine(script, &streams).await];
    for one in &engines {
        join(one, &cluster, metadata);
    }
    let gateway = cluster.gateway(|config| config.worker_wait = Duration::from_millis(50)).await;
    (gateway, engines, cluster)
}

async fn ask(script: Script, metadata: &[(&str, &str)], body: &str) -> (Response, String) {
    let (gateway, _engines, _cluster) = two(script, metadata).await;
    let path = if body.contains("\"prompt\"") { "/v1/completions" } else { "/v1/chat/completions" };
    let response = post(&gateway, path, body).await;
    (response, get(&gateway, "/metrics").await.body)
}

/// Wherever the stream is cut, the client gets what it gets if nothing happens, byte for byte.
async fn wherever_it_is_cut(script: Script, metadata: &[(&str, &str)], body: &str) {
    let (expected, _) = ask(script, metadata, body).await;
    assert!(expected.whole && expected.body.ends_with("data: [DONE]\n\n"), "{body}: {}", expected.body);
    let count = expected.events().len();
    for cut in 1..count {
        let (response, metrics) = ask(Script { cut, ..script }, metadata, body).await;
        assert!(response.whole, "{body}, cut at {cut}: {}", response.body);
        assert_eq!(response.body, expected.body, "{body}, cut at {cut}");
        assert!(metrics.contains("pulsing_router_resumed_streams_total 1"), "{cut}: {metrics}");
        assert!(metrics.contains("pulsing_router_broken_streams_total 0"), "{cut}: {metrics}");
        assert!(metrics.contains("pulsing_router_in_flight 0"), "{cut}: {metrics}");
    }
}

#[tokio::test]
async fn test_s4_a_greedy_stream_of_an_engine_goes_on_on_another_one_wherever_it_is_cut() {
    for extra in [
        GREEDY.to_owned(),
        USAGE.to_owned(),
        format!(r#"{USAGE},"max_tokens":5"#),
        format!(r#"{USAGE},"max_tokens":50,"max_completion_tokens":4,"top_p":0.5,"frequency_penalty":0.0,"n":1"#),
        format!(r#"{USAGE},"stop":"w4""#),
    ] {
        wherever_it_is_cut(VLLM, &ALIKE, &chat(&extra)).await;
    }
}

#[tokio::test]
async fn test_s4_a_greedy_text_completion_goes_on_too() {
    for most in [4, 30] {
        wherever_it_is_cut(VLLM, &ALIKE, &completion(&format!(r#"{USAGE},"max_tokens":{most}"#))).await;
    }
}

#[tokio::test]
async fn test_s4_an_engine_that_names_the_speaker_with_every_piece_is_understood() {
    let script = Script { talks: true, cut: 3, ..VLLM };
    let (response, _) = ask(script, &ALIKE, &chat(USAGE)).await;
    assert!(response.whole, "{}", response.body);
    let events: Vec<Value> = response
        .events()
        .iter()
        .filter(|event| *event != "[DONE]")
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let said = |key: &str| {
        let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"][key].as_str());
        deltas.collect::<Vec<_>>().concat()
    };
    assert_eq!(said("content"), words(0..WORDS));
    assert_eq!(said("role"), "assistant".repeat(3), "once a piece before the seam, and not again behind it");
}

#[tokio::test]
async fn test_s4_sglang_is_asked_for_the_tokens_of_the_text_alone() {
    let script = Script { profile: "sglang", ..VLLM };
    let metadata = [("continue", "sglang")];
    for extra in [GREEDY.to_owned(), USAGE.to_owned(), format!(r#"{GREEDY},"max_tokens":5,"stop":"x""#)] {
        wherever_it_is_cut(script, &metadata, &chat(&extra)).await;
    }
    // What is out may be a part of this one: "w2 " and "w3".
    let (response, _) = ask(Script { cut: 4, ..script }, &metadata, &chat(&format!(r#"{GREEDY},"stop":"2 w9""#))).await;
    assert!(!response.whole && response.body.contains("lost in the middle"), "{}", response.body);
}

#[tokio::test]
async fn test_s4_an_sglang_that_does_not_tell_tokens_counts_what_it_is_sent() {
    let script = Script { profile: "sglang", tokenizes: false, ..VLLM };
    for extra in [
        GREEDY.to_owned(),
        USAGE.to_owned(),
        format!(r#"{GREEDY},"max_tokens":5"#),
        format!(r#"{USAGE},"max_completion_tokens":5,"min_tokens":2"#),
    ] {
        wherever_it_is_cut(script, &[("continue", "sglang")], &chat(&extra)).await;
    }
}

#[tokio::test]
async fn test_s4_a_text_that_cannot_be_read_back_is_known_by_its_own_tokens() {
    wherever_it_is_cut(Script { detokenizes: false, ..VLLM }, &ALIKE, &chat(USAGE)).await;
}

#[tokio::test]
async fn test_s4_where_no_vllm_answers_questions_its_answers_show_how_it_reads_prompt_and_text() {
    for detokenizes in [true, false] {
        let script = Script { tokenizes: false, detokenizes, ..VLLM };
        for extra in [GREEDY.to_owned(), format!(r#"{USAGE},"max_completion_tokens":5,"min_tokens":2"#)] {
            wherever_it_is_cut(script, &ALIKE, &chat(&extra)).await;
        }
        wherever_it_is_cut(script, &ALIKE, &completion(&format!(r#"{USAGE},"max_tokens":4"#))).await;
    }
}

#[tokio::test]
async fn test_s4_an_engine_that_does_not_tell_tokens_goes_on_by_those_of_another_one() {
    let (expected, _) = ask(VLLM, &ALIKE, &chat(USAGE)).await;
    let mut went_on = 0;
    // In turn: in one of the two orders it is the mute one that goes on.
    for order in [[0, 1], [1, 0]] {
        let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
        let mute = Script { cut: 4, tokenizes: false, detokenizes: false, ..VLLM };
        let engines = [engine(mute, &streams).await, engine(Script { cut: 4, ..VLLM }, &streams).await];
        for at in order {
            join(&engines[at], &cluster, &ALIKE);
        }
        let gateway = cluster.gateway(|config| config.policy = PolicyKind::RoundRobin).await;
        let response = post(&gateway, "/v1/chat/completions", &chat(USAGE)).await;
        assert_eq!(response.body, expected.body);
        went_on += usize::from(engines[0].last().body.contains("\"continue_final_message\":true"));
    }
    assert_eq!(went_on, 1);
}

#[tokio::test]
async fn test_s4_a_stream_that_is_written_anew_goes_on_too() {
    let metadata = [ALIKE[0], ALIKE[1], ("normalize", "vllm")];
    let comparable = |response: &Response| {
        let strip = |event: &String| match serde_json::from_str::<Value>(event) {
            Ok(mut event) => {
                event["id"] = Value::Null;
                event["created"] = Value::Null;
                event
            }
            Err(_) => Value::from(event.as_str()),
        };
        response.events().iter().map(strip).collect::<Vec<_>>()
    };
    for extra in [USAGE.to_owned(), format!(r#"{USAGE},"max_tokens":5"#)] {
        let (expected, _) = ask(VLLM, &metadata, &chat(&extra)).await;
        for cut in 1..=WORDS {
            let (response, _) = ask(Script { cut, ..VLLM }, &metadata, &chat(&extra)).await;
            assert!(response.whole, "{cut}: {}", response.body);
            assert_eq!(comparable(&response), comparable(&expected), "{cut}");
        }
    }
}

#[tokio::test]
async fn test_s4_an_engines_stream_survives_one_engine_after_the_other() {
    let cluster = FakeCluster::new();
    let streams = Arc::new(AtomicUsize::new(0));
    let served = Arc::clone(&streams);
    // Each breaks after two more words, but for the fourth.
    let engine = Engine::start(move |mut turn: Turn| {
        let streams = Arc::clone(&served);
        async move {
            if turn.seen.head.contains("tokenize") {
                return serve(turn, VLLM, streams).await;
            }
            let number = streams.fetch_add(1, Ordering::SeqCst);
            let events = events(VLLM, &serde_json::from_str(&turn.seen.body).unwrap(), number);
            turn.begin().await;
            for event in events.iter().take(if number < 3 { 3 } else { FREE }) {
                turn.chunk(event.as_bytes()).await;
            }
            if number < 3 { None } else { turn.end().await }
        }
    })
    .await;
    join(&engine, &cluster, &ALIKE);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", &chat(USAGE)).await;
    let (expected, _) = ask(VLLM, &ALIKE, &chat(USAGE)).await;
    assert_eq!(response.body, expected.body);
    assert_eq!(streams.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn test_s4_an_engine_that_hangs_over_a_question_about_tokens_is_passed_over() {
    let (cluster, streams, questions) =
        (FakeCluster::new(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    for _ in 0..2 {
        let (streams, questions) = (Arc::clone(&streams), Arc::clone(&questions));
        let engine = Engine::start(move |turn: Turn| {
            let (streams, questions) = (Arc::clone(&streams), Arc::clone(&questions));
            async move {
                if turn.seen.head.contains("tokenize") && questions.fetch_add(1, Ordering::SeqCst) == 0 {
                    turn.gone().await;
                    return None;
                }
                serve(turn, Script { cut: 4, ..VLLM }, streams).await
            }
        })
        .await;
        join(&engine, &cluster, &ALIKE);
    }
    let gateway = cluster.gateway(|config| config.worker_standstill = Duration::from_millis(200)).await;
    let response = post(&gateway, "/v1/chat/completions", &chat(USAGE)).await;
    let (expected, _) = ask(VLLM, &ALIKE, &chat(USAGE)).await;
    assert_eq!(response.body, expected.body);
}

#[tokio::test]
async fn test_s5_the_rest_of_a_stream_is_taken_back_only_where_another_one_can_go_on_with_it() {
    let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
    let dying = engine(Script { cut: 4, ..VLLM }, &streams).await;
    join(&dying, &cluster, &ALIKE);
    let gateway = cluster.gateway(|config| config.take_back = Duration::from_millis(10)).await;
    dying.stop_listening();
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &chat(USAGE)).await;
    assert_eq!(client.head().await.0, 200);
    let hung: Arc<OnceLock<Arc<FakeWorker>>> = Arc::default();
    let (known, served) = (Arc::clone(&hung), Arc::clone(&streams));
    // It falls silent with the rest of the stream on it, and comes back if nobody has given it up.
    let slow = Engine::start(move |mut turn: Turn| {
        let (hung, streams) = (Arc::clone(&known), Arc::clone(&served));
        async move {
            if !turn.seen.head.contains("tokenize") {
                hung.get().unwrap().report(|report| report.answer_age_ms = 60_000);
                let mut byte = [0];
                let left = tokio::time::timeout(Duration::from_millis(800), turn.stream.read(&mut byte)).await;
                assert!(left.is_err(), "taken back for somebody who cannot go on with it");
            }
            serve(turn, VLLM, streams).await
        }
    })
    .await;
    hung.get_or_init(|| join(&slow, &cluster, &ALIKE));
    let other = engine(VLLM, &streams).await;
    join(&other, &cluster, &[ALIKE[0], ("fingerprint", "vllm 2 root")]);
    let mut body = String::new();
    while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
        body.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
}

#[tokio::test]
async fn test_s4_events_without_data_are_no_reason_not_to_go_on() {
    let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..2 {
        let streams = Arc::clone(&streams);
        let engine = Engine::start(move |mut turn: Turn| {
            let streams = Arc::clone(&streams);
            async move {
                if turn.seen.head.contains("tokenize") {
                    return serve(turn, VLLM, streams).await;
                }
                let number = streams.fetch_add(1, Ordering::SeqCst);
                turn.begin().await;
                let events = events(VLLM, &serde_json::from_str(&turn.seen.body).unwrap(), number);
                for event in events.iter().take(if number == 0 { 4 } else { FREE }) {
                    turn.chunk(format!(": ping\r\n\r\ndata:\r\n\r\n{}", event.replace('\n', "\r\n")).as_bytes()).await;
                }
                if number == 0 { None } else { turn.end().await }
            }
        })
        .await;
        join(&engine, &cluster, &ALIKE);
    }
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", &chat(USAGE)).await;
    assert!(response.whole && response.body.ends_with("[DONE]\n\n"), "{}", response.body);
    assert_eq!(response.body.matches("\"content\":\"w").count(), WORDS, "{}", response.body);
}

#[tokio::test]
async fn test_s4_behind_half_of_a_huge_event_nobody_goes_on() {
    let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
    let served = Arc::clone(&streams);
    let engine = Engine::start(move |mut turn: Turn| {
        let streams = Arc::clone(&served);
        async move {
            if turn.seen.head.contains("tokenize") || streams.load(Ordering::SeqCst) > 0 {
                return serve(turn, VLLM, streams).await;
            }
            streams.fetch_add(1, Ordering::SeqCst);
            turn.begin().await;
            turn.chunk(events(VLLM, &json!({}), 0)[0].as_bytes()).await;
            turn.chunk(format!("data: {{\"more\":\"{}", "x".repeat(3 << 20)).as_bytes()).await;
            None
        }
    })
    .await;
    join(&engine, &cluster, &ALIKE);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", &chat(USAGE)).await;
    assert!(response.body.contains("xxx"), "the client has a part of it");
    assert!(!response.whole && !response.body.contains("[DONE]"), "{}", &response.body[response.body.len() - 500..]);
    assert_eq!(streams.load(Ordering::SeqCst), 1, "nobody was asked to go on");
}

#[tokio::test]
async fn test_s4_an_engine_that_is_gone_is_not_asked_again() {
    let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
    let dying = engine(Script { cut: 4, ..VLLM }, &streams).await;
    join(&dying, &cluster, &ALIKE);
    let gateway = cluster.gateway(|_| {}).await;
    dying.stop_listening();
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &chat(USAGE)).await;
    assert_eq!(client.head().await.0, 200);
    let other = engine(VLLM, &streams).await;
    join(&other, &cluster, &ALIKE);
    let mut body = String::new();
    while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
        body.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
    assert_eq!(body.matches("\"id\":\"id-0\"").count(), WORDS + 3, "{body}");
    let asked = dying.seen.lock().iter().filter(|seen| !seen.head.contains("/chat/")).count();
    assert_eq!(asked, 0, "only who goes on is asked about tokens");
    until("it is suspected", || cluster.count("worker") == 2).await;
}

#[tokio::test]
async fn test_s4_where_going_on_would_not_be_sound_an_engines_stream_ends_with_an_error_and_a_cut() {
    let (cut, plain) = (Script { cut: 4, ..VLLM }, chat(USAGE));
    let metadata = |key: &'static str, value: &'static str| {
        ALIKE.iter().map(|(name, own)| (*name, if *name == key { value } else { own })).collect::<Vec<_>>()
    };
    let mut cases = vec![
        (cut, metadata("continue", ""), plain.clone()),
        (cut, metadata("continue", "greedy"), plain.clone()),
        (Script { trims: true, ..cut }, ALIKE.to_vec(), plain.clone()),
        (Script { strays: true, ..cut }, ALIKE.to_vec(), plain.clone()),
        (Script { tokenizes: false, shows: false, ..cut }, ALIKE.to_vec(), plain.clone()),
        (Script { tokenizes: false, trims: true, ..cut }, ALIKE.to_vec(), plain.clone()),
        (Script { tokenizes: false, detokenizes: false, trims: true, ..cut }, ALIKE.to_vec(), plain.clone()),
        (Script { detokenizes: false, trims: true, ..cut }, ALIKE.to_vec(), plain.clone()),
        (cut, [&ALIKE[..], &[("role", "prefill"), ("pd", "sequential")]].concat(), plain),
        (cut, ALIKE.to_vec(), completion(GREEDY)),
    ];
    for extra in [
        r#","temperature":0.7"#,
        r#","seed":7"#,
        r#","temperature":0,"tools":[{"type":"function"}]"#,
        r#","temperature":0,"response_format":{"type":"json_object"}"#,
        r#","temperature":0,"frequency_penalty":0.5"#,
        r#","temperature":0,"repetition_penalty":1.1"#,
        r#","temperature":0,"echo":true"#,
        r#","temperature":0,"include_stop_str_in_output":true"#,
        r#","temperature":0,"structured_outputs":{"choice":["a"]}"#,
        r#","temperature":0,"field_of_tomorrow":1"#,
    ] {
        cases.push((cut, ALIKE.to_vec(), chat(extra)));
    }
    for messages in [
        r#"[{"role":"user","content":"hi"},{"role":"assistant","content":"w0"}]"#,
        r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}]"#,
    ] {
        cases.push((cut, ALIKE.to_vec(), format!(r#"{{"messages":{messages},"stream":true{GREEDY}}}"#)));
    }
    for (script, metadata, body) in cases {
        let prefills = metadata.iter().any(|(_, value)| *value == "prefill");
        let (response, _) = ask(script, &metadata, &body).await;
        if prefills {
            // It has no other half, and never began.
            assert_eq!(response.status, 503, "{}", response.body);
            continue;
        }
        assert!(!response.whole && !response.body.contains("[DONE]"), "{body}: {}", response.body);
        let last = response.events().pop().unwrap();
        assert!(last.starts_with("{\"error\":") && last.contains("lost in the middle"), "{body}: {last}");
    }
}

#[tokio::test]
async fn test_s4_an_engine_of_another_kind_does_not_go_on() {
    for (key, value) in [("fingerprint", "vllm 2 root"), ("continue", "sglang"), ("model", "other")] {
        let (cluster, streams) = (FakeCluster::new(), Arc::new(AtomicUsize::new(0)));
        let script = Script { cut: 3, ..VLLM };
        let dying = engine(script, &streams).await;
        join(&dying, &cluster, &ALIKE);
        let gateway = cluster.gateway(|config| config.worker_wait = Duration::from_millis(50)).await;
        dying.stop_listening();
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", &chat(GREEDY)).await;
        assert_eq!(client.head().await.0, 200);
        let other = engine(VLLM, &streams).await;
        join(&other, &cluster, &[ALIKE[0], ALIKE[1], (key, value)]);
        let mut body = String::new();
        while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
            body.push_str(&String::from_utf8(chunk).unwrap());
        }
        assert!(body.contains("lost in the middle") && !body.contains("[DONE]"), "{key}: {body}");
        assert_eq!(other.asked(), 0, "{key}");
    }
}
