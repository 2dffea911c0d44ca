//! A node: its listener, its actors, its view of the cluster.

mod config;
mod endpoint;
mod node;
mod view;

pub use config::{Security, SystemConfig};
pub use endpoint::{ActorSpec, Endpoint};
pub use node::System;
pub use view::{Instance, Member, MemberState, Target};
