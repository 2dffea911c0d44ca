//! Waiting for a call in Rust: a sink that feeds a future.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::call::{CallHandle, Reply, ReplyEvent, ReplySink};
use crate::error::{Error, Result};
use crate::stream::ItemStream;

struct ChannelSink(mpsc::UnboundedSender<ReplyEvent>);

impl ReplySink for ChannelSink {
    fn event(&self, event: ReplyEvent) {
        let _ = self.0.send(event);
    }
}

/// Cancels the callee when the caller stops waiting before the first event.
struct CancelOnDrop(Mutex<Option<CallHandle>>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(handle) = self.0.lock().take() {
            handle.cancel();
        }
    }
}

/// Makes a call with `dispatch` and waits for its reply.
pub(super) async fn wait(window: u32, dispatch: impl FnOnce(Arc<dyn ReplySink>) -> CallHandle) -> Result<Reply> {
    let (tx, mut rx) = mpsc::unbounded_channel();
    let handle = dispatch(Arc::new(ChannelSink(tx)));
    let guard = CancelOnDrop(Mutex::new(Some(handle.clone())));
    let first = rx.recv().await;
    guard.0.lock().take();
    match first {
        Some(ReplyEvent::Value(payload)) => Ok(Reply::Value(payload)),
        Some(ReplyEvent::StreamStart) => Ok(Reply::Stream(ItemStream::new(rx, handle, window))),
        Some(ReplyEvent::Error(error)) => Err(error),
        Some(ReplyEvent::Item(_) | ReplyEvent::End) => {
            Err(Error::Protocol("a stream item came before its start".into()))
        }
        None => Err(Error::ShutDown),
    }
}
