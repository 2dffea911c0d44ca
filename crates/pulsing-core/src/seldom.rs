//! A line of the log for what may happen many times a second: said at once, and then once a minute with how often.

use std::time::Duration;

use tokio::time::Instant;

/// How long one line stands for all that follow.
const QUIET: Duration = Duration::from_secs(60);

/// When it was said last, and what has happened since.
#[derive(Debug, Default)]
pub struct Seldom {
    said: Option<Instant>,
    more: u64,
}

impl Seldom {
    /// It happened: how often it did unsaid before, if it is to be said.
    pub fn due(&mut self) -> Option<u64> {
        let now = Instant::now();
        if self.said.is_some_and(|at| now.duration_since(at) < QUIET) {
            self.more += 1;
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_happens_ten_times_a_second_is_a_line_a_minute() {
        let mut seldom = Seldom::default();
        let mut said = Vec::new();
        for _ in 0..1500 {
            said.extend(seldom.due());
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        assert_eq!(said, [0, 599, 599]);
    }
}
