"""Two processes at full load for minutes: does anything grow?

    python benches/soak.py [--seconds 600] [--only KIND,...] [--python PATH]

The load is in `soak_load.py`, the processes in `soak_node.py`. RSS, descriptors, threads and tasks of both are sampled
each second. Before the load each node is given as much of a past as it remembers, so that this does not grow later. The
first fifth of the load is warm-up. After it the line fitted through the lowest RSS of each ten seconds must not
rise by more than `LIMIT_KB` a minute (a slope counts when it is over twice its standard error, so that short runs do
not fail by noise), but for what the allocator keeps of what was freed: that comes in steps of a large message, at some
time or other, and may be `KEPT_MB` more in the last quarter than in the first. The same is asked of what lives, with
tighter limits: bytes of the C heap (`LIVE_KB`), and blocks of Python's (`BLOCKS`). Descriptors, threads and tasks must
stay what they were. When the load has ended, there must be
as many actors as before it, and no tasks but the nodes' own. Any error that the load did not ask for fails the soak.
"""

import argparse
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import runtime_meter as meter
import runtime_venv as venv

HERE = pathlib.Path(__file__).resolve().parent
LIMIT_KB = 500.0
LIVE_KB = 100.0
BLOCKS = 500.0
KEPT_MB = 16.0
FLOOR_SECONDS = 10
SLACK_FDS = 5
SLACK_THREADS = 5
SLACK_TASKS = 0.2
# Methods of `soak_load.Load`.
KINDS = (
    "ask",
    "tell",
    "large",
    "stream_whole",
    "stream_broken_off",
    "stream_dropped",
    "cancelled",
    "late",
    "failing",
    "churn",
)


class Node:
    """One process of the soak."""

    def __init__(self, python: pathlib.Path, role: str, kinds: str, seeds: str = "") -> None:
        self.role = role
        command = [str(python), str(HERE / "soak_node.py"), "--role", role, "--seeds", seeds, "--kinds", kinds]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.last: dict[str, Any] = {}
        self.samples: dict[str, list[float]] = {
            "rss_kb": [],
            "live_kb": [],
            "kept_kb": [],
            "blocks": [],
            "fds": [],
            "threads": [],
            "tasks": [],
        }
        threading.Thread(target=self._read, daemon=True).start()
        self.before = self.wait("ready")

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.said.put(json.loads(line))
        self.said.put(None)

    def wait(self, key: str, seconds: float = 120.0) -> dict[str, Any]:
        """The next report that has `key`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                report = self.said.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"the {self.role} did not report {key!r} within {seconds:.0f} s") from None
            if report is None:
                raise SystemExit(f"the {self.role} ended by itself: {self.popen.wait()}")
            self.last = report
            if key in report:
                return report

    def sample(self) -> None:
        """One second of it."""
        while not self.said.empty():
            report = self.said.get()
            if report is None:
                raise SystemExit(f"the {self.role} ended by itself: {self.popen.wait()}")
            self.last = report
        pid = self.popen.pid
        self.samples["rss_kb"].append(meter.rss_of(pid) * 1e3)
        self.samples["fds"].append(len(os.listdir(f"/proc/{pid}/fd")))
        self.samples["threads"].append(len(os.listdir(f"/proc/{pid}/task")))
        for what in ("tasks", "live_kb", "kept_kb", "blocks"):
            self.samples[what].append(self.last.get(what, 0))

    def say(self) -> None:
        """The next step: the end of the load, then the end of the process."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()


def fit(values: list[float]) -> tuple[float, float]:
    """Slope a minute of the floor of each `FLOOR_SECONDS`, and its standard error (least squares)."""
    floors = [min(values[at : at + FLOOR_SECONDS]) for at in range(0, len(values) - FLOOR_SECONDS + 1, FLOOR_SECONDS)]
    if len(floors) < 3:
        raise SystemExit("too short to fit a line: --seconds 50 is the least")
    minutes = [index * FLOOR_SECONDS / 60 for index in range(len(floors))]
    slope, base = statistics.linear_regression(minutes, floors)
    rest = sum((floor - base - slope * at) ** 2 for at, floor in zip(minutes, floors, strict=True))
    middle = statistics.fmean(minutes)
    error = (rest / (len(floors) - 2) / sum((at - middle) ** 2 for at in minutes)) ** 0.5
    return slope, error


def ends(values: list[float]) -> tuple[float, float]:
    """Median of the first and of the last quarter."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def judged(node: Node, warm: int) -> list[str]:
    """Prints what was sampled of a process; returns what grew."""
    grown = []
    rss, kept = node.samples["rss_kb"][warm:], node.samples["kept_kb"][warm:]
    slope, error = fit(rss)
    print(
        f"{node.role}: RSS {rss[0] / 1e3:.1f} MB after warm-up, {rss[-1] / 1e3:.1f} MB at the end (lowest "
        f"{min(rss) / 1e3:.1f}, highest {max(rss) / 1e3:.1f}); slope {slope:+.0f} +- {error:.0f} KB/min"
    )
    slope, error = fit([all_of_it - free for all_of_it, free in zip(rss, kept, strict=True)])
    first, last = (at / 1e3 for at in ends(kept))
    print(
        f"{node.role}: of it malloc keeps {first:.1f} MB in the first quarter, {last:.1f} MB in the last; slope of the "
        f"rest {slope:+.0f} +- {error:.0f} KB/min, limit {LIMIT_KB:.0f}"
    )
    if slope > LIMIT_KB and slope > 2 * error:
        grown.append(f"{node.role}: RSS without what malloc keeps rises by {slope:.0f} KB/min")
    if last > first + KEPT_MB:
        grown.append(f"{node.role}: malloc keeps {last:.1f} MB, of {first:.1f} MB at first")
    for what, words, limit in (("live_kb", "KB of the C heap", LIVE_KB), ("blocks", "blocks of Python's heap", BLOCKS)):
        values = node.samples[what][warm:]
        slope, error = fit(values)
        print(
            f"{node.role}: at least {min(values):,.0f} {words} live; slope {slope:+.0f} +- {error:.0f} a minute, "
            f"limit {limit:.0f}"
        )
        if slope > limit and slope > 2 * error:
            grown.append(f"{node.role}: {slope:.0f} {words} more each minute")
    for what, slack in (("fds", SLACK_FDS), ("threads", SLACK_THREADS), ("tasks", None)):
        first, last = ends(node.samples[what][warm:])
        print(f"{node.role}: {what} {first:.0f} in the first quarter, {last:.0f} in the last")
        if last > first + (SLACK_TASKS * first + 10 if slack is None else slack):
            grown.append(f"{node.role}: {what} grew from {first:.0f} to {last:.0f}")
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument(
        "--python", type=pathlib.Path, help="interpreter with pulsing; default: this tree's release wheel"
    )
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of load, separated by commas; default: all")
    parser.add_argument("--json", type=pathlib.Path, help="file for all samples")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"no kind of load: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    python = options.python or venv.ours()
    warm = options.seconds // 5
    nodes: list[Node] = []
    try:
        nodes.append(Node(python, "server", options.only))
        nodes.append(Node(python, "client", options.only, nodes[0].before["ready"].split(",")[0]))
        failures = soak(nodes, options.seconds)
        for node in nodes:
            failures += judged(node, warm)
    finally:
        for node in nodes:
            node.popen.kill()
            node.popen.wait()
        if options.json and nodes:
            options.json.write_text(json.dumps({node.role: node.samples for node in nodes}) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}")
    print("failed" if failures else "flat")
    sys.exit(1 if failures else 0)


def soak(nodes: list[Node], seconds: int) -> list[str]:
    """Samples for `seconds`, ends the load, and returns what it left behind."""
    begin = time.monotonic()
    cpu = [meter.cpu_of(node.popen.pid) for node in nodes]
    for second in range(seconds):
        time.sleep(max(0.0, begin + second + 1 - time.monotonic()))
        for node in nodes:
            node.sample()
        if (second + 1) % 30 == 0:
            sizes = ", ".join(f"{node.role} {node.samples['rss_kb'][-1] / 1e3:.1f} MB" for node in nodes)
            print(f"{second + 1} s: {sizes}", file=sys.stderr, flush=True)
    took = time.monotonic() - begin
    for node, before in zip(nodes, cpu, strict=True):
        print(f"{node.role}: {(meter.cpu_of(node.popen.pid) - before) / took * 100:.0f} % of a core")
    failures = []
    server, client = nodes
    client.say()
    rests = {"client": client.wait("rest")}
    server.say()
    rests["server"] = server.wait("rest")
    for node in nodes:
        rest, before = rests[node.role], node.before
        actors = f"actors {before['actors']} before, {rest['actors']} after the load"
        print(f"{node.role}: {actors}; {rest['tasks']} tasks left")
        if rest["actors"] > before["actors"]:
            failures.append(f"{node.role}: {rest['actors'] - before['actors']} actors are left")
        # A node at rest keeps a few tasks of its own on each of its two loops.
        if rest["tasks"] > 12:
            kinds = ", ".join(f"{count} {kind}" for kind, count in rest["left"].items())
            failures.append(f"{node.role}: {rest['tasks']} tasks are left: {kinds}")
        failures += [f"{node.role}: {count} times {text}" for text, count in rest["errors"].items()]
    print("done: " + ", ".join(f"{count:,} {kind}" for kind, count in rests["client"]["done"].items()))
    for node in reversed(nodes):
        node.say()
    for node in reversed(nodes):
        try:
            code: int | str = node.popen.wait(20)
        except subprocess.TimeoutExpired:
            code = "nothing: it did not end"
        if code != 0:
            failures.append(f"{node.role} ended with {code}")
    return failures


if __name__ == "__main__":
    main()
