//! Nodes and actors for tests: everything on loopback, one secret a test process.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pulsing_core::actor::{Actor, Context};
use pulsing_core::{ActorSpec, Call, CallOptions, Codec, Payload, Reply, System, SystemConfig, Target};

pub fn secret_file() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| std::env::temp_dir().join(format!("pulsing-test-{}/secret", std::process::id()))).clone()
}

pub fn config(seeds: &[String]) -> SystemConfig {
    SystemConfig {
        addr: Some("127.0.0.1:0".into()),
        seeds: seeds.to_vec(),
        secret_file: Some(secret_file()),
        ..SystemConfig::default()
    }
}

pub async fn node(seeds: &[&System]) -> System {
    let seeds: Vec<_> = seeds.iter().map(|s| s.addr().to_string()).collect();
    System::start(config(&seeds)).await.unwrap()
}

pub fn named(name: &str) -> ActorSpec {
    ActorSpec { name: Some(name.into()), public: true, class: "test".into(), ..ActorSpec::default() }
}

pub fn raw(body: impl Into<Bytes>) -> Payload {
    Payload::new(Codec::RAW, body)
}

pub async fn ask(system: &System, target: Target, body: impl Into<Bytes>) -> pulsing_core::Result<Payload> {
    match system.call(target, raw(body), CallOptions::default()).await? {
        Reply::Value(payload) => Ok(payload),
        Reply::Stream(_) => panic!("a stream"),
    }
}

/// Polls until `check` holds.
pub async fn eventually(what: &str, limit: Duration, mut check: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    begun.elapsed()
}

/// Returns what it gets.
pub struct Echo;

impl Actor for Echo {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        let Call { payload, responder, .. } = call;
        responder.value(payload);
    }
}
