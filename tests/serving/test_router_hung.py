"""SIGSTOP of one of two workers, in real processes: contained within 2 s, and nothing lost (S5)."""

import asyncio
import contextlib
import re
import time

import pytest
from router_kit import chat, http, ready, system, until
from worker_processes import WorkerProcess, workers

from pulsing.serving import start_router, stop_router

CLIENTS = 16
# By then nobody waits for a stopped worker, and nobody is sent to it.
CONTAINED = 2.0
POLICIES = ["round_robin", "random", "power_of_two", "stream_load", "consistent_hash", "cache_aware"]


async def metric(addr: str, name: str) -> int:
    _, _, body = await http(addr, "GET", "/metrics")
    found = re.search(rf"^{re.escape(name)} (\d+)$", body.decode(), re.MULTILINE)
    assert found, name
    return int(found[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_s5_a_closed_loop_is_off_a_stopped_worker_within_two_seconds(policy: str) -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type=policy)
            try:
                async with workers(node.addr, 2) as (first, _):
                    await ready(runner.addr, 2)
                    over = False
                    ended: list[tuple[float, float, int]] = []
                    begun: dict[int, float] = {}

                    async def client(number: int) -> None:
                        while not over:
                            begun[number] = time.monotonic()
                            status, _ = await chat(runner.addr, "sleep 0.1", stream=number % 2 == 0)
                            ended.append((begun[number], time.monotonic(), status))

                    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
                    await until("the load is on", lambda: len(ended) >= 2 * CLIENTS)
                    first.stop()
                    stopped = time.monotonic()
                    await until("2 s are over", lambda: time.monotonic() > stopped + CONTAINED)
                    await until("each is on the other one", lambda: min(begun.values()) > stopped, 2)
                    seen = len(ended)
                    await until("all get on", lambda: len(ended) >= seen + 4 * CLIENTS)
                    over = True
                    await asyncio.gather(*clients)
                    assert {status for _, _, status in ended} == {200}
                    # Placed on the stopped one it would have taken longer than its silence takes to be seen.
                    later = [end - start for start, end, _ in ended if start > stopped + CONTAINED]
                    assert max(later) < 1.5, sorted(later)[-3:]
                    first.wake()
                    await ready(runner.addr, 2)
            finally:
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_s5_an_open_loop_loses_nothing_to_a_stopped_worker() -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="round_robin")
            try:
                async with workers(node.addr, 2) as (first, _):
                    await ready(runner.addr, 2)
                    asked = []
                    begun = time.monotonic()
                    # 40 a second.
                    for number in range(140):
                        due = begun + number / 40
                        await until("its turn", lambda due=due: time.monotonic() >= due)
                        if number == 20:
                            first.stop()
                        asked.append(asyncio.create_task(asyncio.wait_for(chat(runner.addr, "sleep 0.05"), 5)))
                    answers = await asyncio.gather(*asked, return_exceptions=True)
                    lost = [one for one in answers if isinstance(one, BaseException) or one[0] != 200]
                    assert not lost
                    assert await metric(runner.addr, 'pulsing_router_retries_total{reason="taken_back"}') > 0
                    assert await metric(runner.addr, 'pulsing_router_retries_total{reason="lost"}') == 0
            finally:
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_s5_a_worker_that_wakes_finds_its_requests_cancelled_and_is_used_again() -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="round_robin")
            try:
                async with workers(node.addr, 2) as (first, second):
                    await ready(runner.addr, 2)
                    slow = [asyncio.create_task(chat(runner.addr, "sleep 20")) for _ in range(4)]

                    async def running(one: WorkerProcess, count: int) -> bool:
                        return (await one.load(node))["running"] == count

                    await until("both have two", lambda: running(first, 2))
                    first.stop()
                    await until("the other one has four", lambda: running(second, 4))
                    first.wake()
                    await until("it has none", lambda: running(first, 0))
                    assert (await first.load(node))["processed"] == 0
                    await ready(runner.addr, 2)
                    for task in slow:
                        task.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await task
                    await until("none is left", lambda: running(second, 0))
                    for _ in range(4):
                        assert (await chat(runner.addr))[0] == 200
                    assert (await first.load(node))["processed"] > 0
            finally:
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
