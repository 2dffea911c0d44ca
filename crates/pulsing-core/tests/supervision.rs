//! Endings, supervision and watches of Rust actors: R3, R4, R8, R9, R11, within one node and between two.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use parking_lot::Mutex;
use pulsing_core::actor::{Actor, Context, RestartPolicy, SpawnOptions, Supervision};
use pulsing_core::{
    ActorId, ActorSpec, Call, CallOptions, Ending, Error, NodeId, Reason, Reply, System, Target, Terminated,
};

const SOON: Duration = Duration::from_secs(5);

/// What an actor did, as words in order.
type Log = Arc<Mutex<Vec<String>>>;

/// Does what its messages say.
struct Obedient(Log);

impl Obedient {
    fn note(&self, word: impl Into<String>) {
        self.0.lock().push(word.into());
    }
}

impl Actor for Obedient {
    async fn on_start(&mut self, _ctx: &Context) -> pulsing_core::Result<()> {
        self.note("start");
        Ok(())
    }
    async fn receive(&mut self, call: Call, ctx: &Context) {
        let word = String::from_utf8(call.payload.head.to_vec()).unwrap();
        self.note(word.clone());
        match word.as_str() {
            "panic" => panic!("as asked"),
            "fail" => ctx.fail("as told"),
            "leave" => ctx.stop(),
            "hang" => std::future::pending().await,
            "doze" => tokio::time::sleep(Duration::from_millis(50)).await,
            _ => {}
        }
        call.responder.value(raw(word));
    }
    async fn on_stop(&mut self, _ctx: &Context) {
        self.note("stop");
    }
}

fn quick(policy: RestartPolicy) -> SpawnOptions {
    let supervision = Supervision {
        policy,
        max_restarts: 2,
        min_backoff: Duration::from_millis(1),
        max_backoff: Duration::from_millis(4),
        ..Supervision::default()
    };
    SpawnOptions { supervision, ..SpawnOptions::default() }
}

async fn obedient(system: &System, name: &str, options: SpawnOptions) -> (pulsing_core::actor::ActorRef, Log) {
    let log = Log::default();
    let theirs = Arc::clone(&log);
    let spec = if name.is_empty() { ActorSpec::default() } else { named(name) };
    let actor = system.spawn_with(move || Obedient(Arc::clone(&theirs)), spec, options).await.unwrap();
    (actor, log)
}

async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, work).await.unwrap_or_else(|_| panic!("not within {SOON:?}: {what}"))
}

async fn reason(what: &str, watch: impl Future<Output = pulsing_core::Result<Terminated>>) -> Reason {
    within(what, watch).await.unwrap().reason
}

/// Asks without waiting for the answer, and returns when the actor works on it.
async fn begin(system: &System, target: Target, word: &'static str, log: &Log) -> tokio::task::JoinHandle<bool> {
    let system = system.clone();
    let asked = tokio::spawn(async move { ask(&system, target, word).await.is_ok() });
    eventually("it is handled", SOON, || log.lock().iter().any(|w| w == word)).await;
    asked
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_a_watch_tells_how_an_actor_ended_here_and_from_another_node() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    for from in [&a, &b] {
        for (how, expected) in [
            ("stop", Reason::Stopped),
            ("drain", Reason::Stopped),
            ("kill", Reason::Killed),
            ("leave", Reason::Stopped),
            ("panic", Reason::Failed { error: "as asked".into() }),
            ("fail", Reason::Failed { error: "as told".into() }),
        ] {
            let (actor, _) = obedient(&a, "", quick(RestartPolicy::Never)).await;
            let target = actor.target();
            let watches = [from.watch(target), from.watch(target)];
            assert_eq!(ask(from, target, "x").await.unwrap().head, "x");
            match how {
                "stop" => actor.stop(),
                "drain" => actor.drain(),
                "kill" => actor.kill(),
                word => drop(ask(from, target, word).await),
            }
            for watch in watches {
                assert_eq!(reason(how, watch).await, expected);
            }
            // What is dead already is told at once, and as it was.
            assert_eq!(reason(how, from.watch(target)).await, expected);
        }
        let nobody = Target { node: a.node_id(), actor: ActorId(7) };
        assert_eq!(reason("never lived", from.watch(nobody)).await, Reason::NotFound);
    }
    let stranger = Target { node: NodeId(7), actor: ActorId(7) };
    assert_eq!(reason("no such node", a.watch(stranger)).await, Reason::NodeLost);
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_ten_thousand_watches_of_one_node_share_and_dropping_them_frees_everything() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let (first, _) = obedient(&a, "", quick(RestartPolicy::Never)).await;
    let (second, _) = obedient(&a, "", quick(RestartPolicy::Never)).await;
    let dropped: Vec<_> = (0..100).map(|_| b.watch(second.target())).collect();
    let begun = a.metrics().messages_sent.get() + b.metrics().messages_sent.get();
    let watches: Vec<_> = (0..10_000).map(|_| b.watch(first.target())).collect();
    let sent = a.metrics().messages_sent.get() + b.metrics().messages_sent.get() - begun;
    assert!(sent < 10, "{sent} messages for watches of one actor");
    drop(dropped);
    first.stop();
    for watch in watches {
        assert_eq!(reason("all are told", watch).await, Reason::Stopped);
    }
    assert_eq!(second.end(Ending::Kill).await.unwrap().reason, Reason::Killed);
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_ten_thousand_watched_actors() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let mut actors = Vec::new();
    for _ in 0..10_000 {
        actors.push(a.spawn(Echo, ActorSpec::default()).await.unwrap());
    }
    let watches: Vec<_> = actors.iter().map(|actor| b.watch(actor.target())).collect();
    for actor in &actors {
        actor.stop();
    }
    for watch in watches {
        assert_eq!(
            tokio::time::timeout(Duration::from_secs(30), watch).await.unwrap().unwrap().reason,
            Reason::Stopped
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_a_node_that_leaves_ends_the_watches_of_its_actors() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let (actor, _) = obedient(&b, "x", quick(RestartPolicy::Never)).await;
    let (here, _) = obedient(&a, "", quick(RestartPolicy::Never)).await;
    let (watch, backwards, own) = (a.watch(actor.target()), b.watch(here.target()), b.watch(actor.target()));
    a.resolve("x", None, SOON).await.unwrap();
    ask(&a, actor.target(), "x").await.unwrap();
    b.shutdown().await;
    assert_eq!(reason("it left", watch).await, Reason::NodeLeft);
    assert_eq!(reason("it left", own).await, Reason::NodeLeft);
    assert_eq!(within("this node is shut down", backwards).await, Err(Error::ShutDown));
    assert_eq!(reason("it has left", a.watch(actor.target())).await, Reason::NodeLeft);
    assert_eq!(within("this node is shut down", b.watch(here.target())).await, Err(Error::ShutDown));
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_drain_finishes_what_waits_stop_gives_grace_and_kill_none() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    for from in [&a, &b] {
        // Drain: the running and the waiting message are answered, a later one is not.
        let (actor, log) = obedient(&a, "", quick(RestartPolicy::Never)).await;
        let running = begin(from, actor.target(), "doze", &log).await;
        let waiting = {
            let (from, target) = (from.clone(), actor.target());
            tokio::spawn(async move { ask(&from, target, "waits").await })
        };
        // The order of one pair (R2): once this is answered, the one before it is in the mailbox.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let ended = from.end(actor.target(), Ending::Drain);
        let (ended, running, waiting) = tokio::join!(within("drained", ended), running, waiting);
        assert_eq!(ended.unwrap().reason, Reason::Stopped);
        assert!(running.unwrap() && waiting.unwrap().is_ok());
        assert_eq!(*log.lock(), ["start", "doze", "waits", "stop"]);

        // Stop: the waiting message fails, the running one has its grace.
        let (actor, log) = obedient(&a, "", quick(RestartPolicy::Never)).await;
        let running = begin(from, actor.target(), "hang", &log).await;
        let waiting = {
            let (from, target) = (from.clone(), actor.target());
            tokio::spawn(async move { ask(&from, target, "waits").await })
        };
        let grace = Duration::from_millis(100);
        let begun = std::time::Instant::now();
        assert_eq!(reason("stopped", from.end(actor.target(), Ending::Stop { grace })).await, Reason::Stopped);
        assert!(begun.elapsed() >= grace);
        assert!(!running.await.unwrap());
        let refused = waiting.await.unwrap().unwrap_err();
        assert!(matches!(refused, Error::ActorStopped { .. } | Error::ActorNotFound { .. }), "{refused}");
        assert_eq!(*log.lock(), ["start", "hang", "stop"]);

        // Kill: passes a stop whose grace has not run out.
        let (actor, log) = obedient(&a, "", quick(RestartPolicy::Never)).await;
        let running = begin(from, actor.target(), "hang", &log).await;
        from.signal(actor.target(), Ending::Stop { grace: Duration::from_secs(600) });
        assert_eq!(reason("killed", from.end(actor.target(), Ending::Kill)).await, Reason::Killed);
        assert!(!running.await.unwrap());
        assert_eq!(reason("ended before", from.end(actor.target(), Ending::Drain)).await, Reason::Killed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_a_failure_restarts_with_the_same_id_name_and_mailbox_until_the_budget_is_spent() {
    let a = node(&[]).await;
    let (actor, log) = obedient(&a, "x", quick(RestartPolicy::OnFailure)).await;
    let watch = a.watch(actor.target());
    let (failing, waiting) = tokio::join!(ask(&a, actor.target(), "panic"), ask(&a, actor.target(), "waits"));
    assert!(matches!(failing, Err(Error::App(app)) if app.message == "as asked"));
    assert_eq!(waiting.unwrap().head, "waits", "a waiting message survives the restart");
    assert_eq!(*log.lock(), ["start", "panic", "stop", "start", "waits"]);
    assert_eq!(a.instances("x")[0].target, actor.target());
    assert_eq!(ask(&a, actor.target(), "fail").await.unwrap().head, "fail", "the answer was given before the failure");
    assert_eq!(ask(&a, actor.target(), "x").await.unwrap().head, "x");
    assert_eq!(a.metrics().actors_restarted.get(), 2);
    let _ = ask(&a, actor.target(), "panic").await;
    assert_eq!(reason("the budget is spent", watch).await, Reason::Failed { error: "as asked".into() });
    assert!(a.instances("x").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_always_restarts_also_who_ends_itself_and_a_stop_in_between_counts() {
    let a = node(&[]).await;
    let (actor, log) = obedient(&a, "", quick(RestartPolicy::Always)).await;
    ask(&a, actor.target(), "leave").await.unwrap();
    assert_eq!(ask(&a, actor.target(), "x").await.unwrap().head, "x");
    assert_eq!(*log.lock(), ["start", "leave", "stop", "start", "x"]);
    let mut options = quick(RestartPolicy::Always);
    (options.supervision.min_backoff, options.supervision.max_backoff) = (SOON * 10, SOON * 10);
    let (slow, log) = obedient(&a, "", options).await;
    ask(&a, slow.target(), "leave").await.unwrap();
    eventually("it waits for its restart", SOON, || log.lock().last().is_some_and(|w| w == "stop")).await;
    assert_eq!(reason("stopped while it waits", slow.end(Ending::stop())).await, Reason::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_a_factory_or_on_start_that_fails_again_counts() {
    struct Fickle(usize);
    impl Actor for Fickle {
        async fn on_start(&mut self, _ctx: &Context) -> pulsing_core::Result<()> {
            if self.0 == 1 { Err(Error::Config("not again".into())) } else { Ok(()) }
        }
        async fn receive(&mut self, call: Call, _ctx: &Context) {
            drop(call);
            panic!("down");
        }
    }
    let a = node(&[]).await;
    let made = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&made);
    let factory = move || {
        let n = count.fetch_add(1, Ordering::SeqCst);
        assert!(n != 2, "no third");
        Fickle(n)
    };
    let actor = a.spawn_with(factory, ActorSpec::default(), quick(RestartPolicy::OnFailure)).await.unwrap();
    let watch = actor.watch();
    let _ = ask(&a, actor.target(), "x").await;
    let Reason::Failed { error } = reason("given up", watch).await else { panic!("not failed") };
    assert!(error.contains("no third"), "{error}");
    assert_eq!(made.load(Ordering::SeqCst), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn r8_on_start_has_a_limit_and_frees_the_name() {
    struct Slow;
    impl Actor for Slow {
        async fn on_start(&mut self, _ctx: &Context) -> pulsing_core::Result<()> {
            std::future::pending().await
        }
        async fn receive(&mut self, _call: Call, _ctx: &Context) {}
    }
    let a = node(&[]).await;
    let options = SpawnOptions { start_limit: Some(Duration::from_millis(20)), ..SpawnOptions::default() };
    let error = a.spawn_with(|| Slow, named("slow"), options).await.err().unwrap();
    assert!(matches!(&error, Error::Timeout { what, .. } if what.contains("on_start of actor slow")), "{error}");
    assert!(a.instances("slow").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn r3_a_full_mailbox_makes_askers_wait_and_refuses_who_will_not() {
    let a = node(&[]).await;
    let options = SpawnOptions { mailbox: 4, ..quick(RestartPolicy::Never) };
    let (actor, log) = obedient(&a, "", options).await;
    let running = begin(&a, actor.target(), "doze", &log).await;
    let mut asks = tokio::task::JoinSet::new();
    for n in 0..10 {
        let (a, target) = (a.clone(), actor.target());
        asks.spawn(async move { ask(&a, target, n.to_string()).await.is_ok() });
    }
    let no_wait = CallOptions { no_wait: true, ..CallOptions::default() };
    eventually("it is full", SOON, || {
        let refused = a.start_tell(actor.target(), raw("never"), no_wait.clone()).map(|_| ());
        matches!(refused, Err(Error::MailboxFull { capacity: 4, .. }))
    })
    .await;
    assert!(asks.join_all().await.into_iter().all(|answered| answered));
    assert!(running.await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_is_counted_until_it_begins_or_is_given_up_or_its_actor_ends() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let depth = |expected: i64, what: &'static str| {
        let metrics = Arc::clone(a.metrics());
        async move { eventually(what, SOON, || metrics.mailbox_messages.get() == expected).await }
    };
    for end in [Some(Ending::stop()), Some(Ending::Kill), Some(Ending::Drain), None] {
        let options = SpawnOptions { mailbox: 4, ..quick(RestartPolicy::Never) };
        let (actor, log) = obedient(&a, "", options).await;
        let target = actor.target();
        let running = begin(&a, target, "hang", &log).await;
        assert_eq!(a.metrics().mailbox_messages.get(), 0, "what runs does not wait");
        let mut asks = tokio::task::JoinSet::new();
        for n in 0..6 {
            // Those that are given up must be so when they are looked for: from elsewhere that comes when it comes.
            let from = if n % 2 == 0 || end.is_none() { a.clone() } else { b.clone() };
            asks.spawn(async move { ask(&from, target, "waits").await });
        }
        depth(6, "all wait").await;
        if let Some(end) = end {
            // What runs is passed by all ends but one.
            if end == Ending::Drain {
                running.abort();
            }
            actor.end(end).await.unwrap();
        } else {
            asks.abort_all();
            while asks.join_next().await.is_some() {}
            // They are looked for when twice as many wait as have places.
            let mut more = tokio::task::JoinSet::new();
            for _ in 0..3 {
                let a = a.clone();
                more.spawn(async move { ask(&a, target, "waits").await });
            }
            depth(3, "those that are left").await;
            running.abort();
            assert!(more.join_all().await.iter().all(Result::is_ok));
        }
        depth(0, "nothing waits").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r11_a_call_that_would_wait_on_itself_is_refused_naming_the_chain() {
    struct Caller;
    impl Actor for Caller {
        async fn receive(&mut self, call: Call, ctx: &Context) {
            let options = ctx.nested(&call);
            let next = Target {
                node: ctx.me().node,
                actor: std::str::from_utf8(&call.payload.head).unwrap().parse().unwrap(),
            };
            match ctx.system().call(next, raw(ctx.me().actor.to_string()), options).await {
                Ok(Reply::Value(payload)) => call.responder.value(payload),
                Ok(Reply::Stream(_)) => panic!("a stream"),
                Err(error) => call.responder.error(error),
            }
        }
    }
    let a = node(&[]).await;
    let one = a.spawn(Caller, ActorSpec::default()).await.unwrap().target();
    let two = a.spawn(Caller, ActorSpec::default()).await.unwrap().target();
    let error = within("no wait", ask(&a, one, two.actor.to_string())).await.unwrap_err();
    let chain = format!("{} -> {} -> {}", one.actor, two.actor, one.actor);
    assert_eq!(error, Error::Deadlock { chain });
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_links_pass_failures_and_kills_along_but_no_stop_here_and_between_nodes() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    let c = node(&[&a]).await;
    a.resolve("nobody", None, Duration::ZERO).await.unwrap_err();
    eventually("all know all", SOON, || [&a, &b, &c].iter().all(|n| n.members().len() == 3)).await;
    for (there, asker) in [(&a, &a), (&b, &a), (&b, &c)] {
        for (how, passes) in [("kill", true), ("panic", true), ("stop", false), ("unlinked", false)] {
            let (one, log) = obedient(&a, "", quick(RestartPolicy::Never)).await;
            let (two, _) = obedient(there, "", quick(RestartPolicy::Never)).await;
            asker.link(one.target(), two.target()).await.unwrap();
            let watch = a.watch(one.target());
            match how {
                "kill" => two.kill(),
                "stop" => two.stop(),
                "panic" => drop(ask(there, two.target(), "panic").await),
                _ => {
                    asker.unlink(one.target(), two.target()).await.unwrap();
                    two.kill();
                }
            }
            within(how, two.watch()).await.unwrap();
            if passes {
                let Reason::Failed { error } = reason(how, watch).await else { panic!("{how}: not failed") };
                assert!(error.contains(&two.target().actor.to_string()), "{error}");
                assert_eq!(log.lock().last().unwrap(), "stop");
            } else {
                assert_eq!(ask(&a, one.target(), "x").await.unwrap().head, "x");
                one.kill();
            }
        }
    }
    let (one, _) = obedient(&a, "", quick(RestartPolicy::Never)).await;
    let gone = Target { node: b.node_id(), actor: ActorId(9) };
    assert!(matches!(a.link(one.target(), gone).await, Err(Error::ActorNotFound { .. })));
    assert!(matches!(a.link(one.target(), one.target()).await, Err(Error::Config(_))));
}
