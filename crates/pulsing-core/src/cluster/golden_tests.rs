//! What members tell each other, byte for byte: a file of `tests/golden/v1/membership` for each kind of datagram.
//!
//! Those of `net/golden_tests.rs` are frames; these are what frames of kind `Datagram` carry in wire version 1. The same
//! rules hold: a file may be added, never changed, once a version has been released. A failing test prints what the files
//! would be.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use foca::{Codec, Header, Member, Message, PostcardCodec, State};

use super::note::{self, Body, Note};
use super::{Identity, Membership, Preset};
use crate::id::NodeId;
use crate::system::MemberState;

fn identity(last: u8) -> Identity {
    let addr = match last {
        // One of them is not IPv4.
        4 => std::net::SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 4], 8000)),
        _ => std::net::SocketAddr::from(([192, 0, 2, last], 8000)),
    };
    Identity::new(NodeId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f00 + u128::from(last)), addr, 0x0a0b_0c0d)
}

/// All that foca sends.
fn messages() -> Vec<Message<Identity>> {
    let (target, origin, probe_number) = (identity(3), identity(4), 200);
    vec![
        Message::Ping(probe_number),
        Message::Ack(probe_number),
        Message::PingReq { target, probe_number },
        Message::IndirectPing { origin, probe_number },
        Message::IndirectAck { target, probe_number },
        Message::ForwardedAck { origin, probe_number },
        Message::Announce,
        Message::Feed,
        Message::Gossip,
        Message::Broadcast,
        Message::TurnUndead,
    ]
}

fn swim_name(message: &Message<Identity>) -> &'static str {
    match message {
        Message::Ping(_) => "swim-ping",
        Message::Ack(_) => "swim-ack",
        Message::PingReq { .. } => "swim-ping-req",
        Message::IndirectPing { .. } => "swim-indirect-ping",
        Message::IndirectAck { .. } => "swim-indirect-ack",
        Message::ForwardedAck { .. } => "swim-forwarded-ack",
        Message::Announce => "swim-announce",
        Message::Feed => "swim-feed",
        Message::Gossip => "swim-gossip",
        Message::Broadcast => "swim-broadcast",
        Message::TurnUndead => "swim-turn-undead",
    }
}

/// What comes with a message: a member in each state, where news may come along at all.
fn updates(message: &Message<Identity>) -> Vec<Member<Identity>> {
    let alive = Member::new(identity(3), 2, State::Alive);
    match message {
        Message::Announce | Message::TurnUndead | Message::Broadcast => Vec::new(),
        Message::Feed => vec![alive],
        _ => {
            vec![alive, Member::new(identity(4), 300, State::Suspect), Member::new(identity(5), u16::MAX, State::Down)]
        }
    }
}

fn swim(message: Message<Identity>) -> Vec<u8> {
    let updates = updates(&message);
    let header = Header { src: identity(1), src_incarnation: 3, dst: identity(2), message };
    let mut packet = vec![note::SWIM];
    PostcardCodec.encode_header(&header, &mut packet).unwrap();
    if !updates.is_empty() {
        packet.extend((updates.len() as u16).to_be_bytes());
        updates.iter().for_each(|update| PostcardCodec.encode_member(update, &mut packet).unwrap());
    }
    packet
}

/// All that is beside it.
fn bodies() -> Vec<Body> {
    let (to, origin, suspected) = (identity(2), identity(4), Some(300));
    vec![
        Body::Ping { to, origin, suspected },
        Body::Pong { origin },
        Body::PingFor { target: identity(3), suspected },
        Body::Answered { target: identity(3) },
        Body::Silent { target: identity(3) },
        Body::Refused { target: identity(3) },
        Body::Leave,
        Body::YouAreDown { who: to },
        Body::Outbid { holder: identity(2) },
        Body::AddressShared { other: identity(3) },
        Body::Roster { hash: 0x0102_0304_0506_0708 },
    ]
}

fn note_name(body: &Body) -> &'static str {
    match body {
        Body::Ping { .. } => "note-ping",
        Body::Pong { .. } => "note-pong",
        Body::PingFor { .. } => "note-ping-for",
        Body::Answered { .. } => "note-answered",
        Body::Silent { .. } => "note-silent",
        Body::Refused { .. } => "note-refused",
        Body::Leave => "note-leave",
        Body::YouAreDown { .. } => "note-you-are-down",
        Body::Outbid { .. } => "note-outbid",
        Body::AddressShared { .. } => "note-address-shared",
        Body::Roster { .. } => "note-roster",
    }
}

fn note(body: Body) -> Vec<u8> {
    Note { from: identity(1), body }.encode().to_vec()
}

/// Every datagram of version 1.
fn version_1() -> BTreeMap<&'static str, Vec<u8>> {
    let swims = messages().into_iter().map(|message| (swim_name(&message), swim(message)));
    swims.chain(bodies().into_iter().map(|body| (note_name(&body), note(body)))).collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1/membership")
}

fn hex(bytes: &[u8]) -> String {
    let line = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    bytes.chunks(32).map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_datagram_of_version_1_is_what_its_file_says() {
    let datagrams = version_1();
    let mut wrong = String::new();
    for (name, bytes) in &datagrams {
        let file = std::fs::read_to_string(folder().join(format!("{name}.hex"))).unwrap_or_default();
        if file.trim_end() != hex(bytes) {
            wrong += &format!("{name}.hex\n{}\n\n", hex(bytes));
        }
    }
    assert!(wrong.is_empty(), "in {}:\n{wrong}", folder().display());
    let files: BTreeSet<String> =
        std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(files, datagrams.keys().map(|name| format!("{name}.hex")).collect());
}

#[test]
fn every_kind_of_datagram_has_a_file() {
    // The last byte of an announcement is its kind; the zeros after it stand for whatever belongs to another one.
    let announcement = swim(Message::Announce);
    let (_, before) = announcement[1..].split_last().unwrap();
    let known = |kind: &u8| {
        let header: Result<Header<Identity>, _> =
            PostcardCodec.decode_header(&[before, &[*kind], &[0; 64]].concat()[..]);
        header.is_ok()
    };
    let known: BTreeSet<u8> = (0..=127).filter(known).collect();
    let seen: BTreeSet<u8> = messages().into_iter().map(|message| swim(message)[1 + before.len()]).collect();
    assert_eq!(seen, known);

    // A note begins with its kind. With a hash behind it a ping has all that any note needs.
    let mut ping = note(bodies()[0])[1..].to_vec();
    ping.extend([0x31, 1, 2, 3, 4, 5, 6, 7, 8]);
    let mut known = BTreeSet::new();
    for kind in 0..=127 {
        ping[1] = kind;
        known.extend(Note::decode(&ping).unwrap().map(|_| kind));
    }
    assert_eq!(bodies().into_iter().map(|body| note(body)[2]).collect::<BTreeSet<_>>(), known);
}

#[test]
fn every_datagram_of_version_1_is_understood() {
    for body in bodies() {
        assert_eq!(Note::decode(&note(body)[1..]).unwrap(), Some(Note { from: identity(1), body }));
    }
    for (name, bytes) in version_1() {
        let mut membership = Membership::new(identity(2), Preset::Lan, 7);
        membership.handle_data(Duration::from_secs(1), &bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let seen = |last| membership.state_of(identity(last).node);
        if ["swim-ping", "swim-ack", "swim-gossip"].contains(&name) {
            assert_eq!(
                (seen(1), seen(3), seen(4)),
                (Some(MemberState::Alive), Some(MemberState::Alive), Some(MemberState::Suspect))
            );
        }
    }
}
