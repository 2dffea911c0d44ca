"""How a contestant measures: timed loops, CPU of every process that takes part, one JSON line a row.

Runs in each contestant's own environment: standard library only.
"""

import argparse
import array
import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
BIG = 10_000_000
IN_FLIGHT = 64
BURST = 1000
STREAM_ITEMS = 20_000
SMALL = b"x" * 64

Metrics = dict[str, Any]
now = time.perf_counter_ns


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command's name."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def cpu_of(pid: int) -> float:
    """User and system seconds of a process, its reaped children left out."""
    with contextlib.suppress(OSError):
        fields = stat(pid)
        return (int(fields[11]) + int(fields[12])) / TICK
    return 0.0


def ran(pid: int) -> float:
    """Seconds on a core of the threads that a process has: to the nanosecond, where `cpu_of` counts ticks of 10 ms."""
    total = 0
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(thread.read_text().split()[0])
    return total / 1e9


def rss_of(pid: int) -> float:
    """Resident memory in MB (10^6 bytes)."""
    with contextlib.suppress(OSError):
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def family(root: int) -> list[int]:
    """`root` and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents.setdefault(int(stat(int(entry.name))[1]), []).append(int(entry.name))
    found, rest = [], [root]
    while rest:
        pid = rest.pop()
        found.append(pid)
        rest.extend(parents.get(pid, []))
    return found


@contextlib.contextmanager
def pinned(places: Mapping[int, set[int]]) -> Iterator[None]:
    """Processes with all their threads on these cores, by their ids; then everywhere again.

    Left alone, the kernel puts two processes that talk in turns on one core or on a core each, whatever was first, and
    a message between cores of a virtual machine costs several times one within a core.
    """
    free = os.sched_getaffinity(0)

    def place(pid: int, cores: set[int]) -> None:
        for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)

    try:
        for pid, cores in places.items():
            place(pid, cores)
        yield
    finally:
        for pid in places:
            place(pid, free)


class Meter:
    """Times what one contestant does.

    Args:
        seconds: Length of one measurement.
        pids: Processes that take part beside this one; None: all that descend from this one.
    """

    def __init__(self, seconds: float, pids: Iterable[int] | None = ()) -> None:
        self.seconds = seconds
        self._pids = None if pids is None else list(pids)

    def cpu(self) -> float:
        """CPU seconds so far, of all processes that take part."""
        mine = time.process_time()
        others = [pid for pid in family(os.getpid()) if pid != os.getpid()] if self._pids is None else self._pids
        return mine + sum(cpu_of(pid) for pid in others)

    def result(self, count: int, elapsed_ns: int, cpu: float, laps: "array.array[int] | None" = None) -> Metrics:
        """Rate, CPU per operation, and percentiles where each operation was timed."""
        metrics: Metrics = {"count": count, "rate": count / elapsed_ns * 1e9, "cpu_us": cpu / count * 1e6}
        if laps:
            ordered = sorted(laps)
            metrics["p50_us"] = ordered[len(ordered) // 2] / 1e3
            metrics["p99_us"] = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1e3
        return metrics

    async def sequential(self, call: Callable[[], Awaitable[Any]]) -> Metrics:
        """One call after the other, each timed."""
        end = now() + int(self.seconds * 2e8)
        while now() < end:
            await call()
        laps = array.array("q")
        cpu, begin = self.cpu(), now()
        end, after = begin + int(self.seconds * 1e9), begin
        while after < end:
            before = now()
            await call()
            after = now()
            laps.append(after - before)
        return self.result(len(laps), after - begin, self.cpu() - cpu, laps)

    def blocking(self, call: Callable[[], Any]) -> Metrics:
        """`sequential` for calls that block."""
        end = now() + int(self.seconds * 2e8)
        while now() < end:
            call()
        laps = array.array("q")
        cpu, begin = self.cpu(), now()
        end, after = begin + int(self.seconds * 1e9), begin
        while after < end:
            before = now()
            call()
            after = now()
            laps.append(after - before)
        return self.result(len(laps), after - begin, self.cpu() - cpu, laps)

    async def sequential_on(self, cores: int, call: Callable[[], Awaitable[Any]]) -> Metrics:
        """`sequential` with both processes on one core, or on a core each."""
        first, *rest = sorted(os.sched_getaffinity(0))
        other = rest[0] if cores == 2 else first
        with pinned({os.getpid(): {first}, **{pid: {other} for pid in self._pids or ()}}):
            return await self.sequential(call)

    async def in_flight(self, call: Callable[[], Awaitable[Any]], tasks: int = IN_FLIGHT) -> Metrics:
        """`tasks` callers side by side, each with one call under way."""

        async def caller(end: int) -> int:
            count = 0
            while now() < end:
                await call()
                count += 1
            return count

        await asyncio.gather(*(caller(now() + int(self.seconds * 2e8)) for _ in range(tasks)))
        cpu, begin = self.cpu(), now()
        end = begin + int(self.seconds * 1e9)
        counts = await asyncio.gather(*(caller(end) for _ in range(tasks)))
        return self.result(sum(counts), now() - begin, self.cpu() - cpu)

    async def burst(self, call: Callable[[], Coroutine[Any, Any, Any]], size: int = BURST) -> Metrics:
        """`size` calls at once, again and again; how many of them failed, and how."""
        failures: dict[str, int] = {}
        rounds, begin, cpu = 0, now(), self.cpu()
        while rounds < 2 or now() - begin < self.seconds * 1e9:
            answers = await asyncio.gather(*(call() for _ in range(size)), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    text = f"{type(answer).__name__}: {answer}"[:120]
                    failures[text] = failures.get(text, 0) + 1
            rounds += 1
        took, spent, failed = now() - begin, self.cpu() - cpu, sum(failures.values())
        worst = max(failures, key=lambda text: failures[text], default="")
        if failed == rounds * size:
            return {"failed": failed, "error": f"all {failed} calls failed, most with {worst}"}
        # Only answers count: failing is quick.
        metrics = self.result(rounds * size - failed, took, spent)
        metrics |= {"ms_a_burst": took / rounds / 1e6, "failed": failed}
        if failures:
            metrics["note"] = f"{failed} of {rounds * size} calls failed, most with {worst}"
        return metrics

    async def items(self, stream: Callable[[int], Any]) -> Metrics:
        """Streams of `STREAM_ITEMS` items, one after the other."""
        async for _ in stream(STREAM_ITEMS // 10):
            pass
        count, cpu, begin = 0, self.cpu(), now()
        while now() - begin < self.seconds * 1e9:
            got = 0
            async for _ in stream(STREAM_ITEMS):
                got += 1
                # A slow contestant need not reach the end of its stream.
                if got % 100 == 0 and now() - begin > self.seconds * 3e9:
                    break
            count += got
        return self.result(count, now() - begin, self.cpu() - cpu)

    async def spawns(self, spawn: Callable[[], Awaitable[Any]]) -> Metrics:
        """Actors started one after the other; they stay."""
        await spawn()
        count, cpu, begin = 0, self.cpu(), now()
        while now() - begin < self.seconds * 1e9:
            await spawn()
            count += 1
        return self.result(count, now() - begin, self.cpu() - cpu)

    async def crowd(
        self, spawn: Callable[[], Awaitable[Any]], ask: Callable[[Any], Awaitable[Any]], size: int, limit: float
    ) -> Metrics:
        """Memory of `size` actors (of fewer when `limit` seconds have passed), and whether all answer."""
        before, begin = rss_of(os.getpid()), now()
        actors = []
        while len(actors) < size and now() - begin < limit * 1e9:
            actors.append(await spawn())
        took = (now() - begin) / 1e9
        grown = rss_of(os.getpid()) - before
        answered = 0
        for first in range(0, len(actors), 200):
            answers = await asyncio.gather(*(ask(actor) for actor in actors[first : first + 200]))
            answered += sum(answer == SMALL for answer in answers)
        made = len(actors)
        return {
            "count": made,
            "bytes_each": grown * 1e6 / made,
            "rate": made / took,
            "answered": answered,
            "note": f"{made} actors, {answered} answered",
        }

    async def idle(self) -> Metrics:
        """Memory and CPU of all processes that take part while nothing happens."""
        await asyncio.sleep(min(2.0, self.seconds * 2))
        pids = family(os.getpid())
        cpu, begin = sum(map(ran, pids)), now()
        await asyncio.sleep(max(2.0, self.seconds * 3))
        share = (sum(map(ran, pids)) - cpu) / (now() - begin) * 1e9
        return {"rss_mb": sum(map(rss_of, pids)), "processes": len(pids), "cpu_percent": share * 100}


class Child:
    """A second process of a contestant; it ends when this one does, as its stdin closes."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=None if env is None else {**os.environ, **env},
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline().split()
        if line[:1] != ["ready"]:
            raise SystemExit(f"{' '.join(words)} did not start")
        self.addr = line[1] if len(line) > 1 else ""
        self.pid = self.popen.pid

    def stop(self) -> None:
        """Ends it, by force if it must be."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


def ready(addr: str = "") -> None:
    """What a `Child` says once it serves."""
    print("ready", addr, flush=True)


async def until_stdin_closes() -> None:
    """Waits for the parent's end."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def options(**extra: Any) -> argparse.Namespace:
    """The command line that every contestant takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--loop", default="uvloop", choices=["uvloop", "asyncio"])
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--crowd_seconds", type=float, default=5.0, help="longest time for starting the crowd")
    for name, default in extra.items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    return parser.parse_args()


def run(main: Coroutine[Any, Any, None], loop: str) -> None:
    """`asyncio.run` on the chosen loop."""
    if loop == "uvloop":
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


def tell(row: str, metrics: Metrics) -> None:
    """Reports one row to the harness."""
    print(json.dumps({"row": row, **metrics}), flush=True)


async def measure(wanted: str, rows: dict[str, Callable[[], Awaitable[Metrics]]], limit: float) -> None:
    """Runs the wanted rows in the contestant's order; a row that fails says why, and the next one runs."""
    for row in [row for row in rows if row in wanted.split(",")]:
        try:
            metrics = await asyncio.wait_for(rows[row](), limit)
        except TimeoutError:
            metrics = {"error": f"nothing within {limit:.0f} s"}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what happened in this row
            metrics = {"error": f"{type(error).__name__}: {error}"[:300]}
        tell(row, metrics)
