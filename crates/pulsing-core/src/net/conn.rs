//! One connection to a peer, ready for frames.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::handshake::{self, Credentials, Lane};
use crate::cluster::Identity;
use crate::error::{Error, Result};

/// A TCP connect takes at most this long.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Reading half of a connection.
pub type Reading = Box<dyn AsyncRead + Send + Unpin>;
/// Writing half of a connection.
pub type Writing = Box<dyn AsyncWrite + Send + Unpin>;

/// Why a dial failed, as far as membership cares.
pub struct DialError {
    /// The error.
    pub error: Error,
    /// The kernel said that nobody listens there.
    pub refused: bool,
}

/// Connects and shakes hands.
///
/// # Errors
/// See [`handshake::dial`]; `refused` tells a closed port from everything else.
pub async fn dial(
    addr: SocketAddr,
    me: Identity,
    lane: Lane,
    session: u128,
    cred: &Credentials,
) -> Result<(TcpStream, Identity), DialError> {
    let connect = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(addr)).await;
    let failed =
        |reason: String, refused| DialError { error: Error::ConnectFailed { addr: addr.to_string(), reason }, refused };
    let mut stream = match connect {
        Ok(Ok(stream)) => stream,
        Ok(Err(e)) => return Err(failed(e.to_string(), e.kind() == std::io::ErrorKind::ConnectionRefused)),
        Err(_) => return Err(failed(format!("no connection within {CONNECT_TIMEOUT:?}"), false)),
    };
    // An ephemeral client port may meet its own destination port: the kernel then connects the socket to itself.
    if stream.local_addr().is_ok_and(|local| local == addr) {
        return Err(failed("nobody listens there".into(), true));
    }
    prepare(&stream);
    let peer = handshake::dial(&mut stream, addr, me, lane, session, cred)
        .await
        .map_err(|error| DialError { error, refused: false })?;
    Ok((stream, peer))
}

/// Socket options of every link: small frames go out at once, and a vanished host is noticed.
pub fn prepare(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let keepalive =
        socket2::TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    let _ = socket2::SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

/// Splits for a reader and a writer task.
pub fn halves(stream: TcpStream) -> (Reading, Writing) {
    let (reading, writing) = stream.into_split();
    (Box::new(reading), Box::new(writing))
}
