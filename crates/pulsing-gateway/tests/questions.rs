//! Endpoints that generate no text: embeddings, tokenize, detokenize.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::engine::Engine;
use common::{FakeCluster, FakeWorker, get, hello, post};
use pulsing_gateway::protocol::{Answer, Embedding, Usage};
use serde_json::json;

const EMBEDDINGS: &str = r#"{"model":"alias","input":["a","b"],"foo":1}"#;

fn worker(cluster: &FakeCluster, apis: &str) -> Arc<FakeWorker> {
    let metadata = [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready"), ("apis", apis)];
    cluster.worker_with("worker", &metadata, hello)
}

fn vectors() -> Answer {
    let one = |values: [f32; 2]| Embedding { values: values.map(f32::to_le_bytes).concat().into() };
    Answer {
        embeddings: vec![one([1.0, 0.5]), one([-1.0, 0.0])],
        usage: Some(Usage { prompt_tokens: 4, ..Usage::default() }),
        ..Answer::default()
    }
}

#[tokio::test]
async fn an_actor_worker_answers_embeddings_and_sees_the_clients_bytes() {
    let cluster = FakeCluster::new();
    let embedder = worker(&cluster, "embeddings");
    *embedder.answer.lock() = vectors();
    let gateway = cluster.gateway(|_| {}).await;
    let response = post(&gateway, "/v1/embeddings", EMBEDDINGS).await;
    let expected = json!({
        "object": "list", "model": "alias", "usage": {"prompt_tokens": 4, "total_tokens": 4},
        "data": [{"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
                 {"object": "embedding", "index": 1, "embedding": [-1.0, 0.0]}],
    });
    assert_eq!((response.status, response.json()), (200, expected));
    assert_eq!(response.headers["content-type"], "application/json");
    let (question, body) = embedder.questions.lock()[0].clone();
    assert_eq!((question.api.as_str(), &body[..]), ("embeddings", EMBEDDINGS.as_bytes()));
    assert_eq!(question.request_id, response.headers["x-request-id"]);
    assert!(question.deadline_ms > 0);
    let base64 =
        post(&gateway, "/embeddings/", &EMBEDDINGS.replace("\"foo\":1", "\"encoding_format\":\"base64\"")).await;
    assert_eq!(base64.json()["data"][0]["embedding"], "AACAPwAAAD8=");
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("route=\"embeddings\",status=\"200\"} 2"), "{metrics}");
    *embedder.answer.lock() = Answer::default();
    assert_eq!(post(&gateway, "/v1/embeddings", EMBEDDINGS).await.status, 502);
}

#[tokio::test]
async fn tokenize_and_detokenize_have_vllms_shape_with_and_without_v1() {
    let cluster = FakeCluster::new();
    let tokenizer = worker(&cluster, "chat.completions,tokenize,detokenize");
    *tokenizer.answer.lock() = Answer {
        tokens: vec![1, 300],
        token_texts: vec!["a".into(), "\"b".into()],
        text: "a\"b".into(),
        max_model_len: 2048,
        ..Answer::default()
    };
    let gateway = cluster.gateway(|_| {}).await;
    for prefix in ["", "/v1"] {
        let tokens = post(&gateway, &format!("{prefix}/tokenize"), r#"{"prompt":"a\"b"}"#).await.json();
        assert_eq!(tokens, json!({"count": 2, "max_model_len": 2048, "tokens": [1, 300], "token_strs": null}));
        let body = r#"{"messages":[{"role":"user","content":"x"}],"return_token_strs":true}"#;
        let tokens = post(&gateway, &format!("{prefix}/tokenize"), body).await.json();
        assert_eq!(tokens["token_strs"], json!(["a", "\"b"]));
        let text = post(&gateway, &format!("{prefix}/detokenize"), r#"{"tokens":[1,300]}"#).await.json();
        assert_eq!(text, json!({"prompt": "a\"b"}));
    }
}

#[tokio::test]
async fn an_endpoint_that_no_worker_of_the_model_has_is_refused_and_says_which_there_are() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let refused = post(&gateway, "/v1/embeddings", EMBEDDINGS).await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status, error["code"].as_str()), (400, Some("unsupported_endpoint")));
    assert_eq!(
        error["message"],
        "The model `alias` has no /v1/embeddings: its workers have /v1/chat/completions, /v1/completions, /v1/responses"
    );
    assert_eq!(get(&gateway, "/v1/embeddings").await.status, 405);
    assert_eq!(post(&gateway, "/v1/embeddings", &EMBEDDINGS.replace("alias", "nope")).await.status, 404);
}

#[tokio::test]
async fn of_mixed_workers_only_those_that_have_the_endpoint_are_asked() {
    let cluster = FakeCluster::new();
    let generating = cluster.worker(hello);
    let embedder = worker(&cluster, "embeddings");
    *embedder.answer.lock() = vectors();
    let gateway = cluster.gateway(|_| {}).await;
    for _ in 0..10 {
        assert_eq!(post(&gateway, "/v1/embeddings", EMBEDDINGS).await.status, 200);
        assert_eq!(post(&gateway, "/v1/chat/completions", common::CHAT).await.status, 200);
    }
    assert_eq!((generating.asked(), generating.questions.lock().len()), (10, 0));
    assert_eq!((embedder.asked(), embedder.questions.lock().len()), (0, 10));
}

#[tokio::test]
async fn an_engine_gets_and_gives_every_byte() {
    const ANSWER: &str = r#"{ "object":"list","data":[{"embedding":"AACA","index":0}],"odd":1e400,"usage":{"prompt_tokens":9,"total_tokens":9}}"#;
    let cluster = FakeCluster::new();
    let engine = Engine::start(|turn| async move { turn.json(ANSWER).await }).await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for (path, there, body) in [
        ("/v1/embeddings", "/v1/embeddings", EMBEDDINGS),
        ("/v1/tokenize", "/tokenize", r#"{"model":"alias","prompt":"x"}"#),
        ("/detokenize", "/detokenize", r#"{"model":"alias", "tokens":[1]}"#),
    ] {
        let response = post(&gateway, path, body).await;
        assert_eq!((response.status, response.body.as_str()), (200, ANSWER));
        let seen = engine.last();
        assert!(seen.head.starts_with(&format!("POST {there} HTTP/1.1\r\n")), "{}", seen.head);
        assert_eq!(seen.body, body.replace("alias", "tiny"));
    }
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("pulsing_router_tokens_total{kind=\"prompt\"} 27"), "{metrics}");
}

#[tokio::test]
async fn an_engine_without_the_endpoint_is_told_from_one_without_the_model() {
    for (answer, status, code) in [
        (r#"{"detail":"Not Found"}"#, 400, json!("unsupported_endpoint")),
        ("404 page not found", 400, json!("unsupported_endpoint")),
        (
            r#"{"error":{"message":"The model `x` does not exist","code":"model_not_found"}}"#,
            404,
            json!("model_not_found"),
        ),
    ] {
        let cluster = FakeCluster::new();
        let engine = Engine::start(move |turn| async move {
            turn.answer("404 Not Found", "content-type: text/plain\r\n", answer).await
        })
        .await;
        engine.join(&cluster);
        let gateway = cluster.gateway(|_| {}).await;
        let refused = post(&gateway, "/v1/embeddings", EMBEDDINGS).await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (status, &code), "{answer}");
    }
}
