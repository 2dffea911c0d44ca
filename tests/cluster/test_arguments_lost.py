"""Streams as arguments when a node dies: R1, R6, R7."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from runtime_util import eventually, local_system, run

import pulsing as pul
from pulsing.exceptions import ConnectionLostError

NODE = """
import asyncio, sys
import pulsing as pul

@pul.remote
class Child:
    async def read(self, stream):
        async for n in stream:
            pass
    async def double(self, stream):
        async for n in stream:
            yield 2 * n
    async def feed(self, reader):
        async def numbers():
            n = 0
            while True:
                yield n
                n += 1
                await asyncio.sleep(0.001)
        await reader.read(numbers())

async def main():
    await pul.init("127.0.0.1:0", seeds=sys.argv[1:])
    await Child.spawn(name="child")
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def child(seed: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(NODE), seed], env=os.environ.copy())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pul.remote
class Reader:
    def __init__(self) -> None:
        self.read_so_far = 0
        self.error: BaseException | None = None

    async def read(self, stream: Any) -> None:
        try:
            async for _ in stream:
                self.read_so_far += 1
        except BaseException as error:
            self.error = error
            raise


@pytest.mark.parametrize("method", ["read", "double"])
def test_r6_losing_the_callees_node_closes_the_callers_generator(method: str) -> None:
    async def main() -> None:
        async with local_system() as system:
            with child(system.addr) as process:
                far = await system.resolve("child", timeout=30)
                made = closed = 0

                async def numbers() -> AsyncIterator[int]:
                    nonlocal made, closed
                    try:
                        while True:
                            made += 1
                            yield made
                            await asyncio.sleep(0.001)
                    finally:
                        closed += 1

                async def use() -> None:
                    if method == "read":
                        await far.options(timeout=None).read(numbers())
                    else:
                        async for _ in far.double(numbers()):
                            pass

                call = asyncio.create_task(use())
                await eventually("it streams", lambda: made > 100)
                process.kill()
                with pytest.raises(ConnectionLostError):
                    await call
                await eventually("the generator is closed", lambda: closed == 1)
                assert not any(len(desk) for desk in system.desks.values())

    run(main())


def test_r7_losing_the_callers_node_is_an_error_at_the_callees_loop() -> None:
    async def main() -> None:
        async with local_system() as system:
            reader = await Reader.spawn(system=system)
            instance: Reader = system.cells()[-1].instance
            with child(system.addr) as process:
                far = await system.resolve("child", timeout=30)
                feeding = asyncio.create_task(far.options(timeout=None).feed(reader))
                await eventually("it streams", lambda: instance.read_so_far > 100)
                process.kill()
                await eventually("the loop ends", lambda: instance.error is not None)
                # The end of the call and the end of its stream come over one link: either may be the first.
                assert isinstance(instance.error, (ConnectionLostError, asyncio.CancelledError))
                with pytest.raises(ConnectionLostError):
                    await feeding

    run(main())
