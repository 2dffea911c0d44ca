use super::*;

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
fn oversized_entries_of_a_peer_are_not_taken() {
    let mut owner = Registry::new(NodeId(1));
    let mut delta = owner.publish(entry(10, "a"));
    delta.puts[0].metadata.insert("k".to_owned(), "v".repeat(METADATA_LIMIT));
    let mut replica = replica();
    replica.apply(delta);
    assert!(replica.is_empty());
}

#[test]
fn twenty_thousand_names_travel_as_one_delta() {
    let mut owner = Registry::new(NodeId(1));
    for n in 0..20_000 {
        owner.publish(entry(n, &format!("name-{n}")));
    }
    let mut replica = replica();
    let bytes = owner.missing(&replica.digest())[0].encode();
    assert!(bytes.len() < 20_000 * 100, "under a hundred bytes a name");
    assert!(replica.apply(Delta::decode(&bytes).unwrap()));
    assert!(same(&replica, &owner));
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
