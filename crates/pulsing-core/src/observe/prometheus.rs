//! Counters in the Prometheus text format 0.0.4.

use std::fmt::Write;

use super::metrics::BOUNDS;
use super::{Counter, ObserveSource};
use crate::system::MemberState;

/// Media type of [`render`]'s text.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// All series of one node. Writing to a `String` cannot fail, so results of `write!` are dropped.
pub(super) fn render(source: &dyn ObserveSource) -> String {
    let status = source.status();
    let metrics = source.metrics();
    let node = status.node.to_string();
    let mut out = String::with_capacity(4096);

    let mut one = |name: &str, kind: &str, help: &str, labels: &str, value: f64| {
        let _ = writeln!(out, "# HELP {name} {help}");
        let _ = writeln!(out, "# TYPE {name} {kind}");
        let _ = writeln!(out, "{name}{{node_id=\"{node}\"{labels}}} {value}");
    };
    one(
        "pulsing_build_info",
        "gauge",
        "Version of the node that answers.",
        &format!(",version=\"{}\"", env!("CARGO_PKG_VERSION")),
        1.0,
    );
    one("pulsing_uptime_seconds", "gauge", "Time since the node started.", "", status.uptime.as_secs_f64());
    one("pulsing_actors", "gauge", "Actors living on this node now.", "", source.local_actors().len() as f64);
    let (names, instances) = source.registry_size();
    one("pulsing_registry_names", "gauge", "Names this node knows of.", "", names as f64);
    one("pulsing_registry_instances", "gauge", "Published instances this node knows of.", "", instances as f64);
    let waiting = metrics.mailbox_messages.get();
    one(
        "pulsing_mailbox_messages",
        "gauge",
        "Messages that wait in mailboxes of this node's actors.",
        "",
        waiting as f64,
    );
    // Who renders outside of a runtime has none to tell of.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        let tasks = runtime.metrics().num_alive_tasks();
        one("pulsing_runtime_tasks", "gauge", "Tasks of the native runtime that this node runs on.", "", tasks as f64);
    }

    let counters: [(&str, &str, &Counter); 17] = [
        ("pulsing_actors_created_total", "Actors registered since the start.", &metrics.actors_created),
        ("pulsing_actors_stopped_total", "Actors unregistered since the start.", &metrics.actors_stopped),
        ("pulsing_actors_restarted_total", "Actors restarted by supervision.", &metrics.actors_restarted),
        ("pulsing_messages_total", "Calls delivered to actors of this node.", &metrics.messages),
        ("pulsing_messages_sent_total", "Calls this node sent to others.", &metrics.messages_sent),
        ("pulsing_name_claims_won_total", "Names kept against a claim of another node.", &metrics.claims_won),
        ("pulsing_name_claims_lost_total", "Names lost to an older claim of another node.", &metrics.claims_lost),
        ("pulsing_dead_letters_total", "Messages nobody took.", &metrics.dead_letters),
        ("pulsing_streams_total", "Streams begun by actors of this node.", &metrics.streams),
        ("pulsing_stream_items_total", "Stream items delivered to callers here.", &metrics.stream_items),
        ("pulsing_bytes_received_total", "Bytes read from peers.", &metrics.bytes_in),
        ("pulsing_bytes_sent_total", "Bytes written to peers.", &metrics.bytes_out),
        ("pulsing_bytes_copied_total", "Bytes copied between objects and messages.", &metrics.bytes_copied),
        ("pulsing_refused_peers_total", "Peers refused at the handshake.", &metrics.refused),
        (
            "pulsing_control_frames_dropped_total",
            "Membership and registry frames for which a queue had no room; later ones make up for them.",
            &metrics.control_dropped,
        ),
        ("pulsing_suspicions_total", "Suspicions raised by this node.", &metrics.suspicions),
        ("pulsing_refutations_total", "Suspicions about this node that it refuted.", &metrics.refutations),
    ];
    for (name, help, counter) in counters {
        // Exact up to 2^53 events, far beyond what a node lives to count.
        one(name, "counter", help, "", counter.get() as f64);
    }

    let name = "pulsing_call_duration_seconds";
    let _ = writeln!(out, "# HELP {name} Time from a call to another node to its first answer, error or deadline.");
    let _ = writeln!(out, "# TYPE {name} histogram");
    let (counts, seconds) = metrics.answers.get();
    for (bound, count) in BOUNDS.iter().zip(counts) {
        let bound = *bound as f64 / 1e6;
        let _ = writeln!(out, "{name}_bucket{{node_id=\"{node}\",le=\"{bound}\"}} {count}");
    }
    let all = counts[BOUNDS.len()];
    let _ = writeln!(out, "{name}_bucket{{node_id=\"{node}\",le=\"+Inf\"}} {all}");
    let _ = writeln!(out, "{name}_sum{{node_id=\"{node}\"}} {seconds}");
    let _ = writeln!(out, "{name}_count{{node_id=\"{node}\"}} {all}");

    let members = source.members();
    out.push_str("# HELP pulsing_cluster_members Members as seen from this node, by state.\n");
    out.push_str("# TYPE pulsing_cluster_members gauge\n");
    for state in [MemberState::Alive, MemberState::Suspect, MemberState::Down, MemberState::Left] {
        let count = members.iter().filter(|m| m.state == state).count();
        let _ = writeln!(out, "pulsing_cluster_members{{node_id=\"{node}\",state=\"{state}\"}} {count}");
    }
    out
}
