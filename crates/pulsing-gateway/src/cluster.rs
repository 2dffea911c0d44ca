//! What the gateway asks of the runtime.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;

use pulsing_core::{CallOptions, Instance, Payload, Reply, Result, System, Target};
use tokio::sync::watch;

/// A boxed future that can move between threads.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The part of [`System`] that the gateway uses. A trait, so that the gateway can be tested with Workers in memory that
/// fail on command.
pub trait Cluster: Send + Sync + 'static {
    /// See [`System::instances`].
    fn instances(&self, name: &str) -> Vec<Instance>;
    /// See [`System::names`].
    fn names(&self) -> BTreeMap<String, Vec<Instance>>;
    /// See [`System::changes`].
    fn changes(&self) -> watch::Receiver<u64>;
    /// See [`System::call`].
    fn call(&self, target: Target, payload: Payload, options: CallOptions) -> BoxFuture<Result<Reply>>;
}

impl Cluster for System {
    fn instances(&self, name: &str) -> Vec<Instance> {
        System::instances(self, name)
    }
    fn names(&self) -> BTreeMap<String, Vec<Instance>> {
        System::names(self)
    }
    fn changes(&self) -> watch::Receiver<u64> {
        System::changes(self)
    }
    fn call(&self, target: Target, payload: Payload, options: CallOptions) -> BoxFuture<Result<Reply>> {
        let system = self.clone();
        Box::pin(async move { System::call(&system, target, payload, options).await })
    }
}
