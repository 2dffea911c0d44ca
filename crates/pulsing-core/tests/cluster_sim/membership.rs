//! Detection, refutation, leaves, partitions and restarts at the size of a small cluster (M1-M4).

use std::collections::BTreeSet;
use std::time::Duration;

use pulsing_core::cluster::{DownReason, MemberEvent, Preset};
use pulsing_core::{MemberState, NodeId};

use crate::sim::{Sim, Weather, for_seeds, ms};

#[test]
fn a_healthy_cluster_of_ten_declares_nobody_down() {
    for_seeds(3, |seed| {
        for preset in [Preset::Local, Preset::Lan] {
            let mut sim = Sim::formed(10, preset, Weather::FAIR, seed);
            sim.run(ms(120_000));
            assert_eq!(sim.deaths(Duration::ZERO), []);
            assert!(sim.agreed());
        }
    });
}

#[test]
fn a_healthy_cluster_of_sixty_declares_nobody_down() {
    for_seeds(1, |seed| {
        let mut sim = Sim::formed(60, Preset::Lan, Weather::FAIR, seed);
        sim.run(ms(120_000));
        assert_eq!(sim.deaths(Duration::ZERO), []);
        assert!(sim.agreed());
    });
}

#[test]
fn a_loaded_cluster_suspects_but_refutes_and_declares_nobody_down() {
    for_seeds(5, |seed| {
        let mut sim = Sim::formed(10, Preset::Lan, Weather::LOADED, seed);
        sim.run(ms(120_000));
        assert_eq!(sim.deaths(Duration::ZERO), []);
        for host in sim.living() {
            let (now, log) = (sim.now(), sim.process(host).log.clone());
            for (at, event) in &log {
                if let MemberEvent::Suspect(who) = event {
                    let refuted = log.iter().find(|(then, e)| then >= at && *e == MemberEvent::Refuted(*who));
                    let took = refuted.map_or(now, |(then, _)| *then) - *at;
                    assert!(took < ms(2000), "host {host} suspected {who} at {at:?} for {took:?}");
                }
            }
        }
    });
}

#[test]
fn a_crash_is_seen_by_all_within_two_seconds() {
    for_seeds(10, |seed| {
        for preset in [Preset::Local, Preset::Lan] {
            let mut sim = Sim::formed(10, preset, Weather::FAIR, seed);
            sim.run(ms(500 * (seed % 20)));
            let (start, victim) = (sim.now(), sim.pick(10));
            let dead = sim.kill(victim);
            sim.expect("all see the crash", ms(2000), |sim| sim.all_see(dead, MemberState::Down));
            sim.run(ms(10_000));
            assert!(sim.deaths(start).iter().all(|(_, who, _)| *who == dead), "{:?}", sim.deaths(start));
        }
    });
}

#[test]
fn the_last_survivor_sees_all_crashes_within_two_seconds() {
    for_seeds(10, |seed| {
        for n in [2, 3, 10] {
            let mut sim = Sim::formed(n, Preset::Local, Weather::FAIR, seed);
            sim.run(ms(3000));
            for host in 1..n {
                sim.kill(host);
            }
            sim.expect("nobody is left", ms(2000), |sim| sim.process(0).membership.is_alone());
            assert!(sim.deaths(ms(0)).iter().all(|(_, _, why)| matches!(why, DownReason::Refused { .. })));
        }
    });
}

#[test]
fn silent_loss_is_seen_by_all_within_eight_seconds() {
    for_seeds(20, |seed| {
        let mut sim = Sim::formed(10, Preset::Lan, Weather::FAIR, seed);
        sim.run(ms(1000 + 333 * (seed % 20)));
        let victim = sim.pick(10);
        let dead = sim.power_off(victim);
        sim.expect("all see the loss", ms(8000), |sim| sim.all_see(dead, MemberState::Down));
    });
}

#[test]
fn a_leave_is_seen_by_all_within_a_second_and_is_no_death() {
    for_seeds(10, |seed| {
        let mut sim = Sim::formed(12, Preset::Lan, Weather::FAIR, seed);
        sim.run(ms(2000));
        let start = sim.now();
        let leaver = sim.pick(12);
        let gone = sim.leave(leaver);
        sim.expect("all see the leave", ms(1000), |sim| sim.all_see(gone, MemberState::Left));
        sim.run(ms(10_000));
        assert_eq!(sim.deaths(start), []);
        assert!(sim.all_see(gone, MemberState::Left), "it stays listed for a minute");
        sim.run(ms(60_000));
        assert!(
            sim.agreed() && sim.living().into_iter().all(|host| sim.process(host).membership.members().len() == 10)
        );
    });
}

#[test]
fn a_partition_heals() {
    for_seeds(5, |seed| {
        for minority in [1, 4] {
            let mut sim = Sim::formed(10, Preset::Lan, Weather::FAIR, seed);
            // Not the seed's side: who is alone dials the seed, who is many greets the down.
            sim.partition(|host| u32::from(host >= 10 - minority));
            sim.expect("each side is by itself", ms(40_000), |sim| {
                (0..10).all(|host| {
                    sim.alive_at(host).len() == if host < 10 - minority { 9 - minority } else { minority - 1 }
                })
            });
            sim.run(ms(60_000));
            sim.heal();
            sim.expect("all are together again", ms(70_000), |sim| sim.agreed());
            let together = sim.now();
            sim.run(ms(30_000));
            assert_eq!(sim.deaths(together + ms(5000)), [], "no flapping afterwards");
            assert!(sim.agreed());
        }
    });
}

#[test]
fn a_short_cut_of_links_kills_nobody() {
    for_seeds(10, |seed| {
        let mut sim = Sim::formed(6, Preset::Local, Weather::FAIR, seed);
        for _ in 0..200 {
            let (a, b) = (sim.pick(6), sim.pick(6));
            sim.break_link(a, b);
            sim.run(ms(50));
        }
        assert_eq!(sim.deaths(Duration::ZERO), []);
    });
}

#[test]
fn a_paused_node_kills_nobody_and_comes_back() {
    for_seeds(20, |seed| {
        for n in [2, 3, 10] {
            let mut sim = Sim::formed(n, Preset::Local, Weather::FAIR, seed);
            sim.run(ms(1000 + 77 * (seed % 20)));
            let sleeper = sim.pick(n);
            let asleep = sim.process(sleeper).node;
            sim.pause(sleeper);
            sim.run(ms(10_000));
            let woke = sim.now();
            sim.resume(sleeper);
            assert!(sim.process(sleeper).membership.health_score() > 0, "a pause counts against its own health");
            sim.expect("all are together again", ms(10_000), |sim| sim.agreed());
            sim.run(ms(20_000));
            assert!(sim.agreed());
            let accused: Vec<_> = sim.deaths(woke).into_iter().filter(|(_, who, _)| *who != asleep).collect();
            assert_eq!(accused, [], "the sleeper accused someone");
        }
    });
}

#[test]
fn short_pauses_kill_nobody() {
    for_seeds(5, |seed| {
        let mut sim = Sim::formed(6, Preset::Local, Weather::FAIR, seed);
        for _ in 0..10 {
            let sleeper = sim.pick(6);
            sim.pause(sleeper);
            sim.run(ms(2000));
            sim.resume(sleeper);
            sim.run(ms(2000));
        }
        assert_eq!(sim.deaths(Duration::ZERO), []);
        assert!(sim.agreed());
    });
}

#[test]
fn a_host_that_sleeps_wakes_with_its_whole_cluster() {
    for_seeds(10, |seed| {
        let mut sim = Sim::formed(6, Preset::Local, Weather::FAIR, seed);
        sim.run(ms(100 * (seed % 20)));
        for host in 0..6 {
            sim.pause(host);
        }
        sim.run(ms(60_000));
        for host in 0..6 {
            sim.resume(host);
            sim.run(ms(100));
        }
        sim.run(ms(20_000));
        assert_eq!(sim.deaths(Duration::ZERO), []);
        assert!(sim.agreed());
    });
}

#[test]
fn half_of_a_cluster_may_crash_at_once() {
    for_seeds(5, |seed| {
        let mut sim = Sim::formed(10, Preset::Lan, Weather::FAIR, seed);
        sim.run(ms(1000));
        let start = sim.now();
        let dead: BTreeSet<NodeId> = (5..10).map(|host| sim.kill(host)).collect();
        sim.expect("the living agree", ms(2000), Sim::agreed);
        sim.run(ms(10_000));
        assert!(sim.deaths(start).iter().all(|(_, who, _)| dead.contains(who)));
    });
}

#[test]
fn one_seed_has_one_history() {
    let history = |seed| {
        let mut sim = Sim::formed(5, Preset::Local, Weather::LOADED, seed);
        sim.kill(3);
        sim.run(ms(5000));
        let host = |sim: &mut Sim, host: usize| sim.process(host).log.clone();
        (0..3).map(|n| host(&mut sim, n)).collect::<Vec<_>>()
    };
    assert_eq!(history(7), history(7));
    assert_ne!(history(7), history(8));
}

#[test]
fn a_restarted_process_replaces_its_old_self_at_once() {
    for_seeds(10, |seed| {
        let mut sim = Sim::formed(8, Preset::Lan, Weather::FAIR, seed);
        sim.run(ms(2000));
        let victim = 1 + sim.pick(7);
        let old = sim.kill(victim);
        sim.run(ms(2 * (seed % 10)));
        let new = sim.start(victim, &[0]);
        sim.expect("all know the new one and not the old", ms(2000), |sim| {
            sim.living().into_iter().filter(|host| *host != victim).all(|host| {
                let alive = sim.alive_at(host);
                alive.contains(&new) && !alive.contains(&old)
            })
        });
        sim.expect("it knows all", ms(2000), |sim| sim.agreed());
    });
}

#[test]
fn a_seed_that_comes_up_late_is_found() {
    for_seeds(3, |seed| {
        let mut sim = Sim::new(3, Preset::Lan, Weather::FAIR, seed);
        sim.start(1, &[0]);
        sim.start(2, &[0]);
        sim.run(ms(30_000));
        assert!(sim.process(1).membership.is_alone());
        sim.start(0, &[0]);
        sim.expect("all are together", ms(5000), |sim| sim.agreed());
        // The whole rest goes and comes back under other node ids.
        for host in [0, 2] {
            sim.kill(host);
        }
        sim.run(ms(30_000));
        sim.start(0, &[0]);
        sim.start(2, &[0]);
        sim.expect("all are together again", ms(5000), |sim| sim.agreed());
    });
}
