//! Events as the tuples that `drain` returns. The numbers are `pulsing.core._bridge`'s constants.

use std::sync::Arc;

use pulsing_core::{Codec, Ending, Error, Payload, ReplyEvent};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::calls::CallHandle;
use crate::inbound::InboundCall;
use crate::queue::{Event, Queue};
use crate::{errors, payload, pickled};

const VALUE: u8 = 0;
const ERROR: u8 = 1;
const STREAM_START: u8 = 2;
const ITEM: u8 = 3;
const END: u8 = 4;
const INBOUND: u8 = 5;
const CANCELLED: u8 = 6;
const CREDIT: u8 = 7;
const DONE: u8 = 8;
const CHANGED: u8 = 9;
const DISPLACED: u8 = 10;
const ENDING: u8 = 11;
const PLAIN: u8 = 12;

/// `(kind, token, ...)`.
pub(crate) fn event<'py>(py: Python<'py>, queue: &Arc<Queue>, event: Event) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        Event::Reply(token, ReplyEvent::Value(payload)) => carrying(py, VALUE, token, payload),
        Event::Reply(token, ReplyEvent::Item(payload)) => carrying(py, ITEM, token, payload),
        Event::Reply(token, ReplyEvent::Error(error)) | Event::Done(token, Err(error)) => failed(py, token, &error),
        Event::Reply(token, ReplyEvent::StreamStart) => (STREAM_START, token).into_pyobject(py),
        Event::Reply(token, ReplyEvent::End) => (END, token).into_pyobject(py),
        Event::Inbound { key, token, call } => {
            let envelope = InboundCall::is_plain(&call).then(|| pickled::read(py, &call.payload.head)).flatten();
            // With what every call has, so that the loop need not ask for each.
            let sender = call.sender.map(|id| PyBytes::new(py, &id.to_bytes()));
            let call = InboundCall::new(queue, token, *call);
            let timeout = call.timeout();
            let call = Py::new(py, call)?;
            match envelope {
                Some(envelope) => (PLAIN, key, call, envelope, timeout, sender, token).into_pyobject(py),
                None => (INBOUND, key, call).into_pyobject(py),
            }
        }
        Event::Cancelled(token) => (CANCELLED, token).into_pyobject(py),
        Event::Credit(token) => (CREDIT, token).into_pyobject(py),
        Event::Done(token, Ok(build)) => (DONE, token, build(py)?).into_pyobject(py),
        Event::Ending { key, ending } => {
            let (how, grace, error) = match ending {
                Ending::Drain => ("drain", None, None),
                Ending::Stop { grace } => ("stop", Some(grace.as_secs_f64()), None),
                Ending::Kill => ("kill", None, None),
                Ending::Fail { error } => ("fail", None, Some(error)),
            };
            (ENDING, key, how, grace, error).into_pyobject(py)
        }
        Event::Changed(token) => (CHANGED, token).into_pyobject(py),
        Event::Displaced(token, how) => (DISPLACED, token, how).into_pyobject(py),
    }
}

/// The first event of a plain ask, as the result of its future: the value itself if it is known here and no tuple, else the
/// event's tuple.
pub(crate) fn answer<'py>(
    py: Python<'py>,
    queue: &Arc<Queue>,
    token: u64,
    reply: ReplyEvent,
) -> PyResult<Bound<'py, PyAny>> {
    if let ReplyEvent::Value(payload) = &reply
        && payload.codec == Codec::PICKLE
        && payload.buffers.is_empty()
        && let Some(value) = pickled::read(py, &payload.head)
        && !value.is_exact_instance_of::<PyTuple>()
    {
        return Ok(value);
    }
    event(py, queue, Event::Reply(token, reply)).map(Bound::into_any)
}

/// The beginning of a stream that answers a plain ask: `(kind, token, handle, future)`.
pub(crate) fn stream_start(py: Python<'_>, handle: CallHandle, future: Py<PyAny>) -> PyResult<Bound<'_, PyTuple>> {
    (STREAM_START, handle.token, Py::new(py, handle)?, future).into_pyobject(py)
}

fn carrying<'py>(py: Python<'py>, kind: u8, token: u64, payload: Payload) -> PyResult<Bound<'py, PyTuple>> {
    let codec = payload.codec.0;
    if payload.buffers.is_empty() {
        return (kind, token, codec, PyBytes::new(py, &payload.head), PyTuple::empty(py)).into_pyobject(py);
    }
    let (head, buffers) = payload::to_python(py, payload)?;
    (kind, token, codec, head, buffers).into_pyobject(py)
}

fn failed<'py>(py: Python<'py>, token: u64, error: &Error) -> PyResult<Bound<'py, PyTuple>> {
    (ERROR, token, errors::to_tuple(py, error)?).into_pyobject(py)
}

/// One published instance as a dict of plain values.
pub(crate) fn instance<'py>(py: Python<'py>, instance: &pulsing_core::Instance) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("name", &instance.name)?;
    dict.set_item("node_id", instance.target.node.to_string())?;
    dict.set_item("actor_id", instance.target.actor.to_string())?;
    dict.set_item("addr", &instance.addr)?;
    dict.set_item("class", &instance.class)?;
    dict.set_item("metadata", instance.metadata.clone())?;
    dict.set_item("unique", instance.unique)?;
    Ok(dict)
}
