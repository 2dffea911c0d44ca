//! Serving: the worker protocol's messages as frozen classes, and the Router's gateway.

mod gateway;
mod json;
mod messages;
mod spans;

use pyo3::prelude::*;

/// Adds this part's names to the module.
pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<messages::WorkerRequest>()?;
    m.add_class::<messages::Delta>()?;
    m.add_class::<messages::Usage>()?;
    m.add_class::<messages::LoadReport>()?;
    m.add_class::<messages::Description>()?;
    m.add_class::<gateway::Gateway>()?;
    m.add_class::<gateway::WorkerPicker>()?;
    m.add_class::<spans::Tracer>()?;
    m.add_function(wrap_pyfunction!(json::read_json, m)?)?;
    m.add_function(wrap_pyfunction!(messages::encode_deltas, m)?)?;
    m.add_function(wrap_pyfunction!(messages::encode_answer, m)?)?;
    m.add_function(wrap_pyfunction!(messages::prompt_blocks, m)?)?;
    m.add_function(wrap_pyfunction!(messages::decode_deltas, m)?)?;
    m.add_function(wrap_pyfunction!(messages::encode_request, m)?)?;
    m.add_function(wrap_pyfunction!(gateway::start_gateway, m)?)?;
    m.add_function(wrap_pyfunction!(gateway::check_scheduler_type, m)?)?;
    m.add("SCHEDULER_TYPES", pulsing_gateway::PolicyKind::NAMES.to_vec())?;
    Ok(())
}
