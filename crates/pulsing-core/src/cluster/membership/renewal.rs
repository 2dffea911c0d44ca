//! How often this node comes back from the dead.
//!
//! One that was wrongly declared down renews itself at once. One that some reach and others do not would be declared down
//! again at once, and back again, without end: it waits longer each time.

use std::time::Duration;

/// The longest wait between two renewals.
const SLOWEST: Duration = Duration::from_secs(600);
/// After this long without one the next is at once again.
const CALM: Duration = Duration::from_secs(1800);

#[derive(Debug, Default)]
pub(super) struct Renewals {
    last: Option<Duration>,
    wait: Duration,
}

impl Renewals {
    pub fn allowed(&self, now: Duration) -> bool {
        self.last.is_none_or(|last| now.saturating_sub(last) >= self.wait)
    }

    /// One happened; `first_wait` is how long the next has to wait if there was none for long.
    pub fn happened(&mut self, now: Duration, first_wait: Duration) {
        let calm = self.last.is_none_or(|last| now.saturating_sub(last) >= CALM);
        self.wait = if calm { first_wait } else { (self.wait * 2).min(SLOWEST) };
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_renewal_waits_twice_as_long_as_the_one_before_until_there_was_calm() {
        let seconds = Duration::from_secs;
        let mut renewals = Renewals::default();
        assert!(renewals.allowed(seconds(0)));
        renewals.happened(seconds(0), seconds(1));
        assert!(!renewals.allowed(Duration::from_millis(999)) && renewals.allowed(seconds(1)));
        renewals.happened(seconds(1), seconds(1));
        assert!(!renewals.allowed(seconds(2)) && renewals.allowed(seconds(3)));
        (0..20).for_each(|_| renewals.happened(seconds(3), seconds(1)));
        assert!(!renewals.allowed(seconds(602)) && renewals.allowed(seconds(603)));
        renewals.happened(seconds(3000), seconds(1));
        assert!(renewals.allowed(seconds(3001)));
    }
}
