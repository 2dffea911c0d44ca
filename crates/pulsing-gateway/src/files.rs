//! Files that are read at the start and again when they change.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Between two looks. A change counts within that time.
const LOOK: Duration = Duration::from_secs(1);
/// No file of keys or certificates is longer, in bytes.
const MAX: u64 = 16 << 20;

/// What stands in a file of settings. Only a regular file will do: a pipe would hold up the start until somebody writes to
/// it, and a device may never end.
///
/// # Errors
/// A sentence with `what` and the path; nothing of what stands in the file.
pub(crate) fn read(what: &str, path: &Path) -> Result<Vec<u8>, String> {
    read_if(what, path, |_| Ok(()))
}

/// The text of a file that holds secrets: others than its owner and group must not be able to read it.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_secret(what: &str, path: &Path) -> Result<String, String> {
    let bytes = read_if(what, path, |facts| match facts.permissions().mode() & 0o777 {
        mode if mode & 0o007 == 0 => Ok(()),
        mode => Err(format!("every user of this host can reach it (mode {mode:o}); run chmod 600 on it")),
    })?;
    String::from_utf8(bytes).map_err(|_| format!("{what} {}: it is not text", path.display()))
}

fn read_if(what: &str, path: &Path, fits: impl Fn(&fs::Metadata) -> Result<(), String>) -> Result<Vec<u8>, String> {
    let bad = |why: &dyn std::fmt::Display| format!("{what} {}: {why}", path.display());
    let facts = fs::metadata(path).map_err(|error| bad(&error))?;
    if !facts.is_file() {
        return Err(bad(&"it is no regular file, which can be read again when it changes"));
    }
    fits(&facts).map_err(|why| bad(&why))?;
    if facts.len() > MAX {
        return Err(bad(&format!("it is longer than {MAX} bytes")));
    }
    fs::read(path).map_err(|error| bad(&error))
}

/// What tells a file from what it was: also after a rename over it, as editors and Kubernetes write, and after a chmod.
type Stamp = Option<(u64, u64, i64, i64, u64)>;

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        let facts = fs::metadata(path).ok()?;
        Some((facts.dev(), facts.ino(), facts.ctime(), facts.ctime_nsec(), facts.len()))
    };
    paths.iter().map(stamp).collect()
}

/// Files, and how they were when somebody last looked.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    paths: Vec<PathBuf>,
    known: Vec<Stamp>,
    /// One of them was not there at the last look.
    gone: bool,
}

impl Watched {
    /// Looks at the files. To be called before they are read: a change in between must not be missed.
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        let known = stamps(&paths);
        Self { paths, known, gone: false }
    }

    /// Calls `changed` whenever one of the files has changed, or is gone at two looks in a row. They are looked at away from the tasks that serve: they may
    /// lie on a disk that hangs.
    pub(crate) async fn follow(mut self, changed: impl Fn() + Send + Sync + 'static) {
        let changed = Arc::new(changed);
        loop {
            tokio::time::sleep(LOOK).await;
            let (before, changed) = (self.clone(), Arc::clone(&changed));
            let look = tokio::task::spawn_blocking(move || {
                let now = stamps(&before.paths);
                let gone = now.iter().any(Option::is_none);
                // A file that is just being replaced is read when it is there again.
                if now == before.known || (gone && !before.gone) {
                    return (before.known, gone);
                }
                changed();
                (now, gone)
            });
            if let Ok((known, gone)) = look.await {
                (self.known, self.gone) = (known, gone);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_before_it_is_opened() {
        for path in ["/dev/zero", "/"] {
            let why = read("tls_cert", Path::new(path)).expect_err(path);
            assert_eq!(why, format!("tls_cert {path}: it is no regular file, which can be read again when it changes"));
        }
        let why = read_secret("api_keys_file", Path::new("/dev/zero")).expect_err("a device");
        assert!(why.contains("no regular file"), "{why}");
    }

    #[tokio::test]
    async fn a_change_of_text_or_mode_is_told_once_and_so_is_a_file_that_is_gone() {
        let dir = std::env::temp_dir().join(format!("pulsing-watched-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("keys");
        fs::write(&path, "a").unwrap();
        let told = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&told);
        let watched = Watched::new(vec![path.clone()]);
        let count = move || {
            counter.fetch_add(1, Ordering::SeqCst);
        };
        let follower = tokio::spawn(watched.follow(count));
        type Change = fn(&Path);
        let changes: [Change; 4] = [
            |path| fs::write(path, "bb").unwrap(),
            |path| fs::set_permissions(path, fs::Permissions::from_mode(0o604)).unwrap(),
            |path| fs::remove_file(path).unwrap(),
            |path| fs::write(path, "ccc").unwrap(),
        ];
        for (at, change) in changes.iter().enumerate() {
            change(&path);
            tokio::time::timeout(Duration::from_secs(30), async {
                while told.load(Ordering::SeqCst) <= at {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            })
            .await
            .unwrap_or_else(|_| panic!("change {at} was not told"));
        }
        assert_eq!(told.load(Ordering::SeqCst), changes.len(), "each is told once");
        follower.abort();
        fs::remove_dir_all(&dir).unwrap();
    }
}
