//! The shortest way from Python to tokio and back that pyo3-async-runtimes has.
#![forbid(unsafe_code)]

use pyo3::prelude::*;

/// An awaitable of a future that is ready at once.
#[pyfunction]
fn nothing(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    pyo3_async_runtimes::tokio::future_into_py(py, async { Ok(()) })
}

/// The module.
#[pymodule]
fn pyo3_async_bench(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(nothing, module)?)
}
