//! A connection to an engine: one request after the other over HTTP/1.1.
//!
//! Whoever waits for the answer reads it: no task and no queue stand in between, and dropping the connection closes the
//! socket at once, which is how an engine learns that its client left.

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes, BytesMut};
use hyper::StatusCode;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncReadExt, AsyncWrite};

use super::chunks::Chunks;
use super::endpoint::Endpoint;
use super::exchange::{Exchange, Framing};
use super::message::Head;
use crate::dial::Stream;

/// Room for one read.
const READ: usize = 16 * 1024;
/// Room below which more is made.
const LEAST: usize = 2 * 1024;
/// Largest head of an answer, and most headers in it.
const MAX_HEAD: usize = 64 * 1024;
const MAX_HEADERS: usize = 128;

/// Why there is no answer, or no more of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// The system's words.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The engine closed the connection.
    #[error("it closed the connection {0}")]
    Closed(&'static str),
    /// The engine does not speak HTTP/1.1 as it is written.
    #[error("its answer cannot be read: {0}")]
    Unreadable(String),
}

impl WireError {
    /// Nothing of an answer came.
    pub(super) fn is_silence(&self) -> bool {
        !matches!(self, Self::Unreadable(_))
    }
}

/// A connection.
pub(super) struct Wire {
    stream: Stream,
    /// What has arrived and was not looked at.
    pub(super) read: BytesMut,
}

impl Wire {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, read: BytesMut::new() }
    }

    /// Whether the next request can go here: the server has neither closed nor said anything unasked.
    pub(super) fn is_open(&mut self) -> bool {
        self.read.is_empty() && self.poll_read(&mut Context::from_waker(Waker::noop()), READ).is_pending()
    }

    /// Reads what is there; 0 at the end of the connection.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, room: usize) -> Poll<io::Result<usize>> {
        if self.read.capacity() - self.read.len() < LEAST {
            self.read.reserve(room);
        }
        pin!(self.stream.read_buf(&mut self.read)).poll(cx)
    }

    /// Sends a request, whose `head` tells the length of its `body`, and waits for the head of the answer.
    pub(super) async fn send(
        mut self,
        head: Vec<u8>,
        body: Bytes,
        endpoint: &Arc<Endpoint>,
    ) -> Result<(Head, Exchange), WireError> {
        let mut sending = Sending { out: Bytes::from(head).chain(body), failed: None };
        let answer = poll_fn(|cx| self.poll_answer(cx, &mut sending)).await?;
        // Who answers before it has read everything does not read on, or would take the rest for a request.
        let keep = answer.keep && self.stream.is_lasting() && !sending.out.has_remaining() && sending.failed.is_none();
        Ok((answer.head, Exchange::new(self, answer.framing, keep, endpoint)))
    }

    fn poll_answer(&mut self, cx: &mut Context<'_>, sending: &mut Sending) -> Poll<Result<Answer, WireError>> {
        sending.poll(cx, &mut self.stream);
        loop {
            if let Some(answer) = self.head()? {
                return Poll::Ready(Ok(answer));
            }
            let count = ready!(self.poll_read(cx, READ));
            if !matches!(count, Ok(0) | Err(_)) {
                continue;
            }
            // Why nothing more could be sent tells more than that nothing came.
            return Poll::Ready(Err(match (sending.failed.take(), count) {
                _ if !self.read.is_empty() => WireError::Unreadable("it ends within its head".to_owned()),
                (Some(error), _) | (None, Err(error)) => error.into(),
                (None, Ok(_)) => WireError::Closed("before its answer"),
            }));
        }
    }

    /// The head of the answer, once it is whole.
    fn head(&mut self) -> Result<Option<Answer>, WireError> {
        let bad = |why: String| Err(WireError::Unreadable(why));
        while !self.read.is_empty() {
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut response = httparse::Response::new(&mut headers);
            let length = match response.parse(&self.read) {
                Ok(httparse::Status::Complete(length)) => length,
                Ok(httparse::Status::Partial) if self.read.len() < MAX_HEAD => return Ok(None),
                Ok(httparse::Status::Partial) => return bad(format!("its head is over {MAX_HEAD} bytes")),
                Err(error) => return bad(error.to_string()),
            };
            let status = response.code.and_then(|code| StatusCode::from_u16(code).ok());
            let Some(status) = status else { return bad("it has no status".to_owned()) };
            if status == StatusCode::SWITCHING_PROTOCOLS {
                return bad("it changes the protocol unasked".to_owned());
            }
            let answer = if status.is_informational() { None } else { Some(Answer::new(status, &response)?) };
            self.read.advance(length);
            if answer.is_some() {
                return Ok(answer);
            }
        }
        Ok(None)
    }
}

/// A request on its way out.
struct Sending {
    out: bytes::buf::Chain<Bytes, Bytes>,
    failed: Option<io::Error>,
}

impl Sending {
    /// Writes what can be written. A failure is kept: the answer may have come before it.
    fn poll(&mut self, cx: &mut Context<'_>, stream: &mut Stream) {
        while self.out.has_remaining() && self.failed.is_none() {
            let mut slices = [IoSlice::new(&[]); 2];
            let count = self.out.chunks_vectored(&mut slices);
            match Pin::new(&mut *stream).poll_write_vectored(cx, &slices[..count]) {
                Poll::Pending => return,
                Poll::Ready(Ok(0)) => self.failed = Some(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(count)) => self.out.advance(count),
                Poll::Ready(Err(error)) => self.failed = Some(error),
            }
        }
        // TLS keeps what the socket did not take.
        if self.failed.is_none()
            && let Poll::Ready(Err(error)) = Pin::new(stream).poll_flush(cx)
        {
            self.failed = Some(error);
        }
    }
}

/// The head of an answer.
struct Answer {
    head: Head,
    framing: Framing,
    /// Another request can follow on the same connection.
    keep: bool,
}

impl Answer {
    fn new(status: StatusCode, response: &httparse::Response<'_, '_>) -> Result<Self, WireError> {
        let bad = |why: &str| WireError::Unreadable(why.to_owned());
        let mut headers = HeaderMap::with_capacity(4);
        for one in response.headers.iter() {
            let name = HeaderName::from_bytes(one.name.as_bytes()).map_err(|_| bad("a header has no name"))?;
            let value = HeaderValue::from_bytes(one.value).map_err(|_| bad("a header has no value"))?;
            if Head::returns(&name) {
                headers.append(name, value);
            }
        }
        let all = |name: HeaderName| {
            response.headers.iter().filter(move |one| one.name.eq_ignore_ascii_case(name.as_str())).map(|one| one.value)
        };
        let says = |name: HeaderName, word: &str| {
            all(name).any(|value| {
                value.split(|byte| *byte == b',').any(|one| one.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
            })
        };
        // What `Connection` names was said to this Router only (RFC 9110, section 7.6.1).
        for name in all(header::CONNECTION).flat_map(|value| value.split(|byte| *byte == b',')) {
            if let Ok(name) = HeaderName::from_bytes(name.trim_ascii()) {
                headers.remove(name);
            }
        }
        let mut keep = response.version != Some(0) && !says(header::CONNECTION, "close");
        let framing = if matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
            Framing::Length(0)
        } else if says(header::TRANSFER_ENCODING, "chunked") {
            // With two lengths at once a proxy in between may see another end than we do.
            keep &= all(header::CONTENT_LENGTH).next().is_none();
            Framing::Chunked(Chunks::default())
        } else if let Some(first) = all(header::CONTENT_LENGTH).next() {
            let same = all(header::CONTENT_LENGTH).all(|other| other == first);
            let digits =
                std::str::from_utf8(first).ok().filter(|text| same && text.bytes().all(|byte| byte.is_ascii_digit()));
            Framing::Length(digits.and_then(|text| text.parse().ok()).ok_or_else(|| bad("its length is no number"))?)
        } else {
            keep = false;
            Framing::UntilClosed
        };
        Ok(Self { head: Head { status, headers }, framing, keep })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    /// What an engine that says `answer` to whatever comes, and then closes if it is to, looks like from here: status,
    /// body, and whether the connection was kept.
    async fn ask(answer: &'static [u8], closes: bool, body: usize) -> Result<(u16, Vec<u8>, bool), WireError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("its address"));
        let engine = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            // What stays unread makes a reset of the close.
            let mut request = Vec::new();
            while request.len() < 1000 && !request.ends_with(b"xxxxxxxxxx") {
                stream.read_buf(&mut request).await.expect("a request");
            }
            stream.write_all(answer).await.expect("written");
            if !closes {
                // Until the other side has had enough.
                let _ =
                    tokio::time::timeout(std::time::Duration::from_secs(5), stream.read_to_end(&mut Vec::new())).await;
            }
        });
        let endpoint = Arc::new(Endpoint::parse(&url).expect("a URL"));
        let (wire, _) = endpoint.connection(true).await?;
        let head = format!("POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: {body}\r\n\r\n");
        let (head, mut exchange) = wire.send(head.into(), vec![b'x'; body].into(), &endpoint).await?;
        let mut read = Vec::new();
        while let Some(data) = exchange.data().await {
            read.extend_from_slice(&data?);
        }
        let kept = endpoint.connection(false).await.is_ok_and(|(_, reused)| reused);
        drop(exchange);
        engine.abort();
        Ok((head.status.as_u16(), read, kept))
    }
    fn said(text: &str) -> Vec<u8> {
        text.as_bytes().to_vec()
    }

    #[tokio::test]
    async fn every_way_to_end_an_answer_is_understood() {
        for (answer, closes, expected) in [
            (&b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"[..], false, (200, said("ok"), true)),
            (
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
                false,
                (200, said("ok"), true),
            ),
            (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 204 No\r\n\r\n", false, (204, said(""), true)),
            (
                b"HTTP/1.1 200 OK\r\nConnection: keep, Close\r\ncontent-length: 2\r\n\r\nok",
                false,
                (200, said("ok"), false),
            ),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok, and more", false, (200, said("ok"), false)),
            (b"HTTP/1.0 200 OK\r\n\r\nuntil it closes", true, (200, said("until it closes"), false)),
        ] {
            assert_eq!(
                ask(answer, closes, 10).await.expect("an answer"),
                expected,
                "{}",
                String::from_utf8_lossy(answer)
            );
        }
    }

    #[tokio::test]
    async fn what_is_no_answer_is_an_error_that_says_why() {
        for (answer, why) in [
            (&b""[..], "closed the connection before its answer"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "closed the connection in the middle of its answer"),
            (b"SSH-2.0-x\r\n\r\n", "cannot be read"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "its length is no number"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "its length is no number"),
            (b"HTTP/1.1 101 Up\r\n\r\n", "changes the protocol"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "no hexadecimal number"),
        ] {
            let error = ask(answer, true, 10).await.expect_err("no answer").to_string();
            assert!(error.contains(why), "{}: {error}", String::from_utf8_lossy(answer));
        }
    }

    #[tokio::test]
    async fn an_answer_that_comes_before_the_request_is_out_is_taken_and_the_connection_is_not_kept() {
        let answer = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno";
        let (status, body, kept) = ask(answer, false, 64 << 20).await.expect("an answer");
        assert_eq!((status, body, kept), (413, said("no"), false));
    }
}
