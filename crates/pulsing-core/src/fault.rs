//! What a panic in a callee's code becomes: an error of the call that met it (R1, R7).
//!
//! While a panic unwinds, the calls that the code held are dropped unanswered, and nobody knows the panic's words yet. So they
//! wait on this thread until [`catch`] has them. A panic that nobody catches here, as in a task that the callee spawned, is
//! told without its words.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::call::{ReplyEvent, ReplySink};
use crate::error::{AppError, Error};

thread_local! {
    /// Sinks of calls that were dropped while a panic unwound; `None` outside of [`catch`].
    static UNANSWERED: RefCell<Option<Vec<Arc<dyn ReplySink>>>> = const { RefCell::new(None) };
}

/// Runs `work`, which is some callee's code. A panic in it is the error of the calls that it held.
///
/// # Errors
/// The panic itself; [`words`] reads it.
pub(crate) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Box<dyn Any + Send>> {
    // Nested where one actor's code calls another's endpoint on the spot.
    let outer = UNANSWERED.replace(Some(Vec::new()));
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let unanswered = UNANSWERED.replace(outer).unwrap_or_default();
    let text = outcome.as_ref().err().map_or("it was caught by the callee", |panic| words(&**panic));
    for sink in unanswered {
        sink.event(ReplyEvent::Error(panicked(text)));
    }
    outcome
}

/// What a panic said.
pub(crate) fn words(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("it panicked without words")
}

/// The error of a call whose callee panicked.
pub(crate) fn panicked(text: &str) -> Error {
    Error::App(Box::new(AppError { type_name: "panic".to_owned(), message: text.to_owned(), ..AppError::default() }))
}

/// Ends a call that its callee dropped without an answer: with `error`, or with the panic that dropped it.
pub(crate) fn unanswered(sink: &Arc<dyn ReplySink>, error: Error) {
    if !std::thread::panicking() {
        sink.event(ReplyEvent::Error(error));
        return;
    }
    let kept = UNANSWERED.try_with(|held| held.borrow_mut().as_mut().map(|held| held.push(Arc::clone(sink))));
    if !matches!(kept, Ok(Some(()))) {
        sink.event(ReplyEvent::Error(panicked("the callee panicked; the log of its node has the words")));
    }
}
