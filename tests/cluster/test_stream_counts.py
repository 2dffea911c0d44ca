"""Numbers are true: a stream between nodes counts its items and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime_util import cluster, run

import pulsing as pul


@pul.remote
class Counter:
    async def count(self, n: int) -> AsyncIterator[int]:
        for one in range(n):
            yield one


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
