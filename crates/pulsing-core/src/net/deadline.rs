//! One timer task for all deadlines of a node: a call costs a map entry, not a task.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

type Action = Box<dyn FnOnce() + Send>;
/// Names one pending deadline.
pub type DeadlineKey = (Instant, u64);

/// Pending deadlines. Dropping the last handle ends the timer task.
pub struct Deadlines(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    earlier: Notify,
}

#[derive(Default)]
struct State {
    closed: bool,
    next: u64,
    pending: BTreeMap<DeadlineKey, Action>,
}

impl Deadlines {
    /// Starts the timer task on the current runtime.
    pub fn start() -> Self {
        let shared = Arc::new(Shared { state: Mutex::default(), earlier: Notify::new() });
        tokio::spawn(run(Arc::downgrade(&shared)));
        Self(shared)
    }
    /// Runs `action` at `at` unless removed before. It must not block.
    pub fn insert(&self, at: Instant, action: impl FnOnce() + Send + 'static) -> DeadlineKey {
        let mut state = self.0.state.lock();
        state.next += 1;
        let key = (at, state.next);
        let first = state.pending.first_key_value().is_none_or(|(k, _)| key < *k);
        state.pending.insert(key, Box::new(action));
        drop(state);
        if first {
            self.0.earlier.notify_one();
        }
        key
    }
    /// Forgets a deadline.
    pub fn remove(&self, key: DeadlineKey) {
        // The action may hold what must not be dropped under the lock.
        let action = self.0.state.lock().pending.remove(&key);
        drop(action);
    }
}

impl Drop for Deadlines {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.earlier.notify_one();
    }
}

async fn run(shared: Weak<Shared>) {
    while let Some(strong) = shared.upgrade() {
        let now = Instant::now();
        let (due, next) = {
            let mut state = strong.state.lock();
            if state.closed {
                return;
            }
            let later = state.pending.split_off(&(now, u64::MAX));
            let due = std::mem::replace(&mut state.pending, later);
            (due, state.pending.first_key_value().map(|(k, _)| k.0))
        };
        for action in due.into_values() {
            action();
        }
        let earlier = strong.earlier.notified();
        match next {
            Some(at) => {
                tokio::select! {
                    biased;
                    () = tokio::time::sleep_until(at) => {}
                    () = earlier => {}
                }
            }
            None => earlier.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn actions_run_in_order_and_removed_ones_do_not() {
        let deadlines = Deadlines::start();
        let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
        let now = Instant::now();
        let mut keys = Vec::new();
        for ms in [40u64, 10, 30, 20] {
            let tx = tx.clone();
            keys.push(deadlines.insert(now + Duration::from_millis(ms), move || tx.send(ms).unwrap()));
        }
        deadlines.remove(keys[2]);
        let mut got = Vec::new();
        for _ in 0..3 {
            got.push(rx.recv().await.unwrap());
        }
        assert_eq!(got, [10, 20, 40]);
    }
}
