//! Clusters with certificates: who is let in, who is told why not, and files that change (design section 6).
#![allow(clippy::unwrap_used)]

#[path = "common/authority.rs"]
mod authority;
mod common;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use authority::{Authority, DAY, Files, Says, write};
use common::*;
use pulsing_core::net::tls::ClusterTls;
use pulsing_core::observe::{Protocol, get_with};
use pulsing_core::{Error, MemberState, Passphrase, PkiFiles, Security, System, SystemConfig};
use rcgen::ExtendedKeyUsagePurpose;

const LIMIT: Duration = Duration::from_secs(5);

fn certified(authority: &Authority, says: &Says) -> PkiFiles {
    let Files { cert, key, ca } = authority.files(says);
    PkiFiles { cert, key, ca }
}

fn with(files: &PkiFiles, seeds: &[&System]) -> SystemConfig {
    let seeds: Vec<_> = seeds.iter().map(|s| s.addr().to_string()).collect();
    SystemConfig { security: Security::Pki(files.clone()), ..config(&seeds) }
}

async fn refusal(config: SystemConfig) -> String {
    let config = SystemConfig { join_timeout: Some(LIMIT), ..config };
    System::start(config).await.map(|_| ()).unwrap_err().to_string()
}

fn alive(system: &System) -> usize {
    system.members().iter().filter(|m| m.state == MemberState::Alive).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_one_authority_meet_whether_their_certificate_names_the_address_or_the_cluster() {
    let authority = Authority::new("ours");
    let seed = System::start(with(&certified(&authority, &Says::ip("127.0.0.1")), &[])).await.unwrap();
    seed.spawn(Echo, named("echo")).await.unwrap();
    let any = certified(&authority, &Says::dns("default.pulsing.internal"));
    let elsewhere = SystemConfig { addr: Some("127.0.0.2:0".into()), ..with(&any, &[&seed]) };
    let member = System::start(elsewhere).await.unwrap();
    let there = member.resolve("echo", None, LIMIT).await.unwrap();
    let large = vec![3u8; 3 << 20];
    assert!(ask(&member, there.target, large.clone()).await.unwrap().head == large);
    eventually("both see both", LIMIT, || alive(&seed) == 2 && alive(&member) == 2).await;

    // Who only looks needs a certificate of the authority, which names nothing and is no server's.
    let only_client = Says { usages: vec![ExtendedKeyUsagePurpose::ClientAuth], ..Says::nothing() };
    let observer = ClusterTls::from_files(&certified(&authority, &only_client), "default", None).unwrap();
    for node in [&seed, &member] {
        let answer = get_with(&node.addr().to_string(), "/health", LIMIT, Protocol::Http1, Some(&observer)).await;
        assert_eq!(answer.unwrap().status, 200);
    }
    let foreign = certified(&Authority::new("other"), &Says::nothing());
    let foreign = ClusterTls::from_files(&foreign, "default", None).unwrap();
    let refused = get_with(&seed.addr().to_string(), "/health", LIMIT, Protocol::Http1, Some(&foreign)).await;
    assert!(refused.unwrap_err().to_string().contains("of another authority than --ca names"));
    let plain = pulsing_core::observe::get(&seed.addr().to_string(), "/health", LIMIT).await.unwrap();
    assert!(plain.status == 403 && plain.text().unwrap().contains("--cert, --key and --ca"));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_let_in_is_told_why() {
    let authority = Authority::new("ours");
    let files = certified(&authority, &Says::ip("127.0.0.1"));
    let seed = System::start(with(&files, &[])).await.unwrap();
    let addr = [seed.addr().to_string()];
    let foreign = certified(&Authority::new("other"), &Says::ip("127.0.0.1"));
    let passphrase = || Security::Passphrase(Passphrase::new("correct horse").unwrap());
    let secret = System::start(SystemConfig { security: passphrase(), ..config(&[]) }).await.unwrap();
    let plain = node(&[]).await;

    // A node of another authority that is told to trust ours: it takes us, we do not take it.
    let trusting = PkiFiles { ca: foreign.ca.with_file_name("both.pem"), ..foreign.clone() };
    write(&trusting.ca, &format!("{}{}", authority.pem, std::fs::read_to_string(&foreign.ca).unwrap()));
    let renamed = SystemConfig { cluster: "other".into(), ..with(&files, &[&seed]) };
    for (config, words) in [
        (with(&foreign, &[&seed]), "its certificate is of another authority than --ca names"),
        (with(&trusting, &[&seed]), "it does not know the authority of this node's certificate"),
        (config(&addr), "this cluster uses TLS: start with --cert, --key and --ca"),
        (SystemConfig { security: passphrase(), ..config(&addr) }, "it belongs to another cluster"),
        (with(&files, &[&secret]), "of another authority than --ca names"),
        (with(&files, &[&plain]), "it answers without TLS: give both sides --cert, --key and --ca"),
        (renamed, "this is cluster \"default\", not \"other\""),
    ] {
        let told = refusal(config).await;
        assert!(told.contains(words), "{words:?} is not in {told:?}");
    }
    assert_eq!(alive(&seed), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_serve_are_named_before_anything_starts() {
    let authority = Authority::new("ours");
    let good = Says::ip("127.0.0.1");
    let server = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let client = vec![ExtendedKeyUsagePurpose::ClientAuth];
    for (says, words) in [
        (Says { valid: (-30 * DAY, -3 * DAY), ..Says::ip("127.0.0.1") }, "has expired 3 days ago"),
        (Says { valid: (5 * 3600 + 60, 30 * DAY), ..Says::ip("127.0.0.1") }, "is not valid yet, but in 5 hours"),
        (Says { usages: server, ..Says::ip("127.0.0.1") }, "extendedKeyUsage must hold serverAuth and clientAuth"),
        (Says { usages: client, ..Says::ip("127.0.0.1") }, "extendedKeyUsage must hold serverAuth and clientAuth"),
        (Says::ip("127.0.0.9"), "names IpAddress(127.0.0.9), but neither this node's address (IP:127.0.0.1)"),
        (Says::dns("other.pulsing.internal"), "nor the cluster (DNS:default.pulsing.internal)"),
        (Says::nothing(), "names nobody (subjectAltName)"),
    ] {
        let files = certified(&authority, &says);
        let told = refusal(with(&files, &[])).await;
        assert!(told.contains(words) && told.contains("node.pem"), "{words:?} is not in {told:?}");
    }

    let files = || certified(&authority, &good);
    let strange = files();
    std::fs::copy(files().key, &strange.key).unwrap();
    let foreign = files();
    write(&foreign.ca, &Authority::new("other").pem);
    let missing = files();
    std::fs::remove_file(&missing.ca).unwrap();
    let (empty, encrypted, swapped) = (files(), files(), files());
    write(&empty.cert, "nothing\n");
    write(&encrypted.key, "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n");
    std::fs::copy(&swapped.cert, &swapped.key).unwrap();
    let device = PkiFiles { cert: "/dev/zero".into(), ..files() };
    for (files, words) in [
        (strange, "belongs to another key than --key"),
        (foreign, "of another authority than --ca names"),
        (missing, "cannot read --ca"),
        (empty, "holds no certificate in PEM"),
        (encrypted, "the key is encrypted"),
        (swapped, "holds no private key in PEM"),
        (device, "not a file of at most"),
    ] {
        let error = System::start(with(&files, &[])).await.map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Config(_)), "{error}");
        assert!(error.to_string().contains(words), "{words:?} is not in {error}");
    }
}

/// The certificate that a node shows.
async fn shown(node: &System, observer: &ClusterTls) -> Result<u16, String> {
    let answer = get_with(&node.addr().to_string(), "/health", LIMIT, Protocol::Http1, Some(observer)).await;
    answer.map(|r| r.status).map_err(|e| e.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authority_is_replaced_under_calls_and_none_fails() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let says = Says::ip("127.0.0.1");
    let (one, two) = (certified(&old, &says), certified(&old, &says));
    let first = System::start(with(&one, &[])).await.unwrap();
    let second = System::start(with(&two, &[&first])).await.unwrap();
    first.spawn(Echo, named("echo")).await.unwrap();
    let there = second.resolve("echo", None, LIMIT).await.unwrap().target;
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let calling = tokio::spawn({
        let (second, stop, done) = (second.clone(), Arc::clone(&stop), Arc::clone(&done));
        async move {
            while !stop.load(Relaxed) {
                ask(&second, there, "x").await.unwrap();
                done.fetch_add(1, Relaxed);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    });

    let of = |authority: &Authority| {
        let files = certified(authority, &Says::nothing());
        write(&files.ca, &format!("{}{}", old.pem, new.pem));
        ClusterTls::from_files(&files, "default", None).unwrap()
    };
    // It knows only the new authority, and so tells which certificate it is shown.
    let judge = ClusterTls::from_files(&certified(&new, &Says::nothing()), "default", None).unwrap();
    let newcomer = of(&new);
    assert!(shown(&first, &judge).await.is_err() && shown(&first, &newcomer).await.is_err());

    for files in [&one, &two] {
        write(&files.ca, &format!("{}{}", old.pem, new.pem));
    }
    wait_for("both know the new authority", async || {
        shown(&first, &newcomer).await.is_ok() && shown(&second, &newcomer).await.is_ok()
    })
    .await;
    for files in [&one, &two] {
        let (cert, key) = new.certify(&says);
        write(&files.cert, &cert);
        write(&files.key, &key);
    }
    wait_for("both show the new certificate", async || {
        shown(&first, &judge).await.is_ok() && shown(&second, &judge).await.is_ok()
    })
    .await;
    // A key of another certificate changes nothing.
    write(&one.key, &new.certify(&says).1);
    // Whoever comes now needs the new authority only.
    let third = System::start(with(&certified(&new, &says), &[&first])).await.unwrap();
    ask(&third, there, "x").await.unwrap();

    let before = done.load(Relaxed);
    eventually("calls go on", LIMIT, || done.load(Relaxed) > before + 10).await;
    stop.store(true, Relaxed);
    calling.await.unwrap();
    let localhost: IpAddr = "127.0.0.1".parse().unwrap();
    assert!(ClusterTls::from_files(&one, "default", Some(localhost)).is_err(), "the key was a wrong one");
}

async fn wait_for(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !check().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
