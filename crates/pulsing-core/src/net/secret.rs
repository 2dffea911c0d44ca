//! The per-user secret that local plaintext peers prove (design section 6).

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::{Error, Result};

/// 32 random bytes shared by the processes of one user on one host.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Reads the secret, making it at the first start.
    ///
    /// # Errors
    /// [`Error::Config`] when the place is unknown, the file cannot be used, or others may read it.
    pub fn load(file: Option<&Path>) -> Result<Self> {
        let path = match file {
            Some(path) => path.to_owned(),
            None => default_path()?,
        };
        match read(&path) {
            Err(ReadError::Missing) => {
                create(&path)?;
                read(&path)
            }
            other => other,
        }
        .map_err(|e| match e {
            ReadError::Missing => Error::Config(format!("the secret file {} vanished", path.display())),
            ReadError::Bad(reason) => Error::Config(format!("secret file {}: {reason}", path.display())),
        })
    }

    /// Proof of knowing the secret, bound to the role and to everything both sides said.
    pub fn prove(&self, role: &str, transcript: &[&[u8]]) -> [u8; 32] {
        self.mac(role, transcript).finalize().into_bytes().into()
    }

    /// Checks [`prove`](Self::prove) in constant time.
    pub fn check(&self, role: &str, transcript: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(role, transcript).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: &str, transcript: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC pads its key with zeros to one block of the hash.
        let mut block = [0u8; 64];
        block[..32].copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new(&block.into());
        mac.update(role.as_bytes());
        for part in transcript {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

/// Bytes of a secret file that are read: it holds 64 digits, and what goes on for ever is not one.
const MOST: u64 = 1024;

enum ReadError {
    Missing,
    Bad(String),
}

fn default_path() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(path) = set("PULSING_SECRET_FILE") {
        return Ok(path);
    }
    set("XDG_STATE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".local/state")))
        .map(|base| base.join("pulsing/secret"))
        .ok_or_else(|| {
            Error::Config("neither HOME nor XDG_STATE_HOME is set: name a file in PULSING_SECRET_FILE".into())
        })
}

fn read(path: &Path) -> Result<Secret, ReadError> {
    let bad = |reason: String| ReadError::Bad(reason);
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(MOST).read_to_string(&mut text))
        .map_err(|e| if e.kind() == ErrorKind::NotFound { ReadError::Missing } else { bad(e.to_string()) })?;
    let mode = fs::metadata(path).map_err(|e| bad(e.to_string()))?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(bad(format!("others may read it (mode {:o}); run chmod 600 on it", mode & 0o777)));
    }
    let text = text.trim();
    let bytes: Option<Vec<u8>> = (text.len() == 64 && text.is_ascii())
        .then(|| (0..32).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()).collect())
        .flatten();
    bytes
        .and_then(|b| <[u8; 32]>::try_from(b).ok())
        .map(Secret)
        .ok_or_else(|| bad("it does not hold 64 hexadecimal digits; delete it and a new one is made".into()))
}

/// Writes a whole file first and links it into place, so that two first starts agree on one secret.
fn create(path: &Path) -> Result<()> {
    let fail = |e: std::io::Error| Error::Config(format!("cannot make the secret file {}: {e}", path.display()));
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(fail)?;
    }
    let secret: [u8; 32] = rand::random();
    let text: String = secret.iter().map(|b| format!("{b:02x}")).collect();
    let draft = path.with_extension(format!("{:016x}", rand::random::<u64>()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft).map_err(fail)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let linked = written.and_then(|()| match fs::hard_link(&draft, path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    });
    let removed = fs::remove_file(&draft);
    linked.and(removed).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temp(name: &str) -> PathBuf {
        let dir =
            std::env::temp_dir().join(format!("pulsing-secret-{}-{:x}", std::process::id(), rand::random::<u64>()));
        fs::create_dir_all(&dir).unwrap();
        dir.join(name)
    }

    #[test]
    fn two_first_starts_agree_and_the_file_is_private() {
        let path = temp("a/b/secret");
        let all: Vec<_> = std::thread::scope(|s| {
            let jobs: Vec<_> = (0..8).map(|_| s.spawn(|| Secret::load(Some(&path)).unwrap().0)).collect();
            jobs.into_iter().map(|j| j.join().unwrap()).collect()
        });
        assert!(all.windows(2).all(|w| w[0] == w[1]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_readable_or_broken_file_is_refused_in_words() {
        let path = temp("secret");
        Secret::load(Some(&path)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(Secret::load(Some(&path)).unwrap_err().to_string().contains("chmod 600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "é".repeat(32)).unwrap();
        assert!(Secret::load(Some(&path)).unwrap_err().to_string().contains("64 hexadecimal"));
    }

    #[test]
    fn a_proof_is_bound_to_role_and_transcript() {
        let secret = Secret([7; 32]);
        let proof = secret.prove("client", &[b"a", b"b"]);
        assert!(secret.check("client", &[b"a", b"b"], &proof));
        assert!(!secret.check("server", &[b"a", b"b"], &proof));
        assert!(!secret.check("client", &[b"ab", b""], &proof));
        assert!(!Secret([8; 32]).check("client", &[b"a", b"b"], &proof));
    }
}
