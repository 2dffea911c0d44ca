//! Reads a node's endpoints from outside the cluster: a GET with a time limit and a size limit.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, CONTENT_TYPE, HOST, USER_AGENT};
use http::{Request, Uri};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::net::tls::ClusterTls;

/// Largest body read from a node, in bytes: 100,000 names of 1 KB metadata do not quite reach it.
pub const MAX_BODY: usize = 128 << 20;

/// Nodes asked at once by [`get_many`].
const MAX_PARALLEL: usize = 64;

/// How to speak to the node. Nodes answer both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2 in the clear, known beforehand.
    H2c,
}

/// Why a node could not be read.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ObserveError {
    /// Nobody listens there, or the name means nothing.
    #[error("cannot connect to {addr}: {reason}")]
    Connect {
        /// Address dialled.
        addr: String,
        /// The system's words.
        reason: String,
    },
    /// The node's cluster has another secret, or one of the two has none.
    #[error("{addr} refused the connection: {reason}")]
    Refused {
        /// Who was asked.
        addr: String,
        /// Why.
        reason: String,
    },
    /// No whole answer in time.
    #[error("{addr} gave no answer within {after:?}")]
    Timeout {
        /// Who was asked.
        addr: String,
        /// The limit.
        after: Duration,
    },
    /// Whatever listens there does not speak HTTP, or broke off.
    #[error("{addr} does not answer as a Pulsing node: {reason}")]
    Http {
        /// Who was asked.
        addr: String,
        /// What went wrong.
        reason: String,
    },
    /// The body is over [`MAX_BODY`].
    #[error("the answer of {addr} is over the limit of {limit} bytes")]
    TooLarge {
        /// Who was asked.
        addr: String,
        /// The limit in bytes.
        limit: usize,
    },
    /// The body is not what the endpoint promises.
    #[error("the answer of {addr} cannot be read: {reason}")]
    Body {
        /// Who was asked.
        addr: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Response {
    /// Who answered, as it was asked for.
    pub addr: String,
    /// HTTP status.
    pub status: u16,
    /// Media type; empty when the node named none.
    pub content_type: String,
    /// The body.
    pub body: Bytes,
}

impl Response {
    /// Reads the body as JSON.
    ///
    /// # Errors
    /// [`ObserveError::Body`].
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, ObserveError> {
        serde_json::from_slice(&self.body)
            .map_err(|e| ObserveError::Body { addr: self.addr.clone(), reason: e.to_string() })
    }
    /// Reads the body as UTF-8 text.
    ///
    /// # Errors
    /// [`ObserveError::Body`].
    pub fn text(&self) -> Result<&str, ObserveError> {
        std::str::from_utf8(&self.body)
            .map_err(|e| ObserveError::Body { addr: self.addr.clone(), reason: e.to_string() })
    }
}

/// GETs `path` from the node at `addr` (`host:port`) over HTTP/1.1. `limit` covers the whole exchange, dialling included.
///
/// # Errors
/// Any [`ObserveError`]. An HTTP error status is an answer, not an error.
pub async fn get(addr: &str, path: &str, limit: Duration) -> Result<Response, ObserveError> {
    get_with(addr, path, limit, Protocol::Http1, None).await
}

/// [`get`] over a chosen protocol, and over TLS where the cluster has a secret.
///
/// # Errors
/// As for [`get`].
pub async fn get_with(
    addr: &str,
    path: &str,
    limit: Duration,
    protocol: Protocol,
    tls: Option<&ClusterTls>,
) -> Result<Response, ObserveError> {
    match timeout(limit, connect(addr, path, protocol, tls)).await {
        Ok(done) => done,
        Err(_) => Err(ObserveError::Timeout { addr: addr.to_owned(), after: limit }),
    }
}

/// [`get`] from many nodes at once; the results stand in the order of `addrs`. Each has the whole `limit`.
pub async fn get_many(
    addrs: &[String],
    path: &str,
    limit: Duration,
    tls: Option<&ClusterTls>,
) -> Vec<Result<Response, ObserveError>> {
    let mut results: Vec<Option<Result<Response, ObserveError>>> = vec![None; addrs.len()];
    let mut running = JoinSet::new();
    let mut waiting = addrs.iter().enumerate();
    loop {
        while running.len() < MAX_PARALLEL {
            let Some((at, addr)) = waiting.next() else { break };
            let (addr, path, tls) = (addr.clone(), path.to_owned(), tls.cloned());
            running.spawn(async move { (at, get_with(&addr, &path, limit, Protocol::Http1, tls.as_ref()).await) });
        }
        match running.join_next().await {
            Some(Ok((at, result))) => results[at] = Some(result),
            Some(Err(_)) => {}
            None => break,
        }
    }
    let lost = |at: usize| ObserveError::Http { addr: addrs[at].clone(), reason: "the request was dropped".to_owned() };
    results.into_iter().enumerate().map(|(at, r)| r.unwrap_or_else(|| Err(lost(at)))).collect()
}

async fn connect(
    addr: &str,
    path: &str,
    protocol: Protocol,
    tls: Option<&ClusterTls>,
) -> Result<Response, ObserveError> {
    let stream = TcpStream::connect(addr)
        .await
        .map_err(|e| ObserveError::Connect { addr: addr.to_owned(), reason: e.to_string() })?;
    match tls {
        None => exchange(stream, addr, path, protocol).await,
        Some(tls) => {
            let refused = |reason| ObserveError::Refused { addr: addr.to_owned(), reason };
            let ip = stream.peer_addr().map_err(|e| refused(e.to_string()))?.ip();
            exchange(tls.connect(stream, ip).await.map_err(refused)?, addr, path, protocol).await
        }
    }
}

async fn exchange<S>(stream: S, addr: &str, path: &str, protocol: Protocol) -> Result<Response, ObserveError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let http = |e: &dyn std::error::Error| ObserveError::Http { addr: addr.to_owned(), reason: chain(e) };
    let uri = Uri::builder().scheme("http").authority(addr).path_and_query(path).build().map_err(|e| http(&e))?;
    let mut request = Request::get(uri)
        .header(USER_AGENT, concat!("pulsing/", env!("CARGO_PKG_VERSION")))
        .header(ACCEPT, "*/*")
        .body(Empty::<Bytes>::new())
        .map_err(|e| http(&e))?;
    let io = TokioIo::new(stream);

    // The connection runs in its own task; dropping the set, on a timeout too, ends it.
    let mut driver = JoinSet::new();
    let response = match protocol {
        Protocol::Http1 => {
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.map_err(|e| http(&e))?;
            driver.spawn(async move { drop(connection.await) });
            let host = addr.parse().map_err(|e: http::header::InvalidHeaderValue| http(&e))?;
            request.headers_mut().insert(HOST, host);
            *request.uri_mut() = path.parse().map_err(|e: http::uri::InvalidUri| http(&e))?;
            sender.send_request(request).await
        }
        Protocol::H2c => {
            let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), io);
            let (mut sender, connection) = handshake.await.map_err(|e| http(&e))?;
            driver.spawn(async move { drop(connection.await) });
            sender.send_request(request).await
        }
    };
    read(addr, response.map_err(|e| http(&e))?).await
}

async fn read(addr: &str, response: http::Response<Incoming>) -> Result<Response, ObserveError> {
    let (head, mut body) = response.into_parts();
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| ObserveError::Http { addr: addr.to_owned(), reason: chain(&e) })?;
        if let Some(data) = frame.data_ref() {
            if bytes.len() + data.len() > MAX_BODY {
                return Err(ObserveError::TooLarge { addr: addr.to_owned(), limit: MAX_BODY });
            }
            bytes.extend_from_slice(data);
        }
    }
    let content_type = head.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    Ok(Response { addr: addr.to_owned(), status: head.status.as_u16(), content_type, body: bytes.freeze() })
}

/// hyper's errors keep what matters in their sources.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::net::tls::Passphrase;
    use crate::system::{Security, System, SystemConfig};

    #[tokio::test]
    async fn a_cluster_with_a_secret_answers_those_who_know_it() {
        let secret = |text: &str| Passphrase::new(text).unwrap();
        let config = SystemConfig {
            addr: Some("127.0.0.1:0".into()),
            security: Security::Passphrase(secret("correct horse")),
            ..SystemConfig::default()
        };
        let node = Arc::new(System::start(config).await.unwrap());
        let addr = node.addr().to_string();
        let limit = Duration::from_secs(5);
        let member = ClusterTls::new(&secret("correct horse"), "default").unwrap();
        for protocol in [Protocol::Http1, Protocol::H2c] {
            assert_eq!(get_with(&addr, "/health", limit, protocol, Some(&member)).await.unwrap().status, 200);
        }
        let stranger = ClusterTls::new(&secret("wrong"), "default").unwrap();
        let error = get_with(&addr, "/health", limit, Protocol::Http1, Some(&stranger)).await.unwrap_err();
        assert!(matches!(&error, ObserveError::Refused { .. }), "{error}");
        let plain = get(&addr, "/health", limit).await.unwrap();
        assert_eq!(plain.status, 403);
        assert!(plain.text().unwrap().contains("--passphrase-file"));
        node.shutdown().await;
    }

    async fn answering(bytes: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (mut io, _) = listener.accept().await.unwrap();
            let mut head = [0; 1024];
            let _ = io.read(&mut head).await;
            io.write_all(bytes).await.unwrap();
            let _ = io.read(&mut head).await;
        });
        addr
    }

    #[tokio::test]
    async fn a_silent_node_is_a_timeout_and_says_how_long() {
        let addr = answering(b"").await;
        let limit = Duration::from_millis(50);
        let error = get(&addr, "/health", limit).await.unwrap_err();
        assert_eq!(error, ObserveError::Timeout { addr, after: limit });
    }

    #[tokio::test]
    async fn something_else_on_the_port_is_named_as_such() {
        let addr = answering(b"220 mail.example.com ESMTP\r\n").await;
        let error = get(&addr, "/health", Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(&error, ObserveError::Http { .. }), "{error}");
        assert!(error.to_string().contains("does not answer as a Pulsing node"), "{error}");
    }

    #[tokio::test]
    async fn a_body_that_is_not_json_is_an_error_naming_the_node() {
        let addr = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").await;
        let response = get(&addr, "/health", Duration::from_secs(5)).await.unwrap();
        assert_eq!(response.text().unwrap(), "hi");
        assert!(response.json::<serde_json::Value>().unwrap_err().to_string().contains(&addr));
    }

    #[tokio::test]
    async fn an_address_that_cannot_be_one_is_refused() {
        for addr in ["nowhere", "127.0.0.1:99999", ""] {
            let error = get(addr, "/health", Duration::from_secs(5)).await.unwrap_err();
            assert!(matches!(error, ObserveError::Connect { .. }), "{addr}: {error}");
        }
    }
}
