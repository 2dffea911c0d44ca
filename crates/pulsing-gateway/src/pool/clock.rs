//! The two clocks by which a Worker that hangs is told from one that is slow (S5).
//!
//! The heartbeat says that the Worker's process lives: reports come at least every 500 ms. Progress says that its engine
//! does: a report tells how long it has been since the last token. How long that may be is learned, because a long prompt
//! on a small machine takes minutes and is in order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::protocol::LoadReport;

/// How many times the longest wait expected a Worker may go without a token.
const MARGIN: f64 = 3.0;
/// Longest time without a token that is ever granted: half of the limit of a request, so that there is time to serve it
/// elsewhere.
pub(crate) const LONGEST: Duration = Duration::from_secs(300);
/// Added to every prompt's length in bytes: what a request costs before its first prompt token.
const BASE: f64 = 4096.0;
/// Prompt bytes a second that a Worker is taken to read before it has shown its speed: about 100 tokens, a small CPU.
const UNKNOWN_SPEED: f64 = 400.0;
/// What is left of an earlier, longer wait with each first token that came sooner.
const FADE: f64 = 0.9;

/// Least time that is given to an engine that has fallen silent.
const NOTICE: Duration = Duration::from_millis(250);

/// When a Worker hangs.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Silence after which it is not alive enough to be chosen. Default 1.5 s: three missed reports.
    pub silence: Duration,
    /// Least time without progress. Default 10 s.
    pub standstill: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { silence: Duration::from_millis(1500), standstill: Duration::from_secs(10) }
    }
}

/// Both clocks of one Worker.
#[derive(Debug)]
pub(super) struct Clocks {
    limits: Limits,
    born: Instant,
    /// Last report in milliseconds after `born` plus one; 0 = never.
    heard_at: AtomicU64,
    /// When it last sent something, or an actor said that its engine got on, in milliseconds after `born`.
    given_at: AtomicU64,
    /// Silence before this moment was this Router's own: its threads did not run.
    excused_at: AtomicU64,
    silent: AtomicBool,
    stuck: AtomicBool,
    learned: Mutex<Learned>,
}

#[derive(Debug, Default)]
struct Learned {
    /// Longest time to a first token lately, in seconds.
    longest: f64,
    /// Seconds a byte of prompt, `BASE` included; 0 = unknown.
    pace: f64,
    /// Requests without an answer.
    unanswered: u32,
    /// Since when there have been some, and none was answered.
    waiting_since: Option<Instant>,
    /// Milliseconds granted to requests without an answer, where that is more than the floor, with how many have it.
    granted: BTreeMap<u64, u32>,
}

impl Clocks {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            born: Instant::now(),
            heard_at: AtomicU64::new(0),
            given_at: AtomicU64::new(0),
            excused_at: AtomicU64::new(0),
            silent: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            learned: Mutex::default(),
        }
    }
    fn at(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.born).as_millis() as u64 + 1
    }

    /// Its reports have stopped.
    pub(super) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Acquire)
    }
    /// It has requests and does nothing for them.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Acquire)
    }
    /// How long ago the last report came.
    pub(super) fn since_heard(&self, now: Instant) -> Option<Duration> {
        let heard = self.heard_at.load(Ordering::Acquire);
        (heard != 0).then(|| Duration::from_millis(self.at(now).saturating_sub(heard)))
    }
    /// It has reported, and not too long ago to be believed.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        let heard = self.heard_at.load(Ordering::Acquire);
        heard != 0 && self.at(now).saturating_sub(heard) <= self.limits.silence.as_millis() as u64
    }

    /// A report came. True if it changes what is thought of the Worker.
    pub(super) fn heard(&self, report: &LoadReport, now: Instant) -> bool {
        self.heard_at.store(self.at(now), Ordering::Release);
        // What waits in an engine is in its hands, too, and so is what it was handed and does not show.
        let busy = report.running > 0 || report.waiting > 0 || self.is_overdue(now);
        let stuck = busy && report.progress_age_ms > self.patience().as_millis() as u64;
        let changed = self.stuck.swap(stuck, Ordering::AcqRel) != stuck;
        // Behind a Worker that stands for a server it is the server that must be heard of.
        let silent = report.answer_age_ms > self.limits.silence.as_millis() as u64;
        self.silent.swap(silent, Ordering::AcqRel) != silent || changed
    }
    /// Looks at the clock. True if the Worker has fallen silent. One that never reports is known by other things.
    pub(super) fn tick(&self, now: Instant) -> bool {
        let heard = self.heard_at.load(Ordering::Acquire);
        if heard == 0 {
            return false;
        }
        let since = heard.max(self.excused_at.load(Ordering::Acquire));
        self.at(now).saturating_sub(since) > self.limits.silence.as_millis() as u64
            && !self.silent.swap(true, Ordering::AcqRel)
    }
    /// This Router was not running: nothing can be said of the time until now.
    pub(super) fn excuse(&self, now: Instant) {
        self.excused_at.store(self.at(now), Ordering::Release);
    }
    /// What was learned is of a process that is no more.
    pub(super) fn forget(&self) {
        let mut learned = self.learned.lock();
        (learned.longest, learned.pace) = (0.0, 0.0);
    }

    /// How long a request may be given when it cannot be told whether its Worker hangs; `None` where nothing was learned.
    pub(super) fn notice(&self) -> Option<Duration> {
        let longest = self.learned.lock().longest;
        (longest > 0.0).then(|| Duration::from_secs_f64(longest * MARGIN).max(NOTICE))
    }
    /// Something came of it.
    pub(super) fn gave(&self, now: Instant) {
        self.given_at.fetch_max(now.saturating_duration_since(self.born).as_millis() as u64, Ordering::Relaxed);
    }
    /// When it last did.
    pub(super) fn given_at(&self) -> Instant {
        self.born + Duration::from_millis(self.given_at.load(Ordering::Relaxed))
    }
    /// How long the Worker may go without a token now.
    pub(super) fn patience(&self) -> Duration {
        let learned = self.learned.lock();
        let granted = Duration::from_millis(learned.granted.keys().next_back().copied().unwrap_or(0));
        let longest = Duration::from_secs_f64(learned.longest * MARGIN);
        self.limits.standstill.max(granted).max(longest).min(LONGEST)
    }
    /// Some request has had no answer for longer than that, and no other one has had one meanwhile.
    fn is_overdue(&self, now: Instant) -> bool {
        let since = self.learned.lock().waiting_since;
        since.is_some_and(|since| now.saturating_duration_since(since) > self.patience())
    }
    /// Grants a request of `bytes`, sent now, its time; `waited` is how long it has waited elsewhere, where the same was tried.
    pub(super) fn grant(&self, bytes: usize, waited: Duration, now: Instant) -> Grant {
        let mut learned = self.learned.lock();
        learned.unanswered += 1;
        learned.waiting_since.get_or_insert(now);
        let cost = BASE + bytes as f64;
        let expected = if learned.pace > 0.0 { learned.pace * cost * MARGIN } else { bytes as f64 / UNKNOWN_SPEED };
        let granted = Duration::from_secs_f64(expected).max(waited * 2).min(LONGEST);
        if granted <= self.limits.standstill {
            return Grant(0);
        }
        let granted = Grant(granted.as_millis() as u64);
        *learned.granted.entry(granted.0).or_insert(0) += 1;
        granted
    }
    /// The request has begun to be answered, or has left.
    pub(super) fn release(&self, grant: Grant) {
        let mut learned = self.learned.lock();
        learned.unanswered = learned.unanswered.saturating_sub(1);
        if learned.unanswered == 0 {
            learned.waiting_since = None;
        }
        if let Some(count) = learned.granted.get_mut(&grant.0) {
            *count -= 1;
            if *count == 0 {
                learned.granted.remove(&grant.0);
            }
        }
    }
    /// The first token of a request of `bytes` came now, after `took`.
    pub(super) fn learn(&self, bytes: usize, took: Duration, now: Instant) {
        let took = took.as_secs_f64();
        let pace = took / (BASE + bytes as f64);
        let mut learned = self.learned.lock();
        learned.longest = took.max(learned.longest * FADE);
        learned.pace = pace.max(learned.pace * FADE);
        learned.waiting_since = learned.waiting_since.map(|_| now);
    }
}

/// Time granted to one request, in milliseconds; 0 = no more than any has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant(u64);

#[cfg(test)]
mod tests {
    use super::*;

    fn report(running: u32, age: u64) -> LoadReport {
        LoadReport { running, progress_age_ms: age * 1000, ..LoadReport::default() }
    }
    fn after(clocks: &Clocks, millis: u64) -> Instant {
        clocks.born + Duration::from_millis(millis)
    }

    #[test]
    fn test_s5_silence_is_told_once_and_ends_with_a_report() {
        let clocks = Clocks::new(Limits::default());
        assert!(!clocks.tick(after(&clocks, 9000)), "who never reported is not silent");
        clocks.heard(&report(0, 0), after(&clocks, 10_000));
        assert!(!clocks.tick(after(&clocks, 11_500)));
        assert!(clocks.tick(after(&clocks, 11_501)));
        assert!(!clocks.tick(after(&clocks, 11_600)), "told already");
        assert!(clocks.is_silent());
        assert!(clocks.heard(&report(0, 0), after(&clocks, 12_000)));
        assert!(!clocks.is_silent());
    }

    #[test]
    fn test_s5_a_server_that_does_not_answer_its_worker_is_silent() {
        let clocks = Clocks::new(Limits::default());
        let heard = |answer_age_ms| {
            clocks.heard(&LoadReport { answer_age_ms, ..report(0, 0) }, clocks.born);
            clocks.is_silent()
        };
        assert!(!heard(0) && !heard(1500) && heard(1501) && !heard(0));
        assert_eq!(clocks.notice(), None);
        clocks.learn(10, Duration::from_millis(20), clocks.born);
        assert_eq!(clocks.notice(), Some(NOTICE));
        clocks.learn(10, Duration::from_secs(4), clocks.born);
        assert_eq!(clocks.notice(), Some(Duration::from_secs(12)));
    }

    #[test]
    fn test_s5_a_router_that_slept_blames_nobody() {
        let clocks = Clocks::new(Limits::default());
        clocks.heard(&report(0, 0), after(&clocks, 0));
        clocks.excuse(after(&clocks, 9000));
        assert!(!clocks.tick(after(&clocks, 10_400)));
        assert!(clocks.tick(after(&clocks, 10_600)));
    }

    #[test]
    fn test_s5_a_request_that_an_engine_does_not_show_counts_from_when_it_was_handed_over() {
        let clocks = Clocks::new(Limits::default());
        let stuck = |waiting, age: u64, second: u64| {
            let report = LoadReport { waiting, progress_age_ms: age * 1000, ..LoadReport::default() };
            clocks.heard(&report, after(&clocks, second * 1000));
            clocks.is_stuck()
        };
        assert!(!stuck(0, 3600, 0), "idle for an hour");
        assert!(!stuck(1, 9, 0) && stuck(1, 11, 0), "what waits in the engine is in its hands");
        let first = clocks.grant(10, Duration::ZERO, after(&clocks, 1000));
        assert!(!stuck(0, 3600, 11) && stuck(0, 3600, 12), "not a moment after it was handed over");
        assert!(!stuck(0, 9, 12), "the engine gets on");
        let second = clocks.grant(10, Duration::ZERO, after(&clocks, 12_000));
        clocks.release(first);
        clocks.learn(10, Duration::from_millis(50), after(&clocks, 13_000));
        assert!(!stuck(0, 3600, 23) && stuck(0, 3600, 24), "another one was answered");
        clocks.release(second);
        assert!(!stuck(0, 3600, 99), "idle");
    }

    #[test]
    fn test_s5_slow_is_not_hung() {
        let clocks = Clocks::new(Limits::default());
        let stuck = |age| {
            clocks.heard(&report(1, age), clocks.born);
            clocks.is_stuck()
        };
        assert!(!stuck(9), "9 s for a first token under load");
        assert!(stuck(11));
        clocks.heard(&report(0, 99), clocks.born);
        assert!(!clocks.is_stuck(), "idle");

        let long = clocks.grant(200_000, Duration::ZERO, clocks.born);
        assert!(!stuck(299) && stuck(301), "a long prompt where nothing is known yet");
        clocks.release(long);
        clocks.learn(200_000, Duration::from_secs(40), clocks.born);
        assert!(!stuck(100) && stuck(130), "three times what was seen");
        for _ in 0..40 {
            clocks.learn(100, Duration::from_millis(50), clocks.born);
        }
        assert!(stuck(11), "seen long ago");
        assert!(clocks.learned.lock().granted.is_empty());

        let again = clocks.grant(100, Duration::from_secs(15), clocks.born);
        assert!(!stuck(29) && stuck(31), "twice as long as it has waited elsewhere, or it would wander for ever");
        clocks.release(again);
        assert!(stuck(11));
    }
}
