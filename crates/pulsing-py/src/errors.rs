//! The one place where a Rust error becomes Python data. Python builds the exception: see `pulsing.core._errors`.

use pulsing_core::{ActorId, Error, StateChange};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

pyo3::create_exception!(
    pulsing._core,
    CoreError,
    pyo3::exceptions::PyException,
    "A runtime error as (kind, message, fields, state); pulsing.core turns it into its public class."
);

/// `(kind, message, fields, state)`; `state` says whether the callee may have run: "no", "maybe" or "yes".
pub(crate) fn to_tuple<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyTuple>> {
    let fields = PyDict::new(py);
    match error {
        Error::ActorNotFound { actor, node } => {
            fields.set_item("actor", actor.to_string())?;
            fields.set_item("node", node.to_string())?;
        }
        Error::ActorStopped { actor, .. } => fields.set_item("actor", actor.to_string())?,
        Error::MailboxFull { actor, capacity } => {
            fields.set_item("actor", actor.to_string())?;
            fields.set_item("capacity", capacity)?;
        }
        Error::NameTaken { name, actor, node } => {
            fields.set_item("name", name)?;
            fields.set_item("actor", actor.to_string())?;
            fields.set_item("node", node.to_string())?;
        }
        Error::InvalidName { name, .. } => fields.set_item("name", name)?,
        Error::NameNotFound { name, waited, .. } => {
            fields.set_item("name", name)?;
            fields.set_item("waited", waited.as_secs_f64())?;
        }
        Error::NodeNotFound { node } => fields.set_item("node", node.to_string())?,
        Error::ConnectFailed { addr, .. }
        | Error::ConnectionLost { addr, .. }
        | Error::Refused { addr, .. }
        | Error::Bind { addr, .. } => fields.set_item("addr", addr)?,
        Error::Timeout { what, after } => {
            fields.set_item("what", what)?;
            fields.set_item("after", after.as_secs_f64())?;
        }
        Error::TooLarge { size, limit, .. } | Error::ReplyTooLarge { size, limit, .. } => {
            fields.set_item("size", size)?;
            fields.set_item("limit", limit)?;
        }
        Error::App(app) => {
            fields.set_item("type_name", &app.type_name)?;
            fields.set_item("message", &app.message)?;
            fields.set_item("traceback", &app.traceback)?;
            fields.set_item("code", app.code)?;
            fields.set_item("data", PyBytes::new(py, &app.data))?;
        }
        _ => {}
    }
    let state = state_word(error.state_change());
    PyTuple::new(
        py,
        [
            error.kind().into_pyobject(py)?.into_any(),
            error.to_string().into_pyobject(py)?.into_any(),
            fields.into_any(),
            state.into_pyobject(py)?.into_any(),
        ],
    )
}

fn state_word(state: StateChange) -> &'static str {
    match state {
        StateChange::No => "no",
        StateChange::Maybe => "maybe",
        StateChange::Yes => "yes",
    }
}

/// Every kind of error with what it says about the callee: "no", "maybe" or "yes".
#[pyfunction]
pub(crate) fn error_kinds() -> Vec<(&'static str, &'static str)> {
    Error::KINDS.iter().map(|(kind, state)| (*kind, state_word(*state))).collect()
}

/// The error as an exception, for calls that fail where they stand.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    match to_tuple(py, error) {
        Ok(args) => CoreError::new_err(args.unbind()),
        Err(error) => error,
    }
}

/// The runtime's own refusals, as an actor in Python states them. Unknown kinds are the binding's fault, said so.
pub(crate) fn refusal(kind: &str, actor: ActorId, detail: String, number: f64) -> Error {
    match kind {
        "actor_stopped" => Error::ActorStopped { actor, begun: number == 0.0 },
        "mailbox_full" => Error::MailboxFull { actor, capacity: number as usize },
        "deadlock" => Error::Deadlock { chain: detail },
        "timeout" => {
            Error::Timeout { what: detail, after: std::time::Duration::try_from_secs_f64(number).unwrap_or_default() }
        }
        "cancelled" => Error::Cancelled,
        "shut_down" => Error::ShutDown,
        _ => Error::Protocol(detail),
    }
}
