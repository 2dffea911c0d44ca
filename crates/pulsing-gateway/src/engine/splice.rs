//! Fields put into a client's JSON object; all other bytes stay as they are.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// What becomes of one field.
#[derive(Clone, Debug)]
pub(crate) struct Splice {
    name: &'static str,
    /// As JSON.
    pub(super) value: String,
    /// Also where it is not there, or null.
    always: bool,
}

impl Splice {
    /// It has this value, whether it was there or not.
    pub(crate) fn set(name: &'static str, value: impl ToString) -> Self {
        Self { name, value: value.to_string(), always: true }
    }
    /// If it is there, and not null, it has this value.
    pub(crate) fn replace(name: &'static str, value: impl ToString) -> Self {
        Self { name, value: value.to_string(), always: false }
    }
}

/// `body` with these fields; `None` if it is no JSON object.
pub(crate) fn with_fields(body: &Bytes, splices: &[Splice]) -> Option<Bytes> {
    let mut found = Found { splices, places: Vec::new() };
    let mut json = serde_json::Deserializer::from_slice(body);
    json.deserialize_map(&mut found).ok()?;
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    let mut missing = Vec::new();
    for (at, splice) in splices.iter().enumerate() {
        let places = found.places.iter().filter(|(of, _)| *of == at);
        let mut there = false;
        for (_, raw) in places {
            there = true;
            if splice.always || raw.get() != "null" {
                let start = (raw.get().as_ptr() as usize).checked_sub(body.as_ptr() as usize)?;
                edits.push((start..start + raw.get().len(), splice.value.clone()));
            }
        }
        if !there && splice.always {
            missing.push(format!("{}:{}", serde_json::Value::from(splice.name), splice.value));
        }
    }
    if !missing.is_empty() {
        let brace = body.iter().position(|byte| *byte == b'{')? + 1;
        let empty = body[brace..].trim_ascii_start().starts_with(b"}");
        edits.push((brace..brace, missing.join(",") + if empty { "" } else { "," }));
    }
    edits.sort_by_key(|(range, _)| range.start);
    let grown: usize = edits.iter().map(|(_, text)| text.len()).sum();
    let mut spliced = Vec::with_capacity(body.len() + grown);
    let mut done = 0;
    for (range, text) in edits {
        spliced.extend_from_slice(&body[done..range.start]);
        spliced.extend_from_slice(text.as_bytes());
        done = range.end;
    }
    spliced.extend_from_slice(&body[done..]);
    Some(spliced.into())
}

struct Found<'s, 'de> {
    splices: &'s [Splice],
    /// Which splice, and the value that stands there.
    places: Vec<(usize, &'de RawValue)>,
}

impl<'de> Visitor<'de> for &mut Found<'_, 'de> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            match self.splices.iter().position(|splice| splice.name == key) {
                Some(at) => self.places.push((at, map.next_value()?)),
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splice(body: &str, splices: &[Splice]) -> Option<String> {
        let spliced = with_fields(&Bytes::copy_from_slice(body.as_bytes()), splices)?;
        Some(String::from_utf8(spliced.to_vec()).unwrap())
    }

    #[test]
    fn fields_are_set_and_everything_else_stays_bit_for_bit() {
        let body = r#" { "max_tokens" : 12345678901234567890 ,"\u006din_tokens":3, "stream_options":null, "x":{"stream":true}, "a": "日本" } "#;
        let spliced = splice(
            body,
            &[
                Splice::set("max_tokens", "1"),
                Splice::set("stream", "false"),
                Splice::set("kv", r#"{"a":[1]}"#),
                Splice::replace("min_tokens", "0"),
                Splice::replace("stream_options", "null"),
                Splice::replace("absent", "1"),
            ],
        );
        let expected = r#" {"stream":false,"kv":{"a":[1]}, "max_tokens" : 1 ,"\u006din_tokens":0, "stream_options":null, "x":{"stream":true}, "a": "日本" } "#;
        assert_eq!(spliced.as_deref(), Some(expected));
    }

    #[test]
    fn a_repeated_key_is_replaced_each_time_and_an_empty_object_is_filled() {
        assert_eq!(splice(r#"{"n":1,"n":2}"#, &[Splice::set("n", "7")]).as_deref(), Some(r#"{"n":7,"n":7}"#));
        for (body, expected) in [("{}", r#"{"a":1,"b":2}"#), ("{ }", r#"{"a":1,"b":2 }"#)] {
            let spliced = splice(body, &[Splice::set("a", "1"), Splice::set("b", "2")]);
            let value: serde_json::Value = serde_json::from_str(&spliced.unwrap()).unwrap();
            assert_eq!(value, serde_json::from_str::<serde_json::Value>(expected).unwrap(), "{body}");
        }
        assert_eq!(splice(r#"{"a":null}"#, &[Splice::set("a", "1")]).as_deref(), Some(r#"{"a":1}"#));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in ["", "[]", "{", "3", r#"{"a":}"#] {
            assert_eq!(splice(body, &[Splice::set("a", "1")]), None, "{body}");
        }
    }
}
