//! Synthetic prompts: words drawn anew for every request, so that no prefix cache can answer for the model.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::config::Length;

/// Common short words: one token each in most vocabularies.
const WORDS: &str = "time year people way day man thing woman life child world school state family student group country \
problem hand part place case week company system program question work government number night point home water room \
mother area money story fact month lot right study book eye job word business issue side kind head house service friend \
father power hour game line end member law car city name team minute idea body back parent face others level office door \
health person art war history party result change morning reason research girl guy moment air teacher force foot boy age \
policy music market sense nation plan college interest death course someone experience behind reach local kill six remain \
effect use yeah suggest class control raise care perhaps little late hard field else pass former sell major sometimes \
require along development themselves report role better economic effort up decide rate strong possible heart drug show \
leader light voice wife whole police mind finally pull return free military price less according decision explain son hope \
even develop view relationship carry town road drive arm true federal break difference thank receive value international";

/// How words become tokens on the server, measured by the probe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Calibration {
    pub(crate) tokens_per_word: f64,
    /// Tokens of the chat template and the like.
    pub(crate) overhead: f64,
    pub(crate) measured: bool,
}

impl Calibration {
    /// Where a server tells no prompt tokens: about what English comes to.
    pub(crate) const ASSUMED: Self = Self { tokens_per_word: 1.3, overhead: 0.0, measured: false };

    /// From two prompts of known length and the tokens the server counted.
    pub(crate) fn from_probes(short: (usize, Option<u64>), long: (usize, Option<u64>)) -> Self {
        let (Some(few), Some(many)) = (short.1, long.1) else { return Self::ASSUMED };
        let slope = (many as f64 - few as f64) / (long.0 as f64 - short.0 as f64);
        if !(0.3..=10.0).contains(&slope) {
            return Self::ASSUMED;
        }
        Self { tokens_per_word: slope, overhead: (few as f64 - slope * short.0 as f64).max(0.0), measured: true }
    }

    pub(crate) fn words(self, tokens: u32) -> usize {
        ((f64::from(tokens) - self.overhead) / self.tokens_per_word).round().max(1.0) as usize
    }
}

/// Prompts and lengths of one seed: request `index` is always the same.
#[derive(Clone, Debug)]
pub(crate) struct Prompts {
    words: Vec<&'static str>,
    seed: u64,
}

impl Prompts {
    pub(crate) fn new(seed: u64) -> Self {
        Self { words: WORDS.split_ascii_whitespace().collect(), seed }
    }

    fn rng(&self, index: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed ^ index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// A prompt of exactly `count` words.
    pub(crate) fn words(&self, index: u64, count: usize) -> String {
        let mut rng = self.rng(index);
        let mut text = String::with_capacity(count * 7);
        for at in 0..count {
            if at > 0 {
                text.push(' ');
            }
            text.push_str(self.words[rng.random_range(0..self.words.len())]);
        }
        text
    }

    /// The prompt and `max_tokens` of request `index`.
    pub(crate) fn draw(&self, index: u64, input: Length, output: Length, scale: Calibration) -> (String, u32) {
        // A stream of its own: the lengths must not depend on how long the prompt is.
        let mut rng = self.rng(index ^ (1 << 63));
        let tokens = rng.random_range(input.low..=input.high);
        let max_tokens = rng.random_range(output.low..=output.high);
        (self.words(index, scale.words(tokens)), max_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::{Calibration, Prompts};
    use crate::config::Length;

    #[test]
    fn the_same_seed_draws_the_same_requests_and_no_two_share_a_prefix() {
        let length = Length { low: 50, high: 90 };
        let draw = |seed, index| Prompts::new(seed).draw(index, length, length, Calibration::ASSUMED);
        assert_eq!(draw(1, 5), draw(1, 5));
        assert_ne!(draw(1, 5), draw(2, 5));
        let starts: std::collections::HashSet<String> =
            (0..500).map(|index| draw(1, index).0.split(' ').take(6).collect()).collect();
        assert_eq!(starts.len(), 500);
    }

    #[test]
    fn two_probes_tell_the_template_from_the_words() {
        let scale = Calibration::from_probes((50, Some(70)), (200, Some(220)));
        assert_eq!((scale.tokens_per_word, scale.overhead, scale.measured), (1.0, 20.0, true));
        assert_eq!(scale.words(120), 100);
        // A server that always says the same, or nothing.
        assert_eq!(Calibration::from_probes((50, Some(9)), (200, Some(9))), Calibration::ASSUMED);
        assert_eq!(Calibration::from_probes((50, None), (200, Some(9))), Calibration::ASSUMED);
    }
}
