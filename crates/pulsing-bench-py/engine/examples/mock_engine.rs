//! An engine server that answers from constants: what stands behind every router in `benches/router.py` and
//! `benches/router_drills.py`. One thread, no HTTP library, so that the router in front is what a run measures.
//!
//! ```text
//! mock_engine PORT[,PORT...] [--name mock] [--tokens 1] [--pause MS] [--first MS]
//! ```
//!
//! A streamed answer is one write a token. A request whose body holds `mock:` followed by `key=value` pairs, parted by
//! commas and ended by a space or a quote, is served differently: `status` (an error answer), `first` and `pause` in
//! milliseconds, `tokens`. `GET /mock` tells what was served, `GET /mock/last` the last request as it came. It says that it
//! is vLLM and goes on with an unfinished message of the assistant (`continue_final_message`) as that does; a token is a
//! number.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf, BytesMut};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Bodies beyond it carry no command: looking for one would be what is measured.
const COMMAND_BODY: usize = 16 * 1024;
const READ: usize = 256 * 1024;
/// The tokens of every prompt.
const PROMPT: std::ops::Range<u64> = 1_000_000..1_000_008;

#[derive(Clone, Copy)]
struct Answer {
    status: u16,
    tokens: u64,
    pause: Duration,
    first: Duration,
    /// Tokens that the client has already.
    had: u64,
}

#[derive(Default)]
struct Counts {
    running: AtomicU64,
    served: AtomicU64,
    /// Requests whose client left before the answer was whole.
    left: AtomicU64,
    /// Unix time of the last of those, in microseconds.
    left_at: AtomicU64,
    last: Mutex<Vec<u8>>,
}

struct Engine {
    name: String,
    usual: Answer,
    counts: Counts,
}

/// Counts a request for as long as it runs.
struct Running<'a>(&'a Counts);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

struct Head {
    get: bool,
    path: String,
    /// Where the body begins.
    body: usize,
    length: Option<usize>,
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

fn head(bytes: &[u8]) -> Option<Head> {
    let end = find(bytes, b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&bytes[..end]);
    let mut lines = text.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let get = first.next() != Some("POST");
    let path = first.next().unwrap_or_default().to_owned();
    let mut length = Some(0);
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { continue };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok();
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            length = None;
        }
    }
    Some(Head { get, path, body: end + 4, length })
}

/// The text of a message that is to be gone on with.
fn unfinished(body: &[u8]) -> Option<String> {
    find(body, b"\"continue_final_message\":true")?;
    let asked: Value = serde_json::from_slice(body).ok()?;
    asked["messages"].as_array()?.last()?["content"].as_str().map(str::to_owned)
}

fn numbers(text: &str) -> Vec<u64> {
    text.split_ascii_whitespace().flat_map(str::parse).collect()
}

fn gone() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

impl Engine {
    fn answer(&self, body: &[u8]) -> Answer {
        let mut answer = self.usual;
        if body.len() > COMMAND_BODY {
            return answer;
        }
        let Some(at) = find(body, b"mock:") else { return answer };
        let rest = String::from_utf8_lossy(&body[at + 5..]);
        let command = rest.split([' ', '"', '\\']).next().unwrap_or_default();
        let values: HashMap<&str, u64> = command
            .split(',')
            .filter_map(|pair| pair.split_once('='))
            .filter_map(|(key, value)| Some((key, value.parse().ok()?)))
            .collect();
        let value = |key| values.get(key).copied();
        answer.status = value("status").and_then(|status| u16::try_from(status).ok()).unwrap_or(answer.status);
        answer.tokens = value("tokens").unwrap_or(answer.tokens);
        answer.pause = value("pause").map_or(answer.pause, Duration::from_millis);
        answer.first = value("first").map_or(answer.first, Duration::from_millis);
        answer.had = unfinished(body).map_or(0, |text| numbers(&text).len() as u64);
        answer
    }

    fn models(&self) -> String {
        format!(
            r#"{{"object":"list","data":[{{"id":"{}","object":"model","created":1,"owned_by":"vllm","max_model_len":1000000}}]}}"#,
            self.name
        )
    }

    fn told(&self, path: &str) -> (u16, Vec<u8>) {
        let counts = &self.counts;
        match path {
            "/health" | "/health_generate" | "/v1/models" => (200, self.models().into_bytes()),
            "/version" => (200, br#"{"version":"mock"}"#.to_vec()),
            // What sglang-router wants to know of a worker.
            "/get_model_info" | "/model_info" => {
                (200, format!(r#"{{"model_path":"{}","is_generation":true}}"#, self.name).into_bytes())
            }
            "/get_server_info" | "/server_info" => {
                (200, format!(r#"{{"model_id":"{}","served_model_name":"{}"}}"#, self.name, self.name).into_bytes())
            }
            "/mock" => (
                200,
                format!(
                    r#"{{"running":{},"served":{},"left":{},"left_at":{}}}"#,
                    counts.running.load(Relaxed),
                    counts.served.load(Relaxed),
                    counts.left.load(Relaxed),
                    counts.left_at.load(Relaxed)
                )
                .into_bytes(),
            ),
            "/mock/last" => (200, counts.last.lock().clone()),
            _ => (404, br#"{"error":{"message":"not found","type":"invalid_request_error"}}"#.to_vec()),
        }
    }

    /// Questions about tokens; `None` for others.
    fn about_tokens(&self, path: &str, body: &[u8]) -> Option<Vec<u8>> {
        let asked: Value = serde_json::from_slice(body).ok()?;
        let answer = match path {
            "/tokenize" => {
                let text = unfinished(body).map_or_else(Vec::new, |text| numbers(&text));
                let tokens: Vec<u64> = PROMPT.chain(text).collect();
                json!({"count": tokens.len(), "max_model_len": 1_000_000, "tokens": tokens})
            }
            "/detokenize" => {
                let tokens = asked["tokens"].as_array()?.iter();
                json!({"prompt": tokens.map(|number| format!("{number} ")).collect::<String>()})
            }
            _ => return None,
        };
        Some(answer.to_string().into_bytes())
    }

    fn whole(&self, tokens: u64) -> String {
        let text: String = (0..tokens).map(|number| format!("{number} ")).collect();
        format!(
            r#"{{"id":"mock","object":"chat.completion","created":1,"model":"{}","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"logprobs":null,"finish_reason":"stop"}}],"usage":{{"prompt_tokens":8,"completion_tokens":{tokens},"total_tokens":{}}}}}"#,
            self.name,
            tokens + 8
        )
    }

    fn event(&self, delta: &str, finish: &str) -> Vec<u8> {
        let event = format!(
            "data: {{\"id\":\"mock\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{}\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n",
            self.name
        );
        format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()
    }
}

struct Connection {
    stream: TcpStream,
    read: BytesMut,
    engine: Arc<Engine>,
}

impl Connection {
    async fn fill(&mut self, up_to: usize) -> io::Result<()> {
        self.read.reserve(up_to.saturating_sub(self.read.len()).max(4096));
        while self.read.len() < up_to {
            if self.stream.read_buf(&mut self.read).await? == 0 {
                return Err(gone());
            }
        }
        Ok(())
    }

    async fn serve(&mut self) -> io::Result<()> {
        loop {
            let head = loop {
                if let Some(head) = head(&self.read) {
                    break head;
                }
                let more = self.read.len() + 1;
                self.fill(more).await?;
            };
            let whole = match head.length {
                Some(length) => head.body + length,
                None => loop {
                    // Chunked: it is enough to know where the body ends.
                    if let Some(end) = find(&self.read[head.body..], b"\r\n0\r\n\r\n") {
                        break head.body + end + 7;
                    }
                    let more = self.read.len() + 1;
                    self.fill(more).await?;
                },
            };
            self.fill(whole).await?;
            let engine = Arc::clone(&self.engine);
            if head.get || !head.path.starts_with("/v1/") {
                let (status, body) = match engine.about_tokens(&head.path, &self.read[head.body..whole]) {
                    Some(answer) => (200, answer),
                    None => engine.told(&head.path),
                };
                self.read.advance(whole);
                self.write_whole(status, &body).await?;
                continue;
            }
            let body = &self.read[head.body..whole];
            if body.len() <= COMMAND_BODY {
                self.read[..whole].clone_into(&mut engine.counts.last.lock());
            }
            let stream = [&b"\"stream\":true"[..], b"\"stream\": true"]
                .iter()
                .any(|key| find(&body[..body.len().min(COMMAND_BODY)], key).is_some() || ends(body, key));
            let answer = engine.answer(body);
            self.read.advance(whole);
            engine.counts.running.fetch_add(1, Relaxed);
            let running = Running(&engine.counts);
            let done = self.generate(&engine, answer, stream).await;
            drop(running);
            match done {
                Ok(()) => engine.counts.served.fetch_add(1, Relaxed),
                Err(error) => {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    engine.counts.left_at.store(u64::try_from(now.as_micros()).unwrap_or(0), Relaxed);
                    engine.counts.left.fetch_add(1, Relaxed);
                    return Err(error);
                }
            };
        }
    }

    async fn generate(&mut self, engine: &Engine, answer: Answer, stream: bool) -> io::Result<()> {
        self.pause(answer.first).await?;
        if answer.status != 200 {
            let body = br#"{"error":{"message":"failed as told","type":"server_error","param":null,"code":null}}"#;
            return self.write_whole(answer.status, body).await;
        }
        if !stream {
            self.pause(answer.pause * u32::try_from(answer.tokens).unwrap_or(u32::MAX)).await?;
            return self.write_whole(200, engine.whole(answer.tokens).as_bytes()).await;
        }
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        let mut first = head.as_bytes().to_vec();
        first.extend(engine.event(r#"{"role":"assistant","content":""}"#, "null"));
        self.stream.write_all(&first).await?;
        for number in answer.had..answer.tokens {
            if answer.pause.is_zero() {
                // As with an engine, no two tokens go out together.
                tokio::task::yield_now().await;
            } else {
                self.pause(answer.pause).await?;
            }
            self.stream.write_all(&engine.event(&format!(r#"{{"content":"{number} "}}"#), "null")).await?;
        }
        let mut last = engine.event("{}", "\"stop\"");
        last.extend(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
        self.stream.write_all(&last).await
    }

    /// Waits, and notices a client that leaves meanwhile.
    async fn pause(&mut self, pause: Duration) -> io::Result<()> {
        if pause.is_zero() {
            return Ok(());
        }
        let until = tokio::time::Instant::now() + pause;
        loop {
            let mut read = std::mem::take(&mut self.read);
            let got = tokio::select! {
                () = tokio::time::sleep_until(until) => None,
                got = self.stream.read_buf(&mut read) => Some(got),
            };
            self.read = read;
            match got {
                None => return Ok(()),
                Some(Ok(0)) => return Err(gone()),
                Some(got) => drop(got?),
            }
        }
    }

    async fn write_whole(&mut self, status: u16, body: &[u8]) -> io::Result<()> {
        let mut out = format!(
            "HTTP/1.1 {status} Mock\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        out.extend(body);
        self.stream.write_all(&out).await
    }
}

fn ends(body: &[u8], key: &[u8]) -> bool {
    find(&body[body.len().saturating_sub(256)..], key).is_some()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let usage =
        || io::Error::other("usage: mock_engine PORT[,PORT...] [--name NAME] [--tokens N] [--pause MS] [--first MS]");
    let ports: Vec<u16> = words.first().map_or("", String::as_str).split(',').flat_map(str::parse).collect();
    if ports.is_empty() {
        return Err(usage());
    }
    let mut usual = Answer { status: 200, tokens: 1, pause: Duration::ZERO, first: Duration::ZERO, had: 0 };
    let mut name = "mock".to_owned();
    for pair in words[1..].chunks(2) {
        let [key, value] = pair else { return Err(usage()) };
        let number = value.parse();
        match (key.as_str(), number) {
            ("--name", _) => name.clone_from(value),
            ("--tokens", Ok(number)) => usual.tokens = number,
            ("--pause", Ok(number)) => usual.pause = Duration::from_millis(number),
            ("--first", Ok(number)) => usual.first = Duration::from_millis(number),
            _ => return Err(usage()),
        }
    }
    let engine = Arc::new(Engine { name, usual, counts: Counts::default() });
    let mut listening = tokio::task::JoinSet::new();
    for port in ports {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        listening.spawn(listen(listener, Arc::clone(&engine)));
    }
    listening.join_next().await.map_or(Ok(()), |ended| ended.map_err(io::Error::other)?)
}

async fn listen(listener: TcpListener, engine: Arc<Engine>) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let mut connection = Connection { stream, read: BytesMut::with_capacity(READ), engine: Arc::clone(&engine) };
        // A client that leaves is no event for an engine, beyond what is counted.
        tokio::spawn(async move { connection.serve().await });
    }
}
