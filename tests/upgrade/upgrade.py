"""A cluster goes from one version to another, node by node, under load: no idempotent call fails.

    python tests/upgrade/upgrade.py --previous REF

The wheel of the git revision REF, a release or any other commit, and the wheel of this tree each get an environment of
their own (`benches/runtime_venv.py` keeps them). Four nodes of the previous version serve; two clients, one of each
version, are nodes, too. Then every node is replaced by one of this version at the same address, and one goes back.
The exit code is 1 when a call, a stream or a name failed for good, a node did not end as it should, or anybody was
taken for dead.
"""

import argparse
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "benches"))

import runtime_venv as venv  # noqa: E402 - its folder is no package

NODES = 4
LIMIT = 60.0
"""Seconds within which a node is replaced, however busy the machine is."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def environment(side: str) -> dict[str, str]:
    """Of a process of this side: nothing of the tree is importable but the actor."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PYTHONPATH": str(HERE), "PULSING_UPGRADE_SIDE": side}


class Cluster:
    """Nodes and clients of both versions."""

    def __init__(self, pythons: dict[str, str], logs: pathlib.Path) -> None:
        self.pythons = pythons
        self.logs = logs
        self.addrs = [f"127.0.0.1:{port}" for port in free_ports(NODES)]
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.clients: dict[str, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[Any]] = []

    def start(self, at: int, side: str) -> subprocess.Popen[bytes]:
        """A node of this side at the address."""
        words = ["-m", "pulsing.cli", "actor", "upgrade_actor.Echo", "--name", "echo"]
        words += ["--addr", self.addrs[at], "--seeds", ",".join(self.addrs)]
        with (self.logs / f"node-{at}.log").open("ab") as log:
            node = subprocess.Popen(
                [self.pythons[side], *words], env=environment(side), stdout=log, stderr=subprocess.STDOUT
            )
        self.nodes[at] = node
        self.all.append(node)
        return node

    def client(self, side: str) -> None:
        """A client of this side."""
        with (self.logs / f"client-{side}.log").open("ab") as log:
            self.clients[side] = subprocess.Popen(
                [self.pythons[side], str(HERE / "upgrade_client.py"), ",".join(self.addrs), f"of-{side}"],
                env=environment(side),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.all.append(self.clients[side])

    def report(self, side: str) -> dict[str, Any]:
        """What a client has done and sees."""
        client = self.clients[side]
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("\n")
        client.stdin.flush()
        ready, _, _ = select.select([client.stdout], [], [], LIMIT)
        line = client.stdout.readline() if ready else ""
        if not line:
            raise SystemExit(f"FAILED: the client of {side} version does not answer ({client.poll()})\n{self.said()}")
        return dict(json.loads(line))

    def reports(self) -> dict[str, dict[str, Any]]:
        """Of all clients; ends the run if anything failed."""
        reports = {side: self.report(side) for side in self.clients}
        failed = [f"{side}: {text}" for side, report in reports.items() for text in report["failed"]]
        if failed:
            raise SystemExit("FAILED:\n" + "\n".join(failed) + "\n" + self.said())
        return reports

    def wait(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Waits until `holds` of what every client sees."""
        deadline = time.monotonic() + LIMIT
        while True:
            reports = self.reports()
            if all(holds(report) for report in reports.values()):
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"FAILED: not within {LIMIT:.0f} s: {what}; {json.dumps(reports)}\n{self.said()}")
            time.sleep(0.1)

    def replace(self, at: int, side: str) -> None:
        """A node ends as SIGTERM ends it, and one of this side takes its address."""
        before = self.reports()
        old = {name: report["echo"].get(self.addrs[at]) for name, report in before.items()}
        leaving = self.nodes[at]
        leaving.send_signal(signal.SIGTERM)
        self.start(at, side)
        if leaving.wait(LIMIT) != 0:
            raise SystemExit(f"FAILED: a node ended with {leaving.returncode}\n{self.said()}")
        known = set(old.values())
        self.wait(
            f"{self.addrs[at]} serves again",
            lambda seen: len(seen["echo"]) == NODES and seen["echo"].get(self.addrs[at]) not in {None, *known},
        )
        answers = f"answers of {side} nodes"
        counts = {name: report["done"].get(answers, 0) for name, report in self.reports().items()}
        least = min(counts.values())
        self.wait(f"more {answers}", lambda seen: seen["done"].get(answers, 0) > least + 20)

    def said(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"-- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.logs.glob("*.log")))


@contextlib.contextmanager
def cluster(pythons: dict[str, str]) -> Iterator[Cluster]:
    """Whatever happens, no process is left."""
    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(pythons, pathlib.Path(folder))
        try:
            yield made
        finally:
            for process in made.all:
                process.kill()
            for process in made.all:
                process.wait()


def upgrade(pythons: dict[str, str]) -> None:
    """The whole of it."""
    with cluster(pythons) as made:
        for at in range(NODES):
            made.start(at, "previous")
        for side in pythons:
            made.client(side)
        made.wait("all nodes serve both clients", lambda seen: len(seen["echo"]) == NODES)
        made.wait("every kind of traffic", lambda seen: all(seen["done"].get(kind, 0) >= 20 for kind in KINDS))
        print("both clients are served by nodes of the previous version", flush=True)
        for at in range(NODES):
            made.replace(at, "this")
            print(f"node {at + 1} of {NODES} is of this version", flush=True)
        made.replace(0, "previous")
        print("node 1 is of the previous version again", flush=True)
        made.wait(
            "nobody is missing",
            lambda seen: seen["members"].get("alive") == NODES + 2 and not seen["members"].get("suspect"),
        )
        reports = made.reports()
        for side, report in reports.items():
            print(f"client of {side} version: {json.dumps(report['done'])}; members {json.dumps(report['members'])}")
        dead = {side: report["members"]["down"] for side, report in reports.items() if report["members"].get("down")}
        if dead:
            raise SystemExit(f"FAILED: taken for dead instead of seen to leave: {dead}\n{made.said()}")
        for node in made.nodes.values():
            node.send_signal(signal.SIGTERM)
        ends = [node.wait(LIMIT) for node in made.nodes.values()]
        if any(ends):
            raise SystemExit(f"FAILED: nodes ended with {ends}\n{made.said()}")
    print("no idempotent call failed, no stream, and no name")


KINDS = ("calls", "large calls", "streams", "names")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--previous", help="git revision to come from")
    parser.add_argument("--previous-python", help="in place of it: an interpreter that has the previous version")
    parser.add_argument("--python", help="interpreter with this version; default: this tree's release wheel")
    options = parser.parse_args()
    if not options.previous and not options.previous_python:
        parser.error("--previous REF: which version to come from? (make upgrade-test PREVIOUS=v0.2.0, or HEAD~1)")
    previous = options.previous_python or str(venv.at_commit(options.previous))
    upgrade({"previous": previous, "this": options.python or str(venv.ours())})


if __name__ == "__main__":
    main()
