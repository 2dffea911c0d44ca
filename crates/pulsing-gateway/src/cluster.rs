//! What the gateway asks of the runtime.

use std::future::Future;
use std::pin::Pin;

use pulsing_core::{CallOptions, Instance, NameChange, NameWatch, Payload, Reply, Result, System, Target};

/// A boxed future that can move between threads.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The part of [`System`] that the gateway uses. A trait, so that the gateway can be tested with Workers in memory that
/// fail on command.
pub trait Cluster: Send + Sync + 'static {
    /// See [`System::watch_name`].
    ///
    /// # Errors
    /// `InvalidName` for what cannot be one.
    fn watch_name(&self, name: &str) -> Result<Box<dyn Instances>>;
    /// See [`System::first_names`].
    fn first_names(&self, limit: usize) -> (usize, Vec<Instance>);
    /// See [`System::is_on_this_host`].
    fn is_on_this_host(&self, addr: &str) -> bool;
    /// See [`System::call`].
    fn call(&self, target: Target, payload: Payload, options: CallOptions) -> BoxFuture<Result<Reply>>;
}

/// The part of [`NameWatch`] that the gateway uses.
pub trait Instances: Send + 'static {
    /// See [`NameWatch::changed`].
    fn changed(&mut self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;
    /// See [`NameWatch::take`].
    fn take(&mut self) -> Vec<NameChange>;
}

impl Cluster for System {
    fn watch_name(&self, name: &str) -> Result<Box<dyn Instances>> {
        Ok(Box::new(System::watch_name(self, name)?))
    }
    fn first_names(&self, limit: usize) -> (usize, Vec<Instance>) {
        System::first_names(self, limit)
    }
    fn is_on_this_host(&self, addr: &str) -> bool {
        System::is_on_this_host(addr)
    }
    fn call(&self, target: Target, payload: Payload, options: CallOptions) -> BoxFuture<Result<Reply>> {
        let system = self.clone();
        Box::pin(async move { System::call(&system, target, payload, options).await })
    }
}

impl Instances for NameWatch {
    fn changed(&mut self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(NameWatch::changed(self))
    }
    fn take(&mut self) -> Vec<NameChange> {
        NameWatch::take(self)
    }
}
