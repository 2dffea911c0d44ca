//! From a request to a response.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::Body;
use super::cors::Allowed;
use super::events::EventStream;
use super::paths::Endpoint;
use super::peer::Peer;
use super::track::Tracker;
use super::{Core, head, receive, respond};
use crate::admit::{Client, Rate};
use crate::api::{self, Api, ApiError, Collector, Envelope, Parsed, Translated, Writer};
use crate::aside::aside;
use crate::dispatch::{Job, Native, Piece, Source};
use crate::engine::{Head, Whole, usage_in};
use crate::explain;
use crate::ids;
use crate::metrics::Route;
use crate::picker::PickRequest;
use crate::pool::State;
use crate::trail::{Stage, Trail};

/// Text of a request that a scheduler outside is shown, in bytes.
const PICK_TEXT: usize = 16 * 1024;

/// Headers of a client that a scheduler outside has no business with.
const SECRETS: [HeaderName; 4] =
    [header::AUTHORIZATION, header::PROXY_AUTHORIZATION, header::COOKIE, HeaderName::from_static("x-api-key")];

/// Answers one request; every outcome is a response.
pub(super) async fn handle(core: Arc<Core>, peer: Arc<Peer>, request: Request<Incoming>) -> Response<Body> {
    let cors = Allowed::new(&core.placement.config.cors_origins, request.headers());
    let request_id = respond::request_id(request.headers());
    let is_head = request.method() == Method::HEAD;
    let endpoint = Endpoint::of(request.uri().path());
    let route = endpoint.as_ref().map_or(Route::Other, Endpoint::route);
    let mut rate = None;
    let answered = match (head::fault(&request), endpoint) {
        (Some(fault), _) => {
            receive::skip(request).await;
            Err(fault)
        }
        (None, None) => Err(ApiError::unknown_path(request.method().as_str(), request.uri().path())),
        (None, Some(endpoint)) if request.method() == Method::OPTIONS => {
            Ok(respond::preflight(endpoint.allow(), request.headers(), &cors))
        }
        (None, Some(endpoint)) => enter(&core, &peer, endpoint, request, &request_id, &mut rate).await,
    };
    let mut response = answered.unwrap_or_else(|error| respond::error(&error));
    core.placement.metrics.request(route, response.status().as_u16());
    respond::finish(&mut response, &request_id, rate, &cors);
    if is_head {
        strip_body(&mut response);
    }
    peer.answer(matches!(response.body(), Body::Events(_)));
    response
}

/// Lets a request in: who asks, how, and how often. All of it before the body is read.
async fn enter(
    core: &Arc<Core>,
    peer: &Arc<Peer>,
    endpoint: Endpoint,
    mut request: Request<Incoming>,
    request_id: &HeaderValue,
    rate: &mut Option<Rate>,
) -> Result<Response<Body>, ApiError> {
    let client = match check(core, &endpoint, &mut request, rate) {
        Ok(client) => client,
        Err(error) => {
            receive::skip(request).await;
            return Err(error);
        }
    };
    match (endpoint, client) {
        (Endpoint::Generate(api), Some(client)) => generate(core, api, request, request_id, client, peer).await,
        (endpoint, _) => answer(core, endpoint, request).await,
    }
}

fn check(
    core: &Core,
    endpoint: &Endpoint,
    request: &mut Request<Incoming>,
    rate: &mut Option<Rate>,
) -> Result<Option<Client>, ApiError> {
    let limit = core.placement.config.max_header_bytes;
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
    if headers.sum::<usize>() > limit {
        return Err(ApiError::large_headers(limit));
    }
    // HTTP/2 counts none.
    if request.headers().len() > core.placement.config.max_headers {
        return Err(ApiError::unreadable(431));
    }
    let client = match core.door.ask(request.headers()) {
        Err(_) if endpoint.is_open(&core.placement.config) => None,
        asked => Some(asked?),
    };
    let method = request.method();
    if !endpoint.takes(method) {
        return Err(ApiError::method_not_allowed(method.as_str(), endpoint.allow()));
    }
    if let Some(client) = &client {
        if method == Method::POST {
            let counted;
            (*rate, counted) = client.count();
            counted?;
        }
        if core.door.is_locked()
            && let Some(trail) = request.extensions().get::<Arc<Trail>>()
        {
            trail.note(|notes| notes.key = Some(client.account.name().to_owned()));
        }
    }
    head::drop_hop_by_hop(request.headers_mut());
    if core.door.is_locked() {
        // It is this Router's key, and no engine's.
        request.headers_mut().remove(header::AUTHORIZATION);
    }
    Ok(client)
}

/// A response to HEAD says how long the body would be, and has none.
fn strip_body(response: &mut Response<Body>) {
    if let Body::Full(Some(bytes)) = response.body() {
        let length = HeaderValue::from(bytes.len());
        response.headers_mut().insert(header::CONTENT_LENGTH, length);
    }
    *response.body_mut() = Body::empty();
}

async fn answer(core: &Arc<Core>, endpoint: Endpoint, request: Request<Incoming>) -> Result<Response<Body>, ApiError> {
    let config = &core.placement.config;
    let snapshot = core.placement.pool.snapshot();
    Ok(match endpoint {
        // Open to nobody who was not named at the door.
        Endpoint::Generate(_) => return Err(ApiError::unauthorized(false)),
        Endpoint::Stored => {
            receive::skip(request).await;
            return Err(ApiError::not_stored());
        }
        Endpoint::Root => respond::json(
            200,
            json!({"service": "pulsing-router", "version": env!("CARGO_PKG_VERSION"), "model": config.model_name})
                .to_string(),
        ),
        Endpoint::Health => {
            let ready = snapshot.count(State::Ready);
            let status = if ready > 0 { "healthy" } else { "degraded" };
            respond::json(200, status_body(core, status, ready).to_string())
        }
        Endpoint::Ready => {
            let ready = snapshot.count(State::Ready);
            let closing = *core.closing.borrow();
            let (code, status) = match (closing, ready) {
                (true, _) => (503, "draining"),
                (false, 0) => (503, "no worker is ready"),
                (false, _) => (200, "ready"),
            };
            let mut body = status_body(core, status, ready);
            if code == 503 && !closing {
                body["detail"] = Value::String(core.placement.pool.explain(&config.model_name));
            }
            respond::json(code, body.to_string())
        }
        Endpoint::Metrics => {
            let text = core.placement.metrics.render(core.gauges(), &snapshot);
            respond::with_type(200, "text/plain; version=0.0.4; charset=utf-8", Body::full(text))
        }
        // Where it is off there is no such path.
        Endpoint::Routing if !config.debug_routing => return Err(ApiError::unknown_path("GET", request.uri().path())),
        Endpoint::Routing => {
            let placement = Arc::clone(&core.placement);
            // It may look through the whole index.
            let page =
                move || explain::page(&placement.config, &*placement.policy, &placement.pool, &placement.decisions);
            let page = tokio::task::spawn_blocking(page).await;
            let page = page.map_err(|error| ApiError::worker_fault(format!("the page could not be made: {error}")))?;
            respond::json(200, page.to_string())
        }
        Endpoint::Models => {
            let data: Vec<Value> =
                snapshot.listed().iter().map(|(model, length)| model_entry(core, model, *length)).collect();
            respond::json(200, json!({"object": "list", "data": data}).to_string())
        }
        Endpoint::Model(name) => match snapshot.listed().iter().find(|(model, _)| *model == name) {
            Some((model, length)) => respond::json(200, model_entry(core, model, *length).to_string()),
            None => return Err(unknown_model(core, &name)),
        },
    })
}

fn status_body(core: &Core, status: &str, ready: usize) -> Value {
    json!({
        "status": status,
        "model": core.placement.config.model_name,
        "total_workers": core.placement.pool.snapshot().all().len(),
        "healthy_workers": ready,
        "request_count": core.placement.metrics.generations(),
    })
}

fn model_entry(core: &Core, model: &str, length: u64) -> Value {
    let mut entry = json!({"id": model, "object": "model", "created": core.started, "owned_by": "pulsing"});
    if length > 0 {
        entry["max_model_len"] = length.into();
    }
    entry
}

fn unknown_model(core: &Core, model: &str) -> ApiError {
    let snapshot = core.placement.pool.snapshot();
    let known: Vec<String> = snapshot.listed().iter().map(|(name, _)| name.clone()).collect();
    ApiError::model_not_found(model, &known)
}

async fn generate(
    core: &Arc<Core>,
    api: Api,
    request: Request<Incoming>,
    request_id: &HeaderValue,
    client: Client,
    peer: &Arc<Peer>,
) -> Result<Response<Body>, ApiError> {
    let mut tracker = match Tracker::admit(core, api.into(), &request, client, peer) {
        Ok(tracker) => tracker,
        Err(error) => {
            receive::skip(request).await;
            return Err(error);
        }
    };
    if core.placement.config.debug_routing {
        tracker.trail.begin(request.headers(), tracker.started);
    }
    let trail = Arc::clone(&tracker.trail);
    let outcome = tokio::select! {
        biased;
        outcome = run(core, api, request, request_id, &mut tracker) => outcome,
        () = core.cut() => Err(ApiError::draining()),
    };
    let mut response = match outcome {
        Ok(Outcome::Whole(body)) => respond::json(200, body),
        Ok(Outcome::Passed(head, body)) => respond::passed(head, body),
        Ok(Outcome::Stream(pending, head)) => {
            tracker.answered();
            let body = Body::Events(Box::new(pending(tracker)));
            match head {
                Some(head) => respond::passed_events(head, body),
                None => respond::events(body),
            }
        }
        Err(error) => {
            tracker.refused();
            respond::error(&error)
        }
    };
    trail.tell(core.placement.config.policy.name(), response.headers_mut());
    Ok(response)
}

enum Outcome {
    Whole(Vec<u8>),
    /// An engine's answer, as it is.
    Passed(Head, Bytes),
    /// With the head of an engine's answer, if it is an engine that streams.
    Stream(Box<dyn FnOnce(Tracker) -> EventStream + Send>, Option<Head>),
}

/// A request as it is read.
struct Asked {
    /// Of a response, the chat that it was made into.
    translated: Option<Translated>,
    /// And what it was.
    native: Option<Native>,
    body: Bytes,
    parsed: Parsed,
    /// The prompt as the policy knows prompts.
    prefix: Vec<u64>,
    /// Its text, for a scheduler outside.
    pick: Option<String>,
}

/// Reads all of a body that has to be looked at before it is placed.
///
/// # Errors
/// 400 with the field at fault.
fn read(core: &Core, api: Api, body: Bytes) -> Result<Asked, ApiError> {
    let translated = if api == Api::Responses { Some(api::translate(&body)?) } else { None };
    let (native, body) = match &translated {
        Some(chat) => (Some(Native { body, model_at: chat.model_at.clone() }), chat.chat.clone()),
        None => (None, body),
    };
    let parsed =
        api::parse(api, &body).map_err(|error| if translated.is_some() { error.of_response() } else { error })?;
    let prefix = if core.placement.policy.wants_prefix() { parsed.prefix(&body) } else { Vec::new() };
    let pick = core.placement.config.picker.as_ref().map(|_| pick_text(&body[parsed.text.clone()]));
    Ok(Asked { translated, native, body, parsed, prefix, pick })
}

async fn run(
    core: &Arc<Core>,
    api: Api,
    request: Request<Incoming>,
    request_id: &HeaderValue,
    tracker: &mut Tracker,
) -> Result<Outcome, ApiError> {
    let config = &core.placement.config;
    let deadline = tracker.started + config.request_timeout;
    let (head, body) = request.into_parts();
    let sending = tracker.trail.clock();
    let limits = receive::Limits { size: config.max_body, pause: config.body_timeout, end: deadline };
    let body = receive::read(&head.headers, body, limits, |count| tracker.hold(count)).await?;
    tracker.received()?;
    if config.access_log_content > 0 {
        let logged = config.access_log_content.min(body.len());
        tracker.trail.note(|notes| notes.body = body[..logged].to_vec());
    }
    tracker.trail.spent(Stage::Body, sending);
    let parsing = tracker.trail.clock();
    let asked = {
        let core = Arc::clone(core);
        aside(body.len(), move || read(&core, api, body)).await
    };
    let asked = asked.ok_or_else(|| ApiError::worker_fault("the request could not be read"))?;
    let Asked { translated, native, body, mut parsed, prefix, pick } = asked?;
    let model = parsed.model.clone().unwrap_or_else(|| config.model_name.clone());
    let snapshot = core.placement.pool.snapshot();
    if snapshot.ready_for(&model).is_none() {
        return Err(unknown_model(core, &model));
    }
    if let Some(workers) = snapshot.lacks(&model, api) {
        return Err(ApiError::unsupported_endpoint(&model, api.path(), &workers));
    }
    tracker.trail.spent(Stage::Parse, parsing);
    let queued = tracker.trail.clock();
    tracker.queue(&model, body.len(), deadline).await?;
    tracker.trail.spent(Stage::Queue, queued);
    tracker.trail.note(|notes| {
        notes.model = Some(model.clone());
        notes.stream = parsed.stream;
        notes.sequential = parsed.bodies.len() == 1;
    });
    let choices = parsed.bodies.len() as u32 * parsed.n;
    let bodies = std::mem::take(&mut parsed.bodies);
    let mut job = job(core, head.headers, request_id, &mut parsed, model, tracker);
    job.pick = pick.map(|text| pick_request(&job.headers, text));
    (job.native, job.prefix) = (native, prefix);
    job.batch = if job.api == Api::Chat { parsed.n as usize } else { bodies.len() };
    let job = Arc::new(job);
    // An engine's own answer needs none.
    let envelope = || Envelope { api, id: answer_id(api), created: unix_now(), model: job.model.clone(), choices };
    let mut source = Source::new(&core.placement, &job, body, bodies, parsed.n);
    let late = || ApiError::deadline(config.request_timeout.as_secs_f64());

    if !parsed.stream {
        let mut answer = None;
        let collect = async {
            let mut begun = None;
            while let Some(piece) = source.next().await {
                match piece? {
                    Piece::Deltas(deltas) => {
                        begun.get_or_insert_with(Instant::now);
                        tracker.first_token();
                        let answer = answer.get_or_insert_with(|| Collector::new(envelope(), translated.as_ref()));
                        deltas.deltas.iter().try_for_each(|delta| answer.push(delta))?;
                    }
                    Piece::Again(choices) => {
                        if let Some(answer) = &mut answer {
                            answer.begin_again(choices);
                        }
                    }
                    Piece::Whole(whole) => return Ok(Some(whole)),
                    Piece::Events(..) | Piece::Complete(_) => {
                        return Err(ApiError::worker_fault("the engine streams where no stream was asked for"));
                    }
                }
            }
            if let Some(begun) = begun {
                tracker.trail.spent(Stage::Worker, Some(begun));
            }
            Ok(None)
        };
        let whole = tokio::time::timeout_at(deadline.into(), collect).await.unwrap_or_else(|_| Err(late()))?;
        if let Some(whole) = whole {
            return Ok(pass(*whole, tracker));
        }
        let answer = answer.unwrap_or_else(|| Collector::new(envelope(), translated.as_ref()));
        let usage = answer.usage();
        let body = answer.finish()?;
        tracker.complete(usage);
        return Ok(Outcome::Whole(body));
    }

    // Until the first piece an error is still an HTTP error. A prompt that takes longer than the ping interval gets its
    // status line early, so that nothing between here and the client cuts the silence.
    let commit = deadline.min(Instant::now() + config.ping_interval);
    let mut first = match tokio::time::timeout_at(commit.into(), source.next()).await {
        Ok(Some(piece)) => match piece? {
            Piece::Whole(whole) => return Ok(pass(*whole, tracker)),
            piece => {
                tracker.first_token();
                Some(piece)
            }
        },
        Ok(None) => None,
        Err(_) if Instant::now() >= deadline => return Err(late()),
        Err(_) => None,
    };
    let writer = Writer::new(&envelope(), parsed.include_usage, translated.as_ref());
    let (ping, limit) = (config.ping_interval, config.request_timeout);
    let head = match &mut first {
        Some(Piece::Events(_, head)) => head.take(),
        _ => None,
    };
    let pending = move |tracker| EventStream::new(source, writer, first, ping, deadline, limit, tracker);
    Ok(Outcome::Stream(Box::new(pending), head))
}

/// An engine's whole answer goes to the client as it is.
fn pass(whole: Whole, tracker: &mut Tracker) -> Outcome {
    tracker.first_token_at(whole.first_byte);
    tracker.complete(usage_in(&whole.body));
    Outcome::Passed(whole.head, whole.body)
}

fn job(
    core: &Core,
    headers: HeaderMap,
    request_id: &HeaderValue,
    parsed: &mut Parsed,
    model: String,
    tracker: &Tracker,
) -> Job {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).filter(|value| !value.is_empty());
    let affinity = core.placement.config.session_headers.iter().find_map(|name| text(name)).map(str::to_owned);
    let traceparent = text("traceparent").map(str::to_owned);
    Job {
        // Workers are asked for the chat that a response was made into.
        api: if parsed.api == Api::Responses { Api::Chat } else { parsed.api },
        native: None,
        model,
        names_model: parsed.model.is_some(),
        model_at: parsed.model_at.take(),
        stream: parsed.stream,
        resume: parsed.resume,
        batch: 1,
        half: None,
        handoff: Bytes::new(),
        question: parsed.question.take(),
        request_id: request_id.to_str().unwrap_or_default().to_owned(),
        traceparent,
        affinity: affinity.or_else(|| parsed.affinity.take()),
        prefix: Vec::new(),
        deadline: tracker.started + core.placement.config.request_timeout,
        trail: Arc::clone(&tracker.trail),
        pick: None,
        headers,
    }
}

fn pick_text(raw: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Message {
        content: Value,
    }
    let mut text = match serde_json::from_slice::<Vec<Message>>(raw) {
        Ok(messages) => messages.iter().filter_map(|message| message.content.as_str()).collect::<Vec<_>>().join("\n"),
        Err(_) => serde_json::from_slice::<String>(raw).unwrap_or_else(|_| String::from_utf8_lossy(raw).into_owned()),
    };
    if text.len() > PICK_TEXT {
        let mut end = PICK_TEXT;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    text
}

fn pick_request(headers: &HeaderMap, text: String) -> PickRequest {
    let headers: BTreeMap<String, String> = headers
        .iter()
        .filter(|(name, _)| !SECRETS.contains(name))
        .filter_map(|(name, value)| Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned())))
        .collect();
    PickRequest { text, headers }
}

fn answer_id(api: Api) -> String {
    let prefix = match api {
        Api::Chat => "chatcmpl-",
        Api::Responses => "resp_",
        _ => "cmpl-",
    };
    ids::fresh(prefix)
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
