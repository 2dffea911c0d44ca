//! What members of a cluster with certificates make of each other's.

use std::fs;

use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::cluster::Identity;
use crate::id::NodeId;
use crate::net::handshake::{self, Credentials, Lane, Trust};
use crate::net::wire::Versions;

#[path = "../../tests/common/authority.rs"]
mod authority;
use authority::{Authority, DAY, Files, Says, write};

const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

fn certified(authority: &Authority, says: &Says) -> PkiFiles {
    let Files { cert, key, ca } = authority.files(says);
    PkiFiles { cert, key, ca }
}

/// A member that does not look at its own certificate first.
fn careless(files: &PkiFiles) -> ClusterTls {
    ClusterTls::unchecked(files, "default").unwrap()
}

/// What listener and dialler say of each other; the dialler reads once, for that is when it hears of a refusal.
async fn meet(listener: &ClusterTls, dialler: &ClusterTls) -> (String, String) {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = socket.local_addr().unwrap();
    let me = |node| Identity::new(NodeId(node), addr, 1);
    let cred = |tls: &ClusterTls| Credentials {
        cluster: "default".into(),
        trust: Trust::Tls(tls.clone()),
        versions: Versions::KNOWN,
    };
    let words = |result: std::result::Result<(), String>| result.err().unwrap_or_default();
    let (a, b) = tokio::join!(
        async {
            let (stream, from) = socket.accept().await.unwrap();
            let mut stream = listener.accept(stream).await?;
            let shown = crate::net::tls::certificate(&stream).cloned();
            let accepted = handshake::accept(&mut stream, from, me(1), &cred(listener), shown.as_ref()).await;
            accepted.map(|_| ()).map_err(|e| e.to_string())
        },
        async {
            let stream = TcpStream::connect(addr).await.unwrap();
            let mut stream = dialler.connect(stream, HERE).await?;
            let shown = crate::net::tls::certificate(&stream).cloned();
            let cred = cred(dialler);
            let met = handshake::dial(&mut stream, addr, me(2), Lane::Small, 1, &cred, shown.as_ref()).await;
            met.map(|_| ()).map_err(|e| e.to_string())
        },
    );
    (words(a), words(b))
}

#[tokio::test]
async fn each_side_says_what_is_wrong_with_the_other() {
    let authority = Authority::new("ours");
    let good = careless(&certified(&authority, &Says::ip("127.0.0.1")));
    assert_eq!(meet(&good, &good).await, (String::new(), String::new()));
    for (says, its, mine) in [
        (
            Says { valid: (-9 * DAY, -4 * DAY), ..Says::ip("127.0.0.1") },
            "its certificate has expired 4 days ago",
            "it finds this node's certificate expired",
        ),
        (
            Says { valid: (9 * DAY, 10 * DAY), ..Says::ip("127.0.0.1") },
            "its certificate is not valid yet",
            "it finds this node's certificate expired, or not valid yet",
        ),
        (
            Says { usages: vec![rcgen::ExtendedKeyUsagePurpose::EmailProtection], ..Says::ip("127.0.0.1") },
            "extendedKeyUsage",
            "not for clientAuth",
        ),
        // A member's, but another's: nobody acts for who it is not.
        (Says::ip("127.0.0.2"), "127.0.0.2), but neither its address (IP:127.0.0.1)", "127.0.0.2"),
        (Says::dns("other.pulsing.internal"), "nor the cluster (DNS:default.pulsing.internal)", "the cluster"),
        (Says::nothing(), "names nobody", "names nobody"),
    ] {
        let bad = careless(&certified(&authority, &says));
        let (listener, dialler) = meet(&good, &bad).await;
        assert!(listener.contains(its), "{its:?} is not in {listener:?}");
        assert!(dialler.contains(mine), "{mine:?} is not in {dialler:?}");
        let (_, dialler) = meet(&bad, &good).await;
        assert!(dialler.contains(its), "{its:?} is not in {dialler:?}");
    }
    let foreign = careless(&certified(&Authority::new("theirs"), &Says::ip("127.0.0.1")));
    let (_, dialler) = meet(&good, &foreign).await;
    assert!(dialler.contains("of another authority than --ca names"), "{dialler}");
}

#[test]
fn a_change_that_is_no_good_is_tried_once_and_leaves_what_was() {
    let authority = Authority::new("ours");
    let files = certified(&authority, &Says::ip("127.0.0.1"));
    let tls = ClusterTls::from_files(&files, "default", Some(HERE)).unwrap();
    let mut watch = Watch { seen: files.stamp(), settled: true };
    let mut look = |outcome: Option<bool>| assert_eq!(watch.look(&tls, &files, HERE), outcome);
    look(None);
    // Seen, rested, tried; and not again.
    let (cert, key) = authority.certify(&Says::ip("127.0.0.1"));
    write(&files.key, &key);
    look(None);
    look(Some(false));
    look(None);
    // The rest of it comes: good.
    write(&files.cert, &cert);
    look(None);
    look(Some(true));
    look(None);
    // One that is written while it is looked at is left to rest.
    fs::remove_file(&files.cert).unwrap();
    look(None);
    write(&files.cert, "broken");
    look(None);
    look(Some(false));
    look(None);
}
