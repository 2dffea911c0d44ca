"""Poison requests and restarted workers, in real processes: nobody else pays, and nobody waits (S5)."""

import asyncio
import time

from router_kit import chat, ready, system, until
from worker_processes import start, workers

from pulsing.serving import start_router, stop_router

# From a restarted worker's readiness to its first request.
TRAFFIC = 1.0


def test_s5_twelve_poison_requests_lose_no_good_one() -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="round_robin")
            try:
                async with workers(node.addr, 2):
                    await ready(runner.addr, 2)
                    for number in range(12):
                        status, body = await chat(runner.addr, "fail 500", user=f"{number}")
                        assert (status, body["error"]["message"]) == (500, "failed as told with 500")
                        assert (await chat(runner.addr, "good"))[0] == 200
                        assert (await chat(runner.addr, "fail 429"))[0] == 429
                    await ready(runner.addr, 2)
            finally:
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_s5_a_restarted_worker_has_traffic_within_a_second() -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="round_robin")
            try:
                async with workers(node.addr, 2) as processes:
                    await ready(runner.addr, 2)
                    over = False

                    async def client() -> None:
                        while not over:
                            assert (await chat(runner.addr, "sleep 0.02"))[0] == 200

                    clients = [asyncio.create_task(client()) for _ in range(4)]
                    processes[0].kill()
                    await processes[0].process.wait()
                    again = await start(node.addr)
                    processes.append(again)
                    begun = time.monotonic()

                    async def has_worked() -> bool:
                        return (await again.load(node))["processed"] > 0

                    await until("it has served one", has_worked)
                    took = time.monotonic() - begun
                    over = True
                    await asyncio.gather(*clients)
                    assert took < TRAFFIC
            finally:
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
