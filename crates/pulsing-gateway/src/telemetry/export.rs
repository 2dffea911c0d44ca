//! Spans on their way to a collector, as OTLP/HTTP in JSON.
//!
//! The maintained `opentelemetry-otlp` would bring 27 more crates for one POST of a document a second; what it sends is
//! written here, over the HTTP client that is there.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::Request;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;

use super::{Span, headers, span};
use crate::config::GatewayError;
use crate::dial::{Target, shown};

/// Spans that wait to be sent; more are dropped, and counted. The SDKs' own number.
const QUEUE: usize = 2048;
/// Spans in one POST. Theirs, too.
const BATCH: usize = 512;
/// Longest time between two.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a collector may take. Theirs, too.
const LIMIT: Duration = Duration::from_secs(10);
/// How much of a collector's answer is read, in bytes.
const ANSWER: usize = 64 << 10;

/// Takes spans; a task sends them.
pub(crate) struct Exporter {
    queue: mpsc::Sender<Span>,
    dropped: Arc<AtomicU64>,
    /// Share of the traces begun here that are kept.
    pub(crate) share: f64,
}

/// Where a collector listens.
#[derive(Clone)]
struct Collector {
    target: Arc<Target>,
    path: String,
    /// What it wants beside what every such request has.
    headers: HeaderMap,
}

/// Whose spans they are.
struct Maker {
    service: String,
    instance: String,
}

impl Exporter {
    /// `endpoint` as `OTEL_EXPORTER_OTLP_ENDPOINT` has it: `http://host:4318`, to which `/v1/traces` is added. Each request
    /// has the headers of `headers_file` or else of `headers` ([`Tracer::start`](super::Tracer::start) tells their form).
    /// The future sends until the exporter is gone and everything is sent.
    ///
    /// # Errors
    /// `Config` for an address or headers that cannot be used.
    pub(crate) fn new(
        endpoint: &str,
        (headers_file, headers): (Option<&Path>, Option<&str>),
        share: f64,
        service: &str,
    ) -> Result<(Self, impl Future<Output = ()> + Send + 'static), GatewayError> {
        let bad = |why: String| GatewayError::Config(format!("otlp_endpoint {:?}: {why}", shown(endpoint)));
        let (target, prefix) = Target::parse(endpoint).map_err(bad)?;
        let path = if prefix.ends_with("/v1/traces") { prefix } else { format!("{prefix}/v1/traces") };
        let headers = headers::read(headers_file, headers).map_err(GatewayError::Config)?;
        let collector = Collector { target: Arc::new(target), path, headers };
        let (queue, spans) = mpsc::channel(QUEUE);
        let dropped = Arc::new(AtomicU64::new(0));
        let maker = Maker { service: service.to_owned(), instance: format!("{:032x}", rand::random::<u128>()) };
        let sending = run(collector, spans, maker, Arc::clone(&dropped));
        Ok((Self { queue, dropped, share }, sending))
    }
    /// Sends a span some time later. Never waits.
    pub(crate) fn export(&self, span: Span) {
        if self.queue.try_send(span).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }
    /// Spans that no collector got.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }
}

async fn run(collector: Collector, mut spans: mpsc::Receiver<Span>, maker: Maker, dropped: Arc<AtomicU64>) {
    let mut warned = false;
    let mut open = true;
    while open {
        let mut batch = Vec::new();
        let full = async {
            while batch.len() < BATCH {
                match spans.recv().await {
                    Some(span) => batch.push(span),
                    None => return false,
                }
            }
            true
        };
        open = tokio::time::timeout(PAUSE, full).await.unwrap_or(true);
        if batch.is_empty() {
            continue;
        }
        let body = span::request(&batch, &maker.service, &maker.instance).to_string();
        match tokio::time::timeout(LIMIT, collector.post(body)).await.unwrap_or_else(|_| Err("no answer".into())) {
            Ok(()) => warned = false,
            Err(error) => {
                dropped.fetch_add(batch.len() as u64, Relaxed);
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!(%error, spans = batch.len(), "the trace collector takes nothing");
                }
            }
        }
    }
}

impl Collector {
    async fn post(&self, body: String) -> Result<(), String> {
        let stream = self.target.dial(LIMIT).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        let driven = tokio::spawn(connection);
        let mut request = Request::post(&self.path)
            .header(header::HOST, self.target.authority())
            .header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .header(header::CONNECTION, HeaderValue::from_static("close"))
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| error.to_string())?;
        request.headers_mut().extend(self.headers.clone());
        let answer = sender.send_request(request).await.map_err(|error| error.to_string());
        let status = match answer {
            Ok(answer) => {
                let status = answer.status();
                // Read, so that the collector does not see its answer refused.
                let _ = Limited::new(answer.into_body(), ANSWER).collect().await;
                status
            }
            Err(error) => {
                driven.abort();
                return Err(error);
            }
        };
        driven.abort();
        if status.is_success() { Ok(()) } else { Err(format!("it answered {status}")) }
    }
}
