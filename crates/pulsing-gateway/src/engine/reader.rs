//! What becomes of the bytes that an engine streams.

use bytes::Bytes;

use super::lines::too_long;
use super::normal::Normaliser;
use super::seam::{Had, Seam};
use super::sse::Gate;
use crate::api::ApiError;
use crate::dispatch::GoOn;
use crate::protocol::{Delta, Deltas, Usage};

/// What came of an answer.
pub(crate) enum Passed {
    /// Events as they are.
    Events(Bytes),
    /// What they say, where they are to be written anew.
    Deltas(Deltas),
    /// The Worker is lost, or stands still, and another one may go on.
    GoOn(Box<GoOn>),
}

/// Lets events through, or reads them.
pub(super) enum Reader {
    Gate(Gate),
    Normal(Box<Normaliser>, Option<Had>),
    /// The rest of another engine's stream.
    Seam(Box<Seam>),
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
            Self::Normal(normal, had) => normal.push(&bytes).and_then(|deltas| passed(deltas, *had)),
            Self::Seam(seam) => seam.push(&bytes).map(events),
        }
    }
    /// Everything was there: a connection that breaks now took nothing with it.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Gate(gate) => gate.is_done(),
            Self::Normal(normal, _) => normal.is_done(),
            Self::Seam(seam) => seam.is_done(),
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
            Self::Normal(normal, had) => normal.finish().and_then(|deltas| passed(deltas, *had)),
            Self::Seam(seam) => seam.finish().map(events),
        }
    }
    /// Tokens, if the engine said so and nobody has been told yet.
    pub(super) fn usage(&self) -> Option<Usage> {
        match self {
            Self::Gate(gate) => gate.usage(),
            Self::Normal(..) => None,
            Self::Seam(seam) => seam.usage(),
        }
    }
    /// The client sees the engine's own events.
    pub(super) fn passes(&self) -> bool {
        matches!(self, Self::Gate(_) | Self::Seam(_))
    }
    /// It is a stream of chunks that another engine could go on with.
    pub(super) fn is_of_chunks(&self) -> bool {
        !matches!(self, Self::Gate(gate) if gate.is_of_response())
    }
}

fn events(bytes: Bytes) -> Option<Passed> {
    (!bytes.is_empty()).then_some(Passed::Events(bytes))
}

fn passed(mut deltas: Vec<Delta>, had: Option<Had>) -> Result<Option<Passed>, ApiError> {
    if let Some(had) = had {
        had.deltas(&mut deltas)?;
    }
    Ok((!deltas.is_empty()).then_some(Passed::Deltas(Deltas { deltas })))
}
