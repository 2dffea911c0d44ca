//! Browsers of other origins.

use hyper::header::{self, HeaderMap, HeaderValue};

/// What a browser's script may read beside the body.
const EXPOSED: &str = "x-request-id, retry-after, x-should-retry, x-ratelimit-limit-requests, \
     x-ratelimit-remaining-requests, x-ratelimit-reset-requests";
const ANY: HeaderValue = HeaderValue::from_static("*");

/// Whether, and as what, the origin of a request is let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Allowed {
    origin: Option<HeaderValue>,
    /// The answer depends on the origin.
    varies: bool,
}

impl Allowed {
    /// `origins` as configured: none, a list, or `*`.
    pub(super) fn new(origins: &[String], request: &HeaderMap) -> Self {
        if origins.iter().any(|one| one == "*") {
            return Self { origin: Some(ANY), varies: false };
        }
        let asks = request.get(header::ORIGIN);
        let origin = asks.filter(|asks| origins.iter().any(|one| one.as_bytes().eq_ignore_ascii_case(asks.as_bytes())));
        Self { origin: origin.cloned(), varies: !origins.is_empty() }
    }

    /// On every answer.
    pub(super) fn write(&self, headers: &mut HeaderMap) {
        if self.varies {
            headers.append(header::VARY, HeaderValue::from_static("origin"));
        }
        let Some(origin) = &self.origin else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    }

    /// On the answer to a preflight.
    pub(super) fn write_preflight(&self, headers: &mut HeaderMap, request: &HeaderMap, allow: &'static str) {
        if self.origin.is_none() {
            return;
        }
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(allow));
        // `*` would not cover Authorization, so what was asked for is named.
        let wanted = request.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        let wanted = wanted.unwrap_or_else(|| HeaderValue::from_static("authorization, content-type, x-request-id"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
    }
}
