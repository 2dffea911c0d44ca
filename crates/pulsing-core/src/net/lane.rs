//! The sending side of the lane of small frames: a queue, the task that writes it out, and the short way past both.
//!
//! A thread of an event loop writes its frames to the socket itself while the task sleeps with nothing to do, one at once or
//! several together ([`direct`]): they are spared the way across threads. In all other cases frames queue, and the task
//! writes many of them at a time. Whoever writes does so under the lock of the queue or with the queue behind it, so that
//! frames leave in the order they came. Nobody waits for the socket but the task, and the task waits for no loop: what one
//! has held back for a whole [`TICK`] it writes itself.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;

use super::conn::Writing;
use super::direct::{self, BATCH, Way};
use super::outbox::SMALL;
use super::socket::SendHalf;
use crate::observe::Metrics;
use crate::payload::Payload;

/// Room for so many queued frames is kept between bursts.
const KEPT: usize = 256;
/// How often a task looks after what a loop does in its place: at what it holds back, at what it does not read.
pub(super) const TICK: Duration = Duration::from_millis(2);
/// After so many ticks without anything to look after it does so no more.
pub(super) const QUIET: u32 = 5;

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
    Socket(SendHalf),
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
    /// Set while the task has nothing to do: nothing is queued but what a loop's thread holds back.
    idle: Option<Waker>,
    /// Whether the frames are held back.
    held: bool,
    /// How often frames were held back.
    holds: u64,
    /// Whether the task looks after that.
    tended: bool,
    /// What an idle task leaves to others.
    socket: Option<Arc<SendHalf>>,
    /// Memory for frames on their way past the task.
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
        let way = if queue.idle.is_some() && queue.socket.is_some() { direct::way(frame.len()) } else { Way::Task };
        queue.frames.push(frame);
        let left = match way {
            Way::Now if !queue.held => queue.write_queued(),
            Way::Now | Way::Soon if queue.frames.len() >= BATCH => queue.write_queued(),
            Way::Now | Way::Soon if queue.held => false,
            Way::Now | Way::Soon => {
                queue.held = true;
                queue.holds += 1;
                if !std::mem::replace(&mut queue.tended, true)
                    && let Some(task) = &queue.idle
                {
                    task.wake_by_ref();
                }
                drop(queue);
                direct::hold(Arc::clone(&self.0) as Arc<dyn direct::Held>);
                return;
            }
            Way::Task => true,
        };
        if left && let Some(task) = queue.idle.take() {
            drop(queue);
            task.wake();
        }
    }
}

impl direct::Held for Mutex<Queue> {
    fn release(&self) {
        let mut queue = self.lock();
        if queue.held
            && queue.write_queued()
            && let Some(task) = queue.idle.take()
        {
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

/// What the task has to do.
enum Work {
    /// Frames to write.
    Write,
    /// Frames that are held back, to look after.
    Tend,
    /// Nothing any more.
    End,
}

impl Queue {
    /// Writes what is queued past the idle task. True: the socket did not take everything, and the rest is the task's.
    fn write_queued(&mut self) -> bool {
        self.held = false;
        let Some(socket) = &self.socket else { return true };
        self.scratch.clear();
        for frame in self.frames.drain(..) {
            frame.write_to(&mut self.scratch);
        }
        // An error, too, is for the task: it ends the link.
        let taken = socket.try_write(&self.scratch).unwrap_or(0);
        if let Some(metrics) = &self.metrics {
            metrics.bytes_out.add(taken as u64);
        }
        let left = taken < self.scratch.len();
        if left {
            self.frames.push(Frame::bare(Bytes::copy_from_slice(&self.scratch[taken..])));
        }
        left
    }

    fn poll_work(&mut self, cx: &mut Context<'_>, batch: &mut Vec<Frame>, tending: bool) -> Poll<Work> {
        if !self.frames.is_empty() && !self.held {
            self.take(batch);
            return Poll::Ready(Work::Write);
        }
        if self.closed {
            if self.frames.is_empty() {
                return Poll::Ready(Work::End);
            }
            self.take(batch);
            return Poll::Ready(Work::Write);
        }
        match &mut self.idle {
            Some(task) => task.clone_from(cx.waker()),
            idle => *idle = Some(cx.waker().clone()),
        }
        if self.tended && !tending { Poll::Ready(Work::Tend) } else { Poll::Pending }
    }

    fn take(&mut self, batch: &mut Vec<Frame>) {
        self.idle = None;
        self.held = false;
        std::mem::swap(&mut self.frames, batch);
    }
}

/// How the task looks after what loops hold back.
#[derive(Default)]
struct Tending {
    holds: u64,
    quiet: u32,
}

impl Tending {
    /// A tick has passed. True: frames were held back all the time, and are the task's.
    fn tick(&mut self, queue: &mut Queue, batch: &mut Vec<Frame>) -> bool {
        if queue.holds != self.holds {
            *self = Self { holds: queue.holds, quiet: 0 };
            return false;
        }
        if queue.held {
            queue.take(batch);
            return true;
        }
        self.quiet += 1;
        if self.quiet >= QUIET {
            queue.tended = false;
        }
        false
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
        let mut tending: Option<Tending> = None;
        loop {
            let is_tending = tending.is_some();
            let work = std::future::poll_fn(|cx| ended.0.lock().poll_work(cx, &mut batch, is_tending));
            let work = match &mut tending {
                None => work.await,
                Some(tended) => match tokio::time::timeout(TICK, work).await {
                    Ok(work) => work,
                    Err(_) => {
                        let mut queue = ended.0.lock();
                        if !tended.tick(&mut queue, &mut batch) {
                            if !queue.tended {
                                tending = None;
                            }
                            continue;
                        }
                        Work::Write
                    }
                },
            };
            match work {
                Work::Write => {}
                Work::Tend => {
                    let holds = ended.0.lock().holds;
                    tending = Some(Tending { holds, quiet: 0 });
                    continue;
                }
                Work::End => break,
            }
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
    Socket(Arc<SendHalf>),
    Stream(Writing),
}

impl Writer {
    async fn write_all(&mut self, mut data: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Socket(socket) => {
                while !data.is_empty() {
                    match socket.write(data).await? {
                        0 => return Err(std::io::ErrorKind::WriteZero.into()),
                        n => data = &data[n..],
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
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::JoinHandle;

    use super::*;
    use crate::net::socket;

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
        let (_, writing) = socket::split(ours.unwrap()).unwrap();
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

    /// Counts how often a loop is called back.
    #[derive(Default)]
    struct Loop(AtomicU32);

    impl direct::Keeper for Loop {
        fn come_back(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn turn(frames: u32) -> Arc<Loop> {
        let counted = Arc::new(Loop::default());
        direct::begin(&(Arc::clone(&counted) as Arc<dyn direct::Keeper>), frames);
        counted
    }

    fn queued(sender: &Sender) -> usize {
        sender.0.lock().frames.len()
    }

    #[tokio::test]
    async fn a_loop_writes_its_first_frame_at_once_and_the_rest_of_a_turn_together() {
        // The runtime has this one thread: while it waits below, no task runs.
        let mut wire = wire().await;
        wire.in_thread(|sender| {
            let called = turn(1);
            sender.send(frame(1, 0));
            assert_eq!((queued(sender), wire.metrics.bytes_out.get()), (0, 4));
            sender.send(frame(2, 0));
            sender.send(frame(3, 0));
            assert_eq!((queued(sender), wire.metrics.bytes_out.get()), (2, 4));
            direct::flush();
            assert_eq!((queued(sender), wire.metrics.bytes_out.get()), (0, 12));
            assert_eq!(called.0.load(Ordering::Relaxed), 0, "a turn that goes on needs no call");
            // Outside of a turn the loop is to come back, once for all that it holds.
            sender.send(frame(4, 0));
            sender.send(frame(5, 0));
            assert_eq!((queued(sender), called.0.load(Ordering::Relaxed)), (2, 1));
            for number in 6..4 + BATCH as u32 {
                sender.send(frame(number, 0));
            }
            assert_eq!(queued(sender), 0, "a batch goes out without waiting for the turn's end");
        });
        let sent = 3 + BATCH as u32;
        wire.in_thread(|sender| {
            turn(1);
            sender.send(frame(sent + 1, 9000));
            assert_eq!(queued(sender), 1, "a long frame is for the task");
            sender.send(frame(sent + 2, 0));
            assert_eq!(queued(sender), 2, "and nothing overtakes it");
        });
        drop(wire.sender);
        let mut got = Vec::new();
        wire.peer.read_to_end(&mut got).await.unwrap();
        assert_eq!(got.len() as u32, 4 * (sent + 2) + 9000);
        let numbers = got.chunks(4).take(sent as usize + 1).map(|raw| u32::from_be_bytes(raw.try_into().unwrap()));
        assert!(numbers.eq(1..=sent + 1));
        assert_eq!(wire.metrics.bytes_out.get(), got.len() as u64);
        wire.task.await.unwrap().unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn test_r1_what_a_loop_holds_and_does_not_come_back_for_is_sent_all_the_same() {
        let mut wire = wire().await;
        for round in 0..3 {
            // The thread is gone, or its loop stands still: nobody flushes.
            wire.in_thread(|sender| {
                turn(0);
                sender.send(frame(round, 0));
            });
            let arrived = tokio::time::timeout(Duration::from_secs(10), wire.peer.read_u32()).await;
            assert_eq!(arrived.expect("held for ever").unwrap(), round);
            wire.idle().await;
        }
        // Nor is a task kept busy looking after nothing.
        let limit = Instant::now() + Duration::from_secs(10);
        while wire.sender.0.lock().tended {
            assert!(Instant::now() < limit, "the writer never came to rest");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn test_r2_frames_keep_their_order_whoever_writes_them() {
        const COUNT: u32 = 20_000;
        let Wire { sender, mut peer, task, .. } = wire().await;
        let sending = std::thread::spawn(move || {
            for number in 0..COUNT {
                // Pauses let the writer come to rest, so that both ways are taken in turn; sizes stop short writes midway.
                if number % 7 == 0 {
                    turn(number % 3);
                    std::thread::yield_now();
                }
                sender.send(frame(number, (number as usize * 37) % 5000));
                if number % 11 == 0 {
                    direct::flush();
                }
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
                turn(1);
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
                turn(1);
                wire.sender.send(frame(1, 0));
            });
        });
        assert_eq!(wire.peer.read(&mut [0]).await.unwrap(), 0);
        assert!(wire.sender.0.lock().frames.is_empty());
    }
}
