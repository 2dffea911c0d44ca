"""A stream from one process to another, and what happens when the reader stops.

The parent starts a second process of itself, which joins it and serves `source`; the parent reads ten numbers and
leaves the loop. The producer's `finally` runs at once: nobody generates for a reader that is gone.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import pulsing as pul


@pul.remote
class Source:
    def __init__(self) -> None:
        self.state = "idle"

    async def numbers(self) -> AsyncIterator[int]:
        self.state = "producing"
        n = 0
        try:
            while True:
                yield n
                n += 1
        finally:
            self.state = f"stopped before {n + 1}"

    async def status(self) -> str:
        return self.state


async def child(seed: str) -> None:
    await pul.init(seeds=[seed])
    await Source.spawn(name="source")
    # The parent ends this process by closing its stdin.
    await asyncio.to_thread(sys.stdin.read)
    await pul.shutdown()


async def parent() -> None:
    system = await pul.init("127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(system.addr), stdin=asyncio.subprocess.PIPE
    )
    source = await pul.resolve("source", timeout=30)
    async for n in source.numbers():
        print(n)
        if n == 9:
            break
    async with asyncio.timeout(10):
        while not (status := await source.status()).startswith("stopped"):
            await asyncio.sleep(0.01)
    print("the producer", status.partition(" before")[0])
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    await pul.shutdown()


if __name__ == "__main__":
    asyncio.run(child(sys.argv[1]) if len(sys.argv) > 1 else parent())
