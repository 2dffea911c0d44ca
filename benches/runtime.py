"""What the runtime costs, beside its peers, in one run on one machine.

    python benches/runtime.py [--quick] [--only NAME,...] [--rows ROW,...] [--write docs/benchmarks/runtime.md]

Makes what it needs by itself: the release wheel of this tree in an environment of its own, and the peers from PyPI
(`runtime_venv.py` says which, and where they are kept). `runtime_rows.py` has the rows and the bars.
"""

import argparse
import datetime
import json
import pathlib
import sys
import time
from typing import Any

import runtime_contest as contest
import runtime_machine as machine
import runtime_report as report
import runtime_venv as venv
from page import publish
from runtime_rows import BY_KEY, ROWS

COMMON = ("local_seq", "local_seq_async", "local_64", "local_64_async", "local_tell")
BETWEEN = ("remote_seq", "remote_seq_async", "remote_64", "remote_1000", "stream", "echo_bytes", "echo_array")
PLACED = ("remote_seq_one", "remote_seq_two", "echo_bytes_one", "echo_bytes_two")
COMPLETION_ROWS = ("completion_seq", "completion_100")
WHOLE = (*COMMON, *BETWEEN, "spawn", "crowd", "idle")

WHAT = {
    "pulsing uvloop": "this tree, release wheel, under uvloop",
    "pulsing asyncio": "this tree, release wheel, under asyncio's own loop",
    "peer 0.1.2": "the public wheel of the same name, under uvloop",
    "xoscar": "actors of one pool (local) and of a sub-pool (another process)",
    "ray": "`ray.init()` on this machine; every actor is a process, calls are synchronous `ray.get`",
    "bridge of pulsing": "this tree's bridge asked to resolve a name it knows, under uvloop",
    "pyo3-async-runtimes": "`future_into_py` of a future that is ready at once, under uvloop",
    "TCP uvloop": "a bare echo between two processes: asyncio protocols on uvloop, and blocking sockets",
}

COMPLETIONS = ("bridge of pulsing", "pyo3-async-runtimes")


def contestants(chosen: set[str], pyo3_async: bool) -> list[contest.Contestant]:
    """Those who take part, each with its environment."""
    made: list[contest.Contestant] = []

    def add(name: str, python: Any, script: str, rows: tuple[str, ...], *words: str, **env: str) -> None:
        if not chosen or name in chosen:
            made.append(contest.Contestant(name, python(), script, words, rows, env))

    ours, bare = (*WHOLE, *PLACED, "remote_tell", "idle_ten"), ("remote_seq", "echo_bytes", "echo_sockets", *PLACED)
    add("pulsing uvloop", venv.ours, "runtime_pulsing.py", ours, "--crowd_seconds", "30")
    add("peer 0.1.2", lambda: venv.peer("peer"), "runtime_peer.py", WHOLE)
    add("xoscar", lambda: venv.peer("xoscar"), "runtime_xoscar.py", WHOLE)
    add("TCP uvloop", lambda: venv.peer("echo"), "runtime_echo.py", bare)
    add("pulsing asyncio", venv.ours, "runtime_pulsing.py", (*COMMON, *BETWEEN, "remote_tell"), "--loop", "asyncio")
    if pyo3_async or chosen & set(COMPLETIONS):
        for name, python, library in zip(COMPLETIONS, (venv.ours, venv.pyo3_async), ("pulsing", "pyo3"), strict=True):
            add(name, python, "runtime_completions.py", COMPLETION_ROWS, "--library", library)
    add("ray", lambda: venv.peer("ray"), "runtime_ray.py", (*BETWEEN, "spawn", "crowd", "idle"))
    return made


def packages(found: list[contest.Contestant]) -> dict[str, dict[str, Any]]:
    """What each contestant is, and in which version."""
    shown = {"pulsing": ("pulsing", "uvloop", "numpy"), "peer": ("pulsing", "uvloop"), "TCP": ("uvloop",)}
    shown["bridge"] = shown["pulsing"]
    known = {}
    for one in found:
        names = shown.get(one.name.split()[0], (one.name, "numpy"))
        if one.name == COMPLETIONS[1]:
            known[one.name] = {"what": WHAT[one.name], "packages": venv.locked(one.name, "pyo3", "tokio")}
        else:
            known[one.name] = {"what": WHAT[one.name], "packages": venv.versions(one.python, *names)}
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one measurement")
    parser.add_argument("--quick", action="store_true", help="one short repetition, to try things out")
    parser.add_argument("--only", default="", help=f"contestants, of: {', '.join(WHAT)}")
    parser.add_argument("--rows", default="", help=f"rows, of: {', '.join(BY_KEY)}")
    parser.add_argument("--write", type=pathlib.Path, help="file for the page; the JSON goes beside it")
    parser.add_argument("--remark", default="", help="a sentence for the page, such as what else ran")
    parser.add_argument("--again", type=pathlib.Path, help="write the page of an earlier run's JSON")
    parser.add_argument("--pyo3-async", action="store_true", help="also measure pyo3-async-runtimes (builds it)")
    options = parser.parse_args()
    if options.again:
        run = json.loads(options.again.read_text())
        publish(report.page(run), run, options.write)
        return
    if options.quick:
        options.repetitions, options.seconds = 1, 0.3
    only = {name.strip() for name in options.only.split(",") if name.strip()}
    rows = [row.strip() for row in options.rows.split(",") if row.strip()] or [row.key for row in ROWS]
    unknown = (only - set(WHAT)) | (set(rows) - set(BY_KEY))
    if unknown:
        raise SystemExit(
            f"unknown: {', '.join(sorted(unknown))}; contestants: {', '.join(WHAT)}; rows: {', '.join(BY_KEY)}"
        )
    taking_part = contestants(only, options.pyo3_async)
    run: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": venv.run("git", "describe", "--always", "--dirty", cwd=venv.ROOT).strip(),
        "machine": machine.described(),
        "repetitions": options.repetitions,
        "seconds": options.seconds,
        "remark": options.remark,
        "versions": packages(taking_part),
        "runs": {one.name: {} for one in taking_part},
    }
    before = machine.steal()
    repeat(taking_part, rows, options.repetitions, options.seconds, run["runs"])
    after = machine.steal()
    run["steal"] = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    publish(report.page(run), run, options.write)


def repeat(
    taking_part: list[contest.Contestant], rows: list[str], repetitions: int, seconds: float, runs: report.Runs
) -> None:
    """Every contestant once, and again: what disturbs one disturbs all."""
    limit = 60 + len(rows) * seconds * 8
    for repetition in range(repetitions):
        for one in taking_part:
            began = time.monotonic()
            results = contest.once(one, [row for row in rows if row != "idle_ten"], seconds, limit)
            if "idle_ten" in rows and "idle_ten" in one.rows:
                results |= contest.ten_idle(one, max(2.0, seconds * 3))
            for row, metrics in results.items():
                runs[one.name].setdefault(row, []).append(metrics)
            took = time.monotonic() - began
            print(f"{repetition + 1}/{repetitions} {one.name}: {took:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
