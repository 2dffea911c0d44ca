"""Routers as the drills see them: a front, and Workers that can be killed, stopped and started again one by one."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import router_house as house


@dataclasses.dataclass
class Backend:
    """A Worker that generates.

    Attributes:
        command: What starts it.
        tally: Port of ``GET /mock``.
        process: It, while it runs.
        ready: Path on `tally` that is answered 200 when it serves.
    """

    command: list[str]
    tally: int
    process: house.Process | None = None
    ready: str = "/mock"

    def start(self, log: pathlib.Path | None) -> None:
        """Starts it, at the address it had."""
        self.process = house.Process(self.command, log)

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL waits for its end."""
        assert self.process is not None
        self.process.signal(number)
        if number == signal.SIGKILL:
            self.process.popen.wait()

    def counted(self) -> dict[str, int]:
        """What it served so far; zeros while nobody answers."""
        status, text = house.get(self.tally, self.ready, timeout=2)
        empty = {"running": 0, "served": 0, "left": 0, "left_at": 0}
        found: dict[str, int] = json.loads(text) if status == 200 else empty
        return found


@dataclasses.dataclass(frozen=True)
class Kind:
    """What can be drilled.

    Attributes:
        name: As tables call it.
        who: "pulsing" or a peer's name.
        workers: "engines" (HTTP servers) or "actors".
        policies: Of those that the drills compare, the ones it has; its best last.
        cache_aware: Whether it has a policy of that name.
    """

    name: str
    who: str
    workers: str
    policies: tuple[str, ...]
    cache_aware: bool = True


OURS = ("round_robin", "random", "power_of_two", "consistent_hash", "cache_aware", "stream_load")
KINDS = [
    Kind("Pulsing, engines", "pulsing", "engines", OURS),
    Kind("Pulsing, actors", "pulsing", "actors", OURS),
    Kind("sglang-router", "sglang-router", "engines", ("round_robin", "power_of_two")),
    Kind("vllm-router", "vllm-router", "engines", ("round_robin", "power_of_two")),
]


@dataclasses.dataclass
class Subject:
    """One router with its Workers, standing."""

    kind: Kind
    policy: str
    port: int
    router: house.Process
    backends: list[Backend]
    log: pathlib.Path | None

    @property
    def ours(self) -> bool:
        """Whether it is Pulsing's."""
        return self.kind.who == "pulsing"

    def restart(self, backend: Backend) -> None:
        """Starts a Worker that was killed."""
        backend.start(self.log)

    def total(self, key: str) -> int:
        """A figure of all Workers' tallies."""
        return sum(backend.counted()[key] for backend in self.backends)

    def readiness(self) -> int:
        """Status of the readiness check."""
        return house.get(self.port, "/ready" if self.ours else "/readiness")[0]


class Range:
    """Where drills take place.

    Args:
        python: Interpreter that has Pulsing.
        engine: Program of the mock engine.
        log: File for what processes say; None: nowhere.
    """

    def __init__(self, python: pathlib.Path, engine: pathlib.Path, log: pathlib.Path | None) -> None:
        self.python = python
        self.engine = engine
        self.log = log

    @contextlib.contextmanager
    def subject(
        self, kind: Kind, policy: str, workers: int = 2, *router: str, places: int = 10_000
    ) -> Iterator[Subject]:
        """A router of this kind with so many Workers, all ready; an actor has so many places for requests."""
        with contextlib.ExitStack() as stack:
            ports = house.free_ports(workers)
            backends: list[Backend] = []

            def end() -> None:
                for backend in backends:
                    if backend.process is not None:
                        backend.process.stop()

            stack.callback(end)
            front: Any
            if kind.workers == "engines":
                backends += [Backend([str(self.engine), str(port), "--name", house.MODEL], port) for port in ports]
                for backend in backends:
                    backend.start(self.log)
                    house.wait_for("a mock engine", backend.tally, backend.ready)
            if kind.who == "pulsing":
                urls = ports if kind.workers == "engines" else []
                front, seed = stack.enter_context(
                    house.ours_with_seed(self.python, policy, urls, *router, log=self.log)
                )
                if kind.workers == "actors":
                    for port in ports:
                        words = house.actor(self.python, "drill_worker.DrillWorker", "worker", ["--seeds", seed])
                        words += ["--tally_port", str(port), "--places", str(places)]
                        backends.append(Backend(words, port))
                        backends[-1].start(self.log)
                house.wait_healthy(front.port, workers)
            else:
                front = stack.enter_context(house.peer(kind.who, policy, ports, *router, log=self.log))
            yield Subject(kind, policy, front.port, front.process, backends, self.log)


def until(what: str, condition: Callable[[], bool], limit: float) -> float:
    """Seconds until a condition holds; `limit` if it never does."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            return limit
        time.sleep(0.01)
    return time.monotonic() - began
