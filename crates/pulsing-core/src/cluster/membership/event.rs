//! What goes in and out of a membership: events, timers, errors.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use foca::Timer;

use crate::cluster::Identity;
use crate::error::Error;
use crate::id::NodeId;
use crate::system::MemberState;

/// Why a datagram was not taken. The membership is unchanged; the datagram is lost, as any datagram may be.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// The bytes are no membership message of this version.
    #[error("membership message cannot be read: {0}")]
    Malformed(String),
    /// The sender claims this node's own address. Two nodes advertise the same address, or a node talks to itself.
    #[error("membership message from {0}, which is this node's own address; two nodes advertise the same one")]
    FromOurselves(Identity),
}

impl From<Error> for MembershipError {
    fn from(error: Error) -> Self {
        Self::Malformed(error.to_string())
    }
}

/// Why a member counts as down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// It did not answer within the suspicion time.
    Unresponsive,
    /// It talks, but does not answer what is sent to its address: nobody can dial it there.
    Deaf,
    /// Nothing listens at its address, as seen by this many nodes.
    Refused {
        /// How many.
        observers: usize,
    },
    /// A newer process took its address.
    Replaced,
    /// Another member found it down.
    Reported,
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unresponsive => f.write_str("it did not answer in time"),
            Self::Deaf => {
                f.write_str("it talks, but what is sent to the address that it gives as its own is not answered")
            }
            Self::Refused { observers: 1 } => f.write_str("its address refused connections (1 observer)"),
            Self::Refused { observers } => write!(f, "its address refused connections ({observers} observers)"),
            Self::Replaced => f.write_str("a newer process took its address"),
            Self::Reported => f.write_str("another member found it down"),
        }
    }
}

/// A change in what this node believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberEvent {
    /// A new member, or one that came back.
    Up(Identity),
    /// A member is gone.
    Down(Identity, DownReason),
    /// A member said goodbye.
    Left(Identity),
    /// A member missed its probes and may still refute.
    Suspect(Identity),
    /// A suspect is alive.
    Refuted(Identity),
    /// The same process under a newer epoch: it was wrongly declared down somewhere and is back.
    Renewed {
        /// As it was known.
        old: Identity,
        /// As it is known now.
        new: Identity,
    },
    /// This node was declared down and goes on under this identity; handshakes must show it from now on.
    SelfRenewed(Identity),
    /// This node was suspected and refuted.
    SelfSuspected,
    /// Two living processes give the same address as their own. Only one of them can be a member.
    AddressShared {
        /// Who is held for its owner.
        holder: Identity,
        /// Who else claims it.
        other: Identity,
    },
}

/// A member as seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Who.
    pub identity: Identity,
    /// How it is.
    pub state: MemberState,
}

/// A timer handed out by [`Membership::poll`], to be given back to [`Membership::handle_timer`] once it is due, however
/// late. It carries what it needs to be ignored when it has become stale.
#[derive(Clone, Debug)]
pub struct MembershipTimer {
    /// When it ought to fire; `None` for the very first, before any time was known.
    pub(super) due: Option<Duration>,
    pub(super) kind: TimerKind,
}

#[derive(Clone, Debug)]
pub(super) enum TimerKind {
    Tick,
    Swim(Timer<Identity>),
    /// A suspicion may have run out.
    Suspicion(NodeId),
    /// A probe that a hint started may have gone unanswered.
    Check(NodeId),
    /// A ping sent on behalf of the asker may have gone unanswered.
    Errand {
        target: Identity,
        asker: Identity,
        since: Duration,
    },
}

/// What the driver has to do.
#[derive(Clone, Debug)]
pub enum MembershipOutput {
    /// Send a datagram, dialling if there is no link; drop it if that fails.
    Send {
        /// Whom.
        to: Identity,
        /// What.
        data: Bytes,
    },
    /// Call [`Membership::handle_timer`] after this time.
    Timer {
        /// From now.
        after: Duration,
        /// With this.
        timer: MembershipTimer,
    },
    /// Tell who is interested.
    Event(MemberEvent),
}
