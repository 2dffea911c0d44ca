"""One of the two processes of the soak: nodes on two event loops, uvloop's in the main thread and asyncio's in another.

The server's nodes hold the actors that are asked. The client's put them under load until stdin closes. Each second a
process says on stdout how much it has done, how many tasks its loops have and how many actors its nodes.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import linecache
import sys
import threading
import urllib.request
from typing import Any

import soak_load
import uvloop
from soak_target import Target, lives_on

import pulsing as pul


class Mallinfo(ctypes.Structure):
    """What glibc (2.33 and later) says of its heap, in bytes; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def heap() -> tuple[int, int]:
    """Bytes of the C heap, of Rust and of large Python objects: what lives, and what was freed and is kept to be given
    out again. Zeros where the C library cannot tell.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0, 0
    mallinfo2.restype = Mallinfo
    said = mallinfo2()
    return int(said.uordblks + said.hblkhd), int(said.fordblks)


def blocks() -> int:
    """Blocks of Python's heap, without the source lines that stay once the watchdog has shown a stack in their file:
    how often a loop stalls is the machine's doing.
    """
    return sys.getallocatedblocks() - sum(len(entry[2]) for entry in list(linecache.cache.values()) if len(entry) > 1)


class Loop:
    """One event loop with one node."""

    def __init__(self, name: str, seeds: list[str]) -> None:
        self.name = name
        self.seeds = seeds
        self.done: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.tasks = 0
        self.addr = ""
        self.started = threading.Event()
        self.stop = threading.Event()

    async def run(self, loads: list[str], kinds: list[str]) -> None:
        """Lives until `stop`.

        Args:
            loads: Names of the actors to put under load; none: a server.
            kinds: Which kinds of traffic.
        """
        system = await pul.actor_system("127.0.0.1:0", seeds=self.seeds)
        lives_on(system)
        self.addr = system.addr
        await Target.spawn(system=system, name=self.name)
        work = None
        if loads:
            targets = [await Target.resolve(name, system=system, timeout=10) for name in [*loads, self.name]]
            for name in ("client-1", "client-2"):
                # All are there before any of them has a past, which all remember.
                await Target.resolve(name, system=system, timeout=60)
            # Its own node, and one of the server's.
            for target in (targets[int(self.name[-1]) - 1], targets[-1]):
                await target.options(timeout=120.0).grow_old()
            work = soak_load.Load(system, Target, targets, self.done, self.errors, kinds)
        self.started.set()
        running = work.start() if work else []
        while not self.stop.is_set():
            self.tasks = len(asyncio.all_tasks())
            await asyncio.sleep(0.2)
        await soak_load.end(running)
        # What was abandoned at the very end is cleaned up on the other side too.
        await asyncio.sleep(1.0)
        gc.collect()
        rest = asyncio.all_tasks()
        self.tasks = len(rest)
        for task in rest:
            kind = getattr(task.get_coro(), "__qualname__", "unknown")
            self.left[kind] = self.left.get(kind, 0) + 1
        self.stop.clear()
        await asyncio.to_thread(self.stop.wait)
        await system.shutdown()

    def actors(self) -> int:
        """Actors of the node, as it tells observers."""
        with urllib.request.urlopen(f"http://{self.addr}/actors", timeout=5) as answer:
            return len(json.load(answer)["local"])


def report(loops: list[Loop], **more: Any) -> None:
    """One line for the parent."""
    sums: dict[str, dict[str, int]] = {"done": {}, "errors": {}, "left": {}}
    for loop in loops:
        for what, total in sums.items():
            for key, count in list(getattr(loop, what).items()):
                total[key] = total.get(key, 0) + count
    live, kept = heap()
    memory = {"live_kb": live / 1e3, "kept_kb": kept / 1e3, "blocks": blocks()}
    print(json.dumps({**sums, **memory, "tasks": sum(loop.tasks for loop in loops), **more}), flush=True)


def watch(loops: list[Loop]) -> None:
    """Reports each second; when stdin closes, ends the load, reports what is left, and ends the nodes."""
    for loop in loops:
        loop.started.wait(60)
    report(loops, ready=",".join(loop.addr for loop in loops), actors=sum(loop.actors() for loop in loops))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    while not over.wait(1.0):
        report(loops)
    for loop in loops:
        loop.stop.set()
    while any(loop.stop.is_set() for loop in loops):
        threading.Event().wait(0.1)
    report(loops, rest=True, actors=sum(loop.actors() for loop in loops))
    # The other process reads its own rest first: its peers are still there.
    sys.stdin.readline()
    for loop in loops:
        loop.stop.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["server", "client"], required=True)
    parser.add_argument("--seeds", default="")
    parser.add_argument("--kinds", default="")
    options = parser.parse_args()
    seeds = [seed for seed in options.seeds.split(",") if seed]
    kinds = options.kinds.split(",")
    first, second = (Loop(f"{options.role}-{number}", list(seeds)) for number in (1, 2))
    loads = [] if options.role == "server" else ["server-1", "server-2"]

    def other() -> None:
        if not seeds:
            # The first node of the cluster is the other one's seed.
            first.started.wait(60)
            second.seeds = [first.addr]
        asyncio.run(second.run(loads, kinds))

    thread = threading.Thread(target=other)
    watcher = threading.Thread(target=watch, args=([first, second],))
    thread.start()
    watcher.start()
    uvloop.run(first.run(loads, kinds))
    thread.join()
    watcher.join()


if __name__ == "__main__":
    main()
