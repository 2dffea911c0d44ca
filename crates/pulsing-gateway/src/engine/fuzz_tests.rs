//! Whatever engines stream, cut wherever: read the same, or refused, never a panic.

use bytes::Bytes;

use super::message::usage_in;
use super::normal::Normaliser;
use super::sse::Gate;
use crate::api::{Api, ApiError, Envelope, StreamWriter};
use crate::mutate::fuzz;
use crate::protocol::Delta;

const STREAMS: [&str; 5] = [
    "data: {\"id\":\"a\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\u{65e5}\u{672c}\"},\"finish_reason\":null}]}\n\n: ping\n\ndata: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\r\n\r\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n",
    "data:{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"x\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]}}]}\n\ndata:{\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"eos_token\"}],\"usage\":{\"prompt_tokens\":1}}\n\n",
    "event: x\nid: 7\nretry: 5\ndata: {\"choices\":[{\"text\":\"t\",\"logprobs\":{\"tokens\":[]},\"finish_reason\":\"length\"}]}\n\ndata: [DONE]",
    "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":2}}}\n\n",
];

fn read(parts: &[&[u8]]) -> Result<Vec<Delta>, ApiError> {
    let mut normaliser = Normaliser::default();
    let mut deltas = Vec::new();
    for part in parts {
        deltas.extend(normaliser.push(part)?);
    }
    deltas.extend(normaliser.finish()?);
    Ok(deltas)
}

/// Without the ids that are made up.
fn told(deltas: Result<Vec<Delta>, ApiError>) -> Result<Vec<(u32, String, String, bool)>, String> {
    let shown = |delta: Delta| (delta.index, delta.text, delta.finish_reason, delta.tool_calls_json.is_empty());
    deltas.map(|deltas| deltas.into_iter().map(shown).collect()).map_err(|error| error.message)
}

#[test]
fn whatever_an_engine_streams_is_read_the_same_however_it_is_cut() {
    let corpus: Vec<Vec<u8>> = STREAMS.iter().map(|text| text.as_bytes().to_vec()).collect();
    fuzz("streams", &corpus, 3_000, |input| {
        let whole = read(&[input]);
        let cut = input.len() / 3;
        assert_eq!(told(whole.clone()), told(read(&[&input[..cut], &input[cut..]])));
        if let Ok(deltas) = whole {
            let envelope = Envelope { api: Api::Chat, id: "i".into(), created: 7, model: "m".into(), choices: 1 };
            let mut writer = StreamWriter::new(&envelope, true);
            let mut out = Vec::new();
            let written = deltas.iter().try_for_each(|delta| writer.push(&mut out, delta));
            let _ = written.and_then(|()| writer.finish(&mut out));
            assert!(
                std::str::from_utf8(&out).unwrap().lines().all(|line| line.is_empty() || line.starts_with("data: "))
            );
        }
        let _ = Normaliser::default().whole(input);
        let _ = usage_in(input);
    });
}

/// The bytes that go out are those that came in, but for an end mark that was missing.
#[test]
fn whatever_an_engine_streams_passes_unchanged_or_not_at_all() {
    let corpus: Vec<Vec<u8>> = STREAMS.iter().map(|text| text.as_bytes().to_vec()).collect();
    fuzz("gate", &corpus, 10_000, |input| {
        for api in [Api::Chat, Api::Responses] {
            let mut gate = Gate::new(api);
            let mut out = Vec::new();
            for part in input.chunks(1 + input.len() / 4) {
                out.extend(gate.push(Bytes::copy_from_slice(part)).unwrap_or_default());
            }
            assert!(input.starts_with(&out));
            if let Some(rest) = gate.finish() {
                out.extend_from_slice(&rest);
                let same = out.len().min(input.len());
                assert_eq!(out[..same], input[..same]);
                assert!(out.len() >= input.len());
            }
        }
    });
}
