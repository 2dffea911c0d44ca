//! A process that may open no more files dials no engine, and blames none for it. The limit is the whole process's, so this
//! test has one to itself.
#![allow(clippy::unwrap_used)]

mod common;

use common::engine::{Engine, Turn};
use common::{CHAT, Client, FakeCluster, get};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[tokio::test]
async fn s5_an_engine_is_not_lost_because_this_process_has_no_descriptor_left() {
    let cluster = FakeCluster::new();
    // Each request wants a connection of its own.
    let engine = Engine::start(|turn: Turn| async move {
        turn.json(r#"{"object":"chat.completion","choices":[]}"#).await;
        None
    })
    .await;
    engine.join(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", CHAT).await;
    assert_eq!(client.response(true).await.status, 200);

    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
    client.post("/v1/chat/completions", CHAT).await;
    let refused = client.response(true).await;
    setrlimit(Resource::Nofile, before).unwrap();
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("overloaded")));
    assert!(refused.body.contains("open no connection"), "{}", refused.body);
    assert_eq!(refused.headers["retry-after"], "1");

    assert_eq!(get(&gateway, "/ready").await.status, 200);
    client.post("/v1/chat/completions", CHAT).await;
    assert_eq!(client.response(true).await.status, 200);
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("retries_total{reason=\"lost\"} 0"), "{metrics}");
}
