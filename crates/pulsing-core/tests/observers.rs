//! Who looks at a node: on its port, at an address of their own, or not at all (design section 5).
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::*;
use pulsing_core::observe::get;
use pulsing_core::{Error, Passphrase, Security, System, SystemConfig};
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
async fn what_is_no_address_for_observers_is_named() {
    for bad in ["9464", "127.0.0.1:x", "[::1", ""] {
        let config = SystemConfig { observe_addr: Some(bad.into()), ..config(&[]) };
        let error = System::start(config).await.map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::InvalidAddress { value, .. } if value == bad), "{error}");
    }
}
