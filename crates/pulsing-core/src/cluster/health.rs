//! How well this process itself is doing (Lifeguard's local health, M2).

/// Worst score: probes then come eight times as seldom.
const WORST: u32 = 7;

/// Grows with every sign that the fault lies here and shrinks with every probe round that went as planned. Probe waits and
/// suspicion times stretch with it, so a sick node is slow to accuse others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Health {
    score: u32,
}

impl Health {
    pub fn score(self) -> u32 {
        self.score
    }

    pub fn worse(&mut self, by: u32) {
        self.score = (self.score + by).min(WORST);
    }

    pub fn better(&mut self) {
        self.score = self.score.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_within_bounds() {
        let mut health = Health::default();
        health.better();
        assert_eq!(health.score(), 0);
        health.worse(100);
        assert_eq!(health.score(), WORST);
        health.better();
        assert_eq!(health.score(), WORST - 1);
    }
}
