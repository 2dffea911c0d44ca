"""A house of two Routers, several Workers and engines as processes, and clients that know both addresses."""

from __future__ import annotations

import asyncio
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
import time
from collections.abc import Callable, Iterator

from counting_worker import TASKS, WORDS

HERE = pathlib.Path(__file__).parent
WHOLE = "".join(f"{number} " for number in range(WORDS))


def wait_for(what: str, condition: Callable[[], bool], limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}"
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has and that the system gives to nobody: who listens there is to come back after its end."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            one, port = stack.enter_context(socket.socket()), random.randrange(10_240, 32_768)
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
        return found


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of what a port of this machine answers; status 0 where nobody does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""


def metric(text: str, name: str) -> int:
    """One figure in Prometheus text; -1 where it is not in it."""
    found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else -1


@dataclasses.dataclass
class Engine:
    """An engine server and the Worker that stands for it.

    Attributes:
        port: Where the server listens, whatever process it is.
        server: It.
        worker: Who published it.
    """

    port: int
    server: subprocess.Popen[bytes]
    worker: subprocess.Popen[bytes]

    def running(self) -> int:
        """Requests it is answering; -1 where it does not say."""
        status, text = get(self.port, "/health")
        return int(json.loads(text)["running"]) if status == 200 else -1


@dataclasses.dataclass
class Door:
    """One Router: a fixed place, whatever process stands there.

    Attributes:
        node: Port of its node.
        port: Where it serves HTTP.
        process: Who stands there.
        dead: When the last one ended that was killed here (`time.monotonic`); never, while it is being killed.
    """

    node: int
    port: int
    process: subprocess.Popen[bytes]
    dead: float = 0.0

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 where nobody answers."""
        return get(self.port, path)

    def ready_workers(self) -> int:
        status, text = self.get("/health")
        return int(json.loads(text)["healthy_workers"]) if status else -1

    def in_flight(self) -> int:
        return self.gauge("pulsing_router_in_flight")

    def gauge(self, name: str) -> int:
        """One figure of its metrics; -1 where nobody answers."""
        return metric(self.get("/metrics")[1], name)

    def held(self) -> dict[str, int]:
        """What requests hold here, on all Workers and of every kind; what is nothing is left out."""
        names = ("in_flight", "receiving", "queued_requests")
        held = {name: self.gauge(f"pulsing_router_{name}") for name in names}
        status, text = self.get("/v1/_routing")
        for worker in json.loads(text)["workers"] if status == 200 else [{"instance": "nobody", "in_flight": -1}]:
            held[f"leases of {worker['instance']}"] = worker["in_flight"]
        return {what: count for what, count in held.items() if count}

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def tasks(self) -> int:
        """Tasks of its native runtime; -1 where nobody answers."""
        return metric(get(self.node, "/metrics")[1], "pulsing_runtime_tasks")

    def memory(self) -> int:
        """What it has in memory, in KiB."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


class House:
    """Two Routers, `count` Workers and `engines` engines, each a process; an engine's Worker is one more."""

    def __init__(self, folder: pathlib.Path, count: int, engines: int = 0) -> None:
        self.folder = folder
        self.told = folder / "tasks"
        self.told.mkdir()
        self.everybody: list[subprocess.Popen[bytes]] = []
        ports = free_ports(4 + engines)
        self.nodes = ports[:2]
        self.doors = [Door(node, port, self._router(node, port)) for node, port in zip(ports, ports[2:4], strict=False)]
        self.workers = [self.worker() for _ in range(count)]
        self.engines = [Engine(port, self.server(port), self.engine_worker(port)) for port in ports[4:]]

    def _run(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), TASKS: str(self.told)}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, *words], env=env, stdout=log, stderr=log)
        self.everybody.append(process)
        return process

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        seeds = ",".join(f"127.0.0.1:{node}" for node in self.nodes)
        return self._run(name, "-m", "pulsing.cli", "actor", words[0], "--seeds", seeds, *words[1:])

    def _router(self, node: int, port: int) -> subprocess.Popen[bytes]:
        place = ("--addr", f"127.0.0.1:{node}", "--name", f"router{port}")
        served = ("--", "--http_port", str(port), "--debug_routing")
        return self._start(f"router{port}", "pulsing.serving.Router", *place, *served)

    def worker(self) -> subprocess.Popen[bytes]:
        """Starts one more Worker."""
        return self._start("workers", "counting_worker.CountingWorker", "--name", "worker")

    def server(self, port: int) -> subprocess.Popen[bytes]:
        """Starts the server of an engine."""
        return self._run("engines", str(HERE / "counting_engine.py"), str(port))

    def engine_worker(self, port: int) -> subprocess.Popen[bytes]:
        """Starts the Worker that stands for the engine at `port`."""
        url = f"http://127.0.0.1:{port}"
        return self._start("workers", "counting_worker.CountingEngineWorker", "--name", "worker", "--", "--url", url)

    def tasks(self, process: subprocess.Popen[bytes]) -> int:
        """Tasks of the event loop of a Worker's process."""
        file = self.told / str(process.pid)
        file.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        wait_for(f"{process.args!r} counts its tasks", file.exists)
        return int(file.read_text())

    def reopen(self, door: Door) -> None:
        """A Router in the place of one that ended."""
        door.process = self._router(door.node, door.port)

    def wait_whole(self) -> None:
        """Until every Router sees as many Workers ready as there are.

        One whose death is not known yet counts in the place of one that starts: the next deed may come a Worker early.
        """
        count = len(self.workers) + len(self.engines)
        for door in self.doors:
            try:
                wait_for(f"the Router on {door.port} sees all", lambda door=door: door.ready_workers() == count)
            except AssertionError as error:
                seen = [door.get("/health"), door.get("/v1/_routing"), get(door.node, "/cluster/members")]
                ends = [(process.pid, process.poll()) for process in [*(d.process for d in self.doors), *self.workers]]
                raise AssertionError(f"{error}; it says {seen}; processes and how they ended: {ends}") from error

    def logs(self) -> str:
        """The end of what each process said, and where all of it is."""
        ends = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log")]
        return "\n".join([*ends, f"all of it: {self.folder}"])

    def close(self) -> None:
        for process in self.everybody:
            process.kill()
            process.wait()


@contextlib.contextmanager
def house(folder: pathlib.Path, count: int, engines: int = 0) -> Iterator[House]:
    """A house in which everybody sees everybody."""
    made = House(folder, count, engines)
    try:
        made.wait_whole()
        yield made
    finally:
        made.close()


def stop(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> None:
    """Sends a signal and waits for the end it brings."""
    process.send_signal(number)
    process.wait(60)


class Client:
    """One after the other on a kept connection; where it is refused, at the other address.

    Args:
        doors: The Routers.
        stream: Whether answers are streamed.
        at: Index of the one that is asked first.
    """

    def __init__(self, doors: list[Door], *, stream: bool, at: int) -> None:
        self.doors = doors
        self.stream = stream
        self.at = at
        request = {"model": "counting", "stream": stream, "temperature": 0}
        body = json.dumps({**request, "messages": [{"role": "user", "content": "count"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-length: {len(body)}\r\n"
        self.request = f"{head}content-type: application/json\r\n\r\n".encode() + body
        self.kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        # When the connection that it had last was opened, on `time.monotonic`'s clock.
        self.opened = 0.0

    @property
    def door(self) -> Door:
        """Whom it asks."""
        return self.doors[self.at]

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.kept is not None and not self.kept[0].at_eof():
            return self.kept
        self.close()
        for _ in range(600):
            # Reset before anything was sent is as good as refused.
            self.opened = time.monotonic()
            with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
                self.kept = await asyncio.open_connection("127.0.0.1", self.door.port)
                return self.kept
            self.at = 1 - self.at
            await asyncio.sleep(0.05)
        raise AssertionError("no Router takes connections")

    async def ask(self) -> str:
        """One request; what became of it: whole, broken and said so, a status, "cut" where the connection ended without
        a word, or what must not be."""
        reader, writer = await self._connected()
        try:
            writer.write(self.request)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            status, content, clean = await self._body(reader, lines)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return "cut"
        if not clean or "connection: close" in lines:
            self.close()
        return self._judge(status, content, clean)

    async def _body(self, reader: asyncio.StreamReader, lines: list[str]) -> tuple[int, str, bool]:
        status = int(lines[0].split(" ")[1])
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        if "content-length" in headers:
            return status, (await reader.readexactly(int(headers["content-length"]))).decode(), True
        content = b""
        try:
            while size := int((await reader.readuntil(b"\r\n")), 16):
                content += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        except (OSError, asyncio.IncompleteReadError):
            return status, content.decode(), False
        return status, content.decode(), True

    def _judge(self, status: int, text: str, clean: bool) -> str:
        if status != 200:
            return f"status {status}"
        if not self.stream:
            content = json.loads(text)["choices"][0]["message"]["content"]
            return "whole" if content == WHOLE else f"WRONG: {content!r}"
        events = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
        done = events[-1:] == ["[DONE]"]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        said = any("error" in event for event in parsed)
        content = "".join(c["delta"].get("content") or "" for e in parsed for c in e.get("choices", ()))
        if done and clean and not said and content == WHOLE:
            return "whole"
        if not done and not clean and WHOLE.startswith(content):
            return "broken and said so" if said else "cut"
        return f"WRONG: done={done} clean={clean} said={said} {content!r}"

    def close(self) -> None:
        if self.kept is not None:
            self.kept[1].transport.abort()
            self.kept = None
