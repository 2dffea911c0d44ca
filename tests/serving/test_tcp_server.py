"""The server that tests put engines behind leaves nothing open, whenever it ends."""

import asyncio
import gc
import socket
import sys
from typing import Any

import pytest
from tcp_server import listening


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_comes_as_it_ends_is_not_left_to_the_collector(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`turns`: of the loop, from the connection to the end."""
    left: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)

    async def main() -> None:
        async with listening(silent) as addr:
            host, port = addr.split(":")
            client = socket.create_connection((host, int(port)))
            for _ in range(turns):
                await asyncio.sleep(0)
        client.close()

    asyncio.run(main())
    gc.collect()
    assert left == []
