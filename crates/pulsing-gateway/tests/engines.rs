//! Engine servers behind the Router: what passes, what is retried, what is cut.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::engine::{Engine, Turn};
use common::{CHAT, Client, FakeCluster, STREAM, get, hello, post, until};
use pulsing_gateway::Served;
use tokio::net::TcpStream;

const ANSWER: &str = r#"{ "id":"e-1","model":"tiny", "choices":[{"index":0,"message":{"role":"assistant","content":"日本 \"usage\":"},"finish_reason":"stop"}],"big":12345678901234567890,"nothing":null,
 "usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}"#;
const EVENTS: &str = "data: {\"id\":\"e-1\",\"model\":\"tiny\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"日本\"},\"finish_reason\":null}]}\n\n\
    data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"odd\":1e400}\n\n\
    data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2,\"total_tokens\":7}}\n\ndata: [DONE]\n\n";

/// Streams or not, as the client wishes.
async fn good(turn: Turn) -> Option<TcpStream> {
    if turn.seen.body.contains("\"stream\":true") { turn.events(EVENTS).await } else { turn.json(ANSWER).await }
}

#[tokio::test]
async fn an_answer_passes_byte_for_byte_and_is_counted() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!((response.status, response.body.as_str()), (200, ANSWER));
    assert_eq!(response.headers["content-type"], "application/json");
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert_eq!((response.status, response.whole, response.body.as_str()), (200, true, EVENTS));
    assert_eq!(
        (response.headers["content-type"].as_str(), response.headers["x-engine"].as_str()),
        ("text/event-stream; charset=utf-8", "7")
    );
    assert_eq!(engine.connections.load(Ordering::SeqCst), 1, "the connection that was tried first serves all of them");
    let metrics = get(&gateway, "/metrics").await.body;
    for line in [
        "pulsing_router_tokens_total{kind=\"prompt\"} 10",
        "pulsing_router_tokens_total{kind=\"completion\"} 4",
        "pulsing_router_time_to_first_token_seconds_count 2",
        "pulsing_router_request_duration_seconds_count 2",
        "pulsing_router_in_flight 0",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

#[tokio::test]
async fn the_engine_sees_the_clients_bytes_and_its_own_models_name() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let odd = |model: &str| {
        format!(
            "{{\"z\":1 ,\"foo\":{{\"b\":[1,null],\"a\":1}},\"seed\":null,\n {model}\"messages\":[{{\"role\":\"user\",\"content\":\"\\u65e5\"}}], \
             \"big\":123456789012345678901234567890,\"f\":1.10 }}"
        )
    };
    for (sent, seen) in [
        ("\"model\":\"tiny\",", "\"model\":\"tiny\","),
        ("\"model\" : \"alias\" ,", "\"model\" : \"tiny\" ,"),
        ("\"model\":\"al\\u0069as\",", "\"model\":\"tiny\","),
        ("\"model\":null,", "\"model\":\"tiny\","),
    ] {
        assert_eq!(post(&gateway, "/v1/chat/completions", &odd(sent)).await.status, 200, "{sent}");
        assert_eq!(engine.last().body, odd(seen), "{sent}");
    }
    assert_eq!(post(&gateway, "/v1/chat/completions", &odd("")).await.status, 200);
    assert_eq!(engine.last().body, odd("").replacen('{', "{\"model\":\"tiny\",", 1));
    let several = r#"{"prompt":["a", "b"],"model":"alias"}"#;
    assert_eq!(post(&gateway, "/v1/completions", several).await.status, 200);
    assert_eq!(engine.last().body, several.replace("alias", "tiny"), "several prompts are not divided for an engine");
    assert!(engine.last().head.starts_with("POST /v1/completions HTTP/1.1\r\n"), "{}", engine.last().head);
    assert_eq!(post(&gateway, "/v1/chat/completions", &odd("\"model\":\"nope\",")).await.status, 404);
}

#[tokio::test]
async fn an_engine_is_told_the_model_that_a_public_name_chooses() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    let worker = engine.join(&cluster);
    worker.report(|load| load.models = vec!["tiny".into(), "lora:1".into()]);
    let gateway = cluster
        .gateway(|config| {
            config.models = vec![Served { model: Some("lora:1".into()), ..Served::new("mine", "worker") }]
        })
        .await;
    for (model, seen) in [("mine", "lora:1"), ("alias", "tiny"), ("lora:1", "lora:1"), ("tiny", "tiny")] {
        assert_eq!(post(&gateway, "/v1/chat/completions", &CHAT.replace("alias", model)).await.status, 200);
        assert_eq!(engine.last().body, CHAT.replace("alias", seen), "{model}");
    }
}

#[tokio::test]
async fn headers_that_concern_the_engine_reach_it_and_no_others() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    let worker = engine.join(&cluster);
    "Bearer engine-key".clone_into(&mut worker.authorization.lock());
    let gateway = cluster.gateway(|_| {}).await;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-length: {}\r\ncontent-type: text/plain\r\naccept: text/event-stream\r\n\
         authorization: Bearer client-key\r\nx-api-key: client-key\r\nx-custom: 7\r\nx-request-id: my-id\r\ncookie: c\r\naccept-encoding: gzip\r\n\
         connection: keep-alive, X-Hop\r\nx-hop: 1\r\nconnection: x-other, content-length\r\nx-other: 2\r\n\
         traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n{CHAT}",
        CHAT.len()
    );
    let mut client = Client::connect(&gateway).await;
    client.write(head.as_bytes()).await;
    let response = client.response(true).await;
    assert_eq!((response.status, response.headers["x-request-id"].as_str()), (200, "my-id"));
    let seen = engine.last();
    for (name, value) in [
        ("authorization", Some("Bearer engine-key")),
        ("content-type", Some("application/json")),
        ("accept", Some("text/event-stream")),
        ("x-custom", Some("7")),
        ("x-request-id", Some("my-id")),
        ("traceparent", Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
        ("host", engine.url.strip_prefix("http://")),
        ("x-api-key", None),
        ("cookie", None),
        ("accept-encoding", None),
        ("x-hop", None),
        ("x-other", None),
    ] {
        assert_eq!(seen.header(name), value, "{name}: {}", seen.head);
    }
}

#[tokio::test]
async fn what_an_engine_says_to_the_router_alone_reaches_no_client() {
    let cluster = FakeCluster::new();
    let headers = "content-type: application/json\r\nConnection: Keep-Alive, X-Hop\r\nx-hop: 1\r\nx-engine: 7\r\n";
    let engine = Engine::start(move |turn: Turn| turn.answer("200 OK", headers, ANSWER)).await;
    engine.join(&cluster);
    let response = post(&cluster.gateway(|_| {}).await, "/v1/chat/completions", CHAT).await;
    assert_eq!((response.status, response.headers["x-engine"].as_str()), (200, "7"));
    assert!(!response.headers.contains_key("x-hop"), "{:?}", response.headers);
}

#[tokio::test]
async fn a_clients_key_reaches_an_engine_whose_own_is_not_known() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\nauthorization: Bearer k\r\n\r\n",
        CHAT.len()
    );
    client.write(format!("{head}{CHAT}").as_bytes()).await;
    assert_eq!(client.response(true).await.status, 200);
    assert_eq!(engine.last().header("authorization"), Some("Bearer k"));
}

#[tokio::test]
async fn events_cut_anywhere_pass_unchanged() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|mut turn: Turn| async move {
        turn.begin().await;
        // Inside events, inside characters, with the chunk's own framing in pieces too.
        for piece in EVENTS.as_bytes().chunks(7) {
            turn.chunk(piece).await;
        }
        turn.write("0\r\n").await;
        turn.write("\r\n").await;
        Some(turn.stream)
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..3 {
        let response = post(&gateway, "/v1/chat/completions", STREAM).await;
        assert_eq!((response.whole, response.body.as_str()), (true, EVENTS));
    }
}

#[tokio::test]
async fn an_engine_that_dies_in_the_middle_ends_the_stream_with_an_error_and_a_cut() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|mut turn: Turn| async move {
        turn.begin().await;
        turn.chunk(b"data: {\"choices\":[{\"delta\":{\"content\":\"half\"}}]}\n\ndata: {\"choi").await;
        None
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert_eq!((response.status, response.whole), (200, false));
    let events = response.events();
    assert_eq!(events.len(), 2, "no half event goes out: {events:?}");
    let error: serde_json::Value = serde_json::from_str(&events[1]).unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("lost"), "{error}");
    assert!(!response.body.contains("127.0.0.1"), "no internals: {}", response.body);
}

#[tokio::test]
async fn a_stream_that_ends_before_its_answer_is_not_passed_as_whole() {
    let cluster = FakeCluster::new();
    let engine =
        Engine::start(|turn: Turn| turn.events("data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")).await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert!(!response.whole && response.body.contains("before the answer was complete"), "{}", response.body);
}

#[tokio::test]
async fn engines_that_fail_before_the_first_byte_cost_the_client_nothing() {
    let bad: [(&str, &str, &str); 5] = [
        ("503 Service Unavailable", "", "full"),
        ("502 Bad Gateway", "", "x"),
        ("500 Internal Server Error", "content-type: application/json\r\n", r#"{"error":{"message":"oops"}}"#),
        ("reset", "", ""),
        ("cut", "", ""),
    ];
    for (status, headers, body) in bad {
        let cluster = FakeCluster::new();
        let broken = Engine::start(move |mut turn: Turn| async move {
            match status {
                "reset" => None,
                "cut" => {
                    turn.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
                        .await;
                    None
                }
                _ => turn.answer(status, headers, body).await,
            }
        })
        .await;
        broken.join(&cluster);
        let healthy = Engine::start(good).await;
        // Loaded, so that the broken one is tried first.
        healthy.join(&cluster).report(|load| load.running = 3);
        let gateway = cluster.gateway(|_| {}).await;
        let response = post(&gateway, "/v1/chat/completions", CHAT).await;
        assert_eq!((response.status, response.body.as_str()), (200, ANSWER), "{status}");
        assert!(broken.asked() >= 1, "{status}");
        if status != "cut" {
            let response = post(&gateway, "/v1/chat/completions", STREAM).await;
            assert_eq!((response.status, response.body.as_str()), (200, EVENTS), "{status}");
        }
    }
}

#[tokio::test]
async fn a_dead_engine_passes_its_requests_to_an_actor() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn: Turn| async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        good(turn).await
    })
    .await;
    engine.join(&cluster);
    let actor = cluster.worker(hello);
    actor.report(|load| load.running = 4);
    let gateway = cluster.gateway(|_| {}).await;
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.body, ANSWER);
    engine.stop_listening();
    // Its connection is still open and serves one of these; the others find nobody to dial.
    let mut crowd = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", CHAT).await;
        crowd.push(client);
    }
    for mut client in crowd {
        assert_eq!(client.response(true).await.status, 200);
    }
    assert!(actor.asked() >= 3);
}

#[tokio::test]
async fn an_engine_that_this_router_cannot_reach_is_not_ready_and_says_why() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(good).await;
    engine.stop_listening();
    tokio::task::yield_now().await;
    // Nor does another test's, which may say nothing at all.
    let addr = engine.url.strip_prefix("http://").unwrap();
    assert!(tokio::net::TcpListener::bind(addr).await.is_err());
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let end = std::time::Instant::now() + Duration::from_secs(5);
    loop {
        let body = post(&gateway, "/v1/chat/completions", CHAT).await;
        assert_eq!(body.status, 503);
        if body.body.contains("this Router cannot connect to its engine:") {
            break;
        }
        assert!(std::time::Instant::now() < end, "{}", body.body);
    }
}

#[tokio::test]
async fn a_url_that_cannot_be_dialled_is_a_failed_worker_that_says_so() {
    let cluster = FakeCluster::new();
    let metadata = [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("url", "https://h:1")];
    cluster.worker_with("worker", &metadata, |_| async {});
    let gateway = cluster.gateway(|config| config.debug_routing = true).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert!(response.status == 503 && !response.body.contains("https://"), "{}", response.body);
    let page = get(&gateway, "/v1/_routing").await.body;
    assert!(page.contains("\"url\":\"https://h:1\""), "{page}");
}

#[tokio::test]
async fn a_kept_connection_that_the_engine_closed_costs_nothing() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn: Turn| async move {
        // As servers do whose keep-alive ends: answer, then close without a word.
        good(turn).await;
        None
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..20 {
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.body, ANSWER);
    }
    assert_eq!(engine.asked(), 20);
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("retries_total{reason=\"lost\"} 0"), "{metrics}");
}

#[tokio::test]
async fn a_kept_connection_that_closes_on_use_is_replaced_without_blame() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn: Turn| async move {
        // The second request on a connection finds it closing.
        if turn.engine.asked().is_multiple_of(2) { None } else { good(turn).await }
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..4 {
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.body, ANSWER);
    }
    assert!(get(&gateway, "/metrics").await.body.contains("retries_total{reason=\"lost\"} 0"));
}

#[tokio::test]
async fn a_client_that_leaves_closes_the_engines_connection_at_once() {
    for join in [Engine::join, Engine::join_from_afar] {
        let cluster = FakeCluster::new();
        let engine = Engine::start(|mut turn: Turn| async move {
            if turn.seen.body.contains("\"stream\":true") {
                turn.begin().await;
                turn.chunk(b"data: {}\n\n").await;
            }
            turn.gone().await;
            None
        })
        .await;
        join(&engine, &cluster);
        let gateway = cluster.gateway(|_| {}).await;
        for (count, body) in [CHAT, STREAM].into_iter().enumerate() {
            let mut client = Client::connect(&gateway).await;
            client.post("/v1/chat/completions", body).await;
            until("the engine has it", || engine.asked() == count + 1).await;
            if body == STREAM {
                client.head().await;
                client.chunk().await.unwrap();
            }
            drop(client);
            until("the engine sees it", || engine.left.load(Ordering::SeqCst) == count + 1).await;
        }
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while !get(&gateway, "/metrics").await.body.contains("pulsing_router_in_flight 0") {
            assert!(std::time::Instant::now() < end, "a place leaked");
        }
    }
}

#[tokio::test]
async fn an_engines_4xx_passes_as_it_is_and_other_shapes_are_wrapped_once() {
    for (body, seen) in [
        (
            r#"{"error": {"message":"too long","code":400,"x":null}}"#,
            r#"{"error": {"message":"too long","code":400,"x":null}}"#,
        ),
        (
            r#"{"detail":"Not that"}"#,
            r#"{"error":{"message":"Not that","type":"invalid_request_error","param":null,"code":null}}"#,
        ),
        ("plain", r#"{"error":{"message":"plain","type":"invalid_request_error","param":null,"code":null}}"#),
    ] {
        let cluster = FakeCluster::new();
        let engine = Engine::start(move |turn: Turn| turn.answer("422 Unprocessable Entity", "", body)).await;
        engine.join(&cluster);
        let other = Engine::start(move |turn: Turn| turn.answer("422 Unprocessable Entity", "", body)).await;
        other.join(&cluster);
        let gateway = cluster.gateway(|_| {}).await;
        for request in [CHAT, STREAM] {
            let response = post(&gateway, "/v1/chat/completions", request).await;
            assert_eq!((response.status, response.body.as_str()), (422, seen));
            assert_eq!(response.headers["content-type"], "application/json");
        }
        assert_eq!(engine.asked() + other.asked(), 2, "never retried");
    }
}

#[tokio::test]
async fn a_slow_engine_gets_pings_and_its_late_error_is_an_event() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|mut turn: Turn| async move {
        tokio::time::sleep(Duration::from_millis(80)).await;
        if turn.seen.body.contains("fail") {
            return turn.answer("400 Bad Request", "", "{\"error\":{\n\"message\":\"no\"}}").await;
        }
        turn.begin().await;
        turn.chunk(&EVENTS.as_bytes()[..40]).await;
        tokio::time::sleep(Duration::from_millis(80)).await;
        turn.chunk(&EVENTS.as_bytes()[40..]).await;
        turn.end().await
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|config| config.ping_interval = Duration::from_millis(20)).await;
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert!(response.whole && response.body.starts_with(": ping\n\n"), "{}", response.body);
    assert_eq!(response.body.replace(": ping\n\n", ""), EVENTS, "pings stand between events only");
    let response = post(&gateway, "/v1/chat/completions", &STREAM.replace("hi", "fail")).await;
    assert_eq!((response.status, response.whole), (200, false));
    assert_eq!(response.events(), ["{\"error\":{ \"message\":\"no\"}}"]);
}

#[tokio::test]
async fn leases_are_counted_and_a_mixed_fleet_shares_the_work() {
    let cluster = FakeCluster::new();
    let mut engines = Vec::new();
    for _ in 0..2 {
        let engine = Engine::start(|turn: Turn| async move {
            tokio::time::sleep(Duration::from_millis(30)).await;
            good(turn).await
        })
        .await;
        engine.join(&cluster);
        engines.push(engine);
    }
    let actor = cluster.worker(|ask| async move {
        tokio::time::sleep(Duration::from_millis(30)).await;
        hello(ask).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut clients = Vec::new();
    for number in 0..12 {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", if number % 2 == 0 { CHAT } else { STREAM }).await;
        clients.push(client);
    }
    for mut client in clients {
        let response = client.response(true).await;
        assert_eq!((response.status, response.whole), (200, true), "{}", response.body);
    }
    let counts = [engines[0].asked(), engines[1].asked(), actor.asked()];
    assert_eq!(counts, [4, 4, 4], "as many as each has room for");
    let several = r#"{"model":"alias","prompt":["a","b","c"]}"#;
    for _ in 0..6 {
        let response = post(&gateway, "/v1/completions", several).await;
        assert_eq!(response.status, 200, "{}", response.body);
    }
}

#[tokio::test]
async fn what_a_hung_engine_has_not_begun_is_taken_back_once_another_can_serve() {
    let cluster = FakeCluster::new();
    let hung = Engine::start(|turn: Turn| async move {
        turn.gone().await;
        None
    })
    .await;
    let worker = hung.join(&cluster);
    let gateway = cluster.gateway(|config| config.take_back = Duration::from_millis(50)).await;
    let mut clients = Vec::new();
    for body in [CHAT, STREAM] {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", body).await;
        clients.push(client);
    }
    until("it has both", || hung.asked() == 2).await;
    worker.report(|load| load.state = "failed".into());
    let healthy = Engine::start(good).await;
    healthy.join(&cluster);
    for (mut client, answer) in clients.into_iter().zip([ANSWER, EVENTS]) {
        assert_eq!(client.response(true).await.body, answer);
    }
    until("it knows that nobody waits", || hung.left.load(Ordering::SeqCst) == 2).await;
}

/// What engines stream that stray from the protocol: no role, text beside the reason, an odd reason, usage in the same
/// event, one id for two calls, CRLF, no `[DONE]`.
const STRAYING: &str = "event: message\r\ndata:{\"id\":\"a\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"日\"}}]}\r\n\r\n\
    data: {\"id\":\"b\",\"choices\":[{\"delta\":{\"content\":\"本\",\"tool_calls\":[{\"id\":\"x\",\"function\":{\"name\":\"f\",\"arguments\":{}}},{\"id\":\"x\",\"function\":{\"name\":\"g\",\"arguments\":\"{}\"}}]},\
    \"finish_reason\":\"eos_token\"}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n";

fn normalizing(engine: &Engine, cluster: &FakeCluster) {
    let metadata = [
        ("kind", "worker"),
        ("protocol", "1..1"),
        ("model", "tiny"),
        ("state", "ready"),
        ("url", engine.url.as_str()),
        ("normalize", "tgi"),
    ];
    cluster.worker_with("worker", &metadata, hello);
}

#[tokio::test]
async fn a_stream_that_strays_is_brought_into_form_however_it_is_cut() {
    for cut in (0..STRAYING.len()).step_by(7).chain([STRAYING.len()]) {
        let cluster = FakeCluster::new();
        let engine = Engine::start(move |mut turn: Turn| async move {
            turn.begin().await;
            for part in [&STRAYING.as_bytes()[..cut], &STRAYING.as_bytes()[cut..]] {
                if !part.is_empty() {
                    turn.chunk(part).await;
                }
            }
            turn.end().await
        })
        .await;
        normalizing(&engine, &cluster);
        let gateway = cluster.gateway(|_| {}).await;
        let asked = STREAM.replace("\"stream\":true", "\"stream\":true,\"stream_options\":{\"include_usage\":true}");
        let response = post(&gateway, "/v1/chat/completions", &asked).await;
        assert!(response.whole, "{}", response.body);
        let events = response.events();
        assert_eq!(events.iter().filter(|event| *event == "[DONE]").count(), 1);
        let chunks: Vec<serde_json::Value> =
            events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        assert_eq!(chunks[0]["choices"][0]["delta"], serde_json::json!({"role": "assistant", "content": ""}));
        let reasons: Vec<_> = chunks.iter().filter_map(|chunk| chunk["choices"][0]["finish_reason"].as_str()).collect();
        assert_eq!(reasons, ["stop"]);
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(text, "日本");
        let calls: Vec<_> =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
        assert_eq!((calls.len(), &calls[0]["index"], &calls[1]["index"]), (2, &0.into(), &1.into()));
        assert_ne!(calls[0]["id"], calls[1]["id"]);
        assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 7);
        assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["model"] == "alias"));
    }
}

#[tokio::test]
async fn a_normalized_stream_that_is_cut_is_an_error_and_not_an_answer() {
    let cluster = FakeCluster::new();
    let engine =
        Engine::start(|turn: Turn| async { turn.events(STRAYING.split_once("\r\n\r\n").unwrap().0).await }).await;
    normalizing(&engine, &cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert!(!response.whole && !response.body.contains("[DONE]"), "{}", response.body);
    assert!(response.events().last().unwrap().contains("\"error\""));
}

#[tokio::test]
async fn a_whole_answer_is_brought_into_form_too() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn: Turn| async {
        turn.json(r#"{"choices":[{"message":{"content":"a"},"finish_reason":"eos_token"},{"index":1,"message":{"content":"b"},"finish_reason":"length"}]}"#)
            .await
    })
    .await;
    normalizing(&engine, &cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let body = post(&gateway, "/v1/chat/completions", &CHAT.replace("\"model\"", "\"n\":2,\"model\"")).await.json();
    let reasons: Vec<_> = body["choices"].as_array().unwrap().iter().map(|choice| &choice["finish_reason"]).collect();
    assert_eq!(reasons, ["stop", "length"]);
    assert_eq!(body["object"], "chat.completion");
    let prompts = r#"{"model":"alias","prompt":["a","b"]}"#;
    assert_eq!(post(&gateway, "/v1/completions", prompts).await.json()["choices"][1]["finish_reason"], "length");
}
