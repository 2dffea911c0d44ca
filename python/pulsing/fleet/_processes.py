"""The processes of one start of a cell, as the launcher sees them."""

import asyncio
import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pulsing.fleet import _leftovers

_GUARDIAN = pathlib.Path(__file__).with_name("_guardian.py")


@dataclass(frozen=True)
class Order:
    """One process to start. `log` is a path; stdout and stderr both go there."""

    id: str
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    join: bool = False
    cwd: str | None = None


@dataclass(frozen=True)
class Ending:
    """Why a cell's processes ended: the first of them that did, in words, and its order's id if it was one."""

    reason: str
    first: str | None = None


class CellProcesses(Protocol):
    """What a backend gives the launcher for one start of a cell."""

    async def start(self, orders: Sequence[Order]) -> dict[str, int]:
        """Starts the workers; gives their pids by order id. Raises RuntimeError when one does not start."""
        ...

    async def start_join(self, order: Order) -> None:
        """Starts the join process. Raises RuntimeError when it does not start."""
        ...

    async def join_ended(self) -> int:
        """Waits for the join process to end by itself; gives its exit code."""
        ...

    async def gone(self) -> Ending:
        """Waits until no process of this start is left."""
        ...

    async def stop(self, drain: float, term: float) -> None:
        """Leaves, stops, and waits until nothing is left. A second call may only shorten."""
        ...


def words_of_exit(who: str, code: int) -> str:
    """An exit code in words; negative codes are signals."""
    if code >= 0:
        return f"{who} exited with {code}"
    import signal

    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{who} was killed by {name}"


class GuardedCell:
    """Processes below a guardian on this machine."""

    def __init__(self, mark: str, crash_term: float = 5.0) -> None:
        """
        Args:
            mark: what the processes' environment carries.
            crash_term: after a crash, seconds between SIGTERM and SIGKILL for what is left of the cell.
        """
        self._mark = mark
        self._crash_term = crash_term
        self._process: asyncio.subprocess.Process | None = None
        self._logs: set[str] = set()
        self._started: dict[str, asyncio.Future[int]] = {}
        self._join_exits: asyncio.Queue[int] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._first: str | None = None
        self._first_id: str | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, orders: Sequence[Order]) -> dict[str, int]:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(_GUARDIAN),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The guardian must not die of Ctrl-C in the launcher's terminal before it has ended its cell.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(), name="fleet-guardian")
        started = [self._order(order) for order in orders]
        try:
            pids = await asyncio.gather(*started)
        except RuntimeError:
            for future in started:
                future.cancel()
            await self._gone.wait()
            raise
        return {order.id: pid for order, pid in zip(orders, pids, strict=True)}

    async def start_join(self, order: Order) -> None:
        await self._order(order)

    async def join_ended(self) -> int:
        return await self._join_exits.get()

    async def gone(self) -> Ending:
        await self._gone.wait()
        return Ending(self._first or "all its processes ended", self._first_id)

    async def stop(self, drain: float, term: float) -> None:
        self._send({"op": "stop", "drain": drain, "term": term})
        await self._gone.wait()

    def _order(self, order: Order) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._gone.is_set():
            future.set_exception(RuntimeError("the cell is gone"))
            return future
        self._started[order.id] = future
        self._logs.add(order.log)
        self._send(
            {
                "op": "start",
                "id": order.id,
                "argv": list(order.argv),
                "env": order.env,
                "log": order.log,
                "cwd": order.cwd,
                "join": order.join,
                "crash_term": self._crash_term,
            }
        )
        return future

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None or self._gone.is_set():
            return
        with contextlib.suppress(OSError, RuntimeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        orderly = False
        while line := await self._process.stdout.readline():
            event = json.loads(line)
            orderly = orderly or event["event"] == "gone"
            self._take(event)
        await self._process.wait()
        if not orderly:
            # The guardian itself was killed: its direct children died with it, the rest is found by its mark.
            self._first = self._first or "its guardian was killed"
            await asyncio.to_thread(_leftovers.kill, self._mark, self._logs)
        self._gone.set()
        for future in self._started.values():
            if not future.done():
                future.set_exception(RuntimeError(self._first or "the cell is gone"))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            future = self._started.pop(event["id"])
            if not future.done():
                future.set_result(event["pid"])
        elif kind == "refused":
            future = self._started.pop(event["id"])
            self._first = self._first or f"did not start: {event['error']}"
            if not future.done():
                future.set_exception(RuntimeError(f"did not start: {event['error']}"))
        elif kind == "exit" and event["join"]:
            if event["commanded"]:
                return
            self._join_exits.put_nowait(event["code"])
        elif kind == "exit" and not event["commanded"] and self._first is None:
            self._first, self._first_id = words_of_exit(f"worker {event['id']}", event["code"]), event["id"]
