//! Connections: half-closed ones, ones that speak no HTTP, ones of browsers, ones under TLS.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::pki::Files;
use common::{CHAT, Client, FakeCluster, STREAM, done, get, hello, post_with, send, text, until};
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

/// A worker that answers in three pieces, each after a step is allowed.
fn stepped(cluster: &FakeCluster) -> (Arc<common::FakeWorker>, watch::Sender<u32>) {
    let (go, wait) = watch::channel(0);
    let worker = cluster.worker(move |ask| {
        let mut wait = wait.clone();
        async move {
            let cancel = ask.responder.cancel_signal().clone();
            let stream = ask.responder.stream();
            for step in 1..=3 {
                tokio::select! {
                    ok = wait.wait_for(|at| *at >= step) => drop(ok.unwrap()),
                    () = until("cancelled", || cancel.is_cancelled()) => return,
                }
                let piece = if step == 3 { done("stop") } else { text("x") };
                if !send(&stream, vec![piece]).await {
                    return;
                }
            }
            stream.end();
        }
    });
    (worker, go)
}

async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut bytes)).await.unwrap().unwrap();
    String::from_utf8(bytes).unwrap()
}

fn request(version: &str, body: &str) -> Vec<u8> {
    format!("POST /v1/chat/completions {version}\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}

#[tokio::test]
async fn s4_a_client_that_sends_no_more_but_still_reads_gets_its_answer() {
    let cluster = FakeCluster::new();
    let (worker, go) = stepped(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let mut asked = 0;
    for version in ["HTTP/1.1", "HTTP/1.0"] {
        for (body, last) in [(CHAT, "\"finish_reason\":\"stop\""), (STREAM, "data: [DONE]\n\n")] {
            go.send_replace(0);
            let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
            stream.write_all(&request(version, body)).await.unwrap();
            stream.shutdown().await.unwrap();
            asked += 1;
            until("the worker has it", || worker.asked() == asked).await;
            // Long enough for the Router to see the end, and to look twice whether somebody is there.
            tokio::time::sleep(Duration::from_millis(30)).await;
            for step in 1..=3 {
                go.send_replace(step);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let answer = rest(&mut stream).await;
            assert!(answer.contains(last), "{version} {body}: {answer}");
            // HTTP/1.0 has no interim responses: its clients have got the beginning of their answer beforehand.
            let interim = if version == "HTTP/1.1" { "HTTP/1.1 100 Continue\r\n\r\n" } else { "" };
            assert!(answer.starts_with(&format!("{interim}{version} 200 OK\r\n")), "{answer}");
        }
    }
    assert_eq!(worker.cancelled.load(Ordering::SeqCst), 0);
    // Closed at once after the answer: nobody can ask any more.
    assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_in_flight 0\n"));
}

#[tokio::test]
async fn s4_half_closed_clients_with_a_large_answer_and_with_pipelined_requests_get_all_of_it() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| async move {
        let stream = ask.responder.stream();
        for _ in 0..64 {
            send(&stream, vec![text(&"Q".repeat(256 << 10))]).await;
        }
        send(&stream, vec![done("stop")]).await;
        stream.end();
    });
    let gateway = cluster.gateway(|_| {}).await;
    let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
    let twice = [request("HTTP/1.1", CHAT), request("HTTP/1.1", STREAM)].concat();
    stream.write_all(&twice).await.unwrap();
    stream.shutdown().await.unwrap();
    // The socket's buffers fill up meanwhile.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let answer = rest(&mut stream).await;
    assert!(answer.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"), "{}", &answer[answer.len().saturating_sub(300)..]);
    assert_eq!(answer.matches('Q').count(), 2 * 64 * (256 << 10));
}

#[tokio::test]
async fn s4_half_closed_clients_get_short_answers_and_errors_too() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.api_key = Some("sk-x".into())).await;
    for _ in 0..20 {
        for (asked, status) in [
            (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), "200"),
            (b"GET /nope HTTP/1.0\r\n\r\n".to_vec(), "404"),
            (request("HTTP/1.1", CHAT), "401"),
            (request("HTTP/1.1\r\nx-api-key: sk-x", CHAT), "200"),
            (request("HTTP/1.1\r\nx-api-key: sk-x", "nonsense"), "400"),
        ] {
            let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
            stream.write_all(&asked).await.unwrap();
            stream.shutdown().await.unwrap();
            let answer = rest(&mut stream).await;
            assert!(answer.contains(&format!(" {status} ")) && answer.ends_with('}'), "{status}: {answer}");
        }
    }
}

#[tokio::test]
async fn s4_a_client_that_closed_stops_generation_before_the_next_token() {
    let cluster = FakeCluster::new();
    let (worker, go) = stepped(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for (count, body) in [CHAT, STREAM].into_iter().enumerate() {
        for first in [0, 1] {
            go.send_replace(first);
            let mut client = Client::connect(&gateway).await;
            client.post("/v1/chat/completions", body).await;
            until("the worker has it", || worker.asked() == 2 * count + first as usize + 1).await;
            if body == STREAM && first == 1 {
                client.head().await;
                client.chunk().await.unwrap();
            }
            let left = Instant::now();
            drop(client);
            until("cancelled", || worker.cancelled.load(Ordering::SeqCst) == 2 * count + first as usize + 1).await;
            assert!(left.elapsed() < Duration::from_secs(3), "{:?}", left.elapsed());
        }
    }
}

#[tokio::test]
async fn s4_a_client_of_http_1_0_that_closed_stops_generation_too() {
    let cluster = FakeCluster::new();
    let (worker, _go) = stepped(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    for (count, body) in [CHAT, STREAM].into_iter().enumerate() {
        let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
        stream.write_all(&request("HTTP/1.0", body)).await.unwrap();
        until("the worker has it", || worker.asked() == count + 1).await;
        drop(stream);
        until("cancelled", || worker.cancelled.load(Ordering::SeqCst) == count + 1).await;
    }
    assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_in_flight 0\n"));
}

#[tokio::test]
async fn s4_a_client_that_half_closes_and_leaves_later_stops_generation_too() {
    let cluster = FakeCluster::new();
    let (worker, _go) = stepped(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
    stream.write_all(&request("HTTP/1.1", CHAT)).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    drop(stream);
    until("cancelled", || worker.cancelled.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn s4_a_client_that_sent_its_next_request_ahead_and_left_stops_generation_too() {
    let cluster = FakeCluster::new();
    let (worker, go) = stepped(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    // More than is read ahead: some of it stays with the kernel.
    let long = format!("{}{}", " ".repeat(30_000), CHAT);
    let mut count = 0;
    for (first, ahead) in [(CHAT, CHAT), (STREAM, CHAT), (CHAT, &long)] {
        for (version, begun) in [("HTTP/1.1", 0), ("HTTP/1.1", 1), ("HTTP/1.0\r\nconnection: keep-alive", 0)] {
            go.send_replace(begun);
            count += 1;
            let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
            stream.write_all(&request(version, first)).await.unwrap();
            until("the worker has it", || worker.asked() == count).await;
            stream.write_all(&request("HTTP/1.1", ahead)).await.unwrap();
            if first == STREAM && begun == 1 {
                stream.read_exact(&mut [0; 200]).await.unwrap();
            }
            let left = Instant::now();
            drop(stream);
            let what = format!("{version} {begun} {} {} cancelled", first.len(), ahead.len());
            until(&what, || worker.cancelled.load(Ordering::SeqCst) == count).await;
            assert!(left.elapsed() < Duration::from_secs(3), "{:?}", left.elapsed());
        }
    }
    assert_eq!(worker.asked(), count);
}

#[tokio::test]
async fn s4_a_client_that_sent_its_next_request_ahead_and_half_closed_gets_both_answers() {
    let cluster = FakeCluster::new();
    let (worker, go) = stepped(&cluster);
    let gateway = cluster.gateway(|_| {}).await;
    let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
    stream.write_all(&request("HTTP/1.1", STREAM)).await.unwrap();
    until("the worker has it", || worker.asked() == 1).await;
    stream.write_all(&request("HTTP/1.1", CHAT)).await.unwrap();
    stream.shutdown().await.unwrap();
    // Until the Router has seen the end.
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    for step in 1..=3 {
        go.send_replace(step);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let answers = rest(&mut stream).await;
    assert!(answers.contains("data: [DONE]\n\n"), "{answers}");
    assert!(answers.ends_with('}') && answers.contains("\"finish_reason\":\"stop\""), "{answers}");
    assert_eq!((worker.asked(), worker.cancelled.load(Ordering::SeqCst)), (2, 0));
}

#[tokio::test]
async fn s4_a_client_that_goes_in_the_middle_of_its_request_holds_nothing() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
    let whole = request("HTTP/1.1", CHAT);
    stream.write_all(&whole[..whole.len() - 5]).await.unwrap();
    stream.shutdown().await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.is_empty() || answer.contains(" 400 "), "{answer}");
    assert!(get(&gateway, "/metrics").await.body.contains("pulsing_router_in_flight 0\n"));
}

#[tokio::test]
async fn s3_who_says_nothing_or_begins_and_stops_is_let_go() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.header_timeout = Duration::from_millis(300)).await;
    // Of the first three it is not known yet which HTTP they speak.
    for begun in ["", "P", "PRI * HTTP/2.0\r\n", "POST /v1/chat", "GET /health HTTP/1.1\r\nhost: x\r\n"] {
        let mut stream = TcpStream::connect(gateway.addr()).await.unwrap();
        stream.write_all(begun.as_bytes()).await.unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "{begun:?} is waited for");
    }
}

#[tokio::test]
async fn what_is_no_request_is_answered_in_the_apis_shape_and_counted() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster
        .gateway(|config| {
            config.max_headers = 10;
            config.max_header_bytes = 2000;
        })
        .await;
    let many = (0..11).map(|n| format!("x-{n}: 1\r\n")).collect::<String>();
    let cases = [
        ("nonsense\r\n\r\n".to_owned(), 400, "bad_request"),
        ("GET / HTTP/3.7\r\n\r\n".to_owned(), 400, "bad_request"),
        ("GET /\u{7f} HTTP/1.1\r\n\r\n".to_owned(), 400, "bad_request"),
        ("GET / HTTP/1.1\r\nbad header\r\n\r\n".to_owned(), 400, "bad_request"),
        ("POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n".to_owned(), 400, "bad_request"),
        (format!("GET /health HTTP/1.1\r\nhost: x\r\n{many}\r\n"), 431, "headers_too_large"),
        (format!("GET /health HTTP/1.1\r\nhost: x\r\nx-a: {}\r\n\r\n", "b".repeat(2000)), 431, "headers_too_large"),
        (format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(70_000)), 414, "uri_too_long"),
    ];
    for (bytes, status, code) in cases {
        let mut client = Client::connect(&gateway).await;
        client.write(bytes.as_bytes()).await;
        let response = client.response(true).await;
        assert_eq!(response.status, status, "{bytes:.60}: {}", response.body);
        assert_eq!(response.json()["error"]["code"], code, "{bytes:.60}");
        assert_eq!(response.headers["content-type"], "application/json");
        assert!(response.headers["x-request-id"].starts_with("req-"));
        assert_eq!(response.headers["connection"], "close");
    }
    // After a good one on the same connection.
    let mut client = Client::connect(&gateway).await;
    client.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n").await;
    assert_eq!(client.response(true).await.status, 200);
    assert_eq!(client.response(true).await.json()["error"]["code"], "bad_request");
    let metrics = get(&gateway, "/metrics").await.body;
    assert!(metrics.contains("pulsing_router_requests_total{route=\"other\",status=\"400\"} 6\n"), "{metrics}");
}

#[tokio::test]
async fn browsers_of_named_origins_only_are_let_in_and_none_by_default() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let plain = cluster.gateway(|_| {}).await;
    let listed = cluster.gateway(|config| config.cors_origins = vec!["https://a.example".into()]).await;
    let ask = "origin: https://a.example\r\naccess-control-request-headers: authorization\r\n";
    let header = "access-control-allow-origin";
    assert!(!post_with(&plain, "/v1/chat/completions", ask, CHAT).await.headers.contains_key(header));
    for (origin, allowed) in [("https://a.example", true), ("https://b.example", false)] {
        let headers = format!("origin: {origin}\r\naccess-control-request-headers: authorization\r\n");
        let answer = post_with(&listed, "/v1/chat/completions", &headers, CHAT).await;
        assert_eq!((answer.status, answer.headers.get(header).map(String::as_str)), (200, allowed.then_some(origin)));
        assert_eq!(answer.headers["vary"], "origin");
        let exposed = answer.headers.get("access-control-expose-headers");
        assert_eq!(exposed.is_some_and(|exposed| exposed.contains("x-request-id")), allowed);
        let mut client = Client::connect(&listed).await;
        client.write(format!("OPTIONS /v1/models/ HTTP/1.1\r\nhost: x\r\n{headers}\r\n").as_bytes()).await;
        let preflight = client.response(true).await;
        assert_eq!(preflight.status, 204);
        assert_eq!(preflight.headers.contains_key("access-control-allow-headers"), allowed);
        assert_eq!(preflight.headers["allow"], "GET, HEAD, OPTIONS");
    }
}

/// The answer to `request` over TLS from a server with this certificate.
async fn over_tls(addr: SocketAddr, trusted: &CertificateDer<'static>, request: &str) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(addr).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8(answer).unwrap())
}

#[tokio::test]
async fn s7_the_api_is_served_over_tls_with_a_certificate_that_is_read_again() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let (files, first) = Files::new();
    let gateway = cluster
        .gateway(|config| {
            config.tls_cert = Some(files.cert.clone());
            config.tls_key = Some(files.key.clone());
        })
        .await;
    let asked = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{STREAM}",
        STREAM.len()
    );
    let answer = over_tls(gateway.addr(), &first, &asked).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("data: [DONE]"), "{answer}");
    // Without TLS it says so.
    let refused = get(&gateway, "/health").await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("https://"), "{}", refused.body);

    let second = files.renew();
    let end = Instant::now() + Duration::from_secs(10);
    while over_tls(gateway.addr(), &second, &asked).await.is_err() {
        assert!(Instant::now() < end, "the certificate is not taken");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(over_tls(gateway.addr(), &first, &asked).await.is_err());
}

#[tokio::test]
async fn s7_certificates_that_cannot_be_used_are_refused_by_name() {
    let (files, _) = Files::new();
    let start = |cert: Option<&Path>, key: Option<&Path>| {
        let config = pulsing_gateway::GatewayConfig {
            host: "127.0.0.1".into(),
            port: 0,
            tls_cert: cert.map(Path::to_owned),
            tls_key: key.map(Path::to_owned),
            ..Default::default()
        };
        let started = pulsing_gateway::Gateway::start_on(Arc::new(FakeCluster::new()), config);
        started.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let (cert, key) = (files.cert.as_path(), files.key.as_path());
    assert_eq!(start(Some(cert), Some(key)), "");
    assert!(start(Some(cert), None).contains("needs tls_key"));
    assert!(start(None, Some(key)).contains("needs tls_cert"));
    assert!(start(Some(key), Some(key)).contains("key.pem"));
    assert!(start(Some(cert), Some(cert)).contains("cert.pem"));
    assert!(start(Some(Path::new("/nowhere/c")), Some(key)).contains("/nowhere/c"));
    fs::set_permissions(key, fs::Permissions::from_mode(0o604)).unwrap();
    assert!(start(Some(cert), Some(key)).contains("chmod 600"));
}
