"""kill -9 of a worker under load costs no request that had not begun to stream (S4)."""

import asyncio

from router_kit import chat, ready, system, until
from worker_processes import workers

from pulsing.serving import start_router, stop_router


def test_kill_9_loses_nothing_that_had_not_begun() -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias")
            try:
                async with workers(node.addr, 2) as (first, _):
                    await ready(runner.addr, 2)
                    stop = asyncio.Event()
                    statuses: list[int] = []

                    async def client(stream: bool) -> None:
                        while not stop.is_set():
                            status, body = await chat(runner.addr, "sleep 0.1", stream=stream)
                            statuses.append(status if not stream or body.endswith("[DONE]\n\n") else 0)

                    clients = [asyncio.create_task(client(number % 2 == 0)) for number in range(16)]
                    await until("the load is on", lambda: len(statuses) >= 32)
                    first.kill()
                    seen = len(statuses)
                    await until("the load goes on", lambda: len(statuses) >= seen + 64)
                    stop.set()
                    await asyncio.gather(*clients)
                    assert set(statuses) == {200}, [status for status in statuses if status != 200]
            finally:
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
