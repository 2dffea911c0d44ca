//! Membership and registry traffic: a connection each a direction and peer, dialled on demand, closed when idle.
//!
//! Two, so that no probe waits behind the names of a whole cluster (M5): not on the wire, and, since each has a queue of its
//! own at both ends, not in a process either.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
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
/// Lanes that one frame is offered to: one may close for being idle just then, more do so only where nothing runs.
const LANES_TRIED: usize = 3;
/// Registry frames of all peers that were read and wait for the driver; who sends more waits.
const INBOX: usize = 64;
/// The largest control message, of nodes that do not ship the registry in parts: 100,000 names in one are about 10 MB.
const MAX_BODY: usize = 256 << 20;

/// The two kinds of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Traffic {
    Membership,
    Registry,
}

impl Traffic {
    fn of(kind: Kind) -> Self {
        if matches!(kind, Kind::Delta | Kind::Digest | Kind::Root) { Self::Registry } else { Self::Membership }
    }
}

/// Where connections tell the driver what they read.
#[derive(Clone)]
pub struct Inbox {
    /// Membership traffic and the ends of connections.
    pub events: mpsc::UnboundedSender<ControlEvent>,
    registry: mpsc::Sender<ControlEvent>,
}

impl Inbox {
    /// An inbox, and its two ends for the driver: membership first.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<ControlEvent>, mpsc::Receiver<ControlEvent>) {
        let (events, membership) = mpsc::unbounded_channel();
        let (registry, names) = mpsc::channel(INBOX);
        (Self { events, registry }, membership, names)
    }

    /// False once nobody listens.
    async fn put(&self, kind: Kind, message: ControlEvent) -> bool {
        match Traffic::of(kind) {
            Traffic::Membership => self.events.send(message).is_ok(),
            Traffic::Registry => self.registry.send(message).await.is_ok(),
        }
    }
}

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

/// In an order of their own: they end in it, and what their ends lead to is part of a run that a seed repeats.
type Lanes = BTreeMap<(NodeId, Traffic), mpsc::Sender<Frame>>;

/// The sending side: two queues a peer.
pub struct Control {
    lanes: Arc<Mutex<Lanes>>,
    tasks: Mutex<JoinSet<()>>,
    config: LinkConfig,
    events: mpsc::UnboundedSender<ControlEvent>,
}

struct Frame {
    head: Bytes,
    body: Bytes,
    /// Given back when the frame is written, or dropped.
    place: Option<OwnedSemaphorePermit>,
}

impl Control {
    /// Sends with these credentials; what happens to connections goes to `events`.
    pub fn new(config: LinkConfig, events: mpsc::UnboundedSender<ControlEvent>) -> Self {
        Self { lanes: Arc::default(), tasks: Mutex::default(), config, events }
    }

    /// Queues a frame for a peer, dialling it if need be; false if there was no room for it.
    pub fn send(&self, to: Identity, kind: Kind, header: &impl Message, body: Bytes) -> bool {
        self.send_with(to, kind, header, body, None)
    }

    /// [`send`](Self::send) of a frame with a place in a window, which it frees once it is written, or lost.
    pub fn send_with(
        &self,
        to: Identity,
        kind: Kind,
        header: &impl Message,
        body: Bytes,
        place: Option<OwnedSemaphorePermit>,
    ) -> bool {
        let mut frame = Frame { head: encode(kind, header, body.len()), body, place };
        for _ in 0..LANES_TRIED {
            match self.lane(to, Traffic::of(kind)).try_send(frame) {
                Ok(()) => return true,
                Err(mpsc::error::TrySendError::Full(_)) => {
                    tracing::debug!(peer = %to.addr, ?kind, "control queue full, frame dropped");
                    self.config.metrics.control_dropped.inc();
                    return false;
                }
                // It closed for being idle, in this moment.
                Err(mpsc::error::TrySendError::Closed(back)) => frame = back,
            }
        }
        tracing::debug!(peer = %to.addr, ?kind, "the runtime ends, frame dropped");
        self.config.metrics.control_dropped.inc();
        false
    }

    /// The queue to a peer, with a connection behind it.
    fn lane(&self, to: Identity, traffic: Traffic) -> mpsc::Sender<Frame> {
        let mut lanes = self.lanes.lock();
        if let Some(tx) = lanes.get(&(to.node, traffic)).filter(|tx| !tx.is_closed()) {
            return tx.clone();
        }
        let (tx, rx) = mpsc::channel(QUEUE);
        lanes.insert((to.node, traffic), tx.clone());
        let (config, events) = (self.config.clone(), self.events.clone());
        let lanes = Arc::clone(&self.lanes);
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            let end = run(to, rx, config).await;
            // Of a node that is gone nobody will ask for it again.
            if let Entry::Occupied(lane) = lanes.lock().entry((to.node, traffic))
                && lane.get().is_closed()
            {
                lane.remove();
            }
            if let Some(end) = end {
                let _ = events.send(ControlEvent::Ended(to.node, end));
            }
        });
        tx
    }

    /// Forgets a peer that is down: what is queued for it is dropped.
    pub fn forget(&self, node: NodeId) {
        self.lanes.lock().retain(|(peer, _), _| *peer != node);
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
            () = tokio::time::sleep(IDLE) => {
                // What was queued in this moment is still sent.
                queue.close();
                continue;
            }
        };
        let Some(Frame { head, body, place }) = frame else {
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
        drop(place);
        config.metrics.bytes_out.add((head.len() + body.len()) as u64);
    }
}

/// Serves a control connection that a peer dialled.
pub async fn serve(peer: Identity, stream: Conn, inbox: Inbox, config: LinkConfig) {
    let mut reader = FrameReader::new(stream);
    let events = &inbox.events;
    match read(peer, &mut reader, &inbox).await {
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
async fn read(peer: Identity, reader: &mut FrameReader<impl AsyncRead + Unpin>, inbox: &Inbox) -> Result<bool> {
    while let Some(head) = reader.next().await? {
        if head.kind == Kind::Bye {
            return Ok(true);
        }
        if head.body > MAX_BODY {
            return Err(Error::Protocol(format!("control frame of {} bytes", head.body)));
        }
        let body = reader.take(head.body).await?;
        let message = ControlEvent::Message { from: peer, kind: head.kind, header: head.header, body };
        if !inbox.put(head.kind, message).await {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::handshake::{Credentials, Trust};
    use crate::net::link::Limits;
    use crate::net::transport::Transport;
    use crate::observe::Metrics;
    use crate::system::SystemConfig;

    fn control(addr: std::net::SocketAddr) -> (Control, mpsc::UnboundedReceiver<ControlEvent>) {
        let SystemConfig { cluster, versions, handshake_timeout, max_handshakes, max_observers, .. } =
            SystemConfig::default();
        let config = LinkConfig {
            me: Arc::new(Mutex::new(Identity::new(NodeId(1), addr, 1))),
            transport: Transport::Tcp,
            cred: Arc::new(Credentials { cluster, trust: Trust::Anyone, versions }),
            metrics: Arc::new(Metrics::default()),
            max_message: 1 << 20,
            limits: Limits { handshake: handshake_timeout, handshakes: max_handshakes, observers: max_observers },
        };
        let (events, ends) = mpsc::unbounded_channel();
        (Control::new(config, events), ends)
    }

    #[test]
    fn test_r13_a_frame_for_a_runtime_that_ends_is_dropped_and_holds_nothing_up() {
        let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        let (control, _ends) = control(addr);
        // With its threads: until they have ended it may still take tasks.
        runtime.shutdown_timeout(Duration::from_secs(5));
        let (told, sent) = std::sync::mpsc::channel();
        // What is spawned there is dropped at once, and the queue that it would have read is closed.
        std::thread::spawn(move || {
            let _inside = handle.enter();
            let peer = Identity::new(NodeId(2), addr, 1);
            let sent = control.send(peer, Kind::Datagram, &EmptyHeader {}, Bytes::new());
            told.send((sent, control.config.metrics.control_dropped.get())).unwrap();
        });
        assert_eq!(sent.recv_timeout(Duration::from_secs(5)), Ok((false, 1)));
    }

    #[tokio::test]
    async fn nothing_is_kept_of_a_peer_that_cannot_be_reached() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (control, mut ends) = control(port);
        for node in 2..10 {
            let gone = Identity::new(NodeId(node), port, 1);
            control.send(gone, Kind::Delta, &EmptyHeader {}, Bytes::new());
            control.send(gone, Kind::Datagram, &EmptyHeader {}, Bytes::new());
            for _ in 0..2 {
                assert!(
                    matches!(ends.recv().await, Some(ControlEvent::Ended(NodeId(n), LinkEnd::Refused)) if n == node)
                );
            }
        }
        assert!(control.lanes.lock().is_empty());
    }
}
