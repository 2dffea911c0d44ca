//! Spans of those that work for a Router, on their way to the same collector.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use serde_json::Value;

use super::{Attribute, Context, Exporter, Kind, Span};
use crate::config::GatewayError;

/// Takes what a Worker has done; a task sends it.
pub struct Tracer(Exporter);

impl Tracer {
    /// Sends to `endpoint` (`http://host:4318`) as the service `service`. What the collector wants to be told stands in
    /// `headers_file`, one `Name: value` a line, or else in `headers`, as `OTEL_EXPORTER_OTLP_HEADERS` has it:
    /// `name=value,...` with `%xx` for what could be misread. Call it inside a tokio runtime; what is recorded after the
    /// runtime has gone is lost.
    ///
    /// # Errors
    /// [`GatewayError::Config`] for an address or headers that cannot be used; it repeats no header's value.
    pub fn start(
        endpoint: &str,
        headers_file: Option<&Path>,
        headers: Option<&str>,
        service: &str,
    ) -> Result<Self, GatewayError> {
        let (exporter, sending) = Exporter::new(endpoint, (headers_file, headers), 1.0, service)?;
        tokio::spawn(sending);
        Ok(Self(exporter))
    }
    /// A span below `traceparent`, which is a W3C trace context; nothing where that is none, or says that the trace is not
    /// kept. `attributes` are a JSON object; what is neither text, number nor flag in it is left out. Never waits.
    ///
    /// # Errors
    /// [`GatewayError::Config`] for attributes that are no JSON object.
    pub fn record(
        &self,
        traceparent: &str,
        name: String,
        (start, end): (SystemTime, SystemTime),
        attributes: &str,
        error: Option<String>,
    ) -> Result<(), GatewayError> {
        let attributes: BTreeMap<String, Value> = serde_json::from_str(attributes)
            .map_err(|error| GatewayError::Config(format!("attributes of a span: {error}")))?;
        let Some(parent) = Context::parse(traceparent).filter(|parent| parent.sampled) else { return Ok(()) };
        let attribute = |value: Value| {
            Some(match value {
                Value::String(text) => Attribute::Text(text),
                Value::Bool(flag) => Attribute::Bool(flag),
                Value::Number(number) => match number.as_i64() {
                    Some(number) => Attribute::Int(number),
                    None => Attribute::Float(number.as_f64()?),
                },
                _ => return None,
            })
        };
        let attributes = attributes.into_iter().filter_map(|(key, value)| Some((Cow::Owned(key), attribute(value)?)));
        let (context, parent) = (parent.child(), Some(parent.span));
        let attributes = attributes.collect();
        self.0.export(Span { context, parent, name, kind: Kind::Server, start, end, attributes, error });
        Ok(())
    }
}
