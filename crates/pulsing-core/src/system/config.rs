//! What a node is started with.

use std::path::PathBuf;
use std::time::Duration;

use crate::cluster::Preset;
use crate::net::pki::PkiFiles;
use crate::net::tls::Passphrase;
use crate::net::transport::Transport;
use crate::net::wire::Versions;

/// Who may send cluster and actor traffic (design section 6).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Security {
    /// Plaintext, only from this host, and only from processes that prove the per-user secret.
    #[default]
    Local,
    /// Mutual TLS between all who know the passphrase.
    Passphrase(Passphrase),
    /// Mutual TLS between nodes with certificates of one authority, each of which names its node's address or the cluster.
    /// The files may change under the running node.
    Pki(PkiFiles),
    /// Plaintext from anywhere, without proof. Must be asked for on both sides.
    Insecure,
}

/// Settings of one node.
#[derive(Clone, Debug)]
pub struct SystemConfig {
    /// `host:port` to listen on; `None` takes an ephemeral port on the interface that reaches the first seed (M6).
    pub addr: Option<String>,
    /// `host:port` to tell others in place of what is bound, for a node behind NAT or in a container; port 0 = the bound one.
    pub advertise: Option<String>,
    /// Nodes to join, each `host:port`, `k8s://service.namespace:port` or `file:///path`; none = this is the first node.
    pub seeds: Vec<String>,
    /// Name of the cluster; nodes of another name are refused.
    pub cluster: String,
    /// Who may connect.
    pub security: Security,
    /// File of the per-user secret; `None` = the default place.
    pub secret_file: Option<PathBuf>,
    /// How long to wait for the seeds; `None` = for ever.
    pub join_timeout: Option<Duration>,
    /// Answer observers (`/health`, `/actors`, ...) on the node's port.
    pub observe: bool,
    /// `host:port` where observers are answered besides, in plain HTTP whatever the cluster's security; `None` = nowhere.
    pub observe_addr: Option<String>,
    /// Largest message sent to a peer or accepted from one, in bytes.
    pub max_message: u64,
    /// How patient failure detection is; `None` = local where peers prove the per-user secret, which they do on one host
    /// only, else lan.
    pub preset: Option<Preset>,
    /// How long a stream may bring no item to a consumer that could take one (R5); `None` = for ever.
    pub stream_idle: Option<Duration>,
    /// How long a connection may take to say what it is, and to prove it.
    pub handshake_timeout: Duration,
    /// How many connections may be doing so; beyond, the oldest one of the address that holds the most is closed.
    pub max_handshakes: usize,
    /// How many observers are served at once at each of the two places; others are told to come again.
    pub max_observers: usize,
    /// Which wire versions to speak. Narrower than what the build knows only in a test of versions that meet, or do not.
    pub versions: Versions,
    /// What carries its connections; everything but a test wants TCP.
    pub transport: Transport,
}

impl SystemConfig {
    pub(super) fn preset(&self) -> Preset {
        let usual = if self.security == Security::Local { Preset::Local } else { Preset::Lan };
        self.preset.unwrap_or(usual)
    }
}

impl Default for SystemConfig {
    fn default() -> Self {
        Self {
            addr: None,
            advertise: None,
            seeds: Vec::new(),
            cluster: "default".to_owned(),
            security: Security::Local,
            secret_file: None,
            join_timeout: Some(Duration::from_secs(10)),
            observe: true,
            observe_addr: None,
            max_message: 4 << 30,
            preset: None,
            stream_idle: Some(Duration::from_secs(300)),
            handshake_timeout: Duration::from_secs(5),
            max_handshakes: 512,
            max_observers: 256,
            versions: Versions::KNOWN,
            transport: Transport::Tcp,
        }
    }
}
