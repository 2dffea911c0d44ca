//! The same answers over HTTP/2 without TLS, with prior knowledge.
#![allow(clippy::unwrap_used)]

mod common;

use bytes::Bytes;
use common::{CHAT, FakeCluster, STREAM, answer, hello, text};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper::{Request, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use pulsing_gateway::Gateway;

async fn connect(gateway: &Gateway) -> http2::SendRequest<Full<Bytes>> {
    let stream = tokio::net::TcpStream::connect(gateway.addr()).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn request(body: &'static str) -> Request<Full<Bytes>> {
    Request::post("http://x/v1/chat/completions").body(Full::from(body)).unwrap()
}

#[tokio::test]
async fn many_requests_share_one_connection() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|_| {}).await;
    let sender = connect(&gateway).await;
    let tasks = (0..20).map(|number| {
        let mut sender = sender.clone();
        tokio::spawn(async move {
            let streamed = number % 2 == 0;
            let response = sender.send_request(request(if streamed { STREAM } else { CHAT })).await.unwrap();
            assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2));
            assert!(response.headers().contains_key("x-request-id"));
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert!(if streamed { body.ends_with(b"data: [DONE]\n\n") } else { body.starts_with(b"{") });
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn headers_are_counted_here_too() {
    let cluster = FakeCluster::new();
    cluster.worker(hello);
    let gateway = cluster.gateway(|config| config.max_headers = 10).await;
    let mut sender = connect(&gateway).await;
    for (count, status) in [(10, 200), (11, 431)] {
        let mut asked = request(CHAT);
        // A client of this library adds content-length.
        for number in 1..count {
            asked.headers_mut().append("x-many", number.into());
        }
        let response = sender.send_request(asked).await.unwrap();
        assert_eq!(response.status().as_u16(), status);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(status == 431, body.windows(17).any(|window| window == b"headers_too_large"));
    }
}

#[tokio::test]
async fn a_broken_stream_is_reset_after_its_error_event() {
    let cluster = FakeCluster::new();
    cluster.worker(|ask| answer(ask, vec![text("half")]));
    let gateway = cluster.gateway(|_| {}).await;
    let response = connect(&gateway).await.send_request(request(STREAM)).await.unwrap();
    let mut body = response.into_body();
    let mut seen = Vec::new();
    let ended = loop {
        match body.frame().await {
            Some(Ok(frame)) => seen.extend(frame.into_data().unwrap()),
            Some(Err(_)) => break "reset",
            None => break "whole",
        }
    };
    assert_eq!(ended, "reset");
    let seen = String::from_utf8(seen).unwrap();
    assert!(seen.contains("half") && seen.contains("\"error\""), "{seen}");
}
