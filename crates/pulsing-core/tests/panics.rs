//! A panic in an endpoint is an error of the call that met it (R1, R7).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use pulsing_core::{ActorId, ActorSpec, Call, CallOptions, Ending, Endpoint, Error, Reply, Target};

/// Panics on the network's own threads when told to.
struct Brittle;

impl Endpoint for Brittle {
    fn deliver(&self, call: Call) {
        match &call.payload.head[..] {
            b"panic" => panic!("as asked"),
            b"late" => drop(tokio::spawn(async move {
                let _held = call;
                panic!("in a task");
            })),
            b"stream" => {
                let sink = call.responder.stream();
                assert!(sink.credit().try_take());
                let _ = sink.try_send(raw("one"));
                panic!("in a stream")
            }
            _ => call.responder.value(raw("fine")),
        }
    }
    fn end(&self, _ending: Ending) {
        panic!("told to end");
    }
}

fn panic_of(error: &Error) -> &str {
    match error {
        Error::App(app) if app.type_name == "panic" => &app.message,
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_r7_a_panic_of_an_endpoint_is_an_error_of_its_call_and_of_no_other() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let actor = ActorId::generate();
    a.register(actor, ActorSpec::default(), Arc::new(Brittle)).unwrap();
    let target = Target { node: a.node_id(), actor };
    for system in [&a, &b] {
        for _ in 0..3 {
            let error = ask(system, target, "panic").await.unwrap_err();
            assert_eq!(panic_of(&error), "as asked");
            assert!(panic_of(&ask(system, target, "late").await.unwrap_err()).contains("log"));
            let Reply::Stream(mut items) = system.call(target, raw("stream"), CallOptions::default()).await.unwrap()
            else {
                panic!()
            };
            assert_eq!(items.next().await.unwrap().unwrap().head, "one");
            assert_eq!(panic_of(&items.next().await.unwrap().unwrap_err()), "in a stream");
            system.signal(target, Ending::Kill);
            // The link, the actor and every lock live on.
            assert_eq!(ask(system, target, "x").await.unwrap().head, "fine");
        }
    }
    eventually("the two still see each other", Duration::from_secs(1), || b.members().len() == 2).await;
}
