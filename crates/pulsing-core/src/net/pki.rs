//! Certificates from files: what is read, what it must say, whom it names, and that it may change under a running node.

use std::fs;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, Error as TlsError, InconsistentKeys, RootCertStore,
    SignatureScheme,
};

use super::tls::ClusterTls;
use crate::error::{Error, Result};

/// Below this name a certificate says which cluster it belongs to.
const DOMAIN: &str = "pulsing.internal";
/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A certificate that has less left than this is logged about.
const SOON: Duration = Duration::from_secs(3 * 24 * 3600);
/// What is longer, in bytes, is no certificate.
const LONGEST: u64 = 1 << 20;

/// Where a node's identity stands, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PkiFiles {
    /// The node's certificate, then those between it and the authority.
    pub cert: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// Certificates of the authorities whose nodes are members; several while one replaces another.
    pub ca: PathBuf,
}

/// Device, inode, seconds and nanoseconds of the last change, and length of a file.
type Stamp = (u64, u64, i64, i64, u64);

/// What the files hold.
pub(super) struct Material {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    pub(super) roots: Arc<RootCertStore>,
}

impl PkiFiles {
    /// Reads all three.
    ///
    /// # Errors
    /// `Config` naming the file and what is wrong with it.
    pub(super) fn read(&self) -> Result<Material> {
        let bad = |path: &Path, reason: &str| Error::Config(format!("{}: {reason}", path.display()));
        let chain = certificates(&self.cert, "cert")?;
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.ca, "ca")? {
            roots.add(authority).map_err(|e| bad(&self.ca, &format!("not the certificate of an authority: {e}")))?;
        }
        let pem = pem(&self.key, "key")?;
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|_| {
            let encrypted = pem.windows(9).any(|part| part == b"ENCRYPTED");
            bad(&self.key, if encrypted { ENCRYPTED } else { "holds no private key in PEM (BEGIN PRIVATE KEY)" })
        })?;
        Ok(Material { chain, key, roots: Arc::new(roots) })
    }

    /// What changes when somebody writes them; `None` while one cannot be read.
    fn stamp(&self) -> Option<[Stamp; 3]> {
        let of = |path: &Path| {
            let found = fs::metadata(path).ok()?;
            Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec(), found.len()))
        };
        Some([of(&self.cert)?, of(&self.key)?, of(&self.ca)?])
    }
}

const ENCRYPTED: &str = "the key is encrypted, and there is nobody to ask for its password: write it out with openssl pkey \
                         -in FILE -out FILE.plain";

fn pem(path: &Path, setting: &str) -> Result<Vec<u8>> {
    let failed = |reason: String| Error::Config(format!("cannot read --{setting} {}: {reason}", path.display()));
    let found = fs::metadata(path)
        .map_err(|e| failed(if e.kind() == ErrorKind::NotFound { "no such file".to_owned() } else { e.to_string() }))?;
    if !found.is_file() || found.len() > LONGEST {
        return Err(failed(format!("not a file of at most {LONGEST} bytes")));
    }
    if setting == "key" && found.permissions().mode() & 0o004 != 0 {
        tracing::warn!("every user of this host may read the key {}: run chmod 600 on it", path.display());
    }
    fs::read(path).map_err(|e| failed(e.to_string()))
}

fn certificates(path: &Path, setting: &str) -> Result<Vec<CertificateDer<'static>>> {
    let bad = |reason: &str| Error::Config(format!("--{setting} {}: {reason}", path.display()));
    let found = CertificateDer::pem_slice_iter(&pem(path, setting)?)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|e| bad(&format!("not PEM: {e}")))?;
    if found.is_empty() {
        return Err(bad("holds no certificate in PEM (BEGIN CERTIFICATE)"));
    }
    Ok(found)
}

impl Material {
    /// Whether it is what the peers of this node, at address `me`, will accept.
    ///
    /// # Errors
    /// `Config` in words.
    pub(super) fn check(&self, files: &PkiFiles, names: &Names, me: Option<IpAddr>) -> Result<()> {
        let bad = |reason: String| Error::Config(format!("--cert {}: the certificate {reason}", files.cert.display()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let key = provider
            .key_provider
            .load_private_key(self.key.clone_key())
            .map_err(|e| Error::Config(format!("--key {}: a key that cannot be used: {e}", files.key.display())))?;
        match CertifiedKey::new(self.chain.clone(), key).keys_match() {
            Ok(()) | Err(TlsError::InconsistentKeys(InconsistentKeys::Unknown)) => {}
            Err(TlsError::InconsistentKeys(_)) => {
                return Err(bad(format!("belongs to another key than --key {}", files.key.display())));
            }
            Err(other) => return Err(bad(tls_words(&other))),
        }
        let (leaf, between) = self.chain.split_first().ok_or_else(|| bad("is missing".into()))?;
        let now = UnixTime::now();
        let server = AnyNode::new(Arc::clone(&self.roots), &provider);
        let client = WebPkiClientVerifier::builder_with_provider(Arc::clone(&self.roots), Arc::clone(&provider))
            .build()
            .map_err(|e| Error::Config(format!("--ca {}: {e}", files.ca.display())))?;
        if me.is_some() {
            server.chain(leaf, between, now).map_err(|e| bad(tls_words(&e)))?;
        }
        client.verify_client_cert(leaf, between, now).map_err(|e| bad(tls_words(&e)))?;
        if let Some(ip) = me {
            names.check(leaf, ip).map_err(|_| bad(names.missing(leaf, ip, "this node's")))?;
        }
        let soon = UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs()) + SOON);
        if client.verify_client_cert(leaf, between, soon).is_err() {
            tracing::warn!(
                "the certificate {}, or one that it depends on, expires within {} days: renew it in its place",
                files.cert.display(),
                SOON.as_secs() / 86400
            );
        }
        Ok(())
    }
}

/// Whom certificates have to name: the node's address, or its cluster.
#[derive(Clone)]
pub(super) struct Names {
    /// `CLUSTER.pulsing.internal`; none for a cluster whose name cannot be part of a DNS name.
    cluster: Option<ServerName<'static>>,
}

impl Names {
    pub(super) fn new(cluster: &str) -> Self {
        Self { cluster: ServerName::try_from(format!("{cluster}.{DOMAIN}")).ok() }
    }

    /// Whether `certificate` is that of the node at `ip`, or of any node of the cluster.
    ///
    /// # Errors
    /// The reason in words.
    pub(super) fn check(&self, certificate: &CertificateDer<'_>, ip: IpAddr) -> std::result::Result<(), String> {
        let parsed = ParsedCertificate::try_from(certificate).map_err(|e| format!("its certificate: {e}"))?;
        let address = ServerName::from(ip.to_canonical());
        let named = |name: &ServerName<'_>| verify_server_name(&parsed, name).is_ok();
        if named(&address) || self.cluster.as_ref().is_some_and(named) {
            Ok(())
        } else {
            Err(format!("its certificate {}", self.missing(certificate, ip, "its")))
        }
    }

    fn missing(&self, certificate: &CertificateDer<'_>, ip: IpAddr, whose: &str) -> String {
        let presented = ParsedCertificate::try_from(certificate)
            .and_then(|parsed| verify_server_name(&parsed, &ServerName::from(ip.to_canonical())));
        let presented = match presented {
            Err(TlsError::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }))
                if !presented.is_empty() =>
            {
                format!("names {}", presented.join(", "))
            }
            _ => "names nobody (subjectAltName)".to_owned(),
        };
        let cluster = match &self.cluster {
            Some(name) => format!(" nor the cluster (DNS:{})", name.to_str()),
            None => String::new(),
        };
        format!("{presented}, but neither {whose} address (IP:{}){cluster}", ip.to_canonical())
    }
}

/// Takes any node's certificate for now: [`Names`] looks at whom it names when the connection stands.
#[derive(Debug)]
pub(super) struct AnyNode {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl AnyNode {
    pub(super) fn new(roots: Arc<RootCertStore>, provider: &CryptoProvider) -> Self {
        Self { roots, algorithms: provider.signature_verification_algorithms }
    }

    fn chain(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> std::result::Result<(), TlsError> {
        let leaf = ParsedCertificate::try_from(leaf)?;
        verify_server_cert_signed_by_trust_anchor(&leaf, &self.roots, between, now, self.algorithms.all)
    }
}

impl ServerCertVerifier for AnyNode {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        self.chain(end_entity, intermediates, now).map(|()| ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

fn tls_words(error: &TlsError) -> String {
    match error {
        TlsError::InvalidCertificate(invalid) => words(invalid),
        other => format!("cannot be used: {other}"),
    }
}

/// What is wrong with a certificate, after "the certificate".
pub(super) fn words(invalid: &CertificateError) -> String {
    let lapse = |longer: UnixTime, shorter: UnixTime| {
        let seconds = longer.as_secs().saturating_sub(shorter.as_secs());
        match seconds {
            0..=7199 => format!("{seconds} s"),
            7200..=172_799 => format!("{} hours", seconds / 3600),
            _ => format!("{} days", seconds / 86400),
        }
    };
    match invalid {
        CertificateError::ExpiredContext { time, not_after } => {
            format!("has expired {} ago: renew it", lapse(*time, *not_after))
        }
        CertificateError::Expired => "has expired: renew it".to_owned(),
        CertificateError::NotValidYetContext { time, not_before } => {
            format!("is not valid yet, but in {}: check the clocks of both hosts", lapse(*not_before, *time))
        }
        CertificateError::NotValidYet => "is not valid yet: check the clocks of both hosts".to_owned(),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "is of another authority than --ca names; several certificates between the two belong into --cert".to_owned()
        }
        CertificateError::InvalidPurposeContext { .. } | CertificateError::InvalidPurpose => {
            "is not for both ends of a connection: its extendedKeyUsage must hold serverAuth and clientAuth, or be left out"
                .to_owned()
        }
        other => format!("cannot be accepted: {other}"),
    }
}

/// What the peer finds wrong with this node's certificate.
pub(super) fn alert_words(alert: AlertDescription) -> String {
    use AlertDescription as Alert;
    match alert {
        Alert::CertificateExpired => {
            "it finds this node's certificate expired, or not valid yet: renew it, and check the clocks of both hosts"
                .into()
        }
        Alert::UnknownCA | Alert::DecryptError => {
            "it does not know the authority of this node's certificate: give both sides the same --ca".into()
        }
        Alert::UnsupportedCertificate => {
            "it finds that this node's certificate is not for clientAuth (extendedKeyUsage)".into()
        }
        Alert::CertificateRequired => "it asks for a certificate: start with --cert, --key and --ca".into(),
        Alert::BadCertificate | Alert::CertificateUnknown | Alert::CertificateRevoked | Alert::AccessDenied => {
            "it refuses this node's certificate; its log says why".into()
        }
        other => format!("TLS failed: it answers {other:?}"),
    }
}

/// Looks after the files for as long as it runs: what is written into them is used from the next connection on. A change
/// that is no good is logged once, and what was read before stays.
pub(crate) async fn keep(tls: ClusterTls, files: PkiFiles, me: impl Fn() -> IpAddr + Send + Sync + 'static) {
    let mut watch = Watch { seen: files.stamp(), settled: true };
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let (tls, files, ip) = (tls.clone(), files.clone(), me());
        // A disk that hangs must not hold up a thread of the network.
        let looked = tokio::task::spawn_blocking(move || {
            let _ = watch.look(&tls, &files, ip);
            watch
        });
        match looked.await {
            Ok(after) => watch = after,
            Err(_) => return,
        }
    }
}

/// The state of [`keep`].
struct Watch {
    seen: Option<[Stamp; 3]>,
    /// Whether what was seen was also tried.
    settled: bool,
}

impl Watch {
    /// Whether what it found is used; `None` while there is nothing to try.
    fn look(&mut self, tls: &ClusterTls, files: &PkiFiles, ip: IpAddr) -> Option<bool> {
        let stamp = files.stamp();
        if stamp != self.seen {
            // Three files are written one after the other: wait until they rest.
            (self.seen, self.settled) = (stamp, false);
            return None;
        }
        if self.settled {
            return None;
        }
        self.settled = true;
        match tls.reload(files, ip) {
            Ok(()) => {
                tracing::info!("the certificate {} was read again", files.cert.display());
                Some(true)
            }
            Err(error) => {
                let reason = if let Error::Config(reason) = &error { reason.clone() } else { error.to_string() };
                tracing::error!("the changed certificate files are not used, those read before stay: {reason}");
                Some(false)
            }
        }
    }
}

#[cfg(test)]
#[path = "pki_tests.rs"]
mod tests;
