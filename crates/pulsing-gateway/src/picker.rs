//! A scheduler outside the gateway, asked before the policy (S1).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pulsing_core::{ActorId, CallOptions, Codec, Payload, Reply, Target};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::cluster::Cluster;

/// What a scheduler is told of a request.
#[derive(Clone, Debug, Serialize)]
pub struct PickRequest {
    /// The text of the request, shortened.
    pub text: String,
    /// Its headers, names in lower case.
    pub headers: BTreeMap<String, String>,
}

/// Chooses Workers in place of the policy. Takes questions one by one and may answer them in batches.
pub trait ExternalPicker: Send + Sync + 'static {
    /// Answers through `answer`: a Worker, or `None` to leave it to the policy. Must not block. An answer that comes after
    /// the gateway's limit is ignored.
    fn pick(&self, request: PickRequest, answer: oneshot::Sender<Option<ActorId>>);
}

/// A picker that is an actor: it gets JSON `{"requests": [{"text", "headers"}, ...]}` and answers
/// `{"picks": [actor id or null, ...]}`; null leaves it to the policy, anything else that is no id is a failure. Questions
/// that arrive while a batch is out travel together in the next.
#[derive(Clone)]
pub struct ActorPicker(Arc<Inner>);

struct Inner {
    cluster: Arc<dyn Cluster>,
    target: Target,
    limit: Duration,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<(PickRequest, oneshot::Sender<Option<ActorId>>)>,
    /// A task is sending batches.
    busy: bool,
}

#[derive(Serialize)]
struct Batch<'a> {
    requests: Vec<&'a PickRequest>,
}

#[derive(Deserialize)]
struct Picks {
    picks: Vec<Option<String>>,
}

impl ActorPicker {
    /// Asks the actor at `target`; a batch without an answer within `limit` counts as unanswered.
    pub fn new(cluster: Arc<dyn Cluster>, target: Target, limit: Duration) -> Self {
        Self(Arc::new(Inner { cluster, target, limit, queue: Mutex::default() }))
    }
}

impl ExternalPicker for ActorPicker {
    fn pick(&self, request: PickRequest, answer: oneshot::Sender<Option<ActorId>>) {
        let mut queue = self.0.queue.lock();
        queue.waiting.push((request, answer));
        if !std::mem::replace(&mut queue.busy, true) {
            tokio::spawn(Arc::clone(&self.0).run());
        }
    }
}

impl Inner {
    async fn run(self: Arc<Self>) {
        loop {
            let batch = {
                let mut queue = self.queue.lock();
                if queue.waiting.is_empty() {
                    queue.busy = false;
                    return;
                }
                std::mem::take(&mut queue.waiting)
            };
            let picks = self.ask(batch.iter().map(|(request, _)| request).collect()).await;
            // A sender that drops unanswered is what the gateway counts as a failed scheduler.
            for ((_, answer), pick) in batch.into_iter().zip(picks) {
                if let Some(pick) = pick {
                    let _ = answer.send(pick);
                }
            }
        }
    }

    /// One entry a request: `None` where the scheduler failed.
    async fn ask(&self, requests: Vec<&PickRequest>) -> Vec<Option<Option<ActorId>>> {
        let Ok(head) = serde_json::to_vec(&Batch { requests }) else { return Vec::new() };
        let options = CallOptions { timeout: Some(self.limit), ..CallOptions::default() };
        match self.cluster.call(self.target, Payload::new(Codec::JSON, head), options).await {
            Ok(Reply::Value(reply)) => match serde_json::from_slice::<Picks>(&reply.head) {
                Ok(reply) => reply
                    .picks
                    .into_iter()
                    .map(|pick| pick.map(|id| id.parse().ok()).map_or(Some(None), |id| id.map(Some)))
                    .collect(),
                Err(error) => {
                    tracing::warn!(%error, "the scheduler's answer cannot be read");
                    Vec::new()
                }
            },
            Ok(Reply::Stream(_)) => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, "the scheduler did not answer");
                Vec::new()
            }
        }
    }
}
