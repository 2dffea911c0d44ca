//! Who was turned away, in the log: once for each peer and reason, however often it comes back.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How long one line stands for all that follow of its kind.
const QUIET: Duration = Duration::from_secs(60);
/// Peers and kinds remembered at once; a flood of addresses is one line a minute beyond that.
const MOST: usize = 1024;

/// Why a peer was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Its TLS handshake failed.
    Tls,
    /// It spoke without TLS where there is some.
    Plaintext,
    /// It spoke TLS where there is none.
    TlsToPlaintext,
    /// It is not whom this node talks to.
    Handshake,
    /// What it sent is nothing that this port understands.
    Garbage,
    /// It did not say in time what it is.
    Dawdling,
    /// It held too many connections without saying what they are.
    Crowding,
}

struct Said {
    at: Instant,
    /// How often since.
    more: u64,
}

/// The memory of one listener.
#[derive(Default)]
pub struct Refusals(Mutex<Memory>);

#[derive(Default)]
struct Memory {
    said: HashMap<(IpAddr, Kind), Said>,
    /// The line for all that there is no room for.
    overflow: Option<Said>,
}

impl Refusals {
    /// Logs it, unless a line of the last minute stands for it.
    pub fn note(&self, from: SocketAddr, kind: Kind, reason: &str) {
        if let Some(more) = self.due(from.ip(), kind, Instant::now()) {
            if more > 0 {
                tracing::warn!(%from, reason, "a peer was refused, as {more} times since this was last said");
            } else {
                tracing::warn!(%from, reason, "a peer was refused");
            }
        }
    }

    /// How many went unsaid before one that is to be said; `None` for one that is not.
    fn due(&self, from: IpAddr, kind: Kind, now: Instant) -> Option<u64> {
        let mut memory = self.0.lock();
        let Memory { said, overflow } = &mut *memory;
        if said.len() >= MOST && !said.contains_key(&(from, kind)) {
            said.retain(|_, said| now.duration_since(said.at) < QUIET);
        }
        let full = said.len() >= MOST;
        let last = match said.get_mut(&(from, kind)) {
            Some(last) => last,
            None if full && overflow.is_some() => overflow.as_mut()?,
            None => {
                let first = Said { at: now, more: 0 };
                if full {
                    *overflow = Some(first);
                } else {
                    said.insert((from, kind), first);
                }
                return Some(0);
            }
        };
        if now.duration_since(last.at) < QUIET {
            last.more += 1;
            return None;
        }
        last.at = now;
        Some(std::mem::take(&mut last.more))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_peer_is_told_of_once_a_minute_for_each_kind() {
        let refusals = Refusals::default();
        let (one, other) = (IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));
        let start = Instant::now();
        assert_eq!(refusals.due(one, Kind::Garbage, start), Some(0));
        assert_eq!(refusals.due(one, Kind::Garbage, start), None);
        assert_eq!(refusals.due(one, Kind::Tls, start), Some(0));
        assert_eq!(refusals.due(other, Kind::Garbage, start), Some(0));
        assert_eq!(refusals.due(one, Kind::Garbage, start + QUIET / 2), None);
        assert_eq!(refusals.due(one, Kind::Garbage, start + QUIET), Some(2), "and says how many there were");
        assert_eq!(refusals.due(one, Kind::Garbage, start + QUIET * 2), Some(0));
    }

    #[test]
    fn a_flood_of_addresses_takes_neither_memory_nor_the_log() {
        let refusals = Refusals::default();
        let start = Instant::now();
        let flood = |from: u32, at| {
            (from..from + 100_000)
                .filter(|n| refusals.due(IpAddr::V4(Ipv4Addr::from(*n)), Kind::Tls, at).is_some())
                .count()
        };
        assert_eq!(flood(0, start), MOST + 1);
        assert_eq!(refusals.0.lock().said.len(), MOST);
        // A minute later there is room again.
        assert_eq!(flood(1 << 20, start + QUIET * 2), MOST + 1);
        assert_eq!(refusals.0.lock().said.len(), MOST);
    }
}
