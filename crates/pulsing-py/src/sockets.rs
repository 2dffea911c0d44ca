//! Sockets of the network that one event loop reads, behind one descriptor with its wake descriptor.
//!
//! Linux only, where a set of descriptors (epoll) is one that a loop can wait for. Elsewhere the network's threads read.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;
use pulsing_core::net::loan::Lent;

/// The sockets that are lent to a loop.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "never made"))]
pub(crate) struct Sockets {
    set: OwnedFd,
    lanes: Mutex<Arc<Vec<Arc<Lent>>>>,
}

#[cfg(target_os = "linux")]
mod epoll {
    pub(super) use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create, delete};
}

#[cfg(target_os = "linux")]
impl Sockets {
    /// A set of `wake` alone.
    pub(crate) fn new(wake: &impl AsFd) -> std::io::Result<Option<Self>> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&set, wake, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Some(Self { set, lanes: Mutex::default() }))
    }
    /// Takes a lane to read; false: the system refuses.
    pub(crate) fn lend(&self, lane: &Arc<Lent>) -> bool {
        let mut lanes = self.lanes.lock();
        // The end of a stream is readable, too.
        if epoll::add(&self.set, lane, epoll::EventData::new_u64(1), epoll::EventFlags::IN).is_err() {
            return false;
        }
        Arc::make_mut(&mut lanes).push(Arc::clone(lane));
        true
    }
    /// Forgets a lane; idempotent.
    pub(crate) fn take_back(&self, lane: &Arc<Lent>) {
        let mut lanes = self.lanes.lock();
        let Some(at) = lanes.iter().position(|known| Arc::ptr_eq(known, lane)) else { return };
        Arc::make_mut(&mut lanes).swap_remove(at);
        let _ = epoll::delete(&self.set, lane);
    }
}

#[cfg(not(target_os = "linux"))]
impl Sockets {
    pub(crate) fn new(_: &impl AsFd) -> std::io::Result<Option<Self>> {
        Ok(None)
    }
    pub(crate) fn lend(&self, _: &Arc<Lent>) -> bool {
        false
    }
    pub(crate) fn take_back(&self, _: &Arc<Lent>) {}
}

impl Sockets {
    /// Reads what is there.
    pub(crate) fn read(&self) {
        // Handling a message may take a lane back: not under the lock.
        let lanes = Arc::clone(&self.lanes.lock());
        for lane in lanes.iter() {
            if !lane.read() {
                self.take_back(lane);
            }
        }
    }
    /// Gives all back: the loop is gone.
    pub(crate) fn close(&self) {
        let lanes = Arc::clone(&self.lanes.lock());
        for lane in lanes.iter() {
            self.take_back(lane);
            lane.give_back();
        }
    }
    /// The descriptor that is readable when any of them is.
    pub(crate) fn fileno(&self) -> RawFd {
        self.set.as_raw_fd()
    }
}
