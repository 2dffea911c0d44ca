//! Membership and registry traffic: one connection a direction and peer, dialled on demand, closed when idle.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::conn::{self, Conn, DialError};
use super::handshake::Lane;
use super::link::{LinkConfig, LinkEnd};
use super::reader::FrameReader;
use super::wire::{EmptyHeader, Kind, encode};
use crate::cluster::Identity;
use crate::error::{Error, Result};
use crate::id::NodeId;

/// A control connection without traffic for this long is closed; at most a few dozen peers are probed in that time.
const IDLE: Duration = Duration::from_secs(30);
/// Frames waiting for one peer; more are dropped, as a datagram network would: gossip repeats and roots repair.
const QUEUE: usize = 1024;
/// A registry delta is the largest control message: 100,000 names in one are about 10 MB.
const MAX_BODY: usize = 256 << 20;

/// What control connections tell the membership driver.
pub enum ControlEvent {
    /// A frame.
    Message {
        /// Who sent it.
        from: Identity,
        /// What it is.
        kind: Kind,
        /// Its header.
        header: Bytes,
        /// Its body.
        body: Bytes,
    },
    /// A connection with this peer ended, and not for being idle.
    Ended(NodeId, LinkEnd),
}

/// The sending side: one queue a peer.
pub struct Control {
    lanes: Arc<Mutex<HashMap<NodeId, mpsc::Sender<Frame>>>>,
    tasks: Mutex<JoinSet<()>>,
    config: LinkConfig,
    events: mpsc::UnboundedSender<ControlEvent>,
}

struct Frame {
    head: Bytes,
    body: Bytes,
}

impl Control {
    /// Sends with these credentials; what happens to connections goes to `events`.
    pub fn new(config: LinkConfig, events: mpsc::UnboundedSender<ControlEvent>) -> Self {
        Self { lanes: Arc::default(), tasks: Mutex::default(), config, events }
    }

    /// Queues a frame for a peer, dialling it if need be.
    pub fn send(&self, to: Identity, kind: Kind, header: &impl Message, body: Bytes) {
        let mut frame = Frame { head: encode(kind, header, body.len()), body };
        let mut lanes = self.lanes.lock();
        if let Some(tx) = lanes.get(&to.node) {
            match tx.try_send(frame) {
                Ok(()) => return,
                Err(mpsc::error::TrySendError::Full(_)) => {
                    tracing::debug!(peer = %to.addr, "control queue full, frame dropped");
                    return;
                }
                Err(mpsc::error::TrySendError::Closed(back)) => frame = back,
            }
        }
        let (tx, rx) = mpsc::channel(QUEUE);
        // A fresh queue has room for its first frame.
        let _ = tx.try_send(frame);
        lanes.insert(to.node, tx);
        let (config, events) = (self.config.clone(), self.events.clone());
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            if let Some(end) = run(to, rx, config).await {
                let _ = events.send(ControlEvent::Ended(to.node, end));
            }
        });
    }

    /// Forgets a peer that is down: what is queued for it is dropped.
    pub fn forget(&self, node: NodeId) {
        self.lanes.lock().remove(&node);
    }

    /// Sends what is queued, for `limit` at most, and closes every connection.
    pub async fn close(&self, limit: Duration) {
        self.lanes.lock().clear();
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        let _ = tokio::time::timeout(limit, async { while tasks.join_next().await.is_some() {} }).await;
    }
}

async fn run(to: Identity, mut queue: mpsc::Receiver<Frame>, config: LinkConfig) -> Option<LinkEnd> {
    let (stream, peer) = match conn::dial(to.addr, Lane::Control, 0, &config).await {
        Ok(dialled) => dialled,
        Err(DialError { error, refused }) => {
            tracing::debug!(peer = %to.addr, %error, "cannot reach a member");
            return Some(if refused { LinkEnd::Refused } else { LinkEnd::Broken });
        }
    };
    if peer.node != to.node {
        return Some(LinkEnd::Refused);
    }
    let (mut reading, mut writing) = stream.halves();
    let mut nothing = [0u8; 16];
    loop {
        let frame = tokio::select! {
            biased;
            frame = queue.recv() => frame,
            // The peer never sends here: any end of this read is the end of the connection.
            _ = reading.read(&mut nothing) => return Some(LinkEnd::Broken),
            () = tokio::time::sleep(IDLE) => None,
        };
        let Some(Frame { head, body }) = frame else {
            let _ = writing.write_all(&encode(Kind::Bye, &EmptyHeader {}, 0)).await;
            let _ = writing.shutdown().await;
            return None;
        };
        let written = async {
            writing.write_all(&head).await?;
            writing.write_all(&body).await
        };
        if written.await.is_err() {
            return Some(LinkEnd::Broken);
        }
        config.metrics.bytes_out.add((head.len() + body.len()) as u64);
    }
}

/// Serves a control connection that a peer dialled.
pub async fn serve(peer: Identity, stream: Conn, events: mpsc::UnboundedSender<ControlEvent>, config: LinkConfig) {
    let mut reader = FrameReader::new(stream);
    match read(peer, &mut reader, &events).await {
        Ok(true) => {}
        Ok(false) => {
            let _ = events.send(ControlEvent::Ended(peer.node, LinkEnd::Broken));
        }
        Err(error) => {
            tracing::debug!(peer = %peer.addr, %error, "control connection from a peer broke");
            let _ = events.send(ControlEvent::Ended(peer.node, LinkEnd::Broken));
        }
    }
    config.metrics.bytes_in.add(reader.read);
}

/// True when the peer said goodbye.
async fn read(
    peer: Identity,
    reader: &mut FrameReader<impl AsyncRead + Unpin>,
    events: &mpsc::UnboundedSender<ControlEvent>,
) -> Result<bool> {
    while let Some(head) = reader.next().await? {
        if head.kind == Kind::Bye {
            return Ok(true);
        }
        if head.body > MAX_BODY {
            return Err(Error::Protocol(format!("control frame of {} bytes", head.body)));
        }
        let body = reader.take(head.body).await?;
        let message = ControlEvent::Message { from: peer, kind: head.kind, header: head.header, body };
        if events.send(message).is_err() {
            return Ok(true);
        }
    }
    Ok(false)
}
