//! One connection to a peer, ready for frames.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;

use super::handshake::{self, Lane, Met, Trust};
use super::inbound::Inlet;
use super::lane::Outlet;
use super::link::LinkConfig;
use super::socket;
use super::tls;
use super::transport::Stream;
use crate::cluster::Identity;
use crate::error::{Error, Result};

/// A connect takes at most this long.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Reading half of a connection.
pub type Reading = Box<dyn AsyncRead + Send + Unpin>;
/// Writing half of a connection.
pub type Writing = Box<dyn AsyncWrite + Send + Unpin>;

/// Why a dial failed, as far as membership cares.
pub struct DialError {
    /// The error.
    pub error: Error,
    /// The network said that nobody listens there.
    pub refused: bool,
}

/// A connection, plain or under TLS.
pub enum Conn {
    /// Plain.
    Plain(Stream),
    /// TLS between members.
    Tls(Box<TlsStream<Stream>>),
}

macro_rules! forward {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Conn::Plain($stream) => {
                let $stream = Pin::new($stream);
                $call
            }
            Conn::Tls($stream) => {
                let $stream = Pin::new(&mut **$stream);
                $call
            }
        }
    };
}

impl AsyncRead for Conn {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        forward!(self, stream => stream.poll_read(cx, buf))
    }
}

impl AsyncWrite for Conn {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        forward!(self, stream => stream.poll_write(cx, buf))
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        forward!(self, stream => stream.poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        forward!(self, stream => stream.poll_shutdown(cx))
    }
}

impl Conn {
    /// The certificate that the peer has shown.
    pub fn certificate(&self) -> Option<&CertificateDer<'static>> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => tls::certificate(stream),
        }
    }

    /// Splits for the two sides of the lane of small frames.
    ///
    /// # Errors
    /// The system's, such as that no descriptor is left.
    pub fn lane(self) -> std::io::Result<(Inlet<Reading>, Outlet)> {
        match self {
            Self::Plain(Stream::Tcp(stream)) => {
                let (reading, writing) = socket::split(stream)?;
                Ok((Inlet::Socket(reading), Outlet::Socket(writing)))
            }
            other => {
                let (reading, writing) = other.halves();
                Ok((Inlet::Stream(reading), Outlet::Stream(writing)))
            }
        }
    }

    /// Splits for a reader and a writer task.
    pub fn halves(self) -> (Reading, Writing) {
        match self {
            Self::Plain(stream) => stream.halves(),
            Self::Tls(stream) => {
                let (reading, writing) = tokio::io::split(*stream);
                (Box::new(reading), Box::new(writing))
            }
        }
    }
}

/// Connects and shakes hands.
///
/// # Errors
/// See [`handshake::dial`]; `refused` tells a closed port from everything else.
pub async fn dial(
    addr: SocketAddr,
    lane: Lane,
    session: u128,
    config: &LinkConfig,
) -> Result<(Conn, Identity), DialError> {
    let connect = tokio::time::timeout(CONNECT_TIMEOUT, config.transport.connect(addr)).await;
    let failed =
        |reason: String, refused| DialError { error: Error::ConnectFailed { addr: addr.to_string(), reason }, refused };
    let stream = match connect {
        Ok(Ok(stream)) => stream,
        Ok(Err(e)) => return Err(failed(e.to_string(), e.kind() == std::io::ErrorKind::ConnectionRefused)),
        Err(_) => return Err(failed(format!("no connection within {CONNECT_TIMEOUT:?}"), false)),
    };
    if lane == Lane::Control {
        stream.hasten();
    }
    let limit = config.limits.handshake;
    let shaken = tokio::time::timeout(limit, shake(stream, addr, lane, session, config)).await;
    let late = || failed(format!("no handshake within {limit:?}; is this a Pulsing node?"), false);
    let (stream, met) = shaken.map_err(|_| late())?.map_err(|error| DialError { error, refused: false })?;
    tracing::trace!(peer = %met.peer, version = met.version, "dialled");
    Ok((stream, met.peer))
}

async fn shake(
    stream: Stream,
    addr: SocketAddr,
    lane: Lane,
    session: u128,
    config: &LinkConfig,
) -> Result<(Conn, Met)> {
    let (me, cred) = (*config.me.lock(), &config.cred);
    let mut stream = match &cred.trust {
        Trust::Tls(tls) => {
            let refused = |reason| Error::Refused { addr: addr.to_string(), reason };
            Conn::Tls(Box::new(tls.connect(stream, addr.ip()).await.map_err(refused)?))
        }
        Trust::Secret(_) | Trust::Anyone => Conn::Plain(stream),
    };
    let certificate = stream.certificate().cloned();
    let met = handshake::dial(&mut stream, addr, me, lane, session, cred, certificate.as_ref()).await?;
    Ok((stream, met))
}
