"""Twenty seconds of kill -9, pauses and restarts under load: every answer is whole, or says that it is not (S3, S4).

`PULSING_CHAOS_SEED` repeats a run; `PULSING_CHAOS_SECONDS` makes it longer.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from counting_worker import WORDS

HERE = pathlib.Path(__file__).parent
WHOLE = "".join(f"{number} " for number in range(WORDS))
SECONDS = float(os.environ.get("PULSING_CHAOS_SECONDS", "20"))
CLIENTS = 8


def wait_for(what: str, condition: Callable[[], bool], limit: float = 30.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}"
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def start(*words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-m", "pulsing.cli", "actor", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@dataclasses.dataclass
class House:
    """One Router and three Workers."""

    node: int
    http: int
    router: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def add(self) -> None:
        self.workers.append(start("counting_worker.CountingWorker", "--seeds", f"127.0.0.1:{self.node}"))

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=10)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except OSError:
                return 0, ""

    def ready_workers(self) -> int:
        status, text = self.get("/health")
        return int(json.loads(text)["healthy_workers"]) if status else 0

    def in_flight(self) -> int:
        found = re.search(r"^pulsing_router_in_flight (\d+)", self.get("/metrics")[1], re.MULTILINE)
        assert found
        return int(found[1])


@pytest.fixture
def house() -> Iterator[House]:
    node, port = free_ports(2)
    router = start("pulsing.serving.Router", "--addr", f"127.0.0.1:{node}", "--", "--http_port", str(port))
    made = House(node, port, router)
    try:
        for _ in range(3):
            made.add()
        wait_for("three workers are ready", lambda: made.ready_workers() == 3)
        yield made
    finally:
        for process in [*made.workers, router]:
            process.kill()
            process.wait()


def ask(port: int, *, stream: bool) -> str:
    """One request; what became of it: whole, broken and said so, 503, or what must not be."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "counting", "stream": stream, "messages": [{"role": "user", "content": "count"}]}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        clean = True
        try:
            text = answer.read().decode()
        except http.client.IncompleteRead as cut:
            clean, text = False, cut.partial.decode()
        if not stream:
            if answer.status == 200:
                content = json.loads(text)["choices"][0]["message"]["content"]
                return "whole" if content == WHOLE and clean else f"WRONG: {content!r}"
            return f"{answer.status}"
        if answer.status != 200:
            return f"{answer.status}"
        events = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
        done = events[-1:] == ["[DONE]"]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        said = any("error" in event for event in parsed)
        content = "".join(c["delta"].get("content") or "" for e in parsed for c in e.get("choices", ()))
        if done and clean and not said and content == WHOLE:
            return "whole"
        if said and not done and not clean and WHOLE.startswith(content):
            return "broken and said so"
        return f"WRONG: done={done} clean={clean} said={said} {content!r}"


def test_answers_are_whole_or_say_that_they_are_not(house: House) -> None:
    seed = int(os.environ.get("PULSING_CHAOS_SEED", random.randrange(1 << 32)))
    dice = random.Random(seed)
    results: Counter[str] = Counter()
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            results[("streamed " if number % 2 else "unstreamed ") + ask(house.http, stream=bool(number % 2))] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        # One worker at a time: somebody can always answer.
        victim = dice.choice(house.workers)
        deed = dice.choice(["kill", "pause", "stop"])
        if deed == "pause":
            victim.send_signal(signal.SIGSTOP)
            over.wait(dice.uniform(0.2, 1.0))
            victim.send_signal(signal.SIGCONT)
        else:
            victim.send_signal(signal.SIGKILL if deed == "kill" else signal.SIGTERM)
            victim.wait(30)
            house.workers.remove(victim)
            house.add()
            wait_for("the newcomer is ready", lambda: house.ready_workers() == 3)
        over.wait(dice.uniform(0.1, 0.5))
    over.set()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), f"seed {seed}: a client hangs"
    allowed = {"streamed whole", "streamed broken and said so", "unstreamed whole"}
    assert set(results) <= allowed, f"seed {seed}: {results}"
    assert results["streamed whole"] > 50, f"seed {seed}: {results}"
    assert results["unstreamed whole"] > 50, f"seed {seed}: {results}"
    wait_for("no place is held", lambda: house.in_flight() == 0, 5)
