//! The HTTP surface, byte by byte.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{CHAT, Client, FakeCluster, STREAM, answer, done, get, hello, post, send, text, until};
use pulsing_gateway::protocol::{self, Deltas};
use serde_json::json;
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn a_chat_is_answered_whole_and_the_body_travels_untouched() {
    let cluster = FakeCluster::new();
    let bodies = std::sync::Arc::new(parking_lot::Mutex::new(Vec::new()));
    let seen = std::sync::Arc::clone(&bodies);
    cluster.worker(move |ask| {
        seen.lock().push((ask.generate.clone(), ask.body.clone()));
        hello(ask)
    });
    let gateway = cluster.gateway(|_| {}).await;
    let body = "{ \"model\":\"alias\", \"big\":12345678901234567890, \"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":null,\"x\":{\"y\":[1,2]} }";
    let response = post(&gateway, "/v1/chat/completions", body).await;
    assert_eq!((response.status, response.headers["content-type"].as_str()), (200, "application/json"));
    let value = response.json();
    assert_eq!(value["choices"][0]["message"]["content"], "Hé you");
    assert_eq!((&value["model"], &value["usage"]["total_tokens"]), (&json!("alias"), &json!(5)));
    let (generate, sent) = bodies.lock()[0].clone();
    assert_eq!(sent, body, "bit for bit");
    assert_eq!(
        (generate.api.as_str(), generate.request_id.as_str()),
        ("chat.completions", response.headers["x-request-id"].as_str())
    );
    assert!(generate.deadline_ms > 500_000);
}

#[tokio::test]
async fn s2_one_message_answers_for_a_stream_where_nobody_sees_a_part_and_nowhere_else() {
    let cluster = FakeCluster::new();
    let (told, mut wholes) = tokio::sync::mpsc::unbounded_channel();
    let worker = cluster.worker(move |ask| {
        told.send(ask.generate.whole).unwrap();
        async move {
            let deltas = vec![text("Hé"), text(" you"), done("stop")];
            ask.responder.value(protocol::payload(&Deltas { deltas }, None));
        }
    });
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let value = response.json();
    assert_eq!(value["choices"][0]["message"]["content"], "Hé you");
    assert_eq!((&value["choices"][0]["finish_reason"], &value["usage"]["total_tokens"]), (&json!("stop"), &json!(5)));
    let prompts = r#"{"model":"alias","prompt":["a","b"]}"#;
    let value = post(&gateway, "/v1/completions", prompts).await.json();
    let texts: Vec<_> = value["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["Hé you", "Hé you"], "{value}");
    until("the leases are given back", || worker.active.load(Ordering::SeqCst) == 0).await;
    // Who wants a stream has not said that it may be one message.
    assert_eq!(post(&gateway, "/v1/chat/completions", STREAM).await.status, 502);
    for whole in [true, true, true, false] {
        assert_eq!(wholes.recv().await, Some(whole));
    }
}

#[tokio::test]
async fn a_stream_is_role_text_finish_done_with_the_headers_proxies_need() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/chat/completions", STREAM).await;
    assert!(response.whole);
    for (name, value) in [
        ("content-type", "text/event-stream; charset=utf-8"),
        ("cache-control", "no-cache"),
        ("x-accel-buffering", "no"),
    ] {
        assert_eq!(response.headers[name], value);
    }
    assert!(!response.headers.contains_key("content-length"));
    let events = response.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<serde_json::Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let deltas: Vec<&serde_json::Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(
        deltas,
        [
            &json!({"role": "assistant", "content": ""}),
            &json!({"content": "Hé"}),
            &json!({"content": " you"}),
            &json!({})
        ]
    );
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["created"] == chunks[0]["created"]));
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn each_piece_reaches_the_client_when_it_is_there() {
    let cluster = FakeCluster::new();
    let (go, wait) = tokio::sync::watch::channel(0);
    cluster.worker(move |ask| {
        let mut wait = wait.clone();
        async move {
            let stream = ask.responder.stream();
            for step in 1..=3 {
                send(&stream, vec![text("x")]).await;
                wait.wait_for(|at| *at >= step).await.unwrap();
            }
            send(&stream, vec![done("stop")]).await;
            stream.end();
        }
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", STREAM).await;
    client.head().await;
    for step in 1..=3 {
        // Read before the worker is allowed to go on: nothing may wait for company.
        let chunk = String::from_utf8(client.chunk().await.unwrap()).unwrap();
        assert!(chunk.contains(r#""content":"x""#), "{step}: {chunk}");
        go.send_replace(step);
    }
    let rest = String::from_utf8(client.chunk().await.unwrap()).unwrap();
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(client.chunk().await.unwrap(), b"", "a clean end");
}

#[tokio::test]
async fn a_request_may_come_in_single_bytes_and_be_followed_by_others_at_once() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    let request =
        format!("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{STREAM}", STREAM.len());
    for byte in request.as_bytes() {
        client.write(&[*byte]).await;
    }
    assert_eq!(client.response(true).await.events().last().unwrap(), "[DONE]");
    // Pipelined: three requests in one write, three answers in order.
    let chat = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{CHAT}", CHAT.len());
    client.write(format!("{chat}GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n{request}").as_bytes()).await;
    assert_eq!(client.response(true).await.json()["object"], "chat.completion");
    assert_eq!(client.response(true).await.json()["object"], "list");
    assert_eq!(client.response(true).await.events().last().unwrap(), "[DONE]");
    // A chunked body, and no content type at all.
    let (one, two) = STREAM.split_at(20);
    client
        .write(format!("POST /v1/chat/completions/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{one}\r\n{:x}\r\n{two}\r\n0\r\n\r\n", one.len(), two.len()).as_bytes())
        .await;
    assert_eq!(client.response(true).await.events().last().unwrap(), "[DONE]");
}

#[tokio::test]
async fn get_routes_take_head_options_and_trailing_slashes() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.cors_origins = vec!["*".into()]).await;
    for path in [
        "/",
        "/health",
        "/ready",
        "/metrics",
        "/v1/models",
        "/v1/models/alias",
        "/health/",
        "/v1/models/",
        "/models",
        "/v1",
    ] {
        let response = get(&gateway, path).await;
        assert_eq!(response.status, 200, "{path}");
        let mut client = Client::connect(&gateway).await;
        client.write(format!("HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\nOPTIONS {path} HTTP/1.1\r\nHost: x\r\nOrigin: https://a\r\nAccess-Control-Request-Headers: authorization,x-y\r\n\r\n").as_bytes()).await;
        let head = client.response(false).await;
        assert_eq!((head.status, head.headers["content-length"] != "0"), (200, true), "{path}");
        let options = client.response(true).await;
        assert_eq!((options.status, options.body.as_str()), (204, ""), "{path}");
        assert_eq!(options.headers["access-control-allow-headers"], "authorization,x-y");
        assert_eq!(options.headers["access-control-allow-origin"], "*");
        assert!(options.headers["access-control-allow-methods"].contains("GET"));
    }
}

#[tokio::test]
async fn errors_are_json_with_a_request_id_whatever_went_wrong() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster
        .gateway(|config| {
            config.max_body = 1000;
            config.cors_origins = vec!["*".into()];
        })
        .await;
    let long = format!(r#"{{"messages":[{{}}],"x":"{}"}}"#, "y".repeat(2000));
    let cases = [
        ("GET", "/nope", "", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", "", 405, "method_not_allowed"),
        ("POST", "/v1/models", "{}", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", "{\"model\":", 400, ""),
        ("POST", "/v1/chat/completions", "[1]", 400, ""),
        ("POST", "/v1/completions", "{}", 400, ""),
        ("POST", "/v1/chat/completions", &long, 413, "request_too_large"),
        ("POST", "/v1/chat/completions", r#"{"model":"nope","messages":[{}]}"#, 404, "model_not_found"),
        ("GET", "/v1/models/nope", "", 404, "model_not_found"),
    ];
    for (method, path, body, status, code) in cases {
        let mut client = Client::connect(&gateway).await;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nx-request-id: mine-1\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        client.write(head.as_bytes()).await;
        let response = client.response(true).await;
        assert_eq!(response.status, status, "{method} {path}: {}", response.body);
        assert_eq!(response.headers["x-request-id"], "mine-1");
        assert_eq!(response.headers["content-type"], "application/json");
        assert_eq!(response.headers["access-control-allow-origin"], "*");
        let error = &response.json()["error"];
        assert!(error["message"].is_string() && error["type"] == "invalid_request_error", "{error}");
        assert_eq!(error["code"].as_str().unwrap_or(""), code);
        if status == 405 {
            assert!(response.headers["allow"].contains("OPTIONS"));
        }
    }
    let message = post(&gateway, "/v1/chat/completions", r#"{"model":"nope","messages":[{}]}"#).await.json();
    assert!(message["error"]["message"].as_str().unwrap().contains("alias, tiny"), "{message}");
}

#[tokio::test]
async fn a_body_that_is_announced_too_large_is_refused_before_it_is_sent() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.max_body = 1000).await;
    let mut client = Client::connect(&gateway).await;
    client
        .write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5000\r\n\r\n")
        .await;
    assert_eq!(client.response(true).await.status, 413);
}

#[tokio::test]
async fn s3_a_body_that_is_not_sent_as_it_is_is_refused_by_the_name_of_its_coding() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let chunked = format!("{:x}\r\n{CHAT}\r\n0\r\n\r\n", CHAT.len());
    let length = format!("content-length: {}", CHAT.len());
    let cases = [
        (format!("content-encoding: gzip\r\n{length}"), CHAT, 415, "Content-Encoding: gzip"),
        (format!("content-encoding: identity, br\r\n{length}"), CHAT, 415, "Content-Encoding: identity, br"),
        (format!("content-encoding: identity\r\n{length}"), CHAT, 200, ""),
        ("transfer-encoding: gzip, chunked".to_owned(), &chunked, 501, "Transfer-Encoding: gzip, chunked"),
        ("transfer-encoding: Chunked".to_owned(), &chunked, 200, ""),
        // Nothing of it is sent before the answer.
        (format!("expect: 100-continue\r\ncontent-encoding: gzip\r\n{length}"), "", 415, "gzip"),
    ];
    for (headers, body, status, words) in cases {
        let mut client = Client::connect(&gateway).await;
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n{body}");
        client.write(head.as_bytes()).await;
        let response = client.response(true).await;
        assert_eq!(response.status, status, "{headers}: {}", response.body);
        if status != 200 {
            let error = &response.json()["error"];
            assert_eq!(error["code"], "unsupported_encoding");
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        }
    }
}

#[tokio::test]
async fn an_oversized_head_is_refused_and_harms_nobody_else() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    let mut head = b"GET / HTTP/1.1\r\nhost: x\r\nx-long: ".to_vec();
    head.extend(std::iter::repeat_n(b'a', 500_000));
    // The server may answer and close while we still write.
    let _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, &head).await;
    assert_eq!(client.head().await.0, 431);
    assert_eq!(get(&gateway, "/health").await.status, 200);
}

#[tokio::test]
async fn a_body_that_stops_coming_is_408() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.body_timeout = Duration::from_millis(50)).await;
    let mut client = Client::connect(&gateway).await;
    client.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{").await;
    assert_eq!(client.response(true).await.status, 408);
}

#[tokio::test]
async fn several_prompts_and_several_choices_keep_their_places() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| async move {
        let prompt = serde_json::from_slice::<serde_json::Value>(&ask.body).unwrap()["prompt"].to_string();
        let stream = ask.responder.stream();
        for index in 0..2 {
            let piece = pulsing_gateway::protocol::Delta { index, ..text(&format!("{prompt}{index}")) };
            send(&stream, vec![piece, pulsing_gateway::protocol::Delta { index, ..done("length") }]).await;
        }
        stream.end();
    });
    let gateway = cluster.gateway(|_| {}).await;
    let body = r#"{"prompt":["a",  "b"],"n":2,"max_tokens":3}"#;
    let value = post(&gateway, "/v1/completions", body).await.json();
    let texts: Vec<&str> =
        value["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["\"a\"0", "\"a\"1", "\"b\"0", "\"b\"1"]);
    let indices: Vec<u64> =
        value["choices"].as_array().unwrap().iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let streamed = post(&gateway, "/v1/completions", &body.replace("\"n\"", "\"stream\":true,\"n\"")).await;
    assert!(streamed.whole);
    assert_eq!(streamed.body.matches("\"finish_reason\":\"length\"").count(), 4);
}

#[tokio::test]
async fn more_prompts_than_a_worker_takes_at_once_do_not_block_each_other() {
    let cluster = FakeCluster::new();
    let slot = std::sync::Arc::new(tokio::sync::Semaphore::new(1));
    cluster.worker(move |ask| {
        let slot = std::sync::Arc::clone(&slot);
        async move {
            let _slot = slot.acquire().await.unwrap();
            // More pieces than a stream's window: the worker waits for credit while it holds its only slot.
            answer(ask, (0..200).map(|_| text("x")).chain([done("stop")]).collect()).await;
        }
    });
    let gateway = cluster.gateway(|_| {}).await;
    let value = post(&gateway, "/v1/completions", r#"{"prompt":["a","b","c"]}"#).await.json();
    for choice in value["choices"].as_array().unwrap() {
        assert_eq!(choice["text"].as_str().unwrap().len(), 200);
    }
}

#[tokio::test]
async fn a_silent_stream_gets_comments_and_still_answers() {
    let cluster = FakeCluster::new();
    let (go, wait) = tokio::sync::watch::channel(false);
    cluster.worker(move |ask| {
        let mut wait = wait.clone();
        async move {
            wait.wait_for(|go| *go).await.unwrap();
            hello(ask).await;
        }
    });
    let gateway = cluster.gateway(|config| config.ping_interval = Duration::from_millis(30)).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", STREAM).await;
    let (status, headers) = client.head().await;
    assert_eq!((status, headers["content-type"].as_str()), (200, "text/event-stream; charset=utf-8"));
    for _ in 0..2 {
        assert_eq!(client.chunk().await.unwrap(), b": ping\n\n");
    }
    go.send_replace(true);
    let mut body = Vec::new();
    while let Some(chunk) = client.chunk().await.filter(|chunk| !chunk.is_empty()) {
        body.extend(chunk);
    }
    assert!(String::from_utf8(body).unwrap().ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_full_house_refuses_before_the_body_and_gives_places_back() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        let stream = ask.responder.stream();
        send(&stream, vec![text("x")]).await;
        until("the client has gone", || cancel.is_cancelled()).await;
    });
    let gateway = cluster.gateway(|config| config.max_requests = 2).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", STREAM).await;
        client.head().await;
        held.push(client);
    }
    let refused = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("overloaded")));
    assert!(refused.headers.contains_key("retry-after"));
    drop(held);
    until("both streams were cancelled", || worker.cancelled.load(Ordering::SeqCst) == 2).await;
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("pulsing_router_in_flight 0"), "{metrics}");
    assert!(metrics.contains("pulsing_router_rejected_total 1"), "{metrics}");
    assert!(metrics.contains("pulsing_router_disconnects_total 2"), "{metrics}");
}

#[tokio::test]
async fn s6_large_bodies_that_do_not_end_fill_no_memory_and_keep_no_small_ones_out() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.max_bodies = 1 << 20).await;
    let begun = async || {
        let mut client = Client::connect(&gateway).await;
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 60000000\r\n\r\n{";
        client.write(format!("{head}{}", " ".repeat(300 << 10)).as_bytes()).await;
        client
    };
    let mut all = Vec::new();
    for _ in 0..8 {
        all.push(begun().await);
    }
    let mut refused = 0;
    for client in &mut all {
        client.stream.shutdown().await.unwrap();
        let response = client.response(true).await;
        assert_eq!(response.headers["connection"], "close");
        match response.status {
            503 => assert_eq!(response.json()["error"]["code"], "overloaded", "{}", response.body),
            status => assert_eq!(status, 400, "{}", response.body),
        }
        refused += usize::from(response.status == 503);
    }
    assert!((5..8).contains(&refused), "{refused} of 8 times 300 KiB, where 1 MiB may be held");
    // Again, and nobody gives up: those that are held keep large ones out, and no small ones.
    let mut all = Vec::new();
    for _ in 0..8 {
        all.push(begun().await);
    }
    let long = CHAT.replace("hi", &"h".repeat(800 << 10));
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while post(&gateway, "/v1/chat/completions", &long).await.status != 503 {
        assert!(std::time::Instant::now() < end, "it is taken");
    }
    assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    drop(all);
    while post(&gateway, "/v1/chat/completions", &long).await.status != 200 {
        assert!(std::time::Instant::now() < end, "what was held is not given back");
    }
}

#[tokio::test]
async fn who_sends_slowly_takes_nobodys_place_in_the_house() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let gateway = cluster
        .gateway(|config| {
            config.max_requests = 2;
            config.max_receiving = 8;
        })
        .await;
    let mut slow = Vec::new();
    for _ in 0..7 {
        let mut client = Client::connect(&gateway).await;
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", CHAT.len());
        client.write(format!("{head}{}", &CHAT[..9]).as_bytes()).await;
        slow.push(client);
    }
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !get(&gateway, "/metrics").await.body.contains("pulsing_router_receiving 7\n") {
        assert!(std::time::Instant::now() < end, "they are not counted");
    }
    for _ in 0..4 {
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
    }
    // One more, and there is no place left before the door.
    let mut last = Client::connect(&gateway).await;
    last.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{").await;
    while !get(&gateway, "/metrics").await.body.contains("pulsing_router_receiving 8\n") {
        assert!(std::time::Instant::now() < end, "it is not counted");
    }
    let refused = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert!(refused.status == 503 && refused.body.contains("receives 8 requests"), "{}", refused.body);
    // All bodies at once: no more of them are in the house than it has places for, and each gets an answer.
    drop(last);
    for client in &mut slow {
        client.write(&CHAT.as_bytes()[9..]).await;
    }
    let mut served = 0;
    for mut client in slow {
        let response = client.response(true).await;
        assert!([200, 503].contains(&response.status), "{}", response.body);
        served += usize::from(response.status == 200);
    }
    assert!(served >= 2 && worker.asked() == 4 + served);
    while !get(&gateway, "/metrics").await.body.contains("pulsing_router_receiving 0\n") {
        assert!(std::time::Instant::now() < end, "places are still taken");
    }
}

#[tokio::test]
async fn a_body_that_comes_byte_by_byte_has_as_long_as_its_request() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.request_timeout = Duration::from_millis(100)).await;
    let mut client = Client::connect(&gateway).await;
    client.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{").await;
    assert_eq!(client.response(true).await.status, 408);
}

#[tokio::test]
async fn shutdown_lets_a_stream_finish_and_takes_nobody_new() {
    let cluster = FakeCluster::new();
    let (go, wait) = tokio::sync::watch::channel(false);
    cluster.worker(move |ask| {
        let mut wait = wait.clone();
        async move {
            let stream = ask.responder.stream();
            send(&stream, vec![text("x")]).await;
            wait.wait_for(|go| *go).await.unwrap();
            send(&stream, vec![done("stop")]).await;
            stream.end();
        }
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", STREAM).await;
    client.head().await;
    client.chunk().await.unwrap();
    let addr = gateway.addr();
    let closing = tokio::spawn(async move { gateway.shutdown(Duration::from_secs(5)).await });
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while tokio::net::TcpStream::connect(addr).await.is_ok() {
        assert!(std::time::Instant::now() < end, "still accepting");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(!closing.is_finished());
    go.send_replace(true);
    let rest = String::from_utf8(client.chunk().await.unwrap()).unwrap();
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    closing.await.unwrap();
}

#[tokio::test]
async fn what_outlasts_the_grace_period_ends_with_an_error() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        let stream = ask.responder.stream();
        send(&stream, vec![text("x")]).await;
        until("cancelled", || cancel.is_cancelled()).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut streamed = Client::connect(&gateway).await;
    streamed.post("/v1/chat/completions", STREAM).await;
    streamed.head().await;
    streamed.chunk().await.unwrap();
    let mut whole = Client::connect(&gateway).await;
    whole.post("/v1/chat/completions", CHAT).await;
    until("both are on the worker", || worker.asked() == 2).await;
    let closing = tokio::spawn(async move { gateway.shutdown(Duration::from_millis(50)).await });
    let last = String::from_utf8(streamed.chunk().await.unwrap()).unwrap();
    assert!(last.starts_with("data: {\"error\":") && last.contains("draining"), "{last}");
    assert!(streamed.chunk().await.is_none(), "the body must not end as if it were whole");
    let refused = whole.response(true).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("draining")));
    closing.await.unwrap();
}

#[tokio::test]
async fn a_taken_port_is_an_error_that_names_it() {
    let cluster = FakeCluster::new();
    let gateway = cluster.gateway(|_| {}).await;
    let config =
        pulsing_gateway::GatewayConfig { host: "127.0.0.1".into(), port: gateway.addr().port(), ..Default::default() };
    let error = pulsing_gateway::Gateway::start_on(std::sync::Arc::new(cluster), config).err().unwrap();
    assert!(error.to_string().contains(&gateway.addr().to_string()), "{error}");
}

#[test]
fn a_large_body_is_read_off_the_threads_that_membership_needs() {
    let started = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&started);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(move || {
            counted.fetch_add(1, Ordering::SeqCst);
        })
        .build()
        .unwrap();
    runtime.block_on(async {
        let cluster = FakeCluster::new();
        cluster.worker(hello);
        let gateway = cluster.gateway(|config| config.policy = pulsing_gateway::PolicyKind::RoundRobin).await;
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
        let before = started.load(Ordering::SeqCst);
        assert_eq!(post(&gateway, "/v1/chat/completions", CHAT).await.status, 200);
        assert_eq!(started.load(Ordering::SeqCst), before, "a small one is read where it arrives");
        let large = CHAT.replace("hi", &"\\n".repeat(600_000));
        assert_eq!(post(&gateway, "/v1/chat/completions", &large).await.status, 200);
        assert_eq!(started.load(Ordering::SeqCst), before + 1, "a large one on a thread of its own");
    });
}
