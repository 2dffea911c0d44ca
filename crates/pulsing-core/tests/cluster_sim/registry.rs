//! Names (M5, R10).

use std::collections::BTreeSet;

use pulsing_core::cluster::Preset;
use pulsing_core::{ActorId, MemberState, NodeId};

use crate::sim::{Sim, Weather, for_seeds, ms};

/// Every name at every living host is what its owner holds, and no name of a dead owner is left.
fn registries_agree(sim: &mut Sim) -> bool {
    let living = sim.living();
    let root = sim.registry(living[0]).root();
    let names = sim.registry(living[0]).names();
    living.iter().all(|host| sim.registry(*host).root() == root && sim.registry(*host).names() == names)
}

#[test]
fn a_stopped_name_disappears_everywhere_within_a_second() {
    for_seeds(5, |seed| {
        let mut sim = Sim::formed(10, Preset::Lan, Weather::FAIR, seed);
        let actor = sim.publish(3, "worker");
        let took = sim.expect("all see the name", ms(1000), |sim| {
            sim.living().into_iter().all(|host| sim.registry(host).lookup("worker").len() == 1)
        });
        assert!(took < ms(100));
        sim.withdraw(3, actor);
        sim.expect("the name is gone", ms(1000), |sim| {
            sim.living().into_iter().all(|host| sim.registry(host).lookup("worker").is_empty())
        });
        let dead = sim.kill(4);
        sim.expect("the crash is seen", ms(2000), |sim| sim.all_see(dead, MemberState::Down));
    });
}

#[test]
fn registries_converge_through_storms() {
    for_seeds(5, |seed| {
        let n = 8;
        let mut sim = Sim::formed(n, Preset::Local, Weather::LOADED, seed);
        sim.weather.loss = 0.02;
        let mut live: Vec<(usize, NodeId, ActorId)> = Vec::new();
        let mut withdrawn = BTreeSet::new();
        for step in 0..300 {
            let host = sim.pick(n);
            if !sim.living().contains(&host) {
                sim.start(host, &[0, 1]);
            }
            match sim.pick(12) {
                0 if step > 20 && sim.living().len() > 4 => {
                    sim.kill(host);
                    live.retain(|(at, ..)| *at != host);
                }
                1 if step > 20 => {
                    let (a, b) = (sim.pick(n), sim.pick(n));
                    sim.break_link(a, b);
                }
                2..5 => {
                    if let Some(n) = live.iter().position(|(at, ..)| *at == host) {
                        let (_, _, actor) = live.swap_remove(n);
                        sim.withdraw(host, actor);
                        withdrawn.insert(actor);
                    }
                }
                _ => {
                    let name = format!("name-{}", sim.pick(20));
                    let actor = sim.publish(host, &name);
                    let node = sim.process(host).node;
                    live.push((host, node, actor));
                }
            }
            sim.run(ms(20));
        }
        sim.weather.loss = 0.0;
        sim.expect("members agree", ms(60_000), |sim| sim.agreed());
        sim.expect("registries agree", ms(30_000), registries_agree);
        let host = sim.living()[0];
        for (_, node, actor) in &live {
            let found = sim.registry(host).get(*actor).map(|(owner, _)| owner);
            assert_eq!(found, Some(*node), "a published actor is missing");
        }
        assert!(withdrawn.iter().all(|actor| sim.registry(host).get(*actor).is_none()), "a withdrawn actor is back");
        assert_eq!(sim.registry(host).len(), live.len());
    });
}

/// Every living host tells the same single holder of `name`.
fn one_holder(sim: &mut Sim, name: &str) -> Option<ActorId> {
    let mut holders = BTreeSet::new();
    for host in sim.living() {
        let found = sim.registry(host).lookup(name);
        if found.len() != 1 || !sim.registry(host).conflicts().is_empty() {
            return None;
        }
        holders.insert(found[0].1.actor);
    }
    if holders.len() == 1 { holders.pop_first() } else { None }
}

#[test]
fn test_r10_a_race_for_a_unique_name_has_one_winner_and_both_are_told() {
    for_seeds(20, |seed| {
        let mut sim = Sim::formed(6, Preset::Lan, Weather::LOADED, seed);
        let (first, second) = (1 + sim.pick(2), 3 + sim.pick(3));
        let one = sim.publish_unique(first, "leader");
        sim.run(ms(seed % 3));
        let two = sim.publish_unique(second, "leader");
        sim.expect("one holder", ms(5000), |sim| one_holder(sim, "leader").is_some());
        let winner = one_holder(&mut sim, "leader").unwrap();
        let (won, lost, loser) = if winner == one { (first, second, two) } else { (second, first, one) };
        assert_eq!(sim.process(lost).displaced, [(loser, winner)]);
        assert!(sim.process(won).displaced.is_empty());
        sim.expect("the winner hears of it", ms(5000), |sim| sim.process(won).beaten == BTreeSet::from([loser]));
        if seed % 3 > 0 {
            assert_eq!(winner, one, "the older claim wins");
        }
    });
}

#[test]
fn test_r10_after_a_healed_partition_the_older_unique_claim_stands() {
    for_seeds(5, |seed| {
        let mut sim = Sim::formed(6, Preset::Lan, Weather::FAIR, seed);
        sim.partition(|host| u32::from(host >= 3));
        sim.run(ms(30_000));
        let old = sim.publish_unique(4, "leader");
        sim.run(ms(2000));
        let young = sim.publish_unique(1, "leader");
        sim.run(ms(5000));
        assert_eq!(sim.registry(0).lookup("leader")[0].1.actor, young);
        assert_eq!(sim.registry(5).lookup("leader")[0].1.actor, old);
        sim.heal();
        sim.expect("all are together", ms(60_000), |sim| sim.agreed());
        sim.expect("one holder", ms(10_000), |sim| one_holder(sim, "leader") == Some(old));
        assert_eq!(sim.process(1).displaced, [(young, old)]);
        assert!(sim.process(4).displaced.is_empty());
        sim.expect("the winner hears of it", ms(5000), |sim| sim.process(4).beaten.contains(&young));
        sim.run(ms(10_000));
        sim.expect("registries agree", ms(10_000), registries_agree);
    });
}
