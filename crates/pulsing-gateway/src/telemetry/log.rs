//! The access log: one JSON object a line.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::config::GatewayError;

/// Lines that wait to be written; more are dropped, and counted: a full disk must not hold up requests.
const QUEUE: usize = 8192;
/// And most bytes of them.
const QUEUE_BYTES: usize = 64 << 20;
/// How often a file is looked at that somebody may have moved away.
const LOOK: Duration = Duration::from_secs(1);

/// Takes lines; a thread writes them.
pub(crate) struct AccessLog {
    lines: Mutex<Option<SyncSender<String>>>,
    counts: Arc<Counts>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Counts {
    /// Bytes of lines that wait.
    waiting: AtomicUsize,
    dropped: AtomicU64,
}

impl AccessLog {
    /// Opens `place`: a path, or `-` for standard output. With `content` lines hold what clients and engines say.
    ///
    /// # Errors
    /// `Config` naming a file that cannot be opened.
    pub(crate) fn open(place: &str, content: bool) -> Result<Self, GatewayError> {
        let bad = |error: io::Error| GatewayError::Config(format!("access_log {place}: {error}"));
        let path = (place != "-").then(|| PathBuf::from(place));
        // Who asked what when is not for everybody, and what they said for nobody else.
        let mode = if content { 0o600 } else { 0o640 };
        let file = path.as_deref().map(|path| append(path, mode)).transpose().map_err(bad)?;
        let (lines, received) = sync_channel(QUEUE);
        let counts = Arc::new(Counts::default());
        let seen = Arc::clone(&counts);
        let run = move || match (path, file) {
            (Some(path), Some(file)) => write_file(&received, &path, mode, file, &seen),
            _ => write_out(&received, &seen),
        };
        let writer = std::thread::Builder::new().name("access-log".into()).spawn(run).map_err(bad)?;
        Ok(Self { lines: Mutex::new(Some(lines)), counts, writer: Mutex::new(Some(writer)) })
    }
    /// Writes a line some time later. Never waits.
    pub(crate) fn write(&self, line: String) {
        let length = line.len();
        // One that is longer than that by itself waits for the others to be gone.
        let fits = self.counts.waiting.fetch_add(length, Relaxed) <= QUEUE_BYTES;
        if !fits || self.lines.lock().as_ref().is_none_or(|lines| lines.try_send(line).is_err()) {
            self.counts.waiting.fetch_sub(length, Relaxed);
            self.counts.dropped.fetch_add(1, Relaxed);
        }
    }
    /// Lines that were not written.
    pub(crate) fn dropped(&self) -> u64 {
        self.counts.dropped.load(Relaxed)
    }
    /// Takes no more lines, and returns when all are written. Blocks.
    pub(crate) fn close(&self) {
        drop(self.lines.lock().take());
        if let Some(writer) = self.writer.lock().take() {
            let _ = writer.join();
        }
    }
}

fn append(path: &Path, mode: u32) -> io::Result<File> {
    // Opening a pipe waits until somebody reads it, and what cannot be added to is no log.
    let is_log = |kind: FileType| kind.is_file() || kind.is_char_device();
    if let Ok(facts) = std::fs::metadata(path)
        && !is_log(facts.file_type())
    {
        let why = "it is neither a regular file nor a terminal; - stands for standard output, whatever that is";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    OpenOptions::new().append(true).create(true).mode(mode).open(path)
}

fn write_file(lines: &Receiver<String>, path: &Path, mode: u32, file: File, counts: &Counts) {
    let taken = |line: String| {
        counts.waiting.fetch_sub(line.len(), Relaxed);
        line
    };
    let mut out = BufWriter::new(file);
    let (mut looked, mut failing) = (Instant::now(), false);
    loop {
        match lines.recv_timeout(LOOK) {
            Ok(line) => {
                let mut count = 1;
                let mut written = writeln!(out, "{}", taken(line));
                while let Ok(line) = lines.try_recv().map(taken) {
                    count += 1;
                    written = written.and_then(|()| writeln!(out, "{line}"));
                }
                match written.and_then(|()| out.flush()) {
                    // Said once: under load a full disk would get a line in the other log for each few that it lost here.
                    Err(error) => {
                        counts.dropped.fetch_add(count, Relaxed);
                        if !std::mem::replace(&mut failing, true) {
                            tracing::error!(%error, path = %path.display(), "the access log cannot be written");
                        }
                    }
                    Ok(()) if std::mem::take(&mut failing) => {
                        tracing::info!(path = %path.display(), "the access log is written again");
                    }
                    Ok(()) => {}
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // Whoever rotates logs moves the file away: the next lines belong into a fresh one.
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            let identity = |facts: io::Result<std::fs::Metadata>| facts.ok().map(|facts| (facts.dev(), facts.ino()));
            if identity(std::fs::metadata(path)) != identity(out.get_ref().metadata())
                && let Ok(file) = append(path, mode)
            {
                out = BufWriter::new(file);
            }
        }
    }
}

fn write_out(lines: &Receiver<String>, counts: &Counts) {
    while let Ok(line) = lines.recv() {
        counts.waiting.fetch_sub(line.len(), Relaxed);
        let mut out = io::stdout().lock();
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            counts.dropped.fetch_add(1, Relaxed);
        }
    }
}
