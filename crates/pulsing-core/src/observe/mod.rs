//! What a node says about itself: counters, and read-only HTTP endpoints on the node's own port.

mod client;
mod events;
mod follow;
mod metrics;
mod prometheus;
mod server;
mod source;

pub use client::{MAX_BODY, ObserveError, Protocol, Response, get, get_many, get_with};
pub use events::{Event, Events};
pub use metrics::{Counter, Durations, Gauge, Metrics};
pub use server::{Scope, serve, serve_within};
pub use source::{LocalActor, NodeStatus, ObserveSource, Readiness};
