//! One request as the access log and traces tell it, from its head to the last byte of its answer.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Polling, Poll};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::HeaderMap;
use hyper::{Method, Request, Response};
use serde::Serialize;

use super::Core;
use super::respond::REQUEST_ID;
use crate::telemetry::{Attribute, Context, Kind, Span, rfc3339};
use crate::trail::{Notes, Trail};

/// Longest path and model name that is told.
const SHOWN: usize = 200;
/// What is told of a client that left before the answer began.
const LEFT: u16 = 499;

/// Told when it is dropped.
pub(super) struct Record {
    core: Arc<Core>,
    trail: Arc<Trail>,
    context: Option<Context>,
    parent: Option<u64>,
    begun: Instant,
    at: SystemTime,
    client: SocketAddr,
    method: String,
    path: String,
    bytes_in: u64,
    bytes_out: u64,
    request_id: String,
    status: u16,
    outcome: &'static str,
    /// Of the answer's body, as much as is logged.
    answer: Vec<u8>,
}

/// A line of the access log. Fields of what was not a generation are left out.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    request_id: &'a str,
    client: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    method: &'a str,
    path: &'a str,
    status: u16,
    outcome: &'a str,
    bytes_in: u64,
    bytes_out: u64,
    duration_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retries: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<String>,
}

/// The beginning of a body as text, without the half of a character that it may have been cut in; `None` if it is empty.
fn begun(bytes: &[u8]) -> Option<String> {
    let whole = match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => bytes.len(),
    };
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes[..whole]).into_owned())
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

impl Record {
    /// `None` where nobody wants to be told. Puts the request's trail where its handler finds it.
    pub(super) fn begin<B: Body>(core: &Arc<Core>, client: SocketAddr, request: &mut Request<B>) -> Option<Self> {
        if core.access_log.is_none() && core.exporter.is_none() {
            return None;
        }
        let (context, parent) = core.exporter.as_ref().map_or((None, None), |exporter| {
            let sent = request.headers().get("traceparent").and_then(|value| Context::parse(value.to_str().ok()?));
            match sent {
                Some(parent) => (Some(parent.child()), Some(parent.span)),
                // Looks at health and metrics come by themselves, every few seconds, and belong to nothing.
                None if request.method() != Method::POST => (None, None),
                None => (Some(Context::new(exporter.share)), None),
            }
        });
        let trail = Arc::new(Trail::recording(context));
        request.extensions_mut().insert(Arc::clone(&trail));
        Some(Self {
            core: Arc::clone(core),
            trail,
            context,
            parent,
            begun: Instant::now(),
            at: SystemTime::now(),
            client,
            method: shown(request.method().as_str()),
            // Queries hold what clients please, keys included.
            path: shown(request.uri().path()),
            bytes_in: request.body().size_hint().lower(),
            bytes_out: 0,
            request_id: id(request.headers()),
            status: LEFT,
            outcome: "left",
            answer: Vec::new(),
        })
    }

    fn line(&self, notes: &Notes) -> Line<'_> {
        // The worker is borrowed from the notes by the caller.
        Line {
            time: rfc3339(self.at),
            request_id: &self.request_id,
            client: self.client.ip().to_string(),
            key: None,
            method: &self.method,
            path: &self.path,
            status: self.status,
            outcome: self.outcome,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            duration_ms: millis(self.begun.elapsed()),
            model: None,
            stream: notes.model.is_some().then_some(notes.stream),
            worker: None,
            retries: notes.model.is_some().then(|| notes.retries()),
            queue_ms: notes.queued.map(millis),
            ttft_ms: notes.first.map(|first| millis(first.saturating_duration_since(self.begun))),
            prompt_tokens: notes.usage.map(|usage| usage.prompt_tokens),
            completion_tokens: notes.usage.map(|usage| usage.completion_tokens),
            cached_tokens: notes.usage.map(|usage| usage.cached_tokens),
            trace_id: self.context.map(|context| format!("{:032x}", context.trace)),
            request: begun(&notes.body),
            answer: begun(&self.answer),
        }
    }

    fn tell(&self, notes: &Notes) {
        if let Some(log) = &self.core.access_log {
            let model = notes.model.as_deref().map(shown);
            let worker = notes.attempts.last().map(|attempt| attempt.worker.to_string());
            let line = Line {
                key: notes.key.as_deref(),
                model: model.as_deref(),
                worker: worker.as_deref(),
                ..self.line(notes)
            };
            if let Ok(line) = serde_json::to_string(&line) {
                log.write(line);
            }
        }
        if let (Some(exporter), Some(context)) = (&self.core.exporter, self.context.filter(|context| context.sampled)) {
            let end = self.at + self.begun.elapsed();
            for (index, attempt) in notes.attempts.iter().enumerate() {
                let Some(own) = attempt.context else { continue };
                let next = notes.attempts.get(index + 1).filter(|_| notes.sequential);
                let mut attributes = vec![("pulsing.worker".into(), Attribute::Text(attempt.worker.to_string()))];
                if let Some(url) = &attempt.url {
                    attributes.push(("url.full".into(), Attribute::Text(url.clone())));
                }
                exporter.export(Span {
                    context: own,
                    parent: Some(context.span),
                    name: "dispatch".to_owned(),
                    kind: Kind::Client,
                    start: self.at + attempt.started.saturating_duration_since(self.begun),
                    end: next.map_or(end, |next| self.at + next.started.saturating_duration_since(self.begun)),
                    attributes,
                    error: next.map(|_| "the request went to another worker".to_owned()),
                });
            }
            exporter.export(self.span(notes, context, end));
        }
    }

    /// Named and described as OpenTelemetry's conventions for HTTP servers and generative AI have it.
    fn span(&self, notes: &Notes, context: Context, end: SystemTime) -> Span {
        let mut attributes = vec![
            ("http.request.method".into(), Attribute::Text(self.method.clone())),
            ("url.path".into(), Attribute::Text(self.path.clone())),
            ("http.response.status_code".into(), Attribute::Int(i64::from(self.status))),
            ("client.address".into(), Attribute::Text(self.client.ip().to_string())),
            ("pulsing.request_id".into(), Attribute::Text(self.request_id.clone())),
            ("pulsing.outcome".into(), Attribute::Text(self.outcome.to_owned())),
        ];
        if let Some(model) = &notes.model {
            attributes.push(("gen_ai.request.model".into(), Attribute::Text(shown(model))));
            attributes.push(("pulsing.stream".into(), Attribute::Bool(notes.stream)));
            attributes.push(("pulsing.retries".into(), Attribute::Int(notes.retries() as i64)));
        }
        if let Some(usage) = notes.usage {
            attributes.push(("gen_ai.usage.input_tokens".into(), Attribute::Int(i64::from(usage.prompt_tokens))));
            attributes.push(("gen_ai.usage.output_tokens".into(), Attribute::Int(i64::from(usage.completion_tokens))));
        }
        if let Some(queued) = notes.queued {
            attributes.push(("pulsing.queue_ms".into(), Attribute::Float(millis(queued))));
        }
        if let Some(first) = notes.first {
            let after = millis(first.saturating_duration_since(self.begun));
            attributes.push(("pulsing.ttft_ms".into(), Attribute::Float(after)));
        }
        let failed = self.status >= 500 || self.outcome == "broken";
        Span {
            context,
            parent: self.parent,
            name: format!("{} {}", self.method, self.path),
            kind: Kind::Server,
            start: self.at,
            end,
            attributes,
            error: failed.then(|| format!("{} {}", self.status, self.outcome)),
        }
    }

    /// A piece of the answer went to the client.
    fn gave(&mut self, data: &Bytes) {
        self.bytes_out += data.len() as u64;
        let room = self.core.placement.config.access_log_content.saturating_sub(self.answer.len());
        self.answer.extend_from_slice(&data[..room.min(data.len())]);
    }

    /// The answer has begun; it is told of when its body is gone.
    pub(super) fn answer<B: Body>(mut self, response: Response<B>) -> Response<Recorded<B>> {
        self.status = response.status().as_u16();
        self.request_id = id(response.headers());
        response.map(|body| {
            if body.is_end_stream() {
                self.outcome = "complete";
            }
            Recorded { body, record: Some(self) }
        })
    }
}

fn id(headers: &HeaderMap) -> String {
    headers.get(REQUEST_ID).and_then(|value| value.to_str().ok()).map(shown).unwrap_or_default()
}

impl Drop for Record {
    fn drop(&mut self) {
        let trail = Arc::clone(&self.trail);
        trail.note(|notes| self.tell(notes));
    }
}

/// A body that is told of when it is gone.
pub(super) struct Recorded<B> {
    body: B,
    record: Option<Record>,
}

impl<B> Recorded<B> {
    /// A body that nobody wants to be told of.
    pub(super) fn untold(body: B) -> Self {
        Self { body, record: None }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Recorded<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Polling<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        let whole = self.body.is_end_stream();
        if let Some(record) = &mut self.record {
            match &polled {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(data) = frame.data_ref() {
                        record.gave(data);
                    }
                    if whole {
                        record.outcome = "complete";
                    }
                }
                Poll::Ready(Some(Err(_))) => record.outcome = "broken",
                Poll::Ready(None) => record.outcome = "complete",
                Poll::Pending => {}
            }
        }
        polled
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
