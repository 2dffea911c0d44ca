//! How actors end: what their watchers learn, and how an actor is told to (R4, R9).

use std::fmt;
use std::time::Duration;

use super::Target;

/// Why an actor is no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It was stopped or drained, or ended itself.
    Stopped,
    /// It failed and its restart policy gave it up, or an actor it is linked to did.
    Failed {
        /// What happened, in words.
        error: String,
    },
    /// It was killed.
    Killed,
    /// Its node was declared down.
    NodeLost,
    /// Its node left the cluster.
    NodeLeft,
    /// Its node knows no such actor: it never lived there, or ended so long ago that its end is forgotten.
    NotFound,
}

impl Reason {
    /// One stable word: stopped, failed, killed, node_lost, node_left, not_found.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Failed { .. } => "failed",
            Self::Killed => "killed",
            Self::NodeLost => "node_lost",
            Self::NodeLeft => "node_left",
            Self::NotFound => "not_found",
        }
    }
    /// What is known beyond the word; empty for all but a failure.
    pub fn error(&self) -> &str {
        match self {
            Self::Failed { error } => error,
            _ => "",
        }
    }
    /// Whether the end passes along links: a failure, a kill or the loss of the node; not a stop that was meant.
    pub fn is_abnormal(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Killed | Self::NodeLost)
    }
    /// The reason behind a word of [`word`](Self::word).
    pub fn from_word(word: &str, error: String) -> Option<Self> {
        Some(match word {
            "stopped" => Self::Stopped,
            "failed" => Self::Failed { error },
            "killed" => Self::Killed,
            "node_lost" => Self::NodeLost,
            "node_left" => Self::NodeLeft,
            "not_found" => Self::NotFound,
            _ => return None,
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => f.write_str("it was stopped"),
            Self::Failed { error } => write!(f, "it failed: {error}"),
            Self::Killed => f.write_str("it was killed"),
            Self::NodeLost => f.write_str("its node was lost"),
            Self::NodeLeft => f.write_str("its node left the cluster"),
            Self::NotFound => f.write_str("its node knows no such actor"),
        }
    }
}

/// What a watch ends with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminated {
    /// Who ended.
    pub target: Target,
    /// Why.
    pub reason: Reason,
}

/// How an actor is told to end. Each passes the messages that wait (R4); a harsher one overrides a milder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Takes no further message, finishes those that wait and run, then ends.
    Drain,
    /// Waiting messages fail; a running handler gets `grace`, then is cancelled.
    Stop {
        /// Time for running handlers.
        grace: Duration,
    },
    /// Running handlers are cancelled at once, and `on_stop` gets a second.
    Kill,
    /// As `Stop` with [`DEFAULT_GRACE`], and watchers are told that it failed.
    Fail {
        /// What happened, in words.
        error: String,
    },
}

/// Time that running handlers get when their actor is stopped and nothing else is said.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(5);

impl Ending {
    /// `Stop` with [`DEFAULT_GRACE`].
    pub fn stop() -> Self {
        Self::Stop { grace: DEFAULT_GRACE }
    }
}
