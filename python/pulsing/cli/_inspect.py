"""`pulsing inspect`: reads the observer endpoints; joins nothing."""

import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from typer import echo

from pulsing.cli._errors import FailureError, MisuseError, UnreachableError
from pulsing.cli._inspect_metrics import gather
from pulsing.cli._inspect_source import Source
from pulsing.cli._table import table
from pulsing.core._shown import legible, shown

KINDS = ("cluster", "actors", "metrics", "all")
_LONGEST_INTERVAL = 86400  # seconds
# Nodes named in one row; the others are counted.
_NODES_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class View:
    """How to list actors."""

    top: int | None = None
    filter: str | None = None
    all_actors: bool = False
    detailed: bool = False
    json_output: bool = False

    def keeps(self, row: dict[str, Any]) -> bool:
        if row.get("internal") and not self.all_actors:
            return False
        text = f"{row.get('name') or ''} {row['class']}".lower()
        return self.filter is None or self.filter.lower() in text


def cluster(source: Source, json_output: bool) -> None:
    """Prints the members."""
    addr, members = source.members()
    if json_output:
        _print_json(members)
        return
    counts = _counted(member["state"] for member in members)
    echo(f"Cluster seen from {addr}: {_plural(len(members), 'node')} ({counts})")
    order = {"alive": 0, "suspect": 1, "left": 2, "down": 3}
    rows = sorted(members, key=lambda member: (order.get(member["state"], 9), member["addr"]))
    _table(
        ("Node ID", "Address", "State", ""),
        [(row["node_id"], row["addr"], row["state"], "answers" if row["me"] else "") for row in rows],
    )


def actors(source: Source, view: View) -> None:
    """Prints the actors of one node, or the names of all and where their instances are."""
    if source.endpoint and source.seeds:
        raise MisuseError("give --endpoint (one node) or --seeds (all nodes), not both.")
    if not source.endpoint and not source.seeds:
        raise MisuseError(
            "whom to ask is missing: give --endpoint HOST:PORT (one node) or --seeds HOST:PORT (all nodes)."
        )
    if source.endpoint:
        _, body = source.ask("/actors")
        rows = _merge([body])
        title = f"Actors known to {body['addr']}"
    else:
        bodies = [answer.json() for answer in source.ask_all("/actors")]
        rows = _merge(bodies)
        title = f"Actors of {_plural(len(bodies), 'node')}"
    rows = [row for row in rows if view.keeps(row)]
    if view.json_output:
        _print_json(rows[: view.top])
    else:
        echo(f"{title}: {_plural(len(rows), 'actor')} under {_plural(len({row['name'] for row in rows}), 'name')}")
        by_name = bool(source.seeds) and not view.detailed
        header, table = _names(rows) if by_name else _instances(rows, view.detailed)
        _table(header, table[: view.top])
        if view.top is not None and len(table) > view.top:
            echo(f"... and {len(table) - view.top} more")
    source.close()


def _instances(rows: Sequence[dict[str, Any]], detailed: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header: tuple[str, ...] = ("Name", "Class", "Address", "State", "Model")
    table: list[tuple[str, ...]] = [
        (
            row["name"] or "-",
            row["class"],
            row["addr"],
            row["metadata"].get("state", "-"),
            row["metadata"].get("model", "-"),
        )
        for row in rows
    ]
    if detailed:
        header = (*header, "Actor ID", "Metadata")
        table = [
            (*line, row["actor_id"], " ".join(f"{k}={v}" for k, v in sorted(row["metadata"].items())))
            for line, row in zip(table, rows, strict=True)
        ]
    return header, table


def _names(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    named: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        named.setdefault(row["name"] or "-", []).append(row)
    table: list[tuple[str, ...]] = []
    for name, group in named.items():
        nodes = list(dict.fromkeys(row["addr"] for row in group))
        more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
        table.append(
            (
                name,
                str(len(group)),
                _counted(row["metadata"]["state"] for row in group if "state" in row["metadata"]) or "-",
                ", ".join(sorted({row["class"] for row in group})),
                ", ".join(nodes[:_NODES_SHOWN]) + more,
            )
        )
    return ("Name", "Instances", "State", "Class", "Nodes"), table


def metrics(source: Source, raw: bool, json_output: bool) -> None:
    """Prints the counters of every node."""
    nodes = gather(source)
    if json_output:
        _print_json({node.addr: node.series() for node in nodes})
    elif raw:
        for node in nodes:
            # A comment, so that the whole is still what Prometheus reads.
            echo(f"# Node {node.addr}")
            echo(node.text, nl=False)
    else:
        figures = [node.figures() for node in nodes]
        _table(
            ("Node", "Uptime", *(name.capitalize() for name in figures[0])),
            [
                (node.addr, f"{node.uptime():.0f} s", *values.values())
                for node, values in zip(nodes, figures, strict=True)
            ],
        )
    source.close()


def watch(source: Source, interval: float, kind: str, max_rounds: int | None) -> None:
    """Prints differences between two looks, until Ctrl-C or `max_rounds`."""
    if kind not in KINDS:
        raise MisuseError(f"--kind is {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {shown(kind)}.")
    if not interval <= _LONGEST_INTERVAL:
        raise MisuseError(f"--interval is a number of seconds up to {_LONGEST_INTERVAL}, not {interval:g}.")
    before: dict[str, str] | None = None
    rounds = 0
    while max_rounds is None or rounds < max_rounds:
        if rounds:
            time.sleep(interval)
        rounds += 1
        now: dict[str, str] = {}
        try:
            for part in KINDS[:-1]:
                if kind in (part, "all"):
                    now.update(_PARTS[part](source))
        except UnreachableError as error:
            if before is None:
                raise
            raise FailureError(str(error)) from None
        except FailureError:
            # A change of the membership may well be the reason: it is shown before the end.
            _print_changes(before, {**(before or {}), **now})
            raise
        _print_changes(before, now)
        before = now
    source.close()


def _print_changes(before: dict[str, str] | None, now: dict[str, str]) -> None:
    stamp = time.strftime("%H:%M:%S")

    def say(change: str) -> None:
        echo(f"{stamp} {legible(change, keep='')}")

    if before is None:
        for key, value in now.items():
            say(f"  {key}: {value}")
        return
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old is None:
            say(f"+ {key}: {new}")
        elif new is None:
            say(f"- {key}: {old}")
        elif old != new:
            say(f"~ {key}: {old} -> {new}")


def _watch_cluster(source: Source) -> dict[str, str]:
    _, members = source.members()
    if source.best_effort:
        # The seed may be the one that goes.
        source.others[:] = [member["addr"] for member in members if member["state"] == "alive"]
    return {
        f"node {member['addr']} {member['node_id'][:8]}": member["state"]
        for member in sorted(members, key=lambda member: str(member["addr"]))
    }


def _watch_actors(source: Source) -> dict[str, str]:
    return {
        f"actor {row['name'] or '-'} {row['actor_id'][:8]} at {row['addr']}": row["metadata"].get("state", "running")
        for row in _merge([source.ask("/actors")[1]])
        if not row["internal"]
    }


def _watch_metrics(source: Source) -> dict[str, str]:
    # That a node is down is a change to be shown, not an end.
    nodes = gather(source, down=False)
    return {f"metrics {node.addr} {name}": value for node in nodes for name, value in node.figures().items()}


_PARTS = {"cluster": _watch_cluster, "actors": _watch_actors, "metrics": _watch_metrics}


def _merge(bodies: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an actor, whichever node told of it: its own node knows it best, the registry tells of the others."""
    rows: dict[str, dict[str, Any]] = {}
    for body in bodies:
        for row in body["cluster"]:
            # The registry does not say what is internal; these are the names that only the runtime gives.
            internal = row["name"].startswith(("system/", "_"))
            rows.setdefault(row["actor_id"], {**row, "public": True, "internal": internal})
        for row in body["local"]:
            rows[row["actor_id"]] = {**row, "node_id": body["node_id"], "addr": body["addr"]}
    return sorted(rows.values(), key=lambda row: (row["name"] is None, row["name"] or "", row["addr"], row["actor_id"]))


def _counted(words: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_json(value: Any) -> None:
    echo(json.dumps(value, indent=2, ensure_ascii=False))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for line in table([[str(cell) for cell in row] for row in (header, *rows)]):
        echo(line)
