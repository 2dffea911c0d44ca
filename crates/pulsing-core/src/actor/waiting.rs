//! The calls that wait in one mailbox, and are counted as long as they do.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::call::Call;
use crate::observe::Metrics;

/// Calls in their order of arrival. However one leaves, the node's `mailbox_messages` no longer has it. One that was given up
/// leaves when it is come upon.
pub(super) struct Waiting {
    calls: VecDeque<Call>,
    metrics: Arc<Metrics>,
}

impl Waiting {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { calls: VecDeque::new(), metrics }
    }

    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(super) fn get(&self, at: usize) -> Option<&Call> {
        self.calls.get(at)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Call> {
        self.calls.iter()
    }

    pub(super) fn push(&mut self, call: Call) {
        self.calls.push_back(call);
        self.metrics.mailbox_messages.add(1);
    }

    pub(super) fn pop(&mut self) -> Option<Call> {
        let call = self.calls.pop_front()?;
        self.left(1);
        Some(call)
    }

    /// Takes out all calls.
    pub(super) fn take(&mut self) -> VecDeque<Call> {
        self.left(self.calls.len());
        std::mem::take(&mut self.calls)
    }

    /// Takes out the calls whose callers have given up.
    pub(super) fn take_given_up(&mut self) -> VecDeque<Call> {
        let (gone, kept): (VecDeque<_>, VecDeque<_>) =
            self.calls.drain(..).partition(|call| call.responder.cancel_signal().is_cancelled());
        self.calls = kept;
        self.left(gone.len());
        gone
    }

    fn left(&self, n: usize) {
        self.metrics.mailbox_messages.add(-(n as i64));
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.take();
    }
}
