//! Payloads between Python objects and [`Payload`].

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;
use pulsing_core::{Codec, Payload};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::buffer::Buffer;
use crate::queue::Queue;

/// From here on an object's memory is lent to the network instead of copied, in bytes: below, the frame is copied into the
/// small lane's batch anyway.
const LEND_FROM: usize = 64 * 1024;

/// From here on a copy is worth an advice to the system, in bytes: two of its large pages.
const LARGE_PAGES_FROM: usize = 4 << 20;

/// From here on other threads may run Python meanwhile, in bytes: some milliseconds of copying. To get the interpreter back
/// from a thread that computes takes as long.
const DETACHED_FROM: usize = 16 << 20;

/// What the network has finished with, to be released on a Python thread.
static GRAVEYARD: Mutex<Vec<PyBuffer<u8>>> = Mutex::new(Vec::new());
/// The queues whose loops may release it.
static MOURNERS: Mutex<Vec<Weak<Queue>>> = Mutex::new(Vec::new());

/// Bytes of large buffers copied here since it was last asked for.
static COPIED: AtomicU64 = AtomicU64::new(0);

/// Counts a copy, unless it is small.
pub(crate) fn note_copied(len: usize) {
    if len >= LEND_FROM {
        COPIED.fetch_add(len as u64, Ordering::Relaxed);
    }
}

/// Takes the count of copied bytes. It is the process's: a node that shares the process with others may get theirs.
pub(crate) fn copied() -> u64 {
    COPIED.swap(0, Ordering::Relaxed)
}

/// Releases what the network gave back. Call it attached.
pub(crate) fn bury() {
    let dead = std::mem::take(&mut *GRAVEYARD.lock());
    drop(dead);
}

/// Has the loop of `queue` woken when something is to be buried.
pub(crate) fn mourn(queue: &Arc<Queue>) {
    let mut mourners = MOURNERS.lock();
    mourners.retain(|queue| queue.strong_count() > 0);
    mourners.push(Arc::downgrade(queue));
}

/// The memory of a Python object, exported until the network has finished with it. Dropped anywhere, released in [`bury`]:
/// releasing an export needs the interpreter.
struct Lent(ManuallyDrop<PyBuffer<u8>>);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        if self.0.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the export, which is contiguous (checked when lent) and lives as long as `self`, keeps this memory where
        // it is. Nobody writes to it meanwhile: it is read-only, or its owner waits for the call that it was lent to, as
        // the guide tells callers to (docs/guides/data.md); one that does not sends bytes of both states.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and `self.0` is not used again.
        let export = unsafe { ManuallyDrop::take(&mut self.0) };
        GRAVEYARD.lock().push(export);
        let mourners: Vec<_> = MOURNERS.lock().iter().filter_map(Weak::upgrade).collect();
        for queue in mourners {
            queue.poke();
        }
    }
}

/// Whether the owner of a buffer leaves it alone until the message is through.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// It waits for an answer, which comes after the message was read.
    Waits,
    /// It goes on at once, and may write to what it can write to.
    GoesOn,
}

/// Reads any contiguous buffer. A large one is lent: always when its owner waits, else if it is read-only. All else is
/// copied.
pub(crate) fn bytes_of(object: &Bound<'_, PyAny>, owner: Owner) -> PyResult<Bytes> {
    if let Ok(bytes) = object.cast_exact::<PyBytes>()
        && bytes.as_bytes().len() < LEND_FROM
    {
        return Ok(Bytes::copy_from_slice(bytes.as_bytes()));
    }
    let export = PyBuffer::<u8>::get(object)?;
    if !export.is_c_contiguous() {
        return Err(PyBufferError::new_err("a buffer must be contiguous to travel"));
    }
    if export.len_bytes() >= LEND_FROM && (owner == Owner::Waits || export.readonly()) {
        return Ok(Bytes::from_owner(Lent(ManuallyDrop::new(export))));
    }
    Ok(Bytes::from(copy(object.py(), &export)?))
}

/// A copy of a contiguous buffer.
fn copy(py: Python<'_>, export: &PyBuffer<u8>) -> PyResult<Vec<u8>> {
    let len = export.len_bytes();
    note_copied(len);
    if len < LARGE_PAGES_FROM {
        return export.to_vec(py);
    }
    let mut out = Vec::with_capacity(len);
    use_large_pages(&mut out);
    // SAFETY: the export is contiguous and keeps its memory where it is. Its owner's loop stands still while we copy; an
    // owner that has other threads write to it (docs/guides/data.md) sends bytes of both states.
    let source: &[u8] = unsafe { std::slice::from_raw_parts(export.buf_ptr().cast(), len) };
    if len < DETACHED_FROM {
        out.extend_from_slice(source);
    } else {
        py.detach(|| out.extend_from_slice(source));
    }
    Ok(out)
}

/// Has the empty `memory` made of large pages where the system can: the first touch of each small one costs more than
/// copying it, and all of them are touched on an event loop.
#[cfg(target_os = "linux")]
fn use_large_pages(memory: &mut Vec<u8>) {
    use rustix::mm::{Advice, madvise};
    const PAGE: usize = 2 << 20;
    let space = memory.spare_capacity_mut();
    let begin = space.as_ptr().align_offset(PAGE);
    let Some(len) = space.len().checked_sub(begin).map(|len| len / PAGE * PAGE) else { return };
    // SAFETY: the range lies within this allocation and consists of whole pages; the advice changes no contents. A system
    // that refuses it does without.
    let _ = unsafe { madvise(space[begin..].as_mut_ptr().cast(), len, Advice::LinuxHugepage) };
}

#[cfg(not(target_os = "linux"))]
fn use_large_pages(_memory: &mut Vec<u8>) {}

/// A payload from its Python parts.
pub(crate) fn from_python(
    codec: u8,
    head: &Bound<'_, PyAny>,
    buffers: Vec<Bound<'_, PyAny>>,
    owner: Owner,
) -> PyResult<Payload> {
    let buffers = buffers.iter().map(|buffer| bytes_of(buffer, owner)).collect::<PyResult<Vec<_>>>()?;
    Ok(Payload { codec: Codec(codec), head: bytes_of(head, owner)?, buffers })
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
