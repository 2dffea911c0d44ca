//! Where a request ends: the same for this server as for any proxy before it, or the connection ends with it (RFC 9112).
//!
//! Each request is followed by a second one. Where the first one's end can be read in two ways, the second must not be
//! answered: behind a proxy it may be part of somebody else's request.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{CHAT, FakeCluster, get, hello};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Statuses of the answers to `bytes` and a second request behind them, and what came in all. Ends when the connection
/// does, or with the answer to the second one, a 404.
async fn answers(addr: std::net::SocketAddr, bytes: &str) -> (Vec<u16>, String) {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(format!("{bytes}GET /second HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
    let mut all = Vec::new();
    let read = async {
        while stream.read_buf(&mut all).await.unwrap() > 0 && !all.ends_with(b"\"code\":\"unknown_url\"}}") {}
    };
    tokio::time::timeout(Duration::from_secs(5), read).await.unwrap_or_else(|_| panic!("no end after {bytes:?}"));
    let text = String::from_utf8(all).unwrap();
    let statuses = text.match_indices("HTTP/1.").filter_map(|(at, _)| text[at + 9..].get(..3)?.parse().ok()).collect();
    (statuses, text)
}

/// A chat request: the rest of its first line and its headers, and the body.
fn chat(head: &str, body: &str) -> String {
    format!("POST /v1/chat/completions {head}\r\n\r\n{body}")
}

/// The same body in one chunk.
fn chunked() -> String {
    format!("{:x}\r\n{CHAT}\r\n0\r\n\r\n", CHAT.len())
}

#[tokio::test]
async fn s3_a_request_with_two_ends_is_refused_or_is_its_connections_last() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let (n, chunked) = (CHAT.len(), chunked());
    let sized = |more: &str| chat(&format!("HTTP/1.1\r\nhost: x\r\n{more}content-length: {n}"), CHAT);
    let coded = |codings: &str| chat(&format!("HTTP/1.1\r\nhost: x\r\n{codings}"), &chunked);
    let in_chunks = |body: String| chat("HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked", &body);
    let refused = [
        // Content-Length.
        sized("content-length: 1\r\n"),
        chat(&format!("HTTP/1.1\r\nhost: x\r\ncontent-length: {n}, {n}"), CHAT),
        chat(&format!("HTTP/1.1\r\nhost: x\r\ncontent-length: +{n}"), CHAT),
        chat(&format!("HTTP/1.1\r\nhost: x\r\ncontent-length: 0x{n:x}"), CHAT),
        chat("HTTP/1.1\r\nhost: x\r\ncontent-length: -1", CHAT),
        chat("HTTP/1.1\r\nhost: x\r\ncontent-length: ", CHAT),
        chat("HTTP/1.1\r\nhost: x\r\ncontent-length: 18446744073709551616", CHAT),
        // Transfer-Encoding.
        coded("transfer-encoding: chunked, identity"),
        coded("transfer-encoding: chunked\r\ntransfer-encoding: identity"),
        coded("transfer-encoding: chunked, chunked"),
        coded("transfer-encoding: chunked\r\ntransfer-encoding: chunked"),
        coded("transfer-encoding: xchunked"),
        coded("transfer-encoding: chunked;a=b"),
        coded("transfer-encoding: \"chunked\""),
        coded("transfer-encoding: \u{b}chunked"),
        coded("transfer-encoding: "),
        coded("transfer-encoding: gzip"),
        chat("HTTP/1.0\r\nhost: x\r\nconnection: keep-alive\r\ntransfer-encoding: chunked", &chunked),
        // Lines of the head.
        sized("x-a: b\r\n c\r\n"),
        sized("x-a: b\rtransfer-encoding: chunked\r\n"),
        sized("x-a: b\0c\r\n"),
        sized(": b\r\n"),
        sized("x-a\r\n"),
        sized("x a: b\r\n"),
        chat(&format!("HTTP/1.1\r\nhost: x\r\ncontent-length : {n}"), CHAT),
        coded("transfer-encoding\t: chunked"),
        chat(&format!("HTTP/1.1\r\n host: x\r\ncontent-length: {n}"), CHAT),
        chat(&format!(" HTTP/1.1\r\nhost: x\r\ncontent-length: {n}"), CHAT),
        chat(&format!("HTTP/1.1 \r\nhost: x\r\ncontent-length: {n}"), CHAT),
        chat(&format!("HTTP/1.2\r\nhost: x\r\ncontent-length: {n}"), CHAT),
        "GET /health\r\n\r\n".to_owned(),
        // Chunks.
        in_chunks(chunked.replace("\r\n", "\n")),
        in_chunks(format!("-{chunked}")),
        in_chunks(format!("0x{chunked}")),
        in_chunks(format!(" {chunked}")),
        in_chunks(format!("1{n:016x}\r\n{CHAT}\r\n0\r\n\r\n")),
        in_chunks(format!("{n:x}\r\n{CHAT}0\r\n\r\n")),
        in_chunks(format!("{:x}\r\n{CHAT}\r\n0\r\n\r\n", n - 1)),
        in_chunks(format!("{n:x};a\nb\r\n{CHAT}\r\n0\r\n\r\n")),
    ];
    for bytes in &refused {
        let (statuses, text) = answers(gateway.addr(), bytes).await;
        assert_eq!(statuses, [400], "{bytes:?}: {text}");
        assert!(text.contains("\r\nconnection: close\r\n"), "{bytes:?}: {text}");
        assert!(text.contains("\"invalid_request_error\"") && text.contains("\r\nx-request-id: "), "{bytes:?}: {text}");
    }
    assert_eq!(worker.asked(), 0);

    // Transfer-Encoding counts, and nothing after it does (6.3).
    let both = [
        format!("transfer-encoding: chunked\r\ncontent-length: {n}"),
        format!("content-length: {n}\r\ntransfer-encoding: chunked"),
        format!("connection: keep-alive\r\ncontent-length: {n}\r\ntransfer-encoding: chunked"),
        "transfer-encoding: chunked\r\ncontent-length: x".to_owned(),
        // A lone LF ends a line: the second header is one.
        format!("x-a: b\ntransfer-encoding: chunked\r\ncontent-length: {n}"),
    ];
    for bytes in both.iter().map(|both| coded(both)) {
        let (statuses, text) = answers(gateway.addr(), &bytes).await;
        assert_eq!(statuses, [200], "{bytes:?}: {text}");
        assert!(text.contains("\r\nconnection: close\r\n"), "{bytes:?}: {text}");
    }
}

#[tokio::test]
async fn s3_what_has_one_end_leaves_its_connection_to_the_next_request() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let (n, chunked) = (CHAT.len(), chunked());
    let last = chunked.len() - 2;
    for (bytes, status) in [
        (chat(&format!("HTTP/1.1\r\nhost: x\r\ncontent-length: {n}\r\ncontent-length: {n}"), CHAT), 200),
        (chat(&format!("HTTP/1.1\nhost: x\ncontent-length: {n}"), CHAT), 200),
        (format!("\r\n\r\n{}", chat(&format!("HTTP/1.1\r\nhost: x\r\ncontent-length: {n}"), CHAT)), 200),
        (chat("HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: Chunked", &chunked), 200),
        (chat("HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked", &chunked), 501),
        (chat("HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked", &chunked.replacen('\r', ";a=b\r", 1)), 200),
        (
            chat(
                "HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked",
                &format!("{}content-length: 5\r\n\r\n", &chunked[..last]),
            ),
            200,
        ),
        (format!("GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: {n}\r\n\r\n{CHAT}"), 200),
        (format!("GET /nope HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{chunked}"), 404),
        ("CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n".to_owned(), 405),
        (
            chat(&format!("HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: {n}"), CHAT),
            200,
        ),
    ] {
        let (statuses, text) = answers(gateway.addr(), &bytes).await;
        assert_eq!(statuses, [status, 404], "{bytes:?}: {text}");
    }
}

#[tokio::test]
async fn s3_a_request_of_http_1_1_names_one_host() {
    let cluster = FakeCluster::new();
    let worker = cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let n = CHAT.len();
    let with = |version: &str, hosts: &str| chat(&format!("{version}\r\n{hosts}content-length: {n}"), CHAT);
    for bytes in [
        with("HTTP/1.1", ""),
        with("HTTP/1.1", "host: x\r\nhost: x\r\n"),
        with("HTTP/1.0", "host: x\r\nhost: y\r\n"),
        with("HTTP/1.1", "host: x/y\r\n"),
        with("HTTP/1.1", "host: a@x\r\n"),
        with("HTTP/1.1", "host: x y\r\n"),
        "GET /health HTTP/1.1\r\n\r\n".to_owned(),
        "GET /nope HTTP/1.1\r\n\r\n".to_owned(),
        "OPTIONS /v1/models HTTP/1.1\r\n\r\n".to_owned(),
        "GET http://x/health HTTP/1.1\r\n\r\n".to_owned(),
    ] {
        let (statuses, text) = answers(gateway.addr(), &bytes).await;
        assert_eq!(statuses, [400], "{bytes:?}: {text}");
        assert!(text.contains("\r\nconnection: close\r\n") && text.contains("Host header"), "{bytes:?}: {text}");
    }
    assert_eq!(worker.asked(), 0);
    for host in ["", "x", "x:80", "[::1]:80", "10.0.0.1", "my_service.default.svc.cluster.local:8080", "%61"] {
        let (statuses, text) = answers(gateway.addr(), &with("HTTP/1.1", &format!("host: {host}\r\n"))).await;
        assert_eq!(statuses, [200, 404], "{host:?}: {text}");
    }
    let (statuses, _) = answers(gateway.addr(), &with("HTTP/1.0", "")).await;
    assert_eq!(statuses, [200]);
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("requests_total{route=\"chat_completions\",status=\"400\"} 6\n"), "{metrics}");
}
