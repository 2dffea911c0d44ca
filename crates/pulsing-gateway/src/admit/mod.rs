//! Who may ask, how much, and in which order (S6, S7).
//!
//! A request passes three gates. [`Door`] knows the API keys. An [`Account`]'s limits answer 429. The [`Gate`] lets requests
//! through to dispatch while Workers have room, and holds them back in turn, key by key, while they have none.

mod account;
mod door;
mod gate;
mod keys;
mod lane;

pub(crate) use account::{Client, Place, Rate};
pub(crate) use door::Door;
pub(crate) use gate::{Gate, Ticket};
