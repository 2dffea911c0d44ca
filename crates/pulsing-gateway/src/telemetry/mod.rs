//! What is told of requests to the outside: lines of a log, spans of traces. Neither holds anything of what was asked or
//! answered.

mod clock;
mod context;
mod export;
mod headers;
mod log;
mod span;
mod tracer;

pub(crate) use clock::rfc3339;
pub(crate) use context::Context;
pub(crate) use export::Exporter;
pub(crate) use log::AccessLog;
pub(crate) use span::{Attribute, Kind, Span};
pub use tracer::Tracer;
