//! The Worker that has most of the prompt in its cache already.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::index::Index;
use super::load::{Balance, survey};
use super::view::{View, Views};
use super::{Choice, Hints, IndexSize, Policy, Why};
use crate::pool::Worker;
use crate::protocol::BlockNews;

/// Workers compared for one prompt.
const COMPARED: usize = 8;

/// The Worker that has the longest prefix of this prompt in its cache, as far as it tells; one that does not tell has what it was
/// sent. When that one is full or far above its share of the
/// load, the next best; when all who know the prompt are, the least loaded, who knows it from then on: so hot prefixes come
/// to be on as many Workers as it takes. An unknown prompt goes by load.
pub(super) struct CacheAware {
    index: Arc<Index>,
    balance: Balance,
    views: Views,
}

impl CacheAware {
    pub(super) fn new(bytes: usize, balance: Balance) -> Self {
        Self { index: Arc::new(Index::new(bytes)), balance, views: Views::default() }
    }

    fn holders(&self, view: &View, prefix: &[u64]) -> Holders {
        let mut holders = Holders::default();
        self.index.walk(prefix, |cache, blocks| holders.note(view, cache, blocks));
        holders
    }
}

impl Policy for CacheAware {
    fn pick(&self, workers: &Arc<[Arc<Worker>]>, hints: Hints<'_>) -> Choice {
        let now = Instant::now();
        let survey = survey(workers, now);
        let blocks = hints.prefix.len();
        if blocks == 0 {
            return Choice { index: survey.least, why: Why::NoPrefix };
        }
        let holders = self.holders(&self.views.of(workers), hints.prefix);
        let Some(longest) = holders.known().map(|holder| holder.blocks).max() else {
            return Choice { index: survey.least, why: Why::Unknown { blocks } };
        };
        let best = holders
            .known()
            .filter(|holder| !self.balance.is_over(&workers[holder.index], survey.mean, now))
            .max_by(|one, other| {
                let rank = |holder: &Holder| {
                    let worker = &workers[holder.index];
                    (-worker.pressure_at(now), -worker.kv_usage())
                };
                let by_load = || rank(one).partial_cmp(&rank(other)).unwrap_or(std::cmp::Ordering::Equal);
                one.blocks.cmp(&other.blocks).then_with(by_load)
            });
        match best {
            Some(best) => Choice { index: best.index, why: Why::Prefix { matched: best.blocks, blocks } },
            None => Choice { index: survey.least, why: Why::Unbalanced { matched: longest, blocks } },
        }
    }

    fn sent(&self, worker: &Worker, hints: Hints<'_>) {
        self.index.insert(hints.prefix, worker.cache());
    }
    fn wants_prefix(&self) -> bool {
        true
    }
    fn wants_news(&self) -> bool {
        true
    }
    fn told(&self, worker: &Worker, news: &BlockNews) {
        self.index.remove(&news.dropped, worker.cache());
        self.index.insert(&news.stored, worker.cache());
    }
    fn keep(&self, workers: &[Arc<Worker>]) {
        let kept: HashSet<u32> = workers.iter().map(|worker| worker.cache()).collect();
        self.index.forget(|cache| !kept.contains(&cache));
    }
    fn index(&self) -> Option<IndexSize> {
        Some(IndexSize { blocks: self.index.blocks(), bytes: self.index.bytes() })
    }
    fn holdings(&self) -> HashMap<u32, usize> {
        self.index.holdings()
    }
}

#[derive(Clone, Copy, Default)]
struct Holder {
    cache: u32,
    index: usize,
    blocks: usize,
}

/// The Workers of the list that know most of a prompt.
#[derive(Default)]
struct Holders {
    holders: [Holder; COMPARED],
    count: usize,
    /// Of another list, or gone: the last one seen.
    foreign: u32,
}

impl Holders {
    fn known(&self) -> impl Iterator<Item = &Holder> {
        self.holders[..self.count].iter()
    }
    /// `cache` has `blocks` of it. False if that is nobody in the list.
    fn note(&mut self, view: &View, cache: u32, blocks: usize) -> bool {
        if let Some(holder) = self.holders[..self.count].iter_mut().find(|holder| holder.cache == cache) {
            holder.blocks = blocks;
            return true;
        }
        if self.foreign == cache {
            return false;
        }
        let Some(index) = view.with_cache(cache) else {
            self.foreign = cache;
            return false;
        };
        let new = Holder { cache, index, blocks };
        if self.count < COMPARED {
            self.holders[self.count] = new;
            self.count += 1;
        } else if let Some(shortest) = self.holders.iter_mut().min_by_key(|holder| holder.blocks) {
            *shortest = new;
        }
        true
    }
}
