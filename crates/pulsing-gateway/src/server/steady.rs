//! A connection's task, which a wake-up by itself does not send through the scheduler.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;

/// Nobody polls: who wakes wakes the task.
const IDLE: u8 = 0;
/// The future is being polled.
const POLLED: u8 = 1;
/// And was woken meanwhile.
const WOKEN: u8 = 2;

/// Polls a future once more when it was woken while it was polled, which each request with a body does to its own
/// connection. The scheduler would take that for work to be shared, and wake another thread for it: a system call, and a
/// core that looks for a task which is not there.
pub(super) struct Steady {
    shared: Arc<Shared>,
    waker: Waker,
}

struct Shared {
    state: AtomicU8,
    task: Mutex<Waker>,
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        match self.state.compare_exchange(POLLED, WOKEN, AcqRel, Acquire) {
            Ok(_) | Err(WOKEN) => {}
            Err(_) => self.task.lock().wake_by_ref(),
        }
    }
}

impl Steady {
    pub(super) fn new() -> Self {
        let shared = Arc::new(Shared { state: AtomicU8::new(IDLE), task: Mutex::new(Waker::noop().clone()) });
        let waker = Waker::from(Arc::clone(&shared));
        Self { shared, waker }
    }

    /// Polls `future`, always the same one.
    pub(super) fn poll<F: Future>(&self, cx: &mut Context<'_>, mut future: Pin<&mut F>) -> Poll<F::Output> {
        let state = &self.shared.state;
        self.shared.task.lock().clone_from(cx.waker());
        state.store(POLLED, Release);
        let mut steady = Context::from_waker(&self.waker);
        let mut polled = future.as_mut().poll(&mut steady);
        if polled.is_pending() && state.swap(POLLED, AcqRel) == WOKEN {
            polled = future.poll(&mut steady);
        }
        // Who is woken again and again gives way to others.
        if state.swap(IDLE, AcqRel) == WOKEN && polled.is_pending() {
            cx.waker().wake_by_ref();
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    /// A future that wakes itself in its first `times` polls and never ends: how often one poll polls it, how often its task
    /// was woken, and its waker.
    fn polled(times: usize) -> (usize, usize, Waker, Arc<Count>) {
        let task = Arc::new(Count::default());
        let mut polls = 0;
        let mut kept = None;
        let mut future = pin!(poll_fn(|cx| {
            polls += 1;
            if polls <= times {
                cx.waker().wake_by_ref();
            }
            kept = Some(cx.waker().clone());
            Poll::<()>::Pending
        }));
        let waker = Waker::from(Arc::clone(&task));
        assert!(Steady::new().poll(&mut Context::from_waker(&waker), future.as_mut()).is_pending());
        let woken = task.0.load(SeqCst);
        (polls, woken, kept.expect("a waker"), task)
    }

    #[test]
    fn who_wakes_itself_is_polled_again_and_its_task_is_not_woken() {
        assert_eq!(polled(0).0, 1);
        let (polls, woken, ..) = polled(1);
        assert_eq!((polls, woken), (2, 0));
    }

    #[test]
    fn who_wakes_itself_for_ever_gives_way_to_others() {
        let (polls, woken, ..) = polled(usize::MAX);
        assert_eq!((polls, woken), (2, 1));
    }

    #[test]
    fn a_wake_up_from_elsewhere_wakes_the_task() {
        let (_, woken, waker, task) = polled(0);
        assert_eq!(woken, 0);
        waker.wake();
        assert_eq!(task.0.load(SeqCst), 1);
    }
}
