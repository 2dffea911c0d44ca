//! Sockets: one listener a node, links between nodes, and the frames on them.
//!
//! ```text
//! listener -> TLS, where the cluster has a passphrase or certificates; then by the first byte:
//!                        -> observers (HTTP)
//!                        -> handshake -> control lane  -> membership and registry
//!                                     -> small + bulk  -> session (callee's side) -> actors
//! system   -> link (caller's side): small + bulk lanes dialled to a node
//! ```
//! Each node dials its own links: calls go out on them and their replies come back on them.

pub(crate) mod conn;
pub(crate) mod control;
pub(crate) mod deadline;
pub mod direct;
#[cfg(test)]
mod fuzz_tests;
pub(crate) mod guests;
pub(crate) mod handshake;
mod inbound;
mod landing;
mod lane;
pub(crate) mod link;
pub(crate) mod listener;
pub mod loan;
#[cfg(feature = "testing")]
pub mod memory;
pub mod numbers;
mod outbox;
pub(crate) mod outcall;
pub mod pki;
mod reader;
mod refusals;
pub(crate) mod secret;
pub(crate) mod session;
mod socket;
pub(crate) mod tells;
pub mod tls;
pub mod transport;
pub mod wire;
