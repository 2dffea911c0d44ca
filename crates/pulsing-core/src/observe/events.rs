//! What happens on a node, for observers who follow it as it does.

use std::sync::Arc;

use serde_json::Value;
use tokio::sync::broadcast;

/// How many events a slow observer may be behind before it is told that it missed some.
pub(super) const BACKLOG: usize = 256;

/// One thing that happened.
#[derive(Debug)]
pub struct Event {
    /// `member` or `actor`.
    pub kind: &'static str,
    /// What of it, as `/cluster/members` and `/actors` have it.
    pub data: Value,
}

/// The node's events, told to who follows them; nobody's past is kept.
#[derive(Debug)]
pub struct Events(broadcast::Sender<Arc<Event>>);

impl Default for Events {
    fn default() -> Self {
        Self(broadcast::Sender::new(BACKLOG))
    }
}

impl Events {
    /// Tells what happened. `data` is asked for only while somebody follows.
    pub fn tell(&self, kind: &'static str, data: impl FnOnce() -> Value) {
        if self.0.receiver_count() > 0 {
            // Who followed may just have gone.
            let _ = self.0.send(Arc::new(Event { kind, data: data() }));
        }
    }

    /// What happens from now on.
    pub(super) fn follow(&self) -> broadcast::Receiver<Arc<Event>> {
        self.0.subscribe()
    }
}
