//! Policies against Workers that exist on paper only.

use std::collections::BTreeMap;

use pulsing_core::{ActorId, Instance, NodeId, Target};

use super::*;
use crate::pool::Lease;

fn workers(count: usize) -> Arc<[Arc<Worker>]> {
    (0..count)
        .map(|number| {
            // As far apart as ids are.
            let id = xxhash_rust::xxh3::xxh3_128(&number.to_le_bytes());
            Arc::new(Worker::new(&Instance {
                name: "worker".into(),
                target: Target { node: NodeId(1), actor: ActorId(id) },
                addr: "127.0.0.1:1".into(),
                class: String::new(),
                metadata: BTreeMap::from([("protocol".into(), "1..1".into())]),
                unique: false,
            }))
        })
        .collect()
}
fn without(all: &Arc<[Arc<Worker>]>, gone: usize) -> Arc<[Arc<Worker>]> {
    all.iter().enumerate().filter(|(at, _)| *at != gone).map(|(_, worker)| Arc::clone(worker)).collect()
}
fn hold(worker: &Arc<Worker>, count: usize) -> Vec<Lease> {
    (0..count).map(|_| worker.lease()).collect()
}
fn build(kind: PolicyKind) -> Box<dyn Policy> {
    kind.build(PolicyOptions::default())
}
fn chain(seed: u64, blocks: u64) -> Vec<u64> {
    (0..blocks).map(|at| xxhash_rust::xxh3::xxh3_64(&[seed.to_le_bytes(), at.to_le_bytes()].concat())).collect()
}
fn keyed(key: &str) -> Hints<'_> {
    Hints { affinity: Some(key), ..Hints::default() }
}
fn prompt(prefix: &[u64]) -> Hints<'_> {
    Hints { prefix, ..Hints::default() }
}

#[test]
fn few_keys_move_when_a_worker_comes_or_goes() {
    const KEYS: usize = 2000;
    let policy = build(PolicyKind::ConsistentHash);
    let all = workers(10);
    let fewer = without(&all, 3);
    let mut moved = 0;
    for key in 0..KEYS {
        let key = format!("session {key}");
        let choice = policy.pick(&all, keyed(&key));
        assert_eq!(choice.why, Why::Home);
        let (one, other) = (&all[choice.index], &fewer[policy.pick(&fewer, keyed(&key)).index]);
        if choice.index == 3 {
            moved += 1;
        } else {
            assert!(Arc::ptr_eq(one, other), "{key} moved without need");
        }
    }
    assert!((KEYS / 20..KEYS / 5).contains(&moved), "{moved} of {KEYS} keys were on one of ten");
}

#[test]
fn a_conversations_worker_with_too_much_load_spills_to_the_next_in_rank() {
    let policy = build(PolicyKind::ConsistentHash);
    let all = workers(4);
    let home = policy.pick(&all, keyed("k")).index;
    let second = {
        let fewer = without(&all, home);
        Arc::clone(&fewer[policy.pick(&fewer, keyed("k")).index])
    };
    let held = hold(&all[home], 4);
    assert_eq!(
        policy.pick(&all, keyed("k")),
        Choice { index: home, why: Why::Home },
        "four more than its share are fine"
    );
    let more = hold(&all[home], 4);
    let choice = policy.pick(&all, keyed("k"));
    assert_eq!(choice.why, Why::Spilled { rank: 1 });
    assert!(Arc::ptr_eq(&all[choice.index], &second));
    let rest: Vec<_> = all.iter().map(|worker| hold(worker, 12)).collect();
    assert_eq!(policy.pick(&all, keyed("k")).index, home, "when all have much to do its share is more");
    drop((held, more, rest));
    assert_eq!(policy.pick(&all, Hints::default()).why, Why::NoKey);
}

#[test]
fn the_longest_known_prefix_wins_and_an_unknown_one_goes_by_load() {
    let policy = build(PolicyKind::CacheAware);
    let all = workers(3);
    let _busy = hold(&all[0], 1);
    let long = chain(1, 40);
    assert_eq!(policy.pick(&all, prompt(&long)).why, Why::Unknown { blocks: 40 });
    assert_eq!(policy.pick(&all, Hints::default()).why, Why::NoPrefix);
    policy.sent(&all[1], prompt(&long[..10]));
    policy.sent(&all[0], prompt(&long[..30]));
    assert_eq!(policy.pick(&all, prompt(&long)), Choice { index: 0, why: Why::Prefix { matched: 30, blocks: 40 } });
    assert_eq!(
        policy.pick(&all, prompt(&long[..10])),
        Choice { index: 1, why: Why::Prefix { matched: 10, blocks: 10 } }
    );
    // Of equals the less loaded.
    policy.sent(&all[2], prompt(&long[..30]));
    assert_eq!(policy.pick(&all, prompt(&long)).index, 2);
}

#[test]
fn a_hot_prefix_spreads_over_as_many_workers_as_it_takes() {
    let policy = build(PolicyKind::CacheAware);
    let all = workers(4);
    let hot = chain(1, 10);
    let mut held = Vec::new();
    for _ in 0..32 {
        let choice = policy.pick(&all, prompt(&hot));
        policy.sent(&all[choice.index], prompt(&hot));
        held.push(all[choice.index].lease());
    }
    let most = all.iter().map(|worker| worker.in_flight()).max();
    assert!(
        most <= Some(16),
        "twice the mean at most: {:?}",
        all.iter().map(|one| one.in_flight()).collect::<Vec<_>>()
    );
    drop(held);
    policy.sent(&all[0], prompt(&hot));
    policy.keep(&all[..1]);
    let held = hold(&all[0], 9);
    assert_eq!(policy.pick(&all, prompt(&hot)).why, Why::Unbalanced { matched: 10, blocks: 10 });
    drop(held);
}

#[test]
fn an_instance_that_went_takes_its_entries_with_it() {
    let policy = build(PolicyKind::CacheAware);
    let all = workers(3);
    let known = chain(1, 10);
    policy.sent(&all[0], prompt(&known));
    let left = without(&all, 0);
    assert_eq!(policy.pick(&left, prompt(&known)).why, Why::Unknown { blocks: 10 });
    assert_eq!((policy.index().map(|index| index.blocks), policy.holdings()[&all[0].cache()]), (Some(10), 10));
    policy.keep(&left);
    assert_eq!(policy.index().map(|index| index.blocks), Some(0));
}

#[test]
fn choices_among_thousands_are_as_good() {
    let all = workers(4000);
    let busy: Vec<_> = all.iter().take(2000).map(Worker::lease).collect();
    let policy = build(PolicyKind::CacheAware);
    let known = chain(1, 64);
    policy.sent(&all[1234], prompt(&known));
    assert_eq!(policy.pick(&all, prompt(&known)).index, 1234);
    for _ in 0..100 {
        assert!(policy.pick(&all, Hints::default()).index >= 2000, "a busy one was taken");
    }
    let hash = build(PolicyKind::ConsistentHash);
    let home = hash.pick(&all, keyed("k")).index;
    let fewer = without(&all, (home + 1) % 4000);
    assert!(Arc::ptr_eq(&all[home], &fewer[hash.pick(&fewer, keyed("k")).index]));
    drop(busy);
}

#[test]
fn views_are_of_the_list_they_were_made_of() {
    let policy = build(PolicyKind::CacheAware);
    let known = chain(1, 10);
    // Lists come and go at the same addresses.
    for round in 0..50 {
        let all = workers(3);
        policy.sent(&all[round % 3], prompt(&known));
        assert_eq!(policy.pick(&all, prompt(&known)).index, round % 3);
    }
}
