//! Which Worker has which prompt blocks in its cache, as far as a Router can know.
//!
//! A table of 16-byte entries (block hash, Worker, time of last use) in buckets of eight, like a processor's cache: nobody
//! ever waits for anybody, what is full forgets what was used longest ago, and memory has a bound. It grows by doubling. An
//! entry that two writers garble, or that is lost while the table grows, costs one request a cache hit and nothing else.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

use arc_swap::{ArcSwap, ArcSwapOption};

/// Entries a bucket: two cache lines.
const WAYS: usize = 8;
/// Workers that are remembered for one block. More copies than that of a hot prefix do not help to place a request.
const HOLDERS: usize = 4;
/// Bytes an entry.
const ENTRY: usize = size_of::<Entry>();
/// Entries to begin with: 64 KiB.
const FIRST: usize = 4096;

#[derive(Default)]
struct Entry {
    /// Block hash; 0 = free.
    hash: AtomicU64,
    /// Worker in the upper half, time of last use in the lower.
    held: AtomicU64,
}

impl Entry {
    fn worker(&self) -> u32 {
        (self.held.load(Relaxed) >> 32) as u32
    }
    fn age(&self, now: u32) -> u32 {
        now.wrapping_sub(self.held.load(Relaxed) as u32)
    }
    fn set(&self, hash: u64, worker: u32, now: u32) {
        self.held.store(u64::from(worker) << 32 | u64::from(now), Relaxed);
        self.hash.store(hash, Relaxed);
    }
}

struct Table {
    entries: Box<[Entry]>,
    /// Entries in use. Writers that meet in one entry may leave it off by one.
    filled: AtomicI64,
}

impl Table {
    fn new(size: usize) -> Self {
        Self { entries: (0..size).map(|_| Entry::default()).collect(), filled: AtomicI64::new(0) }
    }
    fn bucket(&self, hash: u64) -> &[Entry] {
        // The upper bits: chains differ in all of them.
        let buckets = self.entries.len() / WAYS;
        let at = (hash >> 32) as usize % buckets * WAYS;
        &self.entries[at..at + WAYS]
    }
    fn filled(&self) -> usize {
        self.filled.load(Relaxed).max(0) as usize
    }
    fn free(&self, entry: &Entry) {
        if entry.hash.swap(0, Relaxed) != 0 {
            self.filled.fetch_sub(1, Relaxed);
        }
    }
    fn remove(&self, hash: u64, worker: u32) {
        for entry in self.bucket(hash) {
            if entry.hash.load(Relaxed) == hash && entry.worker() == worker {
                self.free(entry);
            }
        }
    }
    fn insert(&self, hash: u64, worker: u32, now: u32) {
        let bucket = self.bucket(hash);
        let (mut free, mut oldest, mut oldest_holder) = (None, &bucket[0], None::<&Entry>);
        let mut holders = 0;
        for entry in bucket {
            let held = entry.hash.load(Relaxed);
            if held == 0 {
                free.get_or_insert(entry);
                continue;
            }
            if held == hash {
                if entry.worker() == worker {
                    entry.set(hash, worker, now);
                    return;
                }
                holders += 1;
                if oldest_holder.is_none_or(|oldest| entry.age(now) > oldest.age(now)) {
                    oldest_holder = Some(entry);
                }
            }
            if entry.age(now) > oldest.age(now) {
                oldest = entry;
            }
        }
        match (oldest_holder, free) {
            (Some(holder), _) if holders >= HOLDERS => holder.set(hash, worker, now),
            (_, Some(free)) => {
                free.set(hash, worker, now);
                self.filled.fetch_add(1, Relaxed);
            }
            _ => oldest.set(hash, worker, now),
        }
    }
}

/// The table of one Router.
pub(crate) struct Index {
    table: ArcSwap<Table>,
    /// The next one, while it is being filled.
    next: ArcSwapOption<Table>,
    /// Entries at most.
    limit: usize,
    growing: AtomicBool,
    clock: AtomicU32,
}

impl Index {
    /// At most `bytes` of entries, rounded down to a power of two; 64 KiB at least. While it grows, half as much again.
    pub(crate) fn new(bytes: usize) -> Self {
        let limit = (bytes / ENTRY).max(FIRST);
        let limit = if limit.is_power_of_two() { limit } else { limit.next_power_of_two() / 2 };
        Self {
            table: ArcSwap::from_pointee(Table::new(FIRST)),
            next: ArcSwapOption::empty(),
            limit,
            growing: AtomicBool::new(false),
            clock: AtomicU32::new(0),
        }
    }

    /// `worker` has these blocks, or will have them soon.
    pub(crate) fn insert(self: &Arc<Self>, chain: &[u64], worker: u32) {
        if chain.is_empty() {
            return;
        }
        let now = self.clock.fetch_add(1, Relaxed);
        let (table, next) = (self.table.load(), self.next.load());
        for hash in chain {
            table.insert((*hash).max(1), worker, now);
            if let Some(next) = &*next {
                next.insert((*hash).max(1), worker, now);
            }
        }
        let size = table.entries.len();
        // Beyond that buckets begin to overflow.
        if table.filled() > size / 2 && size < self.limit && !self.growing.swap(true, Relaxed) {
            let index = Arc::clone(self);
            // Copying a large table takes milliseconds, which no request should wait for.
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || index.grow())),
                Err(_) => index.grow(),
            }
        }
    }

    /// `worker` has these blocks no longer. One that is removed while the table grows may stay.
    pub(crate) fn remove(&self, blocks: &[u64], worker: u32) {
        let (table, next) = (self.table.load(), self.next.load());
        for hash in blocks {
            table.remove((*hash).max(1), worker);
            if let Some(next) = &*next {
                next.remove((*hash).max(1), worker);
            }
        }
    }

    /// Calls `each` with the Workers that have the blocks of `chain`, block by block, and how many blocks that makes; ends
    /// where it says that nobody it wants has several blocks in a row. Single blocks may have been forgotten.
    pub(crate) fn walk(&self, chain: &[u64], mut each: impl FnMut(u32, usize) -> bool) {
        const GAP: usize = 4;
        let table = self.table.load();
        let mut missing = 0;
        for (at, hash) in chain.iter().enumerate() {
            let hash = (*hash).max(1);
            let mut found = false;
            for entry in table.bucket(hash) {
                if entry.hash.load(Relaxed) == hash {
                    found |= each(entry.worker(), at + 1);
                }
            }
            missing = if found { 0 } else { missing + 1 };
            if missing > GAP {
                return;
            }
        }
    }

    /// Frees what Workers have that `gone` names.
    pub(crate) fn forget(&self, gone: impl Fn(u32) -> bool) {
        let table = self.table.load();
        for entry in &table.entries {
            if entry.hash.load(Relaxed) != 0 && gone(entry.worker()) {
                table.free(entry);
            }
        }
    }

    /// Entries in use.
    pub(crate) fn blocks(&self) -> usize {
        self.table.load().filled()
    }
    /// Bytes it takes now.
    pub(crate) fn bytes(&self) -> usize {
        self.table.load().entries.len() * ENTRY
    }
    /// Entries of each Worker. Looks at all of them.
    pub(crate) fn holdings(&self) -> HashMap<u32, usize> {
        let mut holdings = HashMap::new();
        for entry in &self.table.load().entries {
            if entry.hash.load(Relaxed) != 0 {
                *holdings.entry(entry.worker()).or_insert(0) += 1;
            }
        }
        holdings
    }

    fn grow(&self) {
        let old = self.table.load_full();
        let new = Arc::new(Table::new(old.entries.len() * 2));
        self.next.store(Some(Arc::clone(&new)));
        for entry in &old.entries {
            let hash = entry.hash.load(Relaxed);
            if hash != 0 {
                new.insert(hash, entry.worker(), entry.held.load(Relaxed) as u32);
            }
        }
        self.table.store(new);
        self.next.store(None);
        self.growing.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(seed: u64, blocks: u64) -> Vec<u64> {
        // As far apart as hashes are.
        (0..blocks).map(|at| xxhash_rust::xxh3::xxh3_64(&[seed.to_le_bytes(), at.to_le_bytes()].concat())).collect()
    }
    fn depth(index: &Index, chain: &[u64], worker: u32) -> usize {
        let mut depth = 0;
        index.walk(chain, |holder, blocks| {
            if holder == worker {
                depth = blocks;
            }
            holder == worker
        });
        depth
    }

    #[test]
    fn it_knows_who_has_how_much_of_a_prompt() {
        let index = Arc::new(Index::new(1 << 20));
        let prompt = chain(1, 20);
        index.insert(&prompt[..12], 7);
        index.insert(&prompt, 8);
        assert_eq!([7, 8, 9].map(|worker| depth(&index, &prompt, worker)), [12, 20, 0]);
        assert_eq!(depth(&index, &chain(2, 20), 7), 0);
        assert_eq!((index.blocks(), index.holdings()[&7]), (32, 12));
        index.forget(|worker| worker == 7);
        assert_eq!((depth(&index, &prompt, 7), index.blocks(), index.holdings()[&8]), (0, 20, 20));
    }

    #[test]
    fn what_a_worker_has_no_longer_is_forgotten_of_that_worker_alone() {
        let index = Arc::new(Index::new(1 << 20));
        let prompt = chain(1, 20);
        index.insert(&prompt, 7);
        index.insert(&prompt, 8);
        index.remove(&prompt[5..], 7);
        index.remove(&chain(2, 3), 8);
        assert_eq!([7, 8].map(|worker| depth(&index, &prompt, worker)), [5, 20]);
        assert_eq!(index.blocks(), 25);
    }

    #[test]
    fn it_keeps_to_its_budget_and_forgets_the_longest_unused() {
        const BUDGET: usize = 1 << 20;
        let index = Arc::new(Index::new(BUDGET));
        let hot = chain(0, 32);
        for prompt in 1..=20_000 {
            index.insert(&chain(prompt, 16), prompt as u32);
            if prompt % 50 == 0 {
                index.insert(&hot, 1);
            }
        }
        assert_eq!(index.bytes(), BUDGET);
        assert!(index.blocks() <= BUDGET / ENTRY && index.blocks() > BUDGET / ENTRY / 10 * 9, "{}", index.blocks());
        assert!(depth(&index, &hot, 1) == 32, "what is in use stays");
        assert_eq!(depth(&index, &chain(1, 16), 1), 0, "what is not goes");
        assert!(depth(&index, &chain(19_999, 16), 19_999) >= 15, "the latest is there");
    }

    #[test]
    fn a_prefix_that_all_have_does_not_push_out_others() {
        let index = Arc::new(Index::new(0));
        let hot = chain(0, 1);
        for worker in 0..1000 {
            index.insert(&hot, worker);
        }
        assert_eq!(index.blocks(), HOLDERS);
        assert!((996..1000).all(|worker| depth(&index, &hot, worker) == 1), "the latest are known");
    }

    #[test]
    fn readers_and_writers_share_it_while_it_grows() {
        let index = Arc::new(Index::new(4 << 20));
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let index = &index;
                scope.spawn(move || {
                    for prompt in 0..2000 {
                        let chain = chain(u64::from(thread) << 32 | prompt, 16);
                        index.insert(&chain, thread);
                        depth(index, &chain, thread);
                    }
                });
            }
        });
        assert!(index.bytes() > FIRST * ENTRY);
        // In a rush that outruns its growth it forgets; at any other time it does not.
        let all = || (0..4_u32).flat_map(|thread| (0..2000).map(move |prompt| (thread, prompt)));
        for (thread, prompt) in all() {
            index.insert(&chain(u64::from(thread) << 32 | prompt, 16), thread);
        }
        let known = all()
            .filter(|(thread, prompt)| depth(&index, &chain(u64::from(*thread) << 32 | prompt, 16), *thread) == 16)
            .count();
        assert!(known > 7500, "{known} of 8000 prompts are known");
    }
}
