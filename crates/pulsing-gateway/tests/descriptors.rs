//! A process that may open no more files: idle clients make room for new ones. The limit is the whole process's, so this
//! test has one to itself.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use common::{Client, FakeCluster, STREAM, done, send, text};
use pulsing_gateway::Gateway;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::io::AsyncReadExt;
use tokio::net::TcpSocket;
use tokio::sync::watch;

const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n";

/// Asks once and stays.
async fn idle(gateway: &Gateway) -> Client {
    let mut client = Client::connect(gateway).await;
    client.write(HEALTH).await;
    assert_eq!(client.response(true).await.status, 200);
    client
}

fn limit_files(to: i32) {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: Some(u64::try_from(to).unwrap()), ..limit })
        .unwrap();
}

async fn is_closed(client: &mut Client) -> bool {
    let mut byte = [0];
    match tokio::time::timeout(Duration::from_millis(20), client.stream.read(&mut byte)).await {
        Ok(read) => read.map_or(true, |count| count == 0),
        Err(_) => false,
    }
}

#[tokio::test]
async fn idle_clients_make_room_for_new_ones_when_no_more_files_may_be_opened() {
    let cluster = FakeCluster::new();
    let (go, wait) = watch::channel(false);
    cluster.worker(move |ask| {
        let mut wait = wait.clone();
        async move {
            let stream = ask.responder.stream();
            send(&stream, vec![text("x")]).await;
            wait.wait_for(|go| *go).await.unwrap();
            send(&stream, vec![done("stop")]).await;
            stream.end();
        }
    });
    let gateway = cluster.gateway(|_| {}).await;
    // Older than all others, and waiting for something.
    let mut busy = Client::connect(&gateway).await;
    busy.post("/v1/chat/completions", STREAM).await;
    assert_eq!(busy.head().await.0, 200);
    let mut old = Vec::new();
    for _ in 0..200 {
        old.push(idle(&gateway).await);
    }
    // Who has only just been answered may be about to ask again.
    let since = Instant::now();
    let before = getrlimit(Resource::Nofile).current.unwrap();

    // Hardly any left: there is room again before there is none.
    let highest = old.last().unwrap().stream.as_raw_fd();
    limit_files(highest + 16);
    let mut early = idle(&gateway).await;
    assert!(!is_closed(&mut old[0]).await, "closed in its first second");
    tokio::time::sleep_until((since + Duration::from_millis(1100)).into()).await;
    let mut next = idle(&gateway).await;
    let end = Instant::now() + Duration::from_secs(5);
    while !is_closed(&mut old[0]).await {
        assert!(Instant::now() < end, "the oldest idle client is still there");
    }
    assert!(!is_closed(old.last_mut().unwrap()).await, "a younger one went, too");

    // None left, below the client's own sockets: accepting fails.
    limit_files(i32::try_from(before).unwrap());
    let sockets: Vec<_> = (0..40).map(|_| TcpSocket::new_v4().unwrap()).collect();
    limit_files(highest / 2);
    let mut new = Vec::new();
    for socket in sockets {
        let asked = Instant::now();
        let stream = socket.connect(gateway.addr()).await.unwrap();
        let mut client = Client::over(stream);
        client.write(HEALTH).await;
        assert_eq!(client.response(true).await.status, 200);
        assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
        new.push(client);
    }
    limit_files(i32::try_from(before).unwrap());
    for client in new.iter_mut().chain([&mut early, &mut next, old.last_mut().unwrap()]) {
        client.write(HEALTH).await;
        assert_eq!(client.response(true).await.status, 200);
    }
    go.send_replace(true);
    assert!(busy.response_body().await.ends_with("data: [DONE]\n\n"));
}
