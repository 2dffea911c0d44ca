//! Tells: back-pressure in place of loss, order, and what ends the wait (R2, R3).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::*;
use parking_lot::Mutex;
use pulsing_core::actor::{Actor, ActorRef, Context};
use pulsing_core::{ActorId, ActorSpec, Call, CallOptions, Error, Mode, System, TELL_WINDOW, Target};
use tokio::sync::Semaphore;

/// Notes the numbers it is told, each once its gate lets it; answers an ask with what it has seen.
#[derive(Clone)]
struct Slow {
    gate: Arc<Semaphore>,
    seen: Arc<Mutex<Vec<u64>>>,
}

impl Slow {
    fn new() -> Self {
        Self { gate: Arc::new(Semaphore::new(0)), seen: Arc::default() }
    }
    fn count(&self) -> u64 {
        self.seen.lock().len() as u64
    }
}

impl Actor for Slow {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        self.gate.acquire().await.unwrap().forget();
        if call.mode == Mode::Ask {
            return call.responder.value(raw(self.count().to_string()));
        }
        let number = std::str::from_utf8(&call.payload.head).unwrap().parse().unwrap();
        self.seen.lock().push(number);
    }
}

async fn two(slow: &Slow) -> (System, System, ActorRef) {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let actor = a.spawn(slow.clone(), named("slow")).await.unwrap();
    b.resolve("slow", None, Duration::from_secs(2)).await.unwrap();
    (a, b, actor)
}

fn from(sender: u128) -> CallOptions {
    CallOptions { sender: Some(ActorId(sender)), ..CallOptions::default() }
}

/// Tells as many numbers as go, counting them.
fn produce(system: &System, target: Target, upto: u64) -> (Arc<AtomicU64>, tokio::task::JoinHandle<Result<(), Error>>) {
    let (sent, system) = (Arc::new(AtomicU64::new(0)), system.clone());
    let counted = Arc::clone(&sent);
    let task = tokio::spawn(async move {
        for n in 0..upto {
            system.tell(target, raw(n.to_string()), from(1)).await?;
            counted.store(n + 1, Ordering::SeqCst);
        }
        Ok(())
    });
    (sent, task)
}

/// What may be sent before the first message is handled: the one at work, a mailbox full, a window.
const BOUND: u64 = 1 + 256 + TELL_WINDOW as u64;

async fn stalled(sent: &AtomicU64) {
    eventually("the producer is at its bound", Duration::from_secs(5), || sent.load(Ordering::SeqCst) == BOUND).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r3_a_fast_teller_waits_for_a_slow_actor_and_loses_nothing() {
    let slow = Slow::new();
    let (a, b, actor) = two(&slow).await;
    let target = actor.target();
    for system in [&b, &a] {
        slow.seen.lock().clear();
        let (sent, task) = produce(system, target, 5000);
        stalled(&sent).await;
        // Whatever the pace, no more than the bound is ever unhandled.
        while slow.count() < 5000 {
            slow.gate.add_permits(50);
            tokio::task::yield_now().await;
            let told = sent.load(Ordering::SeqCst);
            assert!(told <= slow.count() + BOUND);
        }
        task.await.unwrap().unwrap();
        assert!(*slow.seen.lock() == (0..5000).collect::<Vec<_>>(), "all, in order");
        while let Ok(permit) = slow.gate.try_acquire() {
            permit.forget();
        }
    }
    assert_eq!(a.metrics().dead_letters.get(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r2_an_ask_does_not_overtake_tells_that_wait_and_other_pairs_are_not_held_up() {
    let slow = Slow::new();
    let (a, b, actor) = two(&slow).await;
    let target = actor.target();
    let echo = a.spawn(Echo, ActorSpec::default()).await.unwrap().target();
    let (sent, task) = produce(&b, target, BOUND + 10);
    stalled(&sent).await;
    // Another actor, and another sender to this one.
    assert_eq!(b.call(echo, raw("x"), from(1)).await.map(|_| ()), Ok(()));
    let refused = b.tell(target, raw("0"), CallOptions { no_wait: true, ..from(2) }).await;
    assert!(matches!(refused, Err(Error::MailboxFull { .. })), "{refused:?}");
    let ask = tokio::spawn({
        let b = b.clone();
        async move { b.call(target, raw("ask"), from(1)).await }
    });
    slow.gate.add_permits(2 * BOUND as usize);
    task.await.unwrap().unwrap();
    let pulsing_core::Reply::Value(seen) = ask.await.unwrap().unwrap() else { panic!() };
    // The tell that waited when the ask was made came first.
    let seen: u64 = std::str::from_utf8(&seen.head).unwrap().parse().unwrap();
    assert!(seen > BOUND, "{seen}");
    eventually("the rest", Duration::from_secs(2), || slow.count() == BOUND + 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r3_a_tell_that_waits_ends_with_its_actor_its_link_or_its_sender() {
    for end in ["actor", "link", "sender"] {
        let slow = Slow::new();
        let (a, b, actor) = two(&slow).await;
        let target = actor.target();
        let (sent, task) = produce(&b, target, 5000);
        stalled(&sent).await;
        match end {
            "actor" => {
                actor.kill();
                let error = task.await.unwrap().unwrap_err();
                assert!(matches!(error, Error::ActorStopped { .. }), "{error}");
                // It may still be on its way out.
                let refused = ask(&b, target, "x").await.unwrap_err();
                assert!(matches!(refused, Error::ActorNotFound { .. } | Error::ActorStopped { .. }), "{refused}");
            }
            "link" => {
                a.shutdown().await;
                let error = task.await.unwrap().unwrap_err();
                assert!(matches!(error, Error::ConnectionLost { .. } | Error::NodeNotFound { .. }), "{error}");
                assert!(!matches!(error, Error::ConnectionLost { .. }) || !error.retry_safe());
            }
            _ => {
                // The one that waits is withdrawn, and is never sent.
                task.abort();
                assert!(task.await.is_err());
                slow.gate.add_permits(10_000);
                eventually("what was sent arrives", Duration::from_secs(5), || slow.count() == BOUND).await;
                b.tell(target, raw("77"), from(1)).await.unwrap();
                eventually("the next follows", Duration::from_secs(5), || slow.seen.lock().last() == Some(&77)).await;
                assert_eq!(slow.count(), BOUND + 1);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tell_to_nobody_is_no_silence() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let target = Target { node: a.node_id(), actor: ActorId(5) };
    assert!(matches!(a.tell(target, raw("x"), CallOptions::default()).await, Err(Error::ActorNotFound { .. })));
    // From elsewhere it is on its way before that is known: it is counted there, and the credit comes back.
    for _ in 0..2 * TELL_WINDOW {
        match b.tell(target, raw("x"), CallOptions::default()).await {
            Ok(()) | Err(Error::ActorStopped { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    eventually("they are counted", Duration::from_secs(2), || a.metrics().dead_letters.get() > 1).await;
}
