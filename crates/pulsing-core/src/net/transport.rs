//! What carries a node's connections: the seam between the runtime and the operating system's network.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::conn::{Reading, Writing};
#[cfg(feature = "testing")]
use super::memory;
use crate::id::{ActorId, NodeId};

/// Where a node's connections go, and where it has its chances from.
#[derive(Clone, Debug, Default)]
pub enum Transport {
    /// The operating system's TCP.
    #[default]
    Tcp,
    /// A test's own network.
    #[cfg(feature = "testing")]
    Memory(memory::Host),
}

/// One connection, before TLS.
#[derive(Debug)]
pub enum Stream {
    /// The operating system's.
    Tcp(TcpStream),
    /// A test's.
    #[cfg(feature = "testing")]
    Memory(memory::Stream),
}

/// Where connections arrive.
#[derive(Debug)]
pub enum Listener {
    /// The operating system's.
    Tcp(TcpListener),
    /// A test's.
    #[cfg(feature = "testing")]
    Memory(memory::Listener),
}

impl Transport {
    /// Connects to `addr`.
    ///
    /// # Errors
    /// `ConnectionRefused` when nobody listens there; whatever else the network says.
    pub async fn connect(&self, addr: SocketAddr) -> io::Result<Stream> {
        match self {
            Self::Tcp => {
                let stream = TcpStream::connect(addr).await?;
                // An ephemeral client port may meet its own destination port: the kernel then connects the socket to
                // itself.
                if stream.local_addr().is_ok_and(|local| local == addr) {
                    return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens there"));
                }
                prepare(&stream);
                Ok(Stream::Tcp(stream))
            }
            #[cfg(feature = "testing")]
            Self::Memory(host) => host.connect(addr).await.map(Stream::Memory),
        }
    }

    /// Listens on `addr`.
    ///
    /// # Errors
    /// `AddrInUse` when somebody else does; whatever else the system says.
    pub fn bind(&self, addr: SocketAddr) -> io::Result<Listener> {
        match self {
            Self::Tcp => bind_tcp(addr).map(Listener::Tcp),
            #[cfg(feature = "testing")]
            Self::Memory(host) => host.bind(addr).map(Listener::Memory),
        }
    }

    /// The addresses of `host:port`.
    ///
    /// # Errors
    /// The resolver's words.
    pub async fn lookup(&self, text: &str) -> io::Result<Vec<SocketAddr>> {
        match self {
            Self::Tcp => Ok(tokio::net::lookup_host(text).await?.collect()),
            #[cfg(feature = "testing")]
            Self::Memory(host) => host.lookup(text),
        }
    }

    /// The id of a node that starts.
    pub fn node_id(&self) -> NodeId {
        match self {
            Self::Tcp => NodeId::generate(),
            #[cfg(feature = "testing")]
            Self::Memory(_) => NodeId(self.bits()),
        }
    }

    /// The id of an actor that starts: which is first where several are told of one thing follows from it.
    pub fn actor_id(&self) -> ActorId {
        match self {
            Self::Tcp => ActorId::generate(),
            #[cfg(feature = "testing")]
            Self::Memory(_) => ActorId(self.bits()),
        }
    }

    #[cfg(feature = "testing")]
    fn bits(&self) -> u128 {
        u128::from(self.random()) << 64 | u128::from(self.random())
    }

    /// The epoch of a node that starts, and the stamp of a claim: milliseconds of wall-clock time, so that a restart is
    /// younger than what it replaces.
    pub fn epoch(&self) -> u64 {
        match self {
            Self::Tcp => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64,
            #[cfg(feature = "testing")]
            Self::Memory(host) => host.epoch(),
        }
    }

    /// A random number for choices whose outcome shows in how the node behaves.
    pub fn random(&self) -> u64 {
        match self {
            Self::Tcp => rand::random(),
            #[cfg(feature = "testing")]
            Self::Memory(host) => host.random(),
        }
    }

    /// As [`random`](Self::random), evenly between `least` and `most`.
    pub fn random_between(&self, least: f64, most: f64) -> f64 {
        // A number of 53 bits is as fine as an f64 between 0 and 1.
        let part = (self.random() >> 11) as f64 / (1_u64 << 53) as f64;
        least + (most - least) * part
    }

    /// Starts one of a node's tasks.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        match self {
            Self::Tcp => tokio::spawn(work),
            #[cfg(feature = "testing")]
            Self::Memory(host) => tokio::spawn(host.clone().scheduled(work)),
        }
    }
}

fn bind_tcp(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None)?;
    // A restart on the same port must not wait for the kernel to forget old connections.
    socket.set_reuse_address(true)?;
    if addr.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        // Every interface means IPv4 too, whatever this system's default is.
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    TcpListener::from_std(socket.into())
}

/// Socket options of every link: small frames go out at once, and a vanished host is noticed.
fn prepare(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let keepalive =
        socket2::TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    let _ = socket2::SockRef::from(stream).set_tcp_keepalive(&keepalive);
    #[cfg(target_os = "linux")]
    if let (Ok(here), Ok(there)) = (stream.local_addr(), stream.peer_addr())
        && is_within_host(here.ip(), there.ip())
    {
        let _ = nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::TcpCongestion, &WITHIN_HOST.into());
    }
}

/// What governs the speed of a link that leaves no host. Nothing is lost there, and there is no queue to spare: BBR, which
/// is some systems' default, holds segments back with timers, for a sixth to a third of the time of 10 MB there and back
/// (`docs/benchmarks/runtime.md`). Every Linux has this one and lets everybody choose it.
#[cfg(target_os = "linux")]
const WITHIN_HOST: &str = "reno";

/// Both ends have one address, or loopback ones.
#[cfg(target_os = "linux")]
fn is_within_host(here: IpAddr, there: IpAddr) -> bool {
    here == there || (here.is_loopback() && there.is_loopback())
}

#[cfg(target_os = "linux")]
mod resend {
    use nix::{getsockopt_impl, libc, setsockopt_impl, sockopt_impl};

    /// TCP_RTO_MAX_MS of linux/tcp.h, since Linux 6.15.
    const TCP_RTO_MAX_MS: libc::c_int = 44;

    sockopt_impl!(
        /// Longest wait before what was not acknowledged is sent again, in milliseconds.
        LongestWait,
        Both,
        libc::IPPROTO_TCP,
        TCP_RTO_MAX_MS,
        u32
    );
}

impl Listener {
    /// The next connection, and where it comes from.
    ///
    /// # Errors
    /// The system's words; the listener may be asked again.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                prepare(&stream);
                Ok((Stream::Tcp(stream), from))
            }
            #[cfg(feature = "testing")]
            Self::Memory(listener) => {
                let (stream, from) = listener.accept().await;
                Ok((Stream::Memory(stream), from))
            }
        }
    }

    /// The port others connect to.
    ///
    /// # Errors
    /// The system's words.
    pub fn port(&self) -> io::Result<u16> {
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr()?.port()),
            #[cfg(feature = "testing")]
            Self::Memory(listener) => Ok(listener.port()),
        }
    }
}

impl Stream {
    /// Has lost segments sent again after at most a second, for connections on which little is said and lateness is taken
    /// for death. Otherwise each loss in a row doubles the wait: at 30 % loss connections stand still for tens of seconds.
    ///
    /// Such a connection also breaks after some 14 s without an acknowledgement in place of 15 minutes
    /// (`net.ipv4.tcp_retries2`). Needs Linux 6.15; elsewhere nothing changes.
    pub fn hasten(&self) {
        match self {
            // The least that the kernel takes.
            #[cfg(target_os = "linux")]
            Self::Tcp(stream) => drop(nix::sys::socket::setsockopt(stream, resend::LongestWait, &1000)),
            #[cfg(not(target_os = "linux"))]
            Self::Tcp(_) => {}
            #[cfg(feature = "testing")]
            Self::Memory(_) => {}
        }
    }

    /// Waits for the first byte and leaves it where it is; `None` at the end of the stream.
    pub async fn first_byte(&mut self) -> Option<u8> {
        match self {
            Self::Tcp(stream) => {
                let mut byte = [0];
                (stream.peek(&mut byte).await.ok()? == 1).then_some(byte[0])
            }
            #[cfg(feature = "testing")]
            Self::Memory(stream) => stream.peek().await.ok()?,
        }
    }

    /// Splits for a reader and a writer task.
    pub fn halves(self) -> (Reading, Writing) {
        match self {
            Self::Tcp(stream) => {
                let (reading, writing) = stream.into_split();
                (Box::new(reading), Box::new(writing))
            }
            #[cfg(feature = "testing")]
            Self::Memory(stream) => {
                let (reading, writing) = stream.into_split();
                (Box::new(reading), Box::new(writing))
            }
        }
    }
}

macro_rules! forward {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Tcp($stream) => {
                let $stream = Pin::new($stream);
                $call
            }
            #[cfg(feature = "testing")]
            Stream::Memory($stream) => {
                let $stream = Pin::new($stream);
                $call
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        forward!(self, stream => stream.poll_write(cx, buf))
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, stream => stream.poll_shutdown(cx))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use nix::sys::socket::getsockopt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_link_within_a_host_is_not_paced_whatever_the_systems_default_is() {
        let listener = Transport::Tcp.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = SocketAddr::new([127, 0, 0, 1].into(), listener.port().unwrap());
        let (here, there) = tokio::join!(Transport::Tcp.connect(addr), listener.accept());
        for stream in [here.unwrap(), there.unwrap().0] {
            let Stream::Tcp(stream) = stream else { unreachable!() };
            let name = getsockopt(&stream, nix::sys::socket::sockopt::TcpCongestion).unwrap();
            // The kernel fills the name's place with zeros.
            assert_eq!(name.to_string_lossy().trim_end_matches('\0'), WITHIN_HOST);
        }
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(is_within_host(ip("10.0.0.1"), ip("10.0.0.1")));
        assert!(is_within_host(ip("127.0.0.1"), ip("127.0.0.2")));
        assert!(!is_within_host(ip("10.0.0.1"), ip("10.0.0.2")));
    }

    #[tokio::test]
    async fn lost_segments_are_sent_again_after_a_second_at_most_where_the_kernel_can() {
        let listener = Transport::Tcp.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = SocketAddr::new([127, 0, 0, 1].into(), listener.port().unwrap());
        let mut stream = Transport::Tcp.connect(addr).await.unwrap();
        let wait = |stream: &Stream| match stream {
            Stream::Tcp(stream) => getsockopt(stream, resend::LongestWait),
            #[cfg(feature = "testing")]
            Stream::Memory(_) => unreachable!(),
        };
        let before = wait(&stream);
        stream.hasten();
        // Kernels before 6.15 do not know the option.
        assert_eq!(wait(&stream), before.map(|_| 1000));
        let (mut other, _) = listener.accept().await.unwrap();
        other.write_all(b"x").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'x');
    }
}
