//! The sending side of the lane of small frames: a queue, the task that writes it out, and the short way past both.
//!
//! A thread that has leave ([`direct::allow`]) writes its frame to the socket itself when the task sleeps with nothing to do:
//! a call that is alone is spared the way across threads. In all other cases frames queue, and the task writes many of them
//! at a time. Whoever writes does so under the lock of the queue or with the queue behind it, so that frames leave in the
//! order they came. Nobody waits for the socket but the task.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::OwnedWriteHalf;

use super::conn::Writing;
use super::direct;
use super::outbox::SMALL;
use crate::observe::Metrics;
use crate::payload::Payload;

/// Room for so many queued frames is kept between bursts.
const KEPT: usize = 256;

/// One frame, encoded but for its body.
pub struct Frame {
    head: Bytes,
    body: Option<Payload>,
}

impl Frame {
    /// A frame without a body.
    pub fn bare(head: Bytes) -> Self {
        Self { head, body: None }
    }
    /// A frame with a body.
    pub fn new(head: Bytes, body: Payload) -> Self {
        Self { head, body: Some(body) }
    }
    fn len(&self) -> usize {
        self.head.len() + self.body.as_ref().map_or(0, Payload::len)
    }
    fn write_to(&self, out: &mut BytesMut) {
        out.extend_from_slice(&self.head);
        if let Some(Payload { head, buffers, .. }) = &self.body {
            out.extend_from_slice(head);
            for buffer in buffers {
                out.extend_from_slice(buffer);
            }
        }
    }
}

/// Where the frames of a lane go.
pub enum Outlet {
    /// A socket of the operating system, which takes what it can at once from any thread.
    Socket(OwnedWriteHalf),
    /// What only a task can write to.
    Stream(Writing),
}

/// Where frames are put; dropping it ends the writer once it has sent what is queued.
pub struct Sender(Arc<Mutex<Queue>>);

/// The queue's other end, to be written out.
pub struct Receiver(Arc<Mutex<Queue>>);

#[derive(Default)]
struct Queue {
    frames: Vec<Frame>,
    /// Set while the task has nothing to do and nothing is queued.
    idle: Option<Waker>,
    /// What an idle task leaves to others.
    socket: Option<Arc<OwnedWriteHalf>>,
    /// Memory for a frame on its way past the queue.
    scratch: BytesMut,
    metrics: Option<Arc<Metrics>>,
    /// Nothing comes any more.
    closed: bool,
    /// Nothing is written any more.
    ended: bool,
}

/// A lane's two ends.
pub fn lane() -> (Sender, Receiver) {
    let queue = Arc::new(Mutex::default());
    (Sender(Arc::clone(&queue)), Receiver(queue))
}

impl Sender {
    /// Puts a frame behind all others, or writes it. Never waits for the socket.
    pub fn send(&self, frame: Frame) {
        let mut queue = self.0.lock();
        if queue.ended {
            // What it holds may call back: not under the lock.
            drop(queue);
            return;
        }
        if queue.idle.is_some() && queue.socket.is_some() && direct::take(frame.len()) {
            match queue.write(frame) {
                None => return,
                Some(rest) => queue.frames.push(rest),
            }
        } else {
            queue.frames.push(frame);
        }
        if let Some(task) = queue.idle.take() {
            drop(queue);
            task.wake();
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let task = {
            let mut queue = self.0.lock();
            queue.closed = true;
            queue.idle.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl Queue {
    /// Writes a frame past the empty queue; what the socket did not take is handed back.
    fn write(&mut self, frame: Frame) -> Option<Frame> {
        let Some(socket) = &self.socket else { return Some(frame) };
        self.scratch.clear();
        frame.write_to(&mut self.scratch);
        // An error, too, is for the task: it ends the link.
        let taken = socket.try_write(&self.scratch).unwrap_or(0);
        if let Some(metrics) = &self.metrics {
            metrics.bytes_out.add(taken as u64);
        }
        match taken {
            0 => Some(frame),
            n if n == self.scratch.len() => None,
            n => Some(Frame::bare(Bytes::copy_from_slice(&self.scratch[n..]))),
        }
    }

    fn poll_take(&mut self, cx: &mut Context<'_>, batch: &mut Vec<Frame>) -> Poll<bool> {
        if !self.frames.is_empty() {
            self.idle = None;
            std::mem::swap(&mut self.frames, batch);
            return Poll::Ready(true);
        }
        if self.closed {
            return Poll::Ready(false);
        }
        match &mut self.idle {
            Some(task) => task.clone_from(cx.waker()),
            idle => *idle = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl Receiver {
    /// Writes frames until the sender is gone and all are out, then ends the stream.
    ///
    /// # Errors
    /// The connection's.
    pub async fn write_to(self, outlet: Outlet, metrics: Arc<Metrics>) -> std::io::Result<()> {
        let outlet = match outlet {
            Outlet::Socket(socket) => {
                let socket = Arc::new(socket);
                let mut queue = self.0.lock();
                queue.socket = Some(Arc::clone(&socket));
                queue.metrics = Some(Arc::clone(&metrics));
                Ok(socket)
            }
            Outlet::Stream(stream) => Err(stream),
        };
        // Whatever becomes of this future, nobody writes behind its back, and the stream ends.
        let ended = Ended(self.0);
        let mut writer = match outlet {
            Ok(socket) => Writer::Socket(socket),
            Err(stream) => Writer::Stream(stream),
        };
        let mut batch = Vec::new();
        let mut out = BytesMut::with_capacity(SMALL);
        while std::future::poll_fn(|cx| ended.0.lock().poll_take(cx, &mut batch)).await {
            for frame in batch.drain(..) {
                frame.write_to(&mut out);
                drop(frame);
                if out.len() >= SMALL {
                    flush(&mut writer, &mut out, &metrics).await?;
                }
            }
            flush(&mut writer, &mut out, &metrics).await?;
            batch.shrink_to(KEPT);
        }
        match &mut writer {
            // Its end is that of its last owner.
            Writer::Socket(_) => Ok(()),
            Writer::Stream(stream) => stream.shutdown().await,
        }
    }
}

struct Ended(Arc<Mutex<Queue>>);

impl Drop for Ended {
    fn drop(&mut self) {
        let (frames, socket) = {
            let mut queue = self.0.lock();
            queue.ended = true;
            queue.idle = None;
            (std::mem::take(&mut queue.frames), queue.socket.take())
        };
        drop((frames, socket));
    }
}

enum Writer {
    Socket(Arc<OwnedWriteHalf>),
    Stream(Writing),
}

impl Writer {
    async fn write_all(&mut self, mut data: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Socket(socket) => {
                while !data.is_empty() {
                    match socket.try_write(data) {
                        Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                        Ok(n) => data = &data[n..],
                        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => socket.writable().await?,
                        Err(e) => return Err(e),
                    }
                }
                // A socket that takes everything must not keep its thread; only a stream counts what it is asked.
                tokio::task::consume_budget().await;
                Ok(())
            }
            Self::Stream(stream) => {
                stream.write_all(data).await?;
                stream.flush().await
            }
        }
    }
}

async fn flush(writer: &mut Writer, out: &mut BytesMut, metrics: &Metrics) -> std::io::Result<()> {
    if !out.is_empty() {
        writer.write_all(out).await?;
        metrics.bytes_out.add(out.len() as u64);
        out.clear();
        // A burst must not pin its memory for the life of the link.
        if out.capacity() > 16 * SMALL {
            *out = BytesMut::with_capacity(SMALL);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::JoinHandle;

    use super::*;

    struct Wire {
        sender: Sender,
        peer: TcpStream,
        task: JoinHandle<std::io::Result<()>>,
        metrics: Arc<Metrics>,
    }

    async fn wire() -> Wire {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ours, peer) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async {
            listener.accept().await.unwrap().0
        });
        let (_, writing) = ours.unwrap().into_split();
        let (sender, receiver) = lane();
        let metrics = Arc::new(Metrics::default());
        let task = tokio::spawn(receiver.write_to(Outlet::Socket(writing), Arc::clone(&metrics)));
        let wire = Wire { sender, peer, task, metrics };
        wire.idle().await;
        wire
    }

    impl Wire {
        async fn idle(&self) {
            let limit = Instant::now() + Duration::from_secs(10);
            while self.sender.0.lock().idle.is_none() {
                assert!(Instant::now() < limit, "the writer never came to rest");
                tokio::task::yield_now().await;
            }
        }
        /// In a thread of its own, so that no other test's leave is meant.
        fn in_thread<T: Send>(&self, work: impl FnOnce(&Sender) -> T + Send) -> T {
            std::thread::scope(|s| s.spawn(|| work(&self.sender)).join().unwrap())
        }
    }

    fn frame(number: u32, padding: usize) -> Frame {
        let mut head = number.to_be_bytes().to_vec();
        head.resize(4 + padding, 0);
        Frame::bare(head.into())
    }

    #[tokio::test]
    async fn a_thread_with_leave_writes_by_itself_and_no_more_often_than_it_may() {
        // The runtime has this one thread: while it waits below, no task runs.
        let mut wire = wire().await;
        let queued = |sender: &Sender| sender.0.lock().frames.len();
        let (first, second) = wire.in_thread(|sender| {
            direct::allow(1);
            sender.send(frame(1, 0));
            let first = queued(sender);
            sender.send(frame(2, 0));
            (first, queued(sender))
        });
        assert_eq!((first, second), (0, 1));
        assert_eq!(wire.metrics.bytes_out.get(), 4);
        wire.idle().await;
        wire.in_thread(|sender| {
            direct::allow(1);
            sender.send(frame(3, 9000));
            assert_eq!(queued(sender), 1, "a long frame is for the task");
            sender.send(frame(4, 0));
            assert_eq!(queued(sender), 2, "and nothing overtakes it");
        });
        drop(wire.sender);
        let mut got = Vec::new();
        wire.peer.read_to_end(&mut got).await.unwrap();
        assert_eq!(got.len(), 4 * 4 + 9000);
        assert_eq!([&got[..4], &got[4..8], &got[8..12]], [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 3]]);
        assert_eq!(wire.metrics.bytes_out.get(), got.len() as u64);
        wire.task.await.unwrap().unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn test_r2_frames_keep_their_order_whoever_writes_them() {
        const COUNT: u32 = 20_000;
        let Wire { sender, mut peer, task, .. } = wire().await;
        let sending = std::thread::spawn(move || {
            for number in 0..COUNT {
                // Pauses let the writer come to rest, so that both ways are taken in turn; sizes stop short writes midway.
                if number % 7 == 0 {
                    direct::allow(number % 3);
                    std::thread::yield_now();
                }
                sender.send(frame(number, (number as usize * 37) % 5000));
            }
        });
        for number in 0..COUNT {
            assert_eq!(peer.read_u32().await.unwrap(), number);
            let mut padding = vec![0; (number as usize * 37) % 5000];
            peer.read_exact(&mut padding).await.unwrap();
        }
        sending.join().unwrap();
        assert_eq!(peer.read(&mut [0]).await.unwrap(), 0, "the stream ends when its sender is gone");
        task.await.unwrap().unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_peer_that_does_not_read_holds_up_no_thread_and_loses_nothing() {
        const COUNT: u32 = 4000;
        let Wire { sender, mut peer, task, metrics } = wire().await;
        // More than the buffers of both sockets take. A send that waited for the peer would wait for ever.
        let sender = std::thread::spawn(move || {
            for number in 0..COUNT {
                direct::allow(1);
                sender.send(frame(number, 8000));
            }
            sender
        })
        .join()
        .unwrap();
        assert!(!sender.0.lock().frames.is_empty(), "the peer's buffers took everything: send more");
        assert!(metrics.bytes_out.get() < u64::from(COUNT) * 8004);
        drop(sender);
        let mut padding = vec![0; 8000];
        for number in 0..COUNT {
            assert_eq!(peer.read_u32().await.unwrap(), number);
            peer.read_exact(&mut padding).await.unwrap();
        }
        assert_eq!(peer.read(&mut padding).await.unwrap(), 0);
        task.await.unwrap().unwrap();
        assert_eq!(metrics.bytes_out.get(), u64::from(COUNT) * 8004);
    }

    #[tokio::test]
    async fn a_writer_that_was_dropped_ends_the_stream_and_takes_no_more() {
        let mut wire = wire().await;
        wire.task.abort();
        assert!(wire.task.await.unwrap_err().is_cancelled());
        std::thread::scope(|s| {
            s.spawn(|| {
                direct::allow(1);
                wire.sender.send(frame(1, 0));
            });
        });
        assert_eq!(wire.peer.read(&mut [0]).await.unwrap(), 0);
        assert!(wire.sender.0.lock().frames.is_empty());
    }
}
