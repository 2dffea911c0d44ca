//! Large data between nodes: whose memory it is, and whom it holds up.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use pulsing_core::actor::{Actor, Context};
use pulsing_core::{ActorSpec, Call, CallOptions, Error, Payload, Reply};

/// Memory that tells when nobody reads it any more.
struct Loan {
    data: Vec<u8>,
    back: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.back.store(true, Ordering::SeqCst);
    }
}

fn lend(size: usize) -> (Payload, Arc<AtomicBool>) {
    let back = Arc::new(AtomicBool::new(false));
    let loan = Loan { data: vec![0; size], back: Arc::clone(&back) };
    (raw("lent").with_buffers(vec![Bytes::from_owner(loan)]), back)
}

/// Counts what arrives; answers with what it was sent.
struct Count(Arc<AtomicU64>);

impl Actor for Count {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        self.0.fetch_add(1, Ordering::SeqCst);
        call.responder.value(call.payload);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_transfer_ends_at_once_and_gives_its_memory_back() {
    const SIZE: usize = 1 << 30;
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let seen = Arc::new(AtomicU64::new(0));
    let target = a.spawn(Count(Arc::clone(&seen)), named("count")).await.unwrap().target();
    b.resolve("count", None, Duration::from_secs(2)).await.unwrap();
    ask(&b, target, "open the link").await.unwrap();

    let (payload, back) = lend(SIZE);
    let options = CallOptions { timeout: Some(Duration::from_millis(20)), ..CallOptions::default() };
    let error = b.call(target, payload, options).await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    eventually("the memory is its owner's again", Duration::from_secs(5), || back.load(Ordering::SeqCst)).await;
    assert!(b.metrics().bytes_out.get() < SIZE as u64, "the rest of an abandoned message was sent");

    // The pair goes on, and its small messages take the small lane again; the abandoned one is never delivered.
    let (payload, back) = lend(1 << 20);
    let Reply::Value(value) = b.call(target, payload, CallOptions::default()).await.unwrap() else { panic!() };
    assert_eq!(value.buffers[0].len(), 1 << 20);
    eventually("a loan ends with its message", Duration::from_secs(5), || back.load(Ordering::SeqCst)).await;
    assert_eq!(ask(&b, target, "small").await.unwrap().head, "small");
    assert_eq!(seen.load(Ordering::SeqCst), 3);
}

/// Never done with its first message.
struct Stalled;

impl Actor for Stalled {
    async fn receive(&mut self, _call: Call, _ctx: &Context) {
        std::future::pending::<()>().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r2_a_stalled_receiver_holds_up_no_other_pair() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let stalled = a.spawn(Stalled, ActorSpec::default()).await.unwrap().target();
    let echo = a.spawn(Echo, named("echo")).await.unwrap().target();
    b.resolve("echo", None, Duration::from_secs(2)).await.unwrap();
    for _ in 0..4 {
        let (payload, _) = lend(8 << 20);
        b.tell(stalled, payload, CallOptions::default()).await.unwrap();
    }
    for _ in 0..3 {
        let (payload, _) = lend(8 << 20);
        let options = CallOptions { timeout: Some(Duration::from_secs(10)), ..CallOptions::default() };
        let Reply::Value(value) = b.call(echo, payload, options).await.unwrap() else { panic!() };
        assert_eq!(value.buffers[0].len(), 8 << 20);
    }
}
