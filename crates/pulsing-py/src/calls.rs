//! Calls that this process makes: their events go to the queue, their control stays with Python.

use std::sync::Arc;

use pulsing_core::{ReplyEvent, ReplySink};
use pyo3::prelude::*;

use crate::queue::{Event, Queue};
use crate::runtime;

/// Sends the events of one call to the loop that made it.
pub(crate) struct QueueSink {
    pub(crate) queue: Arc<Queue>,
    pub(crate) token: u64,
}

impl ReplySink for QueueSink {
    fn event(&self, event: ReplyEvent) {
        self.queue.push(Event::Reply(self.token, event));
    }
}

/// Control over one call that is out.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct CallHandle {
    pub(crate) inner: pulsing_core::CallHandle,
    pub(crate) runtime: tokio::runtime::Handle,
}

#[pymethods]
impl CallHandle {
    fn cancel(&self) -> PyResult<()> {
        runtime::check_fork()?;
        let _guard = self.runtime.enter();
        self.inner.cancel();
        Ok(())
    }
    fn grant(&self, items: u32) -> PyResult<()> {
        runtime::check_fork()?;
        let _guard = self.runtime.enter();
        self.inner.grant(items);
        Ok(())
    }
}
