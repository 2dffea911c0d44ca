//! One request and its answer on one connection.
//!
//! Whoever waits for the answer drives the connection: no task stands in between, and dropping the exchange closes the
//! socket at once, which is how an engine learns that its client left.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{Connection, SendRequest, handshake};
use hyper::http::response::Parts;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

use super::endpoint::Endpoint;
use crate::dial::Stream;

/// A connection.
pub(super) struct Wire {
    sender: SendRequest<Full<Bytes>>,
    connection: Pin<Box<Connection<TokioIo<Stream>, Full<Bytes>>>>,
    closed: bool,
}

impl Wire {
    pub(super) async fn new(stream: Stream) -> hyper::Result<Self> {
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        Ok(Self { sender, connection: Box::pin(connection), closed: false })
    }

    /// Moves bytes. The outcome of the connection itself is told again by the response or its body.
    fn drive(&mut self, cx: &mut Context<'_>) {
        if !self.closed && self.connection.as_mut().poll(cx).is_ready() {
            self.closed = true;
        }
    }
    /// Whether the next request can go here: the server has neither closed nor said anything unasked.
    pub(super) fn is_open(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.closed && self.sender.is_ready()
    }

    /// Sends a request and waits for the head of the answer.
    pub(super) async fn send(
        mut self,
        request: Request<Full<Bytes>>,
        endpoint: &Arc<Endpoint>,
    ) -> hyper::Result<(Parts, Exchange)> {
        poll_fn(|cx| {
            self.drive(cx);
            self.sender.poll_ready(cx)
        })
        .await?;
        let mut response = Box::pin(self.sender.send_request(request));
        let response: Response<Incoming> = poll_fn(|cx| {
            self.drive(cx);
            response.as_mut().poll(cx)
        })
        .await?;
        let (head, body) = response.into_parts();
        Ok((head, Exchange { body, wire: Some(self), endpoint: Arc::clone(endpoint) }))
    }
}

/// An answer whose head is here.
pub(super) struct Exchange {
    body: Incoming,
    /// Given back when the answer is complete.
    wire: Option<Wire>,
    endpoint: Arc<Endpoint>,
}

impl Exchange {
    /// The next bytes of the body; `None` at its proper end.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Bytes>>> {
        loop {
            if let Some(wire) = &mut self.wire {
                wire.drive(cx);
            }
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    if let Some(wire) = self.wire.take().filter(|wire| !wire.closed) {
                        self.endpoint.give_back(wire);
                    }
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => return Poll::Ready(Some(Ok(data))),
                    // Trailers say nothing that a client of this API reads.
                    Err(_) => {}
                },
            }
        }
    }
    pub(super) async fn data(&mut self) -> Option<hyper::Result<Bytes>> {
        poll_fn(|cx| self.poll_data(cx)).await
    }
}
