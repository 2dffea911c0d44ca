//! Spans, and the JSON that OTLP has for them.

use std::borrow::Cow;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::Context;

/// What a span says of itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Attribute {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl Attribute {
    fn to_json(&self) -> Value {
        match self {
            Self::Text(text) => json!({"stringValue": text}),
            // 64-bit integers are strings in the JSON of protobuf.
            Self::Int(value) => json!({"intValue": value.to_string()}),
            Self::Float(value) => json!({"doubleValue": value}),
            Self::Bool(value) => json!({"boolValue": value}),
        }
    }
}

/// Which side of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Server = 2,
    Client = 3,
}

/// One span that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) context: Context,
    pub(crate) parent: Option<u64>,
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) start: SystemTime,
    pub(crate) end: SystemTime,
    pub(crate) attributes: Vec<(Cow<'static, str>, Attribute)>,
    /// What went wrong.
    pub(crate) error: Option<String>,
}

fn nanos(time: SystemTime) -> String {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos()).to_string()
}

impl Span {
    fn to_json(&self) -> Value {
        let attributes: Vec<Value> =
            self.attributes.iter().map(|(key, value)| json!({"key": key, "value": value.to_json()})).collect();
        let mut span = json!({
            "traceId": format!("{:032x}", self.context.trace),
            "spanId": format!("{:016x}", self.context.span),
            "name": self.name,
            "kind": self.kind as u8,
            "startTimeUnixNano": nanos(self.start),
            "endTimeUnixNano": nanos(self.end),
            "attributes": attributes,
        });
        if let Some(parent) = self.parent {
            span["parentSpanId"] = format!("{parent:016x}").into();
        }
        if let Some(error) = &self.error {
            span["status"] = json!({"code": 2, "message": error});
        }
        span
    }
}

/// `ExportTraceServiceRequest` of `spans`, which the service `name`, instance `instance`, made.
pub(super) fn request(spans: &[Span], name: &str, instance: &str) -> Value {
    let attribute = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
    let resource = [
        attribute("service.name", name),
        attribute("service.version", env!("CARGO_PKG_VERSION")),
        attribute("service.instance.id", instance),
    ];
    json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{
            "scope": {"name": "pulsing-gateway", "version": env!("CARGO_PKG_VERSION")},
            "spans": spans.iter().map(Span::to_json).collect::<Vec<_>>(),
        }],
    }]})
}
