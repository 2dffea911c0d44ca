//! What policies work out of a list of Workers once, not for every request.

use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;

use crate::pool::Worker;

/// Lists that are remembered: one for each model asked for, and some of which Workers were left out.
const LISTS: usize = 16;

/// One list of Workers, seen by numbers that lie side by side.
pub(super) struct View {
    /// Does not keep the Workers, but their place in memory, so that no other list can be taken for this one.
    of: Weak<[Arc<Worker>]>,
    /// For hashing, in the order of the list.
    pub(super) seeds: Box<[u64]>,
    /// Cache number and place in the list, by number.
    caches: Box<[(u32, u32)]>,
}

impl View {
    fn new(workers: &Arc<[Arc<Worker>]>) -> Self {
        let mut caches: Vec<(u32, u32)> =
            (0_u32..).zip(workers.iter()).map(|(at, worker)| (worker.cache(), at)).collect();
        caches.sort_unstable();
        Self {
            of: Arc::downgrade(workers),
            seeds: workers.iter().map(|worker| worker.seed()).collect(),
            caches: caches.into(),
        }
    }
    /// Where in the list the Worker with this cache stands.
    pub(super) fn with_cache(&self, cache: u32) -> Option<usize> {
        let at = self.caches.binary_search_by_key(&cache, |(cache, _)| *cache).ok()?;
        Some(self.caches[at].1 as usize)
    }
}

/// The views made last.
pub(super) struct Views(ArcSwap<Vec<Arc<View>>>);

impl Default for Views {
    fn default() -> Self {
        Self(ArcSwap::from_pointee(Vec::new()))
    }
}

impl Views {
    pub(super) fn of(&self, workers: &Arc<[Arc<Worker>]>) -> Arc<View> {
        let known = self.0.load();
        if let Some(view) = known.iter().find(|view| std::ptr::addr_eq(view.of.as_ptr(), Arc::as_ptr(workers))) {
            return Arc::clone(view);
        }
        let view = Arc::new(View::new(workers));
        // Two that make the same one at a time leave two; the older ones go first.
        let kept = known.iter().filter(|view| view.of.strong_count() > 0).take(LISTS - 1);
        self.0.store(Arc::new(std::iter::once(&view).chain(kept).cloned().collect()));
        view
    }
}
