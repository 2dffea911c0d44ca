//! Work on large bodies, off the threads that membership and all other requests share.

/// A body larger than this, in bytes, takes milliseconds to be read through.
const LARGE: usize = 1 << 20;

/// What `work` on a body of `size` bytes comes to: done at once, or on a thread of its own if it is a large one. `None` if
/// the work could not be ended, as when the process ends.
pub(crate) async fn aside<T: Send + 'static>(size: usize, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if size > LARGE { tokio::task::spawn_blocking(work).await.ok() } else { Some(work()) }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn only_large_bodies_are_worked_on_elsewhere() {
        let here = thread::current().id();
        let on = || thread::current().id();
        assert_eq!(aside(LARGE, on).await, Some(here));
        assert!(aside(LARGE + 1, on).await.is_some_and(|there| there != here));
    }
}
