//! What has ended leaves nothing behind, of whatever kind it was: allocations that live on are counted.
//!
//! One test, so that nothing else allocates meanwhile. Python's side of it is `tests/cluster/test_nothing_grows.py`.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use pulsing_core::actor::{Actor, ActorRef, Context};
use pulsing_core::{ActorSpec, Call, CallOptions, Ending, Error, Reply, System, Target};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<std::alloc::System> = &INSTRUMENTED_SYSTEM;

/// Operations of a kind that settle its tables; twice as many are counted.
const TIMES: usize = 150;

/// Allocations that live.
fn alive() -> i64 {
    let stats = ALLOCATOR.stats();
    stats.allocations as i64 - stats.deallocations as i64
}

/// Bytes in them.
fn held() -> i64 {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as i64 - stats.bytes_deallocated as i64
}

/// Actors that have ended on a node, a quarter of them with a name: more than it remembers of either.
const PAST: usize = 4500;
/// Bytes that the past of two nodes may take in both.
const PAST_HELD: i64 = 800_000;

/// Answers as it is asked to.
struct Any;

impl Actor for Any {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        match &call.payload.head[..] {
            b"fail" => call.responder.error(Error::Config("as asked".into())),
            b"hang" => drop(tokio::spawn(async move { call.responder.cancel_signal().clone().cancelled().await })),
            b"stream" => drop(tokio::spawn(async move {
                let sink = call.responder.stream();
                for n in 0..40 {
                    if sink.send(raw(n.to_string())).await.is_err() {
                        return;
                    }
                }
                sink.end();
            })),
            _ => call.responder.value(call.payload),
        }
    }
}

/// Two nodes, and an actor to be asked from either.
struct Scene {
    here: System,
    there: System,
    actor: ActorRef,
}

impl Scene {
    async fn stream(&self, from: &System, take: usize) {
        let options = CallOptions { window: 8, ..CallOptions::default() };
        let Ok(Reply::Stream(mut stream)) = from.call(self.actor.target(), raw("stream"), options).await else {
            panic!("no stream");
        };
        for _ in 0..take {
            if stream.next().await.is_none() {
                return;
            }
        }
    }

    /// One operation of a kind, by a node.
    async fn once(&self, kind: &str, from: &System, number: usize) {
        let target = self.actor.target();
        let options = CallOptions::default();
        match kind {
            "ask" => drop(ask(from, target, "x").await.unwrap()),
            "large ask" => {
                let payload = raw("x").with_buffers(vec![Bytes::from(vec![0; 200_000])]);
                from.call(target, payload, options).await.unwrap();
            }
            "tell" => {
                from.tell(target, raw("x"), options).await.unwrap();
                ask(from, target, "x").await.unwrap();
            }
            "error" => assert!(ask(from, target, "fail").await.is_err()),
            "deadline" => {
                let options = CallOptions { timeout: Some(Duration::from_millis(2)), ..options };
                assert!(from.call(target, raw("hang"), options).await.is_err());
            }
            "cancelled" => {
                let limit = Duration::from_micros(number as u64 % 5 * 300);
                let call = from.call(target, raw("hang"), options);
                assert!(tokio::time::timeout(limit, call).await.is_err());
            }
            "stream" => self.stream(from, usize::MAX).await,
            "stream dropped" => self.stream(from, 3).await,
            "no such actor" => {
                let nobody = Target { actor: pulsing_core::ActorId::generate(), ..target };
                assert!(ask(from, nobody, "x").await.is_err());
            }
            "tell nobody" => {
                let nobody = Target { actor: pulsing_core::ActorId::generate(), ..target };
                let _ = from.tell(nobody, raw("x"), options).await;
            }
            "actor" => {
                let actor = from.spawn(Echo, ActorSpec::default()).await.unwrap();
                ask(&self.here, actor.target(), "x").await.unwrap();
                actor.end(Ending::stop()).await.unwrap();
            }
            "watch" => {
                let actor = self.here.spawn(Echo, ActorSpec::default()).await.unwrap();
                let watch = from.watch(actor.target());
                actor.end(Ending::stop()).await.unwrap();
                watch.await.unwrap();
            }
            "watch dropped" => drop(from.watch(target)),
            "name" => {
                let name = format!("name-{}", number % 4);
                let actor = self.here.spawn(Echo, named(&name)).await.unwrap();
                from.resolve(&name, None, Duration::from_secs(5)).await.unwrap();
                actor.end(Ending::stop()).await.unwrap();
                eventually("the name is gone", Duration::from_secs(5), || from.instances(&name).is_empty()).await;
            }
            "no such name" => {
                let name = format!("none-{number}");
                assert!(from.resolve(&name, None, Duration::from_millis(1)).await.is_err());
            }
            "watch of a name" => drop(from.watch_name(&format!("watched-{number}")).unwrap().take()),
            _ => unreachable!("{kind}"),
        }
    }

    async fn times(&self, kind: &str, from: &System, times: usize) {
        for number in 0..times {
            self.once(kind, from, number).await;
        }
        // The other node may still be at it.
        ask(from, self.actor.target(), "x").await.unwrap();
    }
}

/// Gives both nodes a past.
async fn past(scene: &Scene, times: usize) {
    for node in [&scene.here, &scene.there] {
        for number in 0..times {
            let spec = if number % 4 == 0 { named(&format!("past-{number}")) } else { ActorSpec::default() };
            node.spawn(Echo, spec).await.unwrap().end(Ending::stop()).await.unwrap();
        }
    }
    let gone = |node: &System| node.instances(&format!("past-{}", (times - 1) / 4 * 4)).is_empty();
    eventually("the names are gone", Duration::from_secs(10), || gone(&scene.here) && gone(&scene.there)).await;
}

/// What nodes remember fills up to a bound, and stays there.
async fn remembers_so_much(scene: &Scene) {
    // What connections need is there.
    past(scene, 100).await;
    let before = held();
    past(scene, PAST).await;
    let full = held();
    assert!(full - before < PAST_HELD, "a past takes {} bytes", full - before);
    past(scene, PAST).await;
    eventually("no more is held", Duration::from_secs(10), || held() - full < PAST_HELD / 8).await;
}

/// Runs `kind` until what it allocates stays the same, then twice as often.
async fn settles(scene: &Scene, kind: &str, from: &System) {
    let mut before = alive();
    for _ in 0..10 {
        scene.times(kind, from, TIMES).await;
        let grown = alive() - std::mem::replace(&mut before, alive());
        if grown < TIMES as i64 / 5 {
            break;
        }
    }
    scene.times(kind, from, 2 * TIMES).await;
    let begun = Instant::now();
    // One allocation an operation would be twice as many.
    while alive() - before >= TIMES as i64 {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{kind}: {} allocations are left of {} operations",
            alive() - before,
            2 * TIMES
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const KINDS: [&str; 16] = [
    "ask",
    "large ask",
    "tell",
    "error",
    "deadline",
    "cancelled",
    "stream",
    "stream dropped",
    "no such actor",
    "tell nobody",
    "actor",
    "watch",
    "watch dropped",
    "name",
    "no such name",
    "watch of a name",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_ended_leaves_no_allocation_behind() {
    let here = node(&[]).await;
    let there = node(&[&here]).await;
    let actor = here.spawn(Any, named("any")).await.unwrap();
    there.resolve("any", None, Duration::from_secs(5)).await.unwrap();
    let scene = Scene { here, there, actor };
    remembers_so_much(&scene).await;
    for kind in KINDS {
        for from in [&scene.here, &scene.there] {
            settles(&scene, kind, from).await;
        }
    }
    // Whole nodes, with their connections and names, come and go, too.
    const GUESTS: i64 = 12;
    let mut before = 0;
    for round in 0..2 * GUESTS {
        if round == GUESTS {
            before = alive();
        }
        let guest = node(&[&scene.here]).await;
        let actor = guest.spawn(Echo, named("guest")).await.unwrap();
        scene.there.resolve("guest", None, Duration::from_secs(5)).await.unwrap();
        ask(&scene.there, actor.target(), "x").await.unwrap();
        actor.end(Ending::stop()).await.unwrap();
        guest.shutdown().await;
        drop((guest, actor));
        let gone = |node: &System| node.instances("guest").is_empty();
        eventually("it is gone", Duration::from_secs(10), || gone(&scene.here) && gone(&scene.there)).await;
    }
    // Both nodes remember who left, up to a bound; nothing else.
    let each = || (alive() - before) / GUESTS;
    eventually("few allocations are left of each node", Duration::from_secs(20), || each() < 24).await;
}
