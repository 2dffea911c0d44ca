//! Errors in OpenAI's shape (S3).

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use pulsing_core::AppError;
use serde::Deserialize;
use serde_json::Value;

use super::push_json_string;

/// Longest message that goes to a client: an error must not echo a 100 MB input.
const MAX_MESSAGE: usize = 1024;

/// One HTTP error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// The text.
    pub message: String,
    /// OpenAI's `type`.
    pub kind: Cow<'static, str>,
    /// The offending parameter.
    pub param: Option<Box<str>>,
    /// OpenAI's `code`.
    pub code: Option<Cow<'static, str>>,
    /// Seconds for `Retry-After`.
    pub retry_after: Option<u16>,
    /// `x-should-retry: false`: the Router has already tried elsewhere.
    pub no_retry: bool,
    /// `Allow`, with 405.
    pub allow: Option<&'static str>,
    /// `Connection: close`: where the request ends is not known, or not worth waiting for.
    pub close: bool,
    /// What an engine answered, already in OpenAI's shape: sent as it is, instead of what the other fields say.
    pub body: Option<Box<Bytes>>,
}

impl ApiError {
    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            message: shorten(message.into()),
            kind: Cow::Borrowed(kind),
            param: None,
            code: None,
            retry_after: None,
            no_retry: false,
            allow: None,
            close: false,
            body: None,
        }
    }
    fn code(mut self, code: &'static str) -> Self {
        self.code = Some(Cow::Borrowed(code));
        self
    }
    /// Ends the connection, too.
    pub(crate) fn last(mut self) -> Self {
        self.close = true;
        self
    }
    /// 400: the client's fault, at `param`.
    pub fn invalid(param: Option<&str>, message: impl Into<String>) -> Self {
        let mut error = Self::new(400, "invalid_request_error", message);
        error.param = param.map(Box::from);
        error
    }
    /// 404 for a path.
    pub fn unknown_path(method: &str, path: &str) -> Self {
        let path: String = path.chars().take(200).collect();
        Self::new(404, "invalid_request_error", format!("Unknown request URL: {method} {path}")).code("unknown_url")
    }
    /// 405.
    pub fn method_not_allowed(method: &str, allow: &'static str) -> Self {
        let mut error =
            Self::new(405, "invalid_request_error", format!("Method {method} is not allowed here; allowed: {allow}"))
                .code("method_not_allowed");
        error.allow = Some(allow);
        error
    }
    /// 404 for a model.
    pub fn model_not_found(model: &str, known: &[String]) -> Self {
        let shown: String = model.chars().take(200).collect();
        let mut error = Self::new(
            404,
            "invalid_request_error",
            format!("The model `{shown}` does not exist. Models served here: {}", known.join(", ")),
        )
        .code("model_not_found");
        error.param = Some(Box::from("model"));
        error
    }
    /// 400: no Worker of the model answers this kind of request; `workers` names them and what they answer.
    pub fn unsupported_endpoint(model: &str, path: &str, workers: &str) -> Self {
        let mut error =
            Self::new(400, "invalid_request_error", format!("The model `{model}` has no {path}: {workers}"))
                .code("unsupported_endpoint");
        error.param = Some(Box::from("model"));
        error
    }
    /// 404 for a response that was given before.
    pub fn not_stored() -> Self {
        Self::new(
            404,
            "invalid_request_error",
            "Responses are not stored here: none can be fetched, changed or cancelled",
        )
        .code("not_stored")
    }
    /// An error in the chat that a response was made into, in the words of who asked for the response.
    #[must_use]
    pub fn of_response(mut self) -> Self {
        for (chat, response) in [("max_completion_tokens", "max_output_tokens"), ("messages", "input")] {
            if self.param.as_deref() == Some(chat) {
                self.param = Some(Box::from(response));
                self.message = self.message.replace(chat, response);
            }
        }
        self
    }
    /// 413.
    pub fn too_large(limit: usize) -> Self {
        Self::new(413, "invalid_request_error", format!("The request body is over the limit of {limit} bytes"))
            .code("request_too_large")
            .last()
    }
    /// 415 or 501: the body is not sent as it is.
    pub fn coded_body(status: u16, header: &str, coding: &str) -> Self {
        let message = format!("The request body is sent with {header}: {coding}; send it as it is, in plain JSON");
        Self::new(status, "invalid_request_error", message).code("unsupported_encoding")
    }
    /// 400, 414 or 431: what came is no request that can be read.
    pub fn unreadable(status: u16) -> Self {
        let (message, code) = match status {
            414 => ("The request's URL is too long", "uri_too_long"),
            431 => ("The request's headers are too many or too large", "headers_too_large"),
            _ => ("This is not an HTTP request that can be read", "bad_request"),
        };
        Self::new(status, "invalid_request_error", message).code(code).last()
    }
    /// 400: a request whose head can be read, but not in one way only.
    pub fn malformed(message: impl Into<String>) -> Self {
        let mut error = Self::unreadable(400);
        error.message = shorten(message.into());
        error
    }
    /// 400: the body does not come as its head says.
    pub fn broken_body(error: &impl fmt::Display) -> Self {
        Self::invalid(None, format!("The request body broke off: {error}")).last()
    }
    /// 431 for headers of more than `limit` bytes.
    pub fn large_headers(limit: usize) -> Self {
        let mut error = Self::unreadable(431);
        error.message = format!("The request's headers are over the limit of {limit} bytes");
        error
    }
    /// 408: the body stopped coming.
    pub fn slow_body() -> Self {
        Self::new(408, "invalid_request_error", "The request body stopped coming").code("request_timeout").last()
    }
    /// 401; `wrong` tells a key that there is not from none at all.
    pub fn unauthorized(wrong: bool) -> Self {
        let message = if wrong {
            "Incorrect API key provided."
        } else {
            "You didn't provide an API key. Send it in the header Authorization: Bearer KEY."
        };
        Self::new(401, "invalid_request_error", message).code("invalid_api_key")
    }
    /// 429: this key's own limit is reached; it may ask again after `wait`.
    pub fn rate_limited(message: impl Into<String>, wait: Duration) -> Self {
        let mut error = Self::new(429, "rate_limit_error", message).code("rate_limit_exceeded");
        error.retry_after = Some(wait.as_secs_f64().ceil().clamp(1.0, 3600.0) as u16);
        error
    }
    /// 503 for a full house; `why` continues the sentence, `retry_after` is in seconds.
    pub fn overloaded(why: impl fmt::Display, retry_after: u16) -> Self {
        let mut error =
            Self::new(503, "service_unavailable", format!("The Router is overloaded: {why}")).code("overloaded");
        error.retry_after = Some(retry_after);
        error
    }
    /// 503 while the Router shuts down.
    pub fn draining() -> Self {
        let mut error = Self::new(503, "service_unavailable", "The Router is shutting down").code("draining");
        error.retry_after = Some(1);
        error
    }
    /// 503 without a worker; `why` continues the sentence.
    pub fn no_workers(why: &str) -> Self {
        let mut error =
            Self::new(503, "service_unavailable", format!("No available workers: {why}")).code("no_available_workers");
        error.retry_after = Some(2);
        error
    }
    /// 504.
    pub fn deadline(seconds: f64) -> Self {
        let mut error = Self::new(504, "server_error", format!("The request was not finished within {seconds} s"))
            .code("deadline_exceeded");
        error.no_retry = true;
        error
    }
    /// 502: a worker broke its protocol or left in the middle.
    pub fn worker_fault(message: impl Into<String>) -> Self {
        Self::new(502, "server_error", message).code("bad_worker")
    }
    /// The error a worker answered with, its status and text kept.
    pub fn from_worker(error: &AppError) -> Self {
        #[derive(Deserialize, Default)]
        struct Body {
            error: Option<Value>,
            message: Option<String>,
            #[serde(rename = "type")]
            kind: Option<String>,
            param: Option<String>,
            code: Option<Value>,
        }
        let status = u16::try_from(error.code).ok().filter(|status| (400..600).contains(status)).unwrap_or(500);
        let mut body: Body = serde_json::from_slice(&error.data).unwrap_or_default();
        if let Some(inner) = body.error.take() {
            body = serde_json::from_value(inner).unwrap_or_default();
        }
        let kind = body
            .kind
            .map_or(Cow::Borrowed(if status < 500 { "invalid_request_error" } else { "server_error" }), Cow::Owned);
        let message = body.message.unwrap_or_else(|| match error.message.is_empty() {
            true => format!("the worker failed with {}", error.type_name),
            false => error.message.clone(),
        });
        let mut answer = Self::new(status, "", message);
        answer.kind = kind;
        answer.param = body.param.map(String::into_boxed_str);
        answer.code = match body.code {
            Some(Value::String(code)) => Some(Cow::Owned(code)),
            Some(Value::Number(code)) => Some(Cow::Owned(code.to_string())),
            _ => None,
        };
        if matches!(status, 429 | 503) {
            answer.retry_after = Some(1);
        }
        answer
    }
    /// The body, `{"error":{...}}`.
    pub fn to_json(&self) -> Bytes {
        if let Some(body) = &self.body {
            return Bytes::clone(body);
        }
        let mut out = Vec::with_capacity(self.message.len() + 128);
        out.extend_from_slice(b"{\"error\":{\"message\":");
        push_json_string(&mut out, &self.message);
        out.extend_from_slice(b",\"type\":");
        push_json_string(&mut out, &self.kind);
        for (key, value) in [("param", self.param.as_deref()), ("code", self.code.as_deref())] {
            out.extend_from_slice(format!(",\"{key}\":").as_bytes());
            match value {
                Some(text) => push_json_string(&mut out, text),
                None => out.extend_from_slice(b"null"),
            }
        }
        out.extend_from_slice(b"}}");
        out.into()
    }
}

fn shorten(mut message: String) -> String {
    if message.len() > MAX_MESSAGE {
        let mut end = MAX_MESSAGE;
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        message.push_str("...");
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(code: i32, data: &str) -> AppError {
        AppError {
            type_name: "x.Y".to_owned(),
            message: "text".to_owned(),
            code,
            data: Bytes::copy_from_slice(data.as_bytes()),
            ..AppError::default()
        }
    }

    #[test]
    fn a_workers_error_keeps_status_and_fields_wrapped_once() {
        for data in [
            r#"{"message":"too long","type":"t","param":"messages","code":"context_length_exceeded"}"#,
            r#"{"error":{"message":"too long","type":"t","param":"messages","code":"context_length_exceeded"}}"#,
        ] {
            let error = ApiError::from_worker(&app(400, data));
            assert_eq!(error.status, 400);
            assert_eq!(
                error.to_json(),
                r#"{"error":{"message":"too long","type":"t","param":"messages","code":"context_length_exceeded"}}"#
            );
        }
    }

    #[test]
    fn an_error_without_a_status_is_500_and_keeps_its_text() {
        for code in [0, 200, 99_999, -4] {
            let error = ApiError::from_worker(&app(code, "not json"));
            assert_eq!((error.status, error.message.as_str(), &*error.kind), (500, "text", "server_error"));
        }
    }

    #[test]
    fn a_message_never_echoes_a_large_input() {
        let error = ApiError::invalid(None, "é".repeat(100_000));
        assert!(error.to_json().len() < 1200);
    }
}
