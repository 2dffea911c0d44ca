//! The two halves of a TCP socket whose lane threads outside of the runtime may serve too.
//!
//! Each half is a descriptor of its own, which the runtime watches for one thing only: it is not to be woken by what an event
//! loop takes from the other half, or from this one while it is lent ([`loan`](super::loan)).

use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The half that is written. Dropping it ends the stream.
pub struct SendHalf(AsyncFd<TcpStream>);

/// The half that is read, while nobody reads it.
pub struct RecvHalf(pub TcpStream);

/// Splits a socket.
///
/// # Errors
/// The system's, such as that no descriptor is left.
pub fn split(stream: tokio::net::TcpStream) -> io::Result<(RecvHalf, SendHalf)> {
    let stream = stream.into_std()?;
    let receiving = stream.try_clone()?;
    #[allow(deprecated, reason = "its successor is unsafe for types that may change their descriptor: this one cannot")]
    let sending = AsyncFd::with_interest(stream, Interest::WRITABLE)?;
    Ok((RecvHalf(receiving), SendHalf(sending)))
}

impl SendHalf {
    /// Writes what the socket takes at once, from any thread.
    ///
    /// # Errors
    /// `WouldBlock` when that is nothing; the connection's.
    pub fn try_write(&self, data: &[u8]) -> io::Result<usize> {
        self.0.try_io(Interest::WRITABLE, |mut socket| socket.write(data))
    }
    /// Writes what the socket takes, waiting until that is something.
    ///
    /// # Errors
    /// The connection's.
    pub async fn write(&self, data: &[u8]) -> io::Result<usize> {
        self.0.async_io(Interest::WRITABLE, |mut socket| socket.write(data)).await
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        // The other half keeps the connection open.
        let _ = self.0.get_ref().shutdown(Shutdown::Write);
    }
}
