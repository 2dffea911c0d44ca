//! Times that users and peers give, as instants: none of them overflows.

use std::time::Duration;

use tokio::time::Instant;

/// As good as for ever: longer than any process lives, and far below what an [`Instant`] can hold.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The instant `after` from now, or, beyond a hundred years, one that is not reached.
pub(crate) fn from_now(after: Duration) -> Instant {
    later(Instant::now(), after)
}

/// The same from `now`, which was just taken.
pub(crate) fn later(now: Instant, after: Duration) -> Instant {
    now + after.min(FAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_too_long() {
        for after in [Duration::ZERO, Duration::from_secs(1), Duration::from_millis(u64::MAX), Duration::MAX] {
            let at = from_now(after);
            assert!(at <= Instant::now() + FAR);
            assert!(after < FAR || at > Instant::now() + FAR / 2);
        }
    }
}
