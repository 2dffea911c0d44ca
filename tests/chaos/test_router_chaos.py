"""Workers and a Router are killed, paused, stopped and restarted at random under load: every answer is whole, or says
that it is not (S3, S4), and nothing is left behind.

`PULSING_CHAOS_SEED` repeats a run; `PULSING_CHAOS_SECONDS` makes it longer (`make chaos-router`: five minutes).
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import signal
import sys
import time
from collections import Counter

from two_routers import Client, House, house, stop, wait_for

SECONDS = float(os.environ.get("PULSING_CHAOS_SECONDS", "20"))
WORKERS = 4
CLIENTS = 16
DEEDS = [*["kill a worker", "pause a worker", "stop a worker"] * 3, "kill a router", "stop a router"]


class Deeds:
    """What happens to the house, one thing at a time: somebody can always answer."""

    def __init__(self, made: House, dice: random.Random) -> None:
        self.made = made
        self.dice = dice
        self.done: Counter[str] = Counter()

    def one(self) -> None:
        deed, _, whom = self.dice.choice(DEEDS).partition(" a ")
        self.done[f"{deed} {whom}"] += 1
        if whom == "router":
            door = self.dice.choice(self.made.doors)
            if deed == "kill":
                door.killed.append(time.monotonic())
            stop(door.process, signal.SIGKILL if deed == "kill" else signal.SIGTERM)
            self.made.reopen(door)
        elif deed == "pause":
            worker = self.dice.choice(self.made.workers)
            worker.send_signal(signal.SIGSTOP)
            time.sleep(self.dice.uniform(0.2, 3.0))
            worker.send_signal(signal.SIGCONT)
        else:
            at = self.dice.randrange(WORKERS)
            stop(self.made.workers[at], signal.SIGKILL if deed == "kill" else signal.SIGTERM)
            self.made.workers[at] = self.made.worker()
        self.made.wait_whole()
        time.sleep(self.dice.uniform(0.1, 0.5))


async def play(made: House, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Deeds until the time is over; what was done, and how requests ended."""
    deeds = Deeds(made, random.Random(seed))
    ends: Counter[str] = Counter()
    over = False

    async def again(client: Client) -> None:
        kind = "streamed" if client.stream else "unstreamed"
        while not over:
            begun = time.monotonic()
            async with asyncio.timeout(60):
                end = await client.ask()
            door = client.door
            # A killed process says nothing: its clients see the connection break, which is an error to them, even
            # where they find out with their next request.
            if end == "cut" and any(begun - 1 <= then for then in door.killed):
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
    return deeds.done, ends


def test_s4_answers_are_whole_or_say_that_they_are_not_whatever_happens(tmp_path: pathlib.Path) -> None:
    seed = int(os.environ.get("PULSING_CHAOS_SEED", random.randrange(1 << 32)))
    told = f"PULSING_CHAOS_SEED={seed}"
    with house(tmp_path, WORKERS) as made:
        before = [door.descriptors() for door in made.doors]
        done, ends = asyncio.run(play(made, seed))
        sys.stderr.write(f"\n{told}: {dict(done)}; {dict(ends)}\n")
        allowed = {
            f"{kind} {end}" for kind in ("streamed", "unstreamed") for end in ("whole", "cut by the kill of its router")
        }
        assert set(ends) <= allowed | {"streamed broken and said so"}, f"{told}: {dict(ends)}\n{made.logs()}"
        assert ends["streamed whole"] > 50, f"{told}: {ends}"
        assert ends["unstreamed whole"] > 20, f"{told}: {ends}"
        for door, least in zip(made.doors, before, strict=True):
            wait_for("no place is held", lambda door=door: door.in_flight() == 0, 10)
            # What a link or a kept connection takes is no leak; one for every request or deed would be.
            most = least + 16
            wait_for(f"{most} descriptors at most", lambda door=door, most=most: door.descriptors() <= most, 30)
