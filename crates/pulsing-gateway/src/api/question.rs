//! Requests that are answered in one piece without generating text: embeddings, tokenize, detokenize.

use serde_json::value::RawValue;

use super::fields::{Field, Fields};
use super::{Api, ApiError, json_string, push_json_string};
use crate::protocol::{Answer, Usage};

/// Inputs that one embeddings request may carry, as OpenAI has it.
const MAX_INPUTS: usize = 2048;

/// What the Router must know to write the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// `/v1/embeddings`
    Embeddings {
        /// How many vectors are due.
        inputs: usize,
        /// Their length, where the client chose one.
        dimensions: Option<usize>,
        /// As text of their bytes instead of numbers.
        base64: bool,
    },
    /// `/tokenize`
    Tokenize {
        /// The text of each token is wanted too.
        texts: bool,
    },
    /// `/detokenize`
    Detokenize,
}

/// Reads a question; also gives the part of the body that holds its text.
pub(super) fn read<'a>(api: Api, fields: &Fields<'a>) -> Result<(Question, &'a str), ApiError> {
    match api {
        Api::Embeddings => embeddings(fields),
        Api::Tokenize => tokenize(fields),
        _ => detokenize(fields),
    }
}

fn embeddings<'a>(fields: &Fields<'a>) -> Result<(Question, &'a str), ApiError> {
    let raw = fields.get(Field::Input).ok_or_else(|| ApiError::invalid(Some("input"), "`input` is required"))?;
    let base64 = match fields.read::<String>(Field::EncodingFormat).as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            return Err(ApiError::invalid(
                Some("encoding_format"),
                "`encoding_format` must be \"float\" or \"base64\"",
            ));
        }
    };
    let inputs = count_inputs(raw)?;
    let dimensions = fields.read::<f64>(Field::Dimensions).map(|dimensions| dimensions as usize);
    Ok((Question::Embeddings { inputs, dimensions, base64 }, raw))
}

/// A string or an array of token ids is one input, an array of either is several.
fn count_inputs(raw: &str) -> Result<usize, ApiError> {
    let bad = || {
        ApiError::invalid(
            Some("input"),
            "`input` must be a non-empty string, a non-empty array of token ids, or a non-empty array of either",
        )
    };
    let one = |raw: &str| (raw.starts_with('"') && raw != "\"\"") || is_ids(raw);
    if one(raw) {
        return Ok(1);
    }
    let items: Vec<&RawValue> = serde_json::from_str(raw).map_err(|_| bad())?;
    if items.is_empty() || !items.iter().all(|item| one(item.get())) {
        return Err(bad());
    }
    if items.len() > MAX_INPUTS {
        return Err(ApiError::invalid(
            Some("input"),
            format!("`input` holds {} inputs; at most {MAX_INPUTS} go in one request", items.len()),
        ));
    }
    Ok(items.len())
}

fn is_ids(raw: &str) -> bool {
    raw.starts_with('[') && serde_json::from_str::<Vec<u32>>(raw).is_ok_and(|ids| !ids.is_empty())
}

fn tokenize<'a>(fields: &Fields<'a>) -> Result<(Question, &'a str), ApiError> {
    let texts = fields.read(Field::ReturnTokenStrs).unwrap_or(false);
    match (fields.get(Field::Prompt), fields.get(Field::Messages)) {
        (Some(prompt), None) if prompt.starts_with('"') => Ok((Question::Tokenize { texts }, prompt)),
        (None, Some(messages)) if messages.starts_with('[') => Ok((Question::Tokenize { texts }, messages)),
        (Some(_), Some(_)) => {
            Err(ApiError::invalid(Some("messages"), "`prompt` and `messages` exclude each other: give one of them"))
        }
        (Some(_), None) => Err(ApiError::invalid(Some("prompt"), "`prompt` must be a string")),
        (None, Some(_)) => Err(ApiError::invalid(Some("messages"), "`messages` must be an array of message objects")),
        (None, None) => Err(ApiError::invalid(Some("prompt"), "`prompt` or `messages` is required")),
    }
}

fn detokenize<'a>(fields: &Fields<'a>) -> Result<(Question, &'a str), ApiError> {
    let raw = fields.get(Field::Tokens).ok_or_else(|| ApiError::invalid(Some("tokens"), "`tokens` is required"))?;
    if serde_json::from_str::<Vec<u32>>(raw).is_err() {
        return Err(ApiError::invalid(Some("tokens"), "`tokens` must be an array of token ids"));
    }
    Ok((Question::Detokenize, raw))
}

impl Question {
    /// The body for the client. `model` is the name it asked for.
    ///
    /// # Errors
    /// 502 when the answer is none to this question.
    pub fn body(&self, answer: &Answer, model: &str) -> Result<Vec<u8>, ApiError> {
        match *self {
            Self::Embeddings { inputs, dimensions, base64 } => {
                let due = answer.embeddings.len() == inputs;
                if !due {
                    return Err(ApiError::worker_fault(format!(
                        "the worker gave {} embeddings for {inputs} input(s)",
                        answer.embeddings.len()
                    )));
                }
                vectors(answer, dimensions, base64, model)
            }
            Self::Tokenize { texts } => {
                if texts && answer.token_texts.len() != answer.tokens.len() {
                    return Err(ApiError::worker_fault("the worker did not give the text of each token"));
                }
                let length = answer.max_model_len;
                let mut out = format!("{{\"count\":{},\"max_model_len\":{length},\"tokens\":", answer.tokens.len());
                let list = |out: &mut String, items: &mut dyn Iterator<Item = String>| {
                    out.push('[');
                    out.push_str(&items.collect::<Vec<_>>().join(","));
                    out.push(']');
                };
                list(&mut out, &mut answer.tokens.iter().map(u32::to_string));
                out.push_str(",\"token_strs\":");
                if texts {
                    list(&mut out, &mut answer.token_texts.iter().map(|text| json_string(text)));
                } else {
                    out.push_str("null");
                }
                out.push('}');
                Ok(out.into_bytes())
            }
            Self::Detokenize => Ok(format!("{{\"prompt\":{}}}", json_string(&answer.text)).into_bytes()),
        }
    }
}

fn vectors(answer: &Answer, dimensions: Option<usize>, base64: bool, model: &str) -> Result<Vec<u8>, ApiError> {
    let size: usize = answer.embeddings.iter().map(|one| one.values.len() * 3 + 64).sum();
    let mut out = Vec::with_capacity(size + 256);
    out.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
    for (index, one) in answer.embeddings.iter().enumerate() {
        let (values, rest) = one.values.as_chunks::<4>();
        if !rest.is_empty() || dimensions.is_some_and(|dimensions| dimensions != values.len()) {
            return Err(ApiError::worker_fault(format!(
                "the worker gave an embedding of {} bytes where another size was due",
                one.values.len()
            )));
        }
        if values.iter().any(|value| !f32::from_le_bytes(*value).is_finite()) {
            return Err(ApiError::worker_fault("the worker gave an embedding with a value that is no number"));
        }
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(format!("{{\"object\":\"embedding\",\"index\":{index},\"embedding\":").as_bytes());
        if base64 {
            out.push(b'"');
            push_base64(&mut out, &one.values);
            out.push(b'"');
        } else {
            out.push(b'[');
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                // Writing to a Vec cannot fail, and the value is finite.
                let _ = serde_json::to_writer(&mut out, &f32::from_le_bytes(*value));
            }
            out.push(b']');
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"],\"model\":");
    push_json_string(&mut out, model);
    let Usage { prompt_tokens, .. } = answer.usage.unwrap_or_default();
    out.extend_from_slice(
        format!(",\"usage\":{{\"prompt_tokens\":{prompt_tokens},\"total_tokens\":{prompt_tokens}}}}}").as_bytes(),
    );
    Ok(out)
}

/// RFC 4648, with padding.
fn push_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for group in bytes.chunks(3) {
        let at = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * digit)) as usize & 63];
            out.push(if digit <= group.len() { letter } else { b'=' });
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::api::parse;
    use crate::protocol::Embedding;

    fn read(api: Api, body: &str) -> Result<Question, ApiError> {
        parse(api, &Bytes::copy_from_slice(body.as_bytes())).map(|parsed| parsed.question.unwrap())
    }
    fn param(api: Api, body: &str) -> Option<String> {
        let error = read(api, body).expect_err(body);
        assert_eq!(error.status, 400, "{body}");
        error.param.map(String::from)
    }
    fn answer(vectors: &[&[f32]]) -> Answer {
        let bytes = |vector: &&[f32]| vector.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        Answer {
            embeddings: vectors.iter().map(|vector| Embedding { values: bytes(vector).into() }).collect(),
            usage: Some(Usage { prompt_tokens: 3, ..Usage::default() }),
            ..Answer::default()
        }
    }

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (text, expected) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy"), ("\u{ff}~?", "w79+Pw==")]
        {
            let mut out = Vec::new();
            push_base64(&mut out, text.as_bytes());
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn inputs_are_texts_or_token_ids_one_or_many() {
        for (input, count) in
            [(r#""x""#, 1), ("[1,2]", 1), (r#"["a","b"]"#, 2), ("[[1],[2,3],[4]]", 3), (r#"["a",[1]]"#, 2)]
        {
            let question = Question::Embeddings { inputs: count, dimensions: None, base64: false };
            assert_eq!(read(Api::Embeddings, &format!(r#"{{"input":{input},"user":null}}"#)), Ok(question), "{input}");
        }
        let many = format!(r#"{{"input":[{}]}}"#, vec!["\"x\""; 2049].join(","));
        for body in [
            "{}",
            r#"{"input":null}"#,
            r#"{"input":""}"#,
            r#"{"input":[]}"#,
            r#"{"input":["a",""]}"#,
            r#"{"input":[-1]}"#,
            &many,
        ] {
            assert_eq!(param(Api::Embeddings, body).as_deref(), Some("input"), "{:.60}", body);
        }
        for (extra, at) in [
            (r#""encoding_format":"int8""#, "encoding_format"),
            (r#""encoding_format":3"#, "encoding_format"),
            (r#""dimensions":0"#, "dimensions"),
            (r#""dimensions":"3""#, "dimensions"),
            (r#""model":3"#, "model"),
        ] {
            assert_eq!(param(Api::Embeddings, &format!(r#"{{"input":"x",{extra}}}"#)).as_deref(), Some(at));
        }
    }

    #[test]
    fn tokenize_takes_a_prompt_or_messages_and_detokenize_takes_ids() {
        assert_eq!(
            read(Api::Tokenize, r#"{"prompt":"","return_token_strs":true}"#),
            Ok(Question::Tokenize { texts: true })
        );
        assert_eq!(read(Api::Tokenize, r#"{"messages":[{}],"prompt":null}"#), Ok(Question::Tokenize { texts: false }));
        assert_eq!(read(Api::Detokenize, r#"{"tokens":[]}"#), Ok(Question::Detokenize));
        for (body, at) in [
            ("{}", "prompt"),
            (r#"{"prompt":3}"#, "prompt"),
            (r#"{"messages":{}}"#, "messages"),
            (r#"{"prompt":"x","messages":[]}"#, "messages"),
            (r#"{"prompt":"x","return_token_strs":1}"#, "return_token_strs"),
        ] {
            assert_eq!(param(Api::Tokenize, body).as_deref(), Some(at), "{body}");
        }
        for body in ["{}", r#"{"tokens":"x"}"#, r#"{"tokens":[1.5]}"#] {
            assert_eq!(param(Api::Detokenize, body).as_deref(), Some("tokens"), "{body}");
        }
    }

    #[test]
    fn vectors_are_written_both_ways() {
        let asked = |base64| Question::Embeddings { inputs: 2, dimensions: None, base64 };
        let answer = answer(&[&[0.1, -1.5], &[0.0, 3e-30]]);
        let text = |base64| String::from_utf8(asked(base64).body(&answer, "m").unwrap()).unwrap();
        assert_eq!(
            text(false),
            r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.1,-1.5]},{"object":"embedding","index":1,"embedding":[0.0,3e-30]}],"model":"m","usage":{"prompt_tokens":3,"total_tokens":3}}"#
        );
        assert!(text(true).contains(r#""embedding":"zczMPQAAwL8="}"#), "{}", text(true));
    }

    #[test]
    fn an_answer_that_does_not_fit_the_question_is_the_workers_fault() {
        let asked = |dimensions| Question::Embeddings { inputs: 1, dimensions, base64: true };
        let odd = Answer { embeddings: vec![Embedding { values: vec![0; 5].into() }], ..Answer::default() };
        for (question, answer) in [
            (asked(None), answer(&[])),
            (asked(None), answer(&[&[1.0], &[1.0]])),
            (asked(Some(3)), answer(&[&[1.0]])),
            (asked(None), answer(&[&[f32::NAN]])),
            (asked(None), odd),
            (Question::Tokenize { texts: true }, Answer { tokens: vec![1], ..Answer::default() }),
        ] {
            assert_eq!(question.body(&answer, "m").unwrap_err().status, 502, "{question:?}");
        }
    }
}
