//! The load generator behind `pulsing bench`: it loads an OpenAI-compatible server and measures what the server does.
//!
//! A [`Config`] says what to do; [`Run::start`] does it on threads of its own and hands out [`Progress`] meanwhile and a
//! [`Report`](report::Report) at the end. Stamps are monotonic and taken when bytes leave the socket's read call, before anything is
//! parsed. What each number means stands in [`report::DEFINITIONS`], which every report carries.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod arrival;
mod body;
pub mod chunk;
mod clock;
mod closed;
pub mod config;
mod connection;
mod error;
mod exchange;
mod limits;
mod live;
mod open;
mod phase;
pub mod point;
mod probe;
mod prompt;
pub mod record;
pub mod report;
mod run;
pub mod sse;
pub mod stats;
mod target;
pub mod trace;
pub mod verdict;

pub use config::Config;
pub use error::BenchError;
pub use live::Progress;
pub use run::{Counter, Run};
