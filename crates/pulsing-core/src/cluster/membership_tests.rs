use super::*;

fn identity(n: u8) -> Identity {
    Identity::new(NodeId(u128::from(n)), format!("192.0.2.{n}:8000").parse().unwrap(), 1000)
}

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Delivers everything at once until nobody has anything to send; events come back by node.
fn settle(now: Duration, nodes: &mut [Membership]) -> Vec<(usize, MemberEvent)> {
    let mut events = Vec::new();
    loop {
        let mut sends = Vec::new();
        for (n, node) in nodes.iter_mut().enumerate() {
            while let Some(output) = node.poll() {
                match output {
                    MembershipOutput::Send { to, data } => sends.push((to, data)),
                    MembershipOutput::Event(event) => events.push((n, event)),
                    MembershipOutput::Timer { .. } => {}
                }
            }
        }
        if sends.is_empty() {
            return events;
        }
        for (to, data) in sends {
            if let Some(node) = nodes.iter_mut().find(|node| node.me().addr == to.addr) {
                node.handle_data(now, &data).unwrap();
            }
        }
    }
}

fn cluster(n: u8) -> Vec<Membership> {
    let mut nodes: Vec<Membership> = (1..=n).map(|n| Membership::new(identity(n), Preset::Lan, u64::from(n))).collect();
    for joiner in 1..nodes.len() {
        nodes[joiner].join(at(1), identity(1));
        settle(at(1), &mut nodes);
    }
    nodes
}

#[test]
fn newcomers_know_all_and_are_known_by_all_without_waiting_for_gossip() {
    let nodes = cluster(8);
    assert!(nodes.iter().all(|node| node.members().len() == 7 && !node.is_alone()));
}

#[test]
fn rubbish_is_refused_in_words_and_changes_nothing() {
    let mut nodes = cluster(2);
    let from_myself = Note { from: identity(1), body: Body::Leave }.encode();
    let before = nodes[0].members();
    for bad in [&b""[..], b"\x09", b"\x01\xff", b"\x02\xff"] {
        assert!(matches!(nodes[0].handle_data(at(2), bad), Err(MembershipError::Malformed(_))), "{bad:?}");
    }
    assert!(matches!(nodes[0].handle_data(at(2), &from_myself), Err(MembershipError::FromOurselves(_))));
    assert_eq!(nodes[0].members(), before);
    assert!(nodes[0].poll().is_none());
}

#[test]
fn alone_with_a_refusing_peer_ones_own_word_is_enough() {
    let mut nodes = cluster(2);
    nodes[0].dial_refused(at(10), NodeId(2));
    let events = settle(at(10), &mut nodes[..1]);
    assert_eq!(events, [(0, MemberEvent::Down(identity(2), DownReason::Refused { observers: 1 }))]);
    assert!(nodes[0].is_alone());
}

#[test]
fn among_three_one_refusal_is_no_verdict_and_two_are() {
    let mut nodes = cluster(3);
    nodes[0].dial_refused(at(10), NodeId(3));
    let events = settle(at(10), &mut nodes[..2]);
    assert_eq!(events, []);
    nodes[1].dial_refused(at(11), NodeId(3));
    let events = settle(at(11), &mut nodes[..2]);
    let down = MemberEvent::Down(identity(3), DownReason::Refused { observers: 2 });
    assert!(events.contains(&(0, down)) && events.contains(&(1, down)), "{events:?}");
}

#[test]
fn a_peer_that_talks_after_a_refusal_is_not_condemned_by_it() {
    let mut nodes = cluster(3);
    nodes[0].dial_refused(at(10), NodeId(3));
    // This time the third hears the probes and answers.
    assert_eq!(settle(at(10), &mut nodes), []);
    nodes[1].dial_refused(at(11), NodeId(3));
    assert_eq!(settle(at(11), &mut nodes), []);
}

#[test]
fn a_leaver_answers_with_its_goodbye_only() {
    let mut nodes = cluster(3);
    nodes[2].leave(at(5));
    let events = settle(at(5), &mut nodes);
    assert_eq!(events, [(0, MemberEvent::Left(identity(3))), (1, MemberEvent::Left(identity(3)))]);
    let mut stranger = Membership::new(identity(9), Preset::Lan, 9);
    stranger.join(at(6), identity(3));
    let mut both = vec![nodes.remove(2), stranger];
    assert_eq!(settle(at(6), &mut both), []);
    assert!(both[1].is_alone());
}

#[test]
fn a_death_that_gossip_told_first_turns_into_the_leave_it_was() {
    let mut nodes = cluster(2);
    nodes[0].apply(identity(2), 0, State::Down, true);
    settle(at(5), &mut nodes[..1]);
    let goodbye = Note { from: identity(2), body: Body::Leave }.encode();
    nodes[0].handle_data(at(6), &goodbye).unwrap();
    assert_eq!(settle(at(6), &mut nodes[..1]), [(0, MemberEvent::Left(identity(2)))]);
    assert_eq!(nodes[0].members()[0].state, MemberState::Left);
    nodes[0].handle_data(at(7), &goodbye).unwrap();
    assert_eq!(settle(at(7), &mut nodes[..1]), [], "once");
}

#[test]
fn a_node_declared_down_renews_itself_and_is_back_at_once() {
    let mut nodes = cluster(3);
    nodes[0].apply(identity(2), 0, State::Down, true);
    settle(at(5), &mut nodes);
    nodes[1].join(at(6), identity(1));
    let events = settle(at(6), &mut nodes);
    let new = nodes[1].me();
    assert!(new.epoch > 1000 && new.node == NodeId(2));
    assert!(events.contains(&(1, MemberEvent::SelfRenewed(new))) && events.contains(&(0, MemberEvent::Up(new))));
    for node in [0, 2] {
        let listed = nodes[node].members();
        assert!(listed.contains(&MemberInfo { identity: new, state: MemberState::Alive }), "{listed:?}");
        assert_eq!(listed.len(), 2, "its former self is not listed beside it");
    }
}

#[test]
fn a_restart_whose_clock_was_set_back_outbids_its_former_self() {
    let mut nodes = cluster(3);
    let restarted = Identity { node: NodeId(77), epoch: 5, ..identity(2) };
    nodes[1] = Membership::new(restarted, Preset::Lan, 77);
    nodes[1].join(at(9), identity(1));
    settle(at(9), &mut nodes);
    for _ in 0..3 {
        // Probes of the others, here by hand, tell those who did not hear of it yet.
        nodes[2].check(NodeId(2));
        settle(at(9), &mut nodes);
    }
    assert!(nodes[1].me().epoch > 1000);
    for node in [0, 2] {
        let living: Vec<NodeId> = nodes[node]
            .members()
            .iter()
            .filter(|info| info.state == MemberState::Alive)
            .map(|info| info.identity.node)
            .collect();
        assert!(living.contains(&NodeId(77)) && !living.contains(&NodeId(2)), "{living:?}");
    }
}

#[test]
fn a_late_timer_counts_against_ones_own_health_and_accuses_nobody() {
    let mut nodes = cluster(2);
    // Suspected before the pause, due within it.
    nodes[0].apply(identity(2), 0, State::Suspect, true);
    nodes[0].suspect(identity(2), 0);
    nodes[0].tick();
    let mut timers = Vec::new();
    while let Some(output) = nodes[0].poll() {
        if let MembershipOutput::Timer { timer, .. } = output {
            timers.push(timer);
        }
    }
    for timer in timers {
        nodes[0].handle_timer(at(60_000), timer);
    }
    assert!(nodes[0].health_score() >= 2);
    let accused = settle(at(60_000), &mut nodes[..1]);
    assert_eq!(accused, []);
    assert_eq!(nodes[0].members()[0].state, MemberState::Suspect, "probed afresh, not condemned");
}

#[test]
fn a_probe_that_went_unanswered_during_our_own_pause_is_no_suspicion() {
    let mut peer = Membership::new(identity(2), Preset::Lan, 2);
    let mut sleeper = Membership::new(identity(1), Preset::Lan, 1);
    peer.join(at(1), identity(1));
    while let Some(output) = peer.poll() {
        if let MembershipOutput::Send { data, .. } = output {
            sleeper.handle_data(at(1), &data).unwrap();
        }
    }
    // The first probe goes out in time, and nobody hears it; what was due next fires after a minute of sleep.
    let mut suspected = false;
    for wake in [at(501), at(60_000)] {
        let mut timers = Vec::new();
        while let Some(output) = sleeper.poll() {
            match output {
                MembershipOutput::Timer { timer, .. } => timers.push(timer),
                MembershipOutput::Event(event) => suspected |= matches!(event, MemberEvent::Suspect(_)),
                MembershipOutput::Send { .. } => {}
            }
        }
        timers.sort_by_key(|timer| timer.due);
        for timer in timers.into_iter().filter(|timer| timer.due <= Some(wake)) {
            sleeper.handle_timer(wake, timer);
        }
    }
    while let Some(output) = sleeper.poll() {
        suspected |= matches!(output, MembershipOutput::Event(MemberEvent::Suspect(_)));
    }
    assert!(!suspected);
}
