//! Engine servers that joined through an EngineWorker: the Router dials them itself, over HTTP/1.1.
//!
//! The EngineWorker publishes where the engine listens and how it is doing; no request passes through it. What a client
//! sends travels as the bytes it sent, and what the engine answers as the bytes it answered, unless its EngineWorker wants
//! that brought into the form that strict clients accept.

mod asker;
mod attempt;
mod chunks;
mod endpoint;
mod exchange;
#[cfg(test)]
mod fuzz_tests;
mod lines;
mod message;
mod normal;
mod reader;
mod rest;
mod seam;
mod sent;
mod splice;
mod sse;
mod wire;

pub(crate) use attempt::{Asked, Engine, EngineStream, Whole};
pub(crate) use endpoint::Endpoint;
pub(crate) use message::{Head, usage_in};
pub(crate) use reader::Passed;
pub(crate) use rest::{Rest, hindrance};
pub(crate) use seam::Had;
pub(crate) use sent::Sent;
pub(crate) use splice::{Splice, with_fields};
