//! Membership and registry as pure state machines.
//!
//! Nothing here opens a socket, reads a clock or spawns a task: time is handed in as a [`Duration`](std::time::Duration)
//! since the process started, datagrams as bytes, and what is to be done comes out of [`Membership::poll`]. So the same
//! code runs under the network layer and under the seeded simulator in `tests/cluster_sim`.
//!
//! | part           | promise                                                                                      |
//! |----------------|----------------------------------------------------------------------------------------------|
//! | [`Identity`]   | one run of one process at one address; a newer run replaces an older one at once (M4)          |
//! | [`Membership`] | SWIM by the `foca` crate, plus local health, hints from links, refusals and goodbyes (M1-M4)   |
//! | [`Registry`]   | owner-written, versioned names; changes travel as [`Delta`]s, repair by [`Digest`] (M5, R10)  |

mod claim;
mod delta;
#[cfg(test)]
mod golden_tests;
mod health;
mod identity;
mod index;
mod instances;
mod membership;
mod note;
mod owner;
mod preset;
mod registry;
mod repair;
mod touched;

pub use claim::Conflict;
pub use delta::{Delta, Digest, Gone, OwnerVersion, Put};
pub use identity::Identity;
pub use membership::{
    DownReason, MemberEvent, MemberInfo, Membership, MembershipError, MembershipOutput, MembershipTimer,
};
pub use owner::Shipment;
pub use preset::Preset;
pub use registry::{Entry, METADATA_LIMIT, Registry};
pub use touched::Touched;
