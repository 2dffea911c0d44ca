//! Actors written in Rust: one message at a time behind a bounded mailbox.
//!
//! Python actors have their own mailboxes on their loop (`pulsing.core`); both meet the system as an
//! [`Endpoint`](crate::Endpoint).

mod context;
mod mailbox;
mod runner;
mod supervision;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

pub use context::{ActorRef, Context};
pub use mailbox::DEFAULT_CAPACITY;
use mailbox::Mailbox;
use runner::{Factory, Life};
use supervision::Budget;
pub use supervision::{RestartPolicy, Supervision};

use crate::call::Call;
use crate::error::{Error, Result};
use crate::id::ActorId;
use crate::system::{ActorSpec, Reason, System, Target};

/// An actor. Its methods never run at the same time. A panic in one of them is a failure (R9): the caller gets
/// its words, and the actor is started again or ends, as its [`Supervision`] says.
pub trait Actor: Send + 'static {
    /// Runs before the actor is reachable; an error makes `spawn` fail and frees the name (R8).
    fn on_start(&mut self, _ctx: &Context) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
    /// Handles one call. Answer through `call.responder`; dropping it unanswered tells the caller `ActorStopped`.
    fn receive(&mut self, call: Call, ctx: &Context) -> impl Future<Output = ()> + Send;
    /// Runs after the last message of this instance, a failed one included.
    fn on_stop(&mut self, _ctx: &Context) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// How an actor is run.
#[derive(Clone, Debug)]
pub struct SpawnOptions {
    /// Messages that may wait; callers beyond it wait beside the mailbox (R3). Default 256.
    pub mailbox: usize,
    /// When it is started again.
    pub supervision: Supervision,
    /// Longest `on_start`; `None` = for ever. Default 60 s.
    pub start_limit: Option<Duration>,
    /// Longest `on_stop`. Default 60 s.
    pub stop_limit: Duration,
}

/// Longest `on_start` and `on_stop` unless told otherwise, the same for Python actors.
pub const DEFAULT_HOOK_LIMIT: Duration = Duration::from_secs(60);

impl Default for SpawnOptions {
    fn default() -> Self {
        Self {
            mailbox: DEFAULT_CAPACITY,
            supervision: Supervision::default(),
            start_limit: Some(DEFAULT_HOOK_LIMIT),
            stop_limit: DEFAULT_HOOK_LIMIT,
        }
    }
}

impl System {
    /// Starts an actor and returns when it is ready (R8). Its mailbox holds [`DEFAULT_CAPACITY`] waiting messages (R3), and a
    /// failure ends it.
    ///
    /// # Errors
    /// What `on_start` failed with; `NameTaken`, `InvalidName`, `ShutDown`.
    pub async fn spawn<A: Actor>(&self, actor: A, spec: ActorSpec) -> Result<ActorRef> {
        let mut one = Some(actor);
        self.launch(Box::new(move || one.take()), spec, SpawnOptions::default()).await
    }

    /// [`spawn`](Self::spawn) with a factory, which supervision needs, and with options.
    ///
    /// # Errors
    /// As `spawn`; `Config` for options that make no sense; `Timeout` when `on_start` takes longer than `start_limit`.
    pub async fn spawn_with<A: Actor>(
        &self,
        mut factory: impl FnMut() -> A + Send + 'static,
        spec: ActorSpec,
        options: SpawnOptions,
    ) -> Result<ActorRef> {
        self.launch(Box::new(move || Some(factory())), spec, options).await
    }

    async fn launch<A: Actor>(&self, factory: Factory<A>, spec: ActorSpec, options: SpawnOptions) -> Result<ActorRef> {
        options.supervision.check()?;
        if options.mailbox == 0 {
            return Err(Error::Config("a mailbox of 0 messages takes none; give it 1 or more".to_owned()));
        }
        let id = self.transport().actor_id();
        let target = Target { node: self.node_id(), actor: id };
        let mailbox = Arc::new(Mailbox::new(id, options.mailbox, Arc::clone(self.metrics())));
        let mut life = Life {
            system: self.clone(),
            label: spec.name.clone().unwrap_or_else(|| id.to_string()),
            context: Context::new(self.clone(), target),
            mailbox: Arc::clone(&mailbox),
            factory,
            budget: Budget::new(options.supervision),
            start_limit: options.start_limit,
            stop_limit: options.stop_limit,
        };
        // The name is claimed first: two spawns under one name must not both run `on_start`.
        self.register(id, spec, Arc::clone(&mailbox) as _)?;
        let mut release = Release {
            system: self.clone(),
            id,
            mailbox,
            reason: Reason::Failed { error: "it could not start".into() },
        };
        let started = life.start().await;
        let actor = started.inspect_err(|error| release.because(Reason::Failed { error: error.to_string() }))?;
        tokio::spawn(async move {
            release.because(Reason::Failed { error: "its task was dropped with the runtime".to_owned() });
            let reason = life.run(actor).await;
            release.because(reason);
        });
        Ok(ActorRef::new(self.clone(), target))
    }
}

/// However an actor ends, its name goes, its waiting callers learn of it, and so do its watchers.
struct Release {
    system: System,
    id: ActorId,
    mailbox: Arc<Mailbox>,
    reason: Reason,
}

impl Release {
    fn because(&mut self, reason: Reason) {
        self.reason = reason;
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        self.mailbox.close();
        self.system.unregister(self.id, self.reason.clone());
    }
}
