//! `_core.Bridge`: the Python face of a [`Queue`].

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use pulsing_core::net::direct::{self, Keeper};

use crate::payload;
use crate::queue::Queue;
use crate::{convert, runtime, testing};

/// A turn of the loop with at most so many events is not busy: its first message is written by the loop's own thread.
const FEW: usize = 2;

/// One event queue with one wake descriptor; Python makes one for each event loop.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Bridge {
    queue: Arc<Queue>,
    keeper: Arc<dyn Keeper>,
}

impl Bridge {
    /// Where events for this loop go.
    pub(crate) fn queue(&self) -> Arc<Queue> {
        Arc::clone(&self.queue)
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
        Ok(Self { queue, keeper })
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
            tuples.push(convert::event(py, &self.queue, event)?);
        }
        PyList::new(py, tuples)
    }
    /// Ends the turn that `drain` began: what its handlers sent goes out.
    fn flush(&self) {
        direct::flush();
    }
    fn close(&self) {
        direct::leave();
        self.queue.close();
    }
}
