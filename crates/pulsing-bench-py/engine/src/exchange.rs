//! One request and its answer.

use std::error::Error as _;
use std::io::{self, ErrorKind};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::{Method, Request, Response, StatusCode};
use tokio::time::Instant;

use crate::chunk::{self, Chunk};
use crate::clock::Clock;
use crate::config::{Reuse, Timeouts, micros, seconds};
use crate::connection::{Connection, Driver, Pool};
use crate::error::BenchError;
use crate::record::{Class, Failure};
use crate::sse::Parser;
use crate::target::Target;
use crate::trace::Trace;

/// How long a body may stay open after its end mark before its connection is given up.
const AFTER_DONE: Duration = Duration::from_secs(1);
/// How much of an error's body is read.
const ERROR_BODY: usize = 64 << 10;

/// Sends requests to one server.
pub(crate) struct Client {
    target: Target,
    clock: Clock,
    pool: Pool,
    host: HeaderValue,
    authorization: Option<HeaderValue>,
    timeouts: Timeouts,
    reuse: Reuse,
}

impl Client {
    pub(crate) fn new(
        target: Target,
        clock: Clock,
        api_key: Option<&str>,
        timeouts: Timeouts,
        reuse: Reuse,
    ) -> Result<Self, BenchError> {
        let host = HeaderValue::from_str(&target.authority)
            .map_err(|error| BenchError::Config(format!("url {}: {error}", target.authority)))?;
        let authorization = match api_key {
            Some(key) => {
                let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
                    BenchError::Config("the api_key holds characters that an HTTP header cannot carry".into())
                })?;
                value.set_sensitive(true);
                Some(value)
            }
            None => None,
        };
        Ok(Self { target, clock, pool: Pool::default(), host, authorization, timeouts, reuse })
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    pub(crate) fn drop_idle(&self) {
        self.pool.clear();
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.host)
            .header(USER_AGENT, concat!("pulsing-bench/", env!("CARGO_PKG_VERSION")));
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json").header(ACCEPT, "text/event-stream");
        }
        if let Some(key) = &self.authorization {
            request = request.header(AUTHORIZATION, key);
        }
        request.body(Full::new(body)).map_err(|error| Failure::new(Class::Protocol, error.to_string()))
    }

    /// A GET outside the measurement: its status and body.
    pub(crate) async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), Failure> {
        let asked = async {
            let mut connection = Connection::open(&self.target, self.clock, seconds(self.timeouts.connect)).await?;
            let request = self.request(Method::GET, path, Bytes::new())?;
            let Connection { sender, driver, .. } = &mut connection;
            let response = driver.run(sender.send_request(request)).await.map_err(|error| before_head(&error))?;
            let status = response.status();
            Ok((status, read_some(driver, response.into_body(), 1 << 20).await))
        };
        tokio::time::timeout(Duration::from_secs(10), asked)
            .await
            .unwrap_or_else(|_| Err(Failure::new(Class::TimeoutTotal, "no answer within 10 s")))
    }

    /// Sends `body` and reads the whole answer into `trace`, which is right up to where it got however this ends.
    pub(crate) async fn stream(&self, path: &str, body: &Bytes, trace: &mut Trace) -> Result<(), Failure> {
        let kept = if self.reuse == Reuse::Reuse { self.pool.take().await } else { None };
        let fresh = kept.is_none();
        let mut connection = match kept {
            Some(connection) => connection,
            None => self.connect(trace).await?,
        };
        let mut answered = self.send(&mut connection, path, body, trace).await;
        // The server may close a kept connection while the request is on its way. That says nothing about the request, so it
        // is sent once more; its first sending stays the anchor.
        if !fresh && matches!(&answered, Err(failure) if failure.class == Class::Reset) {
            trace.resent = true;
            connection = self.connect(trace).await?;
            answered = self.send(&mut connection, path, body, trace).await;
        }
        let whole = self.receive(&mut connection, answered?, trace).await?;
        if whole && self.reuse == Reuse::Reuse {
            self.pool.give(connection).await;
        }
        Ok(())
    }

    async fn connect(&self, trace: &mut Trace) -> Result<Connection, Failure> {
        let began = self.clock.now();
        let connection = Connection::open(&self.target, self.clock, seconds(self.timeouts.connect)).await?;
        trace.connect_us = Some(self.clock.now() - began);
        Ok(connection)
    }

    async fn send(
        &self,
        connection: &mut Connection,
        path: &str,
        body: &Bytes,
        trace: &mut Trace,
    ) -> Result<Response<Incoming>, Failure> {
        let request = self.request(Method::POST, path, body.clone())?;
        connection.begin();
        let began = self.clock.now();
        let (limit, class, words) = self.limit(trace.send.unwrap_or(began), trace, began);
        let Connection { sender, driver, stamps } = connection;
        let answered = tokio::time::timeout_at(limit, driver.run(sender.send_request(request))).await;
        // Stamped even where no answer came: the request may have left.
        trace.send = trace.send.or(stamps.first_write());
        let response = match answered {
            Err(_) => return Err(Failure::new(class, words)),
            Ok(Err(error)) => return Err(before_head(&error)),
            Ok(Ok(response)) => response,
        };
        trace.head = Some(stamps.last_read());
        Ok(response)
    }

    /// The next limit to be reached, what reaching it is called, and in words.
    fn limit(&self, sent: u64, trace: &Trace, last_read: u64) -> (Instant, Class, String) {
        let limits = &self.timeouts;
        let (at, class, words) = if trace.has_first() {
            (last_read + micros(limits.idle), Class::TimeoutIdle, format!("nothing read for {} s", limits.idle))
        } else {
            (sent + micros(limits.first), Class::TimeoutFirst, format!("no token within {} s", limits.first))
        };
        if let Some(total) = limits.total
            && sent + micros(total) < at
        {
            let words = format!("not finished within {total} s");
            return (self.clock.instant(sent + micros(total)).into(), Class::TimeoutTotal, words);
        }
        (self.clock.instant(at).into(), class, words)
    }

    /// Reads the answer; true when the connection can be used again.
    async fn receive(
        &self,
        connection: &mut Connection,
        response: Response<Incoming>,
        trace: &mut Trace,
    ) -> Result<bool, Failure> {
        let Connection { driver, stamps, .. } = connection;
        let status = response.status();
        if status != StatusCode::OK {
            let retry_after = response.headers().get(RETRY_AFTER).map(|value| chunk::clip(value.as_bytes()));
            let body = read_some(driver, response.into_body(), ERROR_BODY).await;
            return Err(Failure { retry_after, ..Failure::new(Class::Http(status.as_u16()), error_words(&body)) });
        }
        let kind = response.headers().get(CONTENT_TYPE).map(|value| value.as_bytes().to_ascii_lowercase());
        if !kind.as_deref().is_some_and(|kind| kind.starts_with(b"text/event-stream")) {
            let body = read_some(driver, response.into_body(), ERROR_BODY).await;
            let kind = String::from_utf8_lossy(kind.as_deref().unwrap_or(b"nothing")).into_owned();
            return Err(Failure::new(Class::NotAStream, format!("content-type {kind}: {}", error_words(&body))));
        }
        let sent = trace.send.unwrap_or(trace.start);
        let mut body = response.into_body();
        let mut parser = Parser::default();
        loop {
            let (limit, class, words) = if trace.is_done() {
                ((Instant::now() + AFTER_DONE), Class::TimeoutIdle, String::new())
            } else {
                self.limit(sent, trace, stamps.last_read())
            };
            let frame = match tokio::time::timeout_at(limit, driver.run(body.frame())).await {
                Err(_) | Ok(Some(Err(_))) if trace.is_done() => return Ok(false),
                Err(_) => return Err(Failure::new(class, words)),
                Ok(Some(Err(error))) => return Err(mid_body(&error)),
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => break,
            };
            let at = stamps.last_read();
            let Ok(data) = frame.into_data() else { continue };
            let mut wrong = None;
            let parsed = parser.push(&data, |event| {
                if wrong.is_none() && !trace.is_done() {
                    match Chunk::read(&event) {
                        Ok(chunk) => trace.take(&chunk, at),
                        Err(failure) => wrong = Some(failure),
                    }
                }
            });
            if let Some(failure) = wrong {
                return Err(failure);
            }
            parsed.map_err(|error| Failure::new(Class::BadJson, error.to_string()))?;
        }
        if !trace.is_done() {
            let at = stamps.last_read();
            if let Some(event) = parser.finish() {
                // Half an event at the end of a body is a cut answer, not a server that writes bad JSON.
                let chunk = Chunk::read(&event).map_err(|failure| match failure.class {
                    Class::BadJson => Failure::new(Class::Truncated, "the answer ended within an event"),
                    _ => failure,
                })?;
                trace.take(&chunk, at);
            }
            trace.end = Some(at);
        }
        if !trace.is_complete() {
            return Err(Failure::new(Class::Truncated, "the answer ended without a finish reason or [DONE]"));
        }
        Ok(true)
    }
}

/// Reads up to `most` bytes of a body that is not measured.
async fn read_some(driver: &mut Driver, mut body: Incoming, most: usize) -> Bytes {
    let mut all = BytesMut::new();
    let read = async {
        while all.len() < most {
            match driver.run(body.frame()).await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        all.extend_from_slice(&data);
                    }
                }
                // What came so far is what there is to show.
                Some(Err(_)) | None => break,
            }
        }
    };
    // An error's body is a courtesy; a server that holds it back must not hold the request.
    let _ = tokio::time::timeout(Duration::from_secs(5), read).await;
    all.freeze()
}

fn error_words(body: &[u8]) -> String {
    match serde_json::from_slice::<serde_json::Value>(body) {
        Ok(value) => chunk::message(value.get("error").unwrap_or(&value)),
        Err(_) => chunk::clip(body),
    }
}

fn io_kind(error: &hyper::Error) -> Option<ErrorKind> {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(io) = inner.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        source = inner.source();
    }
    None
}

fn words(error: &hyper::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

fn before_head(error: &hyper::Error) -> Failure {
    match io_kind(error) {
        Some(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted) => {
            Failure::new(Class::Reset, words(error))
        }
        _ if error.is_incomplete_message() || error.is_canceled() || error.is_closed() => {
            Failure::new(Class::Reset, "the connection was closed before the answer")
        }
        _ => Failure::new(Class::Protocol, words(error)),
    }
}

fn mid_body(error: &hyper::Error) -> Failure {
    match io_kind(error) {
        Some(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted) => {
            Failure::new(Class::Reset, words(error))
        }
        Some(ErrorKind::UnexpectedEof) => Failure::new(Class::Truncated, "the connection ended within the answer"),
        _ if error.is_incomplete_message() => Failure::new(Class::Truncated, "the connection ended within the answer"),
        _ => Failure::new(Class::Protocol, words(error)),
    }
}
