//! The address of their own that observers may have: plain HTTP, whatever the cluster's security, and nothing else.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::link::LinkConfig;
use super::refusals::{Kind, Refusals};
use super::transport::Listener;
use crate::observe::{self, ObserveSource, Scope};
use crate::seldom::Seldom;

/// Answers until it is dropped; dropping it closes every accepted connection.
pub async fn run(listener: Listener, link: LinkConfig, source: Arc<dyn ObserveSource>) {
    let places = Arc::new(Semaphore::new(link.limits.observers.min(Semaphore::MAX_PERMITS)));
    let refusals = Arc::new(Refusals::default());
    let mut tasks = JoinSet::new();
    let mut failures = Seldom::default();
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely: pause instead of spinning.
                if let Some(more) = failures.due() {
                    tracing::warn!(%error, more, "cannot accept an observer; if too many files are open, raise `ulimit -n`");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        let (places, refusals, source) = (Arc::clone(&places), Arc::clone(&refusals), Arc::clone(&source));
        let metrics = Arc::clone(&link.metrics);
        tasks.spawn(async move {
            if let Some(reason) = observe::serve_within(stream, source, Scope::All, &places).await {
                metrics.refused.inc();
                refusals.note(from, Kind::Garbage, &reason);
            }
        });
    }
}
