//! Leave to write to sockets from a thread that is not the network's.
//!
//! A message that is handed to the network's threads costs two wake-ups, one that its own thread writes costs a system call:
//! better for a message that is alone, worse for one of many, which would share the two wake-ups. Only the thread knows
//! which it has. An event loop gives itself leave for each turn in which little happens.

use std::cell::Cell;

thread_local! {
    static LEFT: Cell<u32> = const { Cell::new(0) };
}

/// Longest frame that is written so, in bytes: copying more costs a thread more than handing it over.
const LONGEST: usize = 8 << 10;

/// Lets this thread write its next `frames` small frames itself where it can do so at once. Replaces what was left.
pub fn allow(frames: u32) {
    LEFT.set(frames);
}

/// Whether this thread writes a frame of `len` bytes itself.
pub(super) fn take(len: usize) -> bool {
    let left = LEFT.get();
    if left == 0 || len > LONGEST {
        return false;
    }
    LEFT.set(left - 1);
    true
}
