//! One HTTP/1.1 connection that knows when its bytes were read and written, and the pool of kept ones.
//!
//! Request and connection are driven by the same task: no other task wakes between the read call and the stamp.

use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;

use crate::clock::Clock;
use crate::record::{Class, Failure};
use crate::target::Target;

/// Not yet; stamps start well below it.
const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct IoStamps {
    last_read: AtomicU64,
    first_write: AtomicU64,
}

impl IoStamps {
    /// When bytes last left the read call.
    pub(crate) fn last_read(&self) -> u64 {
        self.last_read.load(Ordering::Relaxed)
    }

    /// When the first byte of the current request was handed over.
    pub(crate) fn first_write(&self) -> Option<u64> {
        Some(self.first_write.load(Ordering::Relaxed)).filter(|at| *at != NEVER)
    }
}

struct StampedIo {
    inner: TokioIo<TcpStream>,
    clock: Clock,
    stamps: Arc<IoStamps>,
}

impl StampedIo {
    fn wrote(&self, at: u64) {
        // A request's first write: later ones find a stamp.
        let _ = self.stamps.first_write.compare_exchange(NEVER, at, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Read for StampedIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        if polled.is_ready() {
            self.stamps.last_read.store(self.clock.now(), Ordering::Relaxed);
        }
        polled
    }
}

impl Write for StampedIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let at = self.clock.now();
        let polled = Pin::new(&mut self.inner).poll_write(cx, buf);
        if matches!(polled, Poll::Ready(Ok(n)) if n > 0) {
            self.wrote(at);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let at = self.clock.now();
        let polled = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        if matches!(polled, Poll::Ready(Ok(n)) if n > 0) {
            self.wrote(at);
        }
        polled
    }
}

/// Drives the socket while something is awaited from it.
pub(crate) struct Driver {
    connection: Pin<Box<http1::Connection<StampedIo, Full<Bytes>>>>,
    ended: bool,
}

impl Driver {
    pub(crate) async fn run<F: Future>(&mut self, awaited: F) -> F::Output {
        let mut awaited = pin!(awaited);
        poll_fn(|cx| {
            if !self.ended {
                // Its error is told to whoever awaits the answer.
                self.ended = self.connection.as_mut().poll(cx).is_ready();
            }
            awaited.as_mut().poll(cx)
        })
        .await
    }
}

pub(crate) struct Connection {
    pub(crate) sender: SendRequest<Full<Bytes>>,
    pub(crate) driver: Driver,
    pub(crate) stamps: Arc<IoStamps>,
}

impl Connection {
    /// Connects to the first address that answers, within `limit` for all of them.
    pub(crate) async fn open(target: &Target, clock: Clock, limit: Duration) -> Result<Self, Failure> {
        let tried = async {
            let mut last = Failure::new(Class::ConnectFailed, "no address");
            for (at, addr) in target.addrs() {
                match TcpStream::connect(addr).await {
                    Ok(stream) => {
                        target.prefer(at);
                        return Ok(stream);
                    }
                    Err(error) => last = Failure::new(connect_class(&error), format!("{addr}: {error}")),
                }
            }
            Err(last)
        };
        let stream = tokio::time::timeout(limit, tried).await.map_err(|_| {
            Failure::new(Class::TimeoutConnect, format!("no connection within {:.3} s", limit.as_secs_f64()))
        })??;
        let broken = |error: &dyn std::fmt::Display| Failure::new(Class::ConnectFailed, error.to_string());
        stream.set_nodelay(true).map_err(|error| broken(&error))?;
        let stamps = Arc::new(IoStamps { last_read: AtomicU64::new(NEVER), first_write: AtomicU64::new(NEVER) });
        let io = StampedIo { inner: TokioIo::new(stream), clock, stamps: Arc::clone(&stamps) };
        let (sender, connection) = http1::handshake(io).await.map_err(|error| broken(&error))?;
        Ok(Self { sender, driver: Driver { connection: Box::pin(connection), ended: false }, stamps })
    }

    /// Forgets the stamps of the last request.
    pub(crate) fn begin(&self) {
        self.stamps.first_write.store(NEVER, Ordering::Relaxed);
    }

    /// Whether it can take a request now; a peer that closed it meanwhile is seen here.
    async fn is_ready(&mut self) -> bool {
        let answer = {
            let mut ready = pin!(self.driver.run(self.sender.ready()));
            poll_fn(|cx| Poll::Ready(ready.as_mut().poll(cx))).await
        };
        matches!(answer, Poll::Ready(Ok(()))) && !self.driver.ended
    }
}

fn connect_class(error: &io::Error) -> Class {
    match error.kind() {
        ErrorKind::ConnectionRefused => Class::Refused,
        ErrorKind::AddrNotAvailable | ErrorKind::AddrInUse => Class::NoPorts,
        ErrorKind::ConnectionReset => Class::Reset,
        ErrorKind::TimedOut => Class::TimeoutConnect,
        // Too many open files, of the process (24) or the machine (23).
        _ if matches!(error.raw_os_error(), Some(23 | 24)) => Class::NoPorts,
        _ => Class::ConnectFailed,
    }
}

/// Kept connections; the one used last is used first. It has no size: the load decides how many there are.
#[derive(Default)]
pub(crate) struct Pool {
    idle: Mutex<Vec<Connection>>,
}

impl Pool {
    pub(crate) async fn take(&self) -> Option<Connection> {
        loop {
            let mut connection = self.idle.lock().pop()?;
            if connection.is_ready().await {
                return Some(connection);
            }
        }
    }

    pub(crate) async fn give(&self, mut connection: Connection) {
        if connection.is_ready().await {
            self.idle.lock().push(connection);
        }
    }

    pub(crate) fn clear(&self) {
        self.idle.lock().clear();
    }
}
