//! Streams of engine servers that hang in the middle, and of those that are only slow (S4, S5).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::engine::{Engine, Turn};
use common::story::{ALIKE, GREEDY, Script, USAGE, VLLM, chat, completion, engine, events, join, serve};
use common::{CHAT, Client, FakeCluster, FakeWorker, STREAM, get, post, until};
use pulsing_gateway::{Gateway, GatewayConfig};
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

/// An engine that stops in the middle of its first stream.
struct Hung {
    engine: Arc<Engine>,
    worker: Arc<FakeWorker>,
    /// It has stopped.
    stopped: Arc<AtomicBool>,
    /// It may go on.
    go: Arc<AtomicBool>,
    /// And behind the next event once more.
    on: Arc<AtomicBool>,
    streams: Arc<AtomicUsize>,
}

/// It stops after `at` events and half of the next.
async fn hung(cluster: &FakeCluster, at: usize) -> Hung {
    let streams = Arc::new(AtomicUsize::new(0));
    let flag = |up| Arc::new(AtomicBool::new(up));
    let (stopped, go, on) = (flag(false), flag(false), flag(true));
    let seen = (Arc::clone(&streams), Arc::clone(&stopped), Arc::clone(&go), Arc::clone(&on));
    let engine = Engine::start(move |mut turn: Turn| {
        let (streams, stopped, go, on) = seen.clone();
        async move {
            if turn.seen.head.contains("tokenize") || streams.fetch_add(1, Ordering::SeqCst) > 0 {
                return serve(turn, VLLM, streams).await;
            }
            let asked: Value = serde_json::from_str(&turn.seen.body).unwrap();
            let events = events(VLLM, &asked, 0);
            turn.begin().await;
            for event in &events[..at] {
                turn.chunk(event.as_bytes()).await;
            }
            let (half, rest) = events.get(at).map_or(("", ""), |event| event.split_at(event.len() / 2));
            if !half.is_empty() {
                turn.chunk(half.as_bytes()).await;
            }
            stopped.store(true, Ordering::SeqCst);
            let mut byte = [0];
            tokio::select! {
                _ = turn.stream.read(&mut byte) => {
                    turn.engine.left.fetch_add(1, Ordering::SeqCst);
                    // What it had to say all the same.
                    turn.chunk(rest.as_bytes()).await;
                    return None;
                }
                () = until("it may go on", || go.load(Ordering::SeqCst)) => {}
            }
            if !rest.is_empty() {
                turn.chunk(rest.as_bytes()).await;
            }
            until("it may go on once more", || on.load(Ordering::SeqCst)).await;
            for event in events.iter().skip(at + 1) {
                turn.chunk(event.as_bytes()).await;
            }
            turn.end().await
        }
    })
    .await;
    let worker = join(&engine, cluster, &ALIKE);
    Hung { engine, worker, stopped, go, on, streams }
}

impl Hung {
    /// Its EngineWorker hears nothing of it.
    fn falls_silent(&self) {
        self.worker.report(|report| report.answer_age_ms = 60_000);
    }
    fn left(&self) -> usize {
        self.engine.left.load(Ordering::SeqCst)
    }
}

fn quick(config: &mut GatewayConfig) {
    config.worker_silence = Duration::from_millis(300);
    config.worker_standstill = Duration::from_millis(400);
    config.worker_wait = Duration::from_millis(50);
}

/// A client whose stream has come to where the engine stopped.
async fn begun(gateway: &Gateway, body: &str, hung: &Hung) -> Client {
    let mut client = Client::connect(gateway).await;
    client.post(path(body), body).await;
    assert_eq!(client.head().await.0, 200);
    until("it has stopped", || hung.stopped.load(Ordering::SeqCst)).await;
    client
}
fn path(body: &str) -> &'static str {
    if body.contains("\"prompt\"") { "/v1/completions" } else { "/v1/chat/completions" }
}

/// What comes, and whether it ends cleanly.
async fn rest(client: &mut Client) -> (String, bool) {
    let mut body = String::new();
    while let Some(chunk) = client.chunk().await {
        if chunk.is_empty() {
            return (body, true);
        }
        body.push_str(&String::from_utf8(chunk).unwrap());
    }
    (body, false)
}

/// The stream of an engine to which nothing happens, with how many events it has.
async fn undisturbed(body: &str) -> (String, usize) {
    let cluster = FakeCluster::new();
    let one = engine(VLLM, &Arc::default()).await;
    join(&one, &cluster, &ALIKE);
    let response = post(&cluster.gateway(|_| {}).await, path(body), body).await;
    assert!(response.whole && response.body.ends_with("data: [DONE]\n\n"), "{}", response.body);
    let count = response.events().len();
    (response.body, count)
}

async fn counted(gateway: &Gateway, lines: &[&str]) {
    let metrics = get(gateway, "/metrics").await.body;
    for line in lines {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

const TAKEN_BACK: [&str; 5] = [
    "pulsing_router_retries_total{reason=\"taken_back\"} 1",
    "pulsing_router_retries_total{reason=\"lost\"} 0",
    "pulsing_router_resumed_streams_total 1",
    "pulsing_router_broken_streams_total 0",
    "pulsing_router_in_flight 0",
];

#[tokio::test]
async fn test_s5_a_stream_of_an_engine_that_hangs_goes_on_elsewhere_wherever_it_stops() {
    for body in
        [chat(USAGE), chat(&format!(r#"{USAGE},"max_tokens":5"#)), completion(r#","temperature":0,"max_tokens":9"#)]
    {
        let (expected, count) = undisturbed(&body).await;
        let mut cuts = JoinSet::new();
        for at in 1..count {
            cuts.spawn(stops(at, body.clone(), expected.clone()));
        }
        cuts.join_all().await;
    }
}

/// The engine stops after `at` events.
async fn stops(at: usize, body: String, expected: String) {
    let cluster = FakeCluster::new();
    let hung = hung(&cluster, at).await;
    let gateway = cluster.gateway(quick).await;
    let mut client = begun(&gateway, &body, &hung).await;
    let other = engine(VLLM, &hung.streams).await;
    join(&other, &cluster, &ALIKE);
    hung.falls_silent();
    let (seen, whole) = rest(&mut client).await;
    assert!(whole, "{body}, stopped at {at}: {seen}");
    assert_eq!(seen, expected, "{body}, stopped at {at}");
    until("its connection is closed", || hung.left() == 1).await;
    counted(&gateway, &TAKEN_BACK).await;
}

#[tokio::test]
async fn test_s5_a_stream_goes_on_elsewhere_when_nothing_comes_though_the_engine_says_it_serves() {
    let (expected, _) = undisturbed(&chat(USAGE)).await;
    let cluster = FakeCluster::new();
    let hung = hung(&cluster, 4).await;
    let gateway = cluster.gateway(quick).await;
    let asked = Instant::now();
    let mut client = begun(&gateway, &chat(USAGE), &hung).await;
    let other = engine(VLLM, &hung.streams).await;
    // Busier: by its load the one that stands still would be the better choice.
    join(&other, &cluster, &ALIKE).report(|report| report.running = 3);
    assert_eq!(rest(&mut client).await, (expected, true));
    assert!(other.asked() > 0);
    assert!(asked.elapsed() > Duration::from_millis(390), "the clock of progress has a floor");
    until("its connection is closed", || hung.left() == 1).await;
    counted(&gateway, &TAKEN_BACK).await;
}

#[tokio::test]
async fn test_s5_a_stream_goes_on_elsewhere_when_its_engine_reports_no_progress() {
    let (expected, _) = undisturbed(&chat(USAGE)).await;
    let cluster = FakeCluster::new();
    let hung = hung(&cluster, 4).await;
    let gateway = cluster
        .gateway(|config| {
            quick(config);
            config.worker_standstill = Duration::from_secs(20);
        })
        .await;
    let mut client = begun(&gateway, &chat(USAGE), &hung).await;
    let other = engine(VLLM, &hung.streams).await;
    join(&other, &cluster, &ALIKE);
    hung.worker.report(|report| (report.running, report.progress_age_ms) = (1, 21_000));
    assert_eq!(tokio::time::timeout(Duration::from_secs(10), rest(&mut client)).await.unwrap(), (expected, true));
    until("its connection is closed", || hung.left() == 1).await;
    counted(&gateway, &TAKEN_BACK).await;
}

#[tokio::test]
async fn test_s5_an_engine_that_hangs_before_it_shows_a_request_is_stuck_and_an_idle_one_is_not() {
    let cluster = FakeCluster::new();
    let serves = Arc::new(AtomicBool::new(true));
    let open = Arc::clone(&serves);
    let hanging = Engine::start(move |turn: Turn| {
        let open = Arc::clone(&open);
        async move {
            if open.load(Ordering::SeqCst) {
                return serve(turn, VLLM, Arc::new(AtomicUsize::new(1))).await;
            }
            turn.gone().await;
            None
        }
    })
    .await;
    // By its own numbers it has nothing to do, and has not done anything for an hour.
    join(&hanging, &cluster, &ALIKE).report(|report| report.progress_age_ms = 3_600_000);
    let gateway = cluster.gateway(quick).await;
    assert_eq!(post(&gateway, "/v1/chat/completions", &chat(USAGE)).await.status, 200);
    serves.store(false, Ordering::SeqCst);
    let (before, asked) = (hanging.asked(), Instant::now());
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &chat(USAGE)).await;
    until("it has it", || hanging.asked() > before).await;
    counted(&gateway, &["pulsing_router_workers{state=\"ready\"} 1"]).await;
    let other = engine(VLLM, &Arc::new(AtomicUsize::new(1))).await;
    join(&other, &cluster, &ALIKE).report(|report| report.running = 3);
    assert_eq!(client.response(true).await.status, 200);
    assert!(asked.elapsed() > Duration::from_millis(390), "its time began when it got the request");
    assert_eq!(other.asked(), 1);
    counted(&gateway, &["pulsing_router_retries_total{reason=\"taken_back\"} 1"]).await;
}

/// An engine that takes requests and never answers; by its own numbers it is idle.
async fn never(cluster: &FakeCluster) -> Arc<Engine> {
    let engine = Engine::start(|turn: Turn| async move {
        turn.gone().await;
        None
    })
    .await;
    join(&engine, cluster, &ALIKE).report(|report| report.progress_age_ms = 3_600_000);
    engine
}

#[tokio::test]
async fn test_s5_an_engine_has_twice_as_long_for_what_was_taken_back_from_another() {
    for body in [CHAT, STREAM] {
        let cluster = FakeCluster::new();
        let first = never(&cluster).await;
        let gateway = cluster
            .gateway(|config| {
                quick(config);
                config.take_back = Duration::from_millis(100);
            })
            .await;
        let mut client = Client::connect(&gateway).await;
        client.post("/v1/chat/completions", body).await;
        until("the first one has it", || first.asked() == 1).await;
        let second = never(&cluster).await;
        until("the second one has it", || second.asked() == 1).await;
        let handed = Instant::now();
        // Which looks idle again, now that it has nothing to do.
        until("the first one has it again", || first.asked() == 2).await;
        let given = handed.elapsed();
        assert!(
            given > Duration::from_millis(980),
            "after {given:?}: what is slow on all of them would wander for ever"
        );
    }
}

#[tokio::test]
async fn test_s5_a_stream_whose_engine_gives_to_others_waits_for_its_turn() {
    let (expected, _) = undisturbed(&chat(GREEDY)).await;
    let cluster = FakeCluster::new();
    let (hung, beats) = (hung(&cluster, 4).await, Arc::new(AtomicUsize::new(0)));
    let gateway = cluster.gateway(quick).await;
    let mut client = begun(&gateway, &chat(GREEDY), &hung).await;
    let other = engine(VLLM, &hung.streams).await;
    join(&other, &cluster, &ALIKE).report(|report| report.running = 3);
    // Answers of the same engine, one after the other, for three times as long as it may stand still.
    let begun = Instant::now();
    let busy = {
        let (beats, hung) = (Arc::clone(&beats), Arc::clone(&hung.engine));
        async move {
            while begun.elapsed() < Duration::from_millis(1200) {
                let before = hung.asked();
                assert_eq!(post(&gateway, "/v1/chat/completions", &chat(GREEDY)).await.status, 200);
                beats.fetch_add(hung.asked() - before, Ordering::SeqCst);
            }
            gateway
        }
    };
    let gateway = busy.await;
    assert!(beats.load(Ordering::SeqCst) > 2, "the other streams are on it, too");
    assert_eq!(hung.left(), 0);
    hung.go.store(true, Ordering::SeqCst);
    assert_eq!(rest(&mut client).await, (expected, true));
    counted(&gateway, &["pulsing_router_retries_total{reason=\"taken_back\"} 0"]).await;
}

#[tokio::test]
async fn test_s5_a_slow_engine_keeps_its_stream_whatever_is_said_of_it() {
    let cluster = FakeCluster::new();
    // Between two words it needs longer than an engine may be silent: a busy one does not answer at once either.
    let slow = Engine::start(|mut turn: Turn| async move {
        turn.begin().await;
        let mut pauses = [200, 450, 450].into_iter();
        for event in events(VLLM, &serde_json::from_str(&turn.seen.body).unwrap(), 0) {
            turn.chunk(event.as_bytes()).await;
            let pause = Duration::from_millis(pauses.next().unwrap_or(10));
            let left = tokio::time::timeout(pause, turn.stream.read(&mut [0])).await;
            assert!(left.is_err(), "its stream was taken away");
        }
        turn.end().await
    })
    .await;
    let worker = join(&slow, &cluster, &ALIKE);
    let gateway = cluster.gateway(quick).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &chat(USAGE)).await;
    assert_eq!(client.head().await.0, 200);
    let other = engine(VLLM, &Arc::new(AtomicUsize::new(1))).await;
    join(&other, &cluster, &ALIKE);
    worker.report(|report| report.answer_age_ms = 60_000);
    let (expected, _) = undisturbed(&chat(USAGE)).await;
    assert_eq!(rest(&mut client).await, (expected, true));
    assert_eq!(other.asked(), 0);
}

#[tokio::test]
async fn test_s5_an_engine_that_wakes_before_another_one_answers_keeps_its_stream() {
    let (expected, _) = undisturbed(&chat(USAGE)).await;
    for question in ["/tokenize", "/v1/chat/completions"] {
        let cluster = FakeCluster::new();
        let hung = hung(&cluster, 4).await;
        hung.on.store(false, Ordering::SeqCst);
        let gateway = cluster.gateway(quick).await;
        let mut client = begun(&gateway, &chat(USAGE), &hung).await;
        let streams = Arc::clone(&hung.streams);
        let late = Engine::start(move |turn: Turn| {
            let streams = Arc::clone(&streams);
            async move {
                if !turn.seen.head.contains(question) {
                    return serve(turn, VLLM, streams).await;
                }
                turn.gone().await;
                None
            }
        })
        .await;
        join(&late, &cluster, &ALIKE);
        hung.falls_silent();
        until("another one is asked", || late.seen.lock().iter().any(|seen| seen.head.contains(question))).await;
        hung.go.store(true, Ordering::SeqCst);
        until("the other one is told", || late.left.load(Ordering::SeqCst) == 1).await;
        hung.on.store(true, Ordering::SeqCst);
        assert_eq!(rest(&mut client).await, (expected.clone(), true), "{question}");
        counted(&gateway, &["pulsing_router_resumed_streams_total 0", "reason=\"taken_back\"} 0"]).await;
    }
}

#[tokio::test]
async fn test_s5_an_engine_that_breaks_off_while_another_one_is_asked_costs_nothing_either() {
    let (expected, _) = undisturbed(&chat(USAGE)).await;
    let cluster = FakeCluster::new();
    let (streams, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (served, dies) = (Arc::clone(&streams), Arc::clone(&go));
    let dying = Engine::start(move |mut turn: Turn| {
        let (streams, dies) = (Arc::clone(&served), Arc::clone(&dies));
        async move {
            turn.begin().await;
            for event in &events(VLLM, &serde_json::from_str(&turn.seen.body).unwrap(), 0)[..4] {
                turn.chunk(event.as_bytes()).await;
            }
            streams.fetch_add(1, Ordering::SeqCst);
            until("it dies", || dies.load(Ordering::SeqCst)).await;
            None
        }
    })
    .await;
    let worker = join(&dying, &cluster, &ALIKE);
    let gateway = cluster.gateway(quick).await;
    let mut client = Client::connect(&gateway).await;
    client.post("/v1/chat/completions", &chat(USAGE)).await;
    assert_eq!(client.head().await.0, 200);
    until("it has stopped", || streams.load(Ordering::SeqCst) == 1).await;
    let (served, dies) = (Arc::clone(&streams), Arc::clone(&go));
    let other = Engine::start(move |turn: Turn| {
        let (streams, dies) = (Arc::clone(&served), Arc::clone(&dies));
        async move {
            dies.store(true, Ordering::SeqCst);
            serve(turn, VLLM, streams).await
        }
    })
    .await;
    join(&other, &cluster, &ALIKE);
    worker.report(|report| report.answer_age_ms = 60_000);
    assert_eq!(rest(&mut client).await, (expected, true));
    assert_eq!(other.asked(), 4, "it is asked once: how it reads prompt and text, and for the rest");
    counted(&gateway, &["pulsing_router_resumed_streams_total 1", "pulsing_router_broken_streams_total 0"]).await;
}

#[tokio::test]
async fn test_s5_a_stream_that_nobody_can_go_on_with_waits_for_its_engine() {
    let trimming = Script { trims: true, ..VLLM };
    for (body, script, more) in [
        (chat(r#","temperature":0.7"#), VLLM, ALIKE),
        (chat(r#","temperature":0,"field_of_tomorrow":1"#), VLLM, ALIKE),
        (completion(GREEDY), VLLM, ALIKE),
        (chat(GREEDY), trimming, ALIKE),
        (chat(GREEDY), VLLM, [ALIKE[0], ("fingerprint", "vllm 2 root")]),
    ] {
        let (expected, _) = undisturbed(&body).await;
        let cluster = FakeCluster::new();
        let hung = hung(&cluster, 4).await;
        let gateway = cluster.gateway(quick).await;
        let mut client = begun(&gateway, &body, &hung).await;
        let other = engine(script, &hung.streams).await;
        join(&other, &cluster, &more);
        hung.falls_silent();
        let early = tokio::time::timeout(Duration::from_millis(700), async {
            while client.chunk().await.is_some_and(|chunk| !chunk.is_empty()) {}
        });
        assert!(early.await.is_err(), "{body}: it ended by a clock");
        assert_eq!(hung.left(), 0, "{body}");
        hung.go.store(true, Ordering::SeqCst);
        let (seen, whole) = rest(&mut client).await;
        assert!(whole && expected.ends_with(&seen) && seen.contains("[DONE]"), "{body}: {seen}");
        counted(&gateway, &["pulsing_router_broken_streams_total 0", "reason=\"taken_back\"} 0"]).await;
    }
}

#[tokio::test]
async fn test_s5_an_engine_that_hangs_behind_the_end_of_a_stream_holds_nobody_up() {
    let (expected, count) = undisturbed(&chat(USAGE)).await;
    let cluster = FakeCluster::new();
    // All events are out, and the body has no end.
    let hung = hung(&cluster, count).await;
    let gateway = cluster.gateway(quick).await;
    let mut client = begun(&gateway, &chat(USAGE), &hung).await;
    let other = engine(VLLM, &hung.streams).await;
    join(&other, &cluster, &ALIKE);
    hung.falls_silent();
    assert_eq!(rest(&mut client).await, (expected, true));
    assert_eq!(other.asked(), 0);
}

#[tokio::test]
async fn test_s5_who_cannot_go_on_is_not_the_last_to_be_asked() {
    let (expected, _) = undisturbed(&chat(USAGE)).await;
    let cluster = FakeCluster::new();
    let hung = hung(&cluster, 4).await;
    let gateway = cluster.gateway(quick).await;
    let mut client = begun(&gateway, &chat(USAGE), &hung).await;
    let strange = engine(Script { trims: true, ..VLLM }, &hung.streams).await;
    let first = join(&strange, &cluster, &ALIKE);
    hung.falls_silent();
    until("it is asked how it reads the text", || strange.asked() == 3).await;
    cluster.remove(&first);
    let other = engine(VLLM, &hung.streams).await;
    join(&other, &cluster, &ALIKE);
    assert_eq!(rest(&mut client).await, (expected, true));
    counted(&gateway, &TAKEN_BACK).await;
}
