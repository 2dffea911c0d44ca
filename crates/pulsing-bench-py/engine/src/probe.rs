//! A few requests before the run: is the server there, what does it understand, how many tokens is a word.

use crate::body::{self, Dialect};
use crate::clock::Clock;
use crate::config::{Config, Endpoint};
use crate::error::BenchError;
use crate::exchange::Client;
use crate::prompt::{Calibration, Prompts};
use crate::record::{Class, Failure, Outcome, Record};
use crate::trace::Trace;

const SHORT: usize = 40;
const LONG: usize = 120;
/// Tokens asked for; enough to see a stream.
const ANSWER: u32 = 4;

/// What was found out.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) dialect: Dialect,
    pub(crate) path: String,
    pub(crate) scale: Calibration,
    /// What was tried and refused, with the server's words.
    pub(crate) refused: Vec<String>,
}

/// Asks the server in every spelling until one is understood.
pub(crate) async fn probe(
    config: &Config,
    client: &Client,
    clock: Clock,
    prompts: &Prompts,
) -> Result<Found, BenchError> {
    let mut refused: Vec<(String, Failure)> = Vec::new();
    for dialect in dialects(config.endpoint) {
        let path = client.target().path(dialect.endpoint);
        match ask(config, client, clock, prompts, &dialect, &path, SHORT).await {
            Ok(short) => {
                let long = ask(config, client, clock, prompts, &dialect, &path, LONG).await;
                let scale = match long {
                    Ok(long) => Calibration::from_probes((SHORT, short.prompt), (LONG, long.prompt)),
                    Err(_) => Calibration::ASSUMED,
                };
                let refused =
                    refused.into_iter().map(|(what, failure)| format!("{what}: {}", failure.reason)).collect();
                return Ok(Found { dialect, path, scale, refused });
            }
            Err(failure) if is_misunderstanding(&failure) => refused.push((describe(&dialect, &path), failure)),
            Err(failure) => return Err(refusal(config, client, &path, &failure).await),
        }
    }
    match refused.first() {
        Some((_, failure)) => {
            let path = client.target().path(config.endpoint);
            Err(refusal(config, client, &path, failure).await)
        }
        None => Err(BenchError::Server("there is no way to ask this server".into())),
    }
}

/// From the best to the plainest spelling.
fn dialects(endpoint: Endpoint) -> Vec<Dialect> {
    let endpoints = match endpoint {
        Endpoint::Auto => vec![Endpoint::Chat, Endpoint::Completions],
        one => vec![one],
    };
    endpoints
        .into_iter()
        .flat_map(|endpoint| {
            [(true, true), (false, true), (false, false)].map(|(ignore_eos, usage)| Dialect {
                endpoint,
                ignore_eos,
                usage,
            })
        })
        .collect()
}

fn describe(dialect: &Dialect, path: &str) -> String {
    let with = match (dialect.ignore_eos, dialect.usage) {
        (true, _) => " with ignore_eos",
        (false, true) => " with stream_options",
        (false, false) => "",
    };
    format!("{path}{with}")
}

/// Whether another spelling may be understood.
fn is_misunderstanding(failure: &Failure) -> bool {
    matches!(failure.class, Class::Http(400 | 404 | 405 | 415 | 422 | 501) | Class::NotAStream)
        || (failure.class == Class::Http(500) && failure.reason.contains("template"))
}

async fn ask(
    config: &Config,
    client: &Client,
    clock: Clock,
    prompts: &Prompts,
    dialect: &Dialect,
    path: &str,
    words: usize,
) -> Result<Record, Failure> {
    // Numbers no measured request has: a prefix cache must not know their prompts.
    let prompt = prompts.words(u64::MAX - words as u64, words);
    let body = body::encode(dialect, &config.model, prompt, ANSWER, &config.extra_body);
    let now = clock.now();
    let mut trace = Trace::new(now, now, false);
    client.stream(path, &body, &mut trace).await?;
    Ok(trace.finish(Outcome::Ok, clock.now(), u64::MAX))
}

async fn refusal(config: &Config, client: &Client, path: &str, failure: &Failure) -> BenchError {
    let at = &client.target().authority;
    let what = failure.class.name();
    let mut text = match failure.class {
        Class::Refused | Class::ConnectFailed | Class::TimeoutConnect => {
            format!(
                "cannot reach http://{at}: {} ({what}). Is the server running, and is this its port?",
                failure.reason
            )
        }
        Class::Http(401 | 403) => {
            format!("{at}{path} wants another api key ({what}: {}); give it with --api_key", failure.reason)
        }
        _ => format!("{at}{path} did not answer a first request: {what}: {}", failure.reason),
    };
    if matches!(failure.class, Class::Http(400 | 404))
        && let Some(models) = models(client).await
    {
        text.push_str(&format!("\nModels of this server: {}. You asked for {:?}.", models.join(", "), config.model));
    }
    BenchError::Server(text)
}

/// The server's model list, where it has one.
pub(crate) async fn models(client: &Client) -> Option<Vec<String>> {
    let (status, body) = client.get(&format!("{}/models", client.target().prefix)).await.ok()?;
    if !status.is_success() {
        return None;
    }
    let list: serde_json::Value = serde_json::from_slice(&body).ok()?;
    let names: Vec<String> =
        list.get("data")?.as_array()?.iter().filter_map(|model| model.get("id")?.as_str().map(str::to_owned)).collect();
    (!names.is_empty()).then_some(names)
}
