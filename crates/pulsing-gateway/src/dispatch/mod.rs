//! One request to one Worker, and to the next when that one fails before it has begun to answer (S4).
//!
//! | module      | holds                                                                  |
//! |-------------|------------------------------------------------------------------------|
//! | `place`     | which Worker, and which one next                                       |
//! | `attempt`   | one request to one actor Worker, and what its errors mean              |
//! | `question`  | one request to one actor Worker that is answered in one piece          |
//! | `blame`     | whose fault a failure is                                                |
//! | `takeback`  | when a request without an answer is taken back from a Worker that hangs |
//! | `stall`     | when an answer that has begun stands still                              |
//! | `resume`    | what a stream is continued from when its Worker is lost                 |
//! | `pair`      | one request on two Workers: prefill and decode                         |
//! | `source`    | the pieces of the answer, whatever they come from                      |

mod attempt;
mod blame;
mod pair;
mod place;
mod question;
mod resume;
mod source;
mod stall;
mod takeback;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::HeaderMap;

use crate::api::{Api, ApiError, Question, Resume};
use crate::cluster::Cluster;
use crate::config::GatewayConfig;
use crate::explain::Decisions;
use crate::metrics::Metrics;
use crate::picker::PickRequest;
use crate::policy::{Hints, Policy};
use crate::pool::{Fault, Pool};
use crate::trail::Trail;

pub(crate) use attempt::{Past, broken};
pub(crate) use blame::Blame;
pub(crate) use place::Task;
pub(crate) use resume::{Begun, Cause, GoOn};
pub(crate) use source::{Piece, Source};
pub(crate) use stall::Stall;

/// What placing a request needs.
pub(crate) struct Placement {
    pub(crate) cluster: Arc<dyn Cluster>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) policy: Arc<dyn Policy>,
    pub(crate) config: GatewayConfig,
    pub(crate) metrics: Metrics,
    /// The last choices, kept with `debug_routing`.
    pub(crate) decisions: Decisions,
    pub(crate) blame: Blame,
}

/// One client request, shared by its sub-requests.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) api: Api,
    pub(crate) model: String,
    /// The client's own request, for engines that know its protocol, where it was made into another one.
    pub(crate) native: Option<Native>,
    /// The client named the model itself, and where.
    pub(crate) names_model: bool,
    pub(crate) model_at: Option<Range<usize>>,
    pub(crate) stream: bool,
    /// Whether its stream may go on elsewhere.
    pub(crate) resume: Resume,
    /// Parts that an engine makes of it: choices of a chat, prompts of completions.
    pub(crate) batch: usize,
    /// Which half of it a Worker of a pair does; the body is made for it.
    pub(crate) half: Option<Half>,
    /// What an actor is told by the one that read the prompt.
    pub(crate) handoff: Bytes,
    /// What is asked, where no text is to be generated.
    pub(crate) question: Option<Question>,
    /// The client's headers, for engines.
    pub(crate) headers: HeaderMap,
    pub(crate) request_id: String,
    pub(crate) traceparent: Option<String>,
    pub(crate) affinity: Option<String>,
    /// The prompt as the policy knows prompts; empty where it does not look at them.
    pub(crate) prefix: Vec<u64>,
    pub(crate) deadline: Instant,
    /// Where it has been.
    pub(crate) trail: Arc<Trail>,
    /// For a scheduler outside.
    pub(crate) pick: Option<PickRequest>,
}

/// What one of two Workers does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    /// It reads the prompt; nobody sees its answer.
    Reads,
    /// It generates.
    Generates,
}

/// A request to `/v1/responses` as it came.
#[derive(Clone)]
pub(crate) struct Native {
    pub(crate) body: Bytes,
    /// Where the value of `model` lies.
    pub(crate) model_at: Option<Range<usize>>,
}

impl Job {
    /// W3C trace context for who gets the request: the client's own, unless this Router has a span in between.
    pub(crate) fn trace(&self) -> Option<String> {
        self.trail.traceparent().or_else(|| self.traceparent.clone())
    }
    /// What the policy may look at.
    pub(crate) fn hints(&self) -> Hints<'_> {
        Hints { affinity: self.affinity.as_deref(), prefix: &self.prefix }
    }
}

/// How an attempt ended that gave no answer.
pub(crate) enum Failure {
    /// The Worker is gone that had the request: nothing of the answer was seen, so another may give it.
    Lost(String),
    /// The Worker is gone, or the way to it, and never saw the request, which can have done it no harm.
    Unreached(String),
    /// The Worker hangs, and another one is ready: the request has been taken back from it.
    TakenBack,
    /// The Worker takes no requests now.
    Unready(ApiError),
    /// The Worker's engine refuses the key that the Worker has, which is no fault of the request. With the fault of the
    /// Worker, if another one serves the request; one that is locked out already has none.
    Refused(ApiError, Option<Fault>),
    /// The Worker failed on this request, and says so.
    Failed(ApiError),
    /// The Worker answered with what makes no sense.
    Broken(ApiError),
    /// To the client, as it is.
    Final(ApiError),
}
