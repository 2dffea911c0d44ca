//! Forgets the Workers that went.

use std::collections::HashSet;
use std::sync::Arc;

use super::Policy;
use crate::pool::Pool;

/// Tells `policy` who is there each time that somebody went. Ends with the pool.
pub(crate) fn tend(pool: &Arc<Pool>, policy: Arc<dyn Policy>) {
    let mut versions = pool.versions();
    let pool = Arc::downgrade(pool);
    tokio::spawn(async move {
        let mut known = HashSet::new();
        loop {
            let Some(snapshot) = pool.upgrade().map(|pool| pool.snapshot()) else { return };
            let here: HashSet<u32> = snapshot.all().iter().map(|worker| worker.cache()).collect();
            if known.iter().any(|cache| !here.contains(cache)) {
                let policy = Arc::clone(&policy);
                // It looks at every entry of the index.
                let told = tokio::task::spawn_blocking(move || policy.keep(snapshot.all()));
                if told.await.is_err() {
                    return;
                }
            }
            known = here;
            if versions.changed().await.is_err() {
                return;
            }
        }
    });
}
