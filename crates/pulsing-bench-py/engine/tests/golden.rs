//! Golden traces: what a stream of known bytes at known times must come out as, however its bytes are split.
#![allow(clippy::unwrap_used)]

use pulsing_bench::chunk::Chunk;
use pulsing_bench::record::{Class, Failure, Outcome, Record, Source};
use pulsing_bench::sse::{Event, Parser};
use pulsing_bench::stats::Values;
use pulsing_bench::trace::Trace;

fn chunk(data: &str) -> Chunk {
    Chunk::read(&Event { name: String::new(), data: data.into() }).unwrap()
}

fn delta(field: &str, text: &str) -> Chunk {
    chunk(&format!(r#"{{"choices": [{{"index": 0, "delta": {{"{field}": {text:?}}}, "finish_reason": null}}]}}"#))
}

/// (milliseconds after the send, event)
fn record(events: &[(u64, Chunk)], outcome: Outcome) -> Record {
    let mut trace = Trace::new(1_000_000, 1_000_000, false);
    trace.send = Some(1_000_000);
    for (ms, chunk) in events {
        trace.take(chunk, 1_000_000 + ms * 1000);
    }
    trace.finish(outcome, 2_000_000, u64::MAX)
}

fn golden() -> Vec<(u64, Chunk)> {
    vec![
        (25, chunk(r#"{"choices": [{"delta": {"role": "assistant", "content": ""}}]}"#)),
        (300, delta("reasoning_content", "Let ")),
        (350, delta("reasoning_content", "see.")),
        (500, delta("content", "It is forty-two ")),
        (550, delta("content", "then.")),
        (551, chunk(r#"{"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}"#)),
        (
            600,
            chunk(
                r#"{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6,
                    "completion_tokens_details": {"reasoning_tokens": 2}}}"#,
            ),
        ),
        (601, chunk("[DONE]")),
    ]
}

fn ms(micros: Option<u64>) -> Option<f64> {
    micros.map(|micros| micros as f64 / 1000.0)
}

#[test]
fn the_golden_trace_is_read_as_it_must_be() {
    let record = record(&golden(), Outcome::Ok);
    assert_eq!(ms(record.ttft()), Some(300.0));
    assert_eq!(ms(record.ttfo()), Some(500.0));
    assert_eq!((record.tokens, record.source, record.reasoning), (6, Source::Usage, Some(2)));
    assert_eq!(record.tpot(), Some(50_000.0));
    assert_eq!(ms(record.e2e()), Some(550.0));
    assert_eq!(record.end, Some(1_601_000));
    assert_eq!(record.gaps, [50_000, 150_000, 50_000]);
    let mut itl: Values = record.gaps.iter().map(|gap| f64::from(*gap)).collect();
    itl.push_zeros(record.zero_gaps());
    let itl = itl.summary().unwrap();
    assert_eq!((itl.n, itl.p50, itl.p99), (5, 50.0, 146.0));
    // The identity: the gaps and the first token are the whole.
    assert_eq!(
        record.ttft().unwrap() + record.gaps.iter().map(|gap| u64::from(*gap)).sum::<u64>(),
        record.e2e().unwrap()
    );
}

#[test]
fn tokens_inside_the_window_follow_the_text_of_their_events() {
    let mut trace = Trace::new(0, 0, false);
    trace.send = Some(0);
    for (ms, chunk) in golden() {
        trace.take(&chunk, ms * 1000);
    }
    // The event at 500 ms holds 3 of 6 tokens: 5 of them by then.
    assert_eq!(trace.finish(Outcome::Ok, 700_000, 500_000).in_window, 5.0 / 6.0);
}

#[test]
fn running_usage_says_how_many_tokens_an_event_holds() {
    let with = |text: &str, n: u64| {
        chunk(&format!(
            r#"{{"choices": [{{"delta": {{"content": {text:?}}}}}], "usage": {{"completion_tokens": {n}}}}}"#
        ))
    };
    let events = [(100, with("abc", 1)), (200, with("d", 5)), (300, with("efg", 6))];
    let whole = record(&events, Outcome::Ok);
    assert_eq!((whole.tokens, whole.source), (6, Source::CumulativeUsage));
    let mut trace = Trace::new(0, 0, false);
    for (ms, chunk) in &events {
        trace.take(chunk, ms * 1000);
    }
    assert_eq!(trace.finish(Outcome::Cut, 0, 200_000).in_window, 5.0 / 6.0);
}

#[test]
fn without_usage_events_are_counted_and_a_usage_of_zero_is_no_usage() {
    let mut events = golden();
    events.remove(6);
    let record_ = record(&events, Outcome::Ok);
    assert_eq!((record_.tokens, record_.source), (4, Source::Events));
    events.push((602, chunk(r#"{"choices": [], "usage": {"completion_tokens": 0}}"#)));
    assert_eq!(record(&events, Outcome::Ok).source, Source::Events);
}

#[test]
fn no_token_means_no_latency() {
    let events =
        [(25, chunk(r#"{"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}"#)), (30, chunk("[DONE]"))];
    let record = record(&events, Outcome::Ok);
    assert_eq!((record.ttft(), record.tpot(), record.e2e(), record.tokens), (None, None, None, 0));
}

#[test]
fn one_token_has_no_time_per_token() {
    let record = record(&[(40, delta("content", "x"))], Outcome::Ok);
    assert_eq!((record.ttft(), record.tpot(), record.zero_gaps()), (Some(40_000), None, 0));
}

#[test]
fn every_channel_counts() {
    let call = r#"{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}"#;
    for chunk in [
        delta("content", "x"),
        delta("reasoning", "x"),
        delta("reasoning_content", "x"),
        chunk(call),
        chunk(r#"{"choices": [{"text": "x", "finish_reason": null}]}"#),
    ] {
        assert!(chunk.has_token(), "{chunk:?}");
    }
    // Some servers send the text under both names; it is one text.
    let both = chunk(r#"{"choices": [{"delta": {"reasoning": "ab", "reasoning_content": "ab", "content": null}}]}"#);
    assert_eq!((both.reasoning.as_str(), both.visible.as_str()), ("ab", ""));
}

#[test]
fn errors_inside_the_stream_are_errors() {
    let read = |name: &str, data: &str| {
        Chunk::read(&Event { name: name.into(), data: data.into() })
            .map_err(|Failure { class, reason, .. }| (class, reason))
    };
    assert_eq!(
        read("", r#"{"error": {"message": "out of memory"}}"#),
        Err((Class::StreamError, "out of memory".into()))
    );
    assert_eq!(read("", r#"{"error": "boom"}"#), Err((Class::StreamError, "boom".into())));
    assert_eq!(read("error", "overloaded"), Err((Class::StreamError, "overloaded".into())));
    assert_eq!(read("", r#"{"choices": [{"#).unwrap_err().0, Class::BadJson);
    assert_eq!(read("", r#"{"choices": [{"delta": {"content": 7}}]}"#).unwrap_err().0, Class::BadJson);
    assert!(read("", r#"{"choices": null, "error": null}"#).is_ok());
}

const BODY: &str = "\u{feff}: ping\r\n\r\nevent: message\ndata: {\"choices\": [{\"delta\": {\"role\": \"assistant\", \"content\": \"\"}}]}\n\n\
    data:{\"choices\": [{\"delta\":\ndata: {\"content\": \"héllo 😀 wörld\"}}]}\r\n\r\nid: 7\rretry: 5\rdata: {\"choices\": [{\"delta\": {\"reasoning\": \"日本\"}}]}\r\r\
    data: {\"choices\": [], \"usage\": {\"completion_tokens\": 9}}\n\n: bye\ndata\n\ndata: [DONE]";

fn parse(pieces: &[&[u8]]) -> Vec<Event> {
    let mut parser = Parser::default();
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(piece, |event| events.push(event)).unwrap();
    }
    events.extend(parser.finish());
    events
}

#[test]
fn every_way_of_splitting_the_bytes_gives_the_same_events() {
    let body = BODY.as_bytes();
    let whole = parse(&[body]);
    let data: Vec<String> = whole.iter().map(|event| String::from_utf8_lossy(&event.data).into_owned()).collect();
    assert_eq!(data.len(), 6, "{data:?}");
    assert_eq!(whole[0].name, "message");
    assert_eq!(data[1], "{\"choices\": [{\"delta\":\n{\"content\": \"héllo 😀 wörld\"}}]}");
    assert_eq!((data[4].as_str(), data[5].as_str()), ("", "[DONE]"));
    for first in 0..=body.len() {
        assert_eq!(parse(&[&body[..first], &body[first..]]), whole, "split at {first}");
        for second in first..=body.len() {
            assert_eq!(
                parse(&[&body[..first], &body[first..second], &body[second..]]),
                whole,
                "split at {first}, {second}"
            );
        }
    }
    assert_eq!(parse(&body.chunks(1).collect::<Vec<_>>()), whole);
}
