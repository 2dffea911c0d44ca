//! A task that ends with what it belongs to.

use tokio::task::JoinHandle;

/// Aborts its task when dropped.
#[derive(Debug)]
pub struct Companion(JoinHandle<()>);

impl Companion {
    /// Takes the task over.
    pub fn new(task: JoinHandle<()>) -> Self {
        Self(task)
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        self.0.abort();
    }
}
