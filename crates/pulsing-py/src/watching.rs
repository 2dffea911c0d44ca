//! The ends of actors, as `pulsing.core` waits for them and brings them about.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pulsing_core::{Ending, Error, Reason, Terminated, WatchGuard};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::queue::{Build, Event, Queue};
use crate::runtime;

/// Reports the end of a watched actor to `token` as `(reason, error)`.
pub(crate) fn hook(queue: Arc<Queue>, token: u64) -> impl FnOnce(Result<Terminated, Error>) + Send + 'static {
    move |outcome| queue.push(Event::Done(token, outcome.map(|ended| told(&ended.reason))))
}

/// How an actor ended, in Python's words.
pub(crate) fn told(reason: &Reason) -> Build {
    let (word, error) = (reason.word(), reason.error().to_owned());
    Box::new(move |py| Ok((word, error).into_pyobject(py)?.into_any().unbind()))
}

/// The reason behind `word`.
pub(crate) fn reason(word: &str, error: String) -> PyResult<Reason> {
    Reason::from_word(word, error).ok_or_else(|| PyValueError::new_err(format!("{word:?} is no reason to end for")))
}

/// The ending that Python names: drain, stop, kill or fail.
pub(crate) fn ending(how: &str, grace: Option<Duration>, error: String) -> PyResult<Ending> {
    Ok(match how {
        "drain" => Ending::Drain,
        "stop" => grace.map_or_else(Ending::stop, |grace| Ending::Stop { grace }),
        "kill" => Ending::Kill,
        "fail" => Ending::Fail { error },
        _ => {
            return Err(PyValueError::new_err(format!("{how:?} is no way to end; expected drain, stop, kill or fail")));
        }
    })
}

/// A watch of one actor. Dropped, it ends.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct WatchHandle {
    guard: Mutex<Option<WatchGuard>>,
    runtime: tokio::runtime::Handle,
}

impl WatchHandle {
    pub(crate) fn new(guard: WatchGuard, runtime: tokio::runtime::Handle) -> Self {
        Self { guard: Mutex::new(Some(guard)), runtime }
    }
}

impl Drop for WatchHandle {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.lock().take() {
            if runtime::check_fork().is_err() {
                // The node's locks may be held for ever in a forked child.
                guard.keep();
                return;
            }
            let _entered = self.runtime.enter();
            drop(guard);
        }
    }
}

#[pymethods]
impl WatchHandle {
    /// Ends the watch. Idempotent.
    fn cancel(&self) -> PyResult<()> {
        runtime::check_fork()?;
        let _entered = self.runtime.enter();
        let guard = self.guard.lock().take();
        drop(guard);
        Ok(())
    }
}
