"""Numbers are true: a stream between nodes counts its items and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from runtime_util import cluster, eventually, run

import pulsing as pul


@pul.remote
class Counter:
    async def count(self, n: int) -> AsyncIterator[int]:
        for one in range(n):
            yield one

    async def slowly(self, n: int) -> AsyncIterator[int]:
        for one in range(n):
            yield one
            await asyncio.sleep(0)


def test_a_remote_stream_counts_its_items_alone() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            await Counter.spawn(system=one, name="counter")
            far = await two.resolve("counter", timeout=5)
            before = two.core.metrics()["stream_items"]
            for n in (0, 1, 200):
                assert [item async for item in far.count(n)] == list(range(n))
            assert two.core.metrics()["stream_items"] - before == 201

    run(main())


def test_a_remote_stream_leaves_nothing_behind_however_it_ends() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            await Counter.spawn(system=one, name="counter")
            far = await two.resolve("counter", timeout=5)

            async def read(n: int) -> None:
                assert [item async for item in far.slowly(n)] == list(range(n))

            handlers = one._bridge.handlers
            before = len(handlers)
            for n in range(60):
                reading = asyncio.create_task(read(20))
                # From before its call is sent until it has long been read, each in its turn.
                for _ in range(n):
                    await asyncio.sleep(0 if n < 20 else 0.0005)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            await eventually("all of them are forgotten", lambda: len(handlers) <= before)

    run(main())
