//! One monotonic time line per run, in whole microseconds: differences of such stamps add up exactly.

use std::time::{Duration, Instant};

/// Microseconds since the run began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    epoch: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { epoch: Instant::now() }
    }

    pub(crate) fn now(self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// The instant of a stamp, for timers.
    pub(crate) fn instant(self, at: u64) -> Instant {
        self.epoch + Duration::from_micros(at)
    }
}

/// CPU time of this process so far, in seconds.
pub(crate) fn cpu_seconds() -> f64 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}
