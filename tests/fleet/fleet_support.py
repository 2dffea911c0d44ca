"""Fleets of small scripted engines, run by the real launcher as a process."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).parent
ENGINE = str(HERE / "scripted_engine.py")


def until(condition: Callable[[], Any], what: str, within: float = 40.0) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {within:g} s: {what}")


def alive(pid: int) -> bool:
    """Whether the process lives; a zombie does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Fleet:
    """One fleet file, and `pulsing fleet` on it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.file = directory / "fleet.yaml"
        self.state = directory / "state"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.said = directory / "up.txt"

    def write(self, *commands: dict[str, Any], **top: Any) -> None:
        """Writes the file; JSON is YAML. Waits are short unless said otherwise."""
        short = {"restart": {"backoff": 0.05, "jitter": 0.0}, "stop": {"drain": 5.0, "term": 5.0}}
        self.file.write_text(json.dumps({"fleet": "test", **short, **top, "commands": list(commands)}))

    def run(self, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`pulsing fleet COMMAND FILE ...` until it ends."""
        words = [*self.words(argv[0]), *argv[1:]]
        return subprocess.run(words, capture_output=True, text=True, timeout=40, check=False, env=self.env(env))

    def up(self, *flags: str, env: dict[str, str] | None = None) -> None:
        """Starts `pulsing fleet up` and goes on."""
        with self.said.open("ab") as said:
            self.launcher = subprocess.Popen([*self.words("up"), *flags], stdout=said, stderr=said, env=self.env(env))

    def words(self, command: str) -> list[str]:
        return [sys.executable, "-m", "pulsing.cli", "fleet", command, str(self.file)]

    def env(self, more: dict[str, str] | None) -> dict[str, str]:
        return {**os.environ, "PULSING_FLEET_DIR": str(self.state), **(more or {})}

    def cell(self, name: str, fleet: str = "test") -> dict[str, Any]:
        """The cell in the last snapshot; {} before there is one."""
        try:
            snapshot = json.loads((self.state / fleet / "state.json").read_text())
        except OSError:
            return {}
        return next((cell for cell in snapshot["cells"] if cell["name"] == name), {})

    def wait(
        self, name: str, state: str = "ready", generation: int = 1, joined: bool | None = None, fleet: str = "test"
    ) -> dict[str, Any]:
        """The cell, once it is in that state."""

        def there() -> dict[str, Any] | None:
            cell = self.cell(name, fleet)
            fits = cell.get("state") == state and cell["generation"] >= generation
            return cell if fits and (joined is None or cell["joined"] == joined) else None

        try:
            found: dict[str, Any] = until(there, f"{name} {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.cell(name, fleet)}\n{self.said.read_text()}") from None
        return found

    def processes(self, fleet: str = "test") -> list[int]:
        """All living processes of this fleet's cells, by the mark in their environment."""
        snapshot = json.loads((self.state / fleet / "state.json").read_text())
        mark = f"PULSING_FLEET_CELL={snapshot['run']}:".encode()
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if any(entry.startswith(mark) for entry in (process / "environ").read_bytes().split(b"\0")):
                    found.append(int(process.name))
            except OSError:
                continue
        return [pid for pid in found if alive(pid)]

    def log(self, cell: str, who: str = "0") -> str:
        """What a worker of the cell's last start wrote."""
        return pathlib.Path(self.cell(cell)["logs"][who]).read_text()

    def close(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            for _ in range(2):
                self.launcher.send_signal(signal.SIGTERM)
            self.launcher.wait(20)


def engine(*switches: str, name: str = "chat", cells: int = 1, workers: int = 1, **more: Any) -> dict[str, Any]:
    """A command section that runs the scripted engine."""
    return {
        "name": name,
        "run": ["python3", ENGINE, "--port", "${port.primary}", *switches],
        "ports": [{"name": "primary", "static_port": 8000, "allow_dynamic": True}],
        "scheduling": {"num_cells": cells, "num_workers_per_cell": workers},
        "ready": {"every": 0.05},
        **more,
    }


def joining(events: pathlib.Path) -> dict[str, Any]:
    """A join section whose command writes down when it comes and when it is told to leave."""
    stand_in = str(HERE / "scripted_join.py")
    return {"seeds": "127.0.0.1:1", "command": ["python3", stand_in, str(events), "${seeds}", "${name}", "${url}"]}


def port_of(cell: dict[str, Any]) -> int:
    """The port of worker 0."""
    match = re.search(r"\d+$", cell["addrs"]["0"]["primary"])
    assert match is not None
    return int(match.group())
