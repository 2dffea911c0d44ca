//! Payloads between Python objects and [`Payload`].

use std::mem::ManuallyDrop;

use bytes::Bytes;
use parking_lot::Mutex;
use pulsing_core::{Codec, Payload};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList};

use crate::buffer::Buffer;

/// From here on a `bytes` object is lent to the network instead of copied.
const LEND_FROM: usize = 64 * 1024;

/// `bytes` objects the network has finished with, to be released on a Python thread.
static GRAVEYARD: Mutex<Vec<PyBackedBytes>> = Mutex::new(Vec::new());

/// Releases what the network gave back. Call it attached.
pub(crate) fn bury() {
    let dead = std::mem::take(&mut *GRAVEYARD.lock());
    drop(dead);
}

/// A lent `bytes` object: dropped anywhere, released in [`bury`].
struct Lent(ManuallyDrop<PyBackedBytes>);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and `self.0` is not used again.
        let bytes = unsafe { ManuallyDrop::take(&mut self.0) };
        GRAVEYARD.lock().push(bytes);
    }
}

/// Reads any contiguous buffer. `bytes` cannot change and are lent when large; all else is copied, for its owner may write
/// to it while the frame is still on its way.
pub(crate) fn bytes_of(object: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    if let Ok(bytes) = object.cast_exact::<PyBytes>() {
        let data = bytes.as_bytes();
        if data.len() < LEND_FROM {
            return Ok(Bytes::copy_from_slice(data));
        }
        return Ok(Bytes::from_owner(Lent(ManuallyDrop::new(PyBackedBytes::from(bytes.clone())))));
    }
    Ok(Bytes::from(PyBuffer::<u8>::get(object)?.to_vec(object.py())?))
}

/// A payload from its Python parts.
pub(crate) fn from_python(codec: u8, head: &Bound<'_, PyAny>, buffers: Vec<Bound<'_, PyAny>>) -> PyResult<Payload> {
    let buffers = buffers.iter().map(bytes_of).collect::<PyResult<Vec<_>>>()?;
    Ok(Payload { codec: Codec(codec), head: bytes_of(head)?, buffers })
}

/// `(head, buffers)` for Python. Buffers of a pickle are writable: arrays are rebuilt on them.
pub(crate) fn to_python(py: Python<'_>, payload: Payload) -> PyResult<(Py<PyBytes>, Py<PyList>)> {
    let head = PyBytes::new(py, &payload.head).unbind();
    let writable = payload.codec == Codec::PICKLE;
    let list = PyList::empty(py);
    for bytes in payload.buffers {
        list.append(Py::new(py, if writable { Buffer::writable(bytes) } else { Buffer::new(bytes) })?)?;
    }
    Ok((head, list.unbind()))
}
