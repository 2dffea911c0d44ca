//! Who looks at a node: on its port, at an address of their own, or not at all (design section 5).
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::*;
use pulsing_core::actor::{Actor, Context, RestartPolicy, SpawnOptions, Supervision};
use pulsing_core::observe::get;
use pulsing_core::{Call, Ending, Error, Passphrase, Security, System, SystemConfig};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const LIMIT: Duration = Duration::from_secs(5);
const PAGES: [&str; 5] = ["/health", "/ready", "/cluster/members", "/actors", "/metrics"];

fn observed() -> SystemConfig {
    SystemConfig { observe_addr: Some("127.0.0.1:0".into()), ..config(&[]) }
}

fn secret() -> Security {
    Security::Passphrase(Passphrase::new("correct horse battery staple").unwrap())
}

/// Status, and what stands in the answer to a plain GET; `None` where the connection is closed without one.
async fn plain(addr: &str, path: &str) -> Option<(u16, String)> {
    let mut io = TcpStream::connect(addr).await.unwrap();
    io.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut text = String::new();
    tokio::time::timeout(LIMIT, io.read_to_string(&mut text)).await.unwrap().ok()?;
    let status = text.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    Some((status, text))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_under_tls_is_observed_in_plain_http_at_an_address_of_its_own() {
    let node = System::start(SystemConfig { security: secret(), ..observed() }).await.unwrap();
    let at = node.observed_at().unwrap().to_string();
    for path in PAGES {
        assert_eq!(get(&at, path, LIMIT).await.unwrap().status, 200, "{path}");
        assert_eq!(plain(&at, path).await.unwrap().0, 200, "{path}");
        assert_eq!(plain(&node.addr().to_string(), path).await.unwrap().0, 403, "{path}: the node's port speaks TLS");
    }
    // Nothing but observers comes in there.
    let joins = SystemConfig {
        security: secret(),
        join_timeout: Some(Duration::from_secs(1)),
        ..config(std::slice::from_ref(&at))
    };
    System::start(joins).await.map(|_| ()).unwrap_err();
    assert_eq!(node.members().len(), 1);

    node.shutdown().await;
    let again = SystemConfig { observe_addr: Some(at.clone()), ..config(&[]) };
    let heir = System::start(again.clone()).await.expect("the address is free with the node's end");
    let error = System::start(again).await.map(|_| ()).unwrap_err();
    let words = error.to_string();
    assert!(matches!(error, Error::Bind { .. }) && words.contains(&heir.node_id().to_string()), "{words}");
    assert!(words.contains("--observe_addr"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_observed_elsewhere_only_says_nothing_on_its_port() {
    let node = System::start(SystemConfig { observe: false, ..observed() }).await.unwrap();
    let at = node.observed_at().unwrap().to_string();
    for path in PAGES {
        assert_eq!(get(&at, path, LIMIT).await.unwrap().status, 200, "{path}");
        if path != "/ready" {
            let (status, text) = plain(&node.addr().to_string(), path).await.unwrap();
            assert!(status == 404 && text.contains("--no_observe") && !text.contains("node_id"), "{text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m4_a_node_without_observers_hands_its_port_on_too() {
    for security in [Security::Local, secret()] {
        let quiet = SystemConfig { observe: false, security, ..config(&[]) };
        let old = System::start(quiet.clone()).await.unwrap();
        let addr = old.addr().to_string();
        old.drain();
        let mut heir = tokio::spawn(System::start(SystemConfig { addr: Some(addr), ..quiet }));
        // Longer than a port may stay taken by who does not leave.
        let gave_up = tokio::time::timeout(Duration::from_millis(1500), &mut heir).await;
        assert!(gave_up.is_err(), "it waits for who leaves");
        old.shutdown().await;
        heir.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn test_m4_who_leaves_and_falls_silent_in_its_last_moment_still_hands_its_port_on() {
    let old = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = old.local_addr().unwrap().to_string();
    let leaving = tokio::spawn(async move {
        let body = r#"{"status":"leaving","node_id":"00000000000000000000000000000007"}"#;
        let answer = format!(
            "HTTP/1.1 503 Service Unavailable\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        // Longer than a port may stay taken by who does not leave.
        let until = std::time::Instant::now() + Duration::from_millis(1500);
        while std::time::Instant::now() < until {
            let (mut io, _) = old.accept().await.unwrap();
            let _ = io.read(&mut [0; 4096]).await;
            let _ = io.write_all(answer.as_bytes()).await;
        }
        drop(old.accept().await.unwrap());
        // The port is free only when it was asked once more, in vain.
        drop(old.accept().await.unwrap());
    });
    let heir = System::start(SystemConfig { addr: Some(addr.clone()), ..config(&[]) }).await.unwrap();
    assert_eq!(heir.addr().to_string(), addr);
    leaving.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_address_for_observers_is_named() {
    for bad in ["9464", "127.0.0.1:x", "[::1", ""] {
        let config = SystemConfig { observe_addr: Some(bad.into()), ..config(&[]) };
        let error = System::start(config).await.map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::InvalidAddress { value, .. } if value == bad), "{error}");
    }
}

/// The events of a node, one piece of text as they come.
struct Followed(TcpStream, String);

impl Followed {
    async fn new(addr: &str) -> Self {
        let mut io = TcpStream::connect(addr).await.unwrap();
        io.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut this = Self(io, String::new());
        this.next("node", |_| true).await;
        this
    }

    /// The next event of a kind that fits; others are passed over.
    async fn next(&mut self, kind: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let begin = format!("event: {kind}\ndata: ");
        let found = async {
            loop {
                while let Some((event, rest)) = self.1.split_once("\n\n") {
                    let data = event.split_once(&begin).map(|(_, data)| data.to_owned());
                    self.1 = rest.to_owned();
                    if let Some(data) = data.map(|data| serde_json::from_str::<Value>(&data).unwrap())
                        && fits(&data)
                    {
                        return data;
                    }
                }
                let mut some = [0; 1024];
                let n = self.0.read(&mut some).await.unwrap();
                assert!(n > 0, "the events end");
                self.1.push_str(std::str::from_utf8(&some[..n]).unwrap());
            }
        };
        tokio::time::timeout(LIMIT, found).await.unwrap_or_else(|_| panic!("no such event: {kind}"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_tell_what_becomes_of_actors_and_members() {
    let watched = System::start(observed()).await.unwrap();
    let mut on_port = Followed::new(&watched.addr().to_string()).await;
    let mut elsewhere = Followed::new(&watched.observed_at().unwrap().to_string()).await;
    let actor = watched.spawn(Echo, named("told")).await.unwrap();
    let id = actor.target().actor.to_string();
    let metadata = std::collections::BTreeMap::from([("state".to_owned(), "ready".to_owned())]);
    assert!(watched.set_metadata(actor.target().actor, metadata).unwrap());
    actor.end(Ending::stop()).await.unwrap();
    let other = node(&[&watched]).await;
    let peer = other.node_id().to_string();
    other.shutdown().await;
    for followed in [&mut on_port, &mut elsewhere] {
        let started = followed.next("actor", |event| event["actor_id"] == id.as_str()).await;
        assert_eq!(
            (&started["change"], &started["name"], &started["class"]),
            (&json!("started"), &json!("told"), &json!("test"))
        );
        let updated = followed.next("actor", |event| event["actor_id"] == id.as_str()).await;
        assert_eq!((&updated["change"], &updated["metadata"]["state"]), (&json!("updated"), &json!("ready")));
        let ended = followed.next("actor", |event| event["actor_id"] == id.as_str()).await;
        assert_eq!((&ended["change"], &ended["reason"]), (&json!("ended"), &json!("stopped")));
        for state in ["alive", "left"] {
            let member = followed.next("member", |event| event["node_id"] == peer.as_str()).await;
            assert_eq!(member["state"], state, "{member}");
        }
    }
}

/// Ends by itself, or fails, as told.
struct Frail;

impl Actor for Frail {
    async fn receive(&mut self, call: Call, ctx: &Context) {
        if call.payload.head == "leave" {
            ctx.stop()
        } else {
            ctx.fail("secret")
        }
        call.responder.value(raw("done"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_restart_is_an_event_and_is_counted() {
    let node = System::start(observed()).await.unwrap();
    let mut told = Followed::new(&node.addr().to_string()).await;
    let supervision = Supervision {
        policy: RestartPolicy::Always,
        max_restarts: 2,
        min_backoff: Duration::from_millis(1),
        ..Supervision::default()
    };
    let options = SpawnOptions { supervision, ..SpawnOptions::default() };
    let actor = node.spawn_with(|| Frail, named("frail"), options).await.unwrap();
    for (n, (how, reason)) in [("leave", "stopped"), ("fail", "failed")].into_iter().enumerate() {
        ask(&node, actor.target(), how).await.unwrap();
        let event = told.next("actor", |event| event["change"] != "started").await;
        assert_eq!((&event["change"], &event["reason"]), (&json!("restarted"), &json!(reason)));
        assert_eq!((&event["actor_id"], &event["name"]), (&json!(actor.target().actor.to_string()), &json!("frail")));
        assert!(!event.to_string().contains("secret"), "what it failed with is the log's to tell: {event}");
        assert_eq!(node.metrics().actors_restarted.get(), n as u64 + 1);
    }
    ask(&node, actor.target(), "fail").await.unwrap();
    let event = told.next("actor", |_| true).await;
    assert_eq!((&event["change"], &event["reason"]), (&json!("ended"), &json!("failed")), "its budget is spent");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_to_an_answer_of_another_node_is_a_histogram_and_calls_at_home_are_not_in_it() {
    let here = System::start(observed()).await.unwrap();
    let there = node(&[&here]).await;
    let at = here.observed_at().unwrap().to_string();
    let (home, away) =
        (here.spawn(Echo, named("home")).await.unwrap(), there.spawn(Echo, named("away")).await.unwrap());
    eventually("they know each other", LIMIT, || !here.instances("away").is_empty()).await;
    for _ in 0..3 {
        ask(&here, home.target(), "x").await.unwrap();
        ask(&here, away.target(), "x").await.unwrap();
    }
    let text = get(&at, "/metrics", LIMIT).await.unwrap().text().unwrap().to_owned();
    let value = |name: &str, labels: &str| -> f64 {
        let begin = format!("pulsing_call_duration_seconds{name}{{node_id=\"{}\"{labels}}} ", here.node_id());
        let line = text.lines().find_map(|line| line.strip_prefix(&begin)).unwrap_or_else(|| panic!("{begin}: {text}"));
        line.parse().unwrap()
    };
    assert_eq!((value("_count", ""), value("_bucket", ",le=\"+Inf\"")), (3.0, 3.0));
    assert_eq!(value("_bucket", ",le=\"30\""), 3.0);
    let sum = value("_sum", "");
    assert!(sum > 0.0 && sum < 30.0, "{sum}");
}
