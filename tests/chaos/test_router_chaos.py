"""Workers, engines and a Router are killed, paused, stopped and restarted at random under load: every answer is whole,
or says that it is not (S3, S4), and nothing is left behind.

`PULSING_CHAOS_SEED` repeats a run; `PULSING_CHAOS_SECONDS` makes it longer (`make chaos-router`: five minutes).
"""

from __future__ import annotations

import asyncio
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

from two_routers import Client, Door, House, house, stop, wait_for

SECONDS = float(os.environ.get("PULSING_CHAOS_SECONDS", "20"))
WORKERS = 3
ENGINES = 2
CLIENTS = 16
DEEDS = [
    *["kill a worker", "pause a worker", "stop a worker"] * 2,
    *["kill an engine", "pause an engine"],
    *["kill an engine worker", "stop an engine worker"],
    *["kill a router", "stop a router"],
]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
# What a link, a kept connection or the allocator takes is no leak; one for every request or deed would be. As many
# connections are kept to each engine as clients asked at once.
MORE_DESCRIPTORS = 16 + ENGINES * CLIENTS
MORE_TASKS = 16
MORE_KIB = 32 << 10


class Deeds:
    """What happens to the house, one thing at a time: somebody can always answer."""

    def __init__(self, made: House, dice: random.Random) -> None:
        self.made = made
        self.dice = dice
        self.done: Counter[str] = Counter()
        # Seconds from a deed's end until every Router saw everybody, at most.
        self.slowest: dict[str, float] = {}

    def one(self) -> None:
        deed, _, whom = self.dice.choice(DEEDS).split(" ", 2)
        self.done[f"{deed} {whom}"] += 1
        if whom == "router":
            door = self.dice.choice(self.made.doors)
            if deed == "kill":
                door.dead = math.inf
            stop(door.process, SIGNALS[deed])
            if deed == "kill":
                door.dead = time.monotonic()
            self.made.reopen(door)
        elif whom == "worker":
            at = self.dice.randrange(WORKERS)
            if not self.paused(deed, self.made.workers[at]):
                self.made.workers[at] = self.made.worker()
        else:
            engine = self.dice.choice(self.made.engines)
            if whom == "engine worker":
                stop(engine.worker, SIGNALS[deed])
                engine.worker = self.made.engine_worker(engine.port)
            elif not self.paused(deed, engine.server):
                engine.server = self.made.server(engine.port)
        began = time.monotonic()
        self.made.wait_whole()
        took = round(time.monotonic() - began, 1)
        self.slowest[f"{deed} {whom}"] = max(took, self.slowest.get(f"{deed} {whom}", 0))
        time.sleep(self.dice.uniform(0.1, 0.5))

    def paused(self, deed: str, process: subprocess.Popen[bytes]) -> bool:
        """Pauses a process, if that is the deed, or ends it."""
        if deed != "pause":
            stop(process, SIGNALS[deed])
            return False
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.dice.uniform(0.2, 3.0))
        process.send_signal(signal.SIGCONT)
        return True


async def play(made: House, seed: int) -> tuple[Deeds, Counter[str]]:
    """Deeds until the time is over, and how requests ended."""
    deeds = Deeds(made, random.Random(seed))
    ends: Counter[str] = Counter()
    over = False

    async def again(client: Client) -> None:
        kind = "streamed" if client.stream else "unstreamed"
        while not over:
            async with asyncio.timeout(60):
                end = await client.ask()
            # A killed process says nothing: its clients see the connection break, which is an error to them, even
            # where they find out with their next request.
            if end == "cut" and client.opened <= client.door.dead:
                end = "cut by the kill of its router"
            ends[f"{kind} {end}"] += 1
        client.close()

    clients = [Client(made.doors, stream=number % 4 != 0, at=number % 2) for number in range(CLIENTS)]
    tasks = [asyncio.create_task(again(client)) for client in clients]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        await asyncio.to_thread(deeds.one)
    over = True
    await asyncio.gather(*tasks)
    return deeds, ends


class Weights:
    """What the house takes while nobody asks."""

    def __init__(self, made: House) -> None:
        self.doors = [(door.descriptors(), door.tasks(), door.memory()) for door in made.doors]
        self.worker = max(made.tasks(process) for process in made.workers)
        self.engine_worker = max(made.tasks(engine.worker) for engine in made.engines)

    def compare(self, made: House) -> None:
        """Waits until what the house takes now is no more, whoever is in it.

        Raises:
            AssertionError: It stays more.
        """
        for door, (descriptors, tasks, memory) in zip(made.doors, self.doors, strict=True):
            self._least("descriptors", door, Door.descriptors, descriptors + MORE_DESCRIPTORS)
            self._least("tasks", door, Door.tasks, tasks + MORE_TASKS)
            self._least("KiB", door, Door.memory, memory + MORE_KIB)
        everybody = [(process, self.worker) for process in made.workers]
        everybody += [(engine.worker, self.engine_worker) for engine in made.engines]
        for process, most in everybody:
            wait_for(
                f"{most} tasks at most in {process.args!r}",
                lambda process=process, most=most: made.tasks(process) <= most,
                30,
            )
        for engine in made.engines:
            wait_for("no engine answers anybody", lambda engine=engine: engine.running() == 0, 30)

    def _least(self, what: str, door: Door, of: Callable[[Door], int], most: int) -> None:
        wait_for(f"{most} {what} at most, not {of(door)}", lambda: 0 <= of(door) <= most, 30)


def test_s4_answers_are_whole_or_say_that_they_are_not_whatever_happens(tmp_path: pathlib.Path) -> None:
    seed = int(os.environ.get("PULSING_CHAOS_SEED", random.randrange(1 << 32)))
    told = f"PULSING_CHAOS_SEED={seed}"
    with house(tmp_path, WORKERS, ENGINES) as made:
        before = Weights(made)
        try:
            deeds, ends = asyncio.run(play(made, seed))
        except AssertionError as error:
            raise AssertionError(f"{told}: {error}\n{made.logs()}") from error
        sys.stderr.write(f"\n{told}: {dict(deeds.done)}; {dict(ends)}; all seen after {deeds.slowest} s at most\n")
        allowed = {
            f"{kind} {end}" for kind in ("streamed", "unstreamed") for end in ("whole", "cut by the kill of its router")
        }
        if deeds.done["kill engine"]:
            # What an engine has begun nobody else can end; what a Worker has, each other one can.
            allowed.add("streamed broken and said so")
        assert set(ends) <= allowed, f"{told}: {dict(ends)}\n{made.logs()}"
        assert ends["streamed whole"] > 50, f"{told}: {ends}"
        assert ends["unstreamed whole"] > 20, f"{told}: {ends}"
        for door in made.doors:
            wait_for(f"nothing is held, not {door.held()}", lambda door=door: not door.held(), 10)
        sys.stderr.write(f"before: {vars(before)}; after: {vars(Weights(made))}\n")
        before.compare(made)
