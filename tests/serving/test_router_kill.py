"""kill -9 of a worker under load costs no request that had not begun to stream (S4)."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from router_kit import chat, ready, system, until

from pulsing.serving import start_router, stop_router

WORKER = """
import asyncio, sys
import pulsing as pul
from router_kit import Scripted

async def main():
    node = await pul.actor_system("127.0.0.1:0", seeds=[sys.argv[1]])
    await node.spawn(Scripted(capacity=64), name="worker")
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_kill_9_loses_nothing_that_had_not_begun() -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias")
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
            command = (sys.executable, "-c", WORKER, node.addr)
            processes = [await asyncio.create_subprocess_exec(*command, env=environment) for _ in range(2)]
            try:
                await ready(runner.addr, 2)
                stop = asyncio.Event()
                statuses: list[int] = []

                async def client(stream: bool) -> None:
                    while not stop.is_set():
                        status, body = await chat(runner.addr, "sleep 0.1", stream=stream)
                        statuses.append(status if not stream or body.endswith("[DONE]\n\n") else 0)

                clients = [asyncio.create_task(client(number % 2 == 0)) for number in range(16)]
                await until("the load is on", lambda: len(statuses) >= 32)
                processes[0].send_signal(signal.SIGKILL)
                seen = len(statuses)
                await until("the load goes on", lambda: len(statuses) >= seen + 64)
                stop.set()
                await asyncio.gather(*clients)
                assert set(statuses) == {200}, [status for status in statuses if status != 200]
            finally:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
                await stop_router(runner, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
