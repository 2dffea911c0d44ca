//! Reads other nodes' observer endpoints, for `pulsing inspect`: no node is started, nothing is joined.

use std::path::PathBuf;
use std::time::Duration;

use pulsing_core::net::tls::{ClusterTls, Passphrase};
use pulsing_core::{Seed, observe};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::system::pki_files;

/// How often a waiting call looks for Ctrl-C.
const SIGNAL_TICK: Duration = Duration::from_millis(100);

/// GETs `path` from every address at once, each within `timeout` seconds, and waits for all of them. With a
/// `passphrase`, or `cert`, `key` and `ca` (paths of PEM files), over the TLS of the cluster named `cluster`.
///
/// One tuple an address, in their order: `(status, body, None)`, or `(0, "", why)` when no answer came.
///
/// # Errors
/// `ValueError` for a timeout that is no positive number of seconds, an empty passphrase, or files that do not serve;
/// `KeyboardInterrupt` as usual.
#[pyfunction]
#[pyo3(signature = (addrs, path, timeout = 10.0, passphrase = None, cluster = "default", cert = None, key = None, ca = None))]
pub(crate) fn observe_get(
    py: Python<'_>,
    addrs: Vec<String>,
    path: &str,
    timeout: f64,
    passphrase: Option<&str>,
    cluster: &str,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    ca: Option<PathBuf>,
) -> PyResult<Vec<(u16, String, Option<String>)>> {
    let limit = Duration::try_from_secs_f64(timeout)
        .ok()
        .filter(|limit| !limit.is_zero())
        .ok_or_else(|| PyValueError::new_err(format!("timeout={timeout}: expected a positive number of seconds")))?;
    let tls = match (passphrase, pki_files(cert, key, ca)?) {
        (Some(_), Some(_)) => return Err(PyValueError::new_err("passphrase and cert exclude each other")),
        (Some(text), None) => Some(Passphrase::new(text).and_then(|secret| ClusterTls::new(&secret, cluster))),
        (None, Some(files)) => Some(ClusterTls::from_files(&files, cluster, None)),
        (None, None) => None,
    };
    let tls = tls.transpose().map_err(|error| PyValueError::new_err(error.to_string()))?;
    // A runtime of its own, on this thread: a command that only looks should not start the node's threads.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| PyRuntimeError::new_err(format!("cannot start a runtime: {error}")))?;
    let answers = py.detach(|| {
        runtime.block_on(async {
            let mut asked = std::pin::pin!(observe::get_many(&addrs, path, limit, tls.as_ref()));
            loop {
                tokio::select! {
                    answers = &mut asked => return Ok(answers),
                    () = tokio::time::sleep(SIGNAL_TICK) => Python::attach(|py| py.check_signals())?,
                }
            }
        })
    });
    let flat = |answer: Result<observe::Response, observe::ObserveError>| match answer {
        Ok(response) => match response.text() {
            Ok(text) => (response.status, text.to_owned(), None),
            Err(error) => (0, String::new(), Some(error.to_string())),
        },
        Err(error) => (0, String::new(), Some(error.to_string())),
    };
    // A resolver thread may still wait for a dead DNS server; the answer is here.
    runtime.shutdown_background();
    answers.map(|answers| answers.into_iter().map(flat).collect())
}

/// The `host:port`s that a seed stands for; a file is read if `read`, else it stands for nothing.
///
/// # Errors
/// `ValueError` for what can be no seed, or a file that cannot be read or names no node.
#[pyfunction]
#[pyo3(signature = (seed, *, read = true))]
pub(crate) fn seed_places(py: Python<'_>, seed: &str, read: bool) -> PyResult<Vec<String>> {
    let places = py.detach(|| {
        let seed = Seed::parse(seed)?;
        if read || !seed.is_file() { seed.places() } else { Ok(Vec::new()) }
    });
    places.map_err(|error| PyValueError::new_err(error.to_string()))
}
