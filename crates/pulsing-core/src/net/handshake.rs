//! How two nodes agree to talk: version, cluster, who they are, and proof that they may.
//!
//! ```text
//! dialler                                   listener
//! MAGIC, version, lowest version, Hello  ->
//!                                        <- MAGIC, version, lowest version, Answer{Challenge | Reject}
//! Proof                                  ->
//!                                        <- Answer{Welcome | Reject}
//! ```
//! The link speaks the highest version that both know; where there is none, both are told so. Both sides prove the secret over both nonces and the whole Hello, so neither an eavesdropper's replay nor a process of
//! another user that took the port gets anything. A refusal always says why, in words (M6).

use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;
use prost::Message;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::secret::Secret;
use super::tls::ClusterTls;
use super::wire::{MAGIC, Versions};
use crate::cluster::Identity;
use crate::error::{Error, Result};
use crate::shown::shown as named;

/// Any byte stream a link can run on.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// What a connection carries; large transfers, small calls and membership never share one (design section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Membership and registry.
    Control,
    /// Calls and items up to [`super::outbox::SMALL`] bytes.
    Small,
    /// Everything larger, in interleaved chunks.
    Bulk,
}

impl Lane {
    fn code(self) -> u32 {
        match self {
            Self::Control => 1,
            Self::Small => 2,
            Self::Bulk => 3,
        }
    }
    fn from_code(code: u32) -> Option<Self> {
        [Self::Control, Self::Small, Self::Bulk].into_iter().find(|l| l.code() == code)
    }
}

#[derive(Clone, PartialEq, Message)]
struct Hello {
    #[prost(string, tag = "1")]
    cluster: String,
    #[prost(bytes = "bytes", tag = "2")]
    identity: Bytes,
    #[prost(uint32, tag = "3")]
    lane: u32,
    /// Lanes of one link share a session.
    #[prost(bytes = "bytes", tag = "4")]
    session: Bytes,
    #[prost(bytes = "bytes", tag = "5")]
    nonce: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct Answer {
    #[prost(string, tag = "1")]
    reject: String,
    /// A refusal that trying again will not change.
    #[prost(bool, tag = "2")]
    fatal: bool,
    #[prost(bytes = "bytes", tag = "3")]
    identity: Bytes,
    #[prost(bytes = "bytes", tag = "4")]
    nonce: Bytes,
    #[prost(bytes = "bytes", tag = "5")]
    proof: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct Proof {
    #[prost(bytes = "bytes", tag = "1")]
    proof: Bytes,
}

const MAX_MESSAGE: usize = 4096;

/// On what ground a peer is accepted (design section 6).
#[derive(Clone, Debug)]
pub enum Trust {
    /// It runs on this host and proves the user's secret.
    Secret(Secret),
    /// It showed a certificate of the cluster before this handshake began.
    Tls(ClusterTls),
    /// None.
    Anyone,
}

/// Who this node is and whom it accepts.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Name of the cluster.
    pub cluster: String,
    /// Whom to accept.
    pub trust: Trust,
    /// Which wire versions to speak.
    pub versions: Versions,
}

impl Credentials {
    fn prove(&self, role: &str, transcript: &[&[u8]]) -> Bytes {
        match &self.trust {
            Trust::Secret(secret) => Bytes::copy_from_slice(&secret.prove(role, transcript)),
            Trust::Tls(_) | Trust::Anyone => Bytes::new(),
        }
    }
    fn check(&self, role: &str, transcript: &[&[u8]], proof: &[u8]) -> bool {
        match &self.trust {
            Trust::Secret(secret) => secret.check(role, transcript, proof),
            Trust::Tls(_) | Trust::Anyone => true,
        }
    }
    fn only_this_host(&self) -> bool {
        matches!(self.trust, Trust::Secret(_))
    }
    /// Whether what it has shown is the certificate of `peer`.
    fn identify(&self, peer: &Identity, shown: Option<&CertificateDer<'_>>) -> std::result::Result<(), String> {
        match &self.trust {
            Trust::Tls(tls) => tls.check(shown, peer.addr.ip()),
            Trust::Secret(_) | Trust::Anyone => Ok(()),
        }
    }
}

/// An accepted connection.
pub struct Accepted {
    /// Who dialled.
    pub peer: Identity,
    /// What it carries.
    pub lane: Lane,
    /// Which link it belongs to.
    pub session: u128,
    /// The wire version that it speaks.
    pub version: u8,
}

/// Who answered a dial.
pub struct Met {
    /// Who it is.
    pub peer: Identity,
    /// The wire version that the link speaks.
    pub version: u8,
}

/// Dials: performs the handshake on a fresh connection to `addr`, whose TLS has `shown` this certificate.
///
/// # Errors
/// `Refused` with the peer's or our own reason, `ConnectFailed` when the peer does not speak our protocol. The caller limits how
/// long it takes.
pub async fn dial(
    io: &mut impl Io,
    addr: SocketAddr,
    me: Identity,
    lane: Lane,
    session: u128,
    cred: &Credentials,
    shown: Option<&CertificateDer<'_>>,
) -> Result<Met> {
    if cred.only_this_host() && !is_local(addr.ip()) {
        return Err(Error::Refused { addr: addr.to_string(), reason: remote_plaintext("it") });
    }
    let nonce: [u8; 32] = rand::random();
    let hello = Hello {
        cluster: cred.cluster.clone(),
        identity: me.encode().into(),
        lane: lane.code(),
        session: Bytes::copy_from_slice(&session.to_be_bytes()),
        nonce: Bytes::copy_from_slice(&nonce),
    }
    .encode_to_vec();
    let io_failed = |e: std::io::Error| {
        // In TLS 1.3 the listener's verdict on our certificate arrives with the first read.
        if let Trust::Tls(tls) = &cred.trust
            && e.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
        {
            return Error::Refused { addr: addr.to_string(), reason: tls.explain(&e) };
        }
        failed(addr, format!("handshake broken off: {e}; is this a Pulsing node?"))
    };
    write_opening(io, cred.versions, &hello).await.map_err(io_failed)?;

    let (version, answer): (u8, Answer) = match read_opening(io, cred.versions).await {
        Ok((version, raw)) => (version, decode(&raw)?),
        Err(Opening::Io(e)) => return Err(io_failed(e)),
        Err(Opening::NotUs) => {
            return Err(failed(addr, "it answers, but not as a Pulsing node; check host and port".into()));
        }
        Err(Opening::Versions(its)) => {
            let reason = strangers((me.addr, cred.versions), (addr, its));
            return Err(Error::Refused { addr: addr.to_string(), reason });
        }
    };
    let peer = accept_answer(&answer, addr)?;
    cred.identify(&peer, shown).map_err(|reason| Error::Refused { addr: addr.to_string(), reason })?;
    let transcript: [&[u8]; 3] = [&hello, &answer.nonce, &answer.identity];
    if !cred.check("listener", &transcript, &answer.proof) {
        return Err(Error::Refused {
            addr: addr.to_string(),
            reason: "it could not prove this user's secret: it runs as another user or with another secret file; run \
                     both as one user, share PULSING_SECRET_FILE, or use --insecure on both sides"
                .into(),
        });
    }
    let proof = cred.prove("dialler", &transcript);
    write_message(io, &Proof { proof }.encode_to_vec()).await.map_err(io_failed)?;
    let welcome: Answer = decode(&read_message(io).await.map_err(io_failed)?)?;
    if !welcome.reject.is_empty() {
        return Err(refused(addr, &welcome));
    }
    Ok(Met { peer, version })
}

/// Accepts: performs the handshake on a connection whose first bytes are [`MAGIC`] and whose TLS has `shown` this
/// certificate.
///
/// # Errors
/// `Refused` after telling the peer why; `ConnectFailed` when it broke off. The caller limits how long it takes.
pub async fn accept(
    io: &mut impl Io,
    from: SocketAddr,
    me: Identity,
    cred: &Credentials,
    shown: Option<&CertificateDer<'_>>,
) -> Result<Accepted> {
    let io_failed = |e: std::io::Error| failed(from, format!("handshake broken off: {e}"));
    let versions = cred.versions;
    let (version, raw) = match read_opening(io, versions).await {
        Ok(opening) => opening,
        Err(Opening::Io(e)) => return Err(io_failed(e)),
        Err(Opening::NotUs) => return Err(failed(from, "bad first bytes".into())),
        Err(Opening::Versions(its)) => {
            let reason = strangers((me.addr, versions), (from, its));
            return Err(reject(io, from, true, Some(versions), reason).await);
        }
    };
    let hello: Hello = match decode(&raw) {
        Ok(hello) => hello,
        Err(e) => return Err(reject(io, from, true, Some(versions), e.to_string()).await),
    };
    if hello.cluster != cred.cluster {
        let reason =
            format!("this is cluster {}, not {}: check --cluster", named(&cred.cluster), named(&hello.cluster));
        return Err(reject(io, from, true, Some(versions), reason).await);
    }
    if cred.only_this_host() && !is_local(from.ip()) {
        return Err(reject(io, from, true, Some(versions), remote_plaintext("this node")).await);
    }
    let parsed = Identity::decode(&hello.identity).ok().zip(Lane::from_code(hello.lane));
    let session = <[u8; 16]>::try_from(&hello.session[..]).map(u128::from_be_bytes);
    let (Some((peer, lane)), Ok(session), 32) = (parsed, session, hello.nonce.len()) else {
        return Err(reject(io, from, true, Some(versions), "malformed Hello".into()).await);
    };
    if let Err(reason) = cred.identify(&peer, shown) {
        let reason = format!("the caller says that it is {peer}, but {reason}");
        return Err(reject(io, from, true, Some(versions), reason).await);
    }

    let nonce: [u8; 32] = rand::random();
    let identity = Bytes::from(me.encode());
    let transcript: [&[u8]; 3] = [&raw, &nonce, &identity];
    let proof = cred.prove("listener", &transcript);
    let answer =
        Answer { identity: identity.clone(), nonce: Bytes::copy_from_slice(&nonce), proof, ..Answer::default() };
    write_opening(io, versions, &answer.encode_to_vec()).await.map_err(io_failed)?;
    let proof: Proof = decode(&read_message(io).await.map_err(io_failed)?)?;
    if !cred.check("dialler", &transcript, &proof.proof) {
        let reason = "the caller could not prove this user's secret: run both as one user, share PULSING_SECRET_FILE, or \
                      use --insecure on both sides";
        return Err(reject(io, from, true, None, reason.into()).await);
    }
    write_message(io, &Answer::default().encode_to_vec()).await.map_err(io_failed)?;
    Ok(Accepted { peer, lane, session, version })
}

fn accept_answer(answer: &Answer, addr: SocketAddr) -> Result<Identity> {
    if !answer.reject.is_empty() {
        return Err(refused(addr, answer));
    }
    Identity::decode(&answer.identity)
}

fn refused(addr: SocketAddr, answer: &Answer) -> Error {
    if answer.fatal {
        Error::Refused { addr: addr.to_string(), reason: answer.reject.clone() }
    } else {
        failed(addr, answer.reject.clone())
    }
}

/// Says why not: as the `opening` of what it speaks, or after one.
async fn reject(io: &mut impl Io, from: SocketAddr, fatal: bool, opening: Option<Versions>, reason: String) -> Error {
    let answer = Answer { reject: reason.clone(), fatal, ..Answer::default() }.encode_to_vec();
    // The refusal is what matters; a peer that has gone already needs no words.
    let _ = match opening {
        Some(versions) => write_opening(io, versions, &answer).await,
        None => write_message(io, &answer).await,
    };
    let _ = io.shutdown().await;
    Error::Refused { addr: from.to_string(), reason }
}

fn failed(addr: SocketAddr, reason: String) -> Error {
    Error::ConnectFailed { addr: addr.to_string(), reason }
}

fn strangers(mine: (SocketAddr, Versions), its: (SocketAddr, Versions)) -> String {
    let older = if mine.1.highest < its.1.lowest { mine.0 } else { its.0 };
    format!(
        "wire versions do not meet: {} speaks {}, {} speaks {}; upgrade Pulsing at {older}",
        mine.0, mine.1, its.0, its.1
    )
}

fn remote_plaintext(who: &str) -> String {
    format!(
        "{who} is on another host and the connection is plaintext: give both sides the same --passphrase-file (or --cert, --key \
         and --ca), or start both with --insecure if the network is trusted"
    )
}

/// Turns away a plaintext peer of a TLS cluster, in its own tongue; returns what it was told.
pub async fn turn_away_plaintext(io: &mut impl Io, from: SocketAddr, tls: &ClusterTls) -> String {
    let reason = format!("this cluster uses TLS: start with {}", tls.way_in());
    reject(io, from, true, Some(Versions::KNOWN), reason.clone()).await;
    reason
}

/// Whether an address belongs to this host.
pub fn is_local(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    ip.is_loopback() || if_addrs::get_if_addrs().is_ok_and(|all| all.iter().any(|i| i.ip() == ip))
}

enum Opening {
    Io(std::io::Error),
    NotUs,
    Versions(Versions),
}

async fn write_opening(io: &mut impl Io, versions: Versions, message: &[u8]) -> std::io::Result<()> {
    let mut out = Vec::with_capacity(16 + message.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[versions.highest, versions.lowest, 0, 0]);
    out.extend_from_slice(&(message.len() as u32).to_le_bytes());
    out.extend_from_slice(message);
    io.write_all(&out).await?;
    io.flush().await
}

/// The version that both speak, and the message.
async fn read_opening(io: &mut impl Io, mine: Versions) -> Result<(u8, Vec<u8>), Opening> {
    let mut head = [0u8; 12];
    io.read_exact(&mut head).await.map_err(Opening::Io)?;
    if &head[..8] != MAGIC {
        return Err(Opening::NotUs);
    }
    let its = Versions { highest: head[8], lowest: head[9] };
    let version = mine.meet(its).ok_or(Opening::Versions(its))?;
    Ok((version, read_message(io).await.map_err(Opening::Io)?))
}

async fn write_message(io: &mut impl Io, message: &[u8]) -> std::io::Result<()> {
    let mut out = Vec::with_capacity(4 + message.len());
    out.extend_from_slice(&(message.len() as u32).to_le_bytes());
    out.extend_from_slice(message);
    io.write_all(&out).await?;
    io.flush().await
}

async fn read_message(io: &mut impl Io) -> std::io::Result<Vec<u8>> {
    let len = io.read_u32_le().await? as usize;
    if len > MAX_MESSAGE {
        return Err(std::io::Error::other(format!("handshake message of {len} bytes")));
    }
    let mut message = vec![0; len];
    io.read_exact(&mut message).await?;
    Ok(message)
}

fn decode<M: Message + Default>(raw: &[u8]) -> Result<M> {
    M::decode(raw).map_err(|e| Error::Protocol(format!("bad handshake: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::NodeId;

    /// What the dialler hears of a listener that takes it to come `from` there.
    async fn met(from: &str, addr: &str, listener: Trust, dialler: Trust) -> (Result<Accepted>, Result<Met>) {
        let (mut near, mut far) = tokio::io::duplex(1 << 16);
        let me = |node| Identity::new(NodeId(node), SocketAddr::new([127, 0, 0, 1].into(), 1), 1);
        let cred = |trust| Credentials { cluster: "default".into(), trust, versions: Versions::KNOWN };
        let (accepting, dialling) = (cred(listener), cred(dialler));
        let (from, addr) = (from.parse().unwrap(), addr.parse().unwrap());
        tokio::join!(
            // Each end closes when its side is done.
            async move { accept(&mut near, from, me(1), &accepting, None).await },
            async move { dial(&mut far, addr, me(2), Lane::Small, 1, &dialling, None).await },
        )
    }

    fn secret(name: &str) -> Trust {
        let dir = std::env::temp_dir().join(format!("pulsing-handshake-{}", std::process::id()));
        Trust::Secret(Secret::load(Some(&dir.join(name))).unwrap())
    }

    #[tokio::test]
    async fn plaintext_from_another_host_is_told_the_ways_out_whatever_it_knows() {
        let (here, there) = ("127.0.0.1:1", "203.0.113.9:1");
        for (from, addr, listener, dialler) in [
            (there, here, secret("one"), secret("one")),
            (there, here, secret("one"), Trust::Anyone),
            (here, there, secret("one"), secret("one")),
            (here, there, Trust::Anyone, secret("one")),
        ] {
            let (_, heard) = met(from, addr, listener, dialler).await;
            let told = heard.map(|_| ()).unwrap_err().to_string();
            for way in ["on another host and the connection is plaintext", "--passphrase-file", "--insecure"] {
                assert!(told.contains(way), "{told}");
            }
        }
        assert!(met(there, there, Trust::Anyone, Trust::Anyone).await.1.is_ok());
    }

    #[tokio::test]
    async fn who_shares_the_host_but_not_the_secret_is_refused_on_both_sides() {
        let here = "127.0.0.1:1";
        assert!(met(here, here, secret("one"), secret("one")).await.0.is_ok());
        for (listener, dialler) in
            [(secret("one"), secret("two")), (secret("one"), Trust::Anyone), (Trust::Anyone, secret("one"))]
        {
            let (accepted, heard) = met(here, here, listener, dialler).await;
            assert!(accepted.is_err());
            let told = heard.map(|_| ()).unwrap_err().to_string();
            assert!(told.contains("could not prove this user's secret") && told.contains("--insecure"), "{told}");
        }
    }
}

#[cfg(test)]
#[path = "golden_tests.rs"]
mod golden;
