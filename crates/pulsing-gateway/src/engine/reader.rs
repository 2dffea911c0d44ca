//! What becomes of the bytes that an engine streams.

use bytes::Bytes;

use super::lines::too_long;
use super::normal::Normaliser;
use super::sse::Gate;
use crate::api::ApiError;
use crate::protocol::{Deltas, Usage};

/// What came of a stream.
pub(crate) enum Passed {
    /// Events as they are.
    Events(Bytes),
    /// What they say, where they are to be written anew.
    Deltas(Deltas),
}

/// Lets events through, or reads them.
pub(super) enum Reader {
    Gate(Gate),
    Normal(Box<Normaliser>),
}

impl Reader {
    /// What these bytes complete.
    pub(super) fn push(&mut self, bytes: Bytes) -> Result<Option<Passed>, ApiError> {
        match self {
            Self::Gate(gate) => {
                let passed = gate.push(bytes);
                if gate.is_too_long() {
                    return Err(ApiError::worker_fault(too_long()));
                }
                Ok(passed.map(Passed::Events))
            }
            Self::Normal(normal) => normal.push(&bytes).map(passed),
        }
    }
    /// Everything was there: a connection that breaks now took nothing with it.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Gate(gate) => gate.is_done(),
            Self::Normal(normal) => normal.is_done(),
        }
    }
    /// The body is over: what is left of a complete answer.
    pub(super) fn finish(&mut self) -> Result<Option<Passed>, ApiError> {
        match self {
            Self::Gate(gate) => match gate.finish() {
                Some(rest) if rest.is_empty() => Ok(None),
                Some(rest) => Ok(Some(Passed::Events(rest))),
                None => Err(ApiError::worker_fault("the engine ended its stream before the answer was complete")),
            },
            // Whether each choice has ended is for who writes the answer to say.
            Self::Normal(normal) => normal.finish().map(passed),
        }
    }
    /// Tokens, if the engine said so and nobody has been told yet.
    pub(super) fn usage(&self) -> Option<Usage> {
        match self {
            Self::Gate(gate) => gate.usage(),
            Self::Normal(_) => None,
        }
    }
    /// The client sees the engine's own events.
    pub(super) fn passes(&self) -> bool {
        matches!(self, Self::Gate(_))
    }
}

fn passed(deltas: Vec<crate::protocol::Delta>) -> Option<Passed> {
    (!deltas.is_empty()).then_some(Passed::Deltas(Deltas { deltas }))
}
