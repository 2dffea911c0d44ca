"""Counters of nodes and Routers, as `pulsing inspect` reads them."""

import dataclasses
import sys
from collections.abc import Iterable

from pulsing.cli._errors import FailureError
from pulsing.cli._inspect_source import Answer, Source
from pulsing.core._shown import shown

_GENERATE = ("chat_completions", "completions")


@dataclasses.dataclass(frozen=True)
class NodeMetrics:
    """Prometheus text of one node; that of Routers on it stands at the end."""

    addr: str
    text: str

    def series(self) -> dict[str, float]:
        """Value by name and labels; the label that names the node is left out."""
        return {name: value for name, _, value in _samples(self.text)}

    def figures(self) -> dict[str, str]:
        """What matters first, and stands still while nothing happens."""
        sums: dict[str, float] = {}
        members: list[str] = []
        requests: float | None = None
        for series, labels, value in _samples(self.text):
            name = series.partition("{")[0]
            sums[name] = sums.get(name, 0) + value
            if name == "pulsing_cluster_members" and value:
                members.append(f"{value:.0f} {labels['state']}")
            if name == "pulsing_router_in_flight":
                # Every Router has this one, also before its first request.
                requests = requests or 0
            if name == "pulsing_router_requests_total" and labels.get("route") in _GENERATE:
                requests = (requests or 0) + value
        return {
            "actors": f"{sums.get('pulsing_actors', 0):.0f}",
            "messages": f"{sums.get('pulsing_messages_total', 0):.0f}",
            "sent": f"{sums.get('pulsing_messages_sent_total', 0):.0f}",
            "streams": f"{sums.get('pulsing_streams_total', 0):.0f}",
            "restarts": f"{sums.get('pulsing_actors_restarted_total', 0):.0f}",
            "dead letters": f"{sums.get('pulsing_dead_letters_total', 0):.0f}",
            "members": ", ".join(members),
            "requests": "-" if requests is None else f"{requests:.0f}",
        }

    def uptime(self) -> float:
        """Seconds."""
        return next((value for name, _, value in _samples(self.text) if name == "pulsing_uptime_seconds"), 0.0)


def gather(source: Source, *, down: bool = True) -> list[NodeMetrics]:
    """The counters of every node; without `down`, of those that are not known to be down.

    A Router counts HTTP requests on its own HTTP port. What cannot be read there is a warning: the port may well be
    meant for other eyes than the cluster's.
    """
    answers = source.ask_all("/metrics", down=down)
    texts = {answer.node_id: answer.body for answer in answers}
    addrs = {answer.node_id: answer.addr for answer in answers}
    routers = {}
    for row in source.ask("/actors")[1]["cluster"]:
        http = row["metadata"].get("http")
        if row["metadata"].get("kind") == "router" and http and row["node_id"] in texts:
            routers[_reachable(http, addrs[row["node_id"]])] = row["node_id"]
    for answer in source.fetch(list(routers), "/metrics", plain=True):
        _add(texts, routers[answer.addr], answer)
    return [NodeMetrics(addrs[node], text) for node, text in texts.items()]


def _add(texts: dict[str, str], node: str, answer: Answer) -> None:
    if answer.error is not None:
        sys.stderr.write(f"Warning: the requests of a Router are not shown: {answer.error}\n")
        return
    texts[node] += f"# Router at {answer.addr}\n{answer.body}"


def _reachable(http: str, node: str) -> str:
    """`http`, with the node's host where it names every interface."""
    host, _, port = http.rpartition(":")
    return f"{node.rpartition(':')[0]}:{port}" if host in ("", "0.0.0.0", "[::]", "::") else http


def _samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            kept = [label for label in labels.rstrip("}").split(",") if label and not label.startswith("node_id=")]
            parts = (label.partition("=") for label in kept)
            read = {key: text.strip('"') for key, _, text in parts}
            try:
                number = float(value)
            except ValueError:
                raise FailureError(f"a node's /metrics holds {shown(line)}, which Prometheus could not read") from None
            yield (f"{name}{{{','.join(kept)}}}" if kept else name), read, number
