//! Every way a call can fail, and what the caller may conclude from it (R7).

use std::time::Duration;

use crate::id::{ActorId, NodeId};

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
    #[error("actor {actor} stopped before it answered")]
    ActorStopped {
        /// Which one.
        actor: ActorId,
    },
    /// The mailbox is full and the caller would not wait.
    #[error("mailbox of actor {actor} is full ({capacity} waiting messages); wait, or call without no_wait")]
    MailboxFull {
        /// Which one.
        actor: ActorId,
        /// Waiting messages it holds at most.
        capacity: usize,
    },
    /// The name is taken on this node (or in the cluster, for unique names).
    #[error("name {name:?} is already taken on this node; stop its holder or choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The text cannot be an actor name.
    #[error("{name:?} is no actor name: {reason}")]
    InvalidName {
        /// What was given.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Nobody serves under this name.
    #[error("no actor named {name:?} in the cluster (waited {waited:?}); names that exist: {known}")]
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
    /// A configured cap was passed.
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
    #[error("{value:?} is no address: {reason} (expected host:port)")]
    InvalidAddress {
        /// What was given.
        value: String,
        /// What is wrong.
        reason: String,
    },
    /// Not an id.
    #[error("{value:?} is no id (expected 32 hexadecimal digits)")]
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

impl Error {
    /// A short stable word for logs, metrics and the Python mapping.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::ActorNotFound { .. } => "actor_not_found",
            Self::ActorStopped { .. } => "actor_stopped",
            Self::MailboxFull { .. } => "mailbox_full",
            Self::NameTaken { .. } => "name_taken",
            Self::InvalidName { .. } => "invalid_name",
            Self::NameNotFound { .. } => "name_not_found",
            Self::NodeNotFound { .. } => "node_not_found",
            Self::ConnectFailed { .. } => "connect_failed",
            Self::ConnectionLost { .. } => "connection_lost",
            Self::Refused { .. } => "refused",
            Self::Timeout { .. } => "timeout",
            Self::Cancelled => "cancelled",
            Self::Deadlock { .. } => "deadlock",
            Self::TooLarge { .. } => "too_large",
            Self::Bind { .. } => "bind",
            Self::JoinFailed { .. } => "join_failed",
            Self::InvalidAddress { .. } => "invalid_address",
            Self::InvalidId { .. } => "invalid_id",
            Self::Config(_) => "config",
            Self::Protocol(_) => "protocol",
            Self::ShutDown => "shut_down",
            Self::App(_) => "app",
        }
    }

    /// Whether the callee may have run.
    pub fn state_change(&self) -> StateChange {
        match self {
            Self::App(_) => StateChange::Yes,
            Self::ConnectionLost { .. }
            | Self::Timeout { .. }
            | Self::Cancelled
            | Self::ActorStopped { .. }
            | Self::Protocol(_)
            | Self::ShutDown => StateChange::Maybe,
            _ => StateChange::No,
        }
    }

    /// Whether repeating the call cannot run it twice.
    pub fn retry_safe(&self) -> bool {
        self.state_change() == StateChange::No
    }
}
