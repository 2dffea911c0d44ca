//! The stamps of one request while it runs, and the record it becomes.

use crate::chunk::{Chunk, Usage};
use crate::record::{Outcome, Record, Source};

#[derive(Clone, Copy, Debug)]
struct TokenEvent {
    at: u64,
    /// Length of its text; the only hint to how many tokens it holds when usage comes at the end alone.
    chars: u32,
    /// Running usage after this event.
    cumulative: Option<u64>,
}

/// The stamps of one request, microseconds of the run's time line.
#[derive(Debug, Default)]
pub struct Trace {
    /// When it was due.
    pub sched: u64,
    /// When the client took it up.
    pub start: u64,
    /// First byte handed to the socket.
    pub send: Option<u64>,
    /// How long connecting took.
    pub connect_us: Option<u64>,
    /// Head of the answer.
    pub head: Option<u64>,
    /// End mark or end of the body.
    pub end: Option<u64>,
    /// `max_tokens` of the request.
    pub asked: u32,
    /// Whether it was sent again on a new connection.
    pub resent: bool,
    events: Vec<TokenEvent>,
    out: Option<u64>,
    token_reads: u32,
    usage: Usage,
    usage_is_final: bool,
    finished: bool,
    done: bool,
    text: Option<String>,
}

impl Trace {
    /// A request due at `sched` and taken up at `start`; `keep_text` keeps its text for a tokenizer.
    pub fn new(sched: u64, start: u64, keep_text: bool) -> Self {
        Self { sched, start, text: keep_text.then(String::new), ..Self::default() }
    }

    /// Whether a token came.
    pub fn has_first(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether the end mark came.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Whether the answer said it is complete: by the end mark, or by a reason to finish.
    pub fn is_complete(&self) -> bool {
        self.done || self.finished
    }

    /// The first token's stamp.
    pub fn first(&self) -> Option<u64> {
        self.events.first().map(|event| event.at)
    }

    /// Takes an event that was read at `at`.
    pub fn take(&mut self, chunk: &Chunk, at: u64) {
        if chunk.done {
            self.done = true;
            self.end = Some(at);
            return;
        }
        self.finished |= chunk.finished;
        let before = self.usage.completion;
        if let Some(usage) = chunk.usage {
            self.usage = Usage {
                prompt: usage.prompt.or(self.usage.prompt),
                completion: usage.completion.or(self.usage.completion),
                reasoning: usage.reasoning.or(self.usage.reasoning),
                cached: usage.cached.or(self.usage.cached),
            };
            self.usage_is_final = !chunk.has_choices || chunk.finished;
        }
        if !chunk.has_token() {
            return;
        }
        let cumulative = chunk.usage.and_then(|usage| usage.completion).filter(|now| *now > before.unwrap_or(0));
        if self.events.last().is_none_or(|event| event.at != at) {
            self.token_reads += 1;
        }
        let chars = chunk.visible.chars().count() + chunk.reasoning.chars().count();
        self.events.push(TokenEvent { at, chars: u32::try_from(chars).unwrap_or(u32::MAX), cumulative });
        if self.out.is_none() && !chunk.visible.is_empty() {
            self.out = Some(at);
        }
        if let Some(text) = &mut self.text {
            text.push_str(&chunk.reasoning);
            text.push_str(&chunk.visible);
        }
    }

    /// Ends the request. Tokens after `deadline` do not count into its point's throughput.
    pub fn finish(self, outcome: Outcome, closed: u64, deadline: u64) -> Record {
        let (tokens, source) = self.count();
        let shares = self.tokens_per_event(tokens, source);
        let counted: u64 = shares.iter().sum();
        let early: u64 =
            self.events.iter().zip(&shares).filter(|(event, _)| event.at <= deadline).map(|(_, share)| *share).sum();
        let in_window = if counted == 0 { 0.0 } else { early as f64 / counted as f64 };
        let gaps = self
            .events
            .windows(2)
            .map(|pair| u32::try_from(pair[1].at.saturating_sub(pair[0].at)).unwrap_or(u32::MAX))
            .collect();
        let needs_text = matches!(source, Source::Events);
        Record {
            sched: self.sched,
            start: self.start,
            send: self.send,
            connect_us: self.connect_us,
            head: self.head,
            first: self.first(),
            out: self.out,
            last: self.events.last().map(|event| event.at),
            end: self.end,
            closed,
            tokens,
            source,
            gaps,
            in_window,
            prompt: self.usage.prompt,
            cached: self.usage.cached,
            reasoning: self.usage.reasoning,
            asked: self.asked,
            token_reads: self.token_reads,
            missing_done: outcome == Outcome::Ok && !self.done,
            resent: self.resent,
            outcome,
            text: self.text.filter(|_| needs_text),
        }
    }

    fn count(&self) -> (u64, Source) {
        match self.usage.completion {
            // A usage of 0 beside text is a server that does not count.
            Some(tokens) if tokens > 0 => {
                (tokens, if self.usage_is_final { Source::Usage } else { Source::CumulativeUsage })
            }
            _ if self.events.is_empty() => (0, Source::None),
            _ => (self.events.len() as u64, Source::Events),
        }
    }

    /// How many tokens each event holds; sums to `tokens`.
    ///
    /// Running usage says it exactly. With a total alone it is shared out by length of text, at least one each; with fewer
    /// tokens than events (a server that splits characters), the last ones get none.
    fn tokens_per_event(&self, tokens: u64, source: Source) -> Vec<u64> {
        let n = self.events.len();
        if source == Source::Events || n as u64 == tokens {
            return vec![1; n];
        }
        if tokens < n as u64 {
            return (0..n as u64).map(|at| u64::from(at < tokens)).collect();
        }
        if self.events.iter().all(|event| event.cumulative.is_some()) {
            let mut before = 0;
            let mut shares: Vec<u64> = self
                .events
                .iter()
                .filter_map(|event| event.cumulative)
                .map(|now| now - std::mem::replace(&mut before, now))
                .collect();
            // A final usage may count an end token that no event showed.
            if let Some(last) = shares.last_mut() {
                *last += tokens.saturating_sub(before);
            }
            return shares;
        }
        share_out(tokens, &self.events.iter().map(|event| u64::from(event.chars.max(1))).collect::<Vec<_>>())
    }
}

/// Shares `total >= weights.len()` in proportion to `weights`, at least 1 each, largest remainders first.
fn share_out(total: u64, weights: &[u64]) -> Vec<u64> {
    let sum: u64 = weights.iter().sum::<u64>().max(1);
    let ideal: Vec<f64> = weights.iter().map(|weight| total as f64 * *weight as f64 / sum as f64).collect();
    let mut shares: Vec<u64> = ideal.iter().map(|value| (value.floor() as u64).max(1)).collect();
    let mut given: u64 = shares.iter().sum();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| (ideal[*b] - shares[*b] as f64).total_cmp(&(ideal[*a] - shares[*a] as f64)));
    let mut at = 0;
    while given < total && !order.is_empty() {
        shares[order[at % order.len()]] += 1;
        given += 1;
        at += 1;
    }
    // The floor of one each may have given too much; the largest shares give it back.
    while given > total {
        match (0..shares.len()).filter(|at| shares[*at] > 1).max_by(|a, b| shares[*a].cmp(&shares[*b])) {
            Some(at) => shares[at] -= 1,
            None => break,
        }
        given -= 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::share_out;

    #[test]
    fn a_total_is_shared_out_by_length_of_text_with_at_least_one_each() {
        assert_eq!(share_out(6, &[4, 4, 14, 5]), [1, 1, 3, 1]);
        assert_eq!(share_out(4, &[1, 100, 1, 1]), [1, 1, 1, 1]);
        assert_eq!(share_out(5, &[1, 1000]), [1, 4]);
        for total in 7..200 {
            assert_eq!(share_out(total, &[3, 9, 1, 1, 40, 2, 2]).iter().sum::<u64>(), total);
        }
    }
}
