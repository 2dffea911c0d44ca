//! From a request to the chat request that means the same.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use bytes::Bytes;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::super::ApiError;
use super::items;

/// What is told with each response, as the client set it.
const ECHOED: [&str; 12] = [
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "service_tier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
];
/// What a Router that keeps nothing cannot do, with the value that asks for nothing, and the way out.
const STATEFUL: [(&str, &str, &str); 6] = [
    ("store", "false", "responses are not stored here; leave it out or set it to false"),
    ("previous_response_id", "null", "responses are not stored here; send the earlier turns as `input`"),
    ("conversation", "null", "conversations are not stored here; send the earlier turns as `input`"),
    ("background", "false", "responses are not stored here, so none can be fetched later; use `stream`"),
    ("prompt", "null", "prompt templates are not stored here; send the text itself"),
    ("truncation", "\"disabled\"", "a conversation is never shortened here; shorten it, or use \"disabled\""),
];

/// What has another name here than in a chat, with the value that asks for nothing, and the way out.
const ELSEWHERE: [(&str, &str, &str); 3] = [
    ("messages", "null", "a response has `input` and `instructions` in its place"),
    ("response_format", "null", "a response has `text.format` in its place"),
    ("n", "1", "a response is one answer; send as many requests"),
];

/// A request as a chat.
#[derive(Clone, Debug)]
pub struct Translated {
    /// The chat request.
    pub chat: Bytes,
    /// Where `model` lies in the client's own body.
    pub model_at: Option<Range<usize>>,
    /// What each response repeats.
    pub(super) echo: Map<String, Value>,
    /// The client wants the log probabilities.
    pub(super) logprobs: bool,
}

/// The members of an object as they stand there, of a repeated key the last.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scan;
        impl<'de> Visitor<'de> for Scan {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members: Vec<(Cow<'de, str>, &'de RawValue)> = Vec::new();
                let mut known: HashMap<Cow<'de, str>, usize> = HashMap::new();
                while let Some((Key(key), value)) = map.next_entry::<Key<'de>, &'de RawValue>()? {
                    match known.entry(key.clone()) {
                        Entry::Occupied(at) => members[*at.get()].1 = value,
                        Entry::Vacant(free) => {
                            free.insert(members.len());
                            members.push((key, value));
                        }
                    }
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Scan)
    }
}

struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: de::Error>(self, key: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(key)))
            }
            fn visit_str<E: de::Error>(self, key: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(key.to_owned())))
            }
        }
        deserializer.deserialize_str(Look)
    }
}

/// Reads a request. What a chat request knows under the same name goes into it as it stands, unknown fields too.
///
/// # Errors
/// 400 with the field at fault; also for what only a server that stores responses could do.
pub fn translate(body: &Bytes) -> Result<Translated, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ApiError::invalid(None, format!("The request body is not UTF-8: {error}")))?;
    let Members(members) = serde_json::from_str(text).map_err(|error| {
        ApiError::invalid(None, format!("The request body is not a JSON object that can be read: {error}"))
    })?;
    let find =
        |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, raw)| raw.get()).filter(|raw| *raw != "null");
    let bad = |name: &str, message: String| ApiError::invalid(Some(name), message);
    // A RawValue is JSON by its grammar; half of a surrogate pair, 1e999 and what is too deep have no value all the same.
    let value = |name: &str| {
        let raw = find(name).unwrap_or("null");
        serde_json::from_str::<Value>(raw).map_err(|error| bad(name, format!("`{name}` cannot be read: {error}")))
    };
    let shaped = |name: &str, fits: fn(&Value) -> bool, what: &str| {
        let value = value(name)?;
        if value.is_null() || fits(&value) { Ok(value) } else { Err(bad(name, format!("`{name}` must be {what}"))) }
    };
    for (name, nothing, why) in STATEFUL.into_iter().chain(ELSEWHERE) {
        if find(name).is_some_and(|raw| raw != nothing) {
            return Err(bad(name, format!("`{name}`: {why}")));
        }
    }
    let instructions = shaped("instructions", Value::is_string, "a string")?;
    let input = value("input")?;
    if input.is_null() {
        return Err(bad("input", "`input` is required".to_owned()));
    }
    let messages = items::messages(instructions.as_str(), &input)?;
    let mut chat = Map::new();
    chat.insert("messages".to_owned(), Value::Array(messages));
    let mut logprobs = false;
    for (index, wanted) in shaped("include", Value::is_array, "an array")?.as_array().into_iter().flatten().enumerate()
    {
        match wanted.as_str() {
            Some("message.output_text.logprobs") => logprobs = true,
            // Nothing is encrypted here: reasoning is shown, if the model shows it.
            Some("reasoning.encrypted_content") => {}
            _ => {
                let at = format!("include[{index}]");
                return Err(bad(
                    &at,
                    format!("`{at}` asks for what is not made here; message.output_text.logprobs is"),
                ));
            }
        }
    }
    if logprobs {
        chat.insert("logprobs".to_owned(), Value::Bool(true));
    }
    tools(&value("tools")?, &value("tool_choice")?, &mut chat)?;
    let text_settings = shaped("text", Value::is_object, "an object")?;
    if let Some(format) = format(&text_settings["format"])? {
        chat.insert("response_format".to_owned(), format);
    }
    if let Some(verbosity) = text_settings.get("verbosity").filter(|verbosity| !verbosity.is_null()) {
        chat.insert("verbosity".to_owned(), verbosity.clone());
    }
    if let Some(effort) =
        shaped("reasoning", Value::is_object, "an object")?.get("effort").filter(|effort| !effort.is_null())
    {
        chat.insert("reasoning_effort".to_owned(), effort.clone());
    }
    if find("stream") == Some("true") {
        // The last event tells the usage, which engines say in a stream only where they are asked to.
        chat.insert("stream_options".to_owned(), json!({"include_usage": true}));
    }
    let mut out = Value::Object(chat).to_string();
    out.pop();
    for (key, raw) in &members {
        let name = match key.as_ref() {
            "max_output_tokens" => "max_completion_tokens",
            // Said above, or of no meaning in a chat.
            "input"
            | "instructions"
            | "tools"
            | "tool_choice"
            | "text"
            | "reasoning"
            | "include"
            | "messages"
            | "n"
            | "stream_options"
            | "response_format"
            | "max_tool_calls"
            | "background"
            | "conversation"
            | "prompt"
            | "previous_response_id"
            | "truncation"
            | "logprobs" => continue,
            "top_logprobs" if !logprobs => continue,
            other => other,
        };
        out.push(',');
        out.push_str(&Value::from(name).to_string());
        out.push(':');
        out.push_str(raw.get());
    }
    out.push('}');
    let echo = ECHOED.iter().map(|name| Ok(((*name).to_owned(), value(name)?))).collect::<Result<_, ApiError>>()?;
    let model_at = members.iter().find(|(key, _)| key == "model").map(|(_, raw)| {
        let start = (raw.get().as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
        start..start + raw.get().len()
    });
    Ok(Translated { chat: out.into(), model_at, echo, logprobs })
}

fn tools(tools: &Value, choice: &Value, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let builtin = |at: &str, kind: &Value| {
        let kind: String = kind.as_str().unwrap_or("unknown").chars().take(80).collect();
        ApiError::invalid(
            Some(at),
            format!(
                "`{at}` is the built-in tool {kind:?}; only functions, which the client runs itself, are served here"
            ),
        )
    };
    match tools {
        Value::Null => {}
        Value::Array(list) => {
            let mut functions = Vec::with_capacity(list.len());
            for (index, tool) in list.iter().enumerate() {
                let at = format!("tools[{index}]");
                let Value::Object(tool) = tool else {
                    return Err(ApiError::invalid(Some(&at), format!("`{at}` must be an object")));
                };
                if tool.get("type") != Some(&json!("function")) {
                    return Err(builtin(&at, tool.get("type").unwrap_or(&Value::Null)));
                }
                let function: Map<String, Value> = tool
                    .iter()
                    .filter(|(key, _)| *key != "type")
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect();
                functions.push(json!({"type": "function", "function": function}));
            }
            if !functions.is_empty() {
                chat.insert("tools".to_owned(), Value::Array(functions));
            }
        }
        _ => return Err(ApiError::invalid(Some("tools"), "`tools` must be an array")),
    }
    match choice {
        Value::Null => {}
        Value::String(_) => {
            chat.insert("tool_choice".to_owned(), choice.clone());
        }
        Value::Object(named) if named.get("type") == Some(&json!("function")) => {
            let named = json!({"type": "function", "function": {"name": named.get("name")}});
            chat.insert("tool_choice".to_owned(), named);
        }
        other => return Err(builtin("tool_choice", &other["type"])),
    }
    Ok(())
}

/// `text.format` as a chat's `response_format`.
fn format(format: &Value) -> Result<Option<Value>, ApiError> {
    match format["type"].as_str() {
        None if format.is_null() => Ok(None),
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(json!({"type": "json_object"}))),
        Some("json_schema") => {
            let mut schema = format.as_object().cloned().unwrap_or_default();
            schema.remove("type");
            Ok(Some(json!({"type": "json_schema", "json_schema": schema})))
        }
        _ => Err(ApiError::invalid(
            Some("text.format"),
            "`text.format` must have the type \"text\", \"json_object\" or \"json_schema\"",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &str) -> Value {
        let translated =
            translate(&Bytes::copy_from_slice(body.as_bytes())).unwrap_or_else(|e| panic!("{body}: {e:?}"));
        serde_json::from_slice(&translated.chat).unwrap()
    }
    fn refused(body: &str) -> (String, String) {
        let error = translate(&Bytes::copy_from_slice(body.as_bytes())).expect_err(body);
        assert_eq!(error.status, 400);
        (error.param.unwrap_or_default().into_string(), error.message)
    }

    #[test]
    fn a_request_becomes_the_chat_that_means_the_same() {
        assert_eq!(
            chat(
                r#"{"model":"m","input":"hi","instructions":"be brief","max_output_tokens":5,"temperature":0,"stream":true,"foo":1}"#
            ),
            json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
                   "model": "m", "max_completion_tokens": 5, "temperature": 0, "stream": true, "foo": 1,
                   "stream_options": {"include_usage": true}})
        );
        assert_eq!(
            chat(
                r#"{"input":[{"role":"developer","content":"d"},
                    {"type":"message","role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"u","detail":"low"}]},
                    {"type":"reasoning","summary":[]},
                    {"type":"message","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[]}]},
                    {"type":"function_call","call_id":"c1","name":"f","arguments":"{}"},
                    {"type":"function_call","call_id":"c2","name":"g","arguments":"{}"},
                    {"type":"function_call_output","call_id":"c1","output":"4"}]}"#
            )["messages"],
            json!([
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u", "detail": "low"}}]},
                {"role": "assistant", "content": [{"type": "text", "text": "b"}],
                 "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
            ])
        );
        let asked = chat(
            r#"{"input":"x","tools":[{"type":"function","name":"f","parameters":{},"strict":true}],"tool_choice":{"type":"function","name":"f"},
                "text":{"format":{"type":"json_schema","name":"s","schema":{}}},"reasoning":{"effort":"low"},"include":["message.output_text.logprobs"],"top_logprobs":2}"#,
        );
        assert_eq!(
            asked["tools"],
            json!([{"type": "function", "function": {"name": "f", "parameters": {}, "strict": true}}])
        );
        assert_eq!(asked["tool_choice"], json!({"type": "function", "function": {"name": "f"}}));
        assert_eq!(
            asked["response_format"],
            json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {}}})
        );
        assert_eq!(
            (&asked["reasoning_effort"], &asked["logprobs"], &asked["top_logprobs"]),
            (&json!("low"), &json!(true), &json!(2))
        );
    }

    #[test]
    fn what_cannot_be_read_or_has_no_place_here_is_refused_by_its_name() {
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        for (name, value) in [
            ("instructions", r#""\ud800""#),
            ("input", r#""\ud800""#),
            ("tools", r#"[{"type":"function","name":"f","parameters":{"maximum":1e999}}]"#),
            ("tools", &format!(r#"[{{"type":"function","name":"f","parameters":{{"x":{deep}}}}}]"#)),
            ("metadata", &deep),
            ("text", "5"),
            ("text", r#"{"format":{"type":"json_schema","name":"\ud800"}}"#),
            ("reasoning", r#""low""#),
            ("include", r#""message.output_text.logprobs""#),
            ("messages", r#"[{"role":"user","content":"x"}]"#),
            ("response_format", r#"{"type":"json_object"}"#),
            ("n", "2"),
        ] {
            let rest = if name == "input" { "" } else { r#","input":"x""# };
            let (param, message) = refused(&format!(r#"{{"{name}":{value}{rest}}}"#));
            assert_eq!(param, name, "{message}");
            assert!(message.contains(&format!("`{name}`")), "{message}");
        }
        assert_eq!(chat(r#"{"input":"x","n":1,"messages":null,"text":null}"#)["messages"][0]["content"], json!("x"));
    }

    #[test]
    fn a_hundred_thousand_members_are_read_in_one_pass_and_the_last_of_a_repeated_one_counts() {
        let many: String = (0..100_000).map(|at| format!(r#""k{at}":{at},"#)).collect();
        let body = format!(r#"{{{many}"k7":"again","input":"first","input":"last"}}"#);
        let read = chat(&body);
        assert_eq!((&read["k7"], &read["k99999"]), (&json!("again"), &json!(99999)));
        assert_eq!(read["messages"], json!([{"role": "user", "content": "last"}]));
    }

    #[test]
    fn numbers_too_large_for_a_float_stay_what_they_are() {
        let body = Bytes::from_static(br#"{"input":"x","seed":123456789012345678901234567890}"#);
        let chat = translate(&body).unwrap().chat;
        assert!(String::from_utf8_lossy(&chat).contains(r#""seed":123456789012345678901234567890"#));
    }

    #[test]
    fn what_needs_a_memory_or_a_built_in_tool_is_refused_in_words() {
        for (extra, at, says) in [
            (r#""store":true"#, "store", "not stored"),
            (r#""previous_response_id":"resp_1""#, "previous_response_id", "not stored"),
            (r#""conversation":"c""#, "conversation", "not stored"),
            (r#""background":true"#, "background", "not stored"),
            (r#""prompt":{"id":"p"}"#, "prompt", "not stored"),
            (r#""truncation":"auto""#, "truncation", "shortened"),
            (r#""tools":[{"type":"web_search"}]"#, "tools[0]", "built-in tool \"web_search\""),
            (r#""tool_choice":{"type":"file_search"}"#, "tool_choice", "built-in"),
            (r#""include":["file_search_call.results"]"#, "include[0]", "not made here"),
            (r#""text":{"format":{"type":"grammar"}}"#, "text.format", "json_schema"),
            (r#""instructions":3"#, "instructions", "string"),
        ] {
            let (param, message) = refused(&format!(r#"{{"input":"x",{extra}}}"#));
            assert_eq!(param, at);
            assert!(message.contains(says), "{message}");
        }
        for (input, at) in [
            ("null", "input"),
            ("[]", "input"),
            ("3", "input"),
            ("[3]", "input[0]"),
            (r#"[{"type":"item_reference","id":"x"}]"#, "input[0]"),
            (r#"[{"type":"computer_call"}]"#, "input[0]"),
            (r#"[{"content":"x"}]"#, "input[0].role"),
            (r#"[{"role":"user","content":[{"type":"input_file","file_id":"f"}]}]"#, "input[0].content[0]"),
            (r#"[{"role":"user","content":3}]"#, "input[0].content"),
        ] {
            assert_eq!(refused(&format!(r#"{{"input":{input}}}"#)).0, at, "{input}");
        }
        let nulls = r#"{"input":"x","store":null,"previous_response_id":null,"tools":null,"include":null,"text":null,"reasoning":null,"truncation":"disabled","store":false}"#;
        assert_eq!(chat(nulls)["messages"][0]["content"], "x");
    }
}
