"""Large data between two processes: small calls of other pairs go on (R2), and so does membership."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from runtime_util import eventually, local_system, run

SIZE = 50_000_000
HUGE = 2_300_000_000
"""More than a signed number of 32 bits can say."""

NODE = """
import asyncio, sys
import pulsing as pul
from pulsing.core import run_until_signal

@pul.remote
class Store:
    def same(self, value):
        return value
    def tail(self, value):
        return len(value), bytes(value[-3:])
    async def hold(self, value):
        await asyncio.sleep(600)
    def memory(self):
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

async def main():
    system = await pul.init("127.0.0.1:0", seeds=sys.argv[1:])
    for name in ("small", "stalled", "bulk-0", "bulk-1", "bulk-2"):
        await Store.spawn(name=name)
    await run_until_signal("store", grace=0.0)

asyncio.run(main())
"""


@contextmanager
def store(seed: str) -> Iterator[None]:
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(NODE), seed]
    process = subprocess.Popen(command, env=os.environ.copy())
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_r2_small_calls_pass_large_transfers_of_other_pairs() -> None:
    async def main() -> None:
        async with local_system() as system:
            with store(system.addr):
                small = await system.resolve("small", timeout=30)
                bulk = [await system.resolve(f"bulk-{n}", timeout=30) for n in range(3)]
                # One actor is never done with its message: those for others are not behind it.
                stalled = await system.resolve("stalled", timeout=30)
                held = asyncio.create_task(stalled.hold(bytes(SIZE)))
                block = memoryview(bytearray(SIZE))
                large = [asyncio.create_task(one.same(block)) for one in bulk for _ in range(2)]
                small_first = 0
                while not all(task.done() for task in large):
                    assert await small.same(7) == 7
                    small_first += not any(task.done() for task in large)
                # Both ways are busy for hundreds of small calls' time; behind the data there would be none.
                assert small_first >= 2
                for back in await asyncio.gather(*large):
                    assert len(back) == SIZE
                members = await system.members()
                assert [member["status"] for member in members] == ["Alive", "Alive"]
                held.cancel()

    run(main())


def test_more_than_two_gigabytes_arrive_whole() -> None:
    async def main() -> None:
        async with local_system() as system:
            with store(system.addr):
                bulk = await system.resolve("bulk-0", timeout=30)
                block = bytearray(HUGE)
                block[-3:] = b"end"
                assert await bulk.options(timeout=None).tail(block) == (HUGE, b"end")

    run(main(), limit=300.0)


def test_memory_returns_after_large_transfers() -> None:
    async def main() -> None:
        async with local_system() as system:
            with store(system.addr):
                bulk = await system.resolve("bulk-0", timeout=30)
                before = await bulk.memory()
                for _ in range(2):
                    assert len(await bulk.same(memoryview(bytearray(2 * SIZE)))) == 2 * SIZE

                async def returned() -> bool:
                    # What malloc keeps of smaller blocks is no more than one of these.
                    return bool(await bulk.memory() < before + SIZE)

                await eventually("the memory returns", returned)

    run(main())


def test_copies_are_counted() -> None:
    async def main() -> None:
        async with local_system() as system:
            with store(system.addr):
                bulk = await system.resolve("bulk-0", timeout=30)

                async def copied(value: object) -> int:
                    system.flush_counts()
                    before = int(system.core.metrics()["bytes_copied"])
                    await bulk.same(value)
                    system.flush_counts()
                    return int(system.core.metrics()["bytes_copied"]) - before

                # Out: lent. Back: an immutable object must be made from what was received; a view is it.
                assert SIZE <= await copied(bytes(SIZE)) < SIZE + 1000
                assert await copied(memoryview(bytearray(SIZE))) == 0
                assert await copied(7) == 0

    run(main())
