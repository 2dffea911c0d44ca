//! Answers observers: one accepted connection, HTTP/1.1 or h2c, GET only.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::follow::{self, Following};
use super::{ObserveSource, prometheus};

/// A request's headers must be complete within this time.
const HEADER_LIMIT: Duration = Duration::from_secs(5);
/// A connection is closed when no request began for this long, whatever it does meanwhile; one that follows the events, when
/// it took none.
const IDLE_LIMIT: Duration = Duration::from_secs(30);
/// What is said to one observer too many.
const BUSY: &str = "this node serves as many observers as it may: come again, or raise --max_observers";
/// What `/` shows.
const PAGE: &str = include_str!("page.html");
/// What is said where observers are not answered.
const SILENT: &str = "this node was started with --no_observe: it tells nothing here";
/// What a closing connection gets to take the rest of its last answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// Request heads are short; a longer one is no observer.
const MAX_HEAD: usize = 16 * 1024;

/// What an observer is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everything.
    All,
    /// Whether the node is ready, and no more: enough for who waits for its port.
    Readiness,
}

/// Serves one accepted connection until the observer closes it or falls silent. The stream must begin with the
/// connection's first byte: a listener that looked at it replays it.
///
/// Never fails: what an observer does wrong ends its own connection and is logged at debug level.
pub async fn serve<I>(io: I, source: Arc<dyn ObserveSource>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let _ = serve_within(io, source, Scope::All, &Semaphore::new(1)).await;
}

/// [`serve`] for as many at once as `connections` has permits; others are told to come again. They are guests: a flood of them
/// must not take the node's descriptors. Returns why who connected was no observer, if nothing that it sent made sense.
pub async fn serve_within<I>(
    io: I,
    source: Arc<dyn ObserveSource>,
    scope: Scope,
    connections: &Semaphore,
) -> Option<String>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    serve_limited(io, source, scope, connections, Limits::default()).await
}

#[derive(Clone, Copy)]
struct Limits {
    header: Duration,
    idle: Duration,
    close: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { header: HEADER_LIMIT, idle: IDLE_LIMIT, close: CLOSE_LIMIT }
    }
}

async fn serve_limited<I>(
    mut io: I,
    source: Arc<dyn ObserveSource>,
    scope: Scope,
    connections: &Semaphore,
    limits: Limits,
) -> Option<String>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Ok(_permit) = connections.try_acquire() else {
        let body = json!({"error": {"message": BUSY}}).to_string();
        let head = "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-type: application/json";
        let busy = format!("{head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        let _ = timeout(limits.close, async {
            io.write_all(busy.as_bytes()).await?;
            io.shutdown().await
        })
        .await;
        return None;
    };

    let (began, mut last) = watch::channel(Instant::now());
    let asked = Arc::new(AtomicBool::new(false));
    let begun = Arc::clone(&asked);
    let service = service_fn(move |request: Request<Incoming>| {
        begun.store(true, Relaxed);
        began.send_replace(Instant::now());
        let (method, path) = (request.method(), request.uri().path());
        let response = if path == "/events" && method == Method::GET && scope == Scope::All {
            let first = status(source.as_ref(), None);
            let body = Following::new(source.events().follow(), &first, limits.idle / 3, began.clone());
            respond(StatusCode::OK, follow::CONTENT_TYPE, Either::Right(body))
        } else {
            answer(method, path, source.as_ref(), scope)
        };
        async move { Ok::<_, Infallible>(response) }
    });

    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.header).max_buf_size(MAX_HEAD).half_close(true);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(16).max_header_list_size(MAX_HEAD as u32);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));

    loop {
        let deadline = *last.borrow_and_update() + limits.idle;
        tokio::select! {
            done = &mut connection => {
                let error = done.err()?;
                tracing::debug!(%error, "observer connection ended");
                return (!asked.load(Relaxed)).then(|| format!("what it sends is no request: {error}"));
            }
            () = sleep_until(deadline) => {
                if *last.borrow() + limits.idle <= Instant::now() {
                    break;
                }
            }
        }
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(limits.close, connection).await;
    None
}

type Answer = Response<Either<Full<Bytes>, Following>>;

fn answer(method: &Method, path: &str, source: &dyn ObserveSource, scope: Scope) -> Answer {
    if method != Method::GET && method != Method::HEAD {
        let message = format!("{method} is not allowed here: observer endpoints are read-only, use GET");
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &message);
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    if scope == Scope::Readiness && path != "/ready" {
        return error(StatusCode::NOT_FOUND, SILENT);
    }
    match path {
        "/health" => json(StatusCode::OK, &status(source, Some("ok"))),
        "/ready" => {
            let ready = source.status().readiness == super::Readiness::Ready;
            let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            json(code, &status(source, None))
        }
        "/cluster/members" => json(StatusCode::OK, &members(source)),
        "/actors" | "/actors/" => json(StatusCode::OK, &actors(source)),
        "/metrics" => whole(StatusCode::OK, prometheus::CONTENT_TYPE, prometheus::render(source).into()),
        // Asked for with HEAD; `serve_limited` has those who follow.
        "/events" => whole(StatusCode::OK, follow::CONTENT_TYPE, Bytes::new()),
        "/" => page(),
        _ => error(
            StatusCode::NOT_FOUND,
            &format!(
                "no such endpoint: {path}; there are /health, /ready, /cluster/members, /actors, /metrics, /events, and a page at /"
            ),
        ),
    }
}

fn status(source: &dyn ObserveSource, word: Option<&str>) -> Value {
    let status = source.status();
    json!({
        "status": word.unwrap_or_else(|| status.readiness.as_str()),
        "node_id": status.node.to_string(),
        "addr": status.addr.to_string(),
        "uptime_secs": status.uptime.as_secs_f64(),
        "version": env!("CARGO_PKG_VERSION"),
    })
}

fn members(source: &dyn ObserveSource) -> Value {
    let member =
        |m: crate::system::Member| json!({"node_id": m.node.to_string(), "addr": m.addr, "state": m.state, "me": m.me});
    source.members().into_iter().map(member).collect()
}

fn actors(source: &dyn ObserveSource) -> Value {
    let status = source.status();
    let local: Vec<Value> = source
        .local_actors()
        .into_iter()
        .map(|a| {
            json!({
                "name": a.name, "actor_id": a.id.to_string(), "class": a.class, "public": a.public,
                "internal": a.internal, "metadata": a.metadata,
            })
        })
        .collect();
    let cluster: Vec<Value> = source
        .names()
        .into_values()
        .flatten()
        .map(|i| {
            json!({
                "name": i.name, "actor_id": i.target.actor.to_string(), "node_id": i.target.node.to_string(),
                "addr": i.addr, "class": i.class, "metadata": i.metadata,
            })
        })
        .collect();
    json!({
        "node_id": status.node.to_string(), "addr": status.addr.to_string(), "local": local, "cluster": cluster,
    })
}

fn error(code: StatusCode, message: &str) -> Answer {
    json(code, &json!({"error": {"message": message}}))
}

fn json(code: StatusCode, body: &impl Serialize) -> Answer {
    match serde_json::to_vec(body) {
        Ok(bytes) => whole(code, "application/json", bytes.into()),
        // Only a failing `Serialize` gets here; ours are plain values.
        Err(error) => whole(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", error.to_string().into()),
    }
}

/// The page for people: it asks the other endpoints, and loads nothing from elsewhere.
fn page() -> Answer {
    let mut response = whole(StatusCode::OK, "text/html; charset=utf-8", Bytes::from_static(PAGE.as_bytes()));
    let policy = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                  frame-ancestors 'none'; base-uri 'none'";
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    response
}

fn whole(code: StatusCode, content_type: &'static str, body: Bytes) -> Answer {
    respond(code, content_type, Either::Left(Full::new(body)))
}

fn respond(code: StatusCode, content_type: &'static str, body: Either<Full<Bytes>, Following>) -> Answer {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::super::client::{Protocol, get, get_many, get_with};
    use super::super::{Events, LocalActor, Metrics, NodeStatus, ObserveError, Readiness};
    use super::*;
    use crate::id::{ActorId, NodeId};
    use crate::system::{Instance, Member, MemberState, Target};

    #[derive(Default)]
    struct Fake {
        joined: AtomicBool,
        metrics: Arc<Metrics>,
        events: Events,
    }

    impl ObserveSource for Fake {
        fn status(&self) -> NodeStatus {
            let readiness = if self.joined.load(Ordering::Relaxed) { Readiness::Ready } else { Readiness::Joining };
            let addr = "127.0.0.1:8000".parse().unwrap();
            NodeStatus { node: NodeId(7), addr, uptime: Duration::from_millis(1500), readiness }
        }
        fn members(&self) -> Vec<Member> {
            let me = Member { node: NodeId(7), addr: "127.0.0.1:8000".into(), state: MemberState::Alive, me: true };
            let gone = Member { node: NodeId(8), addr: "127.0.0.1:8001".into(), state: MemberState::Down, me: false };
            vec![me, gone]
        }
        fn local_actors(&self) -> Vec<LocalActor> {
            vec![LocalActor {
                name: Some("my-llm".into()),
                id: ActorId(1),
                class: "pulsing.serving.Router".into(),
                public: true,
                internal: false,
                metadata: BTreeMap::from([("kind".into(), "router".into())]),
            }]
        }
        fn names(&self) -> BTreeMap<String, Vec<Instance>> {
            let instance = |n: u128| Instance {
                name: "worker".into(),
                target: Target { node: NodeId(n), actor: ActorId(n) },
                addr: format!("127.0.0.1:800{n}"),
                class: "W".into(),
                metadata: BTreeMap::new(),
                unique: false,
            };
            BTreeMap::from([("worker".into(), vec![instance(8), instance(9)])])
        }
        fn metrics(&self) -> Arc<Metrics> {
            self.metrics.clone()
        }
        fn events(&self) -> &Events {
            &self.events
        }
    }

    const LIMIT: Duration = Duration::from_secs(5);

    async fn start(source: Arc<Fake>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            while let Ok((io, _)) = listener.accept().await {
                tokio::spawn(serve(io, source.clone()));
            }
        });
        addr
    }

    #[tokio::test]
    async fn endpoints_have_the_documented_shape_over_both_protocols() {
        let source = Arc::new(Fake::default());
        source.metrics.messages.add(3);
        let addr = start(source.clone()).await;
        for protocol in [Protocol::Http1, Protocol::H2c] {
            let health = get_with(&addr, "/health", LIMIT, protocol, None).await.unwrap();
            assert_eq!(health.status, 200);
            let body: Value = health.json().unwrap();
            assert_eq!(body["status"], "ok");
            assert_eq!(body["node_id"], format!("{:032x}", 7));
            assert_eq!(body["uptime_secs"], 1.5);
            assert_eq!(body["version"], env!("CARGO_PKG_VERSION"));

            let members: Value =
                get_with(&addr, "/cluster/members", LIMIT, protocol, None).await.unwrap().json().unwrap();
            assert_eq!(members[0]["me"], true);
            assert_eq!(members[1]["state"], "down");

            let actors: Value =
                get_with(&addr, "/actors?all=true", LIMIT, protocol, None).await.unwrap().json().unwrap();
            assert_eq!(actors["local"][0]["metadata"]["kind"], "router");
            assert_eq!(actors["cluster"].as_array().unwrap().len(), 2);
            assert_eq!(actors["cluster"][1]["addr"], "127.0.0.1:8009");

            let metrics = get_with(&addr, "/metrics", LIMIT, protocol, None).await.unwrap();
            assert_eq!(metrics.content_type, prometheus::CONTENT_TYPE);
            let text = metrics.text().unwrap();
            assert!(
                text.contains("\npulsing_messages_total{node_id=\"00000000000000000000000000000007\"} 3\n"),
                "{text}"
            );
            assert!(text.contains("state=\"down\"} 1\n"), "{text}");
            assert!(text.contains("pulsing_registry_instances{node_id=\"00000000000000000000000000000007\"} 2\n"));

            let missing = get_with(&addr, "/nope", LIMIT, protocol, None).await.unwrap();
            assert_eq!(missing.status, 404);
            let body: Value = missing.json().unwrap();
            assert!(body["error"]["message"].as_str().unwrap().contains("/nope"));
        }
    }

    #[tokio::test]
    async fn ready_is_503_until_the_node_has_joined() {
        let source = Arc::new(Fake::default());
        let addr = start(source.clone()).await;
        let before = get(&addr, "/ready", LIMIT).await.unwrap();
        assert_eq!(before.status, 503);
        assert_eq!(before.json::<Value>().unwrap()["status"], "joining");
        source.joined.store(true, Ordering::Relaxed);
        assert_eq!(get(&addr, "/ready", LIMIT).await.unwrap().status, 200);
    }

    #[tokio::test]
    async fn other_methods_are_405() {
        let addr = start(Arc::new(Fake::default())).await;
        let mut io = tokio::net::TcpStream::connect(&addr).await.unwrap();
        io.write_all(b"POST /actors HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc")
            .await
            .unwrap();
        let mut text = String::new();
        io.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 405"), "{text}");
        assert!(text.to_lowercase().contains("allow: get, head"), "{text}");
    }

    #[tokio::test]
    async fn get_many_answers_in_order_and_keeps_failures_apart() {
        let addr = start(Arc::new(Fake::default())).await;
        let refused = {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap().to_string()
        };
        let answers = get_many(&[refused.clone(), addr], "/health", LIMIT, None).await;
        assert!(matches!(&answers[0], Err(ObserveError::Connect { addr, .. }) if *addr == refused));
        assert_eq!(answers[1].as_ref().unwrap().status, 200);
    }

    fn quick() -> Limits {
        let short = Duration::from_millis(100);
        Limits { header: short, idle: short, close: short }
    }

    #[tokio::test]
    async fn a_client_that_trickles_its_head_is_dropped() {
        let (mut client, server) = tokio::io::duplex(1024);
        let served = tokio::spawn(async move {
            let connections = Semaphore::new(1);
            serve_limited(server, Arc::new(Fake::default()), Scope::All, &connections, quick()).await;
        });
        client.write_all(b"GET /health HTTP/1.1\r\nhost: ").await.unwrap();
        timeout(LIMIT, served).await.expect("a slow head must not hold its connection").unwrap();
    }

    #[tokio::test]
    async fn a_client_that_says_nothing_or_never_reads_is_dropped() {
        for first in ["", "PRI * HT", "GET /actors HTTP/1.1\r\nhost: x\r\n\r\n"] {
            // A duplex of 16 bytes stands for a peer whose receive window is shut.
            let (mut client, server) = tokio::io::duplex(16);
            let served = tokio::spawn(async move {
                let connections = Semaphore::new(1);
                serve_limited(server, Arc::new(Fake::default()), Scope::All, &connections, quick()).await;
            });
            client.write_all(first.as_bytes()).await.unwrap();
            timeout(LIMIT, served).await.expect("an idle observer must not hold its connection").unwrap();
        }
    }

    /// Reads events up to one that has `words`.
    async fn read_until(io: &mut (impl AsyncRead + Unpin), words: &str) -> String {
        let mut text = String::new();
        let read = async {
            while !text.contains(words) {
                let mut some = [0; 256];
                let n = io.read(&mut some).await.unwrap();
                assert!(n > 0, "it ends: {text}");
                text.push_str(std::str::from_utf8(&some[..n]).unwrap());
            }
        };
        timeout(LIMIT, read).await.unwrap_or_else(|_| panic!("no {words}"));
        text
    }

    #[tokio::test]
    async fn who_follows_the_events_is_told_who_tells_and_what_happens_and_is_not_idle() {
        let (mut client, server) = tokio::io::duplex(4096);
        let source = Arc::new(Fake::default());
        let served = tokio::spawn(serve_all(server, source.clone()));
        client.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let head = read_until(&mut client, "event: node\ndata: {").await;
        assert!(head.contains("content-type: text/event-stream"), "{head}");
        for round in 0..3 {
            // Longer than a connection may be idle.
            for _ in 0..4 {
                read_until(&mut client, ":\n\n").await;
            }
            source.events.tell("actor", || json!({"round": round, "text": "two\nlines"}));
            let told = read_until(&mut client, "}\n\n").await;
            assert!(told.contains("event: actor\ndata: {"), "{told}");
            assert!(told.contains(&format!("\"round\":{round}")) && told.contains("two\\nlines"), "{told}");
        }
        drop(client);
        timeout(LIMIT, served).await.expect("a follower who is gone holds nothing").unwrap();
    }

    #[tokio::test]
    async fn who_takes_no_events_is_told_what_it_missed_or_dropped() {
        let source = Arc::new(Fake::default());
        let (mut client, server) = tokio::io::duplex(64);
        let served = tokio::spawn(serve_all(server, source.clone()));
        client.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        read_until(&mut client, "event: node").await;
        for number in 0..5000 {
            source.events.tell("actor", || json!({"number": number}));
        }
        // The latest are kept.
        let told = read_until(&mut client, "4999").await;
        assert!(told.contains("event: missed\ndata: {\"count\":"), "{told}");
        for _ in 0..2 * super::super::events::BACKLOG {
            source.events.tell("actor", || json!({"text": "x".repeat(4096)}));
        }
        timeout(LIMIT, served).await.expect("who reads no more must not hold its connection").unwrap();
    }

    async fn serve_all(io: tokio::io::DuplexStream, source: Arc<Fake>) {
        serve_limited(io, source, Scope::All, &Semaphore::new(1), quick()).await;
    }

    #[tokio::test]
    async fn the_page_loads_nothing_from_elsewhere_and_no_text_as_markup() {
        let addr = start(Arc::new(Fake::default())).await;
        let page = get(&addr, "/", LIMIT).await.unwrap();
        assert_eq!((page.status, page.content_type.as_str()), (200, "text/html; charset=utf-8"));
        let text = page.text().unwrap();
        for path in ["/health", "/cluster/members", "/actors", "/events"] {
            assert!(text.contains(&format!("\"{path}\"")), "{path}");
        }
        for no in ["http:", "https:", "innerHTML", "insertAdjacentHTML", "document.write"] {
            assert!(!text.contains(no), "{no}");
        }
    }

    #[tokio::test]
    async fn connections_over_the_bound_are_told_503() {
        let (mut client, server) = tokio::io::duplex(1024);
        let connections = Semaphore::new(0);
        serve_limited(server, Arc::new(Fake::default()), Scope::All, &connections, quick()).await;
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 503"), "{text}");
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{text}");
        assert!(body.contains("--max_observers"), "{text}");
    }
}
