//! How a link between two hosts misbehaves.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use crate::error::{Error, Result};

/// First retransmission of a segment: Linux's lower bound of the retransmission timeout (`TCP_RTO_MIN`).
const RETRANSMIT: Duration = Duration::from_millis(200);
/// First retransmission of a connection's opening (RFC 6298).
const REDIAL: Duration = Duration::from_secs(1);
/// Longest pause between two retransmissions (Linux's `TCP_RTO_MAX`).
const RETRANSMIT_MAX: Duration = Duration::from_secs(120);

/// How a link misbehaves in each direction. The default is a perfect one.
#[derive(Clone, Debug, PartialEq)]
pub struct Faults {
    /// Shortest and longest time a segment takes; each takes a random one between them. Timers have a grain of 1 ms.
    pub delay: (Duration, Duration),
    /// Probability that a segment is lost, 0 to 1. Its link stalls until it was sent again: 0.2 s the first time, twice as
    /// long each further one.
    pub loss: f64,
    /// Probability that a segment, and what follows it on its connection, takes up to four times the longest delay more,
    /// so that other connections overtake it.
    pub reorder: f64,
    /// A link that has stalled for this long breaks. Default 60 s: the keep-alive of our own connections (15 s, then 9
    /// probes 5 s apart).
    pub break_after: Duration,
}

impl Default for Faults {
    fn default() -> Self {
        Self { delay: (Duration::ZERO, Duration::ZERO), loss: 0.0, reorder: 0.0, break_after: Duration::from_secs(60) }
    }
}

impl Faults {
    /// # Errors
    /// `Config` that names what makes no sense.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [("loss", self.loss), ("reorder", self.reorder)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(Error::Config(format!("{name}={value}: expected a probability from 0 to 1")));
            }
        }
        if self.delay.0 > self.delay.1 {
            return Err(Error::Config(format!(
                "delay={:?}: expected the shortest before the longest",
                (self.delay.0.as_secs_f64(), self.delay.1.as_secs_f64())
            )));
        }
        if self.break_after.is_zero() {
            return Err(Error::Config("break_after=0: expected seconds above 0".into()));
        }
        Ok(())
    }

    fn hit(probability: f64, rng: &mut StdRng) -> bool {
        // Drawn even where nothing can come of it, so that one fault's setting does not shift the others' outcomes.
        rng.random::<f64>() < probability
    }

    fn pass(&self, rng: &mut StdRng) -> Duration {
        let (least, most) = self.delay;
        least + (most - least).mul_f64(rng.random())
    }

    /// What a segment's way takes; over `break_after` when the link gives up on it.
    pub(super) fn segment(&self, rng: &mut StdRng) -> Duration {
        let mut takes = self.pass(rng);
        let held = Duration::from_secs_f64(self.delay.1.as_secs_f64() * 4.0 * rng.random::<f64>());
        if Self::hit(self.reorder, rng) {
            takes += held;
        }
        takes + self.lost(RETRANSMIT, rng)
    }

    /// What opening a connection takes.
    pub(super) fn dial(&self, rng: &mut StdRng) -> Duration {
        self.pass(rng) + self.pass(rng) + self.lost(REDIAL, rng)
    }

    fn lost(&self, first: Duration, rng: &mut StdRng) -> Duration {
        // The chances of one segment come from one draw of the link's, whatever their number.
        let mut chances = StdRng::seed_from_u64(rng.next_u64());
        let (mut waited, mut pause) = (Duration::ZERO, first);
        while Self::hit(self.loss, &mut chances) && waited <= self.break_after {
            waited += pause;
            pause = (pause * 2).min(RETRANSMIT_MAX);
        }
        waited
    }

    /// When a segment that met a dead link for `stalled` is sent again, counted from its first sending.
    pub(super) fn resent_after(stalled: Duration) -> Duration {
        let (mut waited, mut pause) = (Duration::ZERO, RETRANSMIT);
        while waited < stalled {
            waited += pause;
            pause = (pause * 2).min(RETRANSMIT_MAX);
        }
        waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_sent_again_with_growing_pauses() {
        let resent = |ms| Faults::resent_after(Duration::from_millis(ms)).as_millis();
        assert_eq!([resent(0), resent(100), resent(300), resent(20_000)], [0, 200, 600, 25_400]);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let bad = |faults: Faults| faults.check().unwrap_err().to_string();
        assert!(bad(Faults { loss: 1.5, ..Faults::default() }).contains("loss=1.5"));
        assert!(bad(Faults { reorder: f64::NAN, ..Faults::default() }).contains("reorder=NaN"));
        let delay = (Duration::from_secs(2), Duration::from_secs(1));
        assert!(bad(Faults { delay, ..Faults::default() }).contains("delay=(2.0, 1.0)"));
    }
}
