"""Thousands at once: calls to one peer, and connections that only take up room."""

from __future__ import annotations

import asyncio
import resource

from runtime_util import cluster, local_system, run

import pulsing as pul

MANY = 1000


@pul.remote
class Echo:
    def __init__(self) -> None:
        self.inside = self.most = 0

    def say(self, n: int) -> int:
        return n

    async def wait(self, n: int) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        return n

    def most_inside(self) -> int:
        return self.most


def test_r1_a_thousand_calls_at_once_to_one_peer_are_answered() -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            await Echo.spawn(system=here, name="echo")
            echo = await Echo.resolve("echo", system=there, timeout=5)
            for method in (echo.say, echo.wait):
                assert await asyncio.gather(*(method(n) for n in range(MANY))) == list(range(MANY))
            # Each is answered although the mailbox has room for 256 and as many interleave.
            assert 1 < await echo.most_inside() <= 256

    run(main())


def test_a_thousand_silent_connections_keep_nobody_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * MANY)), hard))

    async def main() -> None:
        async with local_system() as system:
            host, _, port = system.addr.rpartition(":")
            await Echo.spawn(system=system, name="echo")
            silent = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(MANY)))
            async with local_system(seeds=[system.addr]) as late:
                echo = await Echo.resolve("echo", system=late, timeout=10)
                assert await echo.say(1) == 1
                assert len(await system.members()) == 2
            for _, writer in silent:
                writer.close()

    try:
        run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
