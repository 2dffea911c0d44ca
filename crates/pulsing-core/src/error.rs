//! Every way a call can fail, and what the caller may conclude from it (R7).

use std::time::Duration;

use crate::id::{ActorId, NodeId};
use crate::shown::shown;

/// Result of runtime operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whether the failed operation may have had an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateChange {
    /// Nothing happened: a retry is safe.
    No,
    /// Unknown: the callee may have run.
    Maybe,
    /// The callee ran.
    Yes,
}

/// An error raised by the callee's own code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppError {
    /// Full type name, `module.Class` in Python.
    pub type_name: String,
    /// The error's text.
    pub message: String,
    /// The remote traceback, ready to print; empty when there is none.
    pub traceback: String,
    /// A number with meaning to the two ends; the worker protocol puts an HTTP status here. 0 = none.
    pub code: i32,
    /// Opaque: the callee's encoding of the error object (a pickle in Python, JSON in the worker protocol).
    pub data: bytes::Bytes,
}

/// A runtime error. One variant, one Python class.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No actor with this id lives on the node.
    #[error("no actor {actor} on node {node}: it was stopped or never lived there; resolve its name again")]
    ActorNotFound {
        /// Who was asked for.
        actor: ActorId,
        /// Where.
        node: NodeId,
    },
    /// The actor stopped before it answered.
    #[error("actor {actor} stopped before it answered{}", if *.begun { "" } else { "; it had not begun with this message" })]
    ActorStopped {
        /// Which one.
        actor: ActorId,
        /// It may have begun with the message; if not, the message can be sent to somebody else.
        begun: bool,
    },
    /// The mailbox is full and the caller would not wait.
    #[error("mailbox of actor {actor} is full ({capacity} waiting messages); wait, or call without no_wait")]
    MailboxFull {
        /// Which one.
        actor: ActorId,
        /// Waiting messages it holds at most.
        capacity: usize,
    },
    /// The name is taken: on this node, or in the cluster where its holder or its claimant is unique (R10).
    #[error("name {} is already taken by actor {actor} on node {node}; stop its holder or choose another name", shown(.name))]
    NameTaken {
        /// The name.
        name: String,
        /// Its holder.
        actor: ActorId,
        /// Where the holder lives.
        node: NodeId,
    },
    /// The text cannot be an actor name.
    #[error("{} is no actor name: {reason}", shown(.name))]
    InvalidName {
        /// What was given.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Nobody serves under this name.
    #[error("no actor named {} in the cluster (waited {waited:?}); names that exist: {known}", shown(.name))]
    NameNotFound {
        /// The name.
        name: String,
        /// How long the registry was watched for it.
        waited: Duration,
        /// Names that do exist, shortened.
        known: String,
    },
    /// The node is not a member.
    #[error("node {node} is not a member of the cluster")]
    NodeNotFound {
        /// Which one.
        node: NodeId,
    },
    /// The peer could not be dialled.
    #[error("cannot connect to {addr}: {reason}")]
    ConnectFailed {
        /// Address dialled.
        addr: String,
        /// The system's words.
        reason: String,
    },
    /// The link broke while the call was out.
    #[error("connection to {addr} was lost before the answer came: {reason}")]
    ConnectionLost {
        /// The peer.
        addr: String,
        /// Why.
        reason: String,
    },
    /// The peer refused the handshake, or we refused the peer's.
    #[error("{addr} refused the connection: {reason}")]
    Refused {
        /// The peer.
        addr: String,
        /// Its words.
        reason: String,
    },
    /// The deadline passed.
    #[error("no answer within {after:?}: {what}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// The whole limit.
        after: Duration,
    },
    /// The caller gave up.
    #[error("the call was cancelled")]
    Cancelled,
    /// A serial actor would wait on itself.
    #[error("deadlock: {chain}")]
    Deadlock {
        /// The chain of actors, `a -> b -> a`.
        chain: String,
    },
    /// An answer passed a configured cap: the callee has run.
    #[error(
        "{what} of {size} bytes is over the limit of {limit} bytes ({setting}): the call was carried out, its answer is lost"
    )]
    ReplyTooLarge {
        /// What was too large.
        what: String,
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
        /// The setting that moves the limit.
        setting: String,
    },
    /// A message passed a configured cap: it was not sent, or not taken.
    #[error("{what} of {size} bytes is over the limit of {limit} bytes ({setting})")]
    TooLarge {
        /// What was too large.
        what: String,
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
        /// The setting that moves the limit.
        setting: String,
    },
    /// The port is taken.
    #[error("cannot listen on {addr}: {reason}")]
    Bind {
        /// The address.
        addr: String,
        /// The system's words.
        reason: String,
    },
    /// None of the seeds let us in within the join timeout.
    #[error("could not join the cluster within {after:?}; tried {tried}")]
    JoinFailed {
        /// The limit.
        after: Duration,
        /// Each seed with its last error.
        tried: String,
    },
    /// Not an address.
    #[error("{} is no address: {reason} (expected host:port)", shown(.value))]
    InvalidAddress {
        /// What was given.
        value: String,
        /// What is wrong.
        reason: String,
    },
    /// Not an id.
    #[error("{} is no id (expected 32 hexadecimal digits)", shown(.value))]
    InvalidId {
        /// What was given.
        value: String,
    },
    /// A setting does not make sense.
    #[error("bad setting: {0}")]
    Config(String),
    /// The peer sent what the protocol does not allow.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// This system is shut down.
    #[error("the actor system is shut down")]
    ShutDown,
    /// The callee's own error.
    #[error("{}: {}", .0.type_name, .0.message)]
    App(Box<AppError>),
}

/// One line a variant: the compiler refuses a variant without one.
macro_rules! kinds {
    ($($pattern:pat => $kind:literal, $state:ident;)*) => {
        impl Error {
            /// Every kind with what it says about the callee, in the order of the variants.
            pub const KINDS: &'static [(&'static str, StateChange)] = &[$(($kind, StateChange::$state)),*];

            /// A short stable word for logs, metrics and the Python mapping.
            pub fn kind(&self) -> &'static str {
                match self {
                    $($pattern => $kind,)*
                }
            }

            /// Whether the callee may have run.
            pub fn state_change(&self) -> StateChange {
                match self {
                    Self::ActorStopped { begun: false, .. } => StateChange::No,
                    $($pattern => StateChange::$state,)*
                }
            }
        }
    };
}

kinds! {
    Self::ActorNotFound { .. } => "actor_not_found", No;
    Self::ActorStopped { .. } => "actor_stopped", Maybe;
    Self::MailboxFull { .. } => "mailbox_full", No;
    Self::NameTaken { .. } => "name_taken", No;
    Self::InvalidName { .. } => "invalid_name", No;
    Self::NameNotFound { .. } => "name_not_found", No;
    Self::NodeNotFound { .. } => "node_not_found", No;
    Self::ConnectFailed { .. } => "connect_failed", No;
    Self::ConnectionLost { .. } => "connection_lost", Maybe;
    Self::Refused { .. } => "refused", No;
    Self::Timeout { .. } => "timeout", Maybe;
    Self::Cancelled => "cancelled", Maybe;
    Self::Deadlock { .. } => "deadlock", No;
    Self::ReplyTooLarge { .. } => "reply_too_large", Yes;
    Self::TooLarge { .. } => "too_large", No;
    Self::Bind { .. } => "bind", No;
    Self::JoinFailed { .. } => "join_failed", No;
    Self::InvalidAddress { .. } => "invalid_address", No;
    Self::InvalidId { .. } => "invalid_id", No;
    Self::Config(_) => "config", No;
    Self::Protocol(_) => "protocol", Maybe;
    Self::ShutDown => "shut_down", Maybe;
    Self::App(_) => "app", Yes;
}

impl Error {
    /// `TooLarge` as `ReplyTooLarge`: what is too large is an answer.
    pub(crate) fn of_an_answer(self) -> Self {
        match self {
            Self::TooLarge { what, size, limit, setting } => Self::ReplyTooLarge { what, size, limit, setting },
            other => other,
        }
    }

    /// Whether repeating the call cannot run it twice.
    pub fn retry_safe(&self) -> bool {
        self.state_change() == StateChange::No
    }

    /// Whether the same call may well succeed a moment later: the way to the callee failed, not the call itself.
    pub fn passing(&self) -> bool {
        matches!(self, Self::NodeNotFound { .. } | Self::ConnectFailed { .. } | Self::ConnectionLost { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_r7_every_kind_is_named_once_and_says_whether_the_callee_ran() {
        let mut names: Vec<_> = Error::KINDS.iter().map(|(kind, _)| *kind).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Error::KINDS.len());
        let lost = Error::ConnectionLost { addr: "a".into(), reason: "r".into() };
        assert!(!lost.retry_safe() && lost.passing());
        let full = Error::MailboxFull { actor: ActorId(1), capacity: 1 };
        assert!(full.retry_safe() && !full.passing());
        assert_eq!(Error::App(Box::default()).state_change(), StateChange::Yes);
    }
}
