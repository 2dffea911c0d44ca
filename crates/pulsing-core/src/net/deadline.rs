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
    /// When the task looks again by itself; `None`: it waits to be told.
    armed: Option<Instant>,
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
        state.pending.insert(key, Box::new(action));
        // Most deadlines are removed long before they are due. The task is not woken for the first of an empty table, nor
        // to forget one: it looks when the earliest it has heard of would be due, in vain at times.
        let earlier = state.armed.is_none_or(|armed| at < armed);
        if earlier {
            state.armed = Some(at);
        }
        drop(state);
        if earlier {
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
            state.armed = state.pending.first_key_value().map(|(k, _)| k.0);
            (due, state.armed)
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

    #[tokio::test(start_paused = true)]
    async fn the_task_is_told_of_an_earlier_deadline_only_and_misses_none() {
        let deadlines = Deadlines::start();
        let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
        let began = Instant::now();
        let after = |ms: u64| {
            let tx = tx.clone();
            deadlines
                .insert(began + Duration::from_millis(ms), move || tx.send((ms, began.elapsed().as_millis())).unwrap())
        };
        let looks_at = || deadlines.0.state.lock().armed.map(|at| (at - began).as_millis());
        // Calls that come and go, one at a time, leave the task alone.
        for ms in [100, 110, 120] {
            let key = after(ms);
            assert_eq!(looks_at(), Some(100));
            deadlines.remove(key);
        }
        // Later than what it looks at, and found when it does.
        after(300);
        assert_eq!(looks_at(), Some(100));
        tokio::time::sleep(Duration::from_millis(150)).await;
        assert_eq!(looks_at(), Some(300));
        after(200);
        assert_eq!(looks_at(), Some(200));
        assert_eq!(rx.recv().await.unwrap(), (200, 200));
        assert_eq!(rx.recv().await.unwrap(), (300, 300));
        assert_eq!(looks_at(), None);
        after(400);
        assert_eq!(rx.recv().await.unwrap(), (400, 400));
    }
}
