//! What is told of requests to the outside: the access log, traces, metrics (S7).
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::engine::Engine;
use common::{CHAT, Client, FakeCluster, STREAM, fail, get, hello, post, post_with, send, text, until};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// A path that goes with the test.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        Self(std::env::temp_dir().join(format!("pulsing-log-{:032x}", rand::random::<u128>())))
    }
    fn lines(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
    async fn until(&self, count: usize) -> Vec<Value> {
        until("the log has them", || self.lines().len() >= count).await;
        self.lines()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[tokio::test]
async fn s7_each_request_leaves_one_line_without_anything_of_its_content() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let log = Place::new();
    let gateway = cluster
        .gateway(|config| {
            config.access_log = Some(log.0.display().to_string());
            config.api_key = Some("sk-secret".into());
        })
        .await;
    let headers = "x-api-key: sk-secret\r\nx-request-id: mine\r\n";
    for body in [CHAT, STREAM] {
        assert_eq!(post_with(&gateway, "/v1/chat/completions?key=sk-query", headers, body).await.status, 200);
    }
    post(&gateway, "/v1/chat/completions", CHAT).await;
    get(&gateway, "/health").await;
    let lines = log.until(4).await;
    for (line, stream) in lines.iter().zip([false, true]) {
        let line = line.as_object().unwrap();
        let text = |name: &str| line[name].as_str().unwrap().to_owned();
        assert_eq!((text("request_id").as_str(), text("key").as_str()), ("mine", "default"));
        assert_eq!((text("method").as_str(), text("path").as_str()), ("POST", "/v1/chat/completions"));
        assert_eq!((text("model"), text("worker")), ("alias".to_owned(), worker.id.to_string()));
        assert_eq!((&line["status"], text("outcome").as_str()), (&json!(200), "complete"));
        assert_eq!((&line["stream"], &line["retries"]), (&json!(stream), &json!(0)));
        assert_eq!((&line["prompt_tokens"], &line["completion_tokens"]), (&json!(3), &json!(2)));
        assert_eq!(line["bytes_in"], json!(if stream { STREAM.len() } else { CHAT.len() }));
        assert!(line["bytes_out"].as_u64().unwrap() > 100);
        let (first, all) = (line["ttft_ms"].as_f64().unwrap(), line["duration_ms"].as_f64().unwrap());
        assert!(0.0 < first && first <= all && all < 5000.0, "{first} {all}");
        assert!(text("time").ends_with('Z') && text("client") == "127.0.0.1");
    }
    assert_eq!((&lines[2]["status"], lines[2].get("key"), lines[2].get("model")), (&json!(401), None, None));
    assert_eq!((&lines[3]["path"], &lines[3]["status"]), (&json!("/health"), &json!(200)));
    let all = fs::read_to_string(&log.0).unwrap();
    for secret in ["sk-", "\"hi\"", "Hé", "messages"] {
        assert!(!all.contains(secret), "{secret}: {all}");
    }
}

#[tokio::test]
async fn s7_content_is_logged_where_it_is_asked_for_and_no_more_of_it() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let log = Place::new();
    let bad = r#"{"messages":"éé"}"#;
    let gateway = cluster
        .gateway(|config| {
            config.access_log = Some(log.0.display().to_string());
            // Within the first of the two letters.
            config.access_log_content = bad.find('é').unwrap() + 1;
            config.api_key = Some("sk-secret".into());
        })
        .await;
    let headers = "x-api-key: sk-secret\r\n";
    let mut said = Vec::new();
    for body in [CHAT, STREAM, bad] {
        said.push((body, post_with(&gateway, "/v1/chat/completions", headers, body).await.body));
    }
    let lines = log.until(3).await;
    for (line, (body, answer)) in lines.iter().zip(&said) {
        for (name, whole) in [("request", *body), ("answer", answer.as_str())] {
            let text = line[name].as_str().unwrap();
            assert!(whole.starts_with(text) && (13..=15).contains(&text.len()), "{name}: {text:?} of {whole:?}");
        }
    }
    assert_eq!(lines[2]["request"], json!(r#"{"messages":""#));
    get(&gateway, "/health").await;
    assert_eq!(log.until(4).await[3].get("request"), None);
    assert!(!fs::read_to_string(&log.0).unwrap().contains("sk-"));
    assert_eq!(fs::metadata(&log.0).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn s7_clients_that_leave_streams_that_break_and_retries_are_told() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(|ask| async move {
        let cancel = ask.responder.cancel_signal().clone();
        if ask.body.windows(4).any(|window| window == b"fail") {
            return fail(ask.responder, 500, "no");
        }
        let stream = ask.responder.stream();
        send(&stream, vec![text("x")]).await;
        if ask.body.windows(4).any(|window| window == b"hold") {
            return until("cancelled", || cancel.is_cancelled()).await;
        }
        stream.end();
    });
    let log = Place::new();
    let gateway = cluster.gateway(|config| config.access_log = Some(log.0.display().to_string())).await;
    let body = |what: &str, stream: bool| format!(r#"{{"messages":[{{"content":"{what}"}}],"stream":{stream}}}"#);
    post(&gateway, "/v1/chat/completions", &body("end", true)).await;
    assert_eq!((&log.until(1).await[0]["outcome"], &log.lines()[0]["status"]), (&json!("broken"), &json!(200)));
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &body("hold", true)).await;
    client.head().await;
    drop(client);
    let left = &log.until(2).await[1];
    assert_eq!((&left["outcome"], &left["status"]), (&json!("left"), &json!(200)));
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &body("hold", false)).await;
    until("the worker has it", || worker.asked() == 3).await;
    drop(client);
    let left = &log.until(3).await[2];
    assert_eq!((&left["outcome"], &left["status"]), (&json!("left"), &json!(499)));
    cluster.worker(hello);
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        post(&gateway, "/v1/chat/completions", &body("fail", false)).await;
        let count = log.lines().len();
        let line = log.until(count.max(4)).await.pop().unwrap();
        if line["retries"] == json!(1) {
            break;
        }
        assert!(Instant::now() < end, "{line}");
    }
    // Whoever rotates logs moves the file away.
    let moved = Place::new();
    fs::rename(&log.0, &moved.0).unwrap();
    while log.lines().is_empty() {
        get(&gateway, "/health").await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(Instant::now() < end + Duration::from_secs(5), "the log is written nowhere");
    }
    // What is written is written when the gateway has stopped.
    get(&gateway, "/ready").await;
    gateway.shutdown(Duration::from_secs(1)).await;
    assert_eq!(log.lines().last().unwrap()["path"], json!("/ready"));
}

#[tokio::test]
async fn s7_a_log_that_cannot_be_opened_is_an_error_that_names_it() {
    let config = pulsing_gateway::GatewayConfig {
        host: "127.0.0.1".into(),
        port: 0,
        access_log: Some("/nowhere/log".into()),
        ..Default::default()
    };
    let error = pulsing_gateway::Gateway::start_on(Arc::new(FakeCluster::new()), config).err().unwrap();
    assert!(error.to_string().contains("/nowhere/log"), "{error}");
}

#[tokio::test]
async fn a_log_into_a_pipe_is_refused_and_holds_nothing_up() {
    let pipe = Place::new();
    assert!(std::process::Command::new("mkfifo").arg(&pipe.0).status().unwrap().success());
    for place in [pipe.0.display().to_string(), std::env::temp_dir().display().to_string()] {
        let config = pulsing_gateway::GatewayConfig {
            host: "127.0.0.1".into(),
            port: 0,
            access_log: Some(place.clone()),
            ..Default::default()
        };
        // Away from here, as opening a pipe would wait for ever.
        let runtime = tokio::runtime::Handle::current();
        let (told, error) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _inside = runtime.enter();
            let started = pulsing_gateway::Gateway::start_on(Arc::new(FakeCluster::new()), config);
            let _ = told.send(started.err().map(|error| error.to_string()));
        });
        let error = error.recv_timeout(Duration::from_secs(10)).expect("it waits for a reader").unwrap();
        assert!(error.contains(&place) && error.contains("neither a regular file"), "{error}");
    }
}

#[tokio::test]
async fn a_password_in_the_collectors_url_is_not_repeated() {
    for url in ["http://user:hunter2@collector:4318", "http://user:hunter2@", "gopher://user:hunter2@x", "u:hunter2@x"]
    {
        let config = pulsing_gateway::GatewayConfig {
            host: "127.0.0.1".into(),
            port: 0,
            otlp_endpoint: Some(url.into()),
            ..Default::default()
        };
        let error = pulsing_gateway::Gateway::start_on(Arc::new(FakeCluster::new()), config).err().unwrap();
        let error = format!("{error} {error:?}");
        assert!(error.contains("otlp_endpoint") && !error.contains("hunter2"), "{error}");
    }
}

/// What a collector got.
type Got = Arc<Mutex<Vec<Value>>>;

async fn collector() -> (String, Got) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let got = Got::default();
    let kept = Arc::clone(&got);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut bytes = Vec::new();
            let body = loop {
                if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                    break None;
                }
                let text = String::from_utf8_lossy(&bytes).into_owned();
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                assert!(head.starts_with("POST /v1/traces HTTP/1.1") && head.contains("application/json"), "{head}");
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                if body.len() == length.parse::<usize>().unwrap() {
                    break Some(serde_json::from_str(body).unwrap());
                }
            };
            kept.lock().extend(body);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
        }
    });
    (url, got)
}

fn spans(got: &Got) -> Vec<Value> {
    let got = got.lock();
    let list = |value: &Value, key: &str| value[key].as_array().unwrap().clone();
    got.iter()
        .flat_map(|request| list(request, "resourceSpans"))
        .flat_map(|resource| {
            assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "pulsing-router");
            list(&resource, "scopeSpans")
        })
        .flat_map(|scope| list(&scope, "spans"))
        .collect()
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let attributes = span["attributes"].as_array().unwrap();
    let found = attributes.iter().find(|one| one["key"] == key);
    &found.unwrap_or_else(|| panic!("no {key}: {span}"))["value"]
}

#[tokio::test]
async fn s7_the_collector_gets_the_headers_it_wants() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let cluster = FakeCluster::new();
    let gateway = cluster
        .gateway(|config| {
            config.otlp_endpoint = Some(url);
            config.otlp_headers = Some("Authorization=Bearer%20collectors,x-scope=one".into());
        })
        .await;
    post(&gateway, "/v1/chat/completions", CHAT).await;
    let accepted = tokio::time::timeout(Duration::from_secs(5), listener.accept()).await;
    let (mut stream, _) = accepted.expect("spans").unwrap();
    let mut bytes = Vec::new();
    while !bytes.windows(4).any(|window| window == b"\r\n\r\n") {
        assert_ne!(stream.read_buf(&mut bytes).await.unwrap(), 0);
    }
    let head = String::from_utf8_lossy(&bytes).into_owned();
    for line in
        ["\r\nauthorization: Bearer collectors\r\n", "\r\nx-scope: one\r\n", "\r\ncontent-type: application/json\r\n"]
    {
        assert!(head.contains(line), "{head}");
    }
}

#[tokio::test]
async fn s7_a_trace_goes_through_router_and_worker() {
    let cluster = FakeCluster::new();
    let seen = Arc::new(Mutex::new(String::new()));
    let kept = Arc::clone(&seen);
    let worker = cluster.worker(move |ask| {
        *kept.lock() = ask.generate.traceparent.clone();
        hello(ask)
    });
    let (url, got) = collector().await;
    let gateway = cluster.gateway(|config| config.otlp_endpoint = Some(url)).await;
    let parent = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
    assert_eq!(post_with(&gateway, "/v1/chat/completions", parent, STREAM).await.status, 200);
    until("the collector has both", || spans(&got).len() == 2).await;
    let spans = spans(&got);
    let of = |kind: u64| spans.iter().find(|span| span["kind"] == json!(kind)).unwrap();
    let (server, dispatch) = (of(2), of(3));
    assert_eq!(server["traceId"], "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(server["parentSpanId"], "b7ad6b7169203331");
    assert_eq!(dispatch["parentSpanId"], server["spanId"]);
    let own = dispatch["spanId"].as_str().unwrap();
    assert_eq!(*seen.lock(), format!("00-0af7651916cd43dd8448eb211c80319c-{own}-01"), "the worker's parent");
    assert_eq!(server["name"], "POST /v1/chat/completions");
    assert_eq!(attribute(server, "http.response.status_code")["intValue"], "200");
    assert_eq!(attribute(server, "gen_ai.request.model")["stringValue"], "alias");
    assert_eq!(attribute(server, "gen_ai.usage.output_tokens")["intValue"], "2");
    assert_eq!(attribute(dispatch, "pulsing.worker")["stringValue"], json!(worker.id.to_string()));
    let time = |span: &Value, key: &str| span[key].as_str().unwrap().parse::<u128>().unwrap();
    assert!(time(server, "startTimeUnixNano") <= time(dispatch, "startTimeUnixNano"));
    assert!(time(dispatch, "startTimeUnixNano") <= time(dispatch, "endTimeUnixNano"));
    assert!(!server.to_string().contains("Hé"));
}

#[tokio::test]
async fn s7_what_others_decided_not_to_keep_is_not_kept_and_a_dead_collector_costs_nothing() {
    let cluster = FakeCluster::new();
    let seen = Arc::new(Mutex::new(String::new()));
    let kept = Arc::clone(&seen);
    cluster.worker(move |ask| {
        *kept.lock() = ask.generate.traceparent.clone();
        hello(ask)
    });
    let (url, got) = collector().await;
    let gateway = cluster.gateway(|config| config.otlp_endpoint = Some(url)).await;
    let unsampled = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00\r\n";
    post_with(&gateway, "/v1/chat/completions", unsampled, CHAT).await;
    assert!(seen.lock().starts_with("00-0af7651916cd43dd8448eb211c80319c-") && seen.lock().ends_with("-00"));
    post(&gateway, "/v1/chat/completions", CHAT).await;
    until("the other has come", || spans(&got).len() == 2).await;
    assert!(spans(&got).iter().all(|span| span["traceId"] != "0af7651916cd43dd8448eb211c80319c"));

    let dead = cluster.gateway(|config| config.otlp_endpoint = Some("http://127.0.0.1:1/x".into())).await;
    assert_eq!(post(&dead, "/v1/chat/completions", CHAT).await.status, 200);
    let end = Instant::now() + Duration::from_secs(10);
    while !get(&dead, "/metrics").await.body.contains("pulsing_router_spans_dropped_total 2\n") {
        assert!(Instant::now() < end, "what is lost is not counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let plain = cluster.gateway(|_| {}).await;
    post_with(&plain, "/v1/chat/completions", unsampled, CHAT).await;
    assert_eq!(*seen.lock(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", "passed on as it is");
}

#[tokio::test]
async fn s7_an_engine_gets_the_trace_and_the_request_id_too() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn| turn.json(r#"{"choices":[]}"#)).await;
    engine.join(&cluster);
    let (url, got) = collector().await;
    let gateway = cluster.gateway(|config| config.otlp_endpoint = Some(url)).await;
    let answer = post(&gateway, "/v1/chat/completions", CHAT).await;
    assert_eq!(engine.last().header("x-request-id"), Some(answer.headers["x-request-id"].as_str()));
    let sent = engine.last().header("traceparent").unwrap().to_owned();
    until("the spans are there", || spans(&got).len() == 2).await;
    let dispatch = spans(&got).into_iter().find(|span| span["kind"] == json!(3)).unwrap();
    let (trace, span) = (dispatch["traceId"].as_str().unwrap(), dispatch["spanId"].as_str().unwrap());
    assert_eq!(sent, format!("00-{trace}-{span}-01"));
    assert_eq!(attribute(&dispatch, "url.full")["stringValue"], json!(engine.url));
}

#[tokio::test]
async fn h10_no_path_and_no_model_that_is_not_served_becomes_a_label() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let series = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    for body in [CHAT, STREAM] {
        post(&gateway, "/v1/chat/completions", body).await;
    }
    post(&gateway, "/v1/chat/completions", r#"{"model":"m","messages":[{}]}"#).await;
    get(&gateway, "/p").await;
    get(&gateway, "/metrics").await;
    let before = get(&gateway, "/metrics").await.body;
    for number in 0..200 {
        post(&gateway, "/v1/chat/completions", &format!(r#"{{"model":"m{number}","messages":[{{}}]}}"#)).await;
        get(&gateway, &format!("/p{number}")).await;
    }
    let metrics = get(&gateway, "/metrics").await.body;
    assert_eq!(series(&metrics), series(&before), "{metrics}");
    for line in [
        "pulsing_router_model_requests_total{model=\"alias\"} 2\n",
        "pulsing_router_model_tokens_total{model=\"alias\",kind=\"completion\"} 4\n",
        "pulsing_router_model_time_to_first_token_seconds_count{model=\"alias\"} 2\n",
        "pulsing_router_queue_time_seconds_count 2\n",
        "pulsing_router_input_sequence_tokens_sum 6\n",
        "pulsing_router_output_sequence_tokens_count 2\n",
        "pulsing_router_cached_prompt_ratio_bucket{le=\"0\"} 2\n",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let gaps = metrics.lines().find_map(|line| line.strip_prefix("pulsing_router_inter_token_latency_seconds_count "));
    assert_eq!(gaps, Some("2"), "three pieces have two gaps: {metrics}");
}
