"""Finds processes of a fleet by what they inherited - never by name.

That is the mark in their environment, and the cell's log as their stdout or stderr: a process that renames itself may
have written over its environment, as vLLM's engine processes do.
"""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Collection, Mapping
from typing import Any

MARK = "PULSING_FLEET_CELL"


def mark(run: str, cell: str, generation: int) -> str:
    """What the environment of a cell's processes carries."""
    return f"{run}:{cell}:{generation}"


def logs_of(snapshot: Mapping[str, Any]) -> set[str]:
    """The logs that the processes of a fleet's snapshot write to."""
    return {log for cell in snapshot.get("cells", ()) for log in cell.get("logs", {}).values()}


def find(prefix: str, logs: Collection[str] = ()) -> list[int]:
    """Pids of this user's processes that belong to it. Linux only: elsewhere there are none to be seen.

    Args:
        prefix: begin of the mark; a run's id and a colon mean the whole run.
        logs: paths of the logs of its cells.
    """
    return sorted(
        int(process.name) for process in pathlib.Path("/proc").glob("[0-9]*") if _belongs(process, prefix, logs)
    )


def kill(prefix: str, logs: Collection[str] = (), within: float = 5.0) -> list[int]:
    """Kills them until none is left; gives the pids that were met.

    Args:
        prefix: begin of the mark; a run's id and a colon mean the whole run.
        logs: paths of the logs of its cells.
        within: seconds before giving up on processes that do not die.
    """
    met: set[int] = set()
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        alive = find(prefix, logs)
        if not alive:
            break
        for pid in alive:
            met.add(pid)
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    # The pid may belong to somebody else since it was found; behind the handle it cannot change.
                    if _belongs(pathlib.Path(f"/proc/{pid}"), prefix, logs):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        time.sleep(0.02)
    return sorted(met)


def _belongs(process: pathlib.Path, prefix: str, logs: Collection[str]) -> bool:
    wanted = f"{MARK}={prefix}".encode()
    with contextlib.suppress(OSError):
        if any(entry.startswith(wanted) for entry in (process / "environ").read_bytes().split(b"\0")):
            return True
        return any(os.readlink(process / "fd" / fd) in logs for fd in ("1", "2")) if logs else False
    return False
