//! The ends of actors, as `pulsing.core` waits for them and brings them about.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pulsing_core::{Ending, Error, NameChange, NameWatch, Reason, Terminated, WatchGuard};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::bridge::Bridge;
use crate::queue::{Build, Event, Queue};
use crate::system::report;
use crate::{convert, runtime};

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
    runtime: Handle,
}

impl WatchHandle {
    pub(crate) fn new(guard: WatchGuard, runtime: Handle) -> Self {
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

/// Hears of every change of members and names until cancelled; dropping it changes nothing.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct ChangesHandle(AbortHandle);

impl ChangesHandle {
    pub(crate) fn new(task: AbortHandle) -> Self {
        Self(task)
    }
}

#[pymethods]
impl ChangesHandle {
    /// No more events. Idempotent.
    fn cancel(&self) -> PyResult<()> {
        runtime::check_fork()?;
        self.0.abort();
        Ok(())
    }
}

/// A watch of one name. Dropped, it ends.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct NameWatchHandle {
    watch: Mutex<Option<Shared>>,
    /// The wait under way, which owns a share of the watch.
    wait: Mutex<Option<AbortHandle>>,
    runtime: Handle,
}

type Shared = Arc<tokio::sync::Mutex<NameWatch>>;

impl NameWatchHandle {
    pub(crate) fn new(watch: NameWatch, runtime: Handle) -> Self {
        Self { watch: Mutex::new(Some(Arc::new(tokio::sync::Mutex::new(watch)))), wait: Mutex::default(), runtime }
    }
}

impl Drop for NameWatchHandle {
    fn drop(&mut self) {
        let watch = self.watch.lock().take();
        if runtime::check_fork().is_err() {
            // The node's locks may be held for ever in a forked child.
            std::mem::forget(watch);
            return;
        }
        if let Some(wait) = self.wait.lock().take() {
            wait.abort();
        }
    }
}

#[pymethods]
impl NameWatchHandle {
    /// Completes with what changed, once something has: `[(kind, instance), ...]`. One wait at a time.
    fn next(&self, bridge: &Bridge, token: u64) -> PyResult<()> {
        runtime::check_fork()?;
        let Some(watch) = self.watch.lock().clone() else {
            return Err(PyValueError::new_err("this watch of a name is closed"));
        };
        let wait = report(&self.runtime, bridge.queue(), token, async move {
            let mut watch = watch.lock().await;
            watch.changed().await?;
            let changes = watch.take();
            let build: Build = Box::new(move |py| {
                let told = changes.iter().map(|change| {
                    let kind = match change {
                        NameChange::Added(_) => "added",
                        NameChange::Updated(_) => "updated",
                        NameChange::Removed(_) => "removed",
                    };
                    (kind, convert::instance(py, change.instance())?).into_pyobject(py)
                });
                Ok(PyList::new(py, told.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
            });
            Ok(build)
        });
        *self.wait.lock() = Some(wait);
        Ok(())
    }
    /// Ends the watch; a wait under way completes with an error. Idempotent.
    fn close(&self) -> PyResult<()> {
        runtime::check_fork()?;
        let watch = self.watch.lock().take();
        drop(watch);
        if let Some(wait) = self.wait.lock().take() {
            wait.abort();
        }
        Ok(())
    }
}
