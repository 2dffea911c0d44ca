//! `_core.Bridge`: the Python face of a [`Queue`].

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use pulsing_core::ReplyEvent;
use pulsing_core::net::direct::{self, Keeper};
use pulsing_core::net::numbers::ByNumber;

use crate::calls::CallHandle;
use crate::payload;
use crate::queue::{Event, Queue};
use crate::{convert, runtime, testing};

/// A turn of the loop with at most so many events is not busy: its first message is written by the loop's own thread.
const FEW: usize = 2;

/// One event queue with one wake descriptor; Python makes one for each event loop.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Bridge {
    queue: Arc<Queue>,
    keeper: Arc<dyn Keeper>,
    /// Plain asks whose futures wait for their first events. Python's collector does not look in here; `close` clears it.
    asked: Mutex<ByNumber<Asked>>,
}

/// A plain ask that is out.
struct Asked {
    future: Py<PyAny>,
    handle: CallHandle,
}

impl Bridge {
    /// Where events for this loop go.
    pub(crate) fn queue(&self) -> Arc<Queue> {
        Arc::clone(&self.queue)
    }
    /// Has `future` completed by the first event of a call of this queue.
    pub(crate) fn answer(&self, future: Py<PyAny>, handle: CallHandle) {
        self.asked.lock().insert(handle.token, Asked { future, handle });
    }
    /// Completes the future of the plain ask that an event is for; else the event's tuple, for Python to hand on.
    fn hand_on<'py>(&self, py: Python<'py>, event: Event) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Event::Reply(token, reply) = event else { return convert::event(py, &self.queue, event).map(Some) };
        let Some(Asked { future, handle }) = self.asked.lock().remove(&token) else {
            return convert::event(py, &self.queue, Event::Reply(token, reply)).map(Some);
        };
        if matches!(reply, ReplyEvent::StreamStart) {
            return convert::stream_start(py, handle, future).map(Some);
        }
        let answer = convert::answer(py, &self.queue, token, reply)?;
        if let Err(error) = future.call_method1(py, pyo3::intern!(py, "set_result"), (answer,)) {
            // Cancelled in this very turn, its caller has not given up the call yet.
            let done = future.call_method0(py, pyo3::intern!(py, "done")).and_then(|done| done.is_truthy(py));
            if !done.unwrap_or(false) {
                error.write_unraisable(py, Some(future.bind(py)));
            }
        }
        Ok(None)
    }
}

#[pymethods]
impl Bridge {
    /// `PULSING_BRIDGE_PIPE=1` takes the portable pipe on Linux too.
    #[new]
    fn new() -> PyResult<Self> {
        runtime::check_fork()?;
        let force_pipe = std::env::var_os("PULSING_BRIDGE_PIPE").is_some_and(|value| value == "1");
        let queue = Arc::new(Queue::new(force_pipe, testing::waker())?);
        payload::mourn(&queue);
        let keeper = Arc::clone(&queue) as Arc<dyn Keeper>;
        Ok(Self { queue, keeper, asked: Mutex::default() })
    }
    fn fileno(&self) -> i32 {
        self.queue.fileno()
    }
    fn token(&self) -> u64 {
        self.queue.token()
    }
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        runtime::check_fork()?;
        let events = self.queue.take();
        // After the queue was disarmed: what is given back from now on wakes the loop again.
        payload::bury();
        direct::begin(&self.keeper, if events.len() <= FEW { 1 } else { 0 });
        let mut tuples: Vec<Bound<'py, PyTuple>> = Vec::with_capacity(events.len());
        for event in events {
            tuples.extend(self.hand_on(py, event)?);
        }
        PyList::new(py, tuples)
    }
    /// Ends the turn that `drain` began: what its handlers sent goes out.
    fn flush(&self) {
        direct::flush();
    }
    /// The future of a plain ask waits no longer.
    fn give_up(&self, token: u64) -> PyResult<()> {
        let asked = self.asked.lock().remove(&token);
        asked.map_or(Ok(()), |asked| asked.handle.cancel())
    }
    fn close(&self) {
        direct::leave();
        self.queue.close();
        // Dropping them may run any code: not under the lock.
        let asked = std::mem::take(&mut *self.asked.lock());
        drop(asked);
    }
}
