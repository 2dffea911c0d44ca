"""`pulsing.testing`: one seed is one run, also in the order of what happens in one moment."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
import sys

from pulsing.core._timers import Timer, Timers

_TROUBLED = """
import asyncio
import sys
import pulsing as pul
from pulsing.testing import Network

def say(*words):
    print(*words, file=sys.stderr, flush=True)

class Holder:
    async def hold(self, number):
        try:
            await asyncio.sleep(50)
        finally:
            say("let go", number)

@pul.remote(restart_policy="on_failure")
class Brittle:
    def __init__(self):
        self.asked = 0

    async def count(self):
        self.asked += 1
        if self.asked % 2 == 0:
            raise ValueError(self.asked)
        return self.asked

async def scenario(net):
    async def hear(what, waited):
        try:
            outcome = repr(await waited)
        except Exception as error:
            outcome = type(error).__name__
        say(f"{net.now:.6f}", what, outcome)

    systems = [await net.system(name, seeds=["a"] if name != "a" else []) for name in "abcd"]
    a, b, c, d = systems
    await a.spawn(Holder(), name="one", unique=True)
    held = [await a.spawn(Holder(), name=f"held-{n}", public=True) for n in range(8)]
    say(*(one.actor_id for one in held))
    for n, system in enumerate(systems):
        for m in range(3):
            await system.watch_names(lambda n=n, m=m: say(f"{net.now:.6f}", "news", n, m))
    with net.main(b):
        await Brittle.spawn(name="brittle", public=True)
    others = []
    with net.main(c):
        for n in range(8):
            other = await c.resolve(f"held-{n}", timeout=10)
            others.append(asyncio.ensure_future(hear(f"watch {n}", pul.watch(other))))
            for limit in (3.0, None):
                call = other.hold.options(timeout=limit, idempotent=n % 2 == 0)(n)
                others.append(asyncio.ensure_future(hear(f"call {n}", call)))
        first = await a.resolve("held-0", timeout=10)
        # The second ones live where the first did, in another order.
        for limit, numbers in ((0.5, range(200, 240)), (None, range(100, 140))):
            for n in numbers:
                others.append(asyncio.ensure_future(hear(f"call {n}", first.hold.options(timeout=limit)(n))))
            await net.sleep(1)
    brittle = await d.resolve("brittle", timeout=10)
    for n in range(6):
        await hear(f"brittle {n}", brittle.count.options(timeout=5)())
    net.partition({"a"}, {"b", "c", "d"})
    await net.until(lambda: len(net.members(a)) == 1 and len(net.members(b)) == 3, within=60)
    await b.spawn(Holder(), name="one", unique=True)
    net.heal()
    await net.until(lambda: all(len(net.members(each)) == 4 for each in systems), within=60)
    await net.kill("a")
    await net.until(lambda: len(net.members(b)) == 3, within=60)
    await net.sleep(1)
    for other in others:
        other.cancel()

Network.run(scenario, seed=3)
"""


def test_one_seed_is_one_run_whatever_the_order_of_hash_tables() -> None:
    told = []
    for hash_seed in range(6):
        environment = {**os.environ, "PULSING_LOG": "pulsing_core=trace", "PYTHONHASHSEED": str(hash_seed)}
        done = subprocess.run(
            [sys.executable, "-c", _TROUBLED], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        # The log of the core shows the time of day.
        told.append(re.sub(r"(?m)^\d{4}-\S+ +", "", done.stderr).splitlines())
    for what in ("lost name", "let go", "watch 7", "news 3", "ValueError", "is sent again"):
        assert any(what in line for line in told[0]), what
    # All of one actor and from its own node, which was killed; they end as they began.
    assert [line for line in told[0] if line.startswith("let go 1")][-40:] == [f"let go {n}" for n in range(100, 140)]
    for other in told[1:]:
        assert other == told[0]


def test_deadlines_that_are_reached_together_are_called_back_in_the_order_in_which_they_were_set() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers, reached, done = Timers(loop), list[int](), asyncio.Event()
        deadlines = list[Timer]()

        def reach(n: int) -> None:
            reached.append(n)
            if n < 50:
                deadlines[50 + n // 2 * 2].cancel()
            elif n == 99:
                done.set()

        when = loop.time() + 0.01
        deadlines += [timers.at(when, functools.partial(reach, n)) for n in range(100)]
        async with asyncio.timeout(10):
            await done.wait()
        assert reached == [n for n in range(100) if n < 50 or n % 2]
        assert len(timers) == 0

    asyncio.run(main())
