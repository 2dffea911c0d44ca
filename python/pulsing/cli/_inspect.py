"""`pulsing inspect`: reads the observer endpoints; joins nothing."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from typer import echo

from pulsing.cli._errors import FailureError, MisuseError
from pulsing.cli._settings import read_passphrase

DEFAULT_PORT = 8000
_LONGEST = 86400  # seconds


@dataclasses.dataclass(frozen=True)
class Source:
    """Whom to ask: `endpoint` is one node, `seeds` lead to all of them. `timeout` in seconds, for each node.

    With a `passphrase_file`, over the TLS of the cluster of this name.
    """

    seeds: str | None
    timeout: float
    best_effort: bool = False
    endpoint: str | None = None
    passphrase_file: str | None = None
    cluster: str = "default"

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= _LONGEST:
            raise MisuseError(f"--timeout is a number of seconds above 0 and up to {_LONGEST}, not {self.timeout:g}.")

    def fetch(self, addrs: Sequence[str], path: str) -> list["Answer"]:
        """GETs `path` from all `addrs` at once."""
        from pulsing._core import observe_get

        passphrase = read_passphrase(self.passphrase_file) if self.passphrase_file else None
        answers = []
        found = observe_get(list(addrs), path, self.timeout, passphrase, self.cluster)
        for addr, (status, body, error) in zip(addrs, found, strict=True):
            refusal = f"{addr} answers {status} to {path}: {body[:200]}" if status != 200 else None
            answers.append(Answer(addr, body, error or refusal))
        return answers

    def first(self) -> list[str]:
        """Addresses from the command line."""
        text = self.endpoint or self.seeds or ""
        addrs = [with_port(part.strip()) for part in text.split(",") if part.strip()]
        if not addrs:
            raise MisuseError("whom to ask is missing: give --seeds HOST:PORT.")
        return addrs

    def ask(self, path: str) -> tuple[str, Any]:
        """(address, JSON) of the first node that answers.

        Raises:
            FailureError: none does; says why for each.
        """
        reasons = []
        for addr in self.first():
            answer = self.fetch([addr], path)[0]
            if answer.error is None:
                return addr, answer.json()
            reasons.append(answer.error)
        raise FailureError("no node answers:\n" + "\n".join(f"  {reason}" for reason in reasons) + HINT)

    def ask_all(self, path: str) -> list["Answer"]:
        """What every member of the cluster that is not known to be gone answers.

        Raises:
            FailureError: no seed answers, or some member does not and `best_effort` is off.
        """
        asked, members = self.ask("/cluster/members")
        addrs = [
            asked if member["me"] else member["addr"] for member in members if member["state"] in ("alive", "suspect")
        ]
        answers = self.fetch(addrs, path)
        failed = [answer.error for answer in answers if answer.error is not None]
        if failed:
            text = "\n".join(f"  {reason}" for reason in failed)
            if not self.best_effort or len(failed) == len(answers):
                raise FailureError(
                    f"{len(failed)} of {len(answers)} nodes do not answer (--best_effort shows the others):\n{text}"
                )
            sys.stderr.write(f"Warning: {len(failed)} of {len(answers)} nodes do not answer:\n{text}\n")
        return [answer for answer in answers if answer.error is None]


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


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one node said, or why it said nothing."""

    addr: str
    body: str
    error: str | None

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except json.JSONDecodeError as error:
            raise FailureError(f"{self.addr} does not answer as a Pulsing node: {error}") from None


HINT = "\nIs the node running, is this its --addr, and was it started without --no_observe?"


def with_port(addr: str) -> str:
    """`addr` with port 8000 if it names none. IPv6 literals may stand with or without brackets."""
    if addr.startswith("["):
        return addr if "]:" in addr else f"{addr}:{DEFAULT_PORT}"
    if addr.count(":") > 1:
        return f"[{addr}]:{DEFAULT_PORT}"
    return addr if ":" in addr else f"{addr}:{DEFAULT_PORT}"


def cluster(source: Source, json_output: bool) -> None:
    """Prints the members."""
    addr, members = source.ask("/cluster/members")
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
    """Prints the actors of one node, or of all."""
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
    shown = rows[: view.top]
    if view.json_output:
        _print_json(shown)
        return
    echo(f"{title}: {_plural(len(rows), 'actor')} under {_plural(len({row['name'] for row in rows}), 'name')}")
    header: tuple[str, ...] = ("Name", "Class", "Address", "State", "Model")
    table: list[tuple[str, ...]] = [
        (
            row["name"] or "-",
            row["class"],
            row["addr"],
            row["metadata"].get("state", "-"),
            row["metadata"].get("model", "-"),
        )
        for row in shown
    ]
    if view.detailed:
        header = (*header, "Actor ID", "Metadata")
        table = [
            (*line, row["actor_id"], " ".join(f"{k}={v}" for k, v in sorted(row["metadata"].items())))
            for line, row in zip(table, shown, strict=True)
        ]
    _table(header, table)
    if len(shown) < len(rows):
        echo(f"... and {len(rows) - len(shown)} more")


def metrics(source: Source, raw: bool, json_output: bool) -> None:
    """Prints the counters of every node."""
    answers = source.ask_all("/metrics")
    if json_output:
        _print_json({answer.addr: dict(_samples(answer.body)) for answer in answers})
        return
    for answer in answers:
        echo(f"== {answer.addr}")
        if raw:
            echo(answer.body, nl=False)
            continue
        _table(("Metric", "Value"), [(name, f"{value:g}") for name, value in _samples(answer.body)])


def watch(source: Source, interval: float, kind: str, max_rounds: int | None) -> None:
    """Prints differences between two looks, until Ctrl-C or `max_rounds`."""
    if kind not in ("all", "cluster", "actors"):
        raise MisuseError(f"--kind is all, cluster or actors, not {kind!r}.")
    before: dict[str, str] | None = None
    rounds = 0
    while max_rounds is None or rounds < max_rounds:
        if rounds:
            time.sleep(interval)
        rounds += 1
        now = _state(source, kind)
        stamp = time.strftime("%H:%M:%S")
        if before is None:
            for key, value in sorted(now.items()):
                echo(f"{stamp}   {key}: {value}")
        else:
            for key in sorted(before.keys() | now.keys()):
                old, new = before.get(key), now.get(key)
                if old != new:
                    sign = "+" if old is None else "-" if new is None else "~"
                    change = str(new if old is None else old) if old is None or new is None else f"{old} -> {new}"
                    echo(f"{stamp} {sign} {key}: {change}")
        before = now


def _state(source: Source, kind: str) -> dict[str, str]:
    state: dict[str, str] = {}
    if kind in ("all", "cluster"):
        for member in source.ask("/cluster/members")[1]:
            state[f"node {member['addr']} {member['node_id'][:8]}"] = member["state"]
    if kind in ("all", "actors"):
        for row in _merge([source.ask("/actors")[1]]):
            if not row["internal"]:
                state[f"actor {row['name'] or '-'} {row['actor_id'][:8]} at {row['addr']}"] = row["metadata"].get(
                    "state", "running"
                )
    return state


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


def _samples(text: str) -> Iterable[tuple[str, float]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            kept = [label for label in labels.rstrip("}").split(",") if label and not label.startswith("node_id=")]
            yield (f"{name}{{{','.join(kept)}}}" if kept else name), float(value)


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
    widths = [max(len(str(line[column])) for line in (header, *rows)) for column in range(len(header))]
    for line in (header, *rows):
        echo("  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
