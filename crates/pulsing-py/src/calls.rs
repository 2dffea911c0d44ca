//! Calls that this process makes: their events go to the queue, their control stays with Python.

use std::sync::Arc;

use parking_lot::Mutex;
use pulsing_core::net::loan::Reader;
use pulsing_core::{ReplyEvent, ReplySink};
use pyo3::prelude::*;

use crate::queue::{Event, Queue};
use crate::runtime;
use crate::system::none;

/// Sends the events of one call to the loop that made it.
pub(crate) struct QueueSink {
    pub(crate) queue: Arc<Queue>,
    pub(crate) token: u64,
}

impl ReplySink for QueueSink {
    fn event(&self, event: ReplyEvent) {
        self.queue.push(Event::Reply(self.token, event));
    }
    fn reader(&self) -> Option<Arc<dyn Reader>> {
        self.queue.reader()
    }
}

/// Control over one call that is out.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct CallHandle {
    /// What its events carry.
    #[pyo3(get)]
    pub(crate) token: u64,
    pub(crate) inner: pulsing_core::CallHandle,
    pub(crate) runtime: tokio::runtime::Handle,
}

/// A tell that waits for room: its end comes to the loop that made it, as `token`. Dropped, it is withdrawn.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct PendingTell {
    #[pyo3(get)]
    token: u64,
    inner: Mutex<Option<pulsing_core::PendingTell>>,
    runtime: tokio::runtime::Handle,
}

impl PendingTell {
    pub(crate) fn new(inner: pulsing_core::PendingTell, queue: Arc<Queue>, runtime: tokio::runtime::Handle) -> Self {
        let token = queue.token();
        inner.on_done(move |result| queue.push(Event::Done(token, result.map(|()| none()))));
        Self { token, inner: Mutex::new(Some(inner)), runtime }
    }
    fn withdraw(&self) {
        let _guard = self.runtime.enter();
        drop(self.inner.lock().take());
    }
}

#[pymethods]
impl PendingTell {
    fn cancel(&self) -> PyResult<()> {
        runtime::check_fork()?;
        self.withdraw();
        Ok(())
    }
}

impl Drop for PendingTell {
    fn drop(&mut self) {
        // In a forked child there is nothing left to tell, and locks may be held for ever.
        if runtime::check_fork().is_ok() {
            self.withdraw();
        } else {
            std::mem::forget(self.inner.lock().take());
        }
    }
}

#[pymethods]
impl CallHandle {
    pub(crate) fn cancel(&self) -> PyResult<()> {
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
