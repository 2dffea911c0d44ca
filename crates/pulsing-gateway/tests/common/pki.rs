//! Certificates for 127.0.0.1.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustls::pki_types::CertificateDer;

pub fn pem(kind: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in der.chunks(3) {
        let bits = group.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte)) << (8 * (3 - group.len()));
        for digit in 0..4 {
            let last = digit > group.len();
            text.push(if last { '=' } else { char::from(DIGITS[bits >> (18 - 6 * digit) & 63]) });
        }
    }
    format!("-----BEGIN {kind}-----\n{text}\n-----END {kind}-----\n")
}

/// A certificate for 127.0.0.1, in files that go with the test.
pub struct Files {
    dir: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Files {
    pub fn new() -> (Self, CertificateDer<'static>) {
        let dir = std::env::temp_dir().join(format!("pulsing-tls-{:032x}", rand::random::<u128>()));
        fs::create_dir(&dir).unwrap();
        let files = Self { cert: dir.join("cert.pem"), key: dir.join("key.pem"), dir };
        let der = files.renew();
        (files, der)
    }
    pub fn renew(&self) -> CertificateDer<'static> {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        let put = |path: &Path, text: &str| {
            let draft = path.with_extension("draft");
            fs::write(&draft, text).unwrap();
            fs::set_permissions(&draft, fs::Permissions::from_mode(0o600)).unwrap();
            fs::rename(&draft, path).unwrap();
        };
        put(&self.key, &pem("PRIVATE KEY", &made.signing_key.serialize_der()));
        put(&self.cert, &pem("CERTIFICATE", made.cert.der()));
        made.cert.der().clone()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
