//! A node: its listener, its actors, its view of the cluster.

mod address;
mod claims;
mod config;
mod driver;
mod endpoint;
mod join;
mod node;
mod observe;
mod reply;
mod view;

pub use config::{Security, SystemConfig};
pub use endpoint::{ActorSpec, Displaced, Endpoint};
pub use node::System;
pub use view::{Instance, Member, MemberState, Target};
