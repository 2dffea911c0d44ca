//! `_core.Buffer`: received bytes behind the buffer protocol.

use std::os::raw::c_int;

use bytes::{Bytes, BytesMut};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::payload;

/// Received bytes. Writable when nobody else holds them, so that an array built on them can be changed in place.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Buffer {
    data: *mut u8,
    len: usize,
    writable: bool,
    _owner: Owner,
}

/// Keeps the memory behind `data` alive; never looked at again.
enum Owner {
    Shared { _bytes: Bytes },
    Unique { _bytes: BytesMut },
}

// SAFETY: `data` points into `_owner`, which is never moved out, resized or dropped before the Buffer; the heap block does
// not move with the struct. Rust itself never reads or writes through it after construction: all access is Python's, which
// serialises it with the interpreter lock as for any bytearray.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Takes `bytes` as they are: writable if unique, read-only otherwise.
    pub(crate) fn new(bytes: Bytes) -> Self {
        match bytes.try_into_mut() {
            Ok(unique) => Self::unique(unique),
            Err(bytes) => Self {
                data: bytes.as_ptr().cast_mut(),
                len: bytes.len(),
                writable: false,
                _owner: Owner::Shared { _bytes: bytes },
            },
        }
    }
    /// Takes `bytes` writable, copying them when somebody else holds them too.
    pub(crate) fn writable(bytes: Bytes) -> Self {
        Self::unique(bytes.try_into_mut().unwrap_or_else(|shared| {
            payload::note_copied(shared.len());
            BytesMut::from(&shared[..])
        }))
    }
    fn unique(mut bytes: BytesMut) -> Self {
        Self { data: bytes.as_mut_ptr(), len: bytes.len(), writable: true, _owner: Owner::Unique { _bytes: bytes } }
    }
}

#[pymethods]
impl Buffer {
    #[getter]
    fn readonly(&self) -> bool {
        !self.writable
    }
    fn __len__(&self) -> usize {
        self.len
    }
    fn __repr__(&self) -> String {
        format!("<pulsing Buffer of {} bytes, {}>", self.len, if self.writable { "writable" } else { "read-only" })
    }
    /// # Safety
    /// `view` comes from the interpreter.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let this = slf.get();
        let len = ffi::Py_ssize_t::try_from(this.len).map_err(|_| PyBufferError::new_err("buffer too large"))?;
        // SAFETY: `view` is valid (checked, and ours to fill by the protocol); data and len describe memory that lives as
        // long as `slf`, which the view keeps alive through the reference that FillInfo takes.
        let rc = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), this.data.cast(), len, c_int::from(!this.writable), flags)
        };
        if rc == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
