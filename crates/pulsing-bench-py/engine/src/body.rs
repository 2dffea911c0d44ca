//! The JSON of a request.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::config::Endpoint;

/// How requests are spelled for this server, found by the probe.
#[derive(Clone, Debug)]
pub(crate) struct Dialect {
    pub(crate) endpoint: Endpoint,
    /// Whether `ignore_eos` is sent, so that every answer has the asked length.
    pub(crate) ignore_eos: bool,
    /// Whether `stream_options` is sent, so that the answer ends with its usage.
    pub(crate) usage: bool,
}

pub(crate) fn encode(
    dialect: &Dialect,
    model: &str,
    prompt: String,
    max_tokens: u32,
    extra: &Map<String, Value>,
) -> Bytes {
    let mut body = Map::new();
    body.insert("model".into(), model.into());
    match dialect.endpoint {
        Endpoint::Completions => body.insert("prompt".into(), prompt.into()),
        Endpoint::Chat | Endpoint::Auto => body.insert("messages".into(), json!([{"role": "user", "content": prompt}])),
    };
    body.insert("stream".into(), true.into());
    body.insert("max_tokens".into(), max_tokens.into());
    if dialect.usage {
        body.insert("stream_options".into(), json!({"include_usage": true}));
    }
    if dialect.ignore_eos {
        body.insert("ignore_eos".into(), true.into());
    }
    for (key, value) in extra {
        body.insert(key.clone(), value.clone());
    }
    Bytes::from(Value::Object(body).to_string())
}
