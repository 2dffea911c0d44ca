//! The answer as events, in the protocol that was asked for.

use super::{Answer, ApiError, Envelope, ResponseAnswer, ResponseWriter, StreamWriter, Translated};
use crate::protocol::{Delta, Usage};
use std::ops::Range;

/// Turns deltas into events.
pub enum Writer {
    /// Of a chat or a text completion.
    Chunks(StreamWriter),
    /// Of a response.
    Response(Box<ResponseWriter>),
}

impl Writer {
    /// A stream without events yet; `translated` where a response was asked for.
    pub fn new(envelope: &Envelope, include_usage: bool, translated: Option<&Translated>) -> Self {
        match translated {
            None => Self::Chunks(StreamWriter::new(envelope, include_usage)),
            Some(translated) => Self::Response(Box::new(ResponseWriter::new(envelope, translated))),
        }
    }
    /// Tokens spent, as far as the worker said.
    pub fn usage(&self) -> Option<Usage> {
        match self {
            Self::Chunks(writer) => writer.usage(),
            Self::Response(writer) => writer.usage(),
        }
    }
    /// Appends the events of one piece.
    ///
    /// # Errors
    /// 502 when the worker breaks its protocol.
    pub fn push(&mut self, out: &mut Vec<u8>, delta: &Delta) -> Result<(), ApiError> {
        match self {
            Self::Chunks(writer) => writer.push(out, delta),
            Self::Response(writer) => writer.push(out, delta),
        }
    }
    /// Appends what ends a complete stream.
    ///
    /// # Errors
    /// 502 when the answer is not complete: a cut stream must not look whole.
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), ApiError> {
        match self {
            Self::Chunks(writer) => writer.finish(out),
            Self::Response(writer) => writer.finish(out),
        }
    }
    /// Appends an error event, after which nothing may follow.
    pub fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        match self {
            Self::Chunks(_) => StreamWriter::error(out, error),
            Self::Response(writer) => writer.error(out, error),
        }
    }
}

/// The answer in one piece, in the protocol that was asked for.
pub enum Collector {
    /// A chat or a text completion.
    Answer(Answer),
    /// A response.
    Response(Box<ResponseAnswer>),
}

impl Collector {
    /// An answer without text yet; `translated` where a response was asked for.
    pub fn new(envelope: Envelope, translated: Option<&Translated>) -> Self {
        match translated {
            None => Self::Answer(Answer::new(envelope)),
            Some(translated) => Self::Response(Box::new(ResponseAnswer::new(&envelope, translated))),
        }
    }
    /// Forgets what came of these choices.
    pub fn begin_again(&mut self, choices: Range<u32>) {
        match self {
            Self::Answer(answer) => answer.begin_again(choices),
            Self::Response(answer) => answer.begin_again(),
        }
    }
    /// Adds a piece.
    ///
    /// # Errors
    /// 502 when the worker breaks its protocol.
    pub fn push(&mut self, delta: &Delta) -> Result<(), ApiError> {
        match self {
            Self::Answer(answer) => answer.push(delta),
            Self::Response(answer) => answer.push(delta),
        }
    }
    /// Tokens spent, as far as the worker said.
    pub fn usage(&self) -> Option<Usage> {
        match self {
            Self::Answer(answer) => answer.usage(),
            Self::Response(answer) => answer.usage(),
        }
    }
    /// The body.
    ///
    /// # Errors
    /// 502 when the answer is not complete.
    pub fn finish(self) -> Result<Vec<u8>, ApiError> {
        match self {
            Self::Answer(answer) => answer.finish(),
            Self::Response(answer) => answer.finish(),
        }
    }
}
