//! Sockets and connections.

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

use pulsing_core::seldom::Seldom;

use super::open::{Open, Shown};
use super::record::{Record, Recorded};
use super::socket::{Socket, Tcp};
use super::steady::Steady;
use super::{Core, respond, routes};
use crate::config::GatewayError;
use crate::metrics::Route;

/// What clients get to read their last error in, at the end of the grace period.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// First byte of a TLS record that begins a handshake.
const TLS_RECORD: u8 = 0x16;
/// What is read ahead of one connection, in bytes: hyper's own default.
const BUFFER: usize = 8192 + 4096 * 100;
/// After an accept that failed.
const PAUSE: Duration = Duration::from_millis(50);
/// Connections the kernel holds for us until they are accepted.
const BACKLOG: u32 = 4096;

pub(super) fn bind(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), GatewayError> {
    let name = if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    let fail = |error: io::Error| GatewayError::Bind { addr: name.clone(), reason: error.to_string() };
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for addr in (plain, port).to_socket_addrs().map_err(fail)? {
        match listen(addr) {
            Ok(listener) => {
                let bound = listener.local_addr().map_err(fail)?;
                return Ok((listener, bound));
            }
            Err(error) => last = error,
        }
    }
    Err(fail(last))
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted Router must not wait for its predecessor's connections to time out.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

/// Accepts until the gateway closes, then waits for connections as long as `grace` says.
pub(super) async fn serve(listener: TcpListener, core: Arc<Core>, grace: watch::Receiver<Duration>) {
    let mut closing = core.closing.subscribe();
    let mut open = Open::default();
    let mut failures = Seldom::default();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let accepted = accepted.map(|(stream, _)| stream);
                let full = open.make_room(accepted.as_ref());
                match accepted {
                    Ok(stream) => admit(&mut open, stream, &core, &grace),
                    Err(error) => {
                        if !full && let Some(more) = failures.due() {
                            tracing::warn!(%error, more, "cannot accept a connection");
                        }
                        // The next accept would fail the same way at once, unless somebody goes.
                        let _ = tokio::time::timeout(PAUSE, async { if !open.ended().await { pending().await } }).await;
                    }
                }
            }
            true = open.ended(), if open.count() > 0 => {}
            () = closed(&mut closing) => break,
        }
    }
    for stream in waiting(listener) {
        admit(&mut open, stream, &core, &grace);
    }
    let grace = *grace.borrow();
    let drained = tokio::time::timeout(grace, async { while open.ended().await {} }).await;
    if drained.is_err() {
        tracing::warn!(cut = open.count(), "connections were still busy at the end of the grace period");
        core.cutting.send_replace(true);
        let _ = tokio::time::timeout(LAST_WORDS, async { while open.ended().await {} }).await;
    }
}

fn admit(open: &mut Open, stream: TcpStream, core: &Arc<Core>, grace: &watch::Receiver<Duration>) {
    let shown = Shown::default();
    open.add(shown.clone(), connection(stream, Arc::clone(core), grace.clone(), shown));
}

/// The guard that `wait_for` returns must not live across an await.
async fn closed(closing: &mut watch::Receiver<bool>) {
    let _ = closing.wait_for(|closing| *closing).await;
}

/// Whom the kernel has already let in. Without this they would be thrown out after their request was sent; whoever comes
/// later is refused and knows that it was not heard.
fn waiting(listener: TcpListener) -> Vec<TcpStream> {
    let mut found = Vec::new();
    if let Ok(listener) = listener.into_std() {
        while let Ok((stream, _)) = listener.accept() {
            if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                found.push(stream);
            }
        }
    }
    found
}

async fn connection(stream: TcpStream, core: Arc<Core>, grace: watch::Receiver<Duration>, shown: Shown) {
    // Small events on a socket that waits for acknowledgements cost 40 ms a stream.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY refused");
    }
    let Some(tls) = core.tls.clone() else {
        return serve_connection(stream, core, grace, shown).await;
    };
    let handshake = async {
        let mut first = [0];
        // Who speaks HTTP here is told so in HTTP.
        if stream.peek(&mut first).await? == 1 && first[0] != TLS_RECORD {
            let mut stream = stream;
            stream.write_all(&respond::plaintext()).await?;
            let _ = stream.shutdown().await;
            return Err(io::Error::other("a client came without TLS"));
        }
        tls.acceptor().accept(stream).await
    };
    match tokio::time::timeout(HANDSHAKE, handshake).await {
        Ok(Ok(stream)) => serve_connection(stream, core, grace, shown).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS connection came about"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

async fn serve_connection<S>(stream: S, core: Arc<Core>, grace: watch::Receiver<Duration>, shown: Shown)
where
    S: AsyncRead + AsyncWrite + Tcp + Unpin + Send + 'static,
{
    let Ok(client) = stream.tcp().peer_addr() else { return };
    let config = &core.placement.config;
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(config.header_timeout)
        .max_headers(config.max_headers)
        .max_buf_size(BUFFER.max(config.max_header_bytes));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(60))
        .max_concurrent_streams(1024)
        .max_header_list_size(u32::try_from(config.max_header_bytes).unwrap_or(u32::MAX));
    let mut closing = core.closing.subscribe();
    let Shown { traffic, peer } = shown;
    let counted = Arc::clone(&core);
    let refused = Box::new(move |status| counted.placement.metrics.request(Route::Other, status));
    let socket = Socket::new(stream, Arc::clone(&peer), refused);
    let service = service_fn(|mut request: Request<Incoming>| {
        peer.begin(&request);
        let record = Record::begin(&core, client, &mut request);
        let (core, peer) = (Arc::clone(&core), Arc::clone(&peer));
        let under_way = traffic.begin(request.version());
        async move {
            let response = routes::handle(Arc::clone(&core), peer, request).await;
            let response = under_way.answer(response, *core.closing.borrow());
            Ok::<_, Infallible>(match record {
                Some(record) => record.answer(response),
                None => response.map(Recorded::untold),
            })
        }
    });
    let mut served = pin!(builder.serve_connection(TokioIo::new(socket), service));
    let steady = Steady::new();
    let ended = tokio::select! {
        ended = poll_fn(|cx| steady.poll(cx, served.as_mut())) => ended,
        () = traffic.silent(config.header_timeout) => return,
        () = closed(&mut closing) => {
            let patience = *grace.borrow();
            tokio::select! {
                ended = served.as_mut() => ended,
                () = traffic.quiet(patience) => {
                    served.as_mut().graceful_shutdown();
                    served.await
                }
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}
