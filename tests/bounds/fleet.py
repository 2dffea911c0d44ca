"""Real processes, one node each, and what each of them saw, when."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from namespaces import Network

SCRIPT = pathlib.Path(__file__).with_name("reporting_node.py")
SECRET = "a secret of the tests"

Event = dict[str, Any]


class Node:
    """One process."""

    def __init__(self, name: str, prefix: Sequence[str], python: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.events: list[Event] = []
        """What it saw, in order; appended to by a thread."""
        self.states: dict[str, str] = {}
        self.names: dict[str, int] = {}
        self.node_id = ""
        self.addr = ""
        self.joined = 0.0
        """Seconds its start took, from the call to the cluster's names."""
        self.stopped = False
        self._answers: dict[int, queue.Queue[Event]] = {}
        self._number = 0
        self._ready = threading.Event()
        command = [*prefix, python, "-X", "faulthandler", str(SCRIPT), json.dumps({"name": name, **settings})]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
        )
        self.said: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._hear, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if "id" in event:
                self._answers[event["id"]].put(event)
                continue
            if "state" in event:
                self.states[event["node"]] = event["state"]
            elif "named" in event:
                self.names[event["named"]] = event["count"]
            elif "ready" in event:
                self.node_id, self.addr, self.joined = event["ready"], event["addr"], event["joined"]
                self._ready.set()
            self.events.append(event)

    def wait_ready(self, limit: float = 120.0) -> None:
        deadline = time.monotonic() + limit
        while not self._ready.wait(0.05):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not join within {limit} s:\n{''.join(self.said)}")

    def ask(self, do: str, limit: float = 30.0, **arguments: Any) -> Any:
        """Lets the node do something; returns the result, or raises what it said."""
        answer = self.try_to(do, limit, **arguments)
        assert "error" not in answer, f"{self.name} could not {do} {arguments}: {answer}"
        return answer["result"]

    def try_to(self, do: str, limit: float = 30.0, **arguments: Any) -> Event:
        """The same, but an error is an answer, too."""
        return self.begin(do, **arguments).get(timeout=limit)

    def begin(self, do: str, **arguments: Any) -> queue.Queue[Event]:
        """The same; returns where the answer will be."""
        self._number += 1
        number = self._number
        answer: queue.Queue[Event] = queue.Queue()
        self._answers[number] = answer
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"id": number, "do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"{self.name} ended with {self.process.wait()}:\n{''.join(self.said)}") from None
        return answer

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends process and threads."""
        self.kill()
        for thread in self._threads:
            thread.join(10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class Fleet:
    """Nodes that belong together, as a context manager.

    Args:
        python: Interpreter that has pulsing.
        settings: Of every node, as for `pulsing.actor_system`.
    """

    def __init__(self, python: str = sys.executable, **settings: Any) -> None:
        self.python = python
        self.settings = settings
        self.nodes: list[Node] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.process.kill()
        for node in self.nodes:
            node.close()

    def add(self, name: str, prefix: Sequence[str] = (), **settings: Any) -> Node:
        """Starts a node; it is not ready yet."""
        node = Node(name, prefix, self.python, {**self.settings, **settings})
        self.nodes.append(node)
        return node

    def start(self, size: int, at_once: int = 4, **settings: Any) -> None:
        """Adds `size` nodes on loopback and waits until they see each other."""
        if not self.nodes:
            self.add("n0", addr="127.0.0.1:0", **settings).wait_ready()
        seeds = [self.nodes[0].addr]
        while len(self.nodes) < size:
            group = range(len(self.nodes), min(size, len(self.nodes) + at_once))
            for node in [self.add(f"n{number}", addr="127.0.0.1:0", seeds=seeds, **settings) for number in group]:
                node.wait_ready()
        self.wait_whole(60.0)

    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.process.poll() is None and not node.stopped]

    def wait_whole(self, limit: float) -> float:
        """Waits until all living nodes see each other alive, and all their names; returns how long that took."""
        living = self.living()
        begun = time.monotonic()

        def missing() -> list[str]:
            return [
                f"{node.name} sees {other.name} {node.states.get(other.node_id)}, its name {node.names.get(other.name)}"
                for node in living
                for other in living
                if other is not node and (node.states.get(other.node_id) != "alive" or node.names.get(other.name) != 1)
            ]

        wait_for("all see each other and their names", lambda: not missing(), limit, lambda: "; ".join(missing()[:10]))
        return time.monotonic() - begun

    def wait_seen(
        self, about: Node, states: Sequence[str], since: float, observers: Iterable[Node], limit: float
    ) -> list[float]:
        """Waits until every observer saw `about` in one of `states`; returns the seconds since `since`, sorted."""
        observers = list(observers)

        def times() -> dict[str, float]:
            return {
                observer.name: event["at"] - since
                for observer in observers
                for event in reversed(list(observer.events))
                if event.get("node") == about.node_id and event["at"] >= since and event["state"] in states
            }

        wait_for(
            f"all see {about.name} {' or '.join(states)}",
            lambda: len(times()) == len(observers),
            limit,
            lambda: f"seen by {times()}",
        )
        return sorted(times().values())

    def wait_named(self, name: str, count: int, since: float, observers: Iterable[Node], limit: float) -> list[float]:
        """Waits until every observer counts `count` instances of a name; returns the seconds since `since`, sorted."""
        observers = list(observers)
        wait_for(
            f"all see {count} of {name}",
            lambda: all(observer.names.get(name, 0) == count for observer in observers),
            limit,
            lambda: str({observer.name: observer.names.get(name, 0) for observer in observers}),
        )
        return sorted(
            max(event["at"] - since for event in list(observer.events) if event.get("named") == name)
            for observer in observers
        )

    def deaths(self, since: float, about: Iterable[Node] | None = None) -> list[str]:
        """Who was declared down by whom since then."""
        names = {node.node_id: node.name for node in (self.nodes if about is None else about)}
        return [
            f"{observer.name} declared {names[event['node']]} {event['state']} after {event['at'] - since:.1f} s"
            for observer in self.nodes
            for event in list(observer.events)
            if event.get("state") in ("down", "left") and event["at"] >= since and event["node"] in names
        ]

    def nobody_dies(self, seconds: float) -> None:
        """Watches for that long; fails when anybody is declared dead."""
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            deaths = self.deaths(begun)
            assert not deaths, deaths
            time.sleep(0.1)

    def suspicions(self, since: float) -> list[tuple[str, float | None]]:
        """How every suspicion since then ended: the state after it, and the seconds until then (None: not yet)."""
        found: list[tuple[str, float | None]] = []
        for observer in self.nodes:
            open_since: dict[str, float] = {}
            for event in list(observer.events):
                if "state" not in event or event["at"] < since:
                    continue
                begun = open_since.pop(event["node"], None)
                if begun is not None:
                    found.append((event["state"], event["at"] - begun))
                if event["state"] == "suspect":
                    open_since[event["node"]] = event["at"]
            found += [("suspect", None)] * len(open_since)
        return found


def wait_for(what: str, condition: Callable[[], bool], limit: float, otherwise: Callable[[], str] = lambda: "") -> None:
    """Waits until `condition` holds; fails naming `what`, and what is instead, after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit:.1f} s: {what}; {otherwise()}")
        time.sleep(0.02)


@contextlib.contextmanager
def networked(size: int, *, ipv6: bool = False, **settings: Any) -> Iterator[tuple[Network, Fleet]]:
    """A fleet of `size` nodes, each on a host of its own, all of whom know the first two and a secret."""
    settings = {"passphrase": SECRET, "join_timeout": 60.0, **settings}
    with Network(size, ipv6=ipv6) as network, Fleet(**settings) as fleet:
        seeds = [network.addr(0), network.addr(1)]
        for host in range(size):
            fleet.add(f"n{host}", network.inside(host), addr=network.addr(host), seeds=seeds)
        for node in fleet.nodes:
            node.wait_ready()
        fleet.wait_whole(30.0)
        yield network, fleet
