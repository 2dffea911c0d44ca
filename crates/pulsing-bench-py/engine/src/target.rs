//! Where the server is: its URL taken apart, its name resolved once.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::Uri;

use crate::config::Endpoint;
use crate::error::BenchError;

/// A server. Its name is resolved before the run, so that no request pays for DNS.
#[derive(Debug)]
pub(crate) struct Target {
    /// `host:port` as it stands in `Host`.
    pub(crate) authority: String,
    /// The path before `/chat/completions`.
    pub(crate) prefix: String,
    addrs: Vec<SocketAddr>,
    /// The address that answered last: `localhost` is two, and often only one of them listens.
    preferred: AtomicUsize,
}

impl Target {
    /// Takes `url` apart: the root of a server, its `/v1`, any prefix, or the full path of an endpoint.
    pub(crate) async fn resolve(url: &str) -> Result<Self, BenchError> {
        let no = |why: &str| BenchError::Config(format!("url {}: {why}", shown(url)));
        let uri: Uri =
            url.parse().map_err(|error| no(&format!("{error}; expected something like http://localhost:8080")))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(no("https cannot be measured yet; give the http address behind the TLS proxy"));
            }
            _ => return Err(no("expected http://HOST:PORT")),
        }
        let authority = uri.authority().ok_or_else(|| no("the host is missing"))?;
        if authority.as_str().contains('@') {
            return Err(no("a user or password in the URL would end up in reports; use the api_key"));
        }
        if uri.query().is_some() {
            return Err(no("a query cannot be sent along; leave it out"));
        }
        let mut path = uri.path().trim_end_matches('/');
        for tail in ["/chat/completions", "/completions"] {
            path = path.strip_suffix(tail).unwrap_or(path);
        }
        let prefix = if path.ends_with("/v1") { path.to_owned() } else { format!("{path}/v1") };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        // A port beyond 65535 counts as none in `http`; another server would be measured on 80.
        let port = match authority.port_u16() {
            Some(port) => port,
            None if authority.as_str().len() > authority.host().len() => {
                return Err(no("expected a port from 1 to 65535"));
            }
            None => 80,
        };
        let mut addrs: Vec<SocketAddr> = tokio::net::lookup_host((host, port))
            .await
            .map_err(|error| BenchError::Server(format!("cannot resolve {host}: {error}")))?
            .collect();
        addrs.dedup();
        if addrs.is_empty() {
            return Err(BenchError::Server(format!("{host} has no address")));
        }
        Ok(Self { authority: authority.as_str().to_owned(), prefix, addrs, preferred: AtomicUsize::new(0) })
    }

    /// All addresses with their index, from the one that answered last on.
    pub(crate) fn addrs(&self) -> impl Iterator<Item = (usize, SocketAddr)> + '_ {
        let from = self.preferred.load(Ordering::Relaxed);
        let n = self.addrs.len();
        (0..n).map(move |at| (from + at) % n).map(|at| (at, self.addrs[at]))
    }

    /// The address with this index answered.
    pub(crate) fn prefer(&self, at: usize) {
        self.preferred.store(at, Ordering::Relaxed);
    }

    pub(crate) fn path(&self, endpoint: Endpoint) -> String {
        match endpoint {
            Endpoint::Completions => format!("{}/completions", self.prefix),
            Endpoint::Chat | Endpoint::Auto => format!("{}/chat/completions", self.prefix),
        }
    }
}

/// The URL for an error message, without what may be secret in it.
fn shown(url: &str) -> String {
    let url = url.split('?').next().unwrap_or_default();
    match (url.find("://"), url.rfind('@')) {
        (Some(scheme), Some(at)) if scheme + 3 <= at => format!("{}…{}", &url[..scheme + 3], &url[at..]),
        _ => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::Target;
    use crate::config::Endpoint;

    async fn path(url: &str) -> String {
        Target::resolve(url).await.unwrap().path(Endpoint::Chat)
    }

    #[tokio::test]
    async fn root_v1_and_any_prefix_are_accepted() {
        for url in ["http://127.0.0.1:1", "http://127.0.0.1:1/", "http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/"] {
            assert_eq!(path(url).await, "/v1/chat/completions");
        }
        assert_eq!(path("http://127.0.0.1:1/v1/chat/completions").await, "/v1/chat/completions");
        assert_eq!(path("http://127.0.0.1:1/api/llm").await, "/api/llm/v1/chat/completions");
        assert_eq!(path("http://[::1]:1/x/v1").await, "/x/v1/chat/completions");
    }

    #[tokio::test]
    async fn what_cannot_be_meant_is_refused_without_showing_secrets() {
        for url in ["localhost:80", "ftp://x", "https://x", "http://me:secret@x", "http://x/?key=secret", "http://"] {
            let error = Target::resolve(url).await.unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let error = Target::resolve("http://127.0.0.1:99999").await.unwrap_err().to_string();
        assert!(error.contains("expected a port from 1 to 65535"), "{error}");
    }
}
