"""R7: what is over `max_message` is a typed error that tells size and limit, and costs nobody else anything."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from runtime_util import cluster, collect, run

import pulsing as pul
from pulsing.exceptions import ReplyTooLargeError, TooLargeError

LIMIT = 1 << 20


@pul.remote
class Store:
    def put(self, data: bytes) -> int:
        return len(data)

    def get(self, size: int) -> bytes:
        return bytes(size)

    async def items(self, *sizes: int) -> AsyncIterator[bytes]:
        for size in sizes:
            yield bytes(size)


def test_r7_sizes_over_the_limit_are_typed_errors_for_requests_replies_and_items() -> None:
    async def main() -> None:
        async with cluster(2, max_message=LIMIT) as (one, two):
            near = await Store.spawn(system=one, name="store")
            far = await Store.resolve("store", system=two, timeout=5)
            for send in (far.put, far.put.tell):
                with pytest.raises(TooLargeError, match="max_message") as sent:
                    await send(bytes(LIMIT))
                assert (sent.value.limit, sent.value.retry_safe) == (LIMIT, True)
                assert LIMIT < sent.value.size < LIMIT + 1000
            with pytest.raises(ReplyTooLargeError) as answered:
                await far.get(LIMIT)
            assert (answered.value.limit, answered.value.state_changed) == (LIMIT, "yes")
            items: list[bytes] = []
            with pytest.raises(ReplyTooLargeError, match="an item of a stream"):
                await collect(far.items(3, LIMIT, 3), items)
            assert items == [bytes(3)]
            assert await far.put(bytes(LIMIT - 1000)) == LIMIT - 1000
            # The limit is for what travels.
            assert len(await near.get(2 * LIMIT)) == 2 * LIMIT

    run(main())
