//! What the gateway asks of the runtime.

use std::future::Future;
use std::pin::Pin;

use pulsing_core::{ActorId, CallOptions, Instance, NameChange, NameWatch, Payload, Reply, Result, System, Target};

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
    /// See [`System::call`]. No two calls are in an order, whoever is called.
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
        // What one sender says to one actor stays in order (R2): a client's small request would wait behind another's large
        // one, and the question whether an engine is there behind both.
        let options = CallOptions { sender: Some(ActorId::generate()), ..options };
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use pulsing_core::actor::{Actor, Context};
    use pulsing_core::{ActorSpec, Call, Codec, SystemConfig};

    use super::*;

    /// Says how many bytes it got.
    struct Scales;

    impl Actor for Scales {
        async fn receive(&mut self, call: Call, _: &Context) {
            call.responder.value(Payload::new(Codec::RAW, call.payload.len().to_string()));
        }
    }

    async fn node(seeds: Vec<String>) -> System {
        let secret = std::env::temp_dir().join(format!("pulsing-gateway-test-{}/secret", std::process::id()));
        let addr = Some("127.0.0.1:0".into());
        System::start(SystemConfig { addr, seeds, secret_file: Some(secret), ..SystemConfig::default() })
            .await
            .expect("a node")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn test_r2_no_request_waits_behind_another_clients_large_one() {
        let there = node(Vec::new()).await;
        let here = node(vec![there.addr().to_string()]).await;
        let spec = ActorSpec { name: Some("worker".into()), public: true, ..ActorSpec::default() };
        let target = there.spawn(Scales, spec).await.expect("an actor").target();
        here.resolve("worker", None, Duration::from_secs(5)).await.expect("its name");
        let ask =
            |size: usize| Cluster::call(&here, target, Payload::new(Codec::RAW, vec![0; size]), CallOptions::default());
        let said = |reply: Result<Reply>| match reply.expect("an answer") {
            Reply::Value(value) => value.head,
            Reply::Stream(_) => panic!("a stream"),
        };
        ask(1).await.expect("the link is open");
        let mut large = tokio::spawn(ask(256 << 20));
        tokio::time::timeout(Duration::from_millis(1), &mut large).await.expect_err("it is on its way");
        tokio::select! {
            biased;
            _ = &mut large => panic!("the large one went first"),
            small = ask(2) => assert_eq!(said(small), Bytes::from_static(b"2")),
        }
        assert_eq!(said(large.await.expect("no panic")), (256usize << 20).to_string());
    }
}
