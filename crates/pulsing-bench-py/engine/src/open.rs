//! The open loop: one thread owns the schedule and starts each request when it is due, whatever the server does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::arrival::Arrivals;
use crate::config::{Law, OnFull};
use crate::phase::Phase;

/// A schedule later than this is moved instead of caught up: the burst would be no load anybody asked for.
const STALL: u64 = 1_000_000;

/// The thread of the schedule and what it started.
pub(crate) struct Pacer {
    slots: Arc<Slots>,
    thread: Option<Thread>,
}

struct Slots {
    cap: usize,
    on_full: OnFull,
    state: Mutex<State>,
    idle: Notify,
    dropped: AtomicU64,
    reanchored: AtomicU64,
}

#[derive(Default)]
struct State {
    in_flight: usize,
    /// (due, taken up) of arrivals that wait for a slot.
    waiting: VecDeque<(u64, u64)>,
    unsent: u64,
    pacing: bool,
}

impl Pacer {
    pub(crate) fn start(phase: &Arc<Phase>, rate: f64, law: Law, cap: usize, on_full: OnFull) -> Self {
        let slots = Arc::new(Slots {
            cap,
            on_full,
            state: Mutex::new(State { pacing: true, ..State::default() }),
            idle: Notify::new(),
            dropped: AtomicU64::new(0),
            reanchored: AtomicU64::new(0),
        });
        // Each point of a sweep its own draw, and the same one in every run with this seed.
        let arrivals = Arrivals::new(law, rate, phase.setting.seed ^ rate.to_bits());
        let (phase, owned, runtime) = (Arc::clone(phase), Arc::clone(&slots), Handle::current());
        let spawned = thread::Builder::new()
            .name("pulsing-bench-pacer".into())
            .spawn(move || pace(&phase, &owned, &runtime, arrivals));
        let thread = match spawned {
            Ok(thread) => Some(thread.thread().clone()),
            // No thread, no arrivals: the point shows nothing sent, which its verdict calls the client's fault.
            Err(_) => {
                slots.state.lock().pacing = false;
                None
            }
        };
        Self { slots, thread }
    }

    /// Wakes the thread, so that it sees that the point is over; what waits for a slot will not be sent.
    pub(crate) fn close(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
        let mut state = self.slots.state.lock();
        state.unsent += state.waiting.drain(..).count() as u64;
        drop(state);
        self.slots.idle.notify_waiters();
    }

    pub(crate) async fn finished(&self) {
        loop {
            let notified = self.slots.idle.notified();
            {
                let state = self.slots.state.lock();
                if state.in_flight == 0 && !state.pacing {
                    return;
                }
            }
            notified.await;
        }
    }

    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        let state = self.slots.state.lock();
        // An arrival may have come in just after the close.
        let unsent = state.unsent + state.waiting.len() as u64;
        drop(state);
        (self.slots.dropped.load(Ordering::Relaxed), unsent, self.slots.reanchored.load(Ordering::Relaxed))
    }
}

fn pace(phase: &Arc<Phase>, slots: &Arc<Slots>, runtime: &Handle, arrivals: Arrivals) {
    let clock = phase.setting.clock;
    let mut shift = 0;
    for due in arrivals {
        let mut due = phase.began + shift + due;
        if due >= phase.deadline {
            break;
        }
        while !phase.is_stopped() {
            let now = clock.now();
            if now >= due {
                break;
            }
            // The thread sleeps to about 60 us; tokio's timers would to a millisecond.
            thread::park_timeout(Duration::from_micros(due - now));
        }
        // Not at the deadline: what was due before it is sent, however late this thread is.
        if phase.is_stopped() {
            break;
        }
        let late = clock.now().saturating_sub(due);
        if late > STALL {
            shift += late;
            due += late;
            slots.reanchored.fetch_add(1, Ordering::Relaxed);
        }
        slots.arrive(phase, runtime, due);
    }
    slots.state.lock().pacing = false;
    slots.idle.notify_waiters();
}

impl Slots {
    fn arrive(self: &Arc<Self>, phase: &Arc<Phase>, runtime: &Handle, due: u64) {
        let mut state = self.state.lock();
        if state.in_flight >= self.cap {
            match self.on_full {
                OnFull::Queue => state.waiting.push_back((due, phase.setting.clock.now())),
                OnFull::Drop => {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
            return;
        }
        state.in_flight += 1;
        drop(state);
        let (mut slot, phase) = (Slot { slots: Arc::clone(self), held: true }, Arc::clone(phase));
        runtime.spawn(async move {
            // Stamped here: what the runtime needs to get to it is the client's delay.
            let mut next = Some((due, phase.setting.clock.now()));
            while let Some((due, start)) = next {
                phase.request(due, start).await;
                next = slot.pass_on(phase.is_open());
            }
        });
    }
}

/// One place among those in flight; given back however its task ends.
struct Slot {
    slots: Arc<Slots>,
    held: bool,
}

impl Slot {
    /// Hands the place to the arrival that waits longest, or gives it back: in one step, so that no arrival waits for a place
    /// that nobody holds.
    fn pass_on(&mut self, open: bool) -> Option<(u64, u64)> {
        let mut state = self.slots.state.lock();
        let next = if open { state.waiting.pop_front() } else { None };
        if next.is_none() {
            self.held = false;
            release(&self.slots, &mut state);
        }
        next
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.held {
            release(&self.slots, &mut self.slots.state.lock());
        }
    }
}

fn release(slots: &Slots, state: &mut State) {
    state.in_flight -= 1;
    if state.in_flight == 0 {
        slots.idle.notify_waiters();
    }
}
