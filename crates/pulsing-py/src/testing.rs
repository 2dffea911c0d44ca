//! `pulsing.testing`'s half in Rust: a network in memory, and the runtime whose clock is the test's.
//!
//! Everything runs on the thread of the test. Its event loop hands that thread to the runtime whenever nothing is ready in
//! Python; the runtime's clock is paused, so that it jumps to the next timer instead of waiting, and the loop reads the same
//! clock.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pulsing_core::net::memory::{Faults, Host, Network};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;
use tokio::time::sleep_until;

thread_local! {
    /// What wakes the network that this thread plays.
    static PLAYING: RefCell<Option<Arc<Notify>>> = const { RefCell::new(None) };
}

/// What an event for the loop of this thread must wake besides its descriptor.
pub(crate) fn waker() -> Option<Arc<Notify>> {
    PLAYING.with(|playing| playing.borrow().clone())
}

/// A network of hosts in memory with its own clock.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct TestNetwork {
    network: Network,
    handle: Handle,
    runtime: Mutex<Option<Runtime>>,
    wake: Arc<Notify>,
}

/// One life of one host of a [`TestNetwork`].
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct TestHost {
    pub(crate) host: Host,
    pub(crate) runtime: Handle,
}

impl TestNetwork {
    fn with_runtime(&self, py: Python<'_>, work: impl Future<Output = ()> + Send) -> PyResult<()> {
        py.detach(|| match &*self.runtime.lock() {
            Some(runtime) => {
                runtime.block_on(work);
                Ok(())
            }
            None => Err(PyRuntimeError::new_err("the network has ended")),
        })
    }
}

fn refused(error: pulsing_core::Error) -> PyErr {
    match error {
        pulsing_core::Error::Config(text) => PyValueError::new_err(text),
        other => PyValueError::new_err(other.to_string()),
    }
}

fn seconds(what: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{what}={value}: {error} (seconds expected)")))
}

#[pymethods]
impl TestNetwork {
    #[new]
    fn new(seed: u64) -> PyResult<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .map_err(|error| PyRuntimeError::new_err(format!("cannot start a runtime: {error}")))?;
        let handle = runtime.handle().clone();
        let network = {
            let _guard = handle.enter();
            Network::new(seed)
        };
        Ok(Self { network, handle, runtime: Mutex::new(Some(runtime)), wake: Arc::default() })
    }
    /// Calls `function` with this thread's clock being the network's, and ends the network.
    fn play<'py>(&self, function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if waker().is_some() {
            return Err(PyRuntimeError::new_err("this thread plays a network already"));
        }
        PLAYING.with(|playing| playing.replace(Some(Arc::clone(&self.wake))));
        let result = {
            let _guard = self.handle.enter();
            function.call0()
        };
        PLAYING.with(|playing| playing.take());
        let runtime = self.runtime.lock().take();
        if let Some(runtime) = runtime {
            function.py().detach(|| runtime.shutdown_background());
        }
        result
    }
    /// Seconds since the network began.
    fn now(&self) -> f64 {
        let _guard = self.handle.enter();
        self.network.elapsed().as_secs_f64()
    }
    /// Runs what is ready; the clock stands still.
    fn turn(&self, py: Python<'_>) -> PyResult<()> {
        self.with_runtime(py, tokio::task::yield_now())
    }
    /// Runs until something waits for the loop, or the clock reads `until`; the clock jumps as there is nothing to do.
    fn wait(&self, py: Python<'_>, until: f64) -> PyResult<()> {
        let until = self.network.began() + seconds("until", until.max(0.0))?;
        let wake = Arc::clone(&self.wake);
        self.with_runtime(py, async move {
            tokio::select! {
                biased;
                () = wake.notified() => {}
                () = sleep_until(until) => {}
            }
        })
    }
    /// Ends a `wait`; from any thread.
    fn wake(&self) {
        self.wake.notify_one();
    }
    fn host(&self, name: &str) -> PyResult<TestHost> {
        let host = self.network.host(name).map_err(refused)?;
        Ok(TestHost { host, runtime: self.handle.clone() })
    }
    #[pyo3(signature = (*, delay, loss, reorder, break_after, between = None))]
    fn faults(
        &self,
        delay: (f64, f64),
        loss: f64,
        reorder: f64,
        break_after: f64,
        between: Option<(String, String)>,
    ) -> PyResult<()> {
        let _guard = self.handle.enter();
        let delay = (seconds("delay", delay.0)?, seconds("delay", delay.1)?);
        let faults = Faults { delay, loss, reorder, break_after: seconds("break_after", break_after)? };
        match between {
            Some((a, b)) => self.network.set_faults_between(&a, &b, Some(faults)),
            None => self.network.set_faults(faults),
        }
        .map_err(refused)
    }
    fn partition(&self, a: Vec<String>, b: Vec<String>, one_way: bool, refuse: bool) -> PyResult<()> {
        let _guard = self.handle.enter();
        self.network.partition(&a, &b, one_way, refuse).map_err(refused)
    }
    fn heal(&self) {
        let _guard = self.handle.enter();
        self.network.heal();
    }
    fn kill(&self, name: &str) -> PyResult<()> {
        let _guard = self.handle.enter();
        self.network.kill(name).map_err(refused)
    }
    fn pause(&self, name: &str) -> PyResult<()> {
        let _guard = self.handle.enter();
        self.network.pause(name).map_err(refused)
    }
    fn resume(&self, name: &str) -> PyResult<()> {
        let _guard = self.handle.enter();
        self.network.resume(name).map_err(refused)
    }
    fn __repr__(&self) -> String {
        format!("<TestNetwork at {:.3} s>", self.now())
    }
}

#[pymethods]
impl TestHost {
    /// ``ip:port`` that its node is reached at.
    #[getter]
    fn addr(&self) -> String {
        self.host.addr().to_string()
    }
    fn __repr__(&self) -> String {
        format!("<TestHost {} at {}>", self.host.name(), self.host.addr())
    }
}
