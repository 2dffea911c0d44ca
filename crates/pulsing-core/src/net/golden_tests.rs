//! What stands on the wire, byte for byte: one file of `tests/golden` for each message of each version.
//!
//! A build that speaks a version has to read and write its files as they are. A failing test prints what the file would be;
//! that file may be added, never changed, once a version has been released.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::cluster::{Delta, Digest, Gone, Membership, MembershipOutput, OwnerVersion, Preset, Put};
use crate::error::AppError;
use crate::id::{ActorId, NodeId};
use crate::net::wire::{
    self, AcceptedHeader, CallHeader, CreditHeader, DigestHeader, EmptyHeader, ErrorHeader, FRAME_PREFIX, Kind,
    RefHeader, ReplyHeader, RootHeader,
};

fn identity(last: u8) -> Identity {
    let addr = SocketAddr::new([192, 0, 2, last].into(), 8000);
    Identity::new(NodeId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f00 + u128::from(last)), addr, 0x0a0b_0c0d)
}

fn actor(last: u8) -> Bytes {
    Bytes::copy_from_slice(&ActorId(0x1112_1314_1516_1718_191a_1b1c_1d1e_1f00 + u128::from(last)).to_bytes())
}

fn frame(kind: Kind, header: &impl Message, body: &[u8]) -> Vec<u8> {
    [&wire::encode(kind, header, body.len())[..], body].concat()
}

fn opening(message: &impl Message) -> Vec<u8> {
    let (mut here, mut there) = tokio::io::duplex(1 << 16);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        write_opening(&mut here, Versions { lowest: 1, highest: 1 }, &message.encode_to_vec()).await.unwrap();
        drop(here);
        let mut bytes = Vec::new();
        there.read_to_end(&mut bytes).await.unwrap();
        bytes
    })
}

fn later(message: &impl Message) -> Vec<u8> {
    let message = message.encode_to_vec();
    [&(message.len() as u32).to_le_bytes()[..], &message].concat()
}

/// Every message of version 1.
fn version_1() -> BTreeMap<&'static str, Vec<u8>> {
    let hello = Hello {
        cluster: "default".into(),
        identity: identity(1).encode().into(),
        lane: Lane::Small.code(),
        session: Bytes::from_static(&[0x21; 16]),
        nonce: Bytes::from_static(&[0x22; 32]),
    };
    let challenge = Answer {
        identity: identity(2).encode().into(),
        nonce: Bytes::from_static(&[0x23; 32]),
        proof: Bytes::from_static(&[0x24; 32]),
        ..Answer::default()
    };
    let reject = Answer { reject: "no".into(), fatal: true, ..Answer::default() };
    let call = CallHeader {
        call: 7,
        actor: actor(1),
        tell: false,
        codec: 1,
        segments: vec![3, 4],
        timeout_ms: Some(30_000),
        sender: actor(2),
        chain: vec![actor(3), actor(2)],
        trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into(),
        no_wait: true,
        window: 64,
        message: 9,
        after: 5,
    };
    let reply = ReplyHeader { call: 7, codec: 1, segments: vec![2, 300], message: 9, after: 5 };
    let app = AppError {
        type_name: "builtins.ValueError".into(),
        message: "no".into(),
        traceback: "tb".into(),
        code: -400,
        data: Bytes::from_static(b"x"),
    };
    let put = Put {
        version: 2,
        actor: actor(1).to_vec(),
        name: "a".into(),
        class: "b".into(),
        metadata: BTreeMap::from([("k".into(), "v".into())]),
        unique: true,
        claimed: 300,
        lost_to: actor(4).to_vec(),
    };
    let delta = Delta {
        owner: identity(1).node.to_bytes().to_vec(),
        from: 1,
        to: 3,
        full: false,
        puts: vec![put],
        gone: vec![Gone { version: 3, actor: actor(3).to_vec() }],
        ..Delta::default()
    };
    let part = Delta { until: 500, shipment: 0x0102_0304_0506_0708, base: 1, ..delta.clone() };
    let owners = vec![OwnerVersion { node: identity(1).node.to_bytes().to_vec(), version: 300 }];
    let digest = Digest { owners, ..Digest::default() };
    let scoped = Digest { buckets: 0x21, only: identity(1).node.to_bytes().to_vec(), ..digest.clone() };
    let root = RootHeader { root: 0x0102_0304_0506_0708, buckets: Vec::new() };
    BTreeMap::from([
        ("hello", opening(&hello)),
        ("challenge", opening(&challenge)),
        ("reject", opening(&reject)),
        ("proof", later(&Proof { proof: Bytes::from_static(&[0x25; 32]) })),
        ("welcome", later(&Answer::default())),
        ("call", frame(Kind::Call, &call, b"abcdefg")),
        ("tell", frame(Kind::Call, &CallHeader { tell: true, timeout_ms: None, ..call.clone() }, b"abcdefg")),
        ("value", frame(Kind::Value, &reply, b"ab")),
        ("error", frame(Kind::Error, &ErrorHeader::from_error(7, &Error::App(Box::new(app))), b"")),
        ("stream-start", frame(Kind::StreamStart, &RefHeader { id: 7 }, b"")),
        ("item", frame(Kind::Item, &ReplyHeader { segments: vec![2], message: 0, ..reply }, b"ab")),
        ("end", frame(Kind::End, &RefHeader { id: 7 }, b"")),
        ("credit", frame(Kind::Credit, &CreditHeader { call: 300, items: 32 }, b"")),
        ("cancel", frame(Kind::Cancel, &RefHeader { id: 7 }, b"")),
        ("chunk", frame(Kind::Chunk, &RefHeader { id: 9 }, b"defg")),
        ("arrived", frame(Kind::Arrived, &RefHeader { id: 9 }, b"")),
        ("abort", frame(Kind::Abort, &RefHeader { id: 9 }, b"")),
        ("accepted", frame(Kind::Accepted, &AcceptedHeader { actor: actor(1), count: 128, ended: true }, b"")),
        ("datagram", frame(Kind::Datagram, &EmptyHeader {}, &announcement())),
        ("delta", frame(Kind::Delta, &EmptyHeader {}, &delta.encode())),
        ("digest", frame(Kind::Digest, &DigestHeader { reply: true }, &digest.encode())),
        ("delta-part", frame(Kind::Delta, &EmptyHeader {}, &part.encode())),
        ("digest-scoped", frame(Kind::Digest, &DigestHeader { reply: false }, &scoped.encode())),
        ("root-buckets", frame(Kind::Root, &RootHeader { buckets: vec![1, 2], ..root.clone() }, b"")),
        ("root", frame(Kind::Root, &root, b"")),
        ("bye", frame(Kind::Bye, &EmptyHeader {}, b"")),
    ])
}

/// The first datagram of a node that joins.
fn announcement() -> Bytes {
    let mut membership = Membership::new(identity(1), Preset::Lan, 7);
    membership.join(Duration::ZERO, identity(2));
    loop {
        if let MembershipOutput::Send { data, .. } = membership.poll().unwrap() {
            return data;
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    let line = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    bytes.chunks(32).map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_message_of_version_1_is_what_its_file_says() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1");
    let messages = version_1();
    for (name, bytes) in &messages {
        let path = dir.join(format!("{name}.hex"));
        let file = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(file.trim_end(), hex(bytes), "{}", path.display());
    }
    let files = std::fs::read_dir(&dir).unwrap().map(Result::unwrap);
    // What datagrams carry has a folder of its own (`cluster/golden_tests.rs`).
    let files = files.filter(|entry| entry.file_type().unwrap().is_file());
    let files: BTreeSet<String> = files.map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert_eq!(files, messages.keys().map(|name| format!("{name}.hex")).collect());
}

#[test]
fn every_kind_of_frame_has_a_file_and_is_read_back() {
    let prefix = |bytes: &[u8]| wire::decode_prefix(bytes[..FRAME_PREFIX].try_into().unwrap()).unwrap();
    let mut seen = BTreeSet::new();
    for (name, bytes) in version_1() {
        if ["hello", "challenge", "reject", "proof", "welcome"].contains(&name) {
            continue;
        }
        let found = prefix(&bytes);
        assert_eq!(FRAME_PREFIX + found.header + found.body, bytes.len(), "{name}");
        assert!(found.kind.is_some(), "{name}");
        seen.insert(bytes[4]);
    }
    let known = |kind: &u8| prefix(&[4, 0, 0, 0, *kind, 0, 0, 0]).kind.is_some();
    assert_eq!(seen, (0..=255).filter(known).collect());
}

#[test]
fn versions_meet_at_the_latest_that_both_speak() {
    let speaks = |lowest, highest| Versions { lowest, highest };
    for (one, other, met) in [
        (speaks(1, 1), speaks(1, 1), Some(1)),
        (speaks(1, 2), speaks(1, 1), Some(1)),
        (speaks(1, 2), speaks(2, 3), Some(2)),
        (speaks(2, 3), speaks(1, 1), None),
        (speaks(1, 1), speaks(0, 0), None),
        // Nonsense meets nobody.
        (speaks(1, 2), speaks(9, 1), None),
    ] {
        assert_eq!(one.meet(other), met, "{one} and {other}");
        assert_eq!(other.meet(one), met, "{other} and {one}");
    }
}

#[test]
fn a_dialler_says_which_side_to_upgrade() {
    let (mine, its) = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap());
    let told = strangers((mine, Versions { lowest: 1, highest: 1 }), (its, Versions { lowest: 2, highest: 3 }));
    assert_eq!(
        told,
        "wire versions do not meet: 10.0.0.1:1 speaks 1..1, 10.0.0.2:2 speaks 2..3; upgrade Pulsing at 10.0.0.1:1"
    );
    let told = strangers((mine, Versions { lowest: 2, highest: 3 }), (its, Versions { lowest: 1, highest: 1 }));
    assert!(told.ends_with("upgrade Pulsing at 10.0.0.2:2"), "{told}");
}
