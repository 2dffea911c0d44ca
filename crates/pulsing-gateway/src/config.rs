//! What a gateway is started with.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, de};

use crate::picker::ExternalPicker;
use crate::policy::{Balance, PolicyKind, PolicyOptions};
use crate::pool::{Limits, Served};

/// Settings of one gateway. In JSON, as the Router hands them over, names are the Router's and times are in seconds; what
/// is left out has its default.
#[derive(Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Host name or address to listen on. Default `0.0.0.0`.
    #[serde(rename = "http_host")]
    pub host: String,
    /// Port; 0 takes a free one. Default 8080.
    #[serde(rename = "http_port")]
    pub port: u16,
    /// Public name of whatever serves under `worker_name` (S7). Default `pulsing-model`.
    pub model_name: String,
    /// Name the Workers are registered under. Default `worker`.
    pub worker_name: String,
    /// Public names, each for what serves under some worker name. The pair of `model_name` and `worker_name` comes before
    /// them, if it is not the first of them. Default none.
    pub models: Vec<Served>,
    /// How a Worker is chosen. Default `stream_load`.
    #[serde(rename = "scheduler_type", deserialize_with = "policy")]
    pub policy: PolicyKind,
    /// Where `consistent_hash` and `cache_aware` give way to load: requests above a Worker's share that are always allowed.
    /// Default 4.
    pub balance_absolute: u32,
    /// And times its share that are always allowed. Default 1.5.
    pub balance_relative: f64,
    /// Memory for what `cache_aware` knows of prompts, in bytes. Default 32 MiB: 2 million blocks, or 512 MiB of prompts.
    pub cache_index: usize,
    /// Headers that name a conversation, the most telling first, for `consistent_hash`; after them counts the body: `user`
    /// and its like. Default `x-session-id`, `x-conversation-id`, `x-user-id`.
    #[serde(deserialize_with = "header_names")]
    pub session_headers: Vec<String>,
    /// Tell clients that ask where their requests went and why, and answer `GET /v1/_routing`. Default false: it names Workers.
    pub debug_routing: bool,
    /// Asked before the policy (S1).
    #[serde(skip)]
    pub picker: Option<Arc<dyn ExternalPicker>>,
    /// How long `picker` may take for one request before the policy decides. Default 50 ms.
    #[serde(deserialize_with = "seconds")]
    pub picker_limit: Duration,
    /// Largest request body in bytes. Default 64 MiB, which holds a 33 MB image in base64.
    pub max_body: usize,
    /// Requests in the house at once, running or waiting; more are refused with 503 (S6). Default 4096.
    pub max_requests: usize,
    /// Requests whose bodies are being received; they are not in the house yet, and more are refused with 503. Default 4096.
    pub max_receiving: usize,
    /// Bytes of all request bodies, those on their way included, beyond which none may become larger than 64 KiB; it is
    /// refused with 503. Default 4 GiB.
    pub max_bodies: usize,
    /// Limit of one request from arrival to its last byte. Default 600 s, the openai clients' own limit.
    #[serde(deserialize_with = "seconds")]
    pub request_timeout: Duration,
    /// How long a connection may take to send a request head, and may stay idle between requests. Default 120 s: longer
    /// than the keep-alive of common clients (Go 90 s), so that it is the client that closes.
    #[serde(deserialize_with = "seconds")]
    pub header_timeout: Duration,
    /// How long a body may pause while it is read. Default 30 s.
    #[serde(deserialize_with = "seconds")]
    pub body_timeout: Duration,
    /// Silence on a stream after which a comment line keeps proxies from cutting it. Default 15 s.
    #[serde(deserialize_with = "seconds")]
    pub ping_interval: Duration,
    /// How long a request waits for another Worker when the one it was on is lost. Default 1 s.
    #[serde(deserialize_with = "seconds")]
    pub worker_wait: Duration,
    /// How long an engine server must have been gone or silent before requests that it has not begun to answer are taken
    /// back and sent elsewhere, at most; three times its longest time to a first byte, where that is less. Default 10 s.
    #[serde(deserialize_with = "seconds")]
    pub take_back: Duration,
    /// Silence after which a Worker is not chosen, and its requests that have no answer yet are taken back and sent to
    /// another one. Default 1.5 s: three missed load reports.
    #[serde(deserialize_with = "seconds")]
    pub worker_silence: Duration,
    /// The same for a Worker that reports requests and no progress; more for what takes it longer. Default 10 s.
    #[serde(deserialize_with = "seconds")]
    pub worker_standstill: Duration,
    /// How long a request waits for a Worker where all have fallen silent. Default 10 s: a machine that only swaps comes
    /// back sooner.
    #[serde(deserialize_with = "seconds")]
    pub silence_wait: Duration,
    /// Workers that one request is tried on at most. Default 5.
    pub max_attempts: u32,
    /// File of API keys, one a line: `name:key` or `name:sha256:hex`, each with its limits. Default none: anybody may ask.
    pub api_keys_file: Option<PathBuf>,
    /// The one API key, where there is no file. Default none.
    pub api_key: Option<String>,
    /// Answer `/metrics` without a key. Default false; without keys it is open anyway.
    pub metrics_open: bool,
    /// Requests that may wait in the Router while all Workers are full; more are refused with 503. 0 = none waits here,
    /// and Workers queue for themselves. Default 1024.
    pub max_queue: usize,
    /// How long a request may wait there. Default 60 s.
    #[serde(deserialize_with = "seconds")]
    pub queue_timeout: Duration,
    /// PEM file of the authorities that engines under https are believed by, in place of the system's. Default none.
    pub engine_ca_file: Option<PathBuf>,
    /// Where one JSON line a request goes: a path, or `-` for standard output. Default none.
    pub access_log: Option<String>,
    /// Bytes of each request's body, and of its answer, that its line of the access log has. Default 0: nothing of what is
    /// said is logged.
    pub access_log_content: usize,
    /// Collector of traces, as OTLP/HTTP has it: `http://host:4318`. Default none.
    pub otlp_endpoint: Option<String>,
    /// File of the headers that the collector wants, one `Name: value` a line. Default none.
    pub otlp_headers_file: Option<PathBuf>,
    /// The same as `OTEL_EXPORTER_OTLP_HEADERS` has it, where there is no file: `name=value,...`. Default none.
    pub otlp_headers: Option<String>,
    /// Share of the traces begun here that are kept; of others' traces their own choice counts. Default 1.
    pub otlp_sample: f64,
    /// Origins whose browsers are let in (CORS), as browsers spell them; `*` = any. Default none.
    pub cors_origins: Vec<String>,
    /// PEM file of the certificate chain: the API is served over TLS. Default none.
    pub tls_cert: Option<PathBuf>,
    /// PEM file of its private key.
    pub tls_key: Option<PathBuf>,
    /// Headers of one request. Default 100, as many servers have it.
    pub max_headers: usize,
    /// Their size in bytes, names and values. Default 64 KiB, which holds the largest tokens and cookies in use.
    pub max_header_bytes: usize,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        let options = PolicyOptions::default();
        Self {
            host: "0.0.0.0".to_owned(),
            port: 8080,
            model_name: "pulsing-model".to_owned(),
            worker_name: "worker".to_owned(),
            models: Vec::new(),
            policy: PolicyKind::StreamLoad,
            balance_absolute: options.balance.absolute,
            balance_relative: options.balance.relative,
            cache_index: options.index_bytes,
            session_headers: ["x-session-id", "x-conversation-id", "x-user-id"].map(str::to_owned).into(),
            debug_routing: false,
            picker: None,
            picker_limit: Duration::from_millis(50),
            max_body: 64 << 20,
            max_requests: 4096,
            max_receiving: 4096,
            max_bodies: 4 << 30,
            request_timeout: Duration::from_secs(600),
            header_timeout: Duration::from_secs(120),
            body_timeout: Duration::from_secs(30),
            ping_interval: Duration::from_secs(15),
            worker_wait: Duration::from_secs(1),
            take_back: Duration::from_secs(10),
            worker_silence: Limits::default().silence,
            worker_standstill: Limits::default().standstill,
            silence_wait: Duration::from_secs(10),
            max_attempts: 5,
            api_keys_file: None,
            api_key: None,
            metrics_open: false,
            max_queue: 1024,
            queue_timeout: Duration::from_secs(60),
            engine_ca_file: None,
            access_log: None,
            access_log_content: 0,
            otlp_endpoint: None,
            otlp_headers_file: None,
            otlp_headers: None,
            otlp_sample: 1.0,
            cors_origins: Vec::new(),
            tls_cert: None,
            tls_key: None,
            max_headers: 100,
            max_header_bytes: 64 << 10,
        }
    }
}

impl GatewayConfig {
    /// Reads the settings from a JSON object.
    ///
    /// # Errors
    /// [`GatewayError::Config`] names what cannot be read.
    pub fn from_json(text: &str) -> Result<Self, GatewayError> {
        serde_json::from_str(text).map_err(|error| GatewayError::Config(error.to_string()))
    }
    /// Clients need a key, which is no engine's.
    pub(crate) fn has_keys(&self) -> bool {
        self.api_keys_file.is_some() || self.api_key.is_some()
    }
    /// What the policy is told.
    pub fn policy_options(&self) -> PolicyOptions {
        let balance = Balance { absolute: self.balance_absolute, relative: self.balance_relative };
        PolicyOptions { balance, index_bytes: self.cache_index }
    }
}

fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let value = f64::deserialize(deserializer)?;
    Duration::try_from_secs_f64(value).map_err(|error| de::Error::custom(format!("{value} s: {error}")))
}

/// Names of headers, as they are looked up.
fn header_names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let names = Vec::<String>::deserialize(deserializer)?;
    Ok(names.into_iter().map(|name| name.to_ascii_lowercase()).collect())
}

fn policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PolicyKind, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

impl fmt::Debug for GatewayConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayConfig")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("model_name", &self.model_name)
            .field("worker_name", &self.worker_name)
            .field("models", &self.models)
            .field("policy", &self.policy)
            .field("picker", &self.picker.is_some())
            .finish_non_exhaustive()
    }
}

impl GatewayConfig {
    /// Every public name, `model_name` first.
    ///
    /// # Errors
    /// `Config` for an empty name, or one that is given twice.
    pub fn served(&self) -> Result<Vec<Served>, GatewayError> {
        let mut served = vec![Served::new(&self.model_name, &self.worker_name)];
        for (name, value) in [("model_name", &self.model_name), ("worker_name", &self.worker_name)] {
            if value.is_empty() {
                return Err(GatewayError::Config(format!("{name} must not be empty")));
            }
        }
        let more = match self.models.split_first() {
            Some((first, more)) if *first == served[0] => more,
            _ => &self.models,
        };
        for one in more {
            if one.name.is_empty() || one.worker_name.is_empty() || one.model.as_ref().is_some_and(String::is_empty) {
                return Err(GatewayError::Config(format!("models: {one:?} has an empty part")));
            }
            if served.iter().any(|other| other.name == one.name) {
                return Err(GatewayError::Config(format!("models: the name {:?} is given twice", one.name)));
            }
            served.push(one.clone());
        }
        Ok(served)
    }
}

/// Why a gateway could not start.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GatewayError {
    /// The address is taken or not ours.
    #[error("the Router cannot listen on {addr}: {reason}")]
    Bind {
        /// `host:port`.
        addr: String,
        /// The system's words.
        reason: String,
    },
    /// A setting does not make sense.
    #[error("bad setting: {0}")]
    Config(String),
}
