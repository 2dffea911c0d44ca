//! A node: its listener, its actors, its view of the cluster.

mod actors;
mod address;
mod changes;
mod check;
mod claims;
mod config;
mod driver;
mod ending;
mod endpoint;
mod ends;
mod join;
mod links;
mod names;
mod node;
mod observe;
mod port;
mod replication;
mod reply;
mod seed;
mod service;
mod view;
mod watching;

pub use changes::Changes;
pub use config::{Security, SystemConfig};
pub use ending::{DEFAULT_GRACE, Ending, Reason, Terminated};
pub use endpoint::{ActorSpec, Displaced, Endpoint};
pub use names::{NameChange, NameWatch};
pub use node::System;
pub use seed::Seed;
pub use view::{Instance, Member, MemberState, Target};
pub use watching::{Watch, WatchGuard};
