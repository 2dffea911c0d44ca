//! Spans of Workers.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::runtime::check_fork;
use crate::system::System;

/// Sends spans to a collector, beside everything else.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Tracer(pulsing_gateway::Tracer);

fn moment(seconds: f64) -> SystemTime {
    // A clock before 1970, or no number at all, is no time.
    UNIX_EPOCH + Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[pymethods]
impl Tracer {
    #[new]
    #[pyo3(signature = (system, endpoint, service, *, headers_file = None, headers = None))]
    fn new(
        system: &System,
        endpoint: &str,
        service: &str,
        headers_file: Option<PathBuf>,
        headers: Option<&str>,
    ) -> PyResult<Self> {
        check_fork()?;
        let runtime = system.runtime();
        let _guard = runtime.enter();
        pulsing_gateway::Tracer::start(endpoint, headers_file.as_deref(), headers, service)
            .map(Self)
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }
    /// A span below `traceparent`, from `start` to `end` (seconds since 1970). `attributes` is a JSON object.
    #[pyo3(signature = (traceparent, name, start, end, attributes, error = None))]
    fn record(
        &self,
        traceparent: &str,
        name: String,
        start: f64,
        end: f64,
        attributes: &str,
        error: Option<String>,
    ) -> PyResult<()> {
        self.0
            .record(traceparent, name, (moment(start), moment(end)), attributes, error)
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
