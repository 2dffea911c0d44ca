//! How patient a cluster is.

use std::num::{NonZeroU8, NonZeroUsize};
use std::time::Duration;

use foca::{Config, PeriodicParams};

/// Timing of probes and suspicion, by what lies between the nodes (M3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Preset {
    /// All nodes on one host, over loopback.
    Local,
    /// One data centre.
    #[default]
    Lan,
    /// Links of tens to hundreds of milliseconds.
    Wan,
}

/// Members a node asks when it cannot reach one itself, and tells when it has news.
pub(crate) const FANOUT: usize = 3;

/// A suspicion that nobody confirms lasts this many times as long as one that is confirmed, in a cluster of up to ten.
const UNCONFIRMED: f64 = 2.5;

/// Datagrams travel in frames of ordered links, so a packet need not fit an MTU: a whole roster fits one answer.
const MAX_PACKET: usize = 64 * 1024;

/// The numbers behind a [`Preset`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// One member is probed in each.
    pub period: Duration,
    /// Wait for a direct answer before others are asked.
    pub rtt: Duration,
    /// Time to refute a suspicion that others confirmed. The suspect is told directly, so it does not grow with the cluster.
    pub suspicion: Duration,
    /// Own housekeeping; also the yardstick by which a pause of this process is noticed.
    pub tick: Duration,
    gossip: Duration,
    /// First wait before a down member is greeted again; doubles up to twelve times this.
    pub greet: Duration,
}

impl Preset {
    /// The preset with this name; `None`: there is none.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "local" => Some(Self::Local),
            "lan" => Some(Self::Lan),
            "wan" => Some(Self::Wan),
            _ => None,
        }
    }

    pub(crate) fn timing(self) -> Timing {
        let ms = Duration::from_millis;
        match self {
            // Crashes on one host show as refused dials, so suspicion is left only the hung process: no haste.
            Self::Local => Timing {
                period: ms(400),
                rtt: ms(150),
                suspicion: ms(2500),
                tick: ms(200),
                gossip: ms(100),
                greet: ms(2000),
            },
            // 99 % of first probes of a dead node fall within 4.7 periods, its own period must end, the suspicion runs,
            // confirmed after the first period, the news takes three gossip rounds: 2.4 + 0.5 + 2.5 + 0.6 s stays under the 8 s
            // promised for ten nodes.
            Self::Lan => Timing {
                period: ms(500),
                rtt: ms(200),
                suspicion: ms(2500),
                tick: ms(250),
                gossip: ms(200),
                greet: ms(5000),
            },
            Self::Wan => Timing {
                period: ms(2000),
                rtt: ms(800),
                suspicion: ms(8000),
                tick: ms(500),
                gossip: ms(500),
                greet: ms(10_000),
            },
        }
    }
}

impl Timing {
    /// Time a suspect has to answer while nobody confirms the suspicion, in a cluster of `members`, this node included.
    pub fn longest_suspicion(&self, members: usize) -> Duration {
        self.suspicion.mul_f64(UNCONFIRMED * (members.max(1) as f64).log10().max(1.0))
    }

    /// foca's settings for a cluster of `members`, this node included. Only what foca lets change at run time depends
    /// on the size.
    pub fn config(&self, members: usize) -> Config {
        Config {
            probe_period: self.period,
            probe_rtt: self.rtt,
            num_indirect_probes: at_least_one(FANOUT),
            max_transmissions: transmissions(members),
            // Only for form: the deadline is Membership's.
            suspect_to_down_after: self.longest_suspicion(members),
            // Membership tells it whom to forget.
            remove_down_after: None,
            max_packet_size: at_least_one(MAX_PACKET),
            notify_down_members: true,
            // An answer is the whole roster: Membership asks for one when hashes differ.
            periodic_announce: None,
            // Greeting the down is done by Membership, which knows who said goodbye and keeps on when it is alone.
            periodic_announce_to_down_members: None,
            periodic_gossip: Some(PeriodicParams { frequency: self.gossip, num_members: at_least_one(FANOUT) }),
        }
    }
}

fn at_least_one(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap_or(NonZeroUsize::MIN)
}

/// 4 * ceil(log10(N + 1)) reaches all of up to thousands of nodes, and four more for the one in a hundred runs that
/// would miss somebody: on links that are open anyway they cost little.
fn transmissions(members: usize) -> NonZeroU8 {
    let rounds = ((members + 1) as f64).log10().ceil().max(1.0);
    NonZeroU8::new((rounds * 4.0 + 4.0).min(255.0) as u8).unwrap_or(NonZeroU8::MIN)
}
