"""Nodes are killed, leave, restart and stop for a while under calls: calls end, and what is left is whole (R1, M4).

`PULSING_CHAOS_SEED` repeats a run; `PULSING_CHAOS_SECONDS` makes it longer (`make chaos`: five minutes).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

import pulsing as pul
from fleet import Fleet, Node

SECONDS = float(os.environ.get("PULSING_CHAOS_SECONDS", "20"))
NODES = 6
CALLERS = 4
TASKS = 6
TIMEOUT = 5.0
# Past its deadline an end may be late by what a busy machine makes a loop wait.
SLACK = 10.0
# Once a node's victims are back, the longest wait for those who took it for dead is until they greet it again.
SETTLED = 90.0


class Callers:
    """Systems of this process that call the fleet's actors by name, again and again."""

    def __init__(self, names: list[str], dice: random.Random) -> None:
        self.names = names
        self.dice = dice
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.over = False
        self.systems: list[pul.ActorSystem] = []

    async def start(self, seeds: list[str]) -> None:
        self.systems = [await pul.actor_system("127.0.0.1:0", seeds=seeds) for _ in range(CALLERS)]

    async def call(self, system: pul.ActorSystem, number: int) -> str:
        """One call or stream; what became of it."""
        name = self.dice.choice(self.names)
        try:
            found = await system.resolve(name, timeout=TIMEOUT)
            if number % 3:
                answer = await found.options(timeout=TIMEOUT).who(number)
                return "value" if list(answer) == [name, number] else f"WRONG: {answer} of {name}, {number}"
            items = [item async for item in found.options(timeout=TIMEOUT).count(20)]
            return "stream" if items == list(range(20)) else f"WRONG: a stream ended after {items}"
        except pul.PulsingError as error:
            return type(error).__name__

    async def one(self, system: pul.ActorSystem) -> None:
        number = 0
        while not self.over:
            number += 1
            begun = time.monotonic()
            try:
                async with asyncio.timeout(2 * TIMEOUT + SLACK):
                    end = await self.call(system, number)
            except Exception as error:  # noqa: BLE001 - an end that no call may have
                end = f"WRONG: {type(error).__name__}: {error} after {time.monotonic() - begun:.1f} s"
            if end.startswith("WRONG"):
                self.wrong.append(end)
            else:
                self.ends[end] += 1
            await asyncio.sleep(0.005)


class Deeds:
    """What happens to the fleet. The first two nodes are the seeds: one of them is always left alone."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self.fleet = fleet
        self.dice = dice
        self.done: Counter[str] = Counter()

    def seeds(self, but: str) -> list[str]:
        return [node.addr for node in self.fleet.nodes[:2] if node.name != but]

    async def replace(self, node: Node, addr: str) -> None:
        place = self.fleet.nodes.index(node)
        await asyncio.to_thread(node.close)
        fresh = self.fleet.add(node.name, addr=addr, seeds=self.seeds(node.name))
        self.fleet.nodes.remove(node)
        self.fleet.nodes.remove(fresh)
        self.fleet.nodes.insert(place, fresh)
        await asyncio.to_thread(fresh.wait_ready)

    async def one(self) -> None:
        node = self.dice.choice(self.fleet.nodes)
        deed = self.dice.choice(["kill", "restart", "leave", "stop", "stop for long"])
        self.done[deed] += 1
        if deed.startswith("stop"):
            node.signal(signal.SIGSTOP)
            await asyncio.sleep(self.dice.uniform(5, 12) if deed == "stop for long" else self.dice.uniform(0.2, 2))
            node.signal(signal.SIGCONT)
        elif deed == "leave":
            await asyncio.to_thread(node.ask, "leave")
            await self.replace(node, "127.0.0.1:0" if node not in self.fleet.nodes[:2] else node.addr)
        else:
            node.kill()
            same = deed == "restart" or node in self.fleet.nodes[:2]
            await self.replace(node, node.addr if same else "127.0.0.1:0")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settled(what: str, look: Callable[[], list[str]], limit: float) -> None:
    deadline = time.monotonic() + limit
    while wrong := look():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}; {wrong}"
        await asyncio.sleep(0.1)


async def play(seed: int) -> None:
    dice = random.Random(seed)
    names = [f"n{number}" for number in range(NODES)]
    with Fleet() as fleet:
        await asyncio.to_thread(fleet.start, NODES)
        callers = Callers(names, random.Random(seed))
        await callers.start([node.addr for node in fleet.nodes[:2]])
        deeds = Deeds(fleet, dice)
        # Links to everybody are open: what there is now, there may be at the end.
        for system in callers.systems:
            for name in names:
                assert list(await (await system.resolve(name, timeout=10)).who(1)) == [name, 1]
        tasks_before, files_before = len(asyncio.all_tasks()), descriptors()
        tasks = [asyncio.create_task(callers.one(system)) for system in callers.systems for _ in range(TASKS)]
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            await deeds.one()
            await asyncio.sleep(dice.uniform(0.1, 1.0))
        callers.over = True
        _, hung = await asyncio.wait(tasks, timeout=2 * TIMEOUT + 2 * SLACK)
        assert not hung, f"{len(hung)} calls have no end"
        sys.stderr.write(f"\nseed {seed}: {dict(deeds.done)}; {dict(callers.ends)}\n")
        assert not callers.wrong, Counter(callers.wrong).most_common(5)
        assert callers.ends["value"] > 50, callers.ends
        assert callers.ends["stream"] > 10, callers.ends

        await asyncio.to_thread(fleet.wait_whole, SETTLED)
        everybody = {node.node_id: node.name for node in fleet.nodes}

        def inconsistent() -> list[str]:
            found = []
            for system in callers.systems:
                published = {
                    name: sorted(one["node_id"] for one in instances)
                    for name, instances in system.core.names().items()
                    if name in names
                }
                if published != {name: [node_id] for node_id, name in everybody.items()}:
                    found.append(f"{system.addr} publishes {published}, there are {everybody}")
            return found

        await settled("the callers know whom there is, and nobody else", inconsistent, SETTLED)
        for system in callers.systems:
            for name in names:
                assert list(await (await system.resolve(name, timeout=5)).who(1)) == [name, 1]
        for node in fleet.nodes:
            for name in names:
                assert (await asyncio.to_thread(node.ask, "call", name=name)) == [name, 7]

        def leaks() -> list[str]:
            gc.collect()
            # Links that were open before are not all: membership and registry keep a connection each way to whom they
            # last spoke with.
            talk = 4 * len(callers.systems) * NODES
            now = {
                "tasks": (len(asyncio.all_tasks()), tasks_before + 8),
                "descriptors": (descriptors(), files_before + 8 + talk),
            }
            return [f"{what}: {count}, at most {most}" for what, (count, most) in now.items() if count > most]

        await settled("what the calls took is given back", leaks, 30.0)
        census = {node.name: await asyncio.to_thread(node.ask, "census") for node in fleet.nodes}
        for what, slack in (("descriptors", 24), ("tasks", 8), ("threads", 8), ("actors", 0)):
            least = min(one[what] for one in census.values())
            most = {name: one[what] for name, one in census.items() if one[what] > least + slack}
            assert not most, f"{what}: {most}, others {least}"
        for system in callers.systems:
            await system.shutdown(0.0)


def test_r1_m4_whatever_happens_to_nodes_calls_end_and_names_are_right() -> None:
    seed = int(os.environ.get("PULSING_CHAOS_SEED", random.randrange(1 << 32)))
    try:
        asyncio.run(play(seed))
    except BaseException as error:
        error.add_note(f"PULSING_CHAOS_SEED={seed}")
        raise
