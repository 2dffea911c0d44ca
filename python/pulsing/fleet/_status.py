"""What is known about a cell, and its file: readers see whole snapshots, or none."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import time
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["pending", "starting", "ready", "backoff", "stopping", "stopped", "failed"]


@dataclass
class CellStatus:
    """One cell. `since` is seconds since 1970.

    `joined` is None for cells that join nothing, and True as long as the cluster shows the cell as a ready worker.
    `last_words` are the last lines in the log of what `reason` speaks of.
    """

    name: str
    state: State = "pending"
    generation: int = 0
    restarts: int = 0
    reason: str = ""
    last_words: list[str] = field(default_factory=list)
    since: float = field(default_factory=time.time)
    joined: bool | None = None
    pids: dict[str, int] = field(default_factory=dict)
    addrs: dict[str, dict[str, str]] = field(default_factory=dict)
    argv: dict[str, list[str]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)


def state_root() -> pathlib.Path:
    """`$PULSING_FLEET_DIR`, else `pulsing/fleet` in the user's state directory."""
    chosen = os.environ.get("PULSING_FLEET_DIR")
    if chosen:
        return pathlib.Path(chosen)
    home = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    return pathlib.Path(home) / "pulsing" / "fleet"


class FleetDir:
    """The directory of one fleet: a lock that its launcher holds, a snapshot of its cells, its logs."""

    def __init__(self, name: str, root: pathlib.Path | None = None) -> None:
        self.path = (root if root is not None else state_root()) / name
        self._lock: int | None = None

    def acquire(self) -> dict[str, Any] | None:
        """Becomes the fleet's launcher; gives the snapshot an earlier one left.

        Raises:
            BlockingIOError: another launcher runs this fleet.
            OSError: the directory cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # `running` of another process holds the lock for an instant.
        for last in (False, False, False, True):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if last:
                    os.close(lock)
                    raise
                time.sleep(0.02)
        self._lock = lock
        return self.read()

    def release(self) -> None:
        """Ends the launcher's claim."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def running(self) -> bool:
        """Whether a launcher holds the fleet."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def write(self, snapshot: dict[str, Any]) -> None:
        """Replaces the snapshot."""
        partial = self.path / f"state.json.{os.getpid()}"
        partial.write_text(json.dumps(snapshot))
        partial.replace(self.path / "state.json")

    def read(self) -> dict[str, Any] | None:
        """The last snapshot."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.path / "state.json").read_text())
            if isinstance(found, dict):
                return found
        return None


def new_run_id(name: str) -> str:
    """Tells this run of the fleet from all others."""
    return hashlib.sha256(f"{name} {os.getpid()} {time.time_ns()}".encode() + os.urandom(8)).hexdigest()[:16]


def as_json(status: CellStatus) -> dict[str, Any]:
    """For the snapshot."""
    return dataclasses.asdict(status)
