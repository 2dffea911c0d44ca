//! The input of a request: messages, calls of functions and what they returned.

use serde_json::{Map, Value, json};

use super::super::ApiError;

/// The messages of a chat that say the same.
pub(super) fn messages(instructions: Option<&str>, input: &Value) -> Result<Vec<Value>, ApiError> {
    let mut messages = Vec::new();
    if let Some(text) = instructions {
        messages.push(json!({"role": "system", "content": text}));
    }
    match input {
        Value::String(text) => messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                push(&mut messages, item, &format!("input[{index}]"))?;
            }
        }
        _ => return Err(bad("input", "`input` must be a string or a non-empty array of items".to_owned())),
    }
    Ok(messages)
}

fn bad(at: &str, message: String) -> ApiError {
    ApiError::invalid(Some(at), message)
}

fn push(messages: &mut Vec<Value>, item: &Value, at: &str) -> Result<(), ApiError> {
    let Value::Object(item) = item else {
        return Err(bad(at, format!("`{at}` must be an object")));
    };
    let text = |key: &str| item.get(key).and_then(Value::as_str);
    let needed =
        |key: &str| text(key).ok_or_else(|| bad(&format!("{at}.{key}"), format!("`{at}.{key}` must be a string")));
    match text("type").unwrap_or("message") {
        "message" => {
            let role = needed("role")?;
            let content = content(item.get("content"), at)?;
            messages.push(json!({"role": role, "content": content}));
        }
        "function_call" => {
            let call = json!({
                "id": needed("call_id")?,
                "type": "function",
                "function": {"name": needed("name")?, "arguments": needed("arguments")?},
            });
            // Calls made together are one message, also with the text that came before them.
            match messages.last_mut().and_then(Value::as_object_mut).filter(|last| last["role"] == "assistant") {
                Some(last) => {
                    if let Value::Array(calls) = last.entry("tool_calls").or_insert_with(|| json!([])) {
                        calls.push(call);
                    }
                }
                None => messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let id = needed("call_id")?;
            let output = item.get("output").map_or(Ok(Value::Null), |output| match output {
                Value::Array(_) => content(Some(output), at),
                other => Ok(other.clone()),
            })?;
            messages.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
        }
        // What a model thought in earlier turns is not shown to it again, as in chats.
        "reasoning" => {}
        "item_reference" => {
            return Err(bad(
                at,
                format!(
                    "`{at}` refers to an item of an earlier response; responses are not stored here: send the item itself"
                ),
            ));
        }
        other => {
            let other: String = other.chars().take(80).collect();
            return Err(bad(
                at,
                format!(
                    "`{at}` has the type {other:?}; message, function_call, function_call_output and reasoning are understood"
                ),
            ));
        }
    }
    Ok(())
}

fn content(value: Option<&Value>, at: &str) -> Result<Value, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(Value::String(String::new())),
        Some(Value::String(text)) => Ok(Value::String(text.clone())),
        Some(Value::Array(parts)) => {
            let parts: Result<Vec<Value>, ApiError> =
                parts.iter().enumerate().map(|(index, one)| part(one, &format!("{at}.content[{index}]"))).collect();
            Ok(Value::Array(parts?))
        }
        Some(_) => Err(bad(&format!("{at}.content"), format!("`{at}.content` must be a string or an array of parts"))),
    }
}

fn part(value: &Value, at: &str) -> Result<Value, ApiError> {
    match value["type"].as_str() {
        Some("input_text" | "output_text" | "text") => Ok(json!({"type": "text", "text": value["text"]})),
        Some("refusal") => Ok(json!({"type": "refusal", "refusal": value["refusal"]})),
        Some("input_image") if value["image_url"].is_string() => {
            let mut image = Map::new();
            image.insert("url".to_owned(), value["image_url"].clone());
            if value["detail"].is_string() {
                image.insert("detail".to_owned(), value["detail"].clone());
            }
            Ok(json!({"type": "image_url", "image_url": image}))
        }
        Some("input_audio") => Ok(json!({"type": "input_audio", "input_audio": value["input_audio"]})),
        Some("input_file" | "input_image") => {
            Err(bad(at, format!("`{at}` names a stored file; files are not stored here: send the content itself")))
        }
        _ => Err(bad(
            at,
            format!(
                "`{at}` has no type that is understood: input_text, output_text, refusal, input_image, input_audio"
            ),
        )),
    }
}
