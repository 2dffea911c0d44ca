"""One Router for all clients and backends, on a thread of its own, so that clients may block."""

import asyncio
import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import profiles
from scripted_workers import Script

import pulsing as pul
from pulsing.serving import EngineWorker, start_router, stop_router

BACKENDS = ("actor", *profiles.PROFILES)


@dataclass(frozen=True)
class House:
    """Where the Router listens; its models are the backends."""

    addr: str

    @property
    def url(self) -> str:
        """As clients want it."""
        return f"http://{self.addr}/v1"


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[House]:
    async with contextlib.AsyncExitStack() as stack:
        node = await pul.actor_system("127.0.0.1:0")
        stack.push_async_callback(node.shutdown)
        await node.spawn(Script("actor-model"), name="actor")
        for profile in profiles.PROFILES:
            url = await stack.enter_async_context(profiles.engine(profile))
            worker = EngineWorker(url, engine=profile, normalize="on", probe_interval=0.2)
            await node.spawn(worker, name=profile)
        runner = await start_router(node, "127.0.0.1", 0, models={name: name for name in BACKENDS})
        stack.push_async_callback(stop_router, runner, 1)
        yield House(runner.addr)


def _ready(serving: House) -> int:
    with urllib.request.urlopen(f"http://{serving.addr}/health", timeout=5) as answer:
        return int(json.load(answer)["healthy_workers"])


@contextlib.contextmanager
def house() -> Iterator[House]:
    """The Router, once every backend is ready."""
    started: list[House] = []
    up, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with _serving() as serving:
            started.append(serving)
            up.set()
            while not over.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="house")
    thread.start()
    try:
        assert up.wait(30), "the Router did not start"
        deadline = time.monotonic() + 30
        while _ready(started[0]) < len(BACKENDS):
            assert time.monotonic() < deadline, "not every backend is ready"
            time.sleep(0.02)
        yield started[0]
    finally:
        over.set()
        thread.join(30)
