//! The process's one tokio runtime.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::testing;

static RUNTIME: Mutex<Slot> = Mutex::new(Slot::Idle);
/// The process that started the runtime, 0 before. Read without a lock: after a fork any lock may be held for ever.
static OWNER: AtomicUsize = AtomicUsize::new(0);
/// Set in a process that was forked from one that had started the runtime. To ask for the process id costs a system call,
/// and every call looks here.
static FORKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// POSIX: has functions called around each fork.
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

unsafe extern "C" fn forked() {
    FORKED.store(true, Ordering::Release);
}

enum Slot {
    Idle,
    Running(Runtime),
    Stopped,
}

/// Refuses work in a forked child: the runtime's threads stayed in the parent.
pub(crate) fn check_fork() -> PyResult<()> {
    if FORKED.load(Ordering::Acquire) {
        return Err(PyRuntimeError::new_err(
            "this process was forked from one that had started Pulsing, whose threads do not exist here; start it with \
             multiprocessing's 'spawn' or 'forkserver' method, or fork before the first pul.init()",
        ));
    }
    Ok(())
}

/// The runtime, started with so many threads if need be.
pub(crate) fn handle(threads: usize) -> PyResult<Handle> {
    check_fork()?;
    if testing::waker().is_some() {
        return Err(PyRuntimeError::new_err(
            "inside a pulsing.testing.Network time is virtual and there is no TCP: start systems with `await net.system(name)`",
        ));
    }
    let mut slot = RUNTIME.lock();
    if let Slot::Idle = *slot {
        // SAFETY: the function only stores to a static atomic, which may be done in a child of a process with threads, and
        // lives as long as the process: extension modules are not unloaded.
        if unsafe { pthread_atfork(None, None, Some(forked)) } != 0 {
            return Err(PyRuntimeError::new_err("cannot start the runtime: no memory to watch for forks"));
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .thread_name("pulsing-net")
            .enable_all()
            .build()
            .map_err(|error| PyRuntimeError::new_err(format!("cannot start the runtime's threads: {error}")))?;
        OWNER.store(std::process::id() as usize, Ordering::Release);
        *slot = Slot::Running(runtime);
    }
    match &*slot {
        Slot::Running(runtime) => Ok(runtime.handle().clone()),
        _ => Err(PyRuntimeError::new_err("the interpreter is exiting: Pulsing's runtime has been stopped")),
    }
}

/// True in the process that started the runtime, until it is stopped.
#[pyfunction]
pub(crate) fn runtime_started() -> bool {
    OWNER.load(Ordering::Acquire) == std::process::id() as usize && matches!(*RUNTIME.lock(), Slot::Running(_))
}

/// Tasks of the runtime that have not ended: of every node of this process together.
#[pyfunction]
pub(crate) fn runtime_tasks() -> usize {
    if !runtime_started() {
        return 0;
    }
    match &*RUNTIME.lock() {
        Slot::Running(runtime) => runtime.metrics().num_alive_tasks(),
        _ => 0,
    }
}

/// Stops the runtime for good: called once, at interpreter exit. Waits at most `timeout` seconds for its threads.
#[pyfunction]
pub(crate) fn stop_runtime(py: Python<'_>, timeout: f64) {
    if !runtime_started() {
        return;
    }
    py.detach(|| {
        let slot = std::mem::replace(&mut *RUNTIME.lock(), Slot::Stopped);
        if let Slot::Running(runtime) = slot {
            runtime.shutdown_timeout(Duration::try_from_secs_f64(timeout).unwrap_or_default());
        }
    });
}
