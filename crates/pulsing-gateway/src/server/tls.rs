//! TLS towards clients, from files that are read again when they change.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::{GatewayConfig, GatewayError};
use crate::files::{self, Watched};

/// Certificate and key, as new connections use them.
pub(super) struct Tls {
    cert: PathBuf,
    key: PathBuf,
    watched: Watched,
    config: ArcSwap<ServerConfig>,
}

impl Tls {
    /// `None` where clients come without TLS.
    ///
    /// # Errors
    /// `Config` naming the file and what is wrong with it.
    pub(super) fn new(config: &GatewayConfig) -> Result<Option<Arc<Self>>, GatewayError> {
        let (cert, key) = match (&config.tls_cert, &config.tls_key) {
            (None, None) => return Ok(None),
            (Some(cert), Some(key)) => (cert.clone(), key.clone()),
            (Some(_), None) => return Err(GatewayError::Config("tls_cert needs tls_key beside it".into())),
            (None, Some(_)) => return Err(GatewayError::Config("tls_key needs tls_cert beside it".into())),
        };
        let watched = Watched::new(vec![cert.clone(), key.clone()]);
        let config = read(&cert, &key).map_err(GatewayError::Config)?;
        Ok(Some(Arc::new(Self { cert, key, watched, config: ArcSwap::from_pointee(config) })))
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.load_full())
    }

    /// Reads the files again whenever one changes. What does not fit together is logged, and what was stays.
    pub(super) async fn follow(self: Arc<Self>) {
        let watched = self.watched.clone();
        let reread = move || match read(&self.cert, &self.key) {
            Ok(config) => {
                tracing::info!(cert = %self.cert.display(), "the certificate was read again");
                self.config.store(Arc::new(config));
            }
            Err(error) => tracing::error!(%error, "the certificate stays as it was"),
        };
        watched.follow(reread).await;
    }
}

fn read(cert: &Path, key: &Path) -> Result<ServerConfig, String> {
    let bad = |what: &str, path: &Path, why: &dyn std::fmt::Display| format!("{what} {}: {why}", path.display());
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&files::read("tls_cert", cert)?)
        .collect::<Result<_, _>>()
        .map_err(|error| bad("tls_cert", cert, &error))?;
    if chain.is_empty() {
        return Err(bad("tls_cert", cert, &"there is no certificate in it"));
    }
    let text = files::read_secret("tls_key", key)?;
    let secret = PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(|error| bad("tls_key", key, &error))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret))
        .map_err(|error| format!("tls_cert {} and tls_key {}: {error}", cert.display(), key.display()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
