//! What is sent to an engine and what comes back, apart from the bytes of streams.

use std::ops::Range;

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use pulsing_core::AppError;
use serde::Deserialize;
use serde_json::Value;

use super::endpoint::Endpoint;
use crate::api::{Api, ApiError};
use crate::protocol::Usage;

/// Of a client's headers, these go to the engine beside `x-*`.
const FORWARDED: [HeaderName; 2] = [header::ACCEPT, HeaderName::from_static("tracestate")];
/// Of the `x-*` headers, these do not: a key for the Router is not one for the engine.
const KEPT: [HeaderName; 2] = [HeaderName::from_static("x-api-key"), HeaderName::from_static("x-request-id")];
/// Of an engine's headers, these go to the client beside `x-*`.
const RETURNED: [HeaderName; 4] = [
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::RETRY_AFTER,
    HeaderName::from_static("openai-processing-ms"),
];
/// How much of the end of an answer is looked at for usage.
const USAGE_TAIL: usize = 4096;

/// What one request to an engine is made of.
pub(super) struct Forward<'a> {
    pub(super) api: Api,
    pub(super) headers: &'a HeaderMap,
    pub(super) request_id: &'a str,
    pub(super) traceparent: Option<&'a str>,
}

impl Forward<'_> {
    /// The head of the request whose body has `length` bytes.
    pub(super) fn head(&self, endpoint: &Endpoint, length: usize) -> Vec<u8> {
        let mut head = Vec::with_capacity(512);
        endpoint.write_line(&mut head, self.api.path());
        let mut put = |name: &str, value: &[u8]| {
            for part in [name.as_bytes(), b": ", value, b"\r\n"] {
                head.extend_from_slice(part);
            }
        };
        for (name, value) in self.headers {
            let extension = name.as_str().starts_with("x-") && !KEPT.contains(name);
            if extension || FORWARDED.contains(name) {
                put(name.as_str(), value.as_bytes());
            }
        }
        // Clients that post JSON under curl's default type are served by the Router; engines would refuse them.
        let json = self.headers.get(header::CONTENT_TYPE).filter(|value| is_json(value));
        put("content-type", json.map_or(&b"application/json"[..], HeaderValue::as_bytes));
        put("x-request-id", self.request_id.as_bytes());
        if let Some(traceparent) = self.traceparent {
            put("traceparent", traceparent.as_bytes());
        }
        let own = endpoint.authorization();
        if let Some(key) = own.as_ref().or_else(|| self.headers.get(header::AUTHORIZATION)) {
            put("authorization", key.as_bytes());
        }
        put("content-length", HeaderValue::from(length).as_bytes());
        head.extend_from_slice(b"\r\n");
        head
    }
}

fn is_json(value: &HeaderValue) -> bool {
    value == "application/json" || value.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains("json"))
}

/// Puts `model` in place of whatever stands at `at`, or first in the object when nothing does. All other bytes stay.
pub(super) fn with_model(body: &Bytes, at: Option<Range<usize>>, model: &str) -> Bytes {
    let name = Value::from(model).to_string();
    let (range, text) = match at {
        Some(range) => (range, name),
        None => {
            let brace = body.iter().position(|byte| *byte == b'{').map_or(0, |brace| brace + 1);
            // The object is never empty: messages or prompt were required.
            (brace..brace, format!("\"model\":{name},"))
        }
    };
    let mut spliced = Vec::with_capacity(body.len() + text.len());
    spliced.extend_from_slice(&body[..range.start]);
    spliced.extend_from_slice(text.as_bytes());
    spliced.extend_from_slice(&body[range.end..]);
    spliced.into()
}

/// Status and headers of an engine's answer, as far as they are the client's business.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
}

impl Head {
    /// The client is told of such a header. `name` is in lower case.
    pub(super) fn returns(name: &HeaderName) -> bool {
        (name.as_str().starts_with("x-") && !KEPT.contains(name)) || RETURNED.contains(name)
    }
    /// Of an answer that no engine gave.
    pub(crate) fn json() -> Self {
        let kind = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Self { status: StatusCode::OK, headers: HeaderMap::from_iter([kind]) }
    }
    /// What came in the place of JSON, or of events for a `stream`; `None` for what was asked for. A page of a proxy has the
    /// status of an answer, and is none.
    pub(super) fn strange_kind(&self, api: Api, stream: bool) -> Option<String> {
        let Some(value) = self.headers.get(header::CONTENT_TYPE) else {
            return stream.then(|| "nothing that says what it is".to_owned());
        };
        if value == if stream { "text/event-stream" } else { "application/json" } {
            return None;
        }
        let text = String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase();
        let kind = text.split(';').next().unwrap_or_default().trim();
        let fits = match stream {
            true => kind == "text/event-stream",
            // Embeddings may come as bytes.
            false => kind.contains("json") || (!api.generates() && !kind.is_empty() && !kind.starts_with("text/")),
        };
        (!fits).then(|| kind.chars().take(80).collect())
    }
}

/// An engine's error answer: as it is if it has OpenAI's shape, else wrapped once.
pub(super) fn error_of(head: &Head, body: &Bytes) -> ApiError {
    #[derive(Deserialize)]
    struct Detail {
        detail: Value,
    }
    let code = i32::from(head.status.as_u16());
    let text = match serde_json::from_slice::<Detail>(body) {
        // FastAPI's own errors.
        Ok(Detail { detail: Value::String(text) }) => text,
        Ok(Detail { detail }) => detail.to_string(),
        Err(_) => match serde_json::from_slice::<Value>(body) {
            Ok(Value::Object(mut object)) if object.get("error").is_some_and(Value::is_string) => {
                object.remove("error").and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_default()
            }
            _ => String::from_utf8_lossy(&body[..body.len().min(2048)]).trim().to_owned(),
        },
    };
    let message = if text.is_empty() { format!("the engine answered {}", head.status) } else { text };
    let mut error = ApiError::from_worker(&AppError { code, message, data: body.clone(), ..AppError::default() });
    let is_shaped = |body: &Value| body["error"]["message"].is_string();
    if serde_json::from_slice::<Value>(body).is_ok_and(|body| is_shaped(&body)) {
        error.body = Some(Box::new(body.clone()));
    }
    if let Some(seconds) = head.headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok()) {
        error.retry_after = Some(seconds);
    }
    error
}

/// `usage` as engines write it; that of `/v1/responses` has other names.
#[derive(Deserialize)]
struct WireUsage {
    #[serde(alias = "input_tokens")]
    prompt_tokens: u32,
    #[serde(alias = "output_tokens")]
    completion_tokens: Option<u32>,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: Option<WireDetails>,
}

#[derive(Deserialize)]
struct WireDetails {
    cached_tokens: Option<u32>,
}

impl From<WireUsage> for Usage {
    fn from(usage: WireUsage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens.unwrap_or(0),
            cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0),
        }
    }
}

/// A `usage` object.
pub(super) fn usage_of(value: &Value) -> Option<Usage> {
    WireUsage::deserialize(value).ok().map(Usage::from)
}

/// The last `usage` object near the end of `bytes`.
pub(crate) fn usage_in(bytes: &[u8]) -> Option<Usage> {
    const KEY: &[u8] = b"\"usage\":";
    let bytes = &bytes[bytes.len().saturating_sub(USAGE_TAIL)..];
    // In a string the quotes would stand behind backslashes, so this is a key.
    let mut end = bytes.len();
    while let Some(at) = bytes[..end].windows(KEY.len()).rposition(|window| window == KEY) {
        let mut values = serde_json::Deserializer::from_slice(&bytes[at + KEY.len()..]).into_iter::<WireUsage>();
        if let Some(Ok(usage)) = values.next() {
            return Some(usage.into());
        }
        end = at;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(status: u16, headers: &[(&'static str, &'static str)]) -> Head {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        Head { status: StatusCode::from_u16(status).unwrap(), headers }
    }
    fn error(status: u16, body: &str) -> (u16, String) {
        let error = error_of(&head(status, &[]), &Bytes::copy_from_slice(body.as_bytes()));
        (error.status, String::from_utf8(error.to_json().to_vec()).unwrap())
    }

    #[test]
    fn errors_in_openais_shape_pass_as_they_are() {
        let body = r#"{ "error" : {"message": "no", "extra": [1, null], "code": 400}}"#;
        assert_eq!(error(400, body), (400, body.to_owned()));
    }

    #[test]
    fn other_errors_are_wrapped_once() {
        for (body, message) in [
            (r#"{"object":"error","message":"flat","type":"BadRequest","code":400}"#, "flat"),
            (r#"{"detail":"fast"}"#, "fast"),
            (r#"{"detail":[{"loc":["body"]}]}"#, r#"[{\"loc\":[\"body\"]}]"#),
            (r#"{"error":"plain"}"#, "plain"),
            ("Bad Gateway", "Bad Gateway"),
            ("", "the engine answered 422 Unprocessable Entity"),
        ] {
            let (status, json) = error(422, body);
            assert_eq!(status, 422);
            assert!(json.starts_with(&format!("{{\"error\":{{\"message\":\"{message}\"")), "{body}: {json}");
        }
    }

    #[test]
    fn only_the_models_name_changes() {
        let body = Bytes::from_static(br#" { "n" : null, "model" : "al\u0069as" ,"big":12345678901234567890}"#);
        let spliced = with_model(&body, Some(25..37), "a\"b");
        assert_eq!(spliced, r#" { "n" : null, "model" : "a\"b" ,"big":12345678901234567890}"#);
        let body = Bytes::from_static(br#"{"prompt":"x"}"#);
        assert_eq!(with_model(&body, None, "m"), r#"{"model":"m","prompt":"x"}"#);
    }

    #[test]
    fn usage_is_found_near_the_end_and_not_inside_text() {
        let usage = |text: &str| usage_in(text.as_bytes()).map(|usage| (usage.prompt_tokens, usage.cached_tokens));
        assert_eq!(usage(r#"{"usage":{"prompt_tokens":7,"completion_tokens":1,"x":{}},"y":null}"#), Some((7, 0)));
        assert_eq!(
            usage(r#"{"usage": {"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}, "usage":null}"#),
            Some((7, 4))
        );
        assert_eq!(usage(r#"{"text":"\"usage\":{\"prompt_tokens\":9}","usage":null}"#), None);
    }
}
