//! Whatever clients and Workers send: a verdict, never a panic; and what goes out is whole events of valid JSON.

use bytes::Bytes;
use prost::Message;
use serde_json::Value;

use super::*;
use crate::mutate::fuzz;
use crate::protocol::{Delta, Deltas};

const REQUESTS: [&str; 9] = [
    r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"h\u00e9"}]}],"stream":true,"stream_options":{"include_usage":true},"stop":["a","b"],"n":2,"seed":-5,"logit_bias":{"5":1.5},"user":"u"}"#,
    r#"{"prompt":["a","b"],"max_tokens":0,"logprobs":3,"best_of":2,"echo":false,"model":null}"#,
    r#"{"prompt":[[1,2],[3]],"session_params":{"session_id":"s"},"temperature":1e-3}"#,
    r#"{"input":["a",[1,2]],"encoding_format":"base64","dimensions":8,"model":"m"}"#,
    r#"{"messages":[{}],"return_token_strs":true,"add_special_tokens":false}"#,
    r#"{"tokens":[1,2,3]}"#,
    r#"{"model":"m","input":"x","instructions":"i","max_output_tokens":5,"text":{"format":{"type":"json_schema","name":"n","schema":{}}},"reasoning":{"effort":"low"},"include":["message.output_text.logprobs"]}"#,
    r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"u"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"4"}],"tools":[{"type":"function","name":"f","parameters":{}}],"tool_choice":{"type":"function","name":"f"}}"#,
    r#"{"a":{"b":[[[{"c":1e400}]]]},"messages":[{"content":null}],"mod\u0065l":"x","model":"y"}"#,
];

#[test]
fn whatever_a_client_sends_is_read_or_refused() {
    let corpus: Vec<Vec<u8>> = REQUESTS.iter().map(|text| text.as_bytes().to_vec()).collect();
    fuzz("requests", &corpus, 4_000, |input| {
        let body = Bytes::copy_from_slice(input);
        for api in Api::ALL.into_iter().filter(|api| *api != Api::Responses) {
            check(api, &body);
        }
        if let Ok(chat) = translate(&body) {
            serde_json::from_slice::<&serde_json::value::RawValue>(&chat.chat).unwrap();
            if let Some(at) = chat.model_at {
                serde_json::from_slice::<Value>(&body[at]).unwrap();
            }
            check(Api::Responses, &chat.chat);
        }
    });
}

fn check(api: Api, body: &Bytes) {
    match parse(api, body) {
        Ok(parsed) => {
            serde_json::from_slice::<&serde_json::value::RawValue>(&body[parsed.text.clone()]).unwrap();
            if let Some(at) = &parsed.model_at {
                serde_json::from_slice::<Value>(&body[at.clone()]).unwrap();
            }
            for one in &parsed.bodies {
                serde_json::from_slice::<&serde_json::value::RawValue>(one).unwrap();
            }
            let _ = parsed.prefix(body);
        }
        Err(error) => {
            assert_eq!(error.status, 400);
            assert!(error.to_json().len() < 4096);
        }
    }
}

/// What Workers send, changed at random, through every writer.
#[test]
fn whatever_a_worker_says_goes_out_as_whole_events_or_as_an_error() {
    let usage = Some(Usage { prompt_tokens: 3, completion_tokens: u32::MAX, cached_tokens: 1 });
    let tools = r#"[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\""}}]"#;
    let deltas = vec![
        Delta {
            text: "H\u{e9}\n\n".into(),
            logprobs_json: r#"{"content":[1],"refusal":null}"#.into(),
            ..Delta::default()
        },
        Delta { reasoning: "hm".into(), tool_calls_json: tools.into(), ..Delta::default() },
        Delta { finish_reason: "tool_calls".into(), usage, ..Delta::default() },
        Delta { index: 1, finish_reason: "stop".into(), ..Delta::default() },
    ];
    let whole = Deltas { deltas: deltas.clone() }.encode_to_vec();
    let corpus: Vec<Vec<u8>> =
        deltas.into_iter().map(|delta| Deltas { deltas: vec![delta] }.encode_to_vec()).chain([whole]).collect();
    let response = translate(&Bytes::from_static(REQUESTS[6].as_bytes())).unwrap();
    fuzz("writers", &corpus, 4_000, |input| {
        let Ok(Deltas { deltas }) = Deltas::decode(input) else { return };
        for (api, translated) in [(Api::Chat, None), (Api::Completions, None), (Api::Responses, Some(&response))] {
            let envelope = Envelope { api, id: "i".into(), created: 7, model: "m".into(), choices: 2 };
            let mut writer = Writer::new(&envelope, true, translated);
            let mut out = Vec::new();
            let mut written = deltas.iter().try_for_each(|delta| writer.push(&mut out, delta));
            if written.is_ok() {
                written = writer.finish(&mut out);
            }
            if let Err(error) = &written {
                writer.error(&mut out, error);
            }
            events(&out, written.is_ok());
            let mut answer = Collector::new(envelope, translated);
            if deltas.iter().try_for_each(|delta| answer.push(delta)).is_ok()
                && let Ok(body) = answer.finish()
            {
                serde_json::from_slice::<Value>(&body).unwrap();
            }
        }
    });
}

/// Every event is one line of JSON, perhaps behind its name; what is complete ends as it must, and only that.
fn events(out: &[u8], complete: bool) {
    let text = std::str::from_utf8(out).unwrap();
    let body = text.strip_suffix("\n\n").unwrap();
    let (mut done, mut finishes) = (0, [0; 2]);
    for event in body.split("\n\n") {
        let data = match event.strip_prefix("event: ") {
            Some(rest) => rest.split_once('\n').unwrap().1,
            None => event,
        };
        let data = data.strip_prefix("data: ").unwrap();
        assert!(!data.contains('\n'), "{event:?}");
        if data == "[DONE]" {
            done += 1;
            continue;
        }
        let value: Value = serde_json::from_str(data).unwrap();
        if let Some(choice) = value["choices"].get(0).filter(|choice| choice["finish_reason"].is_string()) {
            finishes[choice["index"].as_u64().unwrap() as usize] += 1;
        }
        done += usize::from(
            value["type"].as_str().is_some_and(|kind| matches!(kind, "response.completed" | "response.incomplete")),
        );
    }
    assert_eq!(done, usize::from(complete), "{text}");
    assert!(finishes.iter().all(|count| *count <= 1), "{text}");
}
