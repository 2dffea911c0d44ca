//! An engine server that does what a test tells it, byte by byte.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use pulsing_core::{Codec, Payload, Responder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::{FakeCluster, FakeWorker};

/// What an engine saw.
#[derive(Clone, Debug)]
pub struct Seen {
    pub head: String,
    pub body: String,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}

pub struct Engine {
    pub url: String,
    pub seen: Mutex<Vec<Seen>>,
    pub connections: AtomicUsize,
    /// Connections that the other side closed while an answer was due or under way.
    pub left: AtomicUsize,
    task: Mutex<Option<JoinHandle<()>>>,
    /// Bound and never listening: when the engine has stopped, its port must be no other test's.
    _port: TcpSocket,
}

/// A listener on a port of its own, and what keeps that port.
fn listen() -> (TcpListener, TcpSocket) {
    let port = TcpSocket::new_v4().unwrap();
    port.set_reuseaddr(true).unwrap();
    port.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listening = TcpSocket::new_v4().unwrap();
    listening.set_reuseaddr(true).unwrap();
    listening.bind(port.local_addr().unwrap()).unwrap();
    let listener = listening.listen(1024).unwrap();
    port.set_reuseaddr(false).unwrap();
    (listener, port)
}

/// One connection of an engine, with a request on it.
pub struct Turn {
    pub stream: TcpStream,
    pub seen: Seen,
    pub engine: Arc<Engine>,
}

impl Turn {
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref()).await;
        let _ = self.stream.flush().await;
    }
    pub async fn answer(mut self, status: &str, headers: &str, body: &str) -> Option<TcpStream> {
        let length = body.len();
        self.write(format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n{body}")).await;
        Some(self.stream)
    }
    pub async fn json(self, body: &str) -> Option<TcpStream> {
        self.answer("200 OK", "content-type: application/json\r\n", body).await
    }
    pub async fn begin(&mut self) {
        self.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-engine: 7\r\ntransfer-encoding: chunked\r\n\r\n")
            .await;
    }
    pub async fn chunk(&mut self, text: &[u8]) {
        let mut chunk = format!("{:x}\r\n", text.len()).into_bytes();
        chunk.extend_from_slice(text);
        chunk.extend_from_slice(b"\r\n");
        self.write(chunk).await;
    }
    pub async fn end(mut self) -> Option<TcpStream> {
        self.write("0\r\n\r\n").await;
        Some(self.stream)
    }
    /// A whole stream in one chunk.
    pub async fn events(mut self, text: &str) -> Option<TcpStream> {
        self.begin().await;
        self.chunk(text.as_bytes()).await;
        self.end().await
    }
    /// Waits until the other side is gone.
    pub async fn gone(mut self) {
        let _ = self.stream.read(&mut [0; 64]).await;
        self.engine.left.fetch_add(1, Ordering::SeqCst);
    }
}

impl Engine {
    /// `handler` answers requests; the stream it gives back serves the next one.
    pub async fn start<F: Future<Output = Option<TcpStream>> + Send + 'static>(
        handler: impl Fn(Turn) -> F + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (listener, port) = listen();
        let engine = Arc::new(Self {
            url: format!("http://{}", listener.local_addr().unwrap()),
            seen: Mutex::default(),
            connections: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            task: Mutex::default(),
            _port: port,
        });
        let (served, handler) = (Arc::clone(&engine), Arc::new(handler));
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                served.connections.fetch_add(1, Ordering::SeqCst);
                let (engine, handler) = (Arc::clone(&served), Arc::clone(&handler));
                tokio::spawn(async move {
                    while let Some(seen) = read(&mut stream).await {
                        engine.seen.lock().push(seen.clone());
                        let turn = Turn { stream, seen, engine: Arc::clone(&engine) };
                        match handler(turn).await {
                            Some(next) => stream = next,
                            None => return,
                        }
                    }
                });
            }
        });
        *engine.task.lock() = Some(task);
        engine
    }
    /// Nobody listens any more; open connections live on.
    pub fn stop_listening(&self) {
        if let Some(task) = self.task.lock().take() {
            task.abort();
        }
    }
    pub fn asked(&self) -> usize {
        self.seen.lock().len()
    }
    pub fn last(&self) -> Seen {
        self.seen.lock().last().unwrap().clone()
    }
    /// Joins a cluster as an EngineWorker would, with a model `tiny`.
    pub fn join(&self, cluster: &FakeCluster) -> Arc<FakeWorker> {
        self.join_with(cluster, &[])
    }
    /// The same, from a host whose loopback the Router does not reach.
    pub fn join_from_afar(&self, cluster: &FakeCluster) -> Arc<FakeWorker> {
        self.join_with(cluster, &[("relay", "1")])
    }
    fn join_with(&self, cluster: &FakeCluster, more: &[(&str, &str)]) -> Arc<FakeWorker> {
        let metadata =
            [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready"), ("url", &self.url)];
        let metadata = [&metadata[..], more].concat();
        cluster.worker_with("worker", &metadata, |_| async { panic!("an engine's worker gets no requests") })
    }
}

/// What an EngineWorker does for Routers on other hosts.
pub async fn relay(url: String, request: Bytes, responder: Responder) {
    let left = Arc::new(Notify::new());
    let leaving = Arc::clone(&left);
    responder.cancel_signal().on_cancel(move || leaving.notify_one());
    let Ok(mut server) = TcpStream::connect(url.trim_start_matches("http://")).await else {
        return super::fail(responder, 503, "cannot connect");
    };
    if request.is_empty() {
        return responder.value(Payload::new(Codec::WORKER, Bytes::new()));
    }
    server.write_all(&request).await.unwrap();
    let stream = responder.stream();
    loop {
        let mut piece = BytesMut::new();
        tokio::select! {
            read = server.read_buf(&mut piece) => match read {
                Ok(0) | Err(_) => return stream.end(),
                Ok(_) if stream.send(Payload::new(Codec::WORKER, piece.freeze())).await.is_err() => return,
                Ok(_) => {}
            },
            () = left.notified() => return,
        }
    }
}

async fn read(stream: &mut TcpStream) -> Option<Seen> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut seen = Seen { head, body: String::new() };
    let length: usize = seen.header("content-length").map_or(0, |length| length.parse().unwrap());
    while bytes.len() < end + length {
        if tokio::time::timeout(Duration::from_secs(5), stream.read_buf(&mut bytes)).await.ok()?.ok()? == 0 {
            return None;
        }
    }
    seen.body = String::from_utf8(bytes[end..].to_vec()).unwrap();
    Some(seen)
}
