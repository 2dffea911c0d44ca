//! A lane that is lent: the thread that its messages are for reads it itself.
//!
//! What an event loop waits for reaches it through two threads: the network's, which reads, and its own, which is woken by
//! it. While everything that arrives is for one loop and keeps coming, the loop gets the socket to wait for and reads it
//! itself, which spares a wake-up for each message. The lane's own task looks after that: it takes the lane back once the
//! loop leaves something unread for a whole [`TICK`], once little comes, once messages are for somebody else, and when the
//! loop meets what is not a plain small frame. So a loop that is busy or gone holds up nobody for longer than two ticks.

use std::cell::RefCell;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::inbound::{Plain, Stop};
use super::lane::{QUIET, TICK};
use super::reader::Head;
use crate::error::{Error, Result};
use crate::fault;

/// So many messages in a row are for one loop before a lane is lent to it.
const REGULAR: u32 = 8;
/// Bytes that one read brings at most.
const SCRATCH: usize = 64 << 10;
/// Bytes that a loop reads in one turn at most.
const TURN: usize = 512 << 10;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// An event loop that can wait for a socket of the network.
pub trait Reader: Send + Sync {
    /// Waits for `lane`, and calls [`Lent::read`] on its own thread when something is there. False: it cannot.
    fn lend(&self, lane: &Arc<Lent>) -> bool;
    /// Waits for `lane` no more. Called from any thread, also for one that it does not have.
    fn take_back(&self, lane: &Arc<Lent>);
}

/// Whom the messages of a link are for.
#[derive(Default)]
pub struct Audience(Mutex<(Option<Arc<dyn Reader>>, u32)>);

impl Audience {
    /// One more is for `reader`; `None`: for none that could read it.
    pub fn note(&self, reader: Option<Arc<dyn Reader>>) {
        let mut known = self.0.lock();
        match (&known.0, reader) {
            (Some(one), Some(other)) if Arc::ptr_eq(one, &other) => known.1 = known.1.saturating_add(1),
            (None, None) => {}
            (_, reader) => *known = (reader, 0),
        }
    }
    /// The one that all are for, lately.
    pub fn only(&self) -> Option<Arc<dyn Reader>> {
        let known = self.0.lock();
        if known.1 >= REGULAR { known.0.clone() } else { None }
    }
}

/// A lane of small frames that is lent.
pub struct Lent {
    socket: TcpStream,
    plain: Plain,
    state: Mutex<State>,
    reads: AtomicU64,
    returned: Notify,
    runtime: Handle,
}

struct State {
    buffer: BytesMut,
    /// A frame whose body is still to be read, and which is for the task.
    head: Option<Head>,
    failure: Option<Error>,
    /// Not lent any more.
    over: bool,
}

impl AsFd for Lent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Lent {
    /// Reads what is there and handles it. False: the lane goes back to its task, and the reader forgets it.
    pub fn read(&self) -> bool {
        // The task has it.
        let Some(mut state) = self.state.try_lock() else { return true };
        if state.over {
            return false;
        }
        self.reads.fetch_add(1, Ordering::Relaxed);
        let _runtime = self.runtime.enter();
        let kept = BUFFER.with_borrow_mut(|scratch| {
            scratch.resize(SCRATCH, 0);
            self.read_into(scratch, &mut state)
        });
        if !kept {
            state.over = true;
            self.returned.notify_one();
        }
        kept
    }

    fn read_into(&self, scratch: &mut [u8], state: &mut State) -> bool {
        let mut read = 0;
        while read < TURN {
            let n = match (&self.socket).read(scratch) {
                // The task will see the end, or the error, too.
                Ok(0) => return false,
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return false,
            };
            read += n;
            state.buffer.extend_from_slice(&scratch[..n]);
            self.plain.count(n);
            let handled = fault::catch(|| self.plain.frames(&mut state.buffer)).unwrap_or_else(|panic| {
                let words = fault::words(&*panic);
                tracing::error!(panic = words, "handling a frame panicked");
                Err(Error::Protocol(format!("handling a frame panicked: {words}")))
            });
            match handled {
                Ok(Stop::Hungry) => {}
                Ok(Stop::Odd(head)) => {
                    state.head = head;
                    return false;
                }
                Err(error) => {
                    state.failure = Some(error);
                    return false;
                }
            }
            if n < scratch.len() {
                return true;
            }
        }
        true
    }

    /// The reader's loop is gone.
    pub fn give_back(&self) {
        self.state.lock().over = true;
        self.returned.notify_one();
    }

    /// Whether something is there to read, or the end.
    fn unread(&self) -> bool {
        !matches!(self.socket.peek(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock)
    }
}

/// What the task goes on with when it has its lane again.
pub struct Returned {
    /// The lane.
    pub socket: TcpStream,
    /// What was read of frames that are not whole.
    pub buffer: BytesMut,
    /// A frame whose body is still to be read.
    pub head: Option<Head>,
}

/// Takes the lane back however the task ends.
struct Loan<'a> {
    reader: &'a dyn Reader,
    lane: &'a Arc<Lent>,
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.reader.take_back(self.lane);
        // Waits for a read that is under way: nothing is handled behind the task's back.
        self.lane.state.lock().over = true;
    }
}

/// Lends a lane to `reader`, and returns when it is back.
///
/// # Errors
/// What the reader found wrong with the peer's frames; the system's about the socket.
pub async fn lend(reader: Arc<dyn Reader>, socket: TcpStream, buffer: BytesMut, plain: Plain) -> Result<Returned> {
    let spare = socket.try_clone().map_err(|e| Error::Protocol(e.to_string()))?;
    let lane = Arc::new(Lent {
        socket,
        plain,
        state: Mutex::new(State { buffer, head: None, failure: None, over: false }),
        reads: AtomicU64::new(0),
        returned: Notify::new(),
        runtime: Handle::current(),
    });
    if reader.lend(&lane) {
        let loan = Loan { reader: &*reader, lane: &lane };
        lane.tended(&reader).await;
        drop(loan);
    }
    let mut state = lane.state.lock();
    state.over = true;
    match state.failure.take() {
        Some(error) => Err(error),
        None => Ok(Returned { socket: spare, buffer: std::mem::take(&mut state.buffer), head: state.head.take() }),
    }
}

impl Lent {
    /// Returns when the loan is to end.
    async fn tended(&self, reader: &Arc<dyn Reader>) {
        let (mut seen, mut quiet) = (0, 0);
        loop {
            tokio::select! {
                biased;
                () = self.returned.notified() => return,
                () = tokio::time::sleep(TICK) => {}
            }
            let reads = self.reads.load(Ordering::Relaxed);
            if !self.plain.audience().is_some_and(|only| Arc::ptr_eq(&only, reader)) {
                return;
            }
            if reads != seen {
                (seen, quiet) = (reads, 0);
                continue;
            }
            quiet += 1;
            if quiet >= QUIET || self.unread() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::JoinHandle;
    use tokio::time::Instant;

    use super::*;
    use crate::net::inbound::{Inbound, Inlet, Reading, Role};
    use crate::net::socket;
    use crate::net::wire::{Kind, RefHeader, ReplyHeader, encode};
    use crate::observe::Metrics;

    /// A loop that waits for lanes and reads when it is told to.
    #[derive(Default)]
    struct Loop(Mutex<Vec<Arc<Lent>>>);

    impl Reader for Loop {
        fn lend(&self, lane: &Arc<Lent>) -> bool {
            self.0.lock().push(Arc::clone(lane));
            true
        }
        fn take_back(&self, lane: &Arc<Lent>) {
            self.0.lock().retain(|known| !Arc::ptr_eq(known, lane));
        }
    }

    impl Loop {
        /// One turn in a thread of its own. Whether it had a lane to read.
        fn turn(&self) -> bool {
            let lanes = self.0.lock().clone();
            let read = || {
                for lane in &lanes {
                    if !lane.read() {
                        self.take_back(lane);
                    }
                }
            };
            thread::scope(|s| s.spawn(read).join().unwrap());
            !lanes.is_empty()
        }
    }

    /// What arrived, and on which thread; it is all for `only`.
    #[derive(Default)]
    struct Listener {
        got: Mutex<Vec<(u64, ThreadId)>>,
        only: Mutex<Option<Arc<dyn Reader>>>,
    }

    impl Role for Listener {
        fn inbound(self: Arc<Self>, message: Inbound) -> Result<()> {
            let (Inbound::End(id) | Inbound::Value(id, _)) = message else { panic!("not sent here") };
            self.got.lock().push((id, thread::current().id()));
            Ok(())
        }
        fn acknowledge(&self, _: u64) {}
        fn audience(&self) -> Option<Arc<dyn Reader>> {
            self.only.lock().clone()
        }
    }

    struct Scene {
        peer: TcpStream,
        heard: Arc<Listener>,
        event_loop: Arc<Loop>,
        task: JoinHandle<Result<()>>,
        next: u64,
    }

    impl Scene {
        async fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let (ours, peer) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
            let (receiving, _sending) = socket::split(ours.unwrap()).unwrap();
            let (heard, event_loop) = (Arc::new(Listener::default()), Arc::new(Loop::default()));
            *heard.only.lock() = Some(Arc::clone(&event_loop) as _);
            let role = Arc::clone(&heard) as Arc<dyn Role>;
            let reading = Reading { max_message: 1 << 20, metrics: Arc::new(Metrics::default()), role };
            let (small, _) = reading.lanes::<&[u8], &[u8]>(Inlet::Socket(receiving), b"");
            let task = tokio::spawn(small);
            let peer = peer.unwrap().0;
            Self { peer, heard, event_loop, task, next: 0 }
        }
        async fn say(&mut self) {
            let frame = encode(Kind::End, &RefHeader { id: self.next }, 0);
            self.next += 1;
            self.peer.write_all(&frame).await.unwrap();
        }
        /// Says something until the loop has the lane.
        async fn lent(&mut self) {
            let limit = Instant::now() + Duration::from_secs(10);
            while self.event_loop.0.lock().is_empty() {
                assert!(Instant::now() < limit, "never lent");
                self.say().await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        async fn all_heard(&self) {
            let limit = Instant::now() + Duration::from_secs(10);
            while self.heard.got.lock().len() < self.next as usize {
                assert!(Instant::now() < limit, "{} of {}", self.heard.got.lock().len(), self.next);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(self.heard.got.lock().iter().map(|(id, _)| *id).eq(0..self.next));
        }
    }

    #[test]
    fn a_lane_is_lent_to_whom_all_messages_are_for() {
        let (one, other): (Arc<dyn Reader>, Arc<dyn Reader>) = (Arc::new(Loop::default()), Arc::new(Loop::default()));
        let audience = Audience::default();
        for _ in 0..=REGULAR {
            assert!(audience.only().is_none());
            audience.note(Some(Arc::clone(&one)));
        }
        assert!(Arc::ptr_eq(&audience.only().unwrap(), &one));
        audience.note(Some(other));
        assert!(audience.only().is_none(), "another loop's message");
        for _ in 0..=REGULAR {
            audience.note(Some(Arc::clone(&one)));
        }
        audience.note(None);
        assert!(audience.only().is_none(), "a message for no loop");
    }

    #[tokio::test]
    async fn a_loop_reads_on_its_own_thread_and_loses_the_lane_when_little_comes() {
        let mut scene = Scene::new().await;
        let limit = Instant::now() + Duration::from_secs(10);
        // Until a turn finds the lane lent: a slow machine's tick may come between.
        loop {
            assert!(Instant::now() < limit);
            scene.lent().await;
            scene.say().await;
            let before = scene.heard.got.lock().len();
            if scene.event_loop.turn() && scene.heard.got.lock().len() > before {
                break;
            }
        }
        let reader = scene.heard.got.lock().last().unwrap().1;
        assert_ne!(reader, thread::current().id(), "the runtime's only thread");
        scene.all_heard().await;
        while !scene.event_loop.0.lock().is_empty() {
            assert!(Instant::now() < limit, "a loop that nothing comes for keeps the lane");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        scene.say().await;
        scene.all_heard().await;
    }

    #[tokio::test]
    async fn test_r2_a_loop_that_does_not_read_holds_up_nobody_and_order_holds() {
        let mut scene = Scene::new().await;
        for _ in 0..5 {
            scene.lent().await;
            for _ in 0..50 {
                scene.say().await;
            }
            scene.all_heard().await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn test_r2_a_loop_and_the_task_by_turns_keep_the_order() {
        let mut scene = Scene::new().await;
        let event_loop = Arc::clone(&scene.event_loop);
        let over = Arc::new(AtomicU64::new(0));
        let ended = Arc::clone(&over);
        let turning = thread::spawn(move || {
            while ended.load(Ordering::Relaxed) == 0 {
                event_loop.turn();
                thread::yield_now();
            }
        });
        for number in 0..4000u32 {
            scene.say().await;
            if number % 400 == 0 {
                // Long enough for the lane to come back.
                tokio::time::sleep(TICK * (QUIET + 2)).await;
            }
        }
        scene.all_heard().await;
        over.store(1, Ordering::Relaxed);
        turning.join().unwrap();
    }

    #[tokio::test]
    async fn what_is_no_small_frame_goes_back_to_the_task() {
        let mut scene = Scene::new().await;
        scene.lent().await;
        let size = 3 << 16;
        let header = ReplyHeader { call: scene.next, codec: 1, segments: vec![size as u64], ..ReplyHeader::default() };
        scene.next += 1;
        let frame = [&encode(Kind::Value, &header, size)[..], &vec![7; size]].concat();
        let (reading, writing) = (Arc::clone(&scene.event_loop), &mut scene.peer);
        let turns = async {
            for _ in 0..20 {
                reading.turn();
                tokio::task::yield_now().await;
            }
        };
        tokio::join!(async { writing.write_all(&frame).await.unwrap() }, turns);
        scene.say().await;
        scene.all_heard().await;
    }

    #[tokio::test]
    async fn a_lane_that_ends_or_is_nonsense_ends_its_task() {
        let mut scene = Scene::new().await;
        scene.lent().await;
        scene.peer.shutdown().await.unwrap();
        scene.event_loop.turn();
        assert_eq!(scene.task.await.unwrap(), Ok(()));
        assert!(scene.event_loop.0.lock().is_empty());

        let mut scene = Scene::new().await;
        scene.lent().await;
        scene.peer.write_all(&encode(Kind::Call, &RefHeader { id: 0 }, 0)[..6]).await.unwrap();
        scene.peer.write_all(&[0xff; 64]).await.unwrap();
        let limit = Instant::now() + Duration::from_secs(10);
        while !scene.task.is_finished() {
            assert!(Instant::now() < limit);
            scene.event_loop.turn();
            tokio::task::yield_now().await;
        }
        assert!(matches!(scene.task.await.unwrap(), Err(Error::Protocol(_))));
    }

    #[tokio::test]
    async fn a_task_that_is_dropped_takes_its_lane_with_it() {
        let mut scene = Scene::new().await;
        scene.lent().await;
        let lane = scene.event_loop.0.lock().first().cloned();
        scene.task.abort();
        assert!(scene.task.await.unwrap_err().is_cancelled());
        assert!(scene.event_loop.0.lock().is_empty());
        assert!(lane.is_none_or(|lane| !lane.read()));
    }
}
