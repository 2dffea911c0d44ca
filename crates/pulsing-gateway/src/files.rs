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

/// The text of a file that holds secrets: others than its owner and group must not be able to read it.
///
/// # Errors
/// A sentence with `what` and the path; nothing of what stands in the file.
pub(crate) fn read_secret(what: &str, path: &Path) -> Result<String, String> {
    let bad = |why: &str| format!("{what} {}: {why}", path.display());
    let facts = fs::metadata(path).map_err(|error| bad(&error.to_string()))?;
    let mode = facts.permissions().mode() & 0o777;
    if mode & 0o007 != 0 {
        return Err(bad(&format!("every user of this host can reach it (mode {mode:o}); run chmod 600 on it")));
    }
    if facts.len() > MAX {
        return Err(bad(&format!("it is longer than {MAX} bytes")));
    }
    let bytes = fs::read(path).map_err(|error| bad(&error.to_string()))?;
    String::from_utf8(bytes).map_err(|_| bad("it is not text"))
}

/// What tells a file from what it was: also after a rename over it, as editors and Kubernetes write.
type Stamp = Option<(u64, u64, i64, i64, u64)>;

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        let facts = fs::metadata(path).ok()?;
        Some((facts.dev(), facts.ino(), facts.mtime(), facts.mtime_nsec(), facts.len()))
    };
    paths.iter().map(stamp).collect()
}

/// Files, and how they were when somebody last looked.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    paths: Vec<PathBuf>,
    known: Vec<Stamp>,
}

impl Watched {
    /// Looks at the files. To be called before they are read: a change in between must not be missed.
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        let known = stamps(&paths);
        Self { paths, known }
    }

    /// Calls `changed` whenever one of the files has changed. They are looked at away from the tasks that serve: they may
    /// lie on a disk that hangs.
    pub(crate) async fn follow(mut self, changed: impl Fn() + Send + Sync + 'static) {
        let changed = Arc::new(changed);
        loop {
            tokio::time::sleep(LOOK).await;
            let (before, changed) = (self.clone(), Arc::clone(&changed));
            let look = tokio::task::spawn_blocking(move || {
                let now = stamps(&before.paths);
                // A file that is just being replaced is read when it is there again.
                let there = now.iter().all(Option::is_some);
                if there && now != before.known {
                    changed();
                }
                there.then_some(now)
            });
            if let Ok(Some(now)) = look.await {
                self.known = now;
            }
        }
    }
}
