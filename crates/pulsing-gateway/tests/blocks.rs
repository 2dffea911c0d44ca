//! Workers tell what their prompt caches hold, and `cache_aware` goes by it (S5).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Client, FakeCluster, FakeWorker, get, hello};
use pulsing_gateway::policy::chain;
use pulsing_gateway::protocol::BlockNews;
use pulsing_gateway::{Gateway, PolicyKind};
use serde_json::{Value, json};

fn messages(who: u32) -> Value {
    json!([{"role": "user", "content": format!("I am number {who}. ").repeat(100)}])
}
/// What Routers call the blocks of that prompt.
fn blocks(who: u32) -> Vec<u64> {
    chain::of_chat(messages(who).to_string().as_bytes(), None).finish()
}
async fn gateway(cluster: &FakeCluster, policy: PolicyKind) -> Gateway {
    cluster.gateway(|config| (config.debug_routing, config.policy) = (true, policy)).await
}
/// Why a request with that prompt went where it went.
async fn ask(gateway: &Gateway, who: u32) -> (String, String) {
    let body = json!({"model": "alias", "messages": messages(who)}).to_string();
    let mut client = Client::connect(gateway).await;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-pulsing-debug: routing\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write(format!("{head}{body}").as_bytes()).await;
    let answer = client.response(true).await;
    assert_eq!(answer.status, 200);
    (answer.headers["x-pulsing-worker"].clone(), answer.headers["x-pulsing-routing"].clone())
}
/// Waits until the Router knows that many blocks of this Worker.
async fn known(gateway: &Gateway, worker: &FakeWorker, count: usize) {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let page = get(gateway, "/v1/_routing").await.json();
        let row = page["workers"].as_array().unwrap().iter().find(|row| row["instance"] == worker.id.to_string());
        let known = row.map(|row| row["cached_blocks"].as_u64().unwrap());
        if known == Some(count as u64) {
            return;
        }
        assert!(Instant::now() < end, "{known:?} blocks are known, not {count}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
fn stored(seq: u64, stored: Vec<u64>) -> BlockNews {
    BlockNews { seq, reset: seq == 1, stored, dropped: Vec::new() }
}

#[tokio::test]
async fn s5_what_is_kept_attracts_and_what_is_evicted_does_not() {
    let cluster = FakeCluster::new();
    let workers: Vec<Arc<FakeWorker>> = (0..3).map(|_| cluster.worker(hello)).collect();
    let gateway = gateway(&cluster, PolicyKind::CacheAware).await;
    let (kept, evicted) = (blocks(1), blocks(2));
    let holder = &workers[1];
    holder.tell(stored(1, kept.clone()));
    holder.tell(stored(2, evicted.clone()));
    known(&gateway, holder, kept.len() + evicted.len()).await;
    let whole = format!("{0}/{0} blocks cached", kept.len());
    for who in [1, 2] {
        let (worker, why) = ask(&gateway, who).await;
        assert!(worker == holder.id.to_string() && why.starts_with(&whole), "{why}");
    }
    holder.tell(BlockNews { seq: 3, reset: false, stored: Vec::new(), dropped: evicted.clone() });
    known(&gateway, holder, kept.len()).await;
    let (_, why) = ask(&gateway, 2).await;
    assert!(why.contains("blocks known: least loaded"), "{why}");
    let (worker, why) = ask(&gateway, 1).await;
    assert!(worker == holder.id.to_string() && why.starts_with(&whole), "{why}");
}

#[tokio::test]
async fn s5_after_news_was_lost_the_router_forgets_and_asks_again() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let gateway = gateway(&cluster, PolicyKind::CacheAware).await;
    let all = blocks(1);
    worker.tell(stored(1, all[..4].to_vec()));
    known(&gateway, &worker, 4).await;
    assert_eq!(worker.followed.load(Ordering::SeqCst), 1);
    // Number 2 is lost on the way. What comes to the next subscription is all there is.
    worker.tell(stored(3, all[4..5].to_vec()));
    common::until("another subscription", || worker.followed.load(Ordering::SeqCst) == 2).await;
    worker.tell(stored(1, all[..2].to_vec()));
    known(&gateway, &worker, 2).await;
    assert_eq!(worker.followed.load(Ordering::SeqCst), 2);
    // One that begins anew by itself, too.
    worker.tell(BlockNews { reset: true, ..stored(2, all[..3].to_vec()) });
    known(&gateway, &worker, 3).await;
    assert_eq!(worker.followed.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn s5_news_is_asked_for_where_it_counts() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let _gateway = gateway(&cluster, PolicyKind::StreamLoad).await;
    common::until("a report", || worker.told.load(Ordering::SeqCst) > 0).await;
    assert_eq!(worker.followed.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn s5_what_workers_tell_keeps_to_the_budget() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let gateway = cluster
        .gateway(|config| {
            (config.debug_routing, config.policy, config.cache_index) = (true, PolicyKind::CacheAware, 1 << 16);
        })
        .await;
    for news in 0..10_u64 {
        worker.tell(stored(
            news + 1,
            (1..=4096).map(|at| (news << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect(),
        ));
    }
    let end = Instant::now() + Duration::from_secs(20);
    while !worker.news.lock().is_empty() {
        assert!(Instant::now() < end);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let index = get(&gateway, "/v1/_routing").await.json()["index"].clone();
    assert!(index["bytes"].as_u64().unwrap() <= 1 << 16, "{index}");
}

#[tokio::test]
async fn s5_a_worker_whose_news_never_follows_is_asked_again_with_growing_pauses_and_its_load_is_heard() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    for _ in 0..12 {
        worker.tell(stored(3, blocks(1)));
    }
    let gateway = gateway(&cluster, PolicyKind::CacheAware).await;
    common::until("all of its news told", || worker.news.lock().is_empty()).await;
    let asked = worker.followed.load(Ordering::SeqCst);
    assert!((2..=8).contains(&asked), "asked for its news {asked} times");
    let told = worker.told.load(Ordering::SeqCst);
    common::until("reports go on", || worker.told.load(Ordering::SeqCst) > told + 2).await;
    ask(&gateway, 1).await;
}
