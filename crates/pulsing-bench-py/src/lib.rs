//! `pulsing._bench`: the load generator for Python. All work is in `pulsing-bench`; here are only conversions.
#![warn(missing_docs)]

use std::cell::RefCell;
use std::time::Duration;

use pulsing_bench::{BenchError, Config};
use pyo3::exceptions::{PyConnectionError, PyKeyboardInterrupt, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// A run that goes on in threads of its own.
#[pyclass(module = "pulsing._bench", frozen)]
struct Run {
    inner: pulsing_bench::Run,
}

#[pymethods]
impl Run {
    /// Starts at once. `config` is the JSON of a run; unknown keys and wrong types are a `ValueError`.
    #[new]
    fn new(config: &str) -> PyResult<Self> {
        let config = Config::from_json(config).map_err(raise)?;
        Ok(Self { inner: pulsing_bench::Run::start(config).map_err(raise)? })
    }

    /// Waits up to `timeout` seconds; True when the run is over.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let limit = Duration::try_from_secs_f64(timeout)
            .map_err(|error| PyValueError::new_err(format!("timeout={timeout}: {error}")))?;
        Ok(py.detach(|| self.inner.wait(limit)))
    }

    /// How far it is, as JSON.
    fn progress(&self) -> PyResult<String> {
        json(&self.inner.progress())
    }

    /// Ends it early; the report holds what was measured.
    fn stop(&self) {
        self.inner.stop();
    }

    /// The report as JSON, once the run is over. `count_tokens(text)` counts the answers that came without usage.
    #[pyo3(signature = (count_tokens = None))]
    fn report(&self, py: Python<'_>, count_tokens: Option<Py<PyAny>>) -> PyResult<String> {
        // Detached: the tokenizer may let other Python threads run, and those may ask this run for something.
        let (report, failed) = py.detach(|| {
            let failed = RefCell::new(None);
            let report = match &count_tokens {
                None => self.inner.report(None),
                Some(callable) => {
                    let ask = |text: &str| {
                        let answer = Python::attach(|py| callable.call1(py, (text,))?.extract::<u64>(py));
                        match answer {
                            Ok(tokens) => Some(tokens),
                            Err(error) => {
                                failed.borrow_mut().get_or_insert(error);
                                None
                            }
                        }
                    };
                    self.inner.report(Some(&ask))
                }
            };
            (report, failed.into_inner())
        });
        match failed {
            Some(error) => Err(error),
            None => report.map_err(raise)?.to_json().map_err(|error| PyRuntimeError::new_err(error.to_string())),
        }
    }

    /// One JSON object per request of the points, once the run is over.
    fn requests(&self) -> Vec<String> {
        let mut lines = Vec::new();
        self.inner.requests(|point, record| lines.push(record.to_json(point).to_string()));
        lines
    }
}

fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

fn raise(error: BenchError) -> PyErr {
    let text = error.to_string();
    match error {
        BenchError::Config(_) => PyValueError::new_err(text),
        BenchError::Server(_) => PyConnectionError::new_err(text),
        BenchError::Runtime(_) => PyRuntimeError::new_err(text),
        BenchError::Interrupted => PyKeyboardInterrupt::new_err(text),
    }
}

#[pymodule]
fn _bench(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("DEFINITIONS", pulsing_bench::report::DEFINITIONS.to_vec())?;
    m.add_class::<Run>()?;
    Ok(())
}
