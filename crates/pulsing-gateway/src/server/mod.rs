//! The HTTP server.

mod body;
mod cors;
mod drain;
mod events;
mod head;
mod listen;
mod open;
mod paths;
mod peer;
mod receive;
mod record;
mod respond;
mod routes;
mod socket;
mod steady;
mod tls;
mod track;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use pulsing_core::System;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

use self::tls::Tls;
use crate::admit::{Door, Gate};
use crate::cluster::Cluster;
use crate::config::{GatewayConfig, GatewayError};
use crate::dial;
use crate::dispatch::{Blame, Placement};
use crate::explain::Decisions;
use crate::metrics::{Gauges, Metrics};
use crate::policy::{Policy, tend};
use crate::pool::{Limits, Pool};
use crate::telemetry::{AccessLog, Exporter};

/// What every request sees.
pub(crate) struct Core {
    placement: Arc<Placement>,
    door: Arc<Door>,
    gate: Arc<Gate>,
    tls: Option<Arc<Tls>>,
    access_log: Option<AccessLog>,
    exporter: Option<Exporter>,
    /// Generation requests in the house.
    in_flight: Arc<AtomicUsize>,
    /// And those before its door, whose bodies are being received.
    receiving: AtomicUsize,
    /// Bytes of the bodies of both.
    held: AtomicUsize,
    /// Unix time in seconds.
    started: u64,
    closing: watch::Sender<bool>,
    /// The grace period is over: what still runs ends with an error.
    cutting: watch::Sender<bool>,
}

impl Core {
    fn gauges(&self) -> Gauges {
        Gauges {
            in_flight: self.in_flight.load(Acquire),
            receiving: self.receiving.load(Acquire),
            queued: self.gate.waiting(),
            lost_lines: self.access_log.as_ref().map_or(0, AccessLog::dropped),
            lost_spans: self.exporter.as_ref().map_or(0, Exporter::dropped),
        }
    }
    /// Returns when the grace period is over.
    fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut cutting = self.cutting.subscribe();
        async move {
            // The sender goes with the gateway, and then nobody waits here.
            let _ = cutting.wait_for(|cutting| *cutting).await;
        }
    }
}

/// A running gateway. Dropping it stops it at once; [`shutdown`](Self::shutdown) lets requests finish.
pub struct Gateway {
    core: Arc<Core>,
    addr: SocketAddr,
    server: Mutex<Option<JoinHandle<()>>>,
    grace: watch::Sender<Duration>,
    /// What goes on beside requests.
    chores: Vec<AbortHandle>,
}

impl Gateway {
    /// Listens and serves. Call it inside a tokio runtime, which must outlive the gateway. Resolving a host name may block
    /// for as long as the system's resolver does.
    ///
    /// # Errors
    /// [`GatewayError::Bind`] names the address; [`GatewayError::Config`] the setting.
    pub fn start(system: System, config: GatewayConfig) -> Result<Self, GatewayError> {
        Self::start_on(Arc::new(system), config)
    }

    /// [`start`](Self::start) on anything that can stand for a cluster.
    ///
    /// # Errors
    /// As for `start`.
    pub fn start_on(cluster: Arc<dyn Cluster>, config: GatewayConfig) -> Result<Self, GatewayError> {
        let served = config.served()?;
        for (name, zero) in [
            ("max_body", config.max_body == 0),
            ("max_requests", config.max_requests == 0),
            ("max_receiving", config.max_receiving == 0),
            ("max_bodies", config.max_bodies == 0),
            ("max_headers", config.max_headers == 0),
            ("max_header_bytes", config.max_header_bytes == 0),
            ("max_attempts", config.max_attempts == 0),
            ("request_timeout", config.request_timeout.is_zero()),
            ("ping_interval", config.ping_interval.is_zero()),
        ] {
            if zero {
                return Err(GatewayError::Config(format!("{name} must be more than 0")));
            }
        }
        if config.balance_relative.is_nan() || config.balance_relative < 1.0 {
            return Err(GatewayError::Config("balance_relative must be 1 or more".to_owned()));
        }
        let door = Arc::new(Door::new(&config)?);
        let tls = Tls::new(&config)?;
        let trust = config.engine_ca_file.as_deref().map(dial::trust_in).transpose();
        let trust = trust.map_err(GatewayError::Config)?;
        let open = |place| AccessLog::open(place, config.access_log_content > 0);
        let access_log = config.access_log.as_deref().map(open).transpose()?;
        let exporter = match &config.otlp_endpoint {
            Some(endpoint) => {
                let headers = (config.otlp_headers_file.as_deref(), config.otlp_headers.as_deref());
                let (exporter, sending) = Exporter::new(endpoint, headers, config.otlp_sample, "pulsing-router")?;
                // It ends by itself, when what the last requests left has been sent.
                tokio::spawn(sending);
                Some(exporter)
            }
            None => None,
        };
        let (listener, addr) = listen::bind(&config.host, config.port)?;
        let limits = Limits { silence: config.worker_silence, standstill: config.worker_standstill };
        let policy: Arc<dyn Policy> = config.policy.build(config.policy_options()).into();
        let pool = Pool::start(Arc::clone(&cluster), served, limits, Some(Arc::clone(&policy)))
            .map_err(|error| GatewayError::Config(format!("worker_name: {error}")))?;
        if let Some(trust) = trust {
            pool.trust(trust);
        }
        if policy.wants_prefix() {
            tend(&pool, Arc::clone(&policy));
        }
        let placement = Arc::new(Placement {
            cluster,
            pool,
            policy,
            config,
            metrics: Metrics::default(),
            decisions: Decisions::default(),
            blame: Blame::default(),
        });
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let gate = Arc::new(Gate::new(
            Arc::clone(&placement.pool),
            placement.config.max_queue,
            placement.config.queue_timeout,
        ));
        let mut chores = vec![
            tokio::spawn(Arc::clone(&door).follow()).abort_handle(),
            tokio::spawn(Arc::clone(&gate).watch()).abort_handle(),
        ];
        if let Some(tls) = &tls {
            chores.push(tokio::spawn(Arc::clone(tls).follow()).abort_handle());
        }
        let core = Arc::new(Core {
            placement,
            door,
            gate,
            tls,
            access_log,
            exporter,
            in_flight: Arc::default(),
            receiving: AtomicUsize::default(),
            held: AtomicUsize::default(),
            started,
            closing: watch::Sender::new(false),
            cutting: watch::Sender::new(false),
        });
        let grace = watch::Sender::new(Duration::ZERO);
        let server = tokio::spawn(listen::serve(listener, Arc::clone(&core), grace.subscribe()));
        tracing::info!(%addr, model = %core.placement.config.model_name, worker_name = %core.placement.config.worker_name, "router listens");
        Ok(Self { core, addr, server: Mutex::new(Some(server)), grace, chores })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stops accepting, lets requests under way finish for up to `grace`, then cuts what is left. Idempotent.
    pub async fn shutdown(&self, grace: Duration) {
        let server = self.server.lock().take();
        self.grace.send_replace(grace);
        self.core.closing.send_replace(true);
        if let Some(server) = server {
            let _ = server.await;
        }
        self.core.placement.pool.stop();
        let core = Arc::clone(&self.core);
        // The last lines are on their way to a disk.
        let _ = tokio::task::spawn_blocking(move || core.access_log.as_ref().map(AccessLog::close)).await;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        if let Some(server) = self.server.lock().take() {
            server.abort();
        }
        for chore in &self.chores {
            chore.abort();
        }
        self.core.placement.pool.stop();
    }
}
