"""Finds processes of a fleet by the mark in their environment - never by name."""

import contextlib
import os
import pathlib
import signal
import time

MARK = "PULSING_FLEET_CELL"


def mark(run: str, cell: str, generation: int) -> str:
    """What the environment of a cell's processes carries."""
    return f"{run}:{cell}:{generation}"


def find(prefix: str) -> list[int]:
    """Pids of this user's processes whose mark begins so. Linux only: elsewhere there are none to be seen."""
    wanted = f"{MARK}={prefix}".encode()
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes()
            if any(entry.startswith(wanted) for entry in environ.split(b"\0")):
                found.append(int(process.name))
    return sorted(found)


def kill(prefix: str, within: float = 5.0) -> list[int]:
    """Kills them until none is left; gives the pids that were met.

    Args:
        prefix: begin of the mark; a run's id and a colon mean the whole run.
        within: seconds before giving up on processes that do not die.
    """
    met: set[int] = set()
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        alive = find(prefix)
        if not alive:
            break
        for pid in alive:
            met.add(pid)
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    # The pid may belong to somebody else since it was found; behind the handle it cannot change.
                    if pid in find_one(prefix, pid):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        time.sleep(0.02)
    return sorted(met)


def find_one(prefix: str, pid: int) -> list[int]:
    """`[pid]` if that process still carries the mark."""
    wanted = f"{MARK}={prefix}".encode()
    with contextlib.suppress(OSError):
        environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        if any(entry.startswith(wanted) for entry in environ.split(b"\0")):
            return [pid]
    return []
