//! An authority for tests, and the files of the nodes that it certifies.
#![allow(dead_code, clippy::unwrap_used)]

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};

pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

/// What a certificate says.
pub struct Says {
    pub ips: Vec<IpAddr>,
    pub dns: Vec<&'static str>,
    /// Seconds from now.
    pub valid: (i64, i64),
    pub usages: Vec<ExtendedKeyUsagePurpose>,
}

/// Where a node's files are.
pub struct Files {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub ca: PathBuf,
}

pub const DAY: i64 = 86400;

impl Says {
    pub fn ip(text: &str) -> Self {
        Self { ips: vec![text.parse().unwrap()], ..Self::nothing() }
    }
    pub fn dns(name: &'static str) -> Self {
        Self { dns: vec![name], ..Self::nothing() }
    }
    pub fn nothing() -> Self {
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Self { ips: Vec::new(), dns: Vec::new(), valid: (-DAY, 30 * DAY), usages }
    }
}

fn at(seconds: i64) -> SystemTime {
    let by = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { SystemTime::now() - by } else { SystemTime::now() + by }
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = pem("CERTIFICATE", params.self_signed(&key).unwrap().der());
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// (certificate, key), both PEM.
    pub fn certify(&self, says: &Says) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(says.dns.iter().map(|&n| n.to_owned()).collect::<Vec<_>>()).unwrap();
        params.subject_alt_names.extend(says.ips.iter().copied().map(SanType::IpAddress));
        params.not_before = at(says.valid.0).into();
        params.not_after = at(says.valid.1).into();
        params.extended_key_usages.clone_from(&says.usages);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (pem("CERTIFICATE", certificate.der()), pem("PRIVATE KEY", &key.serialize_der()))
    }

    /// Writes the files of a node into a directory of its own.
    pub fn files(&self, says: &Says) -> Files {
        let dir = std::env::temp_dir().join(format!("pulsing-pki-{}-{:x}", std::process::id(), rand::random::<u64>()));
        std::fs::create_dir_all(&dir).unwrap();
        let files = Files { cert: dir.join("node.pem"), key: dir.join("node.key"), ca: dir.join("ca.pem") };
        let (cert, key) = self.certify(says);
        write(&files.cert, &cert);
        write(&files.key, &key);
        write(&files.ca, &self.pem);
        files
    }
}

/// Puts a file in place in one step, readable by its owner only.
pub fn write(path: &Path, text: &str) {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let draft: PathBuf = path.with_extension("draft");
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    std::fs::rename(draft, path).unwrap();
}

/// Text form of DER (RFC 7468).
fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in der.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= three.len() { digit as char } else { '=' });
        }
    }
    let lines: Vec<&str> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}
