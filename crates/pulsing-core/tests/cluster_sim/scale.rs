//! The same promises with 10, 100 and 1,000 nodes (M1-M3).

use std::time::Duration;

use pulsing_core::MemberState;
use pulsing_core::cluster::{MemberEvent, Preset};

use crate::sim::{Sim, Weather, for_seeds, ms};

/// Weather that a healthy cluster has to bear: loss up to a tenth, stalls, late timers, links that break.
fn bearable(sim: &mut Sim) -> Weather {
    match sim.pick(4) {
        0 => Weather::FAIR,
        1 => Weather::LOADED,
        2 => Weather::losing(0.1),
        _ => Weather { loss: 0.05, ..Weather::LOADED },
    }
}

/// No false death in changing weather while links break; and in the end everybody knows everybody.
fn bears_the_weather(n: usize, rounds: usize, seed: u64) {
    let mut sim = Sim::formed(n, Preset::Lan, Weather::FAIR, seed);
    let formed = sim.now();
    for _ in 0..rounds {
        sim.weather = bearable(&mut sim);
        for _ in 0..n / 10 {
            let (a, b) = (sim.pick(n), sim.pick(n));
            sim.break_link(a, b);
        }
        sim.run(ms(2000));
    }
    sim.weather = Weather::FAIR;
    sim.run(ms(3000));
    assert_eq!(sim.deaths(formed), []);
    assert!(sim.agreed());
}

/// Whatever happens, the living find together again, and then nothing moves any more.
fn survives_the_storm(n: usize, rounds: usize, seed: u64) {
    let mut sim = Sim::formed(n, Preset::Lan, Weather::FAIR, seed);
    for _ in 0..rounds {
        sim.weather = if sim.pick(3) == 0 { Weather::losing(0.3) } else { bearable(&mut sim) };
        let (a, b) = (sim.pick(n), sim.pick(n));
        match sim.pick(8) {
            // The seed stays, so that whoever starts finds somebody.
            0 if a != 0 && sim.is_alive(a) => drop(sim.kill(a)),
            1 if a != 0 && sim.is_alive(a) => drop(sim.power_off(a)),
            2 if a != 0 && sim.is_alive(a) => drop(sim.leave(a)),
            3 if !sim.is_alive(a) => drop(sim.start(a, &[0])),
            4 if sim.is_alive(a) => sim.pause(a),
            5 => {
                let side = sim.pick(n);
                sim.partition(|host| u32::from(host > side));
            }
            6 => sim.block(a, b),
            _ => {
                let back = sim.pick(2) == 0;
                sim.jump_clock(a, Duration::from_secs(3600), back);
                sim.break_link(a, b);
            }
        }
        sim.run(ms(1500));
        if sim.pick(3) == 0 {
            sim.resume_all();
            sim.unblock_all();
            sim.heal();
        }
    }
    sim.weather = Weather::FAIR;
    sim.resume_all();
    sim.unblock_all();
    sim.heal();
    sim.expect("the living agree", ms(120_000), Sim::agreed);
    let together = sim.now();
    sim.run(ms(5000));
    let settled = sim.now();
    sim.run(ms(20_000));
    assert_eq!(sim.deaths(settled), [], "no flapping after {together:?}");
    assert!(sim.agreed());
}

#[test]
fn test_m2_ten_nodes_bear_the_weather() {
    for_seeds(200, |seed| bears_the_weather(10, 10, seed));
}

#[test]
fn test_m2_a_hundred_nodes_bear_the_weather() {
    for_seeds(20, |seed| bears_the_weather(100, 6, seed));
}

#[test]
fn test_m2_a_thousand_nodes_bear_the_weather() {
    for_seeds(2, |seed| bears_the_weather(1000, 3, seed));
}

#[test]
fn test_m4_ten_nodes_survive_the_storm() {
    for_seeds(200, |seed| survives_the_storm(10, 12, seed));
}

#[test]
fn test_m4_a_hundred_nodes_survive_the_storm() {
    for_seeds(5, |seed| survives_the_storm(100, 12, seed));
}

/// A crash and a silent loss, one after the other; nobody else may be declared down.
fn losses_are_seen(n: usize, crash: Duration, silent: Duration, seed: u64) {
    let mut sim = Sim::formed(n, Preset::Lan, Weather::FAIR, seed);
    sim.run(ms(2000));
    let start = sim.now();
    let victim = sim.pick(n);
    let crashed = sim.kill(victim);
    sim.expect("all see the crash", crash, |sim| sim.all_see(crashed, MemberState::Down));
    let living = sim.living();
    let victim = living[sim.pick(n - 1)];
    let lost = sim.power_off(victim);
    sim.expect("all see the loss", silent, |sim| sim.all_see(lost, MemberState::Down));
    assert!(sim.deaths(start).iter().all(|(_, who, _)| [crashed, lost].contains(who)));
}

#[test]
fn test_m3_losses_are_seen_by_a_hundred_nodes() {
    for_seeds(10, |seed| losses_are_seen(100, ms(2000), ms(10_000), seed));
}

#[test]
fn test_m3_losses_are_seen_by_a_thousand_nodes() {
    for_seeds(1, |seed| losses_are_seen(1000, ms(3000), ms(12_000), seed));
}

#[test]
fn test_m2_suspicions_in_a_loaded_cluster_of_a_hundred_are_refuted_within_two_seconds() {
    for_seeds(5, |seed| {
        let mut sim = Sim::formed(100, Preset::Lan, Weather::LOADED, seed);
        sim.run(ms(20_000));
        assert_eq!(sim.deaths(Duration::ZERO), []);
        let now = sim.now();
        for host in sim.living() {
            let mut suspected = std::collections::BTreeMap::new();
            for (at, event) in &sim.process(host).log {
                match event {
                    MemberEvent::Suspect(who) => drop(suspected.insert(who.node, *at)),
                    MemberEvent::Refuted(who) => {
                        let took = suspected.remove(&who.node).map_or(Duration::ZERO, |since| *at - since);
                        assert!(took < ms(2000), "host {host} suspected {who} for {took:?}");
                    }
                    _ => {}
                }
            }
            assert!(suspected.values().all(|since| now - *since < ms(2000)), "host {host}: {suspected:?}");
        }
    });
}
