//! Waiting for a node's members and names to change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::error::{Error, Result};

/// Counts what changes. Who waits hears of it in the order in which waiting began: tokio's `watch` wakes in a random one,
/// and then a seed would not repeat a run.
#[derive(Default)]
pub(super) struct Counted(Arc<Count>);

#[derive(Default)]
struct Count {
    number: AtomicU64,
    ended: AtomicBool,
    news: Notify,
}

impl Counted {
    /// One more.
    pub(super) fn add(&self) {
        self.0.number.fetch_add(1, Ordering::AcqRel);
        self.0.news.notify_waiters();
    }

    /// Waits for what comes from now on.
    pub(super) fn follow(&self) -> Changes {
        Changes { count: Arc::clone(&self.0), seen: self.0.number.load(Ordering::Acquire) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
        self.0.news.notify_waiters();
    }
}

/// Hears of changes of a node's members and names; see [`System::changes`](super::System::changes).
pub struct Changes {
    count: Arc<Count>,
    seen: u64,
}

impl Changes {
    /// Returns when something may have changed since the last return, or since this was made. What changed meanwhile
    /// comes as one change. It may be given up and called again: nothing is missed.
    ///
    /// # Errors
    /// `ShutDown` once the node is gone.
    pub async fn changed(&mut self) -> Result<()> {
        loop {
            let news = self.count.news.notified();
            let number = self.count.number.load(Ordering::Acquire);
            if number != self.seen {
                self.seen = number;
                return Ok(());
            }
            if self.count.ended.load(Ordering::Acquire) {
                return Err(Error::ShutDown);
            }
            news.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[tokio::test]
    async fn all_hear_of_a_change_in_the_order_in_which_they_began_to_wait() {
        let (counted, heard) = (Counted::default(), Arc::new(Mutex::new(Vec::new())));
        let waiting: Vec<_> = (0..50)
            .map(|n| {
                let (mut changes, heard) = (counted.follow(), Arc::clone(&heard));
                tokio::spawn(async move {
                    changes.changed().await.unwrap();
                    heard.lock().push(n);
                    changes.changed().await
                })
            })
            .collect();
        tokio::task::yield_now().await;
        counted.add();
        tokio::task::yield_now().await;
        assert_eq!(*heard.lock(), (0..50).collect::<Vec<_>>());
        drop(counted);
        for one in waiting {
            assert!(matches!(one.await.unwrap(), Err(Error::ShutDown)));
        }
    }

    #[tokio::test]
    async fn what_changes_while_nobody_waits_comes_as_one() {
        let counted = Counted::default();
        counted.add();
        let mut changes = counted.follow();
        counted.add();
        counted.add();
        changes.changed().await.unwrap();
        let more = tokio::time::timeout(std::time::Duration::from_millis(1), changes.changed());
        assert!(more.await.is_err());
    }
}
