//! How the last actors of a node ended, for watches that come after them (R9).

use std::collections::VecDeque;

use super::Reason;
use crate::id::ActorId;

/// Ends that are remembered.
const REMEMBERED: usize = 4096;
/// Bytes of text, such as the errors that actors failed with, that are remembered with them.
const TEXT: usize = 1 << 20;

/// The last ends, oldest first: the oldest are forgotten for those that come.
///
/// A list that is searched, not a table: late watches are rare, and a table takes five times the memory, doubling it again
/// and again for what comes and goes.
#[derive(Default)]
pub(super) struct Ends {
    last: VecDeque<(ActorId, Reason)>,
    /// Bytes of text in them.
    text: usize,
}

impl Ends {
    /// Remembers an end.
    pub(super) fn push(&mut self, actor: ActorId, reason: Reason) {
        self.text += reason.error().len();
        while self.last.len() >= REMEMBERED || (self.text > TEXT && !self.last.is_empty()) {
            if let Some((_, oldest)) = self.last.pop_front() {
                self.text -= oldest.error().len();
            }
        }
        self.last.push_back((actor, reason));
    }

    /// How an actor ended, if that is remembered.
    pub(super) fn of(&self, actor: ActorId) -> Option<Reason> {
        self.last.iter().rev().find(|(id, _)| *id == actor).map(|(_, reason)| reason.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(len: usize) -> Reason {
        Reason::Failed { error: "x".repeat(len) }
    }

    #[test]
    fn the_last_ends_are_remembered_in_memory_of_one_size() {
        let mut ends = Ends::default();
        for n in 0..REMEMBERED as u128 {
            ends.push(ActorId(n), Reason::Killed);
        }
        let room = ends.last.capacity();
        for n in 0..3 * REMEMBERED as u128 {
            ends.push(ActorId(n), Reason::Stopped);
            assert_eq!(ends.of(ActorId(n)), Some(Reason::Stopped), "the later one counts");
        }
        assert_eq!(ends.last.len(), REMEMBERED);
        assert_eq!(ends.last.capacity(), room, "the first one too many took more room");
        let oldest = 2 * REMEMBERED as u128;
        assert_eq!((ends.of(ActorId(oldest - 1)), ends.of(ActorId(oldest))), (None, Some(Reason::Stopped)));
    }

    #[test]
    fn long_errors_are_remembered_for_fewer_actors() {
        let mut ends = Ends::default();
        for n in 0..100 {
            ends.push(ActorId(n), failed(TEXT / 10));
            assert!(ends.text <= TEXT);
        }
        assert_eq!((ends.last.len(), ends.of(ActorId(99))), (10, Some(failed(TEXT / 10))));
        // The last one is remembered whatever its size, and alone.
        ends.push(ActorId(100), failed(2 * TEXT));
        assert_eq!((ends.last.len(), ends.of(ActorId(100))), (1, Some(failed(2 * TEXT))));
        ends.push(ActorId(101), Reason::Stopped);
        assert_eq!((ends.last.len(), ends.text), (1, 0));
    }
}
