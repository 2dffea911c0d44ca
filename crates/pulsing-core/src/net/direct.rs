//! Writing to sockets from a thread that is not the network's.
//!
//! A message that is handed to the network's threads costs two wake-ups, one that its own thread writes costs a system call.
//! An event loop does it itself: the first message of a turn in which little happens goes out at once; those of a busy turn
//! are held back, and go out some at a time ([`BATCH`]) and at the turn's end. A loop that does not come back to what it holds
//! is not waited for: the lane's own task looks after it ([`lane`](super::lane)).

use std::cell::{Cell, RefCell};
use std::sync::Arc;

thread_local! {
    static LEFT: Cell<u32> = const { Cell::new(0) };
    static IN_TURN: Cell<bool> = const { Cell::new(false) };
    static KEEPER: RefCell<Option<Arc<dyn Keeper>>> = const { RefCell::new(None) };
    static HELD: RefCell<Vec<Arc<dyn Held>>> = const { RefCell::new(Vec::new()) };
}

/// Longest frame that is written so, in bytes: copying more costs a thread more than handing it over.
const LONGEST: usize = 8 << 10;
/// Frames that are held back at most: the peer has something to do while the rest is made.
pub(super) const BATCH: usize = 16;

/// Who has a thread that comes back: an event loop.
pub trait Keeper: Send + Sync {
    /// Has the thread call [`begin`] and [`flush`] soon. Called on that thread.
    fn come_back(&self);
}

/// What holds frames back.
pub(super) trait Held {
    /// Writes them.
    fn release(&self);
}

/// How a frame leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Written at once.
    Now,
    /// Held back and written by this thread.
    Soon,
    /// Written by the lane's task.
    Task,
}

/// A turn of this thread's loop begins: it writes the first `frames` small frames at once, and holds back others until
/// [`flush`]. Replaces what was left of an earlier turn.
pub fn begin(keeper: &Arc<dyn Keeper>, frames: u32) {
    LEFT.set(frames);
    IN_TURN.set(true);
    KEEPER.with_borrow_mut(|kept| {
        if !kept.as_ref().is_some_and(|kept| Arc::ptr_eq(kept, keeper)) {
            *kept = Some(Arc::clone(keeper));
        }
    });
}

/// Writes what this thread holds back.
pub fn flush() {
    IN_TURN.set(false);
    let held = HELD.take();
    for lane in &held {
        lane.release();
    }
}

/// This thread has no loop any more, or another.
pub fn leave() {
    flush();
    LEFT.set(0);
    KEEPER.set(None);
}

/// How this thread sends a frame of `len` bytes.
pub(super) fn way(len: usize) -> Way {
    if len > LONGEST {
        return Way::Task;
    }
    let left = LEFT.get();
    if left > 0 {
        LEFT.set(left - 1);
        return Way::Now;
    }
    if KEEPER.with_borrow(Option::is_some) { Way::Soon } else { Way::Task }
}

/// This thread holds something back.
pub(super) fn hold(lane: Arc<dyn Held>) {
    let first = HELD.with_borrow_mut(|held| {
        held.push(lane);
        held.len() == 1
    });
    if first && !IN_TURN.get() {
        let keeper = KEEPER.with_borrow(Clone::clone);
        if let Some(keeper) = keeper {
            keeper.come_back();
        }
    }
}
