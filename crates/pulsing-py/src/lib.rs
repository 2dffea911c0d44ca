//! `pulsing._core`: the bridge between asyncio and tokio, and nothing else.
//!
//! No Rust thread ever attaches to the interpreter: what Rust has to say waits in a [`queue::Queue`] as plain Rust data until
//! the event loop that owns it drains it, and Python objects are created and dropped on Python's own threads only.
#![warn(missing_docs)]
// Python's keyword arguments are Rust's parameters.
#![allow(clippy::too_many_arguments)]

use pyo3::prelude::*;

mod bridge;
mod buffer;
mod calls;
mod convert;
mod errors;
mod inbound;
mod logging;
mod observe;
mod payload;
mod pickled;
mod queue;
mod runtime;
mod serving;
mod sockets;
mod system;
mod testing;
mod watching;

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("CoreError", m.py().get_type::<errors::CoreError>())?;
    m.add_class::<bridge::Bridge>()?;
    m.add_class::<buffer::Buffer>()?;
    m.add_class::<calls::CallHandle>()?;
    m.add_class::<calls::PendingTell>()?;
    m.add_class::<inbound::InboundCall>()?;
    m.add_class::<system::Starting>()?;
    m.add_class::<system::System>()?;
    m.add_class::<testing::TestHost>()?;
    m.add_class::<testing::TestNetwork>()?;
    m.add_class::<watching::ChangesHandle>()?;
    m.add_class::<watching::WatchHandle>()?;
    m.add_class::<watching::NameWatchHandle>()?;
    m.add_function(wrap_pyfunction!(system::leave_all, m)?)?;
    m.add_function(wrap_pyfunction!(runtime::stop_runtime, m)?)?;
    m.add_function(wrap_pyfunction!(runtime::runtime_started, m)?)?;
    m.add_function(wrap_pyfunction!(runtime::runtime_tasks, m)?)?;
    m.add_function(wrap_pyfunction!(logging::init_logging, m)?)?;
    m.add_function(wrap_pyfunction!(errors::error_kinds, m)?)?;
    m.add_function(wrap_pyfunction!(observe::observe_get, m)?)?;
    m.add_function(wrap_pyfunction!(observe::seed_places, m)?)?;
    serving::register(m)?;
    Ok(())
}
