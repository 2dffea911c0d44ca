"""Parent of one cell's processes. Runs as a program of its own and outlives nobody.

The launcher holds a pipe to it. When the pipe ends, however the launcher ended, the guardian ends the cell and then
itself. It is a subreaper, so processes that left their group or lost their parent are still its children. Standard
library only, and started with -I -S: a cell's guardian must cost next to nothing.

Reads JSON lines on stdin:
    {"op": "start", "id": "0", "argv": [...], "env": {...}, "log": PATH, "cwd": PATH or null, "join": bool,
     "crash_term": SECONDS}
    {"op": "stop", "drain": SECONDS, "term": SECONDS}
Writes JSON lines on stdout: {"event": "started"|"refused"|"exit"|"gone", ...}; "gone" comes when no process is left.
The exit of a join process is reported; the exit of any other ends the cell.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# After the launcher is gone: SIGTERM, then this many seconds, then SIGKILL.
ORPHANED_GRACE = 1.5
# After a worker died by itself the others of its cell have this long, or what the order says.
CRASH_TERM = 5.0


def _prctl() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return ctypes.CDLL(None, use_errno=True).prctl


class Guardian:
    def __init__(self) -> None:
        self.prctl = _prctl()
        if self.prctl is not None:
            self.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.pid = os.getpid()
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.joins: dict[int, subprocess.Popen[bytes]] = {}
        self.ids: dict[int, str] = {}
        # Orphans that were told to end.
        self.told: set[int] = set()
        # None: running. Else the phase of the stop - leave, term, kill - with its deadline.
        self.phase: str | None = None
        self.deadline = 0.0
        self.term = 0.0
        self.crash_term = CRASH_TERM
        self.launcher_gone = False
        self.buffer = b""

    def say(self, **event: object) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(event).encode() + b"\n")

    def start(self, order: dict[str, Any]) -> None:
        if self.phase is not None:
            self.say(event="refused", id=order["id"], error="the cell is being stopped")
            return
        self.crash_term = order["crash_term"]
        prctl, pid = self.prctl, self.pid

        def bind() -> None:
            # Even if this guardian is killed with -9, the main process of each worker goes with it.
            if prctl is not None:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != pid:
                os._exit(127)
            # Ignored signals would be inherited.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

        try:
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        except OSError as error:
            self.say(event="refused", id=order["id"], error="log {}: {}".format(order["log"], error.strerror))
            self.stop(0.0, self.crash_term)
            return
        try:
            child = subprocess.Popen(
                order["argv"],
                env=order["env"],
                cwd=order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=bind,  # noqa: PLW1509 - there is one thread here
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.say(event="refused", id=order["id"], error="{}: {}".format(order["argv"][0], error))
            if not order["join"]:
                self.stop(0.0, self.crash_term)
            return
        finally:
            os.close(log)
        (self.joins if order["join"] else self.workers)[child.pid] = child
        self.ids[child.pid] = order["id"]
        self.say(event="started", id=order["id"], pid=child.pid)

    def stop(self, drain: float, term: float) -> None:
        """Leave the cluster, then SIGTERM, then SIGKILL. A later call may only shorten."""
        now = time.monotonic()
        if self.phase is None:
            self.term = term
            self.phase, self.deadline = "leave", now + drain
            self.signal(self.joins, signal.SIGTERM)
        else:
            self.term = min(self.term, term)
            limit = drain if self.phase == "leave" else term
            self.deadline = min(self.deadline, now + limit)

    def signal(self, children: Iterable[int], number: int) -> None:
        for pid in list(children):
            with contextlib.suppress(OSError):
                os.killpg(pid, number)

    def children(self) -> dict[int, list[int]]:
        """Pids of living processes by their parent's."""
        parents: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    with open(f"/proc/{name}/stat", "rb") as file:
                        fields = file.read().rpartition(b")")[2].split()
                    if fields[0] != b"Z":
                        parents.setdefault(int(fields[1]), []).append(int(name))
        return parents

    def descendants(self) -> list[int]:
        """Pids of all living processes below this one."""
        if self.prctl is None:
            return [*self.workers, *self.joins]
        parents = self.children()
        found, todo = [], [self.pid]
        while todo:
            below = parents.get(todo.pop(), [])
            found += below
            todo += below
        return found

    def tell_orphans(self) -> None:
        """SIGTERM for what main processes left behind; a living main process tells its own children."""
        if self.prctl is None:
            return
        for pid in self.children().get(self.pid, []):
            if pid not in self.workers and pid not in self.joins and pid not in self.told:
                self.told.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)

    def reap(self) -> bool:
        """Takes in what ended; false when there are no children at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            code = os.waitstatus_to_exitcode(status)
            child = self.joins.get(pid) or self.workers.get(pid)
            if child is not None:
                # Popen must not wait for a pid that may belong to another child by then.
                child.returncode = code
            if pid in self.joins:
                del self.joins[pid]
                # What it left behind must not stay in the cluster.
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                self.say(event="exit", id=self.ids.pop(pid), code=code, join=True, commanded=self.phase is not None)
            elif pid in self.workers:
                del self.workers[pid]
                commanded = self.phase in ("term", "kill")
                self.say(event="exit", id=self.ids.pop(pid), code=code, join=False, commanded=commanded)
                if self.phase is None:
                    # An engine that lost a part serves nobody: no time to drain, only to leave.
                    self.crash()

    def crash(self) -> None:
        self.stop(CRASH_TERM, self.crash_term)
        self.signal(self.workers, signal.SIGTERM)

    def advance(self) -> bool:
        """Moves the stop on; true when nothing is left."""
        now = time.monotonic()
        if self.phase == "leave" and (not self.joins or now >= self.deadline):
            self.signal(self.joins, signal.SIGKILL)
            self.phase, self.deadline = "term", now + self.term
            self.signal(self.workers, signal.SIGTERM)
        if self.phase == "term":
            self.tell_orphans()
            if not self.workers:
                self.deadline = min(self.deadline, now + self.crash_term)
        if self.phase == "term" and now >= self.deadline:
            self.phase, self.deadline = "kill", now
        if self.phase == "kill":
            self.signal(self.workers, signal.SIGKILL)
            for pid in self.descendants():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        return self.phase is not None and not self.reap() and not self.workers and not self.joins

    def read(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self.launcher_gone = True
            self.stop(0.0, ORPHANED_GRACE)
            return
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            order = json.loads(line)
            if order["op"] == "start":
                self.start(order)
            else:
                self.stop(order["drain"], order["term"])

    def run(self) -> None:
        wake, woken = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        # Ctrl-C and the closing terminal are the launcher's business; SIGTERM to a guardian ends its cell in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self.stop(CRASH_TERM, self.crash_term))
        while True:
            if self.phase is None:
                wait = None
            elif self.phase == "kill":
                wait = 0.02
            else:
                wait = max(0.0, min(self.deadline - time.monotonic(), 0.5))
            watched = [wake] if self.launcher_gone else [wake, 0]
            ready, _, _ = select.select(watched, [], [], wait)
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(wake, 4096):
                        pass
            if 0 in ready:
                self.read()
            self.reap()
            if self.phase is not None and self.advance():
                self.say(event="gone")
                return


if __name__ == "__main__":
    Guardian().run()
