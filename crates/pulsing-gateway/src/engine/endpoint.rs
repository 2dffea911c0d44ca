//! Where an engine listens, and the connections kept to it.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use hyper::header::HeaderValue;
use parking_lot::Mutex;

use super::wire::Wire;
use crate::dial::{self, Stream, Target, Trust, shown};
use crate::tunnel::Relay;

/// How long a dial may take: engines stand close to their Router.
const DIAL: Duration = Duration::from_secs(2);
/// Connections kept for the next requests.
const MAX_IDLE: usize = 256;
/// And for how long. Servers close theirs earlier or later; a closed one is noticed before it is used.
const MAX_AGE: Duration = Duration::from_secs(60);

/// One engine's address, key and idle connections.
pub struct Endpoint {
    target: Target,
    /// What stands before `/v1`.
    prefix: String,
    authorization: ArcSwapOption<HeaderValue>,
    /// Who carries requests there, where this host does not reach it.
    relay: OnceLock<Arc<Relay>>,
    /// It has said that it has no `/v1/responses`.
    lacks_responses: AtomicBool,
    /// The most recently used last.
    idle: Mutex<Vec<(Wire, Instant)>>,
}

impl Endpoint {
    /// Reads `http(s)://host[:port][/prefix][/v1]`.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn parse(url: &str) -> Result<Self, String> {
        let (target, path) = Target::parse(url).map_err(|why| match url.contains('@') {
            true => format!("its url {:?} {why}; give the engine's key with --api_key_file", shown(url)),
            false => format!("its url {:?} {why}", shown(url)),
        })?;
        let prefix = path.strip_suffix("/v1").unwrap_or(&path).trim_end_matches('/').to_owned();
        Ok(Self {
            target,
            prefix,
            authorization: ArcSwapOption::empty(),
            relay: OnceLock::new(),
            lacks_responses: AtomicBool::new(false),
            idle: Mutex::default(),
        })
    }

    /// Believes these authorities instead of the system's.
    pub(crate) fn trust(&self, trust: &Trust) {
        self.target.trust(trust);
    }
    /// Whether only its own host reaches it.
    pub(crate) fn is_of_its_host(&self) -> bool {
        let host = self.host();
        host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
    }
    /// From now on requests go there through the cluster.
    pub(crate) fn relay(&self, relay: Relay) {
        let _ = self.relay.set(Arc::new(relay));
    }
    /// Where it is, for people.
    pub(crate) fn url(&self) -> String {
        format!("{}{}", self.target.url(), self.prefix)
    }
    /// `text` without this address. A host name of one word stays: it may be any word.
    pub(crate) fn hide(&self, text: &str) -> String {
        const INSTEAD: &str = "its engine";
        let (authority, host) = (self.target.authority(), self.host());
        let url = self.url();
        let text = text
            .replace(&format!("{INSTEAD} at {url}"), INSTEAD)
            .replace(&url, INSTEAD)
            .replace(authority.to_str().unwrap_or(host), INSTEAD);
        if host.contains(['.', ':']) { text.replace(host, INSTEAD) } else { text }
    }
    /// Its host name or address, without brackets.
    pub(crate) fn host(&self) -> &str {
        self.target.host()
    }
    /// Writes the first line of a request to `path` below the engine's prefix, and `Host`.
    pub(super) fn write_line(&self, head: &mut Vec<u8>, path: &str) {
        let host = self.target.authority();
        let line =
            [b"POST ", self.prefix.as_bytes(), path.as_bytes(), b" HTTP/1.1\r\nhost: ", host.as_bytes(), b"\r\n"];
        line.into_iter().for_each(|part| head.extend_from_slice(part));
    }
    /// The engine's own key, as `Authorization` has it.
    pub(super) fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.load().as_deref().cloned()
    }
    /// Sets the engine's own key; empty = none. True if it is another one than before.
    pub(crate) fn set_authorization(&self, value: &str) -> bool {
        let value = (!value.is_empty()).then(|| HeaderValue::from_str(value).ok()).flatten().map(|mut value| {
            value.set_sensitive(true);
            Arc::new(value)
        });
        let before = self.authorization.swap(value.clone());
        before != value
    }

    /// Whether `/v1/responses` is worth a try.
    pub(super) fn may_have_responses(&self) -> bool {
        !self.lacks_responses.load(Ordering::Relaxed)
    }
    /// It has none.
    pub(super) fn has_no_responses(&self) {
        self.lacks_responses.store(true, Ordering::Relaxed);
    }

    /// Whether somebody listens there. The connection serves the next request.
    pub(crate) async fn knock(self: &Arc<Self>) -> io::Result<()> {
        if let Some(relay) = self.relay.get() {
            return relay.knock(DIAL).await;
        }
        let wire = self.dial().await?;
        self.give_back(wire);
        Ok(())
    }
    /// Whether somebody listens there. If not, all idle connections are closed, too.
    pub(crate) async fn is_there(&self) -> bool {
        let there = match self.relay.get() {
            Some(relay) => relay.knock(DIAL).await,
            None => self.dial().await.map(drop),
        };
        let there = there.map_or_else(|error| dial::is_ours(&error), |()| true);
        if !there {
            self.forget();
        }
        there
    }
    /// A connection: an idle one that is still open, which comes with `true`, or a new one.
    pub(super) async fn connection(&self, fresh: bool) -> io::Result<(Wire, bool)> {
        // The lock must not be held while the socket is looked at.
        let pop = || if fresh { None } else { self.idle.lock().pop() };
        while let Some((mut wire, since)) = pop() {
            if since.elapsed() < MAX_AGE && wire.is_open() {
                return Ok((wire, true));
            }
        }
        Ok((self.dial().await?, false))
    }
    /// Keeps a connection whose answer is complete.
    pub(super) fn give_back(&self, wire: Wire) {
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push((wire, Instant::now()));
        }
    }
    /// Closes connections that were not used for long, and those that the server closed.
    pub(crate) fn prune(&self) {
        self.idle.lock().retain_mut(|(wire, since)| since.elapsed() < MAX_AGE && wire.is_open());
    }
    /// Closes all idle connections: the engine they led to is gone.
    pub(crate) fn forget(&self) {
        // What comes back may be another version.
        self.lacks_responses.store(false, Ordering::Relaxed);
        let gone = std::mem::take(&mut *self.idle.lock());
        drop(gone);
    }

    async fn dial(&self) -> io::Result<Wire> {
        if let Some(relay) = self.relay.get() {
            return Ok(Wire::new(Stream::Relayed(Box::new(relay.open()))));
        }
        // Seldom needed, and large: every request would carry the room for it.
        Ok(Wire::new(Box::pin(self.target.dial(DIAL)).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_with_and_without_port_prefix_and_v1_are_understood() {
        for (url, host, port, path) in [
            ("http://127.0.0.1:9001", "127.0.0.1", 9001, "/v1/x"),
            ("http://engine/", "engine", 80, "/v1/x"),
            ("https://engine/v1", "engine", 443, "/v1/x"),
            ("http://engine:1/v1/", "engine", 1, "/v1/x"),
            ("http://engine:1/a/b/v1", "engine", 1, "/a/b/v1/x"),
            ("http://[::1]:9001/a/", "::1", 9001, "/a/v1/x"),
        ] {
            let endpoint = Endpoint::parse(url).unwrap();
            assert_eq!(endpoint.target.place(), (host, port), "{url}");
            let mut line = Vec::new();
            endpoint.write_line(&mut line, "/v1/x");
            let line = String::from_utf8(line).unwrap();
            assert!(line.starts_with(&format!("POST {path} HTTP/1.1\r\nhost: ")), "{url}: {line}");
        }
    }

    #[test]
    fn other_urls_are_refused_in_words() {
        for url in
            ["", "127.0.0.1:9001", "ftp://h", "http://u:p@h:1", "http://h/?x=1", "http://", "a b", "http://h:99999"]
        {
            let Err(error) = Endpoint::parse(url) else { panic!("{url} was accepted") };
            assert!(error.contains(&format!("{:?}", shown(url))), "{error}");
        }
    }
}
