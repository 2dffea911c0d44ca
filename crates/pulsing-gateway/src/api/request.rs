//! One scan over the client's JSON: only the fields needed, no copy of the rest.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::fields::{Field, Fields};
use super::{ApiError, Question, question, scan};
use crate::policy::chain::{self, Chain};

/// Prompts that one completions request may carry.
const MAX_PROMPTS: usize = 128;
/// What else is in such a request goes out with each prompt: together no more than `max_body` is by default, in bytes.
const MAX_COPIED: usize = 64 << 20;

/// Which endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/embeddings`
    Embeddings,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
    /// `/v1/responses`
    Responses,
}

impl Api {
    /// Every one.
    pub const ALL: [Self; 6] =
        [Self::Chat, Self::Completions, Self::Embeddings, Self::Tokenize, Self::Detokenize, Self::Responses];

    /// Its path, as engines have it.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::Responses => "/v1/responses",
        }
    }
    /// Text is generated, piece by piece.
    pub fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Responses)
    }
    pub(super) fn generates_chat(self) -> bool {
        matches!(self, Self::Chat | Self::Responses)
    }
    /// As the worker protocol names it.
    pub fn wire_name(self) -> &'static str {
        match self {
            Self::Chat => "chat.completions",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Responses => "responses",
        }
    }
}

/// When a stream that lost its Worker may go on, on another one, from what the client has (S4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// It has several choices, or its rest depends on more than the tokens so far.
    Never,
    /// The best token is taken each time.
    Greedy,
    /// Tokens are drawn: only Workers go on that draw each by its position.
    Sampled,
}

impl Resume {
    fn of(fields: &Fields<'_>, n: u32) -> Self {
        #[derive(Deserialize)]
        struct Format<'a> {
            #[serde(rename = "type", borrow)]
            kind: Cow<'a, str>,
        }
        let is_text = |raw: &str| serde_json::from_str::<Format<'_>>(raw).is_ok_and(|format| format.kind == "text");
        let never = n != 1
            || fields.read::<f64>(Field::BestOf).is_some_and(|best_of| best_of != 1.0)
            || fields
                .get(Field::Tools)
                .is_some_and(|raw| !raw.trim_matches(['[', ']', ' ', '\t', '\n', '\r']).is_empty())
            || fields.get(Field::ResponseFormat).is_some_and(|raw| !is_text(raw))
            || fields.get(Field::Logprobs).is_some_and(|raw| raw != "false");
        match fields.read::<f64>(Field::Temperature) {
            _ if never => Self::Never,
            Some(0.0) => Self::Greedy,
            _ => Self::Sampled,
        }
    }
}

/// What the Router needs to know of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Which endpoint.
    pub api: Api,
    /// `model`, if given.
    pub model: Option<String>,
    /// Where the value of `model` lies in the client's body, null included.
    pub model_at: Option<Range<usize>>,
    /// `stream`.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// `n`.
    pub n: u32,
    /// What ties requests of one conversation together: `user` and its like.
    pub affinity: Option<String>,
    /// One body a prompt, for the workers. A single prompt travels in the client's own bytes.
    pub bodies: Vec<Bytes>,
    /// Where `messages`, `prompt` or their like lie in the client's body.
    pub text: Range<usize>,
    /// Where `tools` lies, if there are any.
    pub tools: Option<Range<usize>>,
    /// What is asked, where no text is to be generated.
    pub question: Option<Question>,
    /// Whether another Worker may go on with its stream.
    pub resume: Resume,
}

impl Parsed {
    /// The prompt as a chain of hashes; empty for several prompts. `body` is what this was read from.
    pub fn prefix(&self, body: &[u8]) -> Vec<u64> {
        self.chain(body).finish()
    }
    /// The chain of [`prefix`](Self::prefix).
    pub fn chain(&self, body: &[u8]) -> Chain {
        let text = &body[self.text.clone()];
        match self.api {
            Api::Chat | Api::Responses => chain::of_chat(text, self.tools.clone().map(|tools| &body[tools])),
            Api::Completions => chain::of_prompt(text),
            Api::Embeddings | Api::Tokenize | Api::Detokenize => Chain::default(),
        }
    }
}

/// Reads a request.
///
/// # Errors
/// 400 with the field at fault.
pub fn parse(api: Api, body: &Bytes) -> Result<Parsed, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ApiError::invalid(None, format!("The request body is not UTF-8: {error}")))?;
    if text.trim_ascii().is_empty() {
        return Err(ApiError::invalid(None, "The request body is empty; a JSON object is needed"));
    }
    let fields = fields(text)?;
    fields.check(api)?;

    #[derive(Deserialize)]
    struct StreamOptions {
        include_usage: Option<bool>,
    }
    let include_usage = match fields.get(Field::StreamOptions).map(serde_json::from_str::<StreamOptions>) {
        None => false,
        Some(Ok(options)) => options.include_usage.unwrap_or(false),
        Some(Err(_)) => {
            return Err(ApiError::invalid(
                Some("stream_options"),
                "`stream_options.include_usage` must be true or false",
            ));
        }
    };
    let n: u32 = fields.read::<f64>(Field::N).filter(|_| api.generates()).map_or(1, |n| n as u32);
    if let Some(best_of) = fields.read::<f64>(Field::BestOf).filter(|_| api == Api::Completions)
        && best_of < f64::from(n)
    {
        return Err(ApiError::invalid(Some("best_of"), format!("`best_of` must be at least `n`, which is {n}")));
    }
    let (main, bodies, question) = match api {
        // A response is read as the chat that it was made into.
        Api::Chat | Api::Responses => (messages(&fields)?, vec![body.clone()], None),
        Api::Completions => {
            let raw = required(&fields, Field::Prompt, "prompt")?;
            (raw, prompts(text, body, raw)?, None)
        }
        Api::Embeddings | Api::Tokenize | Api::Detokenize => {
            let (question, raw) = question::read(api, &fields)?;
            (raw, vec![body.clone()], Some(question))
        }
    };
    let at = |part: &str| {
        let start = offset(text, part);
        start..start + part.len()
    };
    Ok(Parsed {
        api,
        model: fields.read::<String>(Field::Model),
        model_at: fields.0[Field::Model as usize].map(at),
        stream: api.generates() && fields.read(Field::Stream).unwrap_or(false),
        include_usage,
        n,
        affinity: affinity(&fields),
        bodies,
        text: at(main),
        tools: fields.get(Field::Tools).map(at),
        question,
        resume: Resume::of(&fields, n),
    })
}

fn fields(text: &str) -> Result<Fields<'_>, ApiError> {
    let mut fields = Fields([None; Field::COUNT]);
    let scanned = scan::object(text, |key, value| {
        if let Some(field) = Field::of(key) {
            fields.0[field as usize] = Some(value);
        }
    });
    match scanned {
        Some(()) => Ok(fields),
        None => serde_json::from_str(text).map_err(|error| {
            ApiError::invalid(None, format!("The request body is not a JSON object that can be read: {error}"))
        }),
    }
}

/// The raw JSON of an array's elements; `None` for what is no array.
pub(super) fn elements(raw: &str) -> Option<Vec<&str>> {
    scan::elements(raw).or_else(|| {
        let items: Vec<&RawValue> = serde_json::from_str(raw).ok()?;
        Some(items.into_iter().map(RawValue::get).collect())
    })
}

fn required<'a>(fields: &Fields<'a>, field: Field, name: &str) -> Result<&'a str, ApiError> {
    fields.get(field).ok_or_else(|| ApiError::invalid(Some(name), format!("`{name}` is required")))
}

fn messages<'a>(fields: &Fields<'a>) -> Result<&'a str, ApiError> {
    let raw = required(fields, Field::Messages, "messages")?;
    let items = elements(raw)
        .ok_or_else(|| ApiError::invalid(Some("messages"), "`messages` must be an array of message objects"))?;
    if items.is_empty() {
        return Err(ApiError::invalid(Some("messages"), "`messages` must hold at least one message"));
    }
    for (index, item) in items.iter().enumerate() {
        if !item.starts_with('{') {
            let at = format!("messages[{index}]");
            return Err(ApiError::invalid(Some(&at), format!("`{at}` must be an object with `role` and `content`")));
        }
    }
    Ok(raw)
}

/// One body a prompt. A prompt is a string or an array of token ids; an array of either is several prompts.
fn prompts(text: &str, body: &Bytes, raw: &str) -> Result<Vec<Bytes>, ApiError> {
    let bad = || {
        ApiError::invalid(
            Some("prompt"),
            "`prompt` must be a string, an array of token ids, or a non-empty array of either",
        )
    };
    if raw.starts_with('"') {
        return Ok(vec![body.clone()]);
    }
    let items = elements(raw).ok_or_else(bad)?;
    let all = |test: fn(&str) -> bool| items.iter().all(|item| test(item));
    if items.is_empty() {
        return Err(bad());
    }
    if all(is_token) {
        return Ok(vec![body.clone()]);
    }
    let is_ids = |raw: &str| elements(raw).is_some_and(|ids| !ids.is_empty() && ids.iter().all(|id| is_token(id)));
    if !all(|raw| raw.starts_with('"')) && !all(is_ids) {
        return Err(bad());
    }
    if items.len() > MAX_PROMPTS {
        return Err(ApiError::invalid(
            Some("prompt"),
            format!("`prompt` holds {} prompts; at most {MAX_PROMPTS} go in one request", items.len()),
        ));
    }
    let rest = text.len() - raw.len();
    if rest.saturating_mul(items.len()) > MAX_COPIED {
        return Err(ApiError::invalid(
            Some("prompt"),
            format!(
                "`prompt` holds {} prompts, and the {rest} bytes beside it go out with each of them: more than {MAX_COPIED} \
                 bytes together; send fewer prompts in one request",
                items.len()
            ),
        ));
    }
    let at = offset(text, raw);
    Ok(items
        .iter()
        .map(|item| {
            let one = item.as_bytes();
            let mut spliced = Vec::with_capacity(rest + one.len());
            spliced.extend_from_slice(&body[..at]);
            spliced.extend_from_slice(one);
            spliced.extend_from_slice(&body[at + raw.len()..]);
            spliced.into()
        })
        .collect())
}

fn is_token(raw: &str) -> bool {
    raw.parse::<u32>().is_ok()
}

/// Where `part`, a slice of `whole`, begins.
fn offset(whole: &str, part: &str) -> usize {
    (part.as_ptr() as usize).saturating_sub(whole.as_ptr() as usize)
}

fn affinity(fields: &Fields<'_>) -> Option<String> {
    #[derive(Deserialize)]
    struct Params<'a> {
        #[serde(borrow)]
        session_id: Option<Cow<'a, str>>,
    }
    fields
        .read::<Params<'_>>(Field::SessionParams)
        .and_then(|params| params.session_id.map(Cow::into_owned))
        .or_else(|| {
            [Field::User, Field::SessionId, Field::UserId].into_iter().find_map(|field| fields.read::<String>(field))
        })
        .filter(|key| !key.is_empty())
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scan;
        impl<'de> Visitor<'de> for Scan {
            type Value = Fields<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Fields([None; Field::COUNT]);
                while let Some(Key(field)) = map.next_key()? {
                    match field {
                        Some(field) => fields.0[field as usize] = Some(map.next_value::<&RawValue>()?.get()),
                        None => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Scan)
    }
}

/// A key, without a copy of it.
struct Key(Option<Field>);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl Visitor<'_> for Look {
            type Value = Key;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_str<E>(self, key: &str) -> Result<Key, E> {
                Ok(Key(Field::of(key)))
            }
        }
        deserializer.deserialize_str(Look)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &str) -> Result<Parsed, ApiError> {
        parse(Api::Chat, &Bytes::copy_from_slice(body.as_bytes()))
    }
    fn completions(body: &str) -> Result<Parsed, ApiError> {
        parse(Api::Completions, &Bytes::copy_from_slice(body.as_bytes()))
    }
    fn with(extra: &str) -> [Result<Parsed, ApiError>; 2] {
        [chat(&format!(r#"{{"messages":[{{}}],{extra}}}"#)), completions(&format!(r#"{{"prompt":"x",{extra}}}"#))]
    }

    #[test]
    fn every_optional_field_may_be_null() {
        for field in Field::ALL_NAMES {
            if !matches!(field, "messages" | "prompt") {
                for parsed in with(&format!(r#""{field}":null"#)) {
                    assert!(parsed.is_ok(), "{field}: {parsed:?}");
                }
            }
        }
    }

    #[test]
    fn chat_and_completions_give_the_same_verdict_and_name_the_field() {
        let bad = [
            ("temperature", "-0.1"),
            ("temperature", "2.01"),
            ("temperature", "\"1\""),
            ("top_p", "1.5"),
            ("n", "0"),
            ("n", "129"),
            ("n", "1.5"),
            ("presence_penalty", "3"),
            ("frequency_penalty", "-3"),
            ("stop", "5"),
            ("stop", "\"\""),
            ("stop", r#"["a","b","c","d","e"]"#),
            ("stop", r#"["a",""]"#),
            ("max_tokens", "-1"),
            ("max_completion_tokens", "1.5"),
            ("seed", "\"x\""),
            ("seed", "99999999999999999999"),
            ("stream", "1"),
            ("stream_options", "[]"),
            ("stream_options", r#"{"include_usage":3}"#),
            ("model", "7"),
            ("model", r#""\ud800""#),
            ("user", r#""\ud800""#),
            ("stop", r#""\ud800""#),
            ("tools", "{}"),
        ];
        for (field, value) in bad {
            for parsed in with(&format!(r#""{field}":{value}"#)) {
                let error = parsed.expect_err(field);
                assert_eq!((error.status, error.param.as_deref()), (400, Some(field)), "{value}: {}", error.message);
            }
        }
        let good = [
            ("temperature", "0"),
            ("temperature", "2"),
            ("top_p", "0"),
            ("n", "128"),
            ("n", "2.0"),
            ("stop", r#"["a","b","c","d"]"#),
            ("seed", "-9223372036854775808"),
            ("stream_options", r#"{"include_usage":true,"continuous_usage_stats":false}"#),
            ("unknown", r#"{"deep":[1,{"x":null}]}"#),
        ];
        for (field, value) in good {
            for parsed in with(&format!(r#""{field}":{value}"#)) {
                assert!(parsed.is_ok(), "{field}={value}: {parsed:?}");
            }
        }
    }

    #[test]
    fn the_last_of_a_repeated_key_wins_and_escaped_keys_are_known() {
        let parsed = chat(r#"{"messages":[{}],"model":"a","mod\u0065l":"b","stream":true,"stream":false}"#).unwrap();
        assert_eq!((parsed.model.as_deref(), parsed.stream), (Some("b"), false));
    }

    #[test]
    fn a_body_that_is_no_object_is_400() {
        for body in
            ["", "  ", "[]", "\"x\"", "{\"model\":", "null", "{}x", "{\"messages\":{}}", "{\"messages\":[]}", "{}"]
        {
            assert_eq!(chat(body).expect_err(body).status, 400, "{body}");
        }
        assert_eq!(chat(r#"{"messages":[{},3]}"#).unwrap_err().param.as_deref(), Some("messages[1]"));
        let invalid = Bytes::from_static(b"{\"messages\":[{}],\"x\":\"\xff\"}");
        assert_eq!(parse(Api::Chat, &invalid).unwrap_err().status, 400);
    }

    #[test]
    fn what_stands_beside_many_prompts_is_not_copied_without_bound() {
        let body = |prompts: usize, beside: usize| {
            format!(r#"{{"x":"{}","prompt":[{}]}}"#, "a".repeat(beside), vec![r#""p""#; prompts].join(","))
        };
        let error = completions(&body(128, 600_000)).expect_err("77 MB in copies");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("prompt")), "{}", error.message);
        assert_eq!(completions(&body(128, 100_000)).expect("13 MB").bodies.len(), 128);
        assert_eq!(completions(&body(1, 600_000)).expect("one").bodies.len(), 1);
    }

    #[test]
    fn several_prompts_are_spliced_out_of_the_same_body() {
        let one = |prompt: &str| completions(&format!(r#"{{"a":1,"prompt":{prompt},"big":12345678901234567890}}"#));
        let bodies = |prompt: &str| {
            let parsed = one(prompt).unwrap();
            parsed.bodies.iter().map(|b| String::from_utf8(b.to_vec()).unwrap()).collect::<Vec<_>>()
        };
        let body = |prompt: &str| format!(r#"{{"a":1,"prompt":{prompt},"big":12345678901234567890}}"#);
        assert_eq!(bodies(r#""x""#), [body(r#""x""#)]);
        assert_eq!(bodies("[1, 2]"), [body("[1, 2]")]);
        assert_eq!(bodies(r#"["a", "é"]"#), [body(r#""a""#), body(r#""é""#)]);
        assert_eq!(bodies("[[1,2],[3]]"), [body("[1,2]"), body("[3]")]);
        for prompt in ["[]", "3", "{}", r#"["a",1]"#, "[[]]", "[-1]", "true"] {
            assert_eq!(one(prompt).expect_err(prompt).param.as_deref(), Some("prompt"), "{prompt}");
        }
        let many = format!("[{}]", vec!["\"x\""; 129].join(","));
        assert_eq!(one(&many).unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn a_conversation_is_known_by_its_user_or_session() {
        for (extra, key) in [
            (r#""user":"u""#, Some("u")),
            (r#""session_params":{"session_id":"s"},"user":"u""#, Some("s")),
            (r#""user":"""#, None),
            (r#""session_params":7"#, None),
        ] {
            for parsed in with(extra) {
                assert_eq!(parsed.unwrap().affinity.as_deref(), key, "{extra}");
            }
        }
    }

    #[test]
    fn test_s4_a_stream_may_go_on_elsewhere_where_its_tokens_tell_its_rest() {
        for (extra, resume) in [
            (r#""x":1"#, Resume::Sampled),
            (r#""temperature":0"#, Resume::Greedy),
            (r#""temperature":0.0,"n":1,"tools":[ ],"logprobs":null"#, Resume::Greedy),
            (r#""temperature":0,"response_format":{"type":"text"}"#, Resume::Greedy),
            (r#""temperature":0,"response_format":{"type":"json_object"}"#, Resume::Never),
            (r#""temperature":0,"n":2"#, Resume::Never),
            (r#""temperature":0,"tools":[{"type":"function"}]"#, Resume::Never),
        ] {
            for parsed in with(extra) {
                assert_eq!(parsed.unwrap().resume, resume, "{extra}");
            }
        }
        assert_eq!(chat(r#"{"messages":[{}],"logprobs":true}"#).unwrap().resume, Resume::Never);
        assert_eq!(completions(r#"{"prompt":"x","logprobs":0}"#).unwrap().resume, Resume::Never);
    }
}
