//! Connections, and who goes when the process may open no more files.
//!
//! A client that waits for nothing holds a descriptor that a new one needs, or the connection to an engine. Those that have
//! been quiet the longest are closed then, as they would be later when their time is over.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pulsing_core::seldom::Seldom;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::net::TcpStream;
use tokio::task::{AbortHandle, Id, JoinSet};

use super::drain::{QUIET, Traffic};
use super::peer::{Peer, Stage};

/// How long nobody is looked for after nobody was found: with many connections it takes a while.
const PAUSE: Duration = Duration::from_millis(50);

/// What a connection shows of itself.
#[derive(Clone, Default)]
pub(super) struct Shown {
    pub(super) traffic: Arc<Traffic>,
    pub(super) peer: Arc<Peer>,
}

impl Shown {
    /// For how long it has had nothing to do, if that is long enough for it to go.
    fn idle(&self) -> Option<Duration> {
        // The end of an answer may still be on its way out.
        let done = self.peer.stage() == Stage::Idle;
        self.traffic.idle().filter(|quiet| done && *quiet >= QUIET)
    }
}

#[derive(Default)]
pub(super) struct Open {
    tasks: JoinSet<()>,
    all: HashMap<Id, (Shown, AbortHandle)>,
    said: Seldom,
    /// When nobody was found who could go.
    looked: Option<Instant>,
}

impl Open {
    pub(super) fn add(&mut self, shown: Shown, connection: impl Future<Output = ()> + Send + 'static) {
        let task = self.tasks.spawn(connection);
        self.all.insert(task.id(), (shown, task));
    }
    pub(super) fn count(&self) -> usize {
        self.tasks.len()
    }
    /// Returns when a connection has ended: false, and at once, where there is none.
    pub(super) async fn ended(&mut self) -> bool {
        let id = match self.tasks.join_next_with_id().await {
            None => return false,
            Some(Ok((id, ()))) => id,
            Some(Err(error)) => error.id(),
        };
        self.all.remove(&id);
        true
    }

    /// Looks at what came of an accept, and closes idle connections if there are hardly any descriptors left, or none:
    /// whether it is so.
    pub(super) fn make_room(&mut self, accepted: Result<&TcpStream, &io::Error>) -> bool {
        let limit = getrlimit(Resource::Nofile).current;
        // Each new connection may want another one to an engine, and logs are opened afresh.
        let spare = limit.map_or(256, |limit| (limit / 16).clamp(4, 256));
        let full = match accepted {
            // The lowest number that is free is the next.
            Ok(stream) => {
                limit.is_some_and(|limit| u64::try_from(stream.as_raw_fd()).is_ok_and(|fd| fd + spare >= limit))
            }
            Err(error) => {
                [Errno::MFILE, Errno::NFILE].iter().any(|full| error.raw_os_error() == Some(full.raw_os_error()))
            }
        };
        if !full || self.looked.is_some_and(|at| at.elapsed() < PAUSE) {
            return full;
        }
        let closed = self.dismiss(usize::try_from(spare).unwrap_or(usize::MAX));
        self.looked = (closed == 0).then(Instant::now);
        if let Some(more) = self.said.due() {
            let limit = limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
            tracing::warn!(
                %limit, connections = self.count(), closed, more,
                "hardly any file descriptors are left: the oldest idle connections are closed, and where there are none new clients wait; raise `ulimit -n`"
            );
        }
        true
    }

    /// Closes as many as `most`: how many it were.
    fn dismiss(&self, most: usize) -> usize {
        let mut idle: Vec<_> = self.all.values().filter_map(|(shown, task)| Some((shown.idle()?, task))).collect();
        idle.sort_unstable_by_key(|(quiet, _)| std::cmp::Reverse(*quiet));
        idle.truncate(most);
        idle.iter().for_each(|(_, task)| task.abort());
        idle.len()
    }
}
