//! Workers that die, fail, refuse and hang up; clients that leave.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{CHAT, Client, FakeCluster, STREAM, answer, done, fail, get, hello, post, send, text, until};
use pulsing_core::Error;
use pulsing_gateway::protocol::Delta;

#[tokio::test]
async fn a_worker_that_dies_before_the_first_piece_costs_the_client_nothing() {
    let cluster = FakeCluster::new();
    let silent = cluster.worker(|ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        until("cancelled", || cancel.is_cancelled()).await;
        drop(ask);
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut clients = Vec::new();
    for body in [CHAT, STREAM, CHAT, STREAM] {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", body).await;
        clients.push(client);
    }
    until("all four are on the worker", || silent.asked() == 4).await;
    let other = cluster.worker(hello);
    silent.die();
    for mut client in clients {
        let response = client.response(true).await;
        assert_eq!((response.status, response.whole), (200, true), "{}", response.body);
    }
    assert_eq!(other.asked(), 4);
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("pulsing_router_retries_total{reason=\"lost\"} 4"), "{metrics}");
}

#[tokio::test]
async fn a_worker_that_dies_in_the_middle_ends_the_stream_with_an_error_and_a_cut() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        let stream = ask.responder.stream();
        send(&stream, vec![text("half")]).await;
        until("cancelled", || cancel.is_cancelled()).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", STREAM).await;
    until("it has begun", || worker.asked() == 1).await;
    let (status, _) = client.head().await;
    let first = client.chunk().await.unwrap();
    worker.die();
    let second = String::from_utf8(client.chunk().await.unwrap()).unwrap();
    assert_eq!(status, 200);
    assert!(String::from_utf8(first).unwrap().contains("half"));
    let error: serde_json::Value = serde_json::from_str(second.strip_prefix("data: ").unwrap().trim_end()).unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("lost"), "{error}");
    assert!(!second.contains("10.0.0"), "no internals: {second}");
    assert!(client.chunk().await.is_none(), "the body must not end as if it were whole");
}

#[tokio::test]
async fn a_worker_that_dies_before_an_unstreamed_answer_is_whole_costs_the_client_nothing() {
    let cluster = FakeCluster::new();
    let dying = cluster.worker(|ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        let stream = ask.responder.stream();
        let mut half = text("half of another answer");
        half.usage = Some(pulsing_gateway::protocol::Usage { prompt_tokens: 99, ..Default::default() });
        send(&stream, vec![half]).await;
        until("cancelled", || cancel.is_cancelled()).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", CHAT).await;
    let mut two = Client::connect(&gateway).await;
    two.post("/v1/completions", r#"{"model":"alias","prompt":["a","b"]}"#).await;
    until("all are on it", || dying.asked() == 3).await;
    let began = "pulsing_router_time_to_first_token_seconds_count 2";
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !get(&gateway, "/metrics").await.body.contains(began) {
        assert!(std::time::Instant::now() < end, "the halves do not arrive");
    }
    let other = cluster.worker(hello);
    dying.die();
    let expected = post(&gateway, "/v1/chat/completions", CHAT).await.json();
    let response = client.response(true).await;
    assert_eq!(response.status, 200, "{}", response.body);
    for key in ["choices", "usage"] {
        assert_eq!(response.json()[key], expected[key]);
    }
    let response = two.response(true).await.json();
    assert_eq!(response["choices"].as_array().map(Vec::len), Some(2), "{response}");
    assert_eq!(response["choices"][1]["text"], expected["choices"][0]["message"]["content"]);
    assert_eq!(other.asked(), 4);
}

#[tokio::test]
async fn an_unstreamed_request_that_kills_its_workers_goes_to_no_more_than_the_limit() {
    let cluster = FakeCluster::new();
    let gateway = cluster.gateway(|config| config.max_attempts = 3).await;
    let mut client = Client::connect(&gateway).await;
    let mut workers = Vec::new();
    for turn in 0..4 {
        workers.push(cluster.worker(|ask| async move {
            let cancel = ask.responder.cancel_signal().clone();
            let stream = ask.responder.stream();
            send(&stream, vec![text("half")]).await;
            until("cancelled", || cancel.is_cancelled()).await;
        }));
        if turn == 0 {
            until_ready(&gateway).await;
            client.post("/v1/chat/completions", CHAT).await;
        }
        if turn < 3 {
            until("it is on the worker", || workers[turn].asked() == 1).await;
            workers[turn].die();
        }
    }
    let response = client.response(true).await;
    let asked = workers.iter().map(|worker| worker.asked()).sum::<usize>();
    assert_eq!((response.status, response.headers["x-should-retry"].as_str(), asked), (502, "false", 3));
    assert!(response.body.contains("3 times a worker was lost"), "{}", response.body);
}

async fn until_ready(gateway: &pulsing_gateway::Gateway) {
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while get(gateway, "/ready").await.status != 200 {
        assert!(std::time::Instant::now() < end, "no worker becomes ready");
    }
}

#[tokio::test]
async fn a_workers_4xx_goes_to_the_client_as_it_is() {
    let cluster = FakeCluster::new();
    let workers =
        [400, 400].map(|code| cluster.worker(move |ask| async move { fail(ask.responder, code, "too long") }));
    let gateway = cluster.gateway(|_| {}).await;
    for body in [CHAT, STREAM] {
        let response = post(&gateway, "/v1/chat/completions", body).await;
        let error = response.json();
        assert_eq!((response.status, error["error"]["message"].as_str()), (400, Some("too long")));
        assert!(!response.headers.contains_key("x-should-retry"));
    }
    assert_eq!(workers.iter().map(|worker| worker.asked()).sum::<usize>(), 2, "never retried");
}

#[tokio::test]
async fn a_request_that_fails_on_two_workers_is_returned_and_taken_no_further() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> =
        (0..4).map(|_| cluster.worker(|ask| async move { fail(ask.responder, 500, "poison") })).collect();
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!((response.status, response.headers["x-should-retry"].as_str()), (500, "false"));
    assert_eq!(response.json()["error"]["message"], "poison");
    let asked: Vec<usize> = workers.iter().map(|worker| worker.asked()).collect();
    assert_eq!(asked.iter().sum::<usize>(), 2, "{asked:?}");
    assert!(asked.iter().all(|count| *count <= 1), "{asked:?}");
    assert_eq!(get(&gateway, "/ready").await.status, 200, "the workers are not blamed");
}

#[tokio::test]
async fn one_failure_is_made_good_by_another_worker() {
    let cluster = FakeCluster::new();
    let bad = cluster.worker(|ask| async move { fail(ask.responder, 500, "oops") });
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!((response.status, response.headers["x-should-retry"].as_str()), (500, "false"), "nobody else to try");
    cluster.worker(hello);
    for _ in 0..4 {
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while post(&gateway, "/v1/chat/completions", CHAT).await.status != 200 {
            assert!(std::time::Instant::now() < end, "the new worker is not used");
        }
    }
    assert!(bad.asked() >= 1);
}

#[tokio::test]
async fn a_worker_that_is_not_ready_passes_the_request_on() {
    let cluster = FakeCluster::new();
    let draining = cluster.worker(|ask| async move { fail(ask.responder, 503, "I am leaving") });
    let ready = cluster.worker(hello);
    // Full, so that the leaving one is tried first.
    ready.report(|load| load.running = 4);
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..3 {
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    }
    assert!(draining.asked() >= 1);
    cluster.remove(&ready);
    until("the worker is forgotten", || cluster_has(&cluster, 1)).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(response.status, 503);
    assert!(message.starts_with("No available workers") && message.contains("I am leaving"), "{message}");
}

fn cluster_has(cluster: &FakeCluster, count: usize) -> bool {
    cluster.count("worker") == count
}

#[tokio::test]
async fn a_worker_that_comes_back_within_the_wait_serves_the_request() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.worker_wait = Duration::from_secs(5)).await;
    worker.die();
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", CHAT).await;
    let metrics = || get(&gateway, "/metrics");
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !metrics().await.body.contains("pulsing_router_workers{state=\"unreachable\"} 1") {
        assert!(std::time::Instant::now() < end, "the loss is not seen");
    }
    worker.revive();
    assert_eq!(client.response(true).await.status, 200);
}

#[tokio::test]
async fn without_a_worker_the_503_says_what_there_is() {
    let cluster = FakeCluster::new();
    cluster.worker_with("system/python_actor_service", &[("kind", "actor")], hello);
    let gateway = cluster.gateway(|config| config.worker_name = "gpu".into()).await;
    let message = post(&gateway, "/v1/chat/completions", CHAT).await.body;
    assert!(message.contains("start a worker with --seeds"), "what each node has is nobody's worker: {message}");
    cluster.worker_with("my-llm", &[("kind", "router")], hello);
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!((response.status, response.headers.contains_key("retry-after")), (503, true));
    for part in ["No available workers", "\"gpu\"", "Names in the cluster: my-llm (router)."] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert_eq!(get(&gateway, "/ready").await.status, 503);
    assert_eq!(get(&gateway, "/health").await.status, 200);
    assert_eq!(get(&gateway, "/health").await.json()["status"], "degraded");

    let loading = [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "loading")];
    let worker = cluster.worker_with("gpu", &loading, hello);
    worker.report(|load| load.detail = "40 % of weights".into());
    cluster.worker_with("gpu", &[("kind", "worker"), ("protocol", "2..3")], hello);
    cluster.worker_with("gpu", &[("kind", "router")], hello);
    let end = std::time::Instant::now() + Duration::from_secs(5);
    loop {
        let body = post(&gateway, "/v1/chat/completions", CHAT).await.json();
        let message = body["error"]["message"].as_str().unwrap().to_owned();
        if ["1 worker(s) loading (tiny: 40 % of weights)", "1 worker(s) incompatible", "no workers but router"]
            .iter()
            .all(|part| message.contains(part))
        {
            break;
        }
        assert!(std::time::Instant::now() < end, "{message}");
    }
    worker.report(|load| load.state = "ready".into());
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while post(&gateway, "/v1/chat/completions", CHAT).await.status != 200 {
        assert!(std::time::Instant::now() < end, "ready is not seen");
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_worker_at_every_stage() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask| async move {
        let begin = ask.body.windows(5).any(|window| window == b"begin");
        let cancel = ask.responder.cancel_signal().clone();
        if begin {
            let stream = ask.responder.stream();
            send(&stream, vec![text("x")]).await;
            until("cancelled", || cancel.is_cancelled()).await;
        } else {
            until("cancelled", || cancel.is_cancelled()).await;
            drop(ask.responder);
        }
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut expected = 0;
    for stream in ["false", "true"] {
        for stage in ["begin", "prefill"] {
            let body = format!(r#"{{"messages":[{{"content":"{stage}"}}],"stream":{stream}}}"#);
            let mut client = Client::connect(&gateway).await;
            client.post("/v1/chat/completions", &body).await;
            expected += 1;
            until("the worker has it", || worker.asked() == expected).await;
            drop(client);
            until("the worker is told", || worker.cancelled.load(Ordering::SeqCst) == expected).await;
        }
    }
    until("every place is free", || worker.active.load(Ordering::SeqCst) == 0).await;
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("pulsing_router_in_flight 0"), "{metrics}");
}

#[tokio::test]
async fn a_deadline_is_504_before_the_stream_and_an_error_event_in_it() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask| async move {
        let begin = ask.body.windows(5).any(|window| window == b"begin");
        let cancel = ask.responder.cancel_signal().clone();
        let hold = if begin {
            let stream = ask.responder.stream();
            send(&stream, vec![text("x")]).await;
            Ok(stream)
        } else {
            Err(ask.responder)
        };
        until("cancelled", || cancel.is_cancelled()).await;
        drop(hold);
    });
    let gateway = cluster.gateway(|config| config.request_timeout = Duration::from_millis(100)).await;
    let body = |stage: &str, stream: bool| format!(r#"{{"messages":[{{"content":"{stage}"}}],"stream":{stream}}}"#);
    for (stage, stream) in [("prefill", false), ("begin", false), ("prefill", true)] {
        let response = post(&gateway, "/v1/chat/completions", &body(stage, stream)).await;
        assert_eq!((response.status, response.headers["x-should-retry"].as_str()), (504, "false"), "{stage} {stream}");
    }
    let cut = post(&gateway, "/v1/chat/completions", &body("begin", true)).await;
    assert_eq!((cut.status, cut.whole), (200, false));
    assert!(cut.events().last().unwrap().contains("deadline_exceeded"), "{}", cut.body);
    until("every worker was told", || worker.cancelled.load(Ordering::SeqCst) == 4).await;
}

#[tokio::test]
async fn a_stream_that_ends_without_a_finish_reason_is_no_success() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| answer(ask, vec![text("half")]));
    let gateway = cluster.gateway(|_| {}).await;
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 502);
    let cut = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert!(!cut.whole && cut.events().last().unwrap().contains("\"error\""), "{}", cut.body);
    assert!(!cut.body.contains("[DONE]"));
}

#[tokio::test]
async fn a_choice_that_nobody_asked_for_is_an_error_that_names_it() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| answer(ask, vec![Delta { index: 1, ..text("a") }, done("stop")]));
    let gateway = cluster.gateway(|_| {}).await;
    let prompts = r#"{"model":"alias","prompt":["a","b"]}"#;
    for (path, body) in [("chat/completions", CHAT), ("chat/completions", STREAM), ("completions", prompts)] {
        let response = post(&gateway, &format!("/v1/{path}"), body).await;
        assert!(response.body.contains("answered choice 1 of a request for 1 choice(s)"), "{}", response.body);
    }
}

#[tokio::test]
async fn an_error_in_the_middle_is_the_workers_own() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| async move {
        let stream = ask.responder.stream();
        send(&stream, vec![text("half")]).await;
        stream.error(Error::App(Box::new(pulsing_core::AppError {
            type_name: "x.Y".into(),
            message: "out of memory".into(),
            code: 500,
            ..Default::default()
        })));
    });
    let gateway = cluster.gateway(|_| {}).await;
    let cut = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert!(!cut.whole && cut.events().last().unwrap().contains("out of memory"), "{}", cut.body);
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 500);
}

#[tokio::test]
async fn a_slow_reader_suspends_the_worker() {
    let cluster = FakeCluster::new();
    let sent = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = std::sync::Arc::clone(&sent);
    cluster.worker(move |ask| {
        let counter = std::sync::Arc::clone(&counter);
        async move {
            let stream = ask.responder.stream();
            let big = "x".repeat(32 * 1024);
            for _ in 0..2000 {
                if !send(&stream, vec![text(&big)]).await {
                    return;
                }
                counter.fetch_add(1, Ordering::SeqCst);
            }
            send(&stream, vec![done("stop")]).await;
            stream.end();
        }
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", STREAM).await;
    client.head().await;
    // Quiet once socket buffers and the stream's window are full.
    let mut last = usize::MAX;
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while last != sent.load(Ordering::SeqCst) {
        last = sent.load(Ordering::SeqCst);
        assert!(std::time::Instant::now() < end, "the worker never stops");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(last < 1500, "{last} pieces of 32 KB went nowhere");
    let rest = client.response_body().await;
    assert!(rest.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn places_cannot_leak_whenever_clients_leave() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..3)
        .map(|_| {
            cluster.worker(|ask| async move {
                tokio::task::yield_now().await;
                let stream = ask.responder.stream();
                for _ in 0..20 {
                    if !send(&stream, vec![text("x")]).await {
                        return;
                    }
                    tokio::task::yield_now().await;
                }
                send(&stream, vec![done("stop")]).await;
                stream.end();
            })
        })
        .collect();
    let gateway = cluster.gateway(|config| config.max_requests = 50).await;
    // A small generator of its own, so that a failure can be repeated.
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for round in 0..600 {
        let body = if round % 2 == 0 { CHAT } else { STREAM };
        let request =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        // One in three is cut in the middle of the request itself.
        let cut = if random(3) == 0 { random(request.len() as u64) as usize } else { request.len() };
        let mut client = Client::connect(&gateway).await;
        client.write(&request.as_bytes()[..cut]).await;
        for _ in 0..random(60) {
            tokio::task::yield_now().await;
        }
        drop(client);
    }
    until("every worker is idle", || workers.iter().all(|worker| worker.active.load(Ordering::SeqCst) == 0)).await;
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !get(&gateway, "/metrics").await.body.contains("pulsing_router_in_flight 0\n") {
        assert!(std::time::Instant::now() < end, "places are still taken");
    }
    assert!(workers.iter().any(|worker| worker.cancelled.load(Ordering::SeqCst) > 0), "nothing was cut in the middle");
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
}
