//! Rust's side of the logs: to stderr, from whatever thread, never through the interpreter.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

/// Starts Rust's logging once; later calls change nothing and return False.
///
/// `filter` is a level ("warning" is accepted for "warn") or a tracing filter such as `info,pulsing_core::net=debug`;
/// `format` is "text" or "json".
#[pyfunction]
pub(crate) fn init_logging(filter: &str, format: &str) -> PyResult<bool> {
    let lowered = filter.to_ascii_lowercase();
    let directives = match lowered.as_str() {
        "warning" => "warn",
        "critical" => "error",
        _ => filter,
    };
    let filter = EnvFilter::try_new(directives)
        .map_err(|error| PyValueError::new_err(format!("log level {filter:?}: {error}")))?;
    // A line nobody reads any more (`2>&1 | head`) is lost; reporting that to the same stderr would panic.
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    let started = match format {
        "text" => builder.with_ansi(false).try_init(),
        "json" => builder.json().try_init(),
        _ => return Err(PyValueError::new_err(format!("log format {format:?}: expected \"text\" or \"json\""))),
    };
    Ok(started.is_ok())
}
