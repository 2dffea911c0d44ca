//! When a failed actor is started again (R9).

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::net::transport::Transport;

/// What makes an actor start again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Nothing: a failure ends it.
    #[default]
    Never,
    /// A failure: a panic in one of its methods, or [`Context::fail`](super::Context::fail).
    OnFailure,
    /// A failure, and also an end that the actor itself asked for with [`Context::stop`](super::Context::stop).
    Always,
}

/// How an actor is supervised. The defaults are those of Python actors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Supervision {
    /// What makes it start again.
    pub policy: RestartPolicy,
    /// Restarts within `window`; one more failure ends the actor.
    pub max_restarts: usize,
    /// The wait before the first restart of a series. It doubles with each restart within `window`.
    pub min_backoff: Duration,
    /// The longest wait.
    pub max_backoff: Duration,
    /// Time over which restarts are counted.
    pub window: Duration,
}

impl Default for Supervision {
    fn default() -> Self {
        Self {
            policy: RestartPolicy::Never,
            max_restarts: 3,
            min_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(30),
            window: Duration::from_secs(300),
        }
    }
}

impl Supervision {
    /// The defaults with this policy.
    pub fn new(policy: RestartPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Checks that the numbers make sense.
    ///
    /// # Errors
    /// [`Error::Config`] naming the one that does not.
    pub fn check(&self) -> Result<()> {
        if self.min_backoff > self.max_backoff {
            return Err(Error::Config(format!(
                "min_backoff {:?} is over max_backoff {:?}",
                self.min_backoff, self.max_backoff
            )));
        }
        if self.window.is_zero() {
            return Err(Error::Config("a window of no time counts no restarts: give it a length".to_owned()));
        }
        Ok(())
    }
}

/// Counts the restarts of one actor.
#[derive(Debug)]
pub(super) struct Budget {
    supervision: Supervision,
    times: VecDeque<Instant>,
}

impl Budget {
    pub(super) fn new(supervision: Supervision) -> Self {
        Self { supervision, times: VecDeque::new() }
    }

    pub(super) fn policy(&self) -> RestartPolicy {
        self.supervision.policy
    }

    /// The wait before the next restart, or `None` if the budget is spent.
    pub(super) fn next_delay(&mut self, now: Instant, transport: &Transport) -> Option<Duration> {
        let Supervision { max_restarts, min_backoff, max_backoff, window, .. } = self.supervision;
        while self.times.front().is_some_and(|at| now.saturating_duration_since(*at) > window) {
            self.times.pop_front();
        }
        if self.times.len() >= max_restarts {
            return None;
        }
        let doublings = u32::try_from(self.times.len()).unwrap_or(u32::MAX).min(31);
        let delay = min_backoff.saturating_mul(1 << doublings).min(max_backoff);
        self.times.push_back(now);
        // Actors that failed together must not come back together.
        Some(delay.mul_f64(transport.random_between(0.5, 1.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(max_restarts: usize) -> Budget {
        Budget::new(Supervision {
            max_restarts,
            min_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_millis(350),
            window: Duration::from_secs(10),
            ..Supervision::default()
        })
    }

    #[test]
    fn the_wait_doubles_up_to_its_limit_with_jitter() {
        let now = Instant::now();
        for (restart, limit) in [100, 200, 350, 350].into_iter().enumerate() {
            let mut seen = std::collections::HashSet::new();
            for _ in 0..20 {
                let mut budget = budget(10);
                let delay = (0..=restart).map(|_| budget.next_delay(now, &Transport::Tcp).unwrap()).last().unwrap();
                assert!(
                    delay >= Duration::from_millis(limit / 2) && delay <= Duration::from_millis(limit),
                    "{delay:?}"
                );
                seen.insert(delay);
            }
            assert!(seen.len() > 1, "no jitter");
        }
    }

    #[test]
    fn a_budget_is_spent_and_comes_back_with_its_window() {
        let mut budget = budget(2);
        let begun = Instant::now();
        assert!(
            budget.next_delay(begun, &Transport::Tcp).is_some() && budget.next_delay(begun, &Transport::Tcp).is_some()
        );
        assert_eq!(budget.next_delay(begun, &Transport::Tcp), None);
        let later = begun + Duration::from_secs(11);
        assert!(budget.next_delay(later, &Transport::Tcp).unwrap() <= Duration::from_millis(100));
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        let backwards = Supervision { min_backoff: Duration::from_secs(60), ..Supervision::default() };
        let no_window = Supervision { window: Duration::ZERO, ..Supervision::default() };
        assert!(backwards.check().is_err() && no_window.check().is_err() && Supervision::default().check().is_ok());
    }
}
