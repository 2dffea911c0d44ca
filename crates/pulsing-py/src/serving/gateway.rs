//! The Router's HTTP server, owned by a Python object.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pulsing_core::{ActorId, Error, NodeId, Target};
use pulsing_gateway::policy::chain::Chain;
use pulsing_gateway::policy::{Hints, Policy};
use pulsing_gateway::pool::{Limits, Pool, Worker};
use pulsing_gateway::{ActorPicker, ExternalPicker, GatewayConfig, GatewayError, PolicyKind, PolicyOptions, Served};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::bridge::Bridge;
use crate::queue::Build;
use crate::runtime::check_fork;
use crate::system::{System, report};

/// A running gateway. Dropped, it stops at once.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Gateway {
    inner: Arc<pulsing_gateway::Gateway>,
    runtime: Handle,
}

#[pymethods]
impl Gateway {
    /// `host:port` it listens on.
    #[getter]
    fn addr(&self) -> String {
        self.inner.addr().to_string()
    }
    #[getter]
    fn port(&self) -> u16 {
        self.inner.addr().port()
    }
    /// Stops accepting and lets requests finish for up to `grace` seconds; reports to `token`.
    fn shutdown(&self, bridge: &Bridge, token: u64, grace: f64) -> PyResult<()> {
        check_fork()?;
        let grace = seconds("grace", grace)?;
        let inner = Arc::clone(&self.inner);
        report(&self.runtime, bridge.queue(), token, async move {
            inner.shutdown(grace).await;
            let build: Build = Box::new(|py| Ok(py.None()));
            Ok(build)
        });
        Ok(())
    }
    fn __repr__(&self) -> String {
        format!("<Gateway {}>", self.inner.addr())
    }
}

fn seconds(what: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{what}={value}: {error} (seconds expected)")))
}

fn policy(name: &str) -> PyResult<PolicyKind> {
    name.parse().map_err(|error: GatewayError| PyValueError::new_err(text(&error)))
}

fn text(error: &GatewayError) -> String {
    match error {
        GatewayError::Config(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Raises `ValueError` unless `name` is a scheduler type; names the valid ones.
#[pyfunction]
pub(crate) fn check_scheduler_type(name: &str) -> PyResult<()> {
    policy(name).map(|_| ())
}

/// Starts a gateway on `system` and reports it, or why it cannot listen, to `token`. `settings` is a JSON object: what
/// `GatewayConfig` reads.
#[pyfunction]
#[pyo3(signature = (system, bridge, token, *, settings, scheduler = None))]
pub(crate) fn start_gateway(
    system: &System,
    bridge: &Bridge,
    token: u64,
    settings: &str,
    scheduler: Option<(Vec<u8>, Vec<u8>)>,
) -> PyResult<()> {
    check_fork()?;
    let core = system.core();
    let runtime = system.runtime();
    let mut config = GatewayConfig::from_json(settings).map_err(|error| PyValueError::new_err(text(&error)))?;
    if let Some((node, actor)) = scheduler {
        let bad = |error: Error| PyValueError::new_err(format!("scheduler: {error}"));
        let target =
            Target { node: NodeId::from_bytes(&node).map_err(bad)?, actor: ActorId::from_bytes(&actor).map_err(bad)? };
        // Later than the gateway's own limit, which is the one that is counted.
        let picker = ActorPicker::new(Arc::new(core.clone()), target, config.picker_limit * 2);
        config.picker = Some(Arc::new(picker) as Arc<dyn ExternalPicker>);
    }
    let handle = runtime.clone();
    report(&runtime, bridge.queue(), token, async move {
        let inner = pulsing_gateway::Gateway::start(core, config).map_err(|error| match error {
            GatewayError::Bind { addr, reason } => Error::Bind { addr, reason },
            other => Error::Config(text(&other)),
        })?;
        let build: Build =
            Box::new(move |py| Ok(Py::new(py, Gateway { inner: Arc::new(inner), runtime: handle })?.into_any()));
        Ok(build)
    });
    Ok(())
}

/// Chooses Workers the way a Router does, for schedulers in Python: the same pool, the same pushed load, the same policies.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct WorkerPicker {
    pool: Arc<Pool>,
    kind: PolicyKind,
    policy: Mutex<Arc<dyn Policy>>,
}

#[pymethods]
impl WorkerPicker {
    /// Watches `worker_name` on `system` until `close`.
    #[new]
    fn new(system: &System, worker_name: &str, scheduler_type: &str) -> PyResult<Self> {
        check_fork()?;
        let kind = policy(scheduler_type)?;
        let runtime = system.runtime();
        let _guard = runtime.enter();
        // No client ever names a model here, so the public name is none that one could ask for.
        let pool = Pool::start(Arc::new(system.core()), vec![Served::new("", worker_name)], Limits::default(), None)
            .map_err(|error| PyValueError::new_err(format!("worker_name: {error}")))?;
        Ok(Self { pool, kind, policy: Mutex::new(kind.build(PolicyOptions::default()).into()) })
    }
    /// `(node id, actor id)` of a ready worker, or None. `key` ties requests of one conversation together, `text` is the
    /// prompt.
    #[pyo3(signature = (key = None, text = None))]
    fn pick(&self, key: Option<&str>, text: Option<&str>) -> Option<(String, String)> {
        let ready = self.pool.snapshot().ready_for("").unwrap_or_default();
        if ready.is_empty() {
            return None;
        }
        let policy = Arc::clone(&self.policy.lock());
        let mut chain = Chain::default();
        if policy.wants_prefix() {
            chain.push(text.unwrap_or_default().as_bytes());
        }
        let prefix = chain.finish();
        let hints = Hints { affinity: key, prefix: &prefix };
        let worker = ready.get(policy.pick(&ready, hints).index)?;
        policy.sent(worker, hints);
        let target = worker.target();
        Some((target.node.to_string(), target.actor.to_string()))
    }
    /// Every worker as `(node id, actor id, state, load, capacity)`.
    fn workers(&self) -> Vec<(String, String, &'static str, u32, u32)> {
        let row = |worker: &Arc<Worker>| {
            let target = worker.target();
            let state = worker.state().name();
            (target.node.to_string(), target.actor.to_string(), state, worker.load(), worker.capacity())
        };
        self.pool.snapshot().all().iter().map(row).collect()
    }
    /// Forgets whose turn it is.
    fn reset(&self) {
        *self.policy.lock() = self.kind.build(PolicyOptions::default()).into();
    }
    /// Stops watching.
    fn close(&self) {
        self.pool.stop();
    }
}
