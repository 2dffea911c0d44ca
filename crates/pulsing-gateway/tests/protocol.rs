//! The hand-written messages and `proto/worker.proto` say the same.
#![allow(clippy::unwrap_used)]

#[path = "../../pulsing-core/tests/common/mutate.rs"]
mod mutate;

use std::path::Path;

use prost_reflect::{DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, ReflectMessage, Value};
use pulsing_gateway::protocol::{self, Answer, Deltas, Description, LoadReport, Request};

fn schema() -> DescriptorPool {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    let set = protox::compile(["worker.proto"], [proto]).unwrap();
    DescriptorPool::from_file_descriptor_set(set).unwrap()
}

/// A value other than the default for every field, different from field to field.
fn sample(field: &FieldDescriptor, seed: u32) -> Value {
    let one = match field.kind() {
        Kind::Uint32 => Value::U32(seed),
        Kind::Uint64 => Value::U64(u64::from(seed)),
        Kind::Fixed64 => Value::U64(u64::from(seed)),
        Kind::Bool => Value::Bool(true),
        Kind::Float => Value::F32(seed as f32),
        Kind::String => Value::String(format!("text {seed}")),
        Kind::Bytes => Value::Bytes(vec![seed as u8].into()),
        Kind::Message(message) => Value::Message(full(&message, seed * 100)),
        other => panic!("the test has no sample for {other:?}"),
    };
    if field.is_list() { Value::List(vec![one.clone(), one]) } else { one }
}

fn full(descriptor: &MessageDescriptor, seed: u32) -> DynamicMessage {
    let mut message = DynamicMessage::new(descriptor.clone());
    for field in descriptor.fields().filter(|field| field.containing_oneof().is_none()) {
        message.set_field(&field, sample(&field, seed + field.number()));
    }
    message
}

/// What the schema writes, our type reads and writes back byte for byte: no field is missing, renumbered or retyped.
fn agrees<M: prost::Message + Default>(message: &DynamicMessage) {
    let bytes = prost::Message::encode_to_vec(message);
    let ours: M = protocol::decode_bytes(&bytes).unwrap();
    let back = DynamicMessage::decode(message.descriptor(), protocol::encode(&ours).as_slice()).unwrap();
    assert_eq!(&back, message, "{}", message.descriptor().name());
    assert_eq!(back.unknown_fields().count(), 0);
}

#[test]
fn every_message_of_the_schema_survives_our_types() {
    let pool = schema();
    let get = |name: &str| pool.get_message_by_name(&format!("pulsing.worker.v1.{name}")).unwrap();
    agrees::<Deltas>(&full(&get("Deltas"), 0));
    agrees::<LoadReport>(&full(&get("LoadReport"), 0));
    agrees::<Description>(&full(&get("Description"), 0));
    agrees::<Answer>(&full(&get("Answer"), 0));
    let request = get("Request");
    let kinds: Vec<FieldDescriptor> = request.fields().filter(|field| field.containing_oneof().is_some()).collect();
    assert_eq!(kinds.len(), 5);
    for kind in kinds {
        let mut message = full(&request, 0);
        message.set_field(&kind, sample(&kind, kind.number()));
        agrees::<Request>(&message);
    }
}

#[test]
fn the_version_range_of_a_worker_is_honoured() {
    for (range, ok) in [
        ("1..1", true),
        ("1..3", true),
        ("0..9", true),
        ("1", true),
        ("2..3", false),
        ("", false),
        ("x..1", false),
        ("3..1", false),
    ] {
        assert_eq!(protocol::speaks_our_version(range), ok, "{range}");
    }
}

/// What a Worker sends a Router, or a Router a Worker, changed at random: an error or a message, never a panic.
#[test]
fn whatever_arrives_is_read_or_refused() {
    let pool = schema();
    let corpus: Vec<Vec<u8>> =
        pool.all_messages().map(|message| prost::Message::encode_to_vec(&full(&message, 7))).collect();
    let corpus: Vec<_> = corpus.into_iter().filter(|one| !one.is_empty()).collect();
    mutate::fuzz("worker protocol", &corpus, 20_000, |input| {
        let _ = protocol::decode_bytes::<Request>(input);
        let _ = protocol::decode_bytes::<Deltas>(input);
        let _ = protocol::decode_bytes::<LoadReport>(input);
        let _ = protocol::decode_bytes::<Description>(input);
        let _ = protocol::decode_bytes::<Answer>(input);
        let text = String::from_utf8_lossy(input);
        let _ = protocol::speaks_our_version(&text);
    });
}
