//! The fields the Router reads, and the ranges it holds them to: one table, so that all paths give the same verdict.
//! Everything else travels to the worker untouched.

use super::request::elements;
use super::{Api, ApiError};

/// What a field must be. Null always counts as absent.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// A number in this range.
    Number(f64, f64),
    /// An integer in this range.
    Integer(i64, i64),
    /// true or false.
    Bool,
    /// A string.
    Text,
    /// A string, or up to four of them; none empty.
    Stop,
    /// An object.
    Object,
    /// An array of at most so many elements.
    Array(usize),
    /// Read elsewhere.
    Any,
}

macro_rules! fields {
    ($($field:ident $name:literal $chat:expr, $completions:expr;)*) => {
        /// A field the Router knows.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Field { $($field),* }
        impl Field {
            pub(super) const COUNT: usize = [$($name),*].len();
            pub(super) fn of(key: &str) -> Option<Self> {
                match key { $($name => Some(Self::$field),)* _ => None }
            }
            fn name(self) -> &'static str {
                match self { $(Self::$field => $name),* }
            }
            fn rule(self, api: Api) -> Rule {
                if !api.generates() {
                    return self.rule_of_questions();
                }
                match (self, api.generates_chat()) { $((Self::$field, true) => $chat, (Self::$field, false) => $completions),* }
            }
            const ALL: [Self; Self::COUNT] = [$(Self::$field),*];
            #[cfg(test)]
            pub(super) const ALL_NAMES: [&'static str; Self::COUNT] = [$($name),*];
        }
    };
}

use Rule::{Any, Array, Bool, Integer, Number, Object, Stop, Text};

const MAX: i64 = i64::MAX;

fields! {
    Model "model" Text, Text;
    Messages "messages" Any, Any;
    Prompt "prompt" Any, Any;
    Stream "stream" Bool, Bool;
    StreamOptions "stream_options" Object, Object;
    N "n" Integer(1, 128), Integer(1, 128);
    Temperature "temperature" Number(0.0, 2.0), Number(0.0, 2.0);
    TopP "top_p" Number(0.0, 1.0), Number(0.0, 1.0);
    PresencePenalty "presence_penalty" Number(-2.0, 2.0), Number(-2.0, 2.0);
    FrequencyPenalty "frequency_penalty" Number(-2.0, 2.0), Number(-2.0, 2.0);
    Seed "seed" Integer(i64::MIN, MAX), Integer(i64::MIN, MAX);
    Stop "stop" Stop, Stop;
    MaxTokens "max_tokens" Integer(1, MAX), Integer(0, MAX);
    MaxCompletionTokens "max_completion_tokens" Integer(1, MAX), Integer(0, MAX);
    // A flag in chat, a number in completions.
    Logprobs "logprobs" Bool, Integer(0, 5);
    TopLogprobs "top_logprobs" Integer(0, 20), Integer(0, 20);
    BestOf "best_of" Any, Integer(0, 20);
    LogitBias "logit_bias" Object, Object;
    ResponseFormat "response_format" Object, Object;
    Tools "tools" Array(128), Array(128);
    User "user" Text, Text;
    SessionId "session_id" Any, Any;
    UserId "user_id" Any, Any;
    SessionParams "session_params" Any, Any;
    Input "input" Any, Any;
    EncodingFormat "encoding_format" Any, Any;
    Dimensions "dimensions" Any, Any;
    Tokens "tokens" Any, Any;
    ReturnTokenStrs "return_token_strs" Any, Any;
    AddSpecialTokens "add_special_tokens" Any, Any;
    AddGenerationPrompt "add_generation_prompt" Any, Any;
}

impl Field {
    /// Where no text is generated.
    fn rule_of_questions(self) -> Rule {
        match self {
            Self::Model | Self::EncodingFormat | Self::User => Text,
            Self::Dimensions => Integer(1, MAX),
            Self::ReturnTokenStrs | Self::AddSpecialTokens | Self::AddGenerationPrompt => Bool,
            _ => Any,
        }
    }
}

/// The raw JSON of each known field that is present and not null; of a repeated key the last, as JSON parsers do.
#[derive(Debug)]
pub(super) struct Fields<'a>(pub(super) [Option<&'a str>; Field::COUNT]);

impl<'a> Fields<'a> {
    pub(super) fn get(&self, field: Field) -> Option<&'a str> {
        self.0[field as usize].filter(|raw| *raw != "null")
    }
    /// The value as `T`, once [`check`](Self::check) has passed.
    pub(super) fn read<T: serde::Deserialize<'a>>(&self, field: Field) -> Option<T> {
        self.get(field).and_then(|raw| serde_json::from_str(raw).ok())
    }
    /// Holds every field to its rule.
    pub(super) fn check(&self, api: Api) -> Result<(), ApiError> {
        for field in Field::ALL {
            let Some(raw) = self.get(field) else { continue };
            if let Err(what) = field.rule(api).check(raw) {
                let name = field.name();
                let shown: String = raw.chars().take(80).collect();
                return Err(ApiError::invalid(Some(name), format!("`{name}` must be {what}, not {shown}")));
            }
        }
        Ok(())
    }
}

impl Rule {
    /// `Err` says what it must be.
    fn check(self, raw: &str) -> Result<(), String> {
        let first = raw.as_bytes().first().copied().unwrap_or(b' ');
        let ok = match self {
            Any => true,
            Bool => matches!(raw, "true" | "false"),
            Text => is_text(raw),
            Object => first == b'{',
            Number(min, max) => raw.parse::<f64>().is_ok_and(|value| (min..=max).contains(&value)),
            Integer(min, max) => integer(raw).is_some_and(|value| (i128::from(min)..=i128::from(max)).contains(&value)),
            Array(most) => elements(raw).is_some_and(|items| items.len() <= most),
            Stop if first == b'"' => raw != "\"\"" && is_text(raw),
            Stop => serde_json::from_str::<Vec<String>>(raw)
                .is_ok_and(|items| items.len() <= 4 && items.iter().all(|item| !item.is_empty())),
        };
        if ok {
            return Ok(());
        }
        Err(match self {
            Any => "anything".to_owned(),
            Bool => "true or false".to_owned(),
            Text => "a string".to_owned(),
            Object => "an object".to_owned(),
            Number(min, max) => format!("a number from {min} to {max}"),
            Integer(i64::MIN, MAX) => "a 64-bit integer".to_owned(),
            Integer(min, MAX) => format!("an integer of at least {min}"),
            Integer(min, max) => format!("an integer from {min} to {max}"),
            Array(most) => format!("an array of at most {most} elements"),
            Stop => "a non-empty string or an array of up to 4 of them".to_owned(),
        })
    }
}

/// A string, and one that a string of Rust can hold: half of a surrogate pair is JSON by its grammar, and no text.
fn is_text(raw: &str) -> bool {
    raw.starts_with('"') && (!raw.contains('\\') || serde_json::from_str::<std::borrow::Cow<'_, str>>(raw).is_ok())
}

/// An integer, also when a client wrote it as `3.0`.
fn integer(raw: &str) -> Option<i128> {
    raw.parse().ok().or_else(|| {
        let value: f64 = raw.parse().ok()?;
        // Above 2^53 a float no longer says which integer is meant.
        (value.fract() == 0.0 && value.abs() <= 9_007_199_254_740_992.0).then_some(value as i128)
    })
}
