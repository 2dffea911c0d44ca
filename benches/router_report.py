"""From a run of `router.py` to the page: medians with their spread, and the bars of the design."""

import statistics
from typing import Any

from router_load import SHAPES

DIRECT = "mock engine directly"
PYTHON_DIRECT = "Python engine directly"
PYTHON_FRONT = "Pulsing -> Python engine"
ACTOR_FRONT = "Pulsing -> actor Worker"
OURS = "Pulsing round_robin"
PEERS = ("sglang-router", "vllm-router")

Row = dict[str, Any]


def values(row: Row, key: str) -> list[float]:
    """One figure of all rounds."""
    return [run[key] for run in row["runs"] if key in run]


def median(row: Row | None, key: str) -> float | None:
    """Its median; None where there is none."""
    found = values(row, key) if row else []
    return statistics.median(found) if found else None


def spread(found: list[float], digits: int) -> str:
    """Median and, in brackets, lowest and highest."""
    if not found:
        return "-"
    middle = f"{statistics.median(found):,.{digits}f}"
    return middle if len(found) == 1 else f"{middle} ({min(found):,.{digits}f}..{max(found):,.{digits}f})"


def row_of(run: dict[str, Any], shape: str, connections: int, path: str) -> Row | None:
    """The row, if it was measured."""
    for row in run["rows"]:
        if (row["shape"], row["connections"], row["path"]) == (shape, connections, path):
            found: Row = row
            return found
    return None


def table(run: dict[str, Any], shape: str, connections: int) -> list[str]:
    """Everything that one shape and number of connections gave."""
    rows = [row for row in run["rows"] if (row["shape"], row["connections"]) == (shape, connections)]
    titles = ["", "requests/s", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "CPU us/request", "RSS MB"]
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    failed = []
    for row in rows:
        base = PYTHON_DIRECT if row["path"] in (PYTHON_FRONT, ACTOR_FRONT) else DIRECT
        added = ["-", "-"]
        if row["path"] not in (DIRECT, PYTHON_DIRECT):
            direct = row_of(run, shape, connections, base)
            for place, key in enumerate(("p50_ms", "p99_ms")):
                mine, other = median(row, key), median(direct, key)
                if mine is not None and other is not None:
                    added[place] = f"{mine - other:.2f}"
        cells = [spread(values(row, "rate"), 0), spread(values(row, "p50_ms"), 2), spread(values(row, "p99_ms"), 2)]
        cells += [*added, spread(values(row, "cpu_us"), 0), spread(values(row, "rss_mb"), 0)]
        lines.append(f"| {row['path']} | {' | '.join(cells)} |")
        lost = sum(values(row, "failed"))
        if lost:
            failed.append(f"* {row['path']}: {lost:.0f} of {sum(values(row, 'requests')):.0f} requests failed.")
    return [*lines, "", *failed, *([""] if failed else [])]


def best_peer(run: dict[str, Any], shape: str, connections: int, key: str) -> tuple[str, float] | None:
    """The peer with the lowest median of a figure, under round_robin."""
    found = []
    for name in PEERS:
        value = median(row_of(run, shape, connections, f"{name} round_robin"), key)
        if value is not None:
            found.append((value, name))
    return (min(found)[1], min(found)[0]) if found else None


def verdict(kept: bool) -> str:
    return "kept" if kept else "**missed**"


def cpu_bars(run: dict[str, Any], connections: int) -> list[str]:
    lines = []
    for shape in SHAPES:
        mine = median(row_of(run, shape.key, connections, OURS), "cpu_us")
        peer = best_peer(run, shape.key, connections, "cpu_us")
        # Between two pauses every router wakes, reads and writes once a token: the table has what that costs.
        if shape.key == "paced" or mine is None or peer is None:
            continue
        lines.append(
            f"| CPU per request, {shape.title}, {connections} connections | {mine:.0f} us | half of the best peer: "
            f"{peer[0]}, {peer[1]:.0f} us | {mine / peer[1]:.2f} | {verdict(mine <= peer[1] / 2)} |"
        )
    return lines


def added_bars(run: dict[str, Any]) -> list[str]:
    lines = []
    for shape in SHAPES:
        direct = median(row_of(run, shape.key, 1, DIRECT), "p50_ms")
        mine = median(row_of(run, shape.key, 1, OURS), "p50_ms")
        peer = best_peer(run, shape.key, 1, "p50_ms")
        # What 160 ms of pauses leave of a tenth of a millisecond is noise.
        if shape.key == "paced" or direct is None or mine is None or peer is None:
            continue
        ours, theirs = mine - direct, peer[1] - direct
        lines.append(
            f"| added p50, {shape.title}, 1 connection | {ours:.2f} ms | half of the best peer: {peer[0]}, "
            f"{theirs:.2f} ms | {ours / max(theirs, 1e-9):.2f} | {verdict(ours <= theirs / 2)} |"
        )
    return lines


def actor_bars(run: dict[str, Any]) -> list[str]:
    lines = []
    for shape in SHAPES:
        for connections in sorted({row["connections"] for row in run["rows"]}):
            actor = median(row_of(run, shape.key, connections, ACTOR_FRONT), "rate")
            engine = median(row_of(run, shape.key, connections, PYTHON_FRONT), "rate")
            direct = median(row_of(run, shape.key, connections, PYTHON_DIRECT), "rate")
            where = f"{shape.title}, {connections} connections"
            if connections != 64 or actor is None or engine is None or direct is None:
                continue
            if shape.key != "paced":
                lines.append(
                    f"| requests/s before an actor Worker, {where} | {actor:,.0f} "
                    f"| before a Python engine: {engine:,.0f} | {actor / engine:.2f} | {verdict(actor >= engine)} |"
                )
            if shape.stream:
                lines.append(
                    f"| streamed tokens/s before an actor Worker, {where} | {actor * 32:,.0f} | 90 % of the Python "
                    f"engine asked directly: {direct * 32:,.0f} | {actor / direct:.2f} "
                    f"| {verdict(actor >= 0.9 * direct)} |"
                )
    return lines


def placements(run: dict[str, Any]) -> list[str]:
    """CPU per request with every process pinned."""
    titles = ["", "Pulsing", *PEERS, "ratio to the best of them"]
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    names = [OURS, *(f"{peer} round_robin" for peer in PEERS)]
    rows = {(row["placement"], row["shape"], row["path"]): row for row in run.get("pinned", [])}
    for placement in dict.fromkeys(row["placement"] for row in run.get("pinned", [])):
        for shape in SHAPES:
            found = [rows.get((placement, shape.key, name)) for name in names]
            if found[0] is None:
                continue
            cells = [spread(values(row, "cpu_us"), 0) if row else "-" for row in found]
            mine, theirs = median(found[0], "cpu_us"), [median(row, "cpu_us") for row in found[1:] if row]
            best = min((value for value in theirs if value is not None), default=None)
            cells.append(f"{mine / best:.2f}" if mine is not None and best is not None else "-")
            lines.append(f"| {shape.title}; {placement} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


PLACEMENTS_NOTE = """CPU us/request at 64 connections with every thread pinned: the router on a core of its own, wrk
and the engine on the other; or all on one core. Left alone, as in all other tables, the kernel chooses, and keeps to
it for seconds or minutes. Where the router has a core of its own it finds one or two tokens of a stream at a time,
and a message to the other core costs a wake-up there; on one core it finds many at once."""


def page(run: dict[str, Any]) -> str:
    """The whole page, in Markdown."""
    host = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        "# What the Router costs",
        "",
        f"`make bench-router` wrote this page on {run['date']} (commit {run['commit']}; figures in `router.json`).",
        f"{host['processor']}, {host['cores']} cores, {host['memory']}, Linux {host['kernel']}; load average "
        f"{host['load']} before the run; {run['steal']:.1%} of the time taken by the hypervisor. {versions}.",
        "",
    ]
    if run["remark"]:
        lines += [run["remark"], ""]
    lines += [
        f"Medians of {run['rounds']} rounds of {run['seconds']:.0f} s, lowest and highest in brackets; each round asks",
        "every path once. wrk, routers and engines share the cores, so the CPU of the router's process is the figure",
        "that says most; rates say what is left over. All routers stand in front of the same mock engine",
        "(`mock_engine.rs`: one thread, two ports, one write for each streamed token), with their defaults but for the",
        "policy. *Added* is the median's distance to the engine asked directly. The Python engine and the actor Worker",
        "share one generator (`trivial_worker.py`); each runs as it comes: `pulsing actor` asks less of the collector",
        "and has glibc keep the memory of large prompts (`docs/guides/workers.md`), the engine has CPython's defaults.",
        "",
        "## The bars of the design",
        "",
        "| | Pulsing | against | ratio | |",
        "|---|---:|---|---:|---|",
        *cpu_bars(run, 64),
        *added_bars(run),
        *actor_bars(run),
        "",
    ]
    if placed := placements(run):
        lines += ["## By placement", "", PLACEMENTS_NOTE, "", *placed, ""]
    for shape in SHAPES:
        for connections in sorted({row["connections"] for row in run["rows"] if row["shape"] == shape.key}):
            lines += [f"## {shape.title}, {connections} connections", "", *table(run, shape.key, connections)]
    return "\n".join(lines).rstrip() + "\n"
