//! `_core.System`: a node, as `pulsing.core` drives it.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pulsing_core as core;
use pulsing_core::{
    ActorId, ActorSpec, CallOptions, Error, NodeId, Passphrase, PkiFiles, Security, SystemConfig, Target, Transport,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::bridge::Bridge;
use crate::calls::{CallHandle, PendingTell, QueueSink};
use crate::inbound::QueueEndpoint;
use crate::payload::{self, Owner};
use crate::queue::{Build, Event, Queue};
use crate::testing::TestHost;
use crate::watching::{self, ChangesHandle, NameWatchHandle, WatchHandle};
use crate::{convert, errors, pickled, runtime};

/// A running node.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct System {
    core: core::System,
    runtime: Handle,
}

impl System {
    fn dispatch(&self, bridge: &Bridge, target: Target, payload: core::Payload, options: CallOptions) -> CallHandle {
        let queue = bridge.queue();
        let token = queue.token();
        let _guard = self.runtime.enter();
        let inner = self.core.dispatch(target, payload, options, Arc::new(QueueSink { queue, token }));
        CallHandle { token, inner, runtime: self.runtime.clone() }
    }
    /// The node itself, for other parts of this extension.
    #[allow(dead_code)]
    pub(crate) fn core(&self) -> core::System {
        self.core.clone()
    }
    /// Where the node's tasks run.
    #[allow(dead_code)]
    pub(crate) fn runtime(&self) -> Handle {
        self.runtime.clone()
    }
}

/// Runs `work` and reports its end to `token`. A panic in it is reported too: whoever waits always learns something.
pub(crate) fn report<F>(runtime: &Handle, queue: Arc<Queue>, token: u64, work: F) -> AbortHandle
where
    F: Future<Output = Result<Build, Error>> + Send + 'static,
{
    let task = runtime.spawn(work);
    let handle = task.abort_handle();
    runtime.spawn(async move {
        let outcome = match task.await {
            Ok(outcome) => outcome,
            Err(error) => Err(Error::Protocol(format!("the runtime failed: {error}"))),
        };
        queue.push(Event::Done(token, outcome));
    });
    handle
}

/// A node that is starting.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Starting(AbortHandle);

#[pymethods]
impl Starting {
    fn cancel(&self) -> PyResult<()> {
        runtime::check_fork()?;
        self.0.abort();
        Ok(())
    }
}

pub(crate) fn none() -> Build {
    Box::new(|py| Ok(py.None()))
}

fn id16(what: &str, bytes: &[u8]) -> PyResult<[u8; 16]> {
    bytes.try_into().map_err(|_| PyValueError::new_err(format!("{what} needs 16 bytes, got {}", bytes.len())))
}

fn node_id(bytes: &[u8]) -> PyResult<NodeId> {
    Ok(NodeId(u128::from_be_bytes(id16("a node id", bytes)?)))
}

fn actor_id(bytes: &[u8]) -> PyResult<ActorId> {
    Ok(ActorId(u128::from_be_bytes(id16("an actor id", bytes)?)))
}

/// A time that Python gave; one beyond what a `Duration` can hold is as good as for ever.
fn seconds(what: &str, value: Option<f64>) -> PyResult<Option<Duration>> {
    value
        .map(|value| {
            if value > 0.0 && value.is_finite() && value >= Duration::MAX.as_secs_f64() {
                return Ok(Duration::MAX);
            }
            Duration::try_from_secs_f64(value)
                .map_err(|error| PyValueError::new_err(format!("{what}={value}: {error} (seconds expected)")))
        })
        .transpose()
}

/// The three files of a node's certificate, or none.
///
/// # Errors
/// `ValueError` for some of them without the others.
pub(crate) fn pki_files(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    ca: Option<PathBuf>,
) -> PyResult<Option<PkiFiles>> {
    match (cert, key, ca) {
        (Some(cert), Some(key), Some(ca)) => Ok(Some(PkiFiles { cert, key, ca })),
        (None, None, None) => Ok(None),
        _ => Err(PyValueError::new_err("cert, key and ca belong together: give all three, or none")),
    }
}

#[pymethods]
impl System {
    #[staticmethod]
    #[pyo3(signature = (bridge, token, *, addr, advertise, seeds, cluster, passphrase, cert, key, ca, insecure, secret_file, join_timeout, observe, observe_addr, handshake_timeout, max_handshakes, max_observers, max_message, stream_idle, threads, preset = None, host = None))]
    fn start(
        py: Python<'_>,
        bridge: &Bridge,
        token: u64,
        addr: Option<String>,
        advertise: Option<String>,
        seeds: Vec<String>,
        cluster: String,
        passphrase: Option<String>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        ca: Option<PathBuf>,
        insecure: bool,
        secret_file: Option<PathBuf>,
        join_timeout: Option<f64>,
        observe: bool,
        observe_addr: Option<String>,
        handshake_timeout: f64,
        max_handshakes: usize,
        max_observers: usize,
        max_message: Option<u64>,
        stream_idle: Option<f64>,
        threads: usize,
        preset: Option<&str>,
        host: Option<PyRef<'_, TestHost>>,
    ) -> PyResult<Starting> {
        let (runtime, transport) = match &host {
            Some(test) => (test.runtime.clone(), Transport::Memory(test.host.clone())),
            None => (runtime::handle(threads)?, Transport::Tcp),
        };
        let security = match (passphrase, pki_files(cert, key, ca)?, insecure) {
            (Some(text), None, _) => {
                Security::Passphrase(Passphrase::new(&text).map_err(|error| errors::raise(py, &error))?)
            }
            (None, Some(files), _) => Security::Pki(files),
            (Some(_), Some(_), _) => return Err(PyValueError::new_err("passphrase and cert exclude each other")),
            (None, None, true) => Security::Insecure,
            (None, None, false) => Security::Local,
        };
        let mut config = SystemConfig {
            addr,
            advertise,
            seeds,
            cluster,
            security,
            secret_file,
            join_timeout: seconds("join_timeout", join_timeout)?,
            observe,
            observe_addr,
            max_handshakes,
            max_observers,
            transport,
            stream_idle: seconds("stream_idle", stream_idle)?,
            ..SystemConfig::default()
        };
        if let Some(limit) = seconds("handshake_timeout", Some(handshake_timeout))? {
            config.handshake_timeout = limit;
        }
        config.preset = match preset {
            None => None,
            Some(name) => Some(
                core::cluster::Preset::named(name)
                    .ok_or_else(|| PyValueError::new_err(format!("preset={name}: expected local, lan or wan")))?,
            ),
        };
        if let Some(limit) = max_message {
            config.max_message = limit;
        }
        let handle = runtime.clone();
        let start = report(&runtime, bridge.queue(), token, async move {
            let core = core::System::start(config).await?;
            let build: Build = Box::new(move |py| Ok(Py::new(py, Self { core, runtime: handle })?.into_any()));
            Ok(build)
        });
        Ok(Starting(start))
    }
    #[getter]
    fn node_id<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.core.node_id().to_bytes())
    }
    #[getter]
    fn addr(&self) -> String {
        self.core.addr().to_string()
    }
    #[getter]
    fn bound(&self) -> String {
        self.core.bound().to_string()
    }
    #[getter]
    fn observed_at(&self) -> Option<String> {
        self.core.observed_at().map(|at| at.to_string())
    }
    #[pyo3(signature = (bridge, key, actor, *, name, public, class_name, metadata, internal, unique))]
    fn register(
        &self,
        py: Python<'_>,
        bridge: &Bridge,
        key: u64,
        actor: &[u8],
        name: Option<String>,
        public: bool,
        class_name: String,
        metadata: BTreeMap<String, String>,
        internal: bool,
        unique: bool,
    ) -> PyResult<()> {
        runtime::check_fork()?;
        let _guard = self.runtime.enter();
        let spec = ActorSpec { name, public, class: class_name, metadata, internal, unique };
        let endpoint = Arc::new(QueueEndpoint { queue: bridge.queue(), key });
        self.core.register(actor_id(actor)?, spec, endpoint).map_err(|error| errors::raise(py, &error))
    }
    fn check_vacant(&self, py: Python<'_>, name: &str, unique: bool) -> PyResult<()> {
        runtime::check_fork()?;
        self.core.check_vacant(name, unique).map_err(|error| errors::raise(py, &error))
    }
    fn withdraw(&self, actor: &[u8]) -> PyResult<()> {
        runtime::check_fork()?;
        let _guard = self.runtime.enter();
        self.core.withdraw(actor_id(actor)?);
        Ok(())
    }
    #[pyo3(signature = (actor, reason = "stopped", error = String::new()))]
    fn unregister(&self, actor: &[u8], reason: &str, error: String) -> PyResult<bool> {
        runtime::check_fork()?;
        let _guard = self.runtime.enter();
        Ok(self.core.unregister(actor_id(actor)?, watching::reason(reason, error)?))
    }
    /// Supervision starts an actor again whose last instance ended by `reason`. One in a process of its own is not known here: its
    /// name and class say which.
    #[pyo3(signature = (actor, reason, *, name = None, class_name = "", public = false))]
    fn restarted(
        &self,
        actor: &[u8],
        reason: &str,
        name: Option<String>,
        class_name: &str,
        public: bool,
    ) -> PyResult<()> {
        runtime::check_fork()?;
        let (actor, reason) = (actor_id(actor)?, watching::reason(reason, String::new())?);
        if name.is_none() && class_name.is_empty() {
            self.core.restarted(actor, &reason);
        } else {
            let spec = ActorSpec { name, class: class_name.to_owned(), public, ..ActorSpec::default() };
            self.core.restarted_as(actor, &spec, &reason);
        }
        Ok(())
    }
    /// Completes with `(reason, error)` when the actor has ended.
    fn watch_actor(&self, bridge: &Bridge, token: u64, node: &[u8], actor: &[u8]) -> PyResult<WatchHandle> {
        runtime::check_fork()?;
        let target = Target { node: node_id(node)?, actor: actor_id(actor)? };
        let _guard = self.runtime.enter();
        let guard = self.core.on_end(target, watching::hook(bridge.queue(), token));
        Ok(WatchHandle::new(guard, self.runtime.clone()))
    }
    /// Ends an actor and completes with `(reason, error)` when it has ended.
    #[pyo3(signature = (bridge, token, node, actor, how, grace = None, error = String::new()))]
    fn end(
        &self,
        bridge: &Bridge,
        token: u64,
        node: &[u8],
        actor: &[u8],
        how: &str,
        grace: Option<f64>,
        error: String,
    ) -> PyResult<()> {
        runtime::check_fork()?;
        let target = Target { node: node_id(node)?, actor: actor_id(actor)? };
        let ending = watching::ending(how, seconds("grace", grace)?, error)?;
        let core = self.core.clone();
        report(&self.runtime, bridge.queue(), token, async move {
            core.end(target, ending).await.map(|ended| watching::told(&ended.reason))
        });
        Ok(())
    }
    /// Links two actors, each `(node, actor)`, or undoes that.
    fn link(
        &self,
        bridge: &Bridge,
        token: u64,
        one: (Vec<u8>, Vec<u8>),
        other: (Vec<u8>, Vec<u8>),
        linked: bool,
    ) -> PyResult<()> {
        runtime::check_fork()?;
        let target = |(node, actor): &(Vec<u8>, Vec<u8>)| -> PyResult<Target> {
            Ok(Target { node: node_id(node)?, actor: actor_id(actor)? })
        };
        let (one, other) = (target(&one)?, target(&other)?);
        let core = self.core.clone();
        report(&self.runtime, bridge.queue(), token, async move {
            if linked { core.link(one, other).await } else { core.unlink(one, other).await }?;
            Ok(none())
        });
        Ok(())
    }
    fn set_metadata(&self, py: Python<'_>, actor: &[u8], metadata: BTreeMap<String, String>) -> PyResult<bool> {
        runtime::check_fork()?;
        let _guard = self.runtime.enter();
        self.core.set_metadata(actor_id(actor)?, metadata).map_err(|error| errors::raise(py, &error))
    }
    fn instances<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyList>> {
        runtime::check_fork()?;
        let found = self.core.instances(name);
        let dicts = found.iter().map(|one| convert::instance(py, one)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, dicts)
    }
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        runtime::check_fork()?;
        let dict = PyDict::new(py);
        for (name, found) in self.core.names() {
            let dicts = found.iter().map(|one| convert::instance(py, one)).collect::<PyResult<Vec<_>>>()?;
            dict.set_item(name, dicts)?;
        }
        Ok(dict)
    }
    /// The instances of `name` as they come, change and go.
    fn watch_name(&self, py: Python<'_>, name: &str) -> PyResult<NameWatchHandle> {
        runtime::check_fork()?;
        let watch = self.core.watch_name(name).map_err(|error| errors::raise(py, &error))?;
        Ok(NameWatchHandle::new(watch, self.runtime.clone()))
    }
    /// The published instance that is this actor, or None.
    fn published<'py>(&self, py: Python<'py>, actor: &[u8]) -> PyResult<Option<Bound<'py, PyDict>>> {
        runtime::check_fork()?;
        self.core.published(actor_id(actor)?).map(|one| convert::instance(py, &one)).transpose()
    }
    fn name_of(&self, actor: &[u8]) -> PyResult<Option<String>> {
        runtime::check_fork()?;
        Ok(self.core.name_of(actor_id(actor)?))
    }
    fn members<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        runtime::check_fork()?;
        let list = PyList::empty(py);
        for member in self.core.members() {
            let dict = PyDict::new(py);
            dict.set_item("node_id", member.node.to_string())?;
            dict.set_item("addr", member.addr)?;
            dict.set_item("state", member.state.to_string())?;
            dict.set_item("me", member.me)?;
            list.append(dict)?;
        }
        Ok(list)
    }
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        runtime::check_fork()?;
        let dict = PyDict::new(py);
        let m = self.core.metrics();
        m.bytes_copied.add(payload::copied());
        for (name, counter) in [
            ("actors_created", &m.actors_created),
            ("actors_stopped", &m.actors_stopped),
            ("actors_restarted", &m.actors_restarted),
            ("messages", &m.messages),
            ("messages_sent", &m.messages_sent),
            ("claims_won", &m.claims_won),
            ("claims_lost", &m.claims_lost),
            ("dead_letters", &m.dead_letters),
            ("control_dropped", &m.control_dropped),
            ("streams", &m.streams),
            ("stream_items", &m.stream_items),
            ("bytes_in", &m.bytes_in),
            ("bytes_out", &m.bytes_out),
            ("bytes_copied", &m.bytes_copied),
            ("refused", &m.refused),
            ("suspicions", &m.suspicions),
            ("refutations", &m.refutations),
        ] {
            dict.set_item(name, counter.get())?;
        }
        dict.set_item("mailbox_messages", m.mailbox_messages.get())?;
        Ok(dict)
    }
    /// Adds what happened inside Python, where local calls stay, to the node's counters.
    #[pyo3(signature = (*, messages = 0, waiting = 0, streams = 0, stream_items = 0, dead_letters = 0, bytes_copied = 0))]
    fn count(
        &self,
        messages: u64,
        waiting: i64,
        streams: u64,
        stream_items: u64,
        dead_letters: u64,
        bytes_copied: u64,
    ) {
        let metrics = self.core.metrics();
        metrics.messages.add(messages);
        metrics.mailbox_messages.add(waiting);
        metrics.streams.add(streams);
        metrics.stream_items.add(stream_items);
        metrics.dead_letters.add(dead_letters);
        metrics.bytes_copied.add(bytes_copied + payload::copied());
    }
    /// Completes with an instance dict.
    #[pyo3(signature = (bridge, token, name, node = None, timeout = 0.0))]
    fn resolve(&self, bridge: &Bridge, token: u64, name: String, node: Option<&[u8]>, timeout: f64) -> PyResult<()> {
        runtime::check_fork()?;
        let node = node.map(node_id).transpose()?;
        let timeout = seconds("timeout", Some(timeout))?.unwrap_or_default();
        let core = self.core.clone();
        report(&self.runtime, bridge.queue(), token, async move {
            let found = core.resolve(&name, node, timeout).await?;
            let build: Build = Box::new(move |py| Ok(convert::instance(py, &found)?.into_any().unbind()));
            Ok(build)
        });
        Ok(())
    }
    #[pyo3(signature = (bridge, node, actor, codec, head, buffers, timeout, sender, chain, trace, no_wait, window, idempotent = false))]
    fn call(
        &self,
        bridge: &Bridge,
        node: &[u8],
        actor: &[u8],
        codec: u8,
        head: &Bound<'_, PyAny>,
        buffers: Vec<Bound<'_, PyAny>>,
        timeout: Option<f64>,
        sender: Option<&[u8]>,
        chain: Vec<Vec<u8>>,
        trace: Option<String>,
        no_wait: bool,
        window: u32,
        idempotent: bool,
    ) -> PyResult<CallHandle> {
        runtime::check_fork()?;
        let target = Target { node: node_id(node)?, actor: actor_id(actor)? };
        let payload = payload::from_python(codec, head, buffers, Owner::Waits)?;
        let options = CallOptions { idempotent, ..options(timeout, sender, chain, trace, no_wait, window)? };
        Ok(self.dispatch(bridge, target, payload, options))
    }
    /// A call from no actor whose arguments are plain values. Its first event completes `future`.
    #[pyo3(signature = (bridge, future, node, actor, operation, name, args, timeout, window))]
    fn ask(
        &self,
        bridge: &Bridge,
        future: Py<PyAny>,
        node: &[u8],
        actor: &[u8],
        operation: u8,
        name: &str,
        args: &Bound<'_, PyTuple>,
        timeout: Option<f64>,
        window: u32,
    ) -> PyResult<Option<u64>> {
        runtime::check_fork()?;
        let Some(pickled) = pickled::envelope(operation, name, args) else { return Ok(None) };
        let target = Target { node: node_id(node)?, actor: actor_id(actor)? };
        let payload = core::Payload::new(core::Codec::PICKLE, pickled);
        let options = CallOptions { timeout: seconds("timeout", timeout)?, window, ..CallOptions::default() };
        let handle = self.dispatch(bridge, target, payload, options);
        let token = handle.token;
        bridge.answer(future, handle);
        Ok(Some(token))
    }
    /// None: the message is on its way.
    #[pyo3(signature = (bridge, node, actor, codec, head, buffers, sender, trace, no_wait))]
    fn tell(
        &self,
        py: Python<'_>,
        bridge: &Bridge,
        node: &[u8],
        actor: &[u8],
        codec: u8,
        head: &Bound<'_, PyAny>,
        buffers: Vec<Bound<'_, PyAny>>,
        sender: Option<&[u8]>,
        trace: Option<String>,
        no_wait: bool,
    ) -> PyResult<Option<PendingTell>> {
        runtime::check_fork()?;
        let target = Target { node: node_id(node)?, actor: actor_id(actor)? };
        let payload = payload::from_python(codec, head, buffers, Owner::GoesOn)?;
        let options = options(None, sender, Vec::new(), trace, no_wait, 1)?;
        let _guard = self.runtime.enter();
        let pending = self.core.start_tell(target, payload, options).map_err(|error| errors::raise(py, &error))?;
        Ok(pending.map(|pending| PendingTell::new(pending, bridge.queue(), self.runtime.clone())))
    }
    /// A changed event with `token` whenever members or names may answer differently; at most one every 20 ms.
    fn watch(&self, bridge: &Bridge, token: u64) -> PyResult<ChangesHandle> {
        runtime::check_fork()?;
        let queue = bridge.queue();
        let mut changes = self.core.changes();
        let task = self.runtime.spawn(async move {
            while changes.changed().await.is_ok() && !queue.is_closed() {
                queue.push(Event::Changed(token));
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Ok(ChangesHandle::new(task.abort_handle()))
    }
    fn drain(&self) -> PyResult<()> {
        runtime::check_fork()?;
        self.core.drain();
        Ok(())
    }
    fn shutdown(&self, bridge: &Bridge, token: u64) -> PyResult<()> {
        runtime::check_fork()?;
        let core = self.core.clone();
        report(&self.runtime, bridge.queue(), token, async move {
            core.shutdown().await;
            Ok(none())
        });
        Ok(())
    }
}

/// Announces the departure of `systems` from wherever we are, waiting at most `timeout` seconds: for interpreter exit, when
/// no loop runs any more. They leave together, so that none takes another one's closed port for a death.
#[pyfunction]
pub(crate) fn leave_all(py: Python<'_>, systems: Vec<Py<System>>, timeout: f64) -> PyResult<()> {
    runtime::check_fork()?;
    let limit = seconds("timeout", Some(timeout))?.unwrap_or_default();
    let (done, wait) = std::sync::mpsc::channel();
    for system in &systems {
        let (core, done) = (system.get().core.clone(), done.clone());
        system.get().runtime.spawn(async move {
            core.shutdown().await;
            drop(done);
        });
    }
    drop(done);
    py.detach(move || {
        // Nothing is ever sent: it ends when the last of them has left.
        let _: Result<(), _> = wait.recv_timeout(limit);
    });
    Ok(())
}

fn options(
    timeout: Option<f64>,
    sender: Option<&[u8]>,
    chain: Vec<Vec<u8>>,
    trace: Option<String>,
    no_wait: bool,
    window: u32,
) -> PyResult<CallOptions> {
    Ok(CallOptions {
        timeout: seconds("timeout", timeout)?,
        sender: sender.map(actor_id).transpose()?,
        chain: chain.iter().map(|id| actor_id(id)).collect::<PyResult<_>>()?,
        trace,
        no_wait,
        window,
        ..CallOptions::default()
    })
}
