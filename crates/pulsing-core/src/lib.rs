//! The Pulsing runtime, usable from Rust alone.
//!
//! | module      | holds                                                                    |
//! |-------------|--------------------------------------------------------------------------|
//! | [`actor`]   | the [`Actor`](actor::Actor) trait, mailboxes, contexts                    |
//! | [`system`]  | [`System`]: start, spawn, resolve, call, stop                             |
//! | [`cluster`] | membership and registry as pure state machines: no sockets, clocks, tasks |
//! | [`net`]     | one listener, links, framing, stream credit                               |
//! | [`observe`] | counters and the read-only HTTP endpoints                                 |
//!
//! The promises this crate keeps are numbered in `docs/architecture.md`; comments cite them (R1, M4, ...).
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod actor;
pub mod call;
pub mod cluster;
pub mod error;
mod fault;
pub mod id;
mod moment;
#[cfg(test)]
#[path = "../tests/common/mutate.rs"]
mod mutate;
pub mod net;
pub mod observe;
pub mod payload;
pub mod seldom;
pub mod shown;
pub mod stream;
pub mod system;

pub use call::{Call, CallHandle, CallOptions, Mode, Reply, ReplyEvent, ReplySink, Responder};
pub use error::{AppError, Error, Result, StateChange};
pub use id::{ActorId, NodeId};
pub use net::pki::PkiFiles;
pub use net::tells::{PendingTell, TELL_WINDOW};
pub use net::tls::Passphrase;
pub use net::transport::Transport;
pub use payload::{Codec, Payload};
pub use stream::{Credit, ItemStream, StreamSink};
pub use system::{
    ActorSpec, Changes, Displaced, Ending, Endpoint, Instance, Member, MemberState, NameChange, NameWatch, Reason,
    Security, Seed, System, SystemConfig, Target, Terminated, Watch, WatchGuard,
};
