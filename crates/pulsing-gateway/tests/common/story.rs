//! Engines that count words, from where the client is, as vLLM and SGLang would.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::engine::{Engine, Turn};
use super::{FakeCluster, FakeWorker};

/// What the model says, if it may: a token a word.
pub const WORDS: usize = 7;
/// Tokens of a prompt.
const PROMPT: [u32; 3] = [900, 901, 902];
pub const FREE: usize = usize::MAX;

/// How an engine behaves.
#[derive(Clone, Copy)]
pub struct Script {
    pub profile: &'static str,
    /// Events of the first stream after which the connection breaks.
    pub cut: usize,
    /// The template drops the first word of an assistant's message.
    pub trims: bool,
    /// What the second stream says beside its text.
    pub strays: bool,
    /// Who speaks is told with every piece.
    pub talks: bool,
    pub tokenizes: bool,
    pub detokenizes: bool,
    /// It tells with an answer how it has read its prompt, if it is asked to.
    pub shows: bool,
}

pub const VLLM: Script = Script {
    profile: "vllm",
    cut: FREE,
    trims: false,
    strays: false,
    talks: false,
    tokenizes: true,
    detokenizes: true,
    shows: true,
};

pub fn words(range: impl IntoIterator<Item = usize>) -> String {
    range.into_iter().map(|at| format!("w{at} ")).collect()
}
fn ids(text: &str) -> Vec<u32> {
    text.split(' ').filter(|word| !word.is_empty()).map(|word| word[1..].parse().unwrap()).collect()
}

/// The text so far in a request, and whether it is the rest of an answer that is asked for.
fn so_far(asked: &Value) -> String {
    if let Some(prompt) = asked["prompt"].as_str() {
        return prompt.strip_prefix("hi").unwrap().to_owned();
    }
    match asked["continue_final_message"].as_bool() {
        Some(true) => {
            assert_eq!(asked["add_generation_prompt"], false);
            let last = asked["messages"].as_array().unwrap().last().unwrap();
            assert_eq!(last["role"], "assistant");
            last["content"].as_str().unwrap().to_owned()
        }
        _ => String::new(),
    }
}

/// How an engine reads a prompt.
fn prompt_of(script: Script, asked: &Value) -> Vec<u32> {
    let alone = asked["add_special_tokens"] == false;
    let mut text = ids(&if alone { asked["prompt"].as_str().unwrap().to_owned() } else { so_far(asked) });
    if script.trims && asked["messages"].is_array() && !text.is_empty() {
        text.remove(0);
    }
    let prompt = if alone { &[][..] } else { &PROMPT[..] };
    prompt.iter().copied().chain(text).collect()
}

/// An engine; `streams` counts those of all of them, so that each has an id of its own.
pub async fn engine(script: Script, streams: &Arc<AtomicUsize>) -> Arc<Engine> {
    let streams = Arc::clone(streams);
    Engine::start(move |turn| serve(turn, script, Arc::clone(&streams))).await
}

pub async fn serve(turn: Turn, script: Script, streams: Arc<AtomicUsize>) -> Option<TcpStream> {
    let asked: Value = serde_json::from_str(&turn.seen.body).unwrap();
    assert_eq!(asked["model"], "tiny");
    let path = turn.seen.head.split(' ').nth(1).unwrap().to_owned();
    if (path == "/tokenize" && !script.tokenizes) || (path == "/detokenize" && !script.detokenizes) {
        return turn.answer("404 Not Found", "", r#"{"detail":"Not Found"}"#).await;
    }
    match path.as_str() {
        "/tokenize" => {
            let tokens = prompt_of(script, &asked);
            turn.json(&json!({"count": tokens.len(), "tokens": tokens, "max_model_len": 100}).to_string()).await
        }
        "/detokenize" => {
            let tokens = asked["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as usize);
            turn.json(&json!({"prompt": words(tokens)}).to_string()).await
        }
        _ if asked["stream"] == false => {
            assert_eq!([&asked["max_tokens"], &asked["stream_options"]], [&json!(1), &Value::Null]);
            assert!(asked["max_completion_tokens"].as_u64().is_none_or(|most| most == 1));
            let prompt = prompt_of(script, &asked);
            let mut answer = json!({"usage": {"prompt_tokens": prompt.len(), "completion_tokens": 1}, "choices": [{}]});
            if script.shows && asked["return_token_ids"] == true {
                let holder = if path == "/v1/completions" { &mut answer["choices"][0] } else { &mut answer };
                holder["prompt_token_ids"] = json!(prompt);
            }
            turn.json(&answer.to_string()).await
        }
        // The text so far alone.
        "/v1/completions" if asked["add_special_tokens"] == false => {
            assert_eq!([&asked["max_tokens"], &asked["return_token_ids"]], [&json!(1), &json!(true)]);
            let choice = if script.shows { json!({"prompt_token_ids": prompt_of(script, &asked)}) } else { json!({}) };
            turn.json(&json!({"choices": [choice]}).to_string()).await
        }
        _ => stream(turn, script, &asked, streams.fetch_add(1, Ordering::SeqCst)).await,
    }
}

async fn stream(mut turn: Turn, script: Script, asked: &Value, number: usize) -> Option<TcpStream> {
    turn.begin().await;
    for (at, event) in events(script, asked, number).iter().enumerate() {
        if number == 0 && at == script.cut {
            // Half of what comes next, and then nothing.
            turn.chunk(&event.as_bytes()[..event.len() / 2]).await;
            return None;
        }
        turn.chunk(event.as_bytes()).await;
    }
    turn.end().await
}

pub fn events(script: Script, asked: &Value, number: usize) -> Vec<String> {
    let chat = asked["prompt"].is_null();
    let first = ids(&so_far(asked)).len();
    let most = asked["max_tokens"].as_u64().map_or(FREE, |most| first + most as usize);
    let most = asked["max_completion_tokens"].as_u64().map_or(most, |most| first + most as usize);
    let stop = asked["stop"].as_str().and_then(|stop| stop[1..].parse().ok()).unwrap_or(WORDS);
    let end = WORDS.min(stop).min(most);
    // The end and a stop string are a token, too.
    let (reason, tokens) = if end == most { ("length", end - first) } else { ("stop", end - first + 1) };
    let event = |choices: &str, more: &str| {
        let object = if chat { "chat.completion.chunk" } else { "text_completion" };
        let (id, created) = (format!("id-{number}"), 1000 + number);
        format!(
            "data: {{\"id\":\"{id}\",\"object\":\"{object}\",\"created\":{created},\"model\":\"tiny\",\"choices\":{choices}{more}}}\n\n"
        )
    };
    // An order of keys that no library sorts, and numbers that none holds.
    let choice = |said: &str, reason: &str| {
        let name = if chat { "delta" } else { "text" };
        let choice = format!("[{{\"index\":0,\"{name}\":{said},\"logprobs\":null,\"finish_reason\":{reason}}}]");
        event(&choice, if reason == "null" { ",\"big\":123456789012345678901234567890" } else { "" })
    };
    let piece = |text: &str| match (chat, script.talks) {
        (true, false) => format!("{{\"content\":\"{text}\"}}"),
        (true, true) => format!("{{\"role\":\"assistant\",\"content\":\"{text}\"}}"),
        (false, _) => format!("\"{text}\""),
    };
    let mut out = Vec::new();
    if chat && !script.talks {
        out.push(choice(r#"{"role":"assistant","content":""}"#, "null"));
    }
    if script.strays && number > 0 {
        out.push(choice(r#"{"reasoning_content":"hm"}"#, "null"));
    }
    out.extend((first..end).map(|at| choice(&piece(&format!("w{at} ")), "null")));
    out.push(choice(if chat { "{}" } else { "\"\"" }, &format!("\"{reason}\"")));
    if asked["stream_options"]["include_usage"] == true {
        let prompt = PROMPT.len() + first;
        let total = prompt + tokens;
        let usage = format!("{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{tokens}}}");
        out.push(event("[]", &format!(",\"usage\":{usage}")));
    }
    out.push("data: [DONE]\n\n".to_owned());
    out
}

pub fn join(engine: &Engine, cluster: &FakeCluster, more: &[(&str, &str)]) -> Arc<FakeWorker> {
    let mut metadata =
        vec![("kind", "worker"), ("protocol", "1..1"), ("model", "tiny"), ("state", "ready"), ("url", &engine.url)];
    metadata.extend_from_slice(more);
    cluster.worker_with("worker", &metadata, |_| async { panic!("an engine's worker gets no requests") })
}

pub const ALIKE: [(&str, &str); 2] = [("continue", "vllm"), ("fingerprint", "vllm 1 root")];

pub fn chat(extra: &str) -> String {
    format!(r#"{{"model":"alias","messages":[{{"role":"user","content":"hi"}}],"stream":true{extra}}}"#)
}
pub fn completion(extra: &str) -> String {
    format!(r#"{{"model":"alias","prompt":"hi","stream":true{extra}}}"#)
}

pub const GREEDY: &str = r#","temperature":0"#;
pub const USAGE: &str = r#","temperature":0,"stream_options":{"include_usage":true}"#;
