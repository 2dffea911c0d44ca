//! What an actor knows of its surroundings, and how others hold it.

use std::sync::Arc;

use super::mailbox::Mailbox;
use crate::call::{CallOptions, Reply};
use crate::error::Result;
use crate::payload::Payload;
use crate::system::{System, Target};

/// An actor's own surroundings.
pub struct Context {
    system: System,
    me: Target,
    mailbox: Arc<Mailbox>,
}

impl Context {
    pub(super) fn new(system: System, me: Target, mailbox: Arc<Mailbox>) -> Self {
        Self { system, me, mailbox }
    }
    /// The node it lives on.
    pub fn system(&self) -> &System {
        &self.system
    }
    /// Its own address.
    pub fn me(&self) -> Target {
        self.me
    }
    /// Ends this actor after the current message.
    pub fn stop(&self) {
        self.mailbox.stop(false);
    }
}

/// A handle on an actor, here or elsewhere.
#[derive(Clone)]
pub struct ActorRef {
    system: System,
    target: Target,
    mailbox: Option<Arc<Mailbox>>,
}

impl ActorRef {
    pub(super) fn new(system: System, target: Target, mailbox: Option<Arc<Mailbox>>) -> Self {
        Self { system, target, mailbox }
    }
    /// Where the actor lives and which one it is.
    pub fn target(&self) -> Target {
        self.target
    }
    /// Calls it and waits for the reply.
    ///
    /// # Errors
    /// Whatever the call ended with.
    pub async fn ask(&self, payload: Payload, options: CallOptions) -> Result<Reply> {
        self.system.call(self.target, payload, options).await
    }
    /// Sends without a reply.
    ///
    /// # Errors
    /// See [`System::tell`].
    pub fn tell(&self, payload: Payload, options: CallOptions) -> Result<()> {
        self.system.tell(self.target, payload, options)
    }
    /// Ends the actor after the message it handles; waiting ones are refused. Only where it lives.
    pub fn stop(&self) {
        if let Some(mailbox) = &self.mailbox {
            mailbox.stop(false);
        }
    }
    /// Ends the actor at once, abandoning the message it handles. Only where it lives.
    pub fn kill(&self) {
        if let Some(mailbox) = &self.mailbox {
            mailbox.stop(true);
        }
    }
}
