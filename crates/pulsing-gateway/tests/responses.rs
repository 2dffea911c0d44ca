//! `/v1/responses` in front of actor Workers, of engines that have it, and of engines that have not.
#![allow(clippy::unwrap_used)]

mod common;

use common::engine::{Engine, Turn};
use common::{Ask, Client, Delta, FakeCluster, answer, done, fail, get, hello, post, text};
use serde_json::{Value, json};
use tokio::net::TcpStream;

const ASKED: &str = r#"{"model":"alias","input":"hi","instructions":"be brief","foo":12345678901234567890}"#;
const STREAMED: &str = r#"{"model":"alias","input":"hi","stream":true}"#;

fn tools(json: &str) -> Delta {
    Delta { tool_calls_json: json.into(), ..Delta::default() }
}

/// Thinks, says something, and calls two functions.
async fn busy(ask: Ask) {
    let deltas = vec![
        Delta { reasoning: "hm".into(), ..Delta::default() },
        text("Hé"),
        text("llo"),
        tools(r#"[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\""}}]"#),
        tools(r#"[{"index":0,"function":{"arguments":":1}"}}]"#),
        tools(r#"[{"index":1,"id":"c2","type":"function","function":{"name":"g","arguments":"{}"}}]"#),
        done("tool_calls"),
    ];
    answer(ask, deltas).await;
}

/// `(event, data)` of each event.
fn events(body: &str) -> Vec<(String, Value)> {
    let split = |event: &str| {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), serde_json::from_str(data).unwrap())
    };
    body.split("\n\n").filter(|event| !event.is_empty()).map(split).collect()
}

#[tokio::test]
async fn an_actor_is_asked_for_a_chat_and_its_answer_is_a_response() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask: Ask| async {
        let body: Value = serde_json::from_slice(&ask.body).unwrap();
        assert_eq!(ask.generate.api, "chat.completions");
        let system = json!({"role": "system", "content": "be brief"});
        assert_eq!(body["messages"], json!([system, {"role": "user", "content": "hi"}]));
        assert!(String::from_utf8_lossy(&ask.body).contains("\"foo\":12345678901234567890"));
        busy(ask).await;
    });
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/responses", ASKED).await;
    let body = response.json();
    assert_eq!((response.status, &body["object"], &body["status"]), (200, &json!("response"), &json!("completed")));
    assert!(body["id"].as_str().unwrap().starts_with("resp_"));
    let shown: Vec<Value> =
        body["output"].as_array().unwrap().iter().map(|item| json!([item["type"], item["status"]])).collect();
    assert_eq!(
        shown,
        ["reasoning", "message", "function_call", "function_call"].map(|kind| json!([kind, "completed"]))
    );
    assert_eq!(body["output"][1]["content"][0]["text"], "Héllo");
    assert_eq!(body["output"][2]["arguments"], "{\"a\":1}");
    assert_eq!((&body["output"][3]["call_id"], &body["output"][3]["name"]), (&json!("c2"), &json!("g")));
    assert_eq!(body["usage"]["total_tokens"], 5);
    for (key, value) in
        [("instructions", json!("be brief")), ("store", json!(false)), ("model", json!("alias")), ("tools", json!([]))]
    {
        assert_eq!(body[key], value, "{key}");
    }
}

#[tokio::test]
async fn the_events_of_a_response_come_in_order_and_add_up() {
    let cluster = FakeCluster::new();
    cluster.worker(busy);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/responses", STREAMED).await;
    assert!(response.whole && response.status == 200);
    let events = events(&response.body);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.strip_prefix("response.").unwrap()).collect();
    let item = |middle: &[&'static str]| [&["output_item.added"], middle, &["output_item.done"]].concat();
    let expected = [
        vec!["created", "in_progress"],
        item(&["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]),
        item(&[
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
        ]),
        item(&["function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done"]),
        item(&["function_call_arguments.delta", "function_call_arguments.done"]),
        vec!["completed"],
    ]
    .concat();
    assert_eq!(names, expected);
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!((&data["type"], data["sequence_number"].as_u64()), (&json!(name), Some(number as u64)));
    }
    let last = &events.last().unwrap().1["response"];
    assert_eq!((&last["status"], &last["usage"]["output_tokens"]), (&json!("completed"), &json!(2)));
    for (name, data) in events.iter().filter(|(name, _)| name.ends_with("output_item.done")) {
        assert_eq!(data["item"], last["output"][data["output_index"].as_u64().unwrap() as usize], "{name}");
    }
}

#[tokio::test]
async fn an_answer_that_was_cut_short_is_incomplete() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| answer(ask, vec![text("a"), done("length")]));
    let gateway = cluster.gateway(|_| {}).await;
    let body = post(&gateway, "/v1/responses", ASKED).await.json();
    assert_eq!(
        (&body["status"], &body["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let stream = post(&gateway, "/v1/responses", STREAMED).await;
    assert_eq!(events(&stream.body).last().unwrap().0, "response.incomplete");
}

#[tokio::test]
async fn what_cannot_be_done_without_a_memory_is_refused_with_its_name() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    for (extra, param) in [
        ("\"store\":true", "store"),
        ("\"previous_response_id\":\"resp_1\"", "previous_response_id"),
        ("\"tools\":[{\"type\":\"web_search_preview\"}]", "tools[0]"),
        ("\"max_output_tokens\":-1", "max_output_tokens"),
        ("\"temperature\":3", "temperature"),
    ] {
        let refused = post(&gateway, "/v1/responses", &ASKED.replace("\"foo\"", &format!("{extra},\"foo\""))).await;
        assert_eq!((refused.status, refused.json()["error"]["param"].as_str()), (400, Some(param)));
    }
    for (method, path) in [
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items?limit=1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ] {
        let mut client = Client::connect(&gateway).await;
        client.write(format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n").as_bytes()).await;
        let stored = client.response(true).await;
        assert_eq!(
            (stored.status, stored.json()["error"]["code"].as_str()),
            (404, Some("not_stored")),
            "{method} {path}"
        );
    }
}

#[tokio::test]
async fn a_stream_that_breaks_says_so_and_is_not_complete() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask: Ask| async {
        let stream = ask.responder.stream();
        common::send(&stream, vec![text("a")]).await;
        stream.end();
    });
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/responses", STREAMED).await;
    let events = events(&response.body);
    let (name, data) = events.last().unwrap();
    assert!(!response.whole && name == "error" && data["error"]["message"] == data["message"], "{data}");
    assert!(!response.body.contains("response.completed"));

    let cluster = FakeCluster::new();
    cluster.worker(|ask: Ask| async { fail(ask.responder, 400, "no") });
    let gateway = cluster.gateway(|_| {}).await;
    assert_eq!(post(&gateway, "/v1/responses", STREAMED).await.status, 400);
}

const NATIVE: &str = "event: response.created\ndata: {\"type\":\"response.created\"}\n\n\
    event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":7,\"output_tokens\":2}}}\n\n";

async fn native(turn: Turn) -> Option<TcpStream> {
    match turn.seen.body.contains("\"stream\":true") {
        true => turn.events(NATIVE).await,
        false => turn.json("{\"object\":\"response\",\"odd\":1e400}").await,
    }
}

#[tokio::test]
async fn an_engine_that_has_responses_answers_them_itself() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(native).await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/responses", ASKED).await;
    assert_eq!((response.status, response.body.as_str()), (200, "{\"object\":\"response\",\"odd\":1e400}"));
    assert!(engine.last().head.starts_with("POST /v1/responses "));
    assert_eq!(engine.last().body, ASKED.replace("alias", "tiny"));
    let response = post(&gateway, "/v1/responses", STREAMED).await;
    assert_eq!((response.whole, response.body.as_str()), (true, NATIVE));
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("pulsing_router_tokens_total{kind=\"prompt\"} 7"), "{metrics}");
}

#[tokio::test]
async fn a_native_stream_without_its_last_event_is_broken() {
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn: Turn| async {
        turn.events(NATIVE.split_once("event: response.completed").unwrap().0).await
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/responses", STREAMED).await;
    assert!(!response.whole && response.body.contains("event: error\n"), "{}", response.body);
}

#[tokio::test]
async fn an_engine_without_responses_is_asked_for_a_chat_and_once_only() {
    const CHAT: &str = r#"{"choices":[{"index":0,"message":{"content":"Hé"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}"#;
    const CHUNKS: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"Hé\"}}]}\n\n\
        data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn: Turn| async move {
        if turn.seen.head.starts_with("POST /v1/responses ") {
            return turn.answer("404 Not Found", "", r#"{"detail":"Not Found"}"#).await;
        }
        if turn.seen.body.contains("\"stream\":true") { turn.events(CHUNKS).await } else { turn.json(CHAT).await }
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..2 {
        let body = post(&gateway, "/v1/responses", ASKED).await.json();
        assert_eq!(
            (&body["output"][0]["content"][0]["text"], &body["usage"]["input_tokens"]),
            (&json!("Hé"), &json!(3))
        );
        let stream = post(&gateway, "/v1/responses", STREAMED).await;
        assert!(stream.whole && stream.body.contains("event: response.completed\n"), "{}", stream.body);
    }
    assert_eq!(engine.asked(), 5, "a path that is not there is tried once");
    assert!(engine.last().body.starts_with("{\"messages\":["), "{}", engine.last().body);
    assert!(engine.last().body.contains("\"model\":\"tiny\""));
}
