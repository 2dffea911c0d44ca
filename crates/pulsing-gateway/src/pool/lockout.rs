//! Whether an engine lets in the key that its EngineWorker has.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long an engine that refused the key gets no requests, unless it gets another key before: it may have been told of the
/// key meanwhile, and only the next request shows it.
const REST: Duration = Duration::from_secs(5);

/// One engine's door.
#[derive(Debug, Default)]
pub(super) struct Lockout {
    shut: AtomicBool,
    until: Mutex<Option<Instant>>,
}

impl Lockout {
    /// The key was refused at `now`.
    pub(super) fn shut(&self, now: Instant) {
        *self.until.lock() = Some(now + REST);
        self.shut.store(true, Ordering::Release);
    }
    /// There is another key, or another engine.
    pub(super) fn open(&self) {
        *self.until.lock() = None;
        self.shut.store(false, Ordering::Release);
    }
    pub(super) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Acquire)
    }
    /// Looks at the clock.
    pub(super) fn tick(&self, now: Instant) {
        if self.is_shut() && self.until.lock().is_some_and(|until| now >= until) {
            self.open();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_key_is_tried_again_after_a_rest_and_another_one_at_once() {
        let (lockout, now) = (Lockout::default(), Instant::now());
        lockout.tick(now);
        assert!(!lockout.is_shut());
        lockout.shut(now);
        lockout.tick(now + REST - Duration::from_millis(1));
        assert!(lockout.is_shut());
        lockout.tick(now + REST);
        assert!(!lockout.is_shut());
        lockout.shut(now);
        lockout.open();
        assert!(!lockout.is_shut());
    }
}
