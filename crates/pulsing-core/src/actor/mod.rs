//! Actors written in Rust: one message at a time behind a bounded mailbox.
//!
//! Python actors have their own mailboxes on their loop (`pulsing.core`); both meet the system as an
//! [`Endpoint`](crate::Endpoint).

mod context;
mod mailbox;

use std::sync::Arc;

pub use context::{ActorRef, Context};
pub use mailbox::DEFAULT_CAPACITY;
use mailbox::Mailbox;

use crate::call::Call;
use crate::error::{Error, Result};
use crate::id::ActorId;
use crate::system::{ActorSpec, System, Target};

/// An actor. Its methods never run at the same time.
pub trait Actor: Send + 'static {
    /// Runs before the actor is reachable; an error makes `spawn` fail and frees the name (R8).
    fn on_start(&mut self, _ctx: &Context) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
    /// Handles one call. Answer through `call.responder`; dropping it unanswered tells the caller `ActorStopped`.
    fn receive(&mut self, call: Call, ctx: &Context) -> impl Future<Output = ()> + Send;
    /// Runs after the last message.
    fn on_stop(&mut self, _ctx: &Context) -> impl Future<Output = ()> + Send {
        async {}
    }
}

impl System {
    /// Starts an actor and returns when it is ready (R8). Its mailbox holds [`DEFAULT_CAPACITY`] waiting messages (R3).
    ///
    /// # Errors
    /// What `on_start` failed with; `NameTaken`, `InvalidName`, `ShutDown`.
    pub async fn spawn<A: Actor>(&self, mut actor: A, spec: ActorSpec) -> Result<ActorRef> {
        let id = ActorId::generate();
        let target = Target { node: self.node_id(), actor: id };
        let mailbox = Arc::new(Mailbox::new(id, DEFAULT_CAPACITY));
        let context = Context::new(self.clone(), target, Arc::clone(&mailbox));
        // The name is claimed first: two spawns under one name must not both run `on_start`.
        self.register(id, spec, Arc::clone(&mailbox) as _)?;
        let started = ReleaseOnDrop { system: self.clone(), id, mailbox: Arc::clone(&mailbox) };
        actor.on_start(&context).await?;
        let actor_ref = ActorRef::new(self.clone(), target, Some(Arc::clone(&mailbox)));
        tokio::spawn(async move {
            let _release = started;
            while let Some(call) = mailbox.next().await {
                let cancel = call.responder.cancel_signal().clone();
                tokio::select! {
                    () = actor.receive(call, &context) => {}
                    () = cancel.cancelled() => {}
                    () = mailbox.killed() => break,
                }
            }
            actor.on_stop(&context).await;
        });
        Ok(actor_ref)
    }
}

/// However an actor ends, a panic included, its name goes and its waiting callers learn of it.
struct ReleaseOnDrop {
    system: System,
    id: ActorId,
    mailbox: Arc<Mailbox>,
}

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        self.system.unregister(self.id);
        for call in self.mailbox.close() {
            let actor = self.id;
            call.responder.error(Error::ActorStopped { actor });
        }
    }
}
