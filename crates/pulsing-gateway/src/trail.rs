//! What one request went through; it outlives the request's tasks.

use std::sync::OnceLock;

use crate::admit::Ticket;

/// The way of one request.
#[derive(Default)]
pub(crate) struct Trail {
    ticket: OnceLock<Ticket>,
}

impl Trail {
    /// It was let through to dispatch.
    pub(crate) fn let_through(&self, ticket: Ticket) {
        let _ = self.ticket.set(ticket);
    }
    /// A Worker counts it from here on.
    pub(crate) fn attempt(&self) {
        if let Some(ticket) = self.ticket.get() {
            ticket.placed();
        }
    }
}
