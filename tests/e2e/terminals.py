"""Runs README commands as a user would: through bash, one process a terminal."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.executable).parent
# Loading a model on a busy machine with two cores takes a while; a hang must still end before CI's own limit.
READY_LIMIT = 240.0
STOP_LIMIT = 60.0
TUTORIAL_PORTS = (8000, 8001, 8002, 8003, 8080, 9001)


def wait_for(what: str, condition: Callable[[], Any], limit: float = READY_LIMIT) -> Any:
    """Polls until `condition` gives something true; fails with `what` when it does not within `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {limit:.0f} s: {what}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def get_json(url: str) -> tuple[int, Any]:
    """(status, body), or (0, None) when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except OSError:
        return 0, None


class Readme:
    """Fenced code of a README, by language, and by the mark `<!-- e2e: MARK -->` above it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.blocks: list[tuple[str, str, str]] = [
            (mark or "", language, body)
            for mark, language, body in re.findall(
                r"(?:<!-- e2e: ([^>]+) -->\n)?```(\w+)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL
            )
        ]

    def lines(self, pattern: str, mark: str = "") -> list[str]:
        """Lines of bash blocks with this mark that match `pattern`."""
        return [
            line
            for found, language, body in self.blocks
            if language == "bash" and found == mark
            for line in body.splitlines()
            if re.search(pattern, line)
        ]

    def code(self, language: str, containing: str) -> str:
        (body,) = [body for _, found, body in self.blocks if found == language and containing in body]
        return body


class Shell:
    """Terminals of one tutorial run. README ports are replaced by free ones, `$MODEL` comes from the environment."""

    def __init__(self, logs: pathlib.Path, model: pathlib.Path) -> None:
        self.logs = logs
        self.ports = dict(zip(TUTORIAL_PORTS, free_ports(len(TUTORIAL_PORTS)), strict=True))
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PULSING_")},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "MODEL": str(model),
            # A hub is neither needed nor there.
            "HF_HUB_OFFLINE": "1",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, text: str) -> str:
        """`text` with this run's ports."""
        return re.sub(
            rf"\b({'|'.join(map(str, TUTORIAL_PORTS))})\b", lambda found: str(self.ports[int(found[0])]), text
        )

    @property
    def api(self) -> str:
        return f"http://localhost:{self.ports[8080]}"

    def start(self, label: str, line: str) -> subprocess.Popen[bytes]:
        """Runs a command that stays."""
        with (self.logs / f"{label}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(line)}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.logs,
            )
        self.processes[label] = process
        return process

    def run(self, line: str, limit: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a command that ends."""
        return subprocess.run(
            ["bash", "-c", self.here(line)],
            capture_output=True,
            text=True,
            env=self.env,
            cwd=self.logs,
            timeout=limit,
            check=False,
        )

    def states(self) -> list[str]:
        """States of all Workers, as the node on README port 8000 knows them."""
        status, body = get_json(f"http://127.0.0.1:{self.ports[8000]}/actors")
        if status != 200:
            return []
        return [row["metadata"]["state"] for row in body["cluster"] if row["metadata"].get("kind") == "worker"]

    def wait_ready(self, count: int) -> None:
        """Until this many Workers are ready; a process that ends instead fails the test with its log."""

        def ready() -> bool:
            for label, process in self.processes.items():
                if process.poll() is not None:
                    pytest.fail(f"{label} ended with {process.returncode}:\n{self.log(label)}")
            states = self.states()
            if "failed" in states:
                pytest.fail("a worker failed to load its model:\n" + self.all_logs())
            return states.count("ready") == count and get_json(f"{self.api}/ready")[0] == 200

        wait_for(f"{count} ready workers", ready)

    def kill(self, label: str) -> None:
        process = self.processes.pop(label)
        process.kill()
        process.wait(STOP_LIMIT)

    def log(self, label: str) -> str:
        return (self.logs / f"{label}.log").read_text(errors="replace")[-4000:]

    def all_logs(self) -> str:
        return "\n".join(f"--- {label}\n{self.log(label)}" for label in self.processes)

    def stop(self) -> dict[str, int]:
        """SIGTERM to all at once; exit codes. One that does not end is killed and has a negative code."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_LIMIT
        codes = {}
        for label, process in self.processes.items():
            try:
                codes[label] = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                codes[label] = process.wait()
        self.processes.clear()
        return codes
