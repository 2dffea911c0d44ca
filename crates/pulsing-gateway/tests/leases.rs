//! Places in the house, in the queue and on Workers come back, whenever a client leaves and whatever becomes of Workers.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Ask, Client, FakeCluster, FakeWorker, fail, get, post, send, until};
use pulsing_core::StreamSink;
use pulsing_gateway::Gateway;
use pulsing_gateway::protocol::{Delta, Usage};

const ROUNDS: usize = 10_000;
const WORDS: u32 = 12;

/// A small generator of its own, so that a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

async fn pause(turns: u64) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}

/// Does what the body says: `hang` before the first word, `halt` in the middle, `poison` fails, or else a dozen words.
async fn serve(ask: Ask) {
    let says = |word: &str| ask.body.windows(word.len()).any(|window| window == word.as_bytes());
    let (hang, halt) = (says("hang"), says("halt"));
    if says("poison") {
        return fail(ask.responder, 500, "poisoned");
    }
    let cancel = ask.responder.cancel_signal().clone();
    if hang {
        until("it is cancelled", || cancel.is_cancelled()).await;
        return;
    }
    let first = ask.generate.continue_tokens.len() as u32;
    let stream = ask.responder.stream();
    for at in first..WORDS {
        let piece = Delta { text: format!("w{at} "), token_ids: vec![at], ..Delta::default() };
        if !send(&stream, vec![piece]).await {
            return;
        }
        if halt && at == WORDS / 2 {
            until("it is cancelled", || cancel.is_cancelled()).await;
            return;
        }
        pause(2).await;
    }
    finish(stream, WORDS - first).await;
}

async fn finish(stream: StreamSink, words: u32) {
    let usage = Usage { prompt_tokens: 1, completion_tokens: words, cached_tokens: 0 };
    send(&stream, vec![Delta { finish_reason: "stop".into(), usage: Some(usage), ..Delta::default() }]).await;
    stream.end();
}

/// Has a worker be silent with requests on it until they are taken back: the rounds of a quick machine are over before
/// anybody was silent for long enough.
async fn fall_silent(gateway: &Gateway, worker: &FakeWorker) {
    worker.hush(true);
    let end = Instant::now() + Duration::from_secs(20);
    let mut open = Vec::new();
    while get(gateway, "/metrics").await.body.contains("pulsing_router_retries_total{reason=\"taken_back\"} 0\n") {
        assert!(Instant::now() < end, "a silent worker keeps its requests");
        if open.len() < 16 {
            let body = r#"{"messages":[{"content":"hang"}],"temperature":0}"#;
            let head =
                format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
            let mut client = Client::connect(gateway).await;
            client.write(format!("{head}{body}").as_bytes()).await;
            open.push(client);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    worker.hush(false);
}

#[tokio::test]
async fn test_s4_ten_thousand_clients_that_leave_at_any_stage_leave_nothing_behind() {
    let cluster = FakeCluster::new();
    let metadata = [
        ("kind", "worker"),
        ("protocol", "1..1"),
        ("model", "tiny"),
        ("state", "ready"),
        ("continue", "greedy"),
        ("fingerprint", "f"),
    ];
    let workers: Vec<_> = (0..4).map(|_| cluster.worker_with("worker", &metadata, serve)).collect();
    let gateway = cluster
        .gateway(|config| {
            config.debug_routing = true;
            config.max_requests = 200;
            config.worker_silence = Duration::from_millis(120);
            config.worker_wait = Duration::from_millis(20);
            config.silence_wait = Duration::from_millis(20);
        })
        .await;
    let mut dice = Dice(7);
    let mut open: Vec<Client> = Vec::new();
    let mut taken_back = false;
    for round in 0..ROUNDS {
        let stage = ["plain", "hang", "halt", "poison", "plain", "plain"][dice.below(6) as usize];
        let body = format!(
            r#"{{"messages":[{{"content":"{stage} {round}"}}],"temperature":0,"stream":{}}}"#,
            dice.below(2) == 0
        );
        let request =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        // One in six is cut in the middle of the request itself.
        let cut = if dice.below(6) == 0 { dice.below(request.len() as u64) as usize } else { request.len() };
        let mut client = Client::connect(&gateway).await;
        client.write(&request.as_bytes()[..cut]).await;
        pause(dice.below(40)).await;
        // Up to two dozen at once, more than the workers take: some leave out of the queue.
        open.push(client);
        if open.len() > 24 || dice.below(3) == 0 {
            open.swap_remove(dice.below(open.len() as u64) as usize);
        }
        if round % 50 == 0 {
            let worker = &workers[dice.below(4) as usize];
            match dice.below(4) {
                0 => worker.die(),
                1 => {
                    worker.hush(true);
                    // However fast the rounds go, what a silent one has is taken back at least once.
                    let end = Instant::now() + Duration::from_secs(1);
                    while !taken_back && Instant::now() < end {
                        let metrics = get(&gateway, "/metrics").await.body;
                        taken_back = !metrics.contains("pulsing_router_retries_total{reason=\"taken_back\"} 0\n");
                    }
                }
                _ => workers.iter().for_each(|worker| {
                    worker.revive();
                    worker.hush(false);
                }),
            }
        }
    }
    drop(open);
    for worker in &workers {
        worker.revive();
        worker.hush(false);
    }
    until("every worker is idle", || workers.iter().all(|worker| worker.active.load(Ordering::SeqCst) == 0)).await;
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let metrics = get(&gateway, "/metrics").await.body;
        let routing = get(&gateway, "/v1/_routing").await.json();
        let held = routing["workers"].as_array().unwrap().iter().map(|one| one["in_flight"].as_u64().unwrap());
        let free = [
            "pulsing_router_in_flight 0\n",
            "pulsing_router_receiving 0\n",
            "pulsing_router_queued_requests 0\n",
            "{state=\"ready\"} 4\n",
        ];
        if free.iter().all(|line| metrics.contains(line)) && held.sum::<u64>() == 0 {
            break;
        }
        assert!(Instant::now() < end, "something is still held: {routing}\n{metrics}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    fall_silent(&gateway, &workers[0]).await;
    // Every stage was met.
    let metrics = get(&gateway, "/metrics").await.body;
    let count = |name: &str| -> u64 {
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {metrics}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    for name in [
        "pulsing_router_retries_total{reason=\"lost\"}",
        "pulsing_router_retries_total{reason=\"failed\"}",
        "pulsing_router_retries_total{reason=\"taken_back\"}",
        "pulsing_router_resumed_streams_total",
        "pulsing_router_disconnects_total",
    ] {
        assert!(count(name) > 0, "{name}: {metrics}");
    }
    let body = r#"{"messages":[{"content":"plain"}]}"#;
    for _ in 0..8 {
        assert_eq!(post(&gateway, "/v1/chat/completions", body).await.status, 200);
    }
}
