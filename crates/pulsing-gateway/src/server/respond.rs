//! Responses and the headers that all of them share.

use bytes::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};

use super::body::Body;
use super::cors::Allowed;
use crate::admit::Rate;
use crate::api::ApiError;
use crate::engine::Head;
use crate::ids;

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

const JSON: HeaderValue = HeaderValue::from_static("application/json");

pub(super) fn with_type(status: u16, kind: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub(super) fn json(status: u16, body: impl Into<bytes::Bytes>) -> Response<Body> {
    let mut response = with_type(status, "application/json", Body::full(body));
    response.headers_mut().insert(header::CONTENT_TYPE, JSON);
    response
}

pub(super) fn events(body: Body) -> Response<Body> {
    let mut response = with_type(200, "text/event-stream; charset=utf-8", body);
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells nginx and its like not to gather events.
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    response
}

/// An engine's whole answer.
pub(super) fn passed(head: Head, body: impl Into<bytes::Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::full(body));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}

/// An engine's events.
pub(super) fn passed_events(head: Head, body: Body) -> Response<Body> {
    let mut response = events(body);
    *response.status_mut() = head.status;
    let headers = response.headers_mut();
    headers.extend(head.headers);
    response
}

pub(super) fn error(error: &ApiError) -> Response<Body> {
    let mut response = json(error.status, error.to_json());
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.no_retry {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    if error.status == 401 {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"pulsing\""));
    }
    if let Some(allow) = error.allow {
        headers.insert(header::ALLOW, HeaderValue::from_static(allow));
    }
    if error.close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The answer to a preflight: no key is asked for, as browsers send none with it.
pub(super) fn preflight(allow: &'static str, request: &HeaderMap, cors: &Allowed) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(header::ALLOW, HeaderValue::from_static(allow));
    cors.write_preflight(headers, request, allow);
    response
}

pub(super) fn finish(response: &mut Response<Body>, request_id: &HeaderValue, rate: Option<Rate>, cors: &Allowed) {
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, request_id.clone());
    for (name, value) in rate.iter().flat_map(Rate::headers) {
        // An engine's own limits are none of the client's.
        headers.insert(name, value);
    }
    cors.write(headers);
}

/// The status of an error that hyper answers by itself when it cannot read a request. No answer of ours is without an id.
pub(super) fn bare_error(written: &[u8]) -> Option<u16> {
    let line = written.strip_prefix(b"HTTP/1.1 ").or_else(|| written.strip_prefix(b"HTTP/1.0 "))?;
    if line.first() != Some(&b'4') || !written.ends_with(b"\r\n\r\n") {
        return None;
    }
    let text = std::str::from_utf8(written).ok()?;
    let whole = text.contains("\r\ncontent-length: 0\r\n") && !text.contains("\r\nx-request-id: ");
    whole.then(|| text.get(9..12)?.parse().ok()).flatten()
}

/// What is answered in its place: the same, as the API has it.
pub(super) fn unreadable(status: u16) -> Bytes {
    last_words(&ApiError::unreadable(status))
}

/// What a client is told that comes without TLS where there is some.
pub(super) fn plaintext() -> Bytes {
    last_words(&ApiError::invalid(None, "This port speaks TLS: use https:// in place of http://"))
}

fn last_words(error: &ApiError) -> Bytes {
    let status = error.status;
    let (body, id) = (error.to_json(), request_id(&HeaderMap::new()));
    let reason =
        StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Bad Request");
    let mut out = format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nx-request-id: {}\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        id.to_str().unwrap_or_default(),
        body.len()
    )
    .into_bytes();
    out.extend_from_slice(&body);
    out.into()
}

/// The client's request id if it is one, else a fresh one.
pub(super) fn request_id(headers: &HeaderMap) -> HeaderValue {
    let usable = |value: &&HeaderValue| {
        (1..=128).contains(&value.len()) && value.as_bytes().iter().all(|byte| (0x21..0x7f).contains(byte))
    };
    match headers.get(REQUEST_ID).filter(usable) {
        Some(value) => value.clone(),
        None => HeaderValue::try_from(ids::fresh("req-")).unwrap_or_else(|_| HeaderValue::from_static("req-0")),
    }
}
