use super::super::owner::TOMBSTONES;
use super::*;
use crate::cluster::{Digest, Shipment};

fn entry(actor: u128, name: &str) -> Entry {
    Entry {
        name: name.to_owned(),
        actor: ActorId(actor),
        class: "C".to_owned(),
        metadata: BTreeMap::new(),
        unique: false,
        claimed: 0,
        lost_to: None,
    }
}

fn unique(actor: u128, name: &str, claimed: u64) -> Entry {
    Entry { unique: true, claimed, ..entry(actor, name) }
}

/// A registry that has the owner with id 1 as a member.
fn replica() -> Registry {
    let mut replica = Registry::new(NodeId(2));
    replica.node_up(NodeId(1));
    replica
}

fn same(a: &Registry, b: &Registry) -> bool {
    a.names() == b.names() && a.root() == b.root() && a.digest() == b.digest()
}

/// A history in which entries come, change and go.
fn history(owner: &mut Registry) -> Vec<Delta> {
    let mut deltas = vec![owner.publish(entry(10, "a")), owner.publish(entry(11, "a")), owner.publish(entry(12, "b"))];
    deltas.extend(owner.update(ActorId(12), BTreeMap::from([("state".to_owned(), "ready".to_owned())])));
    deltas.extend(owner.withdraw(ActorId(10)));
    deltas.push(owner.publish(entry(13, "c")));
    deltas.extend(owner.withdraw(ActorId(13)));
    deltas
}

#[test]
fn deltas_apply_in_any_order_and_any_number_of_times() {
    let mut owner = Registry::new(NodeId(1));
    let deltas = history(&mut owner);
    // Every rotation, forwards and backwards, each delta twice.
    for start in 0..deltas.len() {
        for backwards in [false, true] {
            let mut order: Vec<Delta> = deltas.iter().cycle().skip(start).take(deltas.len() * 2).cloned().collect();
            if backwards {
                order.reverse();
            }
            let mut replica = replica();
            for delta in order {
                replica.apply(delta);
            }
            assert!(same(&replica, &owner), "from {start}, backwards: {backwards}");
            assert_eq!(replica.gaps(), []);
        }
    }
}

#[test]
fn a_gap_is_reported_and_filled_by_digest() {
    let mut owner = Registry::new(NodeId(1));
    let mut deltas = history(&mut owner);
    let mut replica = replica();
    replica.apply(deltas.remove(0));
    assert!(!replica.apply(deltas.remove(2)), "its predecessors are missing");
    assert_eq!(replica.gaps(), [NodeId(1)]);
    let before = replica.names();
    assert_eq!(before.len(), 1, "nothing of the early delta shows");
    for delta in owner.missing(&replica.digest()) {
        assert!(replica.apply(delta));
    }
    assert!(same(&replica, &owner));
    assert_eq!(replica.gaps(), []);
}

#[test]
fn any_replica_answers_for_any_owner() {
    let mut owner = Registry::new(NodeId(1));
    let mut second = replica();
    for delta in history(&mut owner) {
        second.apply(delta);
    }
    let mut third = Registry::new(NodeId(3));
    third.node_up(NodeId(1));
    assert!(third.behind(&second.digest()) && !second.behind(&third.digest()));
    for delta in second.missing(&third.digest()) {
        third.apply(delta);
    }
    assert!(same(&third, &owner));
    assert_eq!(second.missing(&third.digest()), []);
    // The third never saw the tombstones; a later change must still reach a fourth, through it, that holds old entries.
    let mut fourth = Registry::new(NodeId(4));
    fourth.node_up(NodeId(1));
    let mut old_owner = Registry::new(NodeId(1));
    fourth.apply(old_owner.publish(entry(10, "a")));
    for delta in third.missing(&fourth.digest()) {
        assert!(delta.full, "history from version 1 on is not held");
        fourth.apply(delta);
    }
    assert!(same(&fourth, &owner), "the withdrawn entry is gone");
}

#[test]
fn forgotten_tombstones_never_revive_an_entry() {
    let mut owner = Registry::new(NodeId(1));
    let mut old = replica();
    old.apply(owner.publish(entry(1, "doomed")));
    let mut recent = replica();
    recent.apply(owner.missing(&recent.digest()).remove(0));
    let doom = owner.withdraw(ActorId(1)).unwrap();
    recent.apply(doom);
    for n in 0..=TOMBSTONES as u128 {
        for delta in [owner.publish(entry(100 + n, "fleeting")), owner.withdraw(ActorId(100 + n)).unwrap()] {
            recent.apply(delta);
        }
    }
    assert!(owner.owners[&NodeId(1)].tombstones.len() <= TOMBSTONES, "bounded");
    for source in [&owner, &recent] {
        let answer = source.missing(&old.digest());
        assert!(answer[0].full);
        let mut old = replica();
        old.apply(Registry::new(NodeId(1)).publish(entry(1, "doomed")));
        old.apply(answer[0].clone());
        assert!(same(&old, &owner) && old.is_empty());
    }
    let close = owner.missing(&recent.digest());
    assert_eq!(close, []);
    owner.publish(entry(7, "x"));
    assert!(!owner.missing(&recent.digest())[0].full, "who is recent gets changes only");
}

#[test]
fn withdrawal_is_by_instance_id_and_by_its_owner_only() {
    let mut owner = Registry::new(NodeId(1));
    owner.publish(entry(10, "a"));
    owner.publish(entry(11, "a"));
    assert!(owner.withdraw(ActorId(10)).is_some());
    assert!(owner.withdraw(ActorId(10)).is_none(), "only once");
    assert_eq!(owner.lookup("a"), [(NodeId(1), entry(11, "a"))]);
    let mut replica = replica();
    replica.apply(owner.missing(&replica.digest()).remove(0));
    assert!(replica.withdraw(ActorId(11)).is_none(), "not the owner");
    assert!(replica.update(ActorId(11), BTreeMap::new()).is_none());
    // News about ourselves from elsewhere is not taken.
    let mut forged = Registry::new(NodeId(1));
    for _ in 0..9 {
        forged.publish(entry(66, "a"));
    }
    assert!(!owner.apply(forged.missing(&Digest::default()).remove(0)));
    assert_eq!(owner.get(ActorId(66)), None);
}

#[test]
fn a_dead_nodes_entries_vanish_and_late_deltas_do_not_bring_them_back() {
    let mut owner = Registry::new(NodeId(1));
    let mut replica = replica();
    let first = owner.publish(entry(10, "a"));
    replica.apply(first.clone());
    let late = owner.publish(entry(11, "b"));
    replica.node_down(NodeId(1));
    assert!(replica.is_empty() && replica.names().is_empty() && replica.get(ActorId(10)).is_none());
    assert!(!replica.apply(first) && !replica.apply(late));
    assert!(replica.is_empty());
    assert_eq!(replica.digest(), Digest::default());
    assert!(!replica.behind(&owner.digest()), "what dead nodes hold is not asked for");
    replica.node_up(NodeId(1));
    assert!(same(&replica, &owner), "what came late holds again");
    replica.node_down(NodeId(1));
    for n in 0..10 * PARKED as u128 {
        replica.apply(owner.publish(entry(n, "x")));
    }
    assert_eq!(replica.parked.len(), PARKED, "bounded");
    replica.node_up(NodeId(1));
    for delta in owner.missing(&replica.digest()) {
        replica.apply(delta);
    }
    assert!(same(&replica, &owner));
}

#[test]
fn a_delta_may_overtake_the_news_that_its_owner_joined() {
    let mut owner = Registry::new(NodeId(1));
    let mut replica = Registry::new(NodeId(2));
    assert!(!replica.apply(owner.publish(entry(10, "a"))));
    assert!(replica.lookup("a").is_empty());
    replica.node_up(NodeId(1));
    assert_eq!(replica.lookup("a").len(), 1);
}

#[test]
fn an_update_changes_metadata_everywhere_and_nothing_changes_nothing() {
    let mut owner = Registry::new(NodeId(1));
    let mut replica = replica();
    replica.apply(owner.publish(entry(10, "a")));
    let ready = BTreeMap::from([("state".to_owned(), "ready".to_owned())]);
    let delta = owner.update(ActorId(10), ready.clone()).unwrap();
    assert!(owner.update(ActorId(10), ready.clone()).is_none(), "nothing new");
    assert!(replica.apply(delta));
    assert_eq!(replica.get(ActorId(10)).unwrap().1.metadata, ready);
}

#[test]
fn test_r10_what_its_node_does_not_know_is_found_no_more_unless_its_owner_writes_it_again() {
    let mut owner = Registry::new(NodeId(1));
    let mut replica = replica();
    let first = owner.publish(unique(10, "a", 1));
    replica.apply(first);
    replica.apply(owner.publish(entry(11, "b")));
    replica.watch("a", true);
    assert!(!replica.bury(NodeId(3), ActorId(10)), "said by another node");
    assert!(!owner.bury(NodeId(1), ActorId(10)), "one's own are withdrawn");
    assert!(replica.bury(NodeId(1), ActorId(10)));
    assert!(!replica.bury(NodeId(1), ActorId(10)));
    assert_eq!((replica.lookup("a"), replica.get(ActorId(10)), replica.holder("a", true)), (vec![], None, None));
    let touched = Touched::one((NodeId(1), ActorId(10)));
    assert_eq!(replica.take_touched(), BTreeMap::from([("a".to_owned(), touched)]));
    assert_eq!(replica.lookup("b").len(), 1);
    assert_eq!(replica.root(), owner.root(), "what it holds is the same");
    // The same news, come late or repeated, is none.
    for delta in owner.missing(&Digest::default()) {
        replica.apply(delta);
    }
    assert_eq!(replica.lookup("a"), []);
    replica.apply(owner.update(ActorId(10), BTreeMap::from([("state".to_owned(), "ready".to_owned())])).unwrap());
    assert!(same(&replica, &owner) && replica.lookup("a").len() == 1);
    assert!(replica.bury(NodeId(1), ActorId(10)));
    replica.apply(owner.withdraw(ActorId(10)).unwrap());
    replica.apply(owner.publish(entry(12, "a")));
    assert!(same(&replica, &owner) && replica.lookup("a").len() == 1);
}

#[test]
fn oversized_entries_of_a_peer_are_not_taken() {
    let mut owner = Registry::new(NodeId(1));
    let mut delta = owner.publish(entry(10, "a"));
    delta.puts[0].metadata.insert("k".to_owned(), "v".repeat(METADATA_LIMIT));
    let mut replica = replica();
    replica.apply(delta);
    assert!(replica.is_empty());
}

/// Ships what the replica lacks, in parts of `limit` bytes; what is left when `enough` says so stays unsent.
fn ship(from: &Registry, to: &mut Registry, limit: usize, id: u64, mut enough: impl FnMut() -> bool) -> usize {
    let mut shipment = from.shipment(&to.digest(), id);
    let mut parts = 0;
    while !enough() {
        let Some(part) = from.next_part(&mut shipment, limit) else { break };
        assert!(part.encode().len() < limit + 300);
        to.apply(Delta::decode(&part.encode()).unwrap());
        parts += 1;
    }
    parts
}

#[test]
fn m5_twenty_thousand_names_travel_in_parts_that_show_as_they_come_and_count_at_the_end() {
    let mut owner = Registry::new(NodeId(1));
    for n in 0..20_000 {
        owner.publish(entry(n, &format!("name-{n}")));
    }
    let mut replica = replica();
    let mut shipment = owner.shipment(&replica.digest(), 7);
    let mut bytes = 0;
    while let Some(part) = owner.next_part(&mut shipment, 64 << 10) {
        let part = part.encode();
        assert!(part.len() < (64 << 10) + 300, "{} bytes would hold up probes", part.len());
        bytes += part.len();
        assert_eq!(replica.digest(), Digest::default(), "half a registry is no registry");
        let before = replica.len();
        assert!(replica.apply(Delta::decode(&part).unwrap()));
        assert!(replica.len() > before, "but what is known is found");
        let mut third = Registry::new(NodeId(3));
        third.node_up(NodeId(1));
        if replica.digest() == Digest::default() {
            assert_eq!(replica.missing(&third.digest()), [], "nor is it passed on");
        }
    }
    assert!(bytes < 20_000 * 100, "under a hundred bytes a name");
    assert!(same(&replica, &owner));
}

#[test]
fn m5_a_shipment_that_broke_off_is_made_again_by_anyone() {
    let mut owner = Registry::new(NodeId(1));
    for n in 0..1000 {
        owner.publish(entry(n, "x"));
    }
    let mut whole = replica();
    ship(&owner, &mut whole, 1 << 20, 1, || false);
    let mut replica = Registry::new(NodeId(3));
    replica.node_up(NodeId(1));
    let mut parts = 0;
    ship(&owner, &mut replica, 1000, 2, || {
        parts += 1;
        parts > 5
    });
    assert!(!replica.is_empty() && replica.digest() == Digest::default());
    // Meanwhile some of what was shipped ends, and the history of that is forgotten.
    for n in 0..20 {
        whole.apply(owner.withdraw(ActorId(n)).unwrap());
    }
    for n in 0..2 * TOMBSTONES as u128 {
        whole.apply(owner.publish(entry(9000 + n, "y")));
        whole.apply(owner.withdraw(ActorId(9000 + n)).unwrap());
    }
    assert!(ship(&whole, &mut replica, 1000, 3, || false) > 5);
    assert!(same(&replica, &owner) && replica.lookup("x").len() == 980);
}

#[test]
fn m5_what_changes_under_way_arrives_too_even_where_parts_are_not_known() {
    for old in [false, true] {
        let mut owner = Registry::new(NodeId(1));
        for n in 0..200 {
            owner.publish(entry(n, "x"));
        }
        let mut replica = replica();
        let mut shipment = owner.shipment(&replica.digest(), 7);
        let mut next = 0;
        while let Some(mut part) = owner.next_part(&mut shipment, 300) {
            if old {
                // A node of the version before skips the fields: each part is a delta to it.
                (part.until, part.shipment) = (0, 0);
            }
            replica.apply(part);
            if next < 100 {
                owner.withdraw(ActorId(next)).unwrap();
                owner.update(ActorId(next + 100), BTreeMap::from([("n".to_owned(), next.to_string())]));
                owner.publish(entry(1000 + next, "x"));
                next += 1;
            }
        }
        // What was written after the last part is the next shipment's.
        ship(&owner, &mut replica, usize::MAX >> 1, 8, || false);
        assert!(same(&replica, &owner), "old: {old}");
        assert!(next > 20, "much happened");
    }
}

#[test]
fn m5_what_stopped_between_two_shipments_is_gone_even_where_parts_are_not_known() {
    for old in [false, true] {
        for (broke_off, overlap) in [(3, 1), (6, 1), (6, 4)] {
            let mut owner = Registry::new(NodeId(1));
            for n in 0..200 {
                owner.publish(entry(n, "x"));
            }
            let mut replica = replica();
            let mut take = |mut part: Delta| {
                if old {
                    (part.until, part.shipment, part.base) = (0, 0, 0);
                }
                replica.apply(Delta::decode(&part.encode()).unwrap());
            };
            let nothing = Digest::default();
            let mut first = owner.shipment(&nothing, 7);
            (0..broke_off).for_each(|_| take(owner.next_part(&mut first, 300).unwrap()));
            for n in 0..20 {
                owner.withdraw(ActorId(n)).unwrap();
            }
            // The rest of the first never comes, or begins to.
            let mut second = owner.shipment(&nothing, 8);
            (0..overlap).for_each(|_| take(owner.next_part(&mut second, 300).unwrap()));
            take(owner.next_part(&mut first, 300).unwrap());
            std::iter::from_fn(|| owner.next_part(&mut second, 300)).for_each(&mut take);
            assert_eq!(replica.lookup("x").len(), 180, "old: {old}, {broke_off} parts, then {overlap}");
            assert_eq!(replica.root(), owner.root());
        }
    }
}

/// A number that looks like chance, the same at every run.
fn dice(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % below
}

#[test]
fn m5_replicas_that_count_as_being_at_a_version_hold_exactly_that() {
    for seed in 0..10 {
        let mut state = seed;
        let mut owner = Registry::new(NodeId(1));
        let mut replicas: Vec<Registry> = (2..6).map(|n| Registry::new(NodeId(n))).collect();
        replicas.iter_mut().for_each(|replica| replica.node_up(NodeId(1)));
        let mut versions = BTreeMap::from([(0, owner.names())]);
        let mut flying: Vec<(usize, Option<usize>, Shipment)> = Vec::new();
        for id in 0..1500 {
            let actor = u128::from(dice(&mut state, 60));
            let (to, from) = (dice(&mut state, 4) as usize, dice(&mut state, 5) as usize);
            let source = (from < 4).then_some(from);
            match dice(&mut state, 10) {
                roll @ 0..4 => {
                    let written = match roll {
                        0 | 1 => Some(owner.publish(entry(actor, "x"))),
                        2 => owner.update(ActorId(actor), BTreeMap::from([("id".to_owned(), id.to_string())])),
                        _ => owner.withdraw(ActorId(actor)),
                    };
                    let Some(delta) = written else { continue };
                    versions.insert(owner.version(), owner.names());
                    // Some hear of it, at once or never.
                    for replica in &mut replicas {
                        if dice(&mut state, 3) > 0 {
                            replica.apply(delta.clone());
                        }
                    }
                }
                4 => {
                    let digest = replicas[to].digest();
                    let shipment = source.map_or(&owner, |source| &replicas[source]).shipment(&digest, id);
                    flying.push((to, source, shipment));
                }
                5 if !flying.is_empty() => drop(flying.swap_remove(dice(&mut state, flying.len() as u64) as usize)),
                6 if dice(&mut state, 50) == 0 => {
                    replicas[to].node_down(NodeId(1));
                    replicas[to].node_up(NodeId(1));
                }
                _ if !flying.is_empty() => {
                    let index = dice(&mut state, flying.len() as u64) as usize;
                    let (to, source, shipment) = &mut flying[index];
                    let from = source.map_or(&owner, |source| &replicas[source]);
                    match from.next_part(shipment, 100) {
                        Some(part) => drop(replicas[*to].apply(part)),
                        None => drop(flying.swap_remove(index)),
                    }
                }
                _ => {}
            }
            for replica in &replicas {
                let held = &replica.owners.get(&NodeId(1));
                if let Some(held) = held.filter(|held| held.ahead == held.version) {
                    assert_eq!(replica.names(), versions[&held.version], "seed {seed}, step {id}");
                }
            }
        }
        for (id, replica) in replicas.iter_mut().enumerate() {
            for round in 0..2 {
                ship(&owner, replica, 200, 1 << 40 | (id << 1 | round) as u64, || false);
            }
            assert!(same(replica, &owner), "seed {seed}");
        }
    }
}

#[test]
fn m5_a_thousand_owners_compare_by_buckets_and_exchange_what_differs() {
    let mut a = Registry::new(NodeId(1));
    let mut b = Registry::new(NodeId(2));
    let mut owners: Vec<Registry> = (3..1003).map(|n| Registry::new(NodeId(n))).collect();
    for owner in &mut owners {
        let delta = owner.publish(entry(owner.me.0, "x"));
        for replica in [&mut a, &mut b] {
            replica.node_up(owner.me);
            replica.apply(delta.clone());
        }
    }
    let (root, buckets) = a.roots();
    assert_eq!((root, &buckets), (b.root(), &b.roots().1));
    assert_eq!(b.differing(root, &buckets), None);
    a.apply(owners[77].publish(entry(5, "y")));
    let (root, buckets) = a.roots();
    let ask = b.differing(root, &buckets).unwrap();
    assert!(ask.encode().len() < 600, "{} bytes: a whole digest has 28,000", ask.encode().len());
    for delta in a.missing(&Digest::decode(&ask.encode()).unwrap()) {
        b.apply(delta);
    }
    assert!(same(&a, &b));
    // A bucket in which the asking node holds nobody is asked for, too.
    let mut late = Registry::new(NodeId(2));
    owners.iter().for_each(|owner| late.node_up(owner.me));
    for delta in a.missing(&late.differing(root, &buckets).unwrap()) {
        late.apply(delta);
    }
    assert!(same(&a, &late));
    let only = b.digest_of(NodeId(80));
    assert_eq!(only.owners.len(), 1);
    a.apply(owners[76].publish(entry(6, "z")));
    a.apply(owners[77].publish(entry(7, "z")));
    let told = a.missing(&only);
    assert!(told.len() == 1 && told[0].owner().unwrap() == NodeId(80), "one owner was asked for");
}

/// Three owners, each having heard all that the others wrote.
fn all_to_all(writes: [Entry; 3]) -> [Registry; 3] {
    let mut nodes = [1, 2, 3].map(|n| Registry::new(NodeId(n)));
    for node in &mut nodes {
        for n in 1..=3 {
            node.node_up(NodeId(n));
        }
    }
    let mut deltas = Vec::new();
    for (node, write) in nodes.iter_mut().zip(writes) {
        deltas.push(node.publish(write));
    }
    for node in &mut nodes {
        for delta in &deltas {
            node.apply(delta.clone());
        }
    }
    nodes
}

#[test]
fn test_r10_of_unique_claims_the_oldest_stands_alone_everywhere() {
    let nodes = all_to_all([unique(12, "a", 7), unique(11, "a", 5), unique(10, "a", 5)]);
    for node in &nodes {
        assert_eq!(node.lookup("a"), [(NodeId(3), unique(10, "a", 5))]);
        assert_eq!(node.names()["a"].len(), 1);
        let conflict = node.conflicts().remove(0);
        assert_eq!(conflict.winner, (NodeId(3), unique(10, "a", 5)));
        assert_eq!(conflict.losers, [(NodeId(1), ActorId(12)), (NodeId(2), ActorId(11))]);
        assert_eq!(node.holder("a", false).unwrap().0, NodeId(3));
    }
}

#[test]
fn test_r10_a_unique_claim_falls_before_older_plain_ones_and_beats_younger_ones() {
    let plain = |actor, claimed| Entry { unique: false, ..unique(actor, "a", claimed) };
    for node in all_to_all([plain(1, 5), unique(2, "a", 6), plain(3, 7)]) {
        let stands: Vec<_> = node.lookup("a").into_iter().map(|(_, entry)| entry.actor).collect();
        assert_eq!(stands, [ActorId(1), ActorId(3)]);
        assert_eq!(node.conflicts()[0].losers, [(NodeId(2), ActorId(2))]);
    }
    let mut nodes = all_to_all([plain(1, 5), unique(2, "a", 4), plain(3, 7)]);
    let conflict = nodes[0].conflicts().remove(0);
    assert_eq!((conflict.winner.1.actor, conflict.losers.len()), (ActorId(2), 2));
    // Losers that give up end the conflict, and the winner hears of each even if it never saw the claim itself.
    let gone = [(0, 1), (2, 3)].map(|(node, actor)| nodes[node].concede(ActorId(actor), ActorId(2)).unwrap());
    assert!(nodes[0].concede(ActorId(1), ActorId(2)).is_none() && nodes[0].conceded(ActorId(1)), "only once");
    assert_eq!((nodes[0].get(ActorId(1)), nodes[0].len()), (None, 3));
    let mut late = Registry::new(NodeId(2));
    late.publish(unique(2, "a", 4));
    for node in 1..=3 {
        late.node_up(NodeId(node));
    }
    for delta in gone {
        nodes[1].apply(delta);
        let whole = nodes[1].missing(&late.digest());
        for delta in whole {
            late.apply(delta);
        }
    }
    for winner in [&mut nodes[1], &mut late] {
        let beaten: Vec<_> = winner.take_beaten().into_iter().map(|(node, entry)| (node, entry.actor)).collect();
        assert_eq!(beaten, [(NodeId(1), ActorId(1)), (NodeId(3), ActorId(3))]);
    }
    assert_eq!(nodes[1].conflicts(), []);
    assert_eq!(nodes[1].holder("a", false).unwrap().1.actor, ActorId(2));
    nodes[1].withdraw(ActorId(2));
    assert_eq!(nodes[1].holder("a", true), None);
}

#[test]
fn plain_instances_are_no_conflict_and_keep_no_plain_claim_away() {
    for node in all_to_all([entry(1, "a"), entry(2, "a"), entry(3, "a")]) {
        assert_eq!(node.lookup("a").len(), 3);
        assert_eq!(node.conflicts(), []);
        assert_eq!(node.holder("a", false), None);
        assert!(node.holder("a", true).is_some());
    }
}
