//! What watching promises that only its own state shows.
use super::*;
use crate::actor::{Actor, Context as ActorContext};
use crate::{ActorSpec, Call, SystemConfig};

struct Idle;

impl Actor for Idle {
    async fn receive(&mut self, _call: Call, _ctx: &ActorContext) {}
}

async fn node(seeds: &[&System]) -> System {
    let secret = std::env::temp_dir().join(format!("pulsing-watching-{}/secret", std::process::id()));
    let config = SystemConfig {
        addr: Some("127.0.0.1:0".to_owned()),
        seeds: seeds.iter().map(|seed| seed.addr().to_string()).collect(),
        secret_file: Some(secret),
        ..SystemConfig::default()
    };
    System::start(config).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_a_broken_link_is_not_the_end_of_a_node() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let actor = b.spawn(Idle, ActorSpec::default()).await.unwrap();
    let (id, target) = (b.node_id(), actor.target());
    let mut watch = a.watch(target);
    for _ in 0..3 {
        let broken = Error::ConnectionLost { addr: b.addr().to_string(), reason: "a test broke it".to_owned() };
        a.0.close_link(id, &broken);
        let made_again = async {
            while a.0.watching.state.lock().there[&id].actors[&target.actor].round == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), made_again).await.unwrap();
    }
    assert!(tokio::time::timeout(Duration::from_millis(20), &mut watch).await.is_err(), "it has not ended");
    actor.stop();
    let ended = tokio::time::timeout(Duration::from_secs(5), &mut watch).await.unwrap().unwrap();
    assert_eq!(ended.reason, Reason::Stopped);
    assert!(a.0.watching.state.lock().there.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_dropping_watches_and_links_frees_what_they_hold_on_both_nodes() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let far = b.spawn(Idle, ActorSpec::default()).await.unwrap();
    let near = a.spawn(Idle, ActorSpec::default()).await.unwrap();
    let watches: Vec<_> = (0..10).map(|_| a.watch(far.target())).collect();
    let own = a.watch(near.target());
    a.link(near.target(), far.target()).await.unwrap();
    a.link(near.target(), far.target()).await.unwrap();
    let held = |node: &System| {
        let state = node.0.watching.state.lock();
        (state.here.len(), state.there.len(), state.links.len())
    };
    assert_eq!((held(&a), held(&b)), ((1, 1, 1), (1, 1, 1)));
    drop((watches, own));
    a.unlink(near.target(), far.target()).await.unwrap();
    let empty = async {
        while held(&a) != (0, 0, 0) || held(&b) != (0, 0, 0) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), empty).await.unwrap();
}
