//! The life of one actor: start, messages, restarts, end.

use std::any::Any;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::mailbox::{Mailbox, Phase};
use super::supervision::{Budget, RestartPolicy};
use super::{Actor, Context};
use crate::error::{Error, Result};
use crate::fault;
use crate::system::{Reason, System};

/// Time that `on_stop` of a killed actor gets.
const KILLED_STOP_LIMIT: Duration = Duration::from_secs(1);

/// Makes the actor; `None` if it cannot be made again.
pub(super) type Factory<A> = Box<dyn FnMut() -> Option<A> + Send>;

/// What the runner needs beside the actor itself.
pub(super) struct Life<A> {
    pub(super) system: System,
    pub(super) label: String,
    pub(super) context: Context,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) factory: Factory<A>,
    pub(super) budget: Budget,
    pub(super) start_limit: Option<Duration>,
    pub(super) stop_limit: Duration,
}

/// Why messages are no longer taken by this instance.
enum Exit {
    /// It was told to end from outside.
    Told,
    /// It asked for its own end.
    Left,
    Failed(String),
}

impl<A: Actor> Life<A> {
    /// Makes an instance and starts it.
    pub(super) async fn start(&mut self) -> Result<A> {
        let made = fault::catch(&mut self.factory).map_err(|panic| panicked(&*panic))?;
        let mut actor = made.ok_or_else(|| Error::Config(format!("actor {} cannot be made again", self.label)))?;
        let starting = caught(actor.on_start(&self.context));
        let started = match self.start_limit {
            Some(limit) => tokio::time::timeout(limit, starting).await.map_err(|_| Error::Timeout {
                what: format!("on_start of actor {} did not end", self.label),
                after: limit,
            })?,
            None => starting.await,
        };
        match started {
            Ok(outcome) => outcome.map(|()| actor),
            Err(panic) => Err(panicked(&*panic)),
        }
    }

    /// Runs the actor to its end and returns how it ended.
    pub(super) async fn run(&mut self, mut actor: A) -> Reason {
        loop {
            let exit = self.serve(&mut actor).await;
            self.stop(&mut actor).await;
            drop(actor);
            let error = match (exit, self.budget.policy()) {
                (Exit::Told, _) => return self.told(),
                (Exit::Left, RestartPolicy::Always) => None,
                (Exit::Left, _) => return Reason::Stopped,
                (Exit::Failed(error), RestartPolicy::Never) => return Reason::Failed { error },
                (Exit::Failed(error), _) => Some(error),
            };
            match self.restart(error).await {
                Ok(again) => actor = again,
                Err(reason) => return reason,
            }
        }
    }

    fn told(&self) -> Reason {
        match (self.mailbox.failure(), self.mailbox.phase()) {
            (Some(error), _) => Reason::Failed { error },
            (None, Phase::Killed) => Reason::Killed,
            (None, _) => Reason::Stopped,
        }
    }

    async fn serve(&mut self, actor: &mut A) -> Exit {
        while let Some(call) = self.mailbox.next().await {
            let cancel = call.responder.cancel_signal().clone();
            let outcome = tokio::select! {
                outcome = caught(actor.receive(call, &self.context)) => outcome,
                () = cancel.cancelled() => Ok(()),
                () = self.mailbox.cut() => Ok(()),
            };
            if let Err(panic) = outcome {
                return Exit::Failed(fault::words(&*panic).to_owned());
            }
            if let Some(error) = self.context.take_failure() {
                return Exit::Failed(error);
            }
            if self.context.take_leave() {
                return Exit::Left;
            }
        }
        Exit::Told
    }

    async fn stop(&mut self, actor: &mut A) {
        let killed = async {
            self.mailbox.killed().await;
            tokio::time::sleep(KILLED_STOP_LIMIT).await;
        };
        let label = &self.label;
        let outcome = tokio::select! {
            outcome = tokio::time::timeout(self.stop_limit, caught(actor.on_stop(&self.context))) => outcome,
            () = killed => return tracing::warn!(actor = label, "on_stop of a killed actor was cut short"),
        };
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(panic)) => tracing::error!(actor = label, panic = fault::words(&*panic), "on_stop panicked"),
            Err(_) => {
                tracing::error!(actor = label, limit = ?self.stop_limit, "on_stop took too long and was given up")
            }
        }
    }

    /// Waits and makes another instance, as long as the budget lasts.
    async fn restart(&mut self, mut error: Option<String>) -> std::result::Result<A, Reason> {
        let label = self.label.clone();
        loop {
            let ended = error.clone().map_or(Reason::Stopped, |error| Reason::Failed { error });
            let what = error.take().unwrap_or_else(|| "it ended itself".to_owned());
            let Some(delay) = self.budget.next_delay(Instant::now(), self.system.transport()) else {
                tracing::error!(actor = label, error = what, "actor failed too often: it ends");
                return Err(Reason::Failed { error: what });
            };
            tracing::warn!(actor = label, error = what, ?delay, "actor failed: it is started again");
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = self.mailbox.ending() => return Err(self.told()),
            }
            self.system.restarted(self.context.me().actor, &ended);
            match self.start().await {
                Ok(actor) => return Ok(actor),
                Err(again) => error = Some(again.to_string()),
            }
        }
    }
}

/// Runs a future to its end or its panic.
async fn caught<T>(work: impl Future<Output = T>) -> std::result::Result<T, Box<dyn Any + Send>> {
    let mut work = pin!(work);
    poll_fn(|cx| match fault::catch(|| work.as_mut().poll(cx)) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => std::task::Poll::Ready(Err(panic)),
    })
    .await
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    fault::panicked(fault::words(panic))
}
