//! What a node does for others beside delivering to actors: it watches, ends and links the actors that live on it.
//!
//! Requests are ordinary calls to [`NODE_ACTOR`], so that they need no frame of their own; no user message waits in front of
//! them (R4). A watch is a call without a deadline that is answered when the actor ends.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;

use super::node::Inner;
use super::{Ending, Reason, Target};
use crate::call::{Call, CallOptions};
use crate::error::{Error, Result};
use crate::id::{ActorId, NodeId};
use crate::payload::{Codec, Payload};

/// The id under which every node answers for itself. No actor has it: ids are random.
pub const NODE_ACTOR: ActorId = ActorId(0);

/// A question to a node.
#[derive(Clone, PartialEq, Message)]
struct NodeRequest {
    /// One of the constants of [`action`].
    #[prost(uint32, tag = "1")]
    action: u32,
    /// The actor, 16 bytes.
    #[prost(bytes = "bytes", tag = "2")]
    actor: Bytes,
    /// Milliseconds that running handlers get.
    #[prost(uint64, tag = "3")]
    grace_ms: u64,
    /// What the actor is to fail with.
    #[prost(string, tag = "4")]
    error: String,
    /// The other end of a link: its node, 16 bytes.
    #[prost(bytes = "bytes", tag = "5")]
    peer_node: Bytes,
    /// And the actor, 16 bytes.
    #[prost(bytes = "bytes", tag = "6")]
    peer_actor: Bytes,
}

mod action {
    pub(super) const WATCH: u32 = 1;
    pub(super) const DRAIN: u32 = 2;
    pub(super) const STOP: u32 = 3;
    pub(super) const KILL: u32 = 4;
    pub(super) const FAIL: u32 = 5;
    pub(super) const LINK: u32 = 6;
    pub(super) const UNLINK: u32 = 7;
}

/// A node's answer: how the actor ended, or an empty one when the request has been carried out.
#[derive(Clone, PartialEq, Message)]
struct NodeReply {
    /// [`Reason::word`], or empty.
    #[prost(string, tag = "1")]
    reason: String,
    /// [`Reason::error`].
    #[prost(string, tag = "2")]
    error: String,
}

/// A request that a node carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Answer when the actor ends.
    Watch(ActorId),
    /// End the actor and answer when it has.
    End(ActorId, Ending),
    /// End the actor when the other ends abnormally.
    Link(ActorId, Target),
    /// Undo a link.
    Unlink(ActorId, Target),
}

impl Ask {
    pub(super) fn payload(&self) -> Payload {
        let mut request = NodeRequest::default();
        let (actor, peer) = match self {
            Self::Watch(actor) => {
                request.action = action::WATCH;
                (actor, None)
            }
            Self::End(actor, ending) => {
                request.action = match ending {
                    Ending::Drain => action::DRAIN,
                    Ending::Stop { grace } => {
                        request.grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
                        action::STOP
                    }
                    Ending::Kill => action::KILL,
                    Ending::Fail { error } => {
                        request.error.clone_from(error);
                        action::FAIL
                    }
                };
                (actor, None)
            }
            Self::Link(actor, peer) => {
                request.action = action::LINK;
                (actor, Some(peer))
            }
            Self::Unlink(actor, peer) => {
                request.action = action::UNLINK;
                (actor, Some(peer))
            }
        };
        request.actor = Bytes::copy_from_slice(&actor.to_bytes());
        if let Some(peer) = peer {
            request.peer_node = Bytes::copy_from_slice(&peer.node.to_bytes());
            request.peer_actor = Bytes::copy_from_slice(&peer.actor.to_bytes());
        }
        Payload::new(Codec::NODE, request.encode_to_vec())
    }

    fn read(payload: &Payload) -> Result<Self> {
        if payload.codec != Codec::NODE {
            return Err(Error::Protocol(format!("codec {} is not what nodes speak among themselves", payload.codec.0)));
        }
        let request = NodeRequest::decode(&payload.head[..])
            .map_err(|e| Error::Protocol(format!("a request to a node was not understood: {e}")))?;
        let actor = ActorId::from_bytes(&request.actor)?;
        let peer = || -> Result<Target> {
            Ok(Target {
                node: NodeId::from_bytes(&request.peer_node)?,
                actor: ActorId::from_bytes(&request.peer_actor)?,
            })
        };
        Ok(match request.action {
            action::WATCH => Self::Watch(actor),
            action::DRAIN => Self::End(actor, Ending::Drain),
            action::STOP => Self::End(actor, Ending::Stop { grace: Duration::from_millis(request.grace_ms) }),
            action::KILL => Self::End(actor, Ending::Kill),
            action::FAIL => Self::End(actor, Ending::Fail { error: request.error }),
            action::LINK => Self::Link(actor, peer()?),
            action::UNLINK => Self::Unlink(actor, peer()?),
            other => return Err(Error::Protocol(format!("this node cannot do what is asked of it (action {other})"))),
        })
    }
}

fn answer(reason: Option<&Reason>) -> Payload {
    let reply = NodeReply {
        reason: reason.map(Reason::word).unwrap_or_default().to_owned(),
        error: reason.map(Reason::error).unwrap_or_default().to_owned(),
    };
    Payload::new(Codec::NODE, reply.encode_to_vec())
}

/// What a node answered: how the actor ended, or `None` when the request was carried out.
pub(super) fn read_answer(payload: &Payload) -> Result<Option<Reason>> {
    let reply = NodeReply::decode(&payload.head[..])
        .map_err(|e| Error::Protocol(format!("the answer of a node was not understood: {e}")))?;
    if reply.reason.is_empty() {
        return Ok(None);
    }
    let NodeReply { reason, error } = reply;
    Reason::from_word(&reason, error)
        .map(Some)
        .ok_or_else(|| Error::Protocol(format!("an actor ended for a reason this version does not know: {reason}")))
}

/// How requests to nodes travel: they wait as long as it takes.
pub(super) fn options() -> CallOptions {
    CallOptions { timeout: None, ..CallOptions::default() }
}

/// Carries out a request of another node, or of this one.
pub(super) fn serve(node: &Arc<Inner>, call: Call) {
    let Call { payload, responder, .. } = call;
    let ask = match Ask::read(&payload) {
        Ok(ask) => ask,
        Err(error) => return responder.error(error),
    };
    match ask {
        Ask::Watch(actor) => {
            let gone = responder.cancel_signal().clone();
            let guard = node.on_end_here(actor, move |reason| responder.value(answer(Some(&reason))));
            // Holds the watch until its caller gives up or it has been answered.
            gone.on_cancel(move || drop(guard));
        }
        Ask::End(actor, ending) => {
            node.on_end_here(actor, move |reason| responder.value(answer(Some(&reason)))).keep();
            node.end_here(actor, ending);
        }
        Ask::Link(actor, peer) => match node.link_here(actor, peer) {
            true => responder.value(answer(None)),
            false => responder.value(answer(Some(&Reason::NotFound))),
        },
        Ask::Unlink(actor, peer) => {
            node.unlink_here(actor, peer);
            responder.value(answer(None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_round_trip() {
        let actor = ActorId(7);
        let peer = Target { node: NodeId(8), actor: ActorId(9) };
        for ask in [
            Ask::Watch(actor),
            Ask::End(actor, Ending::Drain),
            Ask::End(actor, Ending::Stop { grace: Duration::from_millis(1500) }),
            Ask::End(actor, Ending::Kill),
            Ask::End(actor, Ending::Fail { error: "why".into() }),
            Ask::Link(actor, peer),
            Ask::Unlink(actor, peer),
        ] {
            assert_eq!(Ask::read(&ask.payload()).unwrap(), ask);
        }
        for reason in [
            Reason::Stopped,
            Reason::Failed { error: "why".into() },
            Reason::Killed,
            Reason::NodeLost,
            Reason::NodeLeft,
            Reason::NotFound,
        ] {
            assert_eq!(read_answer(&answer(Some(&reason))).unwrap(), Some(reason));
        }
        assert_eq!(read_answer(&answer(None)).unwrap(), None);
    }

    #[test]
    fn golden_bytes_of_a_watch() {
        let golden = [&[0x08, 1, 0x12, 16][..], &[0; 15], &[7]].concat();
        assert_eq!(Ask::Watch(ActorId(7)).payload().head, golden);
    }

    #[test]
    fn requests_and_answers_may_be_anything() {
        let ask = |ask: Ask| ask.payload().head.to_vec();
        let peer = Target { node: NodeId(1), actor: ActorId(2) };
        let corpus = [
            ask(Ask::Watch(ActorId(7))),
            ask(Ask::End(ActorId(7), Ending::Stop { grace: Duration::from_secs(3) })),
            ask(Ask::End(ActorId(7), Ending::Fail { error: "no".into() })),
            ask(Ask::Link(ActorId(7), peer)),
            answer(Some(&Reason::Failed { error: "no".into() })).head.to_vec(),
        ];
        crate::mutate::fuzz("node requests", &corpus, 20_000, |input| {
            let payload = Payload::new(Codec::NODE, input.to_vec());
            let _ = (Ask::read(&payload), read_answer(&payload));
        });
    }

    #[test]
    fn what_is_no_request_is_refused_in_words() {
        let wrong_codec = Payload::new(Codec::PICKLE, "x");
        let unknown = NodeRequest { action: 99, actor: Bytes::from(vec![0; 16]), ..NodeRequest::default() };
        let short = NodeRequest { action: 1, actor: Bytes::from(vec![0; 3]), ..NodeRequest::default() };
        for bad in [
            wrong_codec,
            Payload::new(Codec::NODE, vec![0xff]),
            Payload::new(Codec::NODE, unknown.encode_to_vec()),
            Payload::new(Codec::NODE, short.encode_to_vec()),
        ] {
            assert!(matches!(Ask::read(&bad), Err(Error::Protocol(_))), "{bad:?}");
        }
    }
}
