//! What a node says about itself.

mod metrics;
pub use metrics::Metrics;
