"""kill -9 and SIGSTOP of a worker under load: no request that had not begun is lost, and no greedy stream (S4)."""

import asyncio
import json

import pytest
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


@pytest.mark.parametrize("deed", ["kill", "stop"])
def test_s4_greedy_streams_in_flight_on_a_worker_that_goes_are_whole(deed: str) -> None:
    words = 60
    whole = "".join(f"{number} " for number in range(words))

    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="round_robin")
            try:
                async with workers(node.addr, 2) as (first, second):
                    await ready(runner.addr, 2)

                    async def client() -> list[str]:
                        options = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
                        status, body = await chat(runner.addr, f"count {words} 0.05", **options)
                        assert status == 200
                        return [event.removeprefix("data: ") for event in body.strip().split("\n\n")]

                    clients = [asyncio.create_task(client()) for _ in range(14)]

                    async def begun() -> bool:
                        return all([(await one.load(node))["running"] == 7 for one in (first, second)])

                    await until("both have seven streams", begun)
                    first.kill() if deed == "kill" else first.stop()
                    for events in await asyncio.gather(*clients):
                        assert events[-1] == "[DONE]", events[-1]
                        pieces = [json.loads(event) for event in events[:-1]]
                        deltas = [piece["choices"][0]["delta"] for piece in pieces if piece["choices"]]
                        assert "".join(delta.get("content") or "" for delta in deltas) == whole
                        assert sum("role" in delta for delta in deltas) == 1
                        reasons = [piece["choices"][0]["finish_reason"] for piece in pieces if piece["choices"]]
                        assert [reason for reason in reasons if reason] == ["stop"]
                        assert pieces[-1]["usage"]["completion_tokens"] == words
            finally:
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
