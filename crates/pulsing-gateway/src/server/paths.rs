//! Which paths there are, and what may be done to them.

use hyper::Method;

use crate::api::Api;
use crate::config::GatewayConfig;
use crate::metrics::Route;

const GET: &str = "GET, HEAD, OPTIONS";
const POST: &str = "POST, OPTIONS";
/// What OpenAI's clients do to responses that were stored.
const STORED: &str = "GET, HEAD, POST, DELETE, OPTIONS";

/// What a path stands for.
pub(super) enum Endpoint {
    Root,
    Health,
    Ready,
    Metrics,
    Models,
    Model(String),
    Routing,
    Generate(Api),
    /// A response that was given before.
    Stored,
}

impl Endpoint {
    /// Trailing slashes and a missing `/v1` are forgiven: clients are configured with and without.
    pub(super) fn of(path: &str) -> Option<Self> {
        let path = path.trim_end_matches('/');
        Some(match path.strip_prefix("/v1").filter(|rest| rest.is_empty() || rest.starts_with('/')).unwrap_or(path) {
            "" => Self::Root,
            "/health" => Self::Health,
            "/ready" => Self::Ready,
            "/metrics" => Self::Metrics,
            "/models" => Self::Models,
            "/_routing" => Self::Routing,
            "/chat/completions" => Self::Generate(Api::Chat),
            "/completions" => Self::Generate(Api::Completions),
            "/embeddings" => Self::Generate(Api::Embeddings),
            "/tokenize" => Self::Generate(Api::Tokenize),
            "/detokenize" => Self::Generate(Api::Detokenize),
            "/responses" => Self::Generate(Api::Responses),
            other if other.starts_with("/responses/") => Self::Stored,
            other => Self::Model(decode_percent(other.strip_prefix("/models/")?)),
        })
    }
    /// Whether it is answered without a key. Whatever is not named here is not.
    pub(super) fn is_open(&self, config: &GatewayConfig) -> bool {
        match self {
            Self::Root | Self::Health | Self::Ready => true,
            Self::Metrics => config.metrics_open,
            _ => false,
        }
    }
    /// Its methods, as the header `allow` has them.
    pub(super) fn allow(&self) -> &'static str {
        match self {
            Self::Generate(_) => POST,
            Self::Stored => STORED,
            _ => GET,
        }
    }
    pub(super) fn takes(&self, method: &Method) -> bool {
        self.allow().split(", ").any(|allowed| allowed == method.as_str())
    }
    /// Under what it is counted.
    pub(super) fn route(&self) -> Route {
        match self {
            Self::Root | Self::Routing => Route::Other,
            Self::Health | Self::Ready => Route::Health,
            Self::Metrics => Route::Metrics,
            Self::Models | Self::Model(_) => Route::Models,
            Self::Generate(api) => (*api).into(),
            Self::Stored => Route::Responses,
        }
    }
}

impl From<Api> for Route {
    fn from(api: Api) -> Self {
        match api {
            Api::Chat => Self::Chat,
            Api::Completions => Self::Completions,
            Api::Embeddings => Self::Embeddings,
            Api::Tokenize | Api::Detokenize => Self::Tokenize,
            Api::Responses => Self::Responses,
        }
    }
}

/// Undoes `%xx`; what is no escape stays as it is.
fn decode_percent(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3).filter(|hex| hex.bytes().all(|digit| digit.is_ascii_hexdigit())))
            .flatten()
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        out.push(escaped.unwrap_or(bytes[at]));
        at += if escaped.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_escapes_are_undone() {
        for (text, expected) in [
            ("a%2Fb", "a/b"),
            ("%e2%82%AC", "€"),
            ("%+5", "%+5"),
            ("%2", "%2"),
            ("%zz%", "%zz%"),
            ("%ff", "\u{fffd}"),
            ("%é1", "%é1"),
        ] {
            assert_eq!(decode_percent(text), expected, "{text}");
        }
    }
}
