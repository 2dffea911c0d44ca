//! Servers that are dialled: engines, collectors of traces. Over TCP or TLS.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use hyper::Uri;
use hyper::header::HeaderValue;
use rustix::io::Errno;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::files;
use crate::tunnel::Tunnel;

/// Whose certificates are believed.
pub(crate) type Trust = Arc<ClientConfig>;

fn trust(roots: RootCertStore) -> Result<Trust, String> {
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .map_err(|error| error.to_string())?;
    Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

/// The authorities in a PEM file, and no others.
///
/// # Errors
/// What is wrong with the file.
pub(crate) fn trust_in(file: &Path) -> Result<Trust, String> {
    let bad = |why: &dyn std::fmt::Display| format!("engine_ca_file {}: {why}", file.display());
    let mut roots = RootCertStore::empty();
    let found: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&files::read("engine_ca_file", file)?)
        .collect::<Result<_, _>>()
        .map_err(|error| bad(&error))?;
    if found.is_empty() {
        return Err(bad(&"there is no certificate in it"));
    }
    for certificate in found {
        roots.add(certificate).map_err(|error| bad(&error))?;
    }
    trust(roots)
}

/// Whoever the system trusts: its certificate store, or what `SSL_CERT_FILE` and `SSL_CERT_DIR` say. Read once a process.
async fn system_trust() -> io::Result<Trust> {
    static FOUND: OnceLock<Trust> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(Arc::clone(found));
    }
    let read = || {
        let mut roots = RootCertStore::empty();
        let (count, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if count == 0 {
            return Err("this system has no certificate authorities: install them, or give a file of them".to_owned());
        }
        trust(roots)
    };
    let found = tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?.map_err(io::Error::other)?;
    Ok(Arc::clone(FOUND.get_or_init(|| found)))
}

/// A URL as errors and logs may show it: what may be a password or a key in it is left out.
pub(crate) fn shown(url: &str) -> String {
    let begin = url.find("://").map_or(0, |at| at + 3);
    // A password may hold a slash, a question mark or an `@` that it should not.
    let (masked, rest) = match url[begin..].rfind('@') {
        Some(at) => ("…", &url[begin + at..]),
        None => ("", &url[begin..]),
    };
    let (rest, query) = match rest.find(['?', '#']) {
        Some(at) => (&rest[..at], "?…"),
        None => (rest, ""),
    };
    format!("{}{masked}{rest}{query}", &url[..begin])
}

/// Where a server listens.
pub(crate) struct Target {
    host: String,
    port: u16,
    /// As `Host` has it.
    authority: HeaderValue,
    /// Under https, the name that its certificate must have.
    name: Option<ServerName<'static>>,
    /// `None`: the system's.
    trust: ArcSwapOption<ClientConfig>,
}

impl Target {
    /// Reads `http(s)://host[:port][/path]`; the path comes beside it, without a slash at its end.
    ///
    /// # Errors
    /// The rest of a sentence that names the URL.
    pub(crate) fn parse(url: &str) -> Result<(Self, String), String> {
        let uri: Uri = url.parse().map_err(|_| "is no URL".to_owned())?;
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            Some(other) => return Err(format!("starts with {other}://; only http:// and https:// are dialled")),
            None => return Err("must start with http:// or https://".to_owned()),
        };
        let authority = uri.authority().ok_or("names no host")?;
        if authority.as_str().contains('@') {
            return Err("holds a password".to_owned());
        }
        if uri.query().is_some() {
            return Err("has a query".to_owned());
        }
        // A port beyond 65535 counts as none in `http`; another server would be dialled on 80.
        let port = match authority.port_u16() {
            Some(port) => port,
            None if authority.as_str().len() > authority.host().len() => {
                return Err("needs a port from 1 to 65535".to_owned());
            }
            None if secure => 443,
            None => 80,
        };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = secure.then(|| ServerName::try_from(host.clone())).transpose();
        let target = Self {
            name: name.map_err(|_| "names no host that a certificate can have")?,
            host,
            port,
            authority: HeaderValue::from_str(authority.as_str()).map_err(|_| "names no host")?,
            trust: ArcSwapOption::empty(),
        };
        Ok((target, uri.path().trim_end_matches('/').to_owned()))
    }

    /// Believes these authorities instead of the system's.
    pub(crate) fn trust(&self, trust: &Trust) {
        self.trust.store(Some(Arc::clone(trust)));
    }
    /// The host name or address, without brackets.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }
    /// Where it is, for people.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.name.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.authority.to_str().unwrap_or(&self.host))
    }
    /// The value of `Host`.
    pub(crate) fn authority(&self) -> HeaderValue {
        self.authority.clone()
    }
    /// Host and port.
    #[cfg(test)]
    pub(crate) fn place(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    /// Connects within `limit`, TLS included.
    ///
    /// # Errors
    /// The system's, or why the certificate is not believed.
    pub(crate) async fn dial(&self, limit: Duration) -> io::Result<Stream> {
        let dial = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
            // A small request after a small request must not wait for an acknowledgement.
            stream.set_nodelay(true)?;
            let Some(name) = &self.name else { return Ok(Stream::Plain(stream)) };
            let trust = match self.trust.load_full() {
                Some(trust) => trust,
                None => system_trust().await?,
            };
            let stream = TlsConnector::from(trust).connect(name.clone(), stream).await.map_err(explain)?;
            Ok(Stream::Tls(Box::new(stream)))
        };
        tokio::time::timeout(limit, dial).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Whether nobody was dialled because this process or its machine has no descriptor, port or memory left for it: that says
/// nothing of the other side.
pub(crate) fn is_ours(error: &io::Error) -> bool {
    let ours = [Errno::MFILE, Errno::NFILE, Errno::ADDRNOTAVAIL, Errno::NOBUFS, Errno::NOMEM];
    ours.iter().any(|ours| error.raw_os_error() == Some(ours.raw_os_error()))
}

/// Says what is to be done about a certificate that is common, and not believed.
fn explain(error: io::Error) -> io::Error {
    if error.to_string().contains("CaUsedAsEndEntity") {
        let what = "its certificate is an authority's own; a server needs one with basicConstraints=CA:FALSE";
        return io::Error::new(error.kind(), what);
    }
    error
}

/// A connection to a server.
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    /// Through the cluster, for one request.
    Relayed(Box<Tunnel>),
}

impl Stream {
    /// Whether another request may follow on it.
    pub(crate) fn is_lasting(&self) -> bool {
        !matches!(self, Self::Relayed(_))
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Relayed(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Relayed(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Relayed(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }
    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
            Self::Relayed(stream) => stream.is_write_vectored(),
        }
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Self::Relayed(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Relayed(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_password_or_key_in_a_url_is_shown() {
        for (url, seen) in [
            ("http://user:secret@host:1/x", "http://…@host:1/x"),
            ("http://secret@host", "http://…@host"),
            ("user:secret@host:1", "…@host:1"),
            ("http://u:sec/ret@host", "http://…@host"),
            ("http://u:sec@ret@host", "http://…@host"),
            ("ftp://u:secret@", "ftp://…@"),
            ("http://host:1/x?key=secret", "http://host:1/x?…"),
            ("http://u:sec?ret@host/x?key=secret", "http://…@host/x?…"),
            ("http://host:1/x", "http://host:1/x"),
            ("", ""),
        ] {
            assert_eq!(shown(url), seen);
        }
    }
}
