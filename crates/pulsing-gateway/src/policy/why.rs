//! The reason of a choice, for people.

use std::fmt;

/// Why this Worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// It was its turn.
    Turn,
    /// By chance.
    Chance,
    /// There is no other.
    OnlyOne,
    /// The less loaded of two.
    LessOfTwo,
    /// The least loaded.
    LeastLoad,
    /// The request names no conversation: the least loaded.
    NoKey,
    /// The conversation's own.
    Home,
    /// The conversation's own, and others after it, have too much to do.
    Spilled {
        /// How many.
        rank: usize,
    },
    /// All have too much to do; this one is the conversation's own.
    AllFull,
    /// The prompt is shorter than a block, or none that can be compared: the least loaded.
    NoPrefix,
    /// Nobody knows the prompt: the least loaded.
    Unknown {
        /// Length of the prompt.
        blocks: usize,
    },
    /// It has the longest part of the prompt.
    Prefix {
        /// Blocks it has.
        matched: usize,
        /// Length of the prompt.
        blocks: usize,
    },
    /// Who knows the prompt has too much to do: the least loaded.
    Unbalanced {
        /// Blocks that somebody has.
        matched: usize,
        /// Length of the prompt.
        blocks: usize,
    },
    /// The least loaded of those that generate from what another one has read.
    Decodes,
    /// The scheduler that is plugged in said so.
    Scheduler,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Turn => f.write_str("its turn"),
            Self::Chance => f.write_str("by chance"),
            Self::OnlyOne => f.write_str("the only one"),
            Self::LessOfTwo => f.write_str("less loaded of two"),
            Self::LeastLoad => f.write_str("least loaded"),
            Self::NoKey => f.write_str("no session key: least loaded"),
            Self::Home => f.write_str("the session's own"),
            Self::Spilled { rank } => write!(f, "spilled past {rank} with too much load"),
            Self::AllFull => f.write_str("the session's own, all have too much load"),
            Self::NoPrefix => f.write_str("no prompt block: least loaded"),
            Self::Unknown { blocks } => write!(f, "0/{blocks} blocks known: least loaded"),
            Self::Prefix { matched, blocks } => write!(f, "{matched}/{blocks} blocks cached"),
            Self::Unbalanced { matched, blocks } => {
                write!(f, "{matched}/{blocks} blocks cached where there is too much load: least loaded")
            }
            Self::Decodes => f.write_str("decodes: least loaded"),
            Self::Scheduler => f.write_str("chosen by the scheduler"),
        }
    }
}
