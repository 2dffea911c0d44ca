//! The OpenAI-compatible data plane: one HTTP server in front of the Workers of a cluster.
//!
//! | module       | holds                                                                      |
//! |--------------|----------------------------------------------------------------------------|
//! | [`protocol`] | the worker protocol (`proto/worker.proto`)                                 |
//! | [`api`]      | OpenAI's requests, errors, answers and event streams                       |
//! | [`cluster`]  | what the gateway asks of the runtime, so that tests can stand in for it    |
//! | [`pool`]     | the Workers as they are now: states, load, models                          |
//! | [`policy`]   | which Worker takes the next request                                        |
//! | `engine`     | engine servers that joined through an EngineWorker: dialled over HTTP      |
//! | `admit`      | API keys, their limits, the queue in front of the Workers                  |
//! | `dispatch`   | one request to one Worker, and to the next when that one fails             |
//! | `explain`    | why requests went where they went                                          |
//! | [`server`]   | listener, routes, request life                                             |
//!
//! A request is parsed, admitted, placed, forwarded and streamed without a lock that a writer holds: routing reads an
//! immutable snapshot of the pool.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod admit;
mod aside;
#[cfg(test)]
#[path = "../../pulsing-core/tests/common/mutate.rs"]
mod mutate;

pub mod api;
pub mod cluster;
mod config;
mod dial;
mod dispatch;
mod engine;
mod explain;
mod files;
mod ids;
mod metrics;
pub mod picker;
pub mod policy;
pub mod pool;
pub mod protocol;
pub mod server;
mod telemetry;
mod trail;
mod tunnel;

pub use cluster::Cluster;
pub use config::{GatewayConfig, GatewayError};
pub use picker::{ActorPicker, ExternalPicker, PickRequest};
pub use policy::{PolicyKind, PolicyOptions};
pub use pool::Served;
pub use server::Gateway;
pub use telemetry::Tracer;
