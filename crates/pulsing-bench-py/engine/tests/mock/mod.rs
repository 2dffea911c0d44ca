//! A scripted server on loopback that logs when it did what, on the clock its client uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What the server does next.
#[derive(Clone, Debug)]
pub enum Step {
    Wait(u64),
    Send(Vec<u8>),
    /// Sends, and its stamp is the one of the first token.
    Token(Vec<u8>),
    /// FIN.
    Close,
    /// RST.
    Reset,
}

/// What happened to one request.
#[derive(Clone, Debug)]
pub struct Served {
    pub head: String,
    pub body: String,
    pub read: Instant,
    pub token: Option<Instant>,
    pub reused: bool,
}

pub struct Mock {
    pub url: String,
    pub served: Arc<Mutex<Vec<Served>>>,
    pub in_flight_peak: Arc<AtomicUsize>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Mock {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Mock {
    /// `script(index, request)` says how request `index` is answered.
    pub fn start(script: impl Fn(usize, &Served) -> Vec<Step> + Send + Sync + 'static) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let served = Arc::new(Mutex::new(Vec::new()));
        let in_flight_peak = Arc::new(AtomicUsize::new(0));
        let (script, log, peak) = (Arc::new(script), Arc::clone(&served), Arc::clone(&in_flight_peak));
        runtime.spawn(async move {
            let now = Arc::new(AtomicUsize::new(0));
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let (script, log, now, peak) = (script.clone(), log.clone(), now.clone(), peak.clone());
                tokio::spawn(async move {
                    // A client that goes away ends its connection and nothing else.
                    let _ = connection(stream, &*script, &log, &now, &peak).await;
                });
            }
        });
        Self { url, served, in_flight_peak, runtime: Some(runtime) }
    }
}

async fn connection(
    mut stream: TcpStream,
    script: &(impl Fn(usize, &Served) -> Vec<Step> + Send + Sync),
    log: &Mutex<Vec<Served>>,
    now: &AtomicUsize,
    peak: &AtomicUsize,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut bytes = Vec::new();
    for nth in 0.. {
        let (head, length) = loop {
            if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
                let length = head
                    .lines()
                    .find_map(|line| line.strip_prefix("content-length: "))
                    .map_or(0, |length| length.parse().unwrap());
                break (bytes.drain(..end + 4).collect::<Vec<u8>>(), length);
            }
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        };
        while bytes.len() < length {
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        }
        let body: Vec<u8> = bytes.drain(..length).collect();
        let request = Served {
            head: String::from_utf8(head).unwrap(),
            body: String::from_utf8(body).unwrap(),
            read: Instant::now(),
            token: None,
            reused: nth > 0,
        };
        if request.head.starts_with("GET") {
            stream.write_all(plain(200, r#"{"data": [{"id": "mock"}]}"#).as_slice()).await?;
            continue;
        }
        let index = {
            let mut log = log.lock();
            log.push(request.clone());
            log.len() - 1
        };
        peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let played = play(&mut stream, script(index, &request), index, log).await;
        now.fetch_sub(1, Ordering::SeqCst);
        if !played? {
            return Ok(());
        }
    }
    Ok(())
}

/// Plays a script; false when it ended the connection.
async fn play(
    stream: &mut TcpStream,
    steps: Vec<Step>,
    index: usize,
    log: &Mutex<Vec<Served>>,
) -> std::io::Result<bool> {
    for step in steps {
        match step {
            Step::Wait(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
            Step::Send(bytes) => stream.write_all(&bytes).await?,
            Step::Token(bytes) => {
                log.lock()[index].token = Some(Instant::now());
                stream.write_all(&bytes).await?;
            }
            Step::Close => return Ok(false),
            Step::Reset => {
                stream.set_zero_linger()?;
                return Ok(false);
            }
        }
    }
    Ok(true)
}

pub fn plain(status: u16, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nretry-after: 7\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

pub fn head() -> Step {
    Step::Send(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
            .to_vec(),
    )
}

/// One HTTP chunk.
pub fn piece(bytes: &[u8]) -> Vec<u8> {
    let mut out = format!("{:x}\r\n", bytes.len()).into_bytes();
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
    out
}

pub fn event(data: &str) -> Vec<u8> {
    piece(format!("data: {data}\n\n").as_bytes())
}

pub fn content(text: &str) -> Vec<u8> {
    event(&format!(r#"{{"choices": [{{"index": 0, "delta": {{"content": {text:?}}}}}]}}"#))
}

pub fn usage(prompt: usize, completion: usize) -> Vec<u8> {
    event(&format!(r#"{{"choices": [], "usage": {{"prompt_tokens": {prompt}, "completion_tokens": {completion}}}}}"#))
}

pub fn done() -> Vec<u8> {
    let mut bytes = event("[DONE]");
    bytes.extend_from_slice(b"0\r\n\r\n");
    bytes
}

/// A whole answer: `first` ms to the first token, then one token each `gap` ms.
pub fn answer(index: usize, first: u64, gap: u64, tokens: usize) -> Vec<Step> {
    let mut steps = vec![head(), Step::Send(content("")), Step::Wait(first), Step::Token(content("a"))];
    for _ in 1..tokens {
        steps.extend([Step::Wait(gap), Step::Send(content(" b"))]);
    }
    steps.extend([Step::Send(usage(index, tokens)), Step::Send(done())]);
    steps
}
