//! What is too large is refused in words, and costs nobody else anything.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use pulsing_core::actor::{Actor, Context};
use pulsing_core::{ActorSpec, Call, CallOptions, Codec, Error, Payload, Reply, System, SystemConfig};

const LIMIT: u64 = 1 << 20;

async fn two(a: u64, b: u64) -> (System, System) {
    let a = System::start(SystemConfig { max_message: a, ..config(&[]) }).await.unwrap();
    let seeds = [a.addr().to_string()];
    let b = System::start(SystemConfig { max_message: b, ..config(&seeds) }).await.unwrap();
    (a, b)
}

/// Answers with as many bytes as asked for; with `stream` as the first word, item by item, and notes how that ended.
struct Large(Arc<AtomicBool>);

impl Actor for Large {
    async fn receive(&mut self, call: Call, _ctx: &Context) {
        let size = |payload: &Payload| std::str::from_utf8(&payload.head).unwrap().parse::<usize>().unwrap();
        let cut = Arc::clone(&self.0);
        if call.payload.buffers.is_empty() {
            let size = size(&call.payload);
            return call.responder.value(raw(vec![1; size]));
        }
        let size = size(&call.payload);
        tokio::spawn(async move {
            let sink = call.responder.stream();
            for size in [1, size, 1] {
                if sink.send(raw(vec![1; size])).await.is_err() {
                    return cut.store(true, Ordering::SeqCst);
                }
            }
            sink.end();
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r7_a_message_over_the_limit_is_refused_before_it_is_sent() {
    let (a, b) = two(LIMIT, LIMIT).await;
    let echo = a.spawn(Echo, ActorSpec::default()).await.unwrap().target();
    let sent = b.metrics().bytes_out.get();
    let large = raw("x").with_buffers(vec![Bytes::from(vec![0; LIMIT as usize])]);
    for _ in 0..2 {
        let error = b.call(echo, large.clone(), CallOptions::default()).await.unwrap_err();
        let Error::TooLarge { size, limit, ref setting, .. } = error else { panic!("{error}") };
        assert_eq!((size, limit, setting.as_str()), (LIMIT + 1, LIMIT, "max_message"));
        assert!(error.retry_safe());
    }
    assert!(b.metrics().bytes_out.get() - sent < LIMIT / 2, "it was not sent");
    assert_eq!(ask(&b, echo, "y").await.unwrap().head, "y");
    // The limit is for what travels.
    a.call(echo, large, CallOptions::default()).await.unwrap();
    let many = raw("x").with_buffers(vec![Bytes::from_static(b"y"); 100_000]);
    let error = b.call(echo, many, CallOptions::default()).await.unwrap_err();
    assert!(error.to_string().contains("the list of the 100000 buffers of a message"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r7_an_answer_over_the_limit_is_an_error_of_its_call() {
    let (a, b) = two(LIMIT, LIMIT).await;
    let cut = Arc::new(AtomicBool::new(false));
    let target = a.spawn(Large(Arc::clone(&cut)), ActorSpec::default()).await.unwrap().target();
    let over = (LIMIT + 1).to_string();
    let error = ask(&b, target, over.clone()).await.unwrap_err();
    assert!(matches!(error, Error::ReplyTooLarge { size, limit: LIMIT, .. } if size == LIMIT + 1), "{error}");
    assert!(!error.retry_safe());
    assert_eq!(ask(&b, target, LIMIT.to_string()).await.unwrap().len() as u64, LIMIT);

    let stream = Payload { codec: Codec::RAW, head: over.into(), buffers: vec![Bytes::from_static(b"stream")] };
    let Reply::Stream(mut items) = b.call(target, stream, CallOptions::default()).await.unwrap() else { panic!() };
    assert_eq!(items.next().await.unwrap().unwrap().len(), 1);
    let error = items.next().await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::ReplyTooLarge { what, .. } if what == "an item of a stream"), "{error}");
    assert!(items.next().await.is_none());
    eventually("the producer is told", Duration::from_secs(1), || cut.load(Ordering::SeqCst)).await;
}

/// Where the peer's limit is the higher one, what it sends is passed over: its call fails, and the link lives on.
#[tokio::test(flavor = "multi_thread")]
async fn test_r7_what_arrives_over_the_limit_costs_its_own_call_and_no_other() {
    let (a, b) = two(LIMIT, 64 * LIMIT).await;
    let echo = a.spawn(Echo, ActorSpec::default()).await.unwrap().target();
    ask(&b, echo, "warm").await.unwrap();
    // Under way at the same time, in one lane with what is refused.
    let beside = tokio::spawn({
        let b = b.clone();
        async move { ask(&b, echo, vec![7; LIMIT as usize]).await.unwrap().len() as u64 }
    });
    for size in [LIMIT + 1, 20 * LIMIT] {
        let error = ask(&b, echo, vec![0; size as usize]).await.unwrap_err();
        assert!(matches!(error, Error::TooLarge { size: told, limit: LIMIT, .. } if told == size), "{error}");
    }
    let told = b.tell(echo, raw(vec![0; 2 * LIMIT as usize]), CallOptions::default()).await;
    assert_eq!(told, Ok(()));
    assert_eq!(beside.await.unwrap(), LIMIT);
    assert_eq!(ask(&b, echo, "y").await.unwrap().head, "y");
    eventually("the tell is counted", Duration::from_secs(2), || a.metrics().dead_letters.get() == 1).await;

    // And the other way: an answer, and an item of a stream.
    let cut = Arc::new(AtomicBool::new(false));
    let target = b.spawn(Large(Arc::clone(&cut)), ActorSpec::default()).await.unwrap().target();
    let over = (3 * LIMIT).to_string();
    let error = ask(&a, target, over.clone()).await.unwrap_err();
    assert!(matches!(error, Error::ReplyTooLarge { limit: LIMIT, .. }), "{error}");
    let stream = Payload { codec: Codec::RAW, head: over.into(), buffers: vec![Bytes::from_static(b"stream")] };
    let options = CallOptions { window: 2, ..CallOptions::default() };
    let Reply::Stream(mut items) = a.call(target, stream, options).await.unwrap() else { panic!() };
    assert_eq!(items.next().await.unwrap().unwrap().len(), 1);
    assert!(matches!(items.next().await.unwrap(), Err(Error::ReplyTooLarge { .. })));
    assert_eq!(ask(&a, target, "5").await.unwrap().len(), 5);
}
