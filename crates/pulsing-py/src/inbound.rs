//! Calls that arrive for a Python actor, from another node or from Rust in this process.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use pulsing_core::net::loan::Reader;
use pulsing_core::{
    ActorId, AppError, Call, Codec, Credit, Displaced, Ending, Endpoint, Error, Mode, Payload, Responder, StreamSink,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList};

use crate::payload::{self, Owner};
use crate::queue::{Event, Queue};
use crate::{errors, pickled, runtime};

/// Hands the calls for one actor to the queue of its loop.
pub(crate) struct QueueEndpoint {
    pub(crate) queue: Arc<Queue>,
    pub(crate) key: u64,
}

impl Endpoint for QueueEndpoint {
    fn deliver(&self, call: Call) {
        let token = self.queue.token();
        let cancel = call.responder.cancel_signal().clone();
        self.queue.push(Event::Inbound { key: self.key, token, call: Box::new(call) });
        // After the push, so that the loop never hears of a cancellation before its call.
        let queue = Arc::downgrade(&self.queue);
        cancel.on_cancel(move || {
            if let Some(queue) = queue.upgrade() {
                queue.push(Event::Cancelled(token));
            }
        });
    }
    fn displaced(&self, loss: &Displaced) {
        self.queue.push(Event::Displaced(self.key, loss.to_string()));
    }
    fn end(&self, ending: Ending) {
        self.queue.push(Event::Ending { key: self.key, ending });
    }
    fn reader(&self) -> Option<Arc<dyn Reader>> {
        self.queue.reader()
    }
}

/// How far the answer is.
enum Answer {
    Open(Responder),
    Stream(StreamSink),
    Done,
}

/// One call as its actor sees it. Dropped without an answer it tells the caller `ActorStopped`.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct InboundCall {
    #[pyo3(get)]
    token: u64,
    actor: ActorId,
    #[pyo3(get)]
    codec: u8,
    /// What was not asked for yet.
    payload: Mutex<Option<Payload>>,
    /// What was: Python's head and buffers.
    parts: PyOnceLock<(Py<PyBytes>, Py<PyList>)>,
    #[pyo3(get)]
    timeout: Option<f64>,
    #[pyo3(get)]
    trace: Option<String>,
    #[pyo3(get)]
    no_wait: bool,
    #[pyo3(get)]
    one_way: bool,
    sender: Option<ActorId>,
    chain: Vec<ActorId>,
    queue: Arc<Queue>,
    credit: Mutex<Option<Arc<Credit>>>,
    answer: Mutex<Answer>,
}

impl InboundCall {
    pub(crate) fn new(queue: &Arc<Queue>, token: u64, call: Call) -> Self {
        let timeout = call.remaining().map(|left| left.as_secs_f64());
        Self {
            token,
            actor: call.target,
            codec: call.payload.codec.0,
            payload: Mutex::new(Some(call.payload)),
            parts: PyOnceLock::new(),
            timeout,
            trace: call.trace,
            no_wait: call.no_wait,
            one_way: call.mode == Mode::Tell,
            sender: call.sender,
            chain: call.chain,
            queue: Arc::clone(queue),
            credit: Mutex::new(None),
            answer: Mutex::new(Answer::Open(call.responder)),
        }
    }
    /// A pickled ask that carries nothing but its arguments, a deadline and its sender.
    pub(crate) fn is_plain(call: &Call) -> bool {
        call.payload.codec == Codec::PICKLE
            && call.payload.buffers.is_empty()
            && call.mode == Mode::Ask
            && !call.no_wait
            && call.chain.is_empty()
            && call.trace.is_none()
    }
    fn parts<'py>(&'py self, py: Python<'py>) -> PyResult<&'py (Py<PyBytes>, Py<PyList>)> {
        self.parts.get_or_try_init(py, || {
            let payload = self.payload.lock().take();
            payload::to_python(py, payload.unwrap_or_else(|| Payload::new(Codec(self.codec), Bytes::new())))
        })
    }
    pub(crate) fn timeout(&self) -> Option<f64> {
        self.timeout
    }
    /// The answer, which nobody has any more.
    fn take(&self) -> PyResult<Answer> {
        runtime::check_fork()?;
        match std::mem::replace(&mut *self.answer.lock(), Answer::Done) {
            Answer::Done => Err(PyRuntimeError::new_err("this call was answered already")),
            answer => Ok(answer),
        }
    }
    /// Begins the stream if it has not begun.
    fn begin(&self) -> PyResult<()> {
        if matches!(*self.answer.lock(), Answer::Stream(_)) {
            return runtime::check_fork();
        }
        match self.take()? {
            Answer::Open(responder) => {
                let stream = responder.stream();
                *self.credit.lock() = Some(Arc::clone(stream.credit()));
                *self.answer.lock() = Answer::Stream(stream);
            }
            stream => *self.answer.lock() = stream,
        }
        Ok(())
    }
    fn finish(&self, error: Error) -> PyResult<()> {
        match self.take()? {
            Answer::Open(responder) => responder.error(error),
            Answer::Stream(stream) => stream.error(error),
            Answer::Done => {}
        }
        Ok(())
    }
}

#[pymethods]
impl InboundCall {
    #[getter]
    fn head(&self, py: Python<'_>) -> PyResult<Py<PyBytes>> {
        Ok(self.parts(py)?.0.clone_ref(py))
    }
    #[getter]
    fn buffers(&self, py: Python<'_>) -> PyResult<Py<PyList>> {
        Ok(self.parts(py)?.1.clone_ref(py))
    }
    #[getter]
    fn sender<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.sender.map(|id| PyBytes::new(py, &id.to_bytes()))
    }
    #[getter]
    fn chain<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.chain.iter().map(|id| PyBytes::new(py, &id.to_bytes())).collect()
    }
    #[getter]
    fn cancelled(&self) -> bool {
        match &*self.answer.lock() {
            Answer::Open(responder) => responder.cancel_signal().is_cancelled(),
            Answer::Stream(stream) => stream.cancel_signal().is_cancelled(),
            Answer::Done => false,
        }
    }
    #[getter]
    fn answered(&self) -> bool {
        matches!(*self.answer.lock(), Answer::Done)
    }
    /// A tell has a place in its actor's mailbox, or runs: whoever sent it may send another.
    fn accept(&self) -> PyResult<()> {
        runtime::check_fork()?;
        let acceptance = match &*self.answer.lock() {
            Answer::Open(responder) => Some(responder.acceptance()),
            _ => None,
        };
        if let Some(acceptance) = acceptance {
            acceptance.give();
        }
        Ok(())
    }
    #[pyo3(signature = (head, buffers = Vec::new(), codec = None))]
    fn reply(&self, head: &Bound<'_, PyAny>, buffers: Vec<Bound<'_, PyAny>>, codec: Option<u8>) -> PyResult<()> {
        let payload = payload::from_python(codec.unwrap_or(self.codec), head, buffers, Owner::GoesOn)?;
        match self.take()? {
            Answer::Open(responder) => responder.value(payload),
            stream => {
                *self.answer.lock() = stream;
                return Err(PyRuntimeError::new_err("this call is answered by a stream: end() it, or fail() it"));
            }
        }
        Ok(())
    }
    /// `reply` with a plain value. False: it is none.
    fn answer(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(head) = pickled::plain(value) else { return Ok(false) };
        match self.take()? {
            Answer::Open(responder) => responder.value(Payload::new(Codec::PICKLE, head)),
            stream => {
                *self.answer.lock() = stream;
                return Err(PyRuntimeError::new_err("this call is answered by a stream: end() it, or fail() it"));
            }
        }
        Ok(true)
    }
    /// Begins the stream, with what is to be said about it ahead of its items.
    fn start(&self, py: Python<'_>, header: &[u8]) -> PyResult<()> {
        self.begin()?;
        if let Answer::Stream(stream) = &*self.answer.lock() {
            let header = Payload { codec: Codec::RAW, head: Bytes::copy_from_slice(header), buffers: Vec::new() };
            stream.announce(header).map_err(|error| errors::raise(py, &error))?;
        }
        Ok(())
    }
    /// Sends one stream item if there is credit. False: wait for credit. `CoreError` "cancelled": the consumer has gone.
    #[pyo3(signature = (head, buffers = Vec::new(), codec = None))]
    fn try_send(
        &self,
        py: Python<'_>,
        head: &Bound<'_, PyAny>,
        buffers: Vec<Bound<'_, PyAny>>,
        codec: Option<u8>,
    ) -> PyResult<bool> {
        self.begin()?;
        let item: Payload = payload::from_python(codec.unwrap_or(self.codec), head, buffers, Owner::GoesOn)?;
        let sent = match &*self.answer.lock() {
            Answer::Stream(stream) => stream.try_send(item),
            _ => return Err(PyRuntimeError::new_err("this call was answered already")),
        };
        match sent {
            Ok(left) => Ok(left.is_none()),
            Err(error) => Err(errors::raise(py, &error)),
        }
    }
    /// Asks for a credit event with `token` as soon as the stream may have credit.
    fn wait_credit(&self, token: u64) -> PyResult<()> {
        runtime::check_fork()?;
        let credit = self.credit.lock().clone();
        let queue = Arc::clone(&self.queue);
        match credit {
            Some(credit) => credit.on_available(move || queue.push(Event::Credit(token))),
            None => queue.push(Event::Credit(token)),
        }
        Ok(())
    }
    fn end(&self) -> PyResult<()> {
        self.begin()?;
        if let Answer::Stream(stream) = self.take()? {
            stream.end();
        }
        Ok(())
    }
    #[pyo3(signature = (type_name, message, code = 0, data = None, traceback = String::new()))]
    fn fail(
        &self,
        type_name: String,
        message: String,
        code: i32,
        data: Option<&Bound<'_, PyAny>>,
        traceback: String,
    ) -> PyResult<()> {
        let data = data.map(|data| payload::bytes_of(data, Owner::GoesOn)).transpose()?.unwrap_or_default();
        self.finish(Error::App(Box::new(AppError { type_name, message, traceback, code, data })))
    }
    /// Fails with one of the runtime's own errors: actor_stopped, mailbox_full (number = capacity), deadlock, timeout
    /// (number = seconds), cancelled, shut_down, protocol.
    #[pyo3(signature = (kind, detail = String::new(), number = 0.0))]
    fn refuse(&self, kind: &str, detail: String, number: f64) -> PyResult<()> {
        self.finish(errors::refusal(kind, self.actor, detail, number))
    }
    fn __repr__(&self) -> String {
        format!("<InboundCall for actor {} codec {}>", self.actor, self.codec)
    }
}
