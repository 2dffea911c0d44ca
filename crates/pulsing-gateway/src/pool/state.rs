//! What a Worker is doing.

use std::fmt;

/// What a Worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Takes requests.
    Ready,
    /// Its model is not there yet.
    Loading,
    /// Finishes what it has.
    Draining,
    /// Will not serve; its detail says why.
    Failed,
    /// It has not answered yet, or the last call to it was lost on the way.
    Unreachable,
    /// Its reports have stopped: its process, or its machine, hangs.
    Silent,
    /// It reports, but its engine does nothing for the requests it has.
    Stuck,
    /// It failed several requests in a row that others served, and rests for a moment.
    Tripped,
    /// Speaks no version of the protocol that we do.
    Incompatible,
}

impl State {
    /// Every state, as counted in metrics.
    pub const ALL: [Self; 9] = [
        Self::Ready,
        Self::Loading,
        Self::Draining,
        Self::Failed,
        Self::Unreachable,
        Self::Silent,
        Self::Stuck,
        Self::Tripped,
        Self::Incompatible,
    ];

    /// As metadata and metrics spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Loading => "loading",
            Self::Draining => "draining",
            Self::Failed => "failed",
            Self::Unreachable => "unreachable",
            Self::Silent => "silent",
            Self::Stuck => "stuck",
            Self::Tripped => "tripped",
            Self::Incompatible => "incompatible",
        }
    }
    /// A Worker that says nothing of its state is ready; one that says something unknown is not.
    pub(super) fn parse(text: &str) -> Self {
        match text {
            "" | "ready" => Self::Ready,
            "loading" => Self::Loading,
            "draining" => Self::Draining,
            _ => Self::Failed,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
