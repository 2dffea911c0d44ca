//! Workers in memory that do what a test tells them, and a client that sees every byte.
#![allow(dead_code, clippy::unwrap_used)]

pub mod engine;
pub mod pki;
pub mod story;

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use pulsing_core::call::{CallControl, CancelSignal};
use pulsing_core::{
    ActorId, AppError, CallHandle, CallOptions, Credit, Error, Instance, ItemStream, NameChange, NodeId, Payload,
    Reply, ReplyEvent, ReplySink, Responder, StreamSink, Target,
};
use pulsing_gateway::cluster::{BoxFuture, Instances};
pub use pulsing_gateway::protocol::Delta;
use pulsing_gateway::protocol::{
    self, Answer, BlockNews, Deltas, Description, Generate, Kind, LoadReport, Question, Request, Usage,
};
use pulsing_gateway::{Cluster, Gateway, GatewayConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

/// What a worker is asked to do with one request.
pub struct Ask {
    pub generate: Generate,
    pub body: Bytes,
    pub timeout: Option<Duration>,
    pub responder: Responder,
    pub worker: Arc<FakeWorker>,
}

type Handler = Arc<dyn Fn(Ask) -> BoxFuture<()> + Send + Sync>;

pub struct FakeWorker {
    pub id: ActorId,
    pub asked: AtomicUsize,
    pub cancelled: AtomicUsize,
    /// Connections to its engine that went through it.
    pub relayed: AtomicUsize,
    /// Requests that it is to refuse, as if the engine let nobody connect.
    refused: AtomicUsize,
    pub active: AtomicU32,
    handler: Handler,
    load: watch::Sender<LoadReport>,
    hushed: AtomicBool,
    /// Reports sent.
    pub told: AtomicUsize,
    /// News of its cache, one for each report to who asked for news.
    pub news: Mutex<VecDeque<BlockNews>>,
    /// Subscriptions with news.
    pub followed: AtomicUsize,
    /// What every call is answered with instead.
    broken: Mutex<Option<Error>>,
    metadata: Mutex<BTreeMap<String, String>>,
    /// What an EngineWorker says its engine wants.
    pub authorization: Mutex<String>,
    /// What it answers questions with, and what it was asked.
    pub answer: Mutex<Answer>,
    pub questions: Mutex<Vec<(Question, Bytes)>>,
    /// Streams to cut when it dies.
    streams: Mutex<Vec<mpsc::UnboundedSender<ReplyEvent>>>,
}

impl FakeWorker {
    pub fn refuse_relays(&self, count: usize) {
        self.refused.store(count, Ordering::SeqCst);
    }
    pub fn report(&self, change: impl FnOnce(&mut LoadReport)) {
        self.load.send_modify(change);
    }
    /// As after kill -9: calls out are lost, new ones find nobody.
    pub fn die(&self) {
        let lost = Error::ConnectionLost { addr: "10.0.0.1:1".into(), reason: "reset".into() };
        *self.broken.lock() = Some(lost.clone());
        for stream in self.streams.lock().drain(..) {
            let _ = stream.send(ReplyEvent::Error(lost.clone()));
        }
    }
    pub fn revive(&self) {
        *self.broken.lock() = None;
    }
    /// As after SIGSTOP: it reports no more, and what it does is up to its handler.
    pub fn hush(&self, hushed: bool) {
        self.hushed.store(hushed, Ordering::SeqCst);
        self.load.send_modify(|_| ());
    }
    /// Tells this of its cache, with the next reports.
    pub fn tell(&self, news: BlockNews) {
        self.news.lock().push_back(news);
        self.load.send_modify(|_| ());
    }
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

#[derive(Clone)]
pub struct FakeCluster(Arc<Inner>);

struct Inner {
    workers: Mutex<Vec<(String, Arc<FakeWorker>)>>,
    changes: watch::Sender<u64>,
    next: AtomicU32,
}

impl FakeCluster {
    pub fn new() -> Self {
        Self(Arc::new(Inner { workers: Mutex::default(), changes: watch::Sender::new(0), next: AtomicU32::new(1) }))
    }
    /// A ready worker named `worker` with model `tiny`.
    pub fn worker<F: Future<Output = ()> + Send + 'static>(
        &self,
        handler: impl Fn(Ask) -> F + Send + Sync + 'static,
    ) -> Arc<FakeWorker> {
        let metadata = [("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready")];
        self.worker_with("worker", &metadata, handler)
    }
    pub fn worker_with<F: Future<Output = ()> + Send + 'static>(
        &self,
        name: &str,
        metadata: &[(&str, &str)],
        handler: impl Fn(Ask) -> F + Send + Sync + 'static,
    ) -> Arc<FakeWorker> {
        let metadata: BTreeMap<String, String> =
            metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let state = metadata.get("state").cloned().unwrap_or_else(|| "ready".into());
        let worker = Arc::new(FakeWorker {
            id: ActorId(u128::from(self.0.next.fetch_add(1, Ordering::SeqCst))),
            asked: AtomicUsize::new(0),
            cancelled: AtomicUsize::new(0),
            relayed: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            active: AtomicU32::new(0),
            handler: Arc::new(move |ask| Box::pin(handler(ask))),
            load: watch::Sender::new(LoadReport { state, capacity: 4, ..LoadReport::default() }),
            hushed: AtomicBool::new(false),
            told: AtomicUsize::new(0),
            news: Mutex::default(),
            followed: AtomicUsize::new(0),
            broken: Mutex::default(),
            metadata: Mutex::new(metadata),
            authorization: Mutex::default(),
            answer: Mutex::default(),
            questions: Mutex::default(),
            streams: Mutex::default(),
        });
        self.0.workers.lock().push((name.to_owned(), Arc::clone(&worker)));
        self.changed();
        worker
    }
    pub fn set_metadata(&self, worker: &FakeWorker, key: &str, value: &str) {
        worker.metadata.lock().insert(key.to_owned(), value.to_owned());
        self.changed();
    }
    pub fn remove(&self, worker: &FakeWorker) {
        self.0.workers.lock().retain(|(_, other)| other.id != worker.id);
        self.changed();
    }
    fn changed(&self) {
        self.0.changes.send_modify(|version| *version += 1);
    }
    /// Instances under a name.
    pub fn count(&self, name: &str) -> usize {
        self.list().into_iter().filter(|one| one.name == name).count()
    }
    fn list(&self) -> Vec<Instance> {
        let workers = self.0.workers.lock();
        let instance = |(name, worker): &(String, Arc<FakeWorker>)| Instance {
            name: name.clone(),
            target: Target { node: NodeId(worker.id.0), actor: worker.id },
            addr: format!("10.0.0.{}:1", worker.id.0),
            class: "test.Worker".into(),
            metadata: worker.metadata.lock().clone(),
            unique: false,
        };
        workers.iter().map(instance).collect()
    }
    /// A gateway on a free port, once every worker so far has reported.
    pub async fn gateway(&self, change: impl FnOnce(&mut GatewayConfig)) -> Gateway {
        let mut config =
            GatewayConfig { host: "127.0.0.1".into(), port: 0, model_name: "alias".into(), ..GatewayConfig::default() };
        change(&mut config);
        let gateway = Gateway::start_on(Arc::new(self.clone()), config).unwrap();
        let workers: Vec<_> = self.0.workers.lock().iter().map(|(_, worker)| Arc::clone(worker)).collect();
        until("every worker is subscribed to", || {
            workers.iter().all(|worker| {
                worker.load.receiver_count() > 0
                    || worker.broken.lock().is_some()
                    || worker.metadata.lock()["kind"] != "worker"
                    || worker.metadata.lock().contains_key("mute")
            })
        })
        .await;
        // The report that a subscription begins with has three tasks to pass before a request is made.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        gateway
    }
}

struct ChannelSink(mpsc::UnboundedSender<ReplyEvent>);

impl ReplySink for ChannelSink {
    fn event(&self, event: ReplyEvent) {
        let _ = self.0.send(event);
    }
}

struct Control {
    credit: Arc<Credit>,
    cancel: CancelSignal,
}

impl CallControl for Control {
    fn cancel(&self) {
        self.cancel.fire();
    }
    fn grant(&self, items: u32) {
        self.credit.grant(items);
    }
}

/// Cancels the call unless its reply was taken, as `System::call` does.
struct Cancelling(Option<CallHandle>);

impl Drop for Cancelling {
    fn drop(&mut self) {
        if let Some(handle) = self.0.take() {
            handle.cancel();
        }
    }
}

struct FakeWatch {
    cluster: FakeCluster,
    name: String,
    changes: watch::Receiver<u64>,
    known: BTreeMap<ActorId, Instance>,
}

impl Instances for FakeWatch {
    fn changed(&mut self) -> Pin<Box<dyn Future<Output = pulsing_core::Result<()>> + Send + '_>> {
        Box::pin(async move { self.changes.changed().await.map_err(|_| Error::ShutDown) })
    }
    fn take(&mut self) -> Vec<NameChange> {
        self.changes.mark_unchanged();
        let found = self.cluster.list().into_iter().filter(|one| one.name == self.name);
        let found: BTreeMap<_, _> = found.map(|one| (one.target.actor, one)).collect();
        let before = std::mem::replace(&mut self.known, found);
        let mut changes = Vec::new();
        for (actor, one) in &self.known {
            match before.get(actor) {
                None => changes.push(NameChange::Added(one.clone())),
                Some(known) if known != one => changes.push(NameChange::Updated(one.clone())),
                Some(_) => {}
            }
        }
        let gone = before.into_iter().filter(|(actor, _)| !self.known.contains_key(actor));
        changes.extend(gone.map(|(_, one)| NameChange::Removed(one)));
        changes
    }
}

impl Cluster for FakeCluster {
    fn watch_name(&self, name: &str) -> pulsing_core::Result<Box<dyn Instances>> {
        let changes = self.0.changes.subscribe();
        Ok(Box::new(FakeWatch { cluster: self.clone(), name: name.to_owned(), changes, known: BTreeMap::new() }))
    }
    fn first_names(&self, limit: usize) -> (usize, Vec<Instance>) {
        let mut names = BTreeMap::new();
        for instance in self.list() {
            names.entry(instance.name.clone()).or_insert(instance);
        }
        (names.len(), names.into_values().take(limit).collect())
    }
    /// Its workers are on hosts of their own.
    fn is_on_this_host(&self, _: &str) -> bool {
        false
    }
    fn call(&self, target: Target, payload: Payload, options: CallOptions) -> BoxFuture<pulsing_core::Result<Reply>> {
        let worker =
            self.0.workers.lock().iter().map(|(_, worker)| worker).find(|worker| worker.id == target.actor).cloned();
        Box::pin(async move {
            let Some(worker) = worker else {
                return Err(Error::ActorNotFound { actor: target.actor, node: target.node });
            };
            if let Some(error) = worker.broken.lock().clone() {
                return Err(error);
            }
            let (events, mut received) = mpsc::unbounded_channel();
            worker.streams.lock().push(events.clone());
            let credit = Arc::new(Credit::new(options.window));
            let cancel = CancelSignal::new();
            let responder =
                Responder::new(target.actor, Arc::new(ChannelSink(events)), Arc::clone(&credit), cancel.clone());
            let handle = CallHandle(Arc::new(Control { credit, cancel: cancel.clone() }));
            let request: Request = protocol::decode(&payload).unwrap();
            match request.kind.unwrap() {
                Kind::SubscribeLoad(_) if worker.metadata.lock().contains_key("mute") => {
                    fail(responder, 400, "no load reports here");
                }
                Kind::SubscribeLoad(asked) => {
                    if asked.blocks {
                        worker.followed.fetch_add(1, Ordering::SeqCst);
                    }
                    tokio::spawn(send_load(Arc::clone(&worker), responder, asked.blocks));
                }
                Kind::Generate(generate) => {
                    worker.asked.fetch_add(1, Ordering::SeqCst);
                    worker.active.fetch_add(1, Ordering::SeqCst);
                    let counted = Arc::clone(&worker);
                    cancel.on_cancel(move || {
                        counted.cancelled.fetch_add(1, Ordering::SeqCst);
                    });
                    let ask = Ask {
                        generate,
                        body: payload.buffers[0].clone(),
                        timeout: options.timeout,
                        responder,
                        worker: Arc::clone(&worker),
                    };
                    let task = tokio::spawn((worker.handler)(ask));
                    tokio::spawn(async move {
                        let _ = task.await;
                        worker.active.fetch_sub(1, Ordering::SeqCst);
                    });
                }
                Kind::Question(question) => {
                    worker.questions.lock().push((question, payload.buffers[0].clone()));
                    let answer = worker.answer.lock().clone();
                    responder.value(protocol::payload(&answer, None));
                }
                Kind::Relay(_) => {
                    worker.relayed.fetch_add(1, Ordering::SeqCst);
                    let mut url = worker.metadata.lock()["url"].clone();
                    let less = |count: usize| count.checked_sub(1);
                    if worker.refused.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
                        // Nobody listens there.
                        url = "http://127.0.0.1:1".to_owned();
                    }
                    tokio::spawn(engine::relay(url, payload.buffers[0].clone(), responder));
                }
                Kind::Describe(_) => {
                    let authorization = worker.authorization.lock().clone();
                    let description = Description { authorization, ..Description::default() };
                    responder.value(protocol::payload(&description, None));
                }
            }
            let mut guard = Cancelling(Some(handle));
            let first = received.recv().await;
            let handle = guard.0.take().unwrap();
            match first {
                Some(ReplyEvent::Value(value)) => Ok(Reply::Value(value)),
                Some(ReplyEvent::Error(error)) => Err(error),
                Some(ReplyEvent::StreamStart) => Ok(Reply::Stream(ItemStream::new(received, handle, options.window))),
                other => panic!("unexpected {other:?}"),
            }
        })
    }
}

async fn send_load(worker: Arc<FakeWorker>, responder: Responder, blocks: bool) {
    let cancel = responder.cancel_signal().clone();
    let stream = responder.stream();
    let mut load = worker.load.subscribe();
    while !cancel.is_cancelled() {
        let mut report = load.borrow_and_update().clone();
        if blocks {
            report.blocks = worker.news.lock().pop_front();
        }
        if !worker.hushed.load(Ordering::SeqCst) {
            if stream.send(protocol::payload(&report, None)).await.is_err() {
                return;
            }
            worker.told.fetch_add(1, Ordering::SeqCst);
        }
        let _ = tokio::time::timeout(Duration::from_millis(100), load.changed()).await;
    }
}

pub fn text(text: &str) -> Delta {
    Delta { text: text.into(), ..Delta::default() }
}
pub fn done(reason: &str) -> Delta {
    let usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 0 };
    Delta { finish_reason: reason.into(), usage: Some(usage), ..Delta::default() }
}
pub async fn send(stream: &StreamSink, deltas: Vec<Delta>) -> bool {
    stream.send(protocol::payload(&Deltas { deltas }, None)).await.is_ok()
}
/// Answers with these pieces, one item each.
pub async fn answer(ask: Ask, deltas: Vec<Delta>) {
    let stream = ask.responder.stream();
    for delta in deltas {
        if !send(&stream, vec![delta]).await {
            return;
        }
    }
    stream.end();
}
/// A worker that says `Hé`, ` you`.
pub async fn hello(ask: Ask) {
    answer(ask, vec![text("Hé"), text(" you"), done("stop")]).await;
}
pub fn fail(responder: Responder, code: i32, message: &str) {
    let data = format!(r#"{{"message":"{message}","type":"server_error","param":null,"code":"x"}}"#);
    responder.error(Error::App(Box::new(AppError {
        type_name: "test.Error".into(),
        message: message.into(),
        code,
        data: data.into(),
        ..AppError::default()
    })));
}

/// Polls a condition; panics with `what` after 5 s.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while !condition() {
        assert!(std::time::Instant::now() < end, "not within 5 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub struct Response {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: String,
    /// The body ended as HTTP says it must.
    pub whole: bool,
}

impl Response {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
    /// Payloads of the `data:` lines.
    pub fn events(&self) -> Vec<String> {
        self.body
            .split("\n\n")
            .filter(|event| !event.is_empty() && !event.starts_with(':'))
            .map(|event| event.strip_prefix("data: ").unwrap_or_else(|| panic!("odd event {event:?}")).to_owned())
            .collect()
    }
}

/// One raw connection.
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub async fn connect(gateway: &Gateway) -> Self {
        Self::over(TcpStream::connect(gateway.addr()).await.unwrap())
    }
    pub fn over(stream: TcpStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }
    pub async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }
    pub async fn post(&mut self, path: &str, body: &str) {
        self.post_with(path, "", body).await;
    }
    /// `headers`: lines, each ended by CRLF.
    pub async fn post_with(&mut self, path: &str, headers: &str, body: &str) {
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n{body}");
        self.write(head.as_bytes()).await;
    }
    async fn more(&mut self) -> bool {
        let read = tokio::time::timeout(Duration::from_secs(5), self.stream.read_buf(&mut self.buffer)).await;
        read.expect("the server sent nothing for 5 s").is_ok_and(|count| count > 0)
    }
    async fn until(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(mark.len()).position(|window| window == mark) {
                let rest = self.buffer.split_off(at + mark.len());
                return Some(std::mem::replace(&mut self.buffer, rest));
            }
            if !self.more().await {
                return None;
            }
        }
    }
    async fn exactly(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < count {
            if !self.more().await {
                return None;
            }
        }
        let rest = self.buffer.split_off(count);
        Some(std::mem::replace(&mut self.buffer, rest))
    }
    pub async fn head(&mut self) -> (u16, BTreeMap<String, String>) {
        let head = String::from_utf8(self.until(b"\r\n\r\n").await.expect("no response")).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers =
            lines.map(|line| line.split_once(": ").unwrap()).map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
        (status, headers)
    }
    /// The next chunk of a chunked body; `Some(empty)` is the last, `None` a cut.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = String::from_utf8(self.until(b"\r\n").await?).unwrap();
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        let mut chunk = self.exactly(size + 2).await?;
        chunk.truncate(size);
        Some(chunk)
    }
    /// The rest of a chunked body.
    pub async fn response_body(&mut self) -> String {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk().await.filter(|chunk| !chunk.is_empty()) {
            body.extend(chunk);
        }
        String::from_utf8(body).unwrap()
    }
    pub async fn response(&mut self, has_body: bool) -> Response {
        let (status, headers) = self.head().await;
        let mut body = Vec::new();
        let mut whole = true;
        if has_body {
            if headers.get("transfer-encoding").is_some_and(|coding| coding == "chunked") {
                loop {
                    match self.chunk().await {
                        None => {
                            whole = false;
                            break;
                        }
                        Some(chunk) if chunk.is_empty() => break,
                        Some(chunk) => body.extend(chunk),
                    }
                }
            } else if let Some(length) = headers.get("content-length") {
                body = self.exactly(length.parse().unwrap()).await.expect("a cut body");
            }
        }
        Response { status, headers, body: String::from_utf8(body).unwrap(), whole }
    }
}

/// One request on its own connection.
pub async fn post(gateway: &Gateway, path: &str, body: &str) -> Response {
    let mut client = Client::connect(gateway).await;
    client.post(path, body).await;
    client.response(true).await
}
pub async fn get(gateway: &Gateway, path: &str) -> Response {
    let mut client = Client::connect(gateway).await;
    client.write(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await;
    client.response(true).await
}
pub const CHAT: &str = r#"{"model":"alias","messages":[{"role":"user","content":"hi"}]}"#;
pub const STREAM: &str = r#"{"model":"alias","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
/// One request with headers of its own, each line ended by CRLF, on its own connection.
pub async fn post_with(gateway: &Gateway, path: &str, headers: &str, body: &str) -> Response {
    let mut client = Client::connect(gateway).await;
    client.post_with(path, headers, body).await;
    client.response(true).await
}
