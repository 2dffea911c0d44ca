//! What a user names as a seed, and the addresses it stands for at this moment (M6).

use std::fmt;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::address;
use crate::error::{Error, Result};
use crate::net::transport::Transport;
use crate::shown::shown;

const FILE: &str = "file://";
const SERVICE: &str = "k8s://";
/// Largest file of seeds, in bytes: some thousand lines.
const MAX_FILE: u64 = 1 << 20;
/// Longest path that Linux opens, in bytes (PATH_MAX less its final zero).
const MAX_PATH: usize = 4095;
/// A name that does not resolve within this time counts as away; the next round asks again.
const LOOKUP_LIMIT: Duration = Duration::from_secs(5);

/// One seed: `host:port`, `k8s://service.namespace:port`, or `file:///path` of a file with one of those a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seed {
    text: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// A host name or address, and a port. All addresses of a name count.
    Place(String),
    File(PathBuf),
}

impl Seed {
    /// Reads one seed; names are not looked up and files are not opened.
    ///
    /// # Errors
    /// `InvalidAddress` for what no waiting makes a seed.
    pub fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        let invalid = |reason: &str| Error::InvalidAddress { value: text.to_owned(), reason: reason.to_owned() };
        let kind = if let Some(path) = text.strip_prefix(FILE) {
            if !path.starts_with('/') {
                return Err(invalid("the path of a file of seeds is absolute, as in file:///etc/pulsing/seeds"));
            }
            if path.len() > MAX_PATH {
                return Err(invalid(&format!("a path has {MAX_PATH} bytes at most")));
            }
            if path.contains(char::is_control) {
                return Err(invalid("there is a control character in the path"));
            }
            Kind::File(PathBuf::from(path))
        } else if let Some(service) = text.strip_prefix(SERVICE) {
            Kind::Place(service_place(service).map_err(|reason| invalid(&reason))?)
        } else if let Some((scheme, _)) = text.split_once("://") {
            return Err(invalid(&format!(
                "{}:// is no kind of seed; there are host:port, k8s://service.namespace:port and file:///path",
                scheme.chars().take(16).collect::<String>().escape_debug()
            )));
        } else {
            Kind::Place(text.to_owned())
        };
        if let Kind::Place(place) = &kind {
            let (_, port) = address::parts(place).map_err(|reason| invalid(&reason))?;
            if port == 0 {
                return Err(invalid("nobody listens on port 0; give the port that the seed has"));
            }
        }
        Ok(Self { text: text.to_owned(), kind })
    }

    /// Whether its nodes stand in a file.
    pub fn is_file(&self) -> bool {
        matches!(self.kind, Kind::File(_))
    }

    /// Whether asking again may give other addresses.
    pub(super) fn may_change(&self) -> bool {
        match &self.kind {
            Kind::Place(place) => place.parse::<SocketAddr>().is_err(),
            Kind::File(_) => true,
        }
    }

    /// The `host:port`s that it stands for; a file is read.
    ///
    /// # Errors
    /// `InvalidAddress` naming the file and the line, or why the file cannot be read.
    pub fn places(&self) -> Result<Vec<String>> {
        let path = match &self.kind {
            Kind::Place(place) => return Ok(vec![place.clone()]),
            Kind::File(path) => path,
        };
        let invalid = |reason: String| Error::InvalidAddress { value: self.text.clone(), reason };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(|e| invalid(format!("the file cannot be opened: {e}")))?;
        file.take(MAX_FILE + 1)
            .read_to_string(&mut text)
            .map_err(|e| invalid(format!("the file cannot be read: {e}")))?;
        if text.len() as u64 > MAX_FILE {
            return Err(invalid(format!("the file is over {MAX_FILE} bytes: that is no list of seeds")));
        }
        let mut places = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let bad = |reason: String| invalid(format!("line {}, {}: {reason}", number + 1, shown(line)));
            match Self::parse(line) {
                Ok(Self { kind: Kind::Place(place), .. }) => places.push(place),
                Ok(_) => return Err(bad("a file of seeds names no other file".to_owned())),
                Err(Error::InvalidAddress { reason, .. }) => return Err(bad(reason)),
                Err(error) => return Err(bad(error.to_string())),
            }
        }
        if places.is_empty() {
            return Err(invalid("the file names no node yet".to_owned()));
        }
        Ok(places)
    }

    /// The addresses that it stands for at this moment, at least one.
    ///
    /// # Errors
    /// `InvalidAddress` when the file, or each of its names, gives none.
    pub(super) async fn resolve(&self, transport: &Transport) -> Result<Vec<SocketAddr>> {
        let places = match &self.kind {
            Kind::Place(place) => vec![place.clone()],
            Kind::File(_) => {
                let seed = self.clone();
                let read = tokio::task::spawn_blocking(move || seed.places()).await;
                read.map_err(|e| Error::Config(e.to_string()))??
            }
        };
        let mut found = Vec::new();
        let mut failure = None;
        for place in places {
            match tokio::time::timeout(LOOKUP_LIMIT, address::resolve(&place, transport)).await {
                Ok(Ok(addrs)) => {
                    for addr in addrs.into_iter().flat_map(dialled) {
                        if !found.contains(&addr) {
                            found.push(addr);
                        }
                    }
                }
                Ok(Err(error)) => failure = Some(error),
                Err(_) => {
                    let reason = format!("its name did not resolve within {LOOKUP_LIMIT:?}");
                    failure = Some(Error::InvalidAddress { value: place, reason });
                }
            }
        }
        match failure {
            Some(error) if found.is_empty() => Err(error),
            _ => Ok(found),
        }
    }
}

/// The addresses that lead to `addr`. What a node listens on is often copied into a seed, and means this host when it is a
/// wildcard: no peer can be told apart by it, nor can the node that is asked see that it was asked from its own host.
fn dialled(addr: SocketAddr) -> Vec<SocketAddr> {
    let loopback: &[IpAddr] = match addr.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => &[IpAddr::V4(Ipv4Addr::LOCALHOST)],
        // Who listens on it hears both families; who listens on 0.0.0.0 hears one.
        IpAddr::V6(ip) if ip.is_unspecified() => &[IpAddr::V6(Ipv6Addr::LOCALHOST), IpAddr::V4(Ipv4Addr::LOCALHOST)],
        _ => return vec![addr],
    };
    loopback.iter().map(|ip| SocketAddr::new(*ip, addr.port())).collect()
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The DNS name of a Kubernetes service. The resolver of every pod completes `service.namespace.svc` with the domain of its
/// cluster; of a service without a namespace it looks in the pod's own.
fn service_place(service: &str) -> std::result::Result<String, String> {
    let expected = "expected k8s://service.namespace:port";
    let (name, port) = service.split_once(':').ok_or_else(|| format!("the port is missing; {expected}"))?;
    let label = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if !name.split('.').all(label) || name.parse::<IpAddr>().is_ok() {
        return Err(format!("{} is no name of a service; {expected}", shown(name)));
    }
    let dots = name.matches('.').count();
    Ok(if dots == 1 { format!("{name}.svc:{port}") } else { format!("{name}:{port}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> String {
        Seed::parse(text).unwrap().places().unwrap().join(" ")
    }

    #[test]
    fn test_m6_a_service_is_the_name_that_its_pods_resolve() {
        assert_eq!(place("k8s://pulsing.serving:8000"), "pulsing.serving.svc:8000");
        assert_eq!(place("k8s://pulsing:8000"), "pulsing:8000");
        assert_eq!(place("k8s://pulsing.serving.svc.cluster.local:8000"), "pulsing.serving.svc.cluster.local:8000");
        assert_eq!(place(" router-host:8000 "), "router-host:8000");
        assert_eq!(place("[::1]:8000"), "[::1]:8000");
    }

    #[test]
    fn test_m6_what_can_be_no_seed_says_why() {
        for (text, words) in [
            ("srv://x:1", "srv:// is no kind of seed; there are host:port, k8s://"),
            ("http://x:1", "http:// is no kind of seed"),
            ("k8s://pulsing", "the port is missing; expected k8s://service.namespace:port"),
            ("k8s://a..b:1", "no name of a service"),
            ("k8s://10.0.0.1:80", "no name of a service"),
            ("file://seeds", "absolute"),
            ("host:0", "port 0"),
            (":8000", "the host is missing"),
            ("::1:8000", "brackets, as in [::1]:8000"),
            ("[fe80::1%eth0]:80", "link-local"),
            ("[fe80::1]:80", "link-local"),
            ("[::1]", "the port is missing"),
            ("[::1:80", "brackets"),
            ("a b:80", "white space"),
            ("a:80:90", "more than one colon"),
            ("2001:db8:0:0:0:0:0:1:80", "brackets, as in [2001:db8:0:0:0:0:0:1]:80"),
        ] {
            let error = Seed::parse(text).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn test_m6_what_no_host_and_no_path_can_be_is_not_waited_for() {
        let long = "x".repeat(100_000);
        for (text, words) in [
            ("a\u{1b}b:80".to_owned(), "control character in the host"),
            ("file:///etc/\u{1b}b".to_owned(), "control character in the path"),
            (format!("{long}:80"), "253 characters at most"),
            (format!("[{long}]:80"), "253 characters at most"),
            (format!("k8s://{long}:80"), "253 characters at most"),
            (format!("k8s://{long}_:80"), "no name of a service"),
            (format!("file:///{long}"), "4095 bytes at most"),
            (format!("{long}://a:80"), "is no kind of seed"),
            (format!("host:{long}"), "is no port"),
        ] {
            let error = Seed::parse(&text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            assert!(error.len() < 600 && !error.contains('\u{1b}'), "{error}");
        }
    }

    #[test]
    fn test_m6_a_file_has_one_seed_a_line() {
        let path = std::env::temp_dir().join(format!("pulsing-seeds-{}", std::process::id()));
        let seed = Seed::parse(&format!("file://{}", path.display())).unwrap();
        let reason = || seed.places().unwrap_err().to_string();
        assert!(reason().contains("cannot be opened"));
        std::fs::write(&path, "# all\n\n").unwrap();
        assert!(reason().contains("names no node yet"));
        std::fs::write(&path, "# all\n10.0.0.1:8000 # the first\r\n\n  k8s://a.b:1\n").unwrap();
        assert_eq!(seed.places().unwrap(), ["10.0.0.1:8000", "a.b.svc:1"]);
        for (text, words) in
            [("a:1\nb", "line 2, \"b\": the port is missing"), ("file:///x", "line 1, \"file:///x\": a file of seeds")]
        {
            std::fs::write(&path, text).unwrap();
            assert!(reason().contains(words), "{}", reason());
        }
        std::fs::remove_file(&path).unwrap();
    }
}
