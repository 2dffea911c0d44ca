//! What an actor knows of its surroundings, and how others hold it.

use parking_lot::Mutex;

use crate::call::{Call, CallOptions, Reply};
use crate::error::Result;
use crate::payload::Payload;
use crate::system::{Ending, System, Target, Terminated, Watch};

/// An actor's own surroundings.
pub struct Context {
    system: System,
    me: Target,
    wish: Mutex<Wish>,
}

/// What the running handler asked for.
#[derive(Default)]
struct Wish {
    leave: bool,
    failure: Option<String>,
}

impl Context {
    pub(super) fn new(system: System, me: Target) -> Self {
        Self { system, me, wish: Mutex::default() }
    }
    /// The node it lives on.
    pub fn system(&self) -> &System {
        &self.system
    }
    /// Its own address.
    pub fn me(&self) -> Target {
        self.me
    }
    /// Ends this actor after the current message; waiting ones are refused. Under `RestartPolicy::Always` it starts again, and
    /// they wait for that.
    pub fn stop(&self) {
        self.wish.lock().leave = true;
    }
    /// Makes the current message a failure of this actor, as a panic would, once it has been handled.
    pub fn fail(&self, error: impl Into<String>) {
        self.wish.lock().failure = Some(error.into());
    }
    /// How to make a call that `call` waits for: it inherits what is left of the deadline, the trace, and the chain by which a
    /// call that would wait on this actor is refused as a deadlock (R5, R11).
    pub fn nested(&self, call: &Call) -> CallOptions {
        let mut options =
            CallOptions { sender: Some(self.me.actor), trace: call.trace.clone(), ..CallOptions::default() };
        options.chain.clone_from(&call.chain);
        options.chain.push(self.me.actor);
        options.timeout = match (options.timeout, call.remaining()) {
            (Some(own), Some(left)) => Some(own.min(left)),
            (own, left) => own.or(left),
        };
        options
    }
    pub(super) fn take_leave(&self) -> bool {
        std::mem::take(&mut self.wish.lock().leave)
    }
    pub(super) fn take_failure(&self) -> Option<String> {
        self.wish.lock().failure.take()
    }
}

/// A handle on an actor, here or elsewhere.
#[derive(Clone)]
pub struct ActorRef {
    system: System,
    target: Target,
}

impl ActorRef {
    /// A handle on the actor at `target`, to be used from `system`'s node.
    pub fn new(system: System, target: Target) -> Self {
        Self { system, target }
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
    /// Sends without a reply; waits for room in a full mailbox.
    ///
    /// # Errors
    /// See [`System::tell`].
    pub async fn tell(&self, payload: Payload, options: CallOptions) -> Result<()> {
        self.system.tell(self.target, payload, options).await
    }
    /// Waits for its end; see [`System::watch`].
    pub fn watch(&self) -> Watch {
        self.system.watch(self.target)
    }
    /// Ends it and waits until it has; see [`System::end`].
    ///
    /// # Errors
    /// As there.
    pub async fn end(&self, ending: Ending) -> Result<Terminated> {
        self.system.end(self.target, ending).await
    }
    /// Tells it to finish what waits and to end, without waiting for that.
    pub fn drain(&self) {
        self.system.signal(self.target, Ending::Drain);
    }
    /// Tells it to end: the running message gets the default grace, waiting ones are refused.
    pub fn stop(&self) {
        self.system.signal(self.target, Ending::stop());
    }
    /// Ends the actor at once, abandoning the message it handles.
    pub fn kill(&self) {
        self.system.signal(self.target, Ending::Kill);
    }
}
