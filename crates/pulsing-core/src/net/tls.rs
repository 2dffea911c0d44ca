//! Mutual TLS between members, from a passphrase or from files (design section 6).
//!
//! Who knows the passphrase is a member and can act as any other: the threat model of a shared secret. Every member derives
//! the same authority and signs its own certificate. The passphrase is stretched with Argon2id, salted by the cluster's
//! name, so that a captured handshake is costly to guess from and two clusters with one passphrase do not trust each other.
//!
//! With files ([`super::pki`]) each node has a certificate of its own, which names its address or its cluster: a node is
//! taken for no other than the one that its certificate names.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use argon2::{Algorithm, Argon2, Params, Version};
use hkdf::Hkdf;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use sha2::{Digest, Sha256};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::handshake::Io;
use super::pki::{self, AnyNode, Material, Names, PkiFiles};
use crate::error::{Error, Result};

/// Every member's certificate carries this name: membership is all it proves.
const MEMBER: &str = "member.pulsing.internal";
/// Argon2id at 64 MiB and 3 passes (the second recommended option of RFC 9106): about 0.1 s, once a start.
const MEMORY_KIB: u32 = 64 << 10;
const PASSES: u32 = 3;
/// A PKCS #8 version 1 wrapping of an Ed25519 seed (RFC 8410 section 7) up to the seed itself.
const PKCS8_ED25519: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// A secret that never prints itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Passphrase(String);

impl Passphrase {
    /// Takes a passphrase; surrounding white space (a file's last line end) does not count.
    ///
    /// # Errors
    /// `Config` when nothing is left.
    pub fn new(text: &str) -> Result<Self> {
        let text = text.trim();
        if text.is_empty() {
            return Err(Error::Config("the passphrase is empty; write one into its file, or leave it out".into()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl std::fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Passphrase(..)")
    }
}

/// Both ends of TLS, as new connections use them.
struct Ends {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

impl Ends {
    /// # Errors
    /// The crypto library's words.
    fn new(material: Material, server_names_checked_later: bool) -> std::result::Result<Self, rustls::Error> {
        let Material { chain, key, roots } = material;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = &[&rustls::version::TLS13];
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|e| rustls::Error::General(e.to_string()))?;
        let mut server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())?;
        // A resumed session would not look at the certificate again, and connections here are few and long.
        server.send_tls13_tickets = 0;
        let client =
            rustls::ClientConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions)?;
        let client = if server_names_checked_later {
            client.dangerous().with_custom_certificate_verifier(Arc::new(AnyNode::new(roots, &provider)))
        } else {
            client.with_root_certificates(roots)
        };
        let mut client = client.with_client_auth_cert(chain, key)?;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(server)), connector: TlsConnector::from(Arc::new(client)) })
    }
}

/// Both ends of TLS for one member of a cluster. Clones share what [`reload`](Self::reload) replaces.
#[derive(Clone)]
pub struct ClusterTls {
    ends: Arc<ArcSwap<Ends>>,
    /// Whom a certificate has to name; none where membership is all that it proves.
    names: Option<Names>,
}

impl std::fmt::Debug for ClusterTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterTls(..)")
    }
}

impl ClusterTls {
    /// Derives the cluster's authority and makes this member's certificate. Takes about 0.1 s of one core.
    ///
    /// # Errors
    /// `Config` when the crypto library refuses what was derived.
    pub fn new(passphrase: &Passphrase, cluster: &str) -> Result<Self> {
        let failed = |e: &dyn std::fmt::Display| Error::Config(format!("cannot set up TLS: {e}"));
        let authority_key = KeyPair::from_pkcs8_der_and_sign_algo(
            &PrivatePkcs8KeyDer::from(authority_seed(passphrase, cluster)?),
            &rcgen::PKCS_ED25519,
        )
        .map_err(|e| failed(&e))?;
        let mut authority = CertificateParams::default();
        authority.distinguished_name = name("Pulsing cluster");
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let anchor = authority.self_signed(&authority_key).map_err(|e| failed(&e))?;
        let issuer = Issuer::new(authority, authority_key);

        let key = KeyPair::generate_for(&rcgen::PKCS_ED25519).map_err(|e| failed(&e))?;
        let mut member = CertificateParams::new(vec![MEMBER.to_owned()]).map_err(|e| failed(&e))?;
        member.distinguished_name = name("Pulsing member");
        member.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        member.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = member.signed_by(&key, &issuer).map_err(|e| failed(&e))?;
        let chain = vec![certificate.der().clone()];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));

        let mut roots = RootCertStore::empty();
        roots.add(anchor.der().clone()).map_err(|e| failed(&e))?;
        let ends = Ends::new(Material { chain, key, roots: Arc::new(roots) }, false).map_err(|e| failed(&e))?;
        Ok(Self { ends: Arc::new(ArcSwap::from_pointee(ends)), names: None })
    }

    /// Takes certificate, key and authorities from files. `me` is the address that others know this node by; none for who
    /// only observes, whose certificate need not name anything.
    ///
    /// # Errors
    /// `Config` naming the file and what is wrong with it.
    pub fn from_files(files: &PkiFiles, cluster: &str, me: Option<IpAddr>) -> Result<Self> {
        let names = Names::new(cluster);
        let ends = Self::read(files, &names, me)?;
        Ok(Self { ends: Arc::new(ArcSwap::from_pointee(ends)), names: Some(names) })
    }

    /// As [`from_files`](Self::from_files), without a look at whether others will accept it.
    #[cfg(test)]
    pub(super) fn unchecked(files: &PkiFiles, cluster: &str) -> Result<Self> {
        let ends = Ends::new(files.read()?, true).map_err(|e| Error::Config(e.to_string()))?;
        Ok(Self { ends: Arc::new(ArcSwap::from_pointee(ends)), names: Some(Names::new(cluster)) })
    }

    /// Reads the files again, for connections to come; those that stand go on. Leaves all as it was on an error.
    ///
    /// # Errors
    /// As [`from_files`](Self::from_files).
    pub(super) fn reload(&self, files: &PkiFiles, me: IpAddr) -> Result<()> {
        if let Some(names) = &self.names {
            self.ends.store(Arc::new(Self::read(files, names, Some(me))?));
        }
        Ok(())
    }

    fn read(files: &PkiFiles, names: &Names, me: Option<IpAddr>) -> Result<Ends> {
        let material = files.read()?;
        material.check(files, names, me)?;
        Ends::new(material, true).map_err(|e| Error::Config(format!("{}: {e}", files.cert.display())))
    }

    /// The listener's half of the handshake; the dialler must show a member's certificate.
    ///
    /// # Errors
    /// The reason in words.
    pub(crate) async fn accept<S: Io>(&self, stream: S) -> std::result::Result<TlsStream<S>, String> {
        let acceptor = self.ends.load().acceptor.clone();
        acceptor.accept(stream).await.map(TlsStream::Server).map_err(|e| self.explain(&e))
    }

    /// The dialler's half of the handshake; the listener must show a member's certificate, and where there is one of its own
    /// for each node, that of the node at `ip`.
    ///
    /// # Errors
    /// The reason in words.
    pub(crate) async fn connect<S: Io>(&self, stream: S, ip: IpAddr) -> std::result::Result<TlsStream<S>, String> {
        let name = match &self.names {
            Some(_) => ServerName::from(ip),
            None => ServerName::try_from(MEMBER).map_err(|e| e.to_string())?,
        };
        let connector = self.ends.load().connector.clone();
        let stream = connector.connect(name, stream).await.map_err(|e| self.explain(&e))?;
        let stream = TlsStream::Client(stream);
        self.check(certificate(&stream), ip)?;
        Ok(stream)
    }

    /// Whether the certificate that a peer has shown is that of the node at `ip`.
    ///
    /// # Errors
    /// The reason in words.
    pub(crate) fn check(
        &self,
        certificate: Option<&CertificateDer<'_>>,
        ip: IpAddr,
    ) -> std::result::Result<(), String> {
        match (&self.names, certificate) {
            (None, _) => Ok(()),
            (Some(names), Some(certificate)) => names.check(certificate, ip),
            (Some(_), None) => Err("it showed no certificate".to_owned()),
        }
    }

    /// What who comes without TLS has to be started with.
    pub(crate) fn way_in(&self) -> &'static str {
        if self.names.is_some() { "--cert, --key and --ca" } else { "its --passphrase-file" }
    }

    /// What a TLS failure means to a user, or the library's words.
    pub(crate) fn explain(&self, error: &std::io::Error) -> String {
        use rustls::{AlertDescription as Alert, Error as Tls};
        let wrong = "it belongs to another cluster: check the passphrase and --cluster on both sides";
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>()) {
            Some(Tls::InvalidMessage(_)) => match self.names {
                Some(_) => "it answers without TLS: give both sides --cert, --key and --ca, or neither".to_owned(),
                None => "it answers without TLS: give both sides the same --passphrase-file, or neither".to_owned(),
            },
            Some(Tls::InvalidCertificate(invalid)) if self.names.is_some() => {
                format!("its certificate {}", pki::words(invalid))
            }
            Some(Tls::AlertReceived(alert)) if self.names.is_some() => pki::alert_words(*alert),
            Some(Tls::NoCertificatesPresented) => {
                format!("it showed no certificate: start it with {}", self.way_in())
            }
            Some(Tls::InvalidCertificate(_)) => wrong.to_owned(),
            Some(Tls::AlertReceived(
                Alert::UnknownCA | Alert::BadCertificate | Alert::DecryptError | Alert::CertificateUnknown,
            )) => wrong.to_owned(),
            Some(other) => format!("TLS failed: {other}"),
            None => error.to_string(),
        }
    }
}

/// What the peer has shown.
pub(crate) fn certificate<S>(stream: &TlsStream<S>) -> Option<&CertificateDer<'static>> {
    stream.get_ref().1.peer_certificates()?.first()
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

fn authority_seed(passphrase: &Passphrase, cluster: &str) -> Result<Vec<u8>> {
    let failed = |e: &dyn std::fmt::Display| Error::Config(format!("cannot derive the cluster's key: {e}"));
    let salt = Sha256::digest(format!("pulsing cluster v1\0{cluster}").as_bytes());
    let params = Params::new(MEMORY_KIB, PASSES, 1, Some(32)).map_err(|e| failed(&e))?;
    let mut master = [0u8; 32];
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(passphrase.0.as_bytes(), &salt, &mut master)
        .map_err(|e| failed(&e))?;
    let mut seed = [0u8; 32];
    Hkdf::<Sha256>::new(None, &master).expand(b"pulsing authority ed25519 v1", &mut seed).map_err(|e| failed(&e))?;
    Ok([&PKCS8_ED25519[..], &seed].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};

    async fn meet(
        a: &ClusterTls,
        b: &ClusterTls,
    ) -> (std::result::Result<(), String>, std::result::Result<(), String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::join!(
            async {
                let (stream, _) = listener.accept().await.unwrap();
                a.accept(stream).await.map(|_| ())
            },
            async {
                let stream = TcpStream::connect(addr).await.unwrap();
                b.connect(stream, addr.ip()).await.map(|_| ())
            },
        )
    }

    #[tokio::test]
    async fn members_of_one_cluster_meet_and_strangers_do_not() {
        let tls = |p: &str, c: &str| ClusterTls::new(&Passphrase::new(p).unwrap(), c).unwrap();
        let (a, b) = (tls("correct horse", "x"), tls(" correct horse\n", "x"));
        assert_eq!(meet(&a, &b).await, (Ok(()), Ok(())));
        for stranger in [tls("wrong", "x"), tls("correct horse", "y")] {
            let (_, dialler) = meet(&a, &stranger).await;
            assert!(dialler.unwrap_err().contains("check the passphrase and --cluster"));
        }
    }

    /// Computed by another implementation (pyca/cryptography's Argon2id and HKDF) from the parameters that the security guide
    /// gives. A build that fails this cannot talk to clusters that exist.
    #[test]
    fn the_key_of_a_cluster_is_what_it_always_was() {
        for (passphrase, cluster, key) in [
            (
                "correct horse battery staple",
                "default",
                "f559ad0123768a3e649a599dc2392398ed8eeee7a6a18bb39aafc13ac6834d1b",
            ),
            ("passphrase \u{e9}", "prod", "bf5ff9001fd622fb022601ded691c7a77420fa546fa30f7d0e6065324df4636f"),
        ] {
            let seed = authority_seed(&Passphrase::new(passphrase).unwrap(), cluster).unwrap();
            let (wrapping, seed) = seed.split_at(PKCS8_ED25519.len());
            let seed: String = seed.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!((wrapping, &seed[..]), (&PKCS8_ED25519[..], key), "{passphrase} of {cluster}");
        }
    }

    #[test]
    fn a_passphrase_neither_prints_nor_is_empty() {
        assert_eq!(format!("{:?}", Passphrase::new("secret").unwrap()), "Passphrase(..)");
        assert!(Passphrase::new(" \n").is_err());
    }
}
