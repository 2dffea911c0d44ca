//! Several Routers in front of the same workers see the load of all of them, each without knowing the others (S5).
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{CHAT, Client, FakeCluster, FakeWorker, done, get, send, text};
use pulsing_gateway::Gateway;

const ROUTERS: usize = 3;
const WORKERS: usize = 3;
/// Requests that the clients of one Router keep under way.
const CLIENTS: usize = 16;

/// Serves for a while and reports its load on each change, as workers do.
async fn serve(ask: common::Ask) {
    let worker = Arc::clone(&ask.worker);
    let tell = |worker: &FakeWorker| {
        let active = worker.active.load(Ordering::SeqCst);
        worker.report(|load| load.running = active);
    };
    tell(&worker);
    tokio::time::sleep(Duration::from_millis(rand::random_range(100..400))).await;
    let stream = ask.responder.stream();
    send(&stream, vec![text("x"), done("stop")]).await;
    stream.end();
    let left = Arc::clone(&worker);
    // Counted down when this function is over.
    tokio::spawn(async move { tell(&left) });
}

async fn ask_on_and_on(gateway: Arc<Gateway>, over: Arc<AtomicBool>) -> usize {
    let mut client = Client::connect(&gateway).await;
    let mut asked = 0;
    while !over.load(Ordering::SeqCst) {
        client.post("/v1/chat/completions", CHAT).await;
        assert_eq!(client.response(true).await.status, 200);
        asked += 1;
    }
    asked
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_s5_three_routers_see_the_load_of_all_and_keep_three_workers_even() {
    let cluster = FakeCluster::new();
    let workers: Vec<_> = (0..WORKERS).map(|_| cluster.worker(serve)).collect();
    for worker in &workers {
        worker.report(|load| load.capacity = 64);
    }
    let mut gateways = Vec::new();
    for _ in 0..ROUTERS {
        gateways.push(Arc::new(cluster.gateway(|config| config.debug_routing = true).await));
    }
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..ROUTERS * CLIENTS)
        .map(|number| tokio::spawn(ask_on_and_on(Arc::clone(&gateways[number % ROUTERS]), Arc::clone(&over))))
        .collect();
    let truth = || workers.iter().map(|worker| f64::from(worker.active.load(Ordering::SeqCst))).collect::<Vec<_>>();
    common::until("everybody is being served", || truth().iter().sum::<f64>() >= (ROUTERS * CLIENTS) as f64 * 0.9)
        .await;

    let (mut wrong, mut all, mut uneven, mut samples) = (0.0, 0.0, 0.0, 0.0);
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        for gateway in &gateways {
            let before = truth();
            let page = get(gateway, "/v1/_routing").await.json();
            let after = truth();
            for (at, worker) in workers.iter().enumerate() {
                let row =
                    page["workers"].as_array().unwrap().iter().find(|row| row["instance"] == worker.id.to_string());
                let seen = row.unwrap()["load"].as_f64().unwrap();
                // What changed while the page was fetched is not held against it.
                let (low, high) = (before[at].min(after[at]), before[at].max(after[at]));
                wrong += (low - seen).max(seen - high).max(0.0);
                all += (low + high) / 2.0;
            }
            let mean = before.iter().sum::<f64>() / WORKERS as f64;
            uneven += before.iter().copied().fold(0.0, f64::max) / mean;
            samples += 1.0;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    over.store(true, Ordering::SeqCst);
    let mut asked = 0;
    for client in clients {
        asked += client.await.unwrap();
    }
    assert!(asked > ROUTERS * CLIENTS * 3, "{asked} requests are too few to say anything");
    let (error, imbalance) = (wrong / all, uneven / samples);
    assert!(error <= 0.1, "the Routers are wrong about the load by {:.1} %", error * 100.0);
    assert!(imbalance <= 1.2, "the busiest worker has {imbalance:.2} times the mean");
    println!("load error {:.1} %, max/mean {imbalance:.3}, {asked} requests, {samples} samples", error * 100.0);
}
