"""What the runtime's tests share."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

import pulsing as pul

LIMIT = 60.0

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""As the fixture `run` is, which runs a test's coroutine on either kind of loop."""


def run(work: Coroutine[Any, Any, Any], kind: str = "asyncio", limit: float = LIMIT) -> Any:
    """Runs a test's coroutine on a loop of this kind; a hang is a failure after `limit` seconds, not a stuck run."""

    async def limited() -> Any:
        async with asyncio.timeout(limit):
            return await work

    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        return runner.run(limited())


@asynccontextmanager
async def local_system(**settings: Any) -> AsyncIterator[pul.ActorSystem]:
    """A system of its own on loopback."""
    system = await pul.actor_system("127.0.0.1:0", **settings)
    try:
        yield system
    finally:
        await system.shutdown(0.0)


@asynccontextmanager
async def cluster(size: int, **settings: Any) -> AsyncIterator[list[pul.ActorSystem]]:
    """`size` systems that have joined each other."""
    systems = [await pul.actor_system("127.0.0.1:0", **settings)]
    try:
        for _ in range(size - 1):
            systems.append(await pul.actor_system("127.0.0.1:0", seeds=[systems[0].addr], **settings))
        yield systems
    finally:
        for system in reversed(systems):
            await system.shutdown(0.0)


@asynccontextmanager
async def restarts(system: pul.ActorSystem) -> AsyncIterator[asyncio.Queue[dict[str, Any]]]:
    """What `/events` tells of restarts from now on."""
    found: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    host, _, port = system.addr.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"event: node\n")

    async def follow() -> None:
        while line := await reader.readline():
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if event.get("change") == "restarted":
                found.put_nowait(event)

    following = asyncio.create_task(follow())
    try:
        yield found
    finally:
        following.cancel()
        writer.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def collect(stream: AsyncIterable[Any], into: list[Any]) -> None:
    """Takes every item, so that those before an error are seen."""
    async for item in stream:
        into.append(item)


async def eventually(what: str, condition: Callable[[], bool | Awaitable[bool]], limit: float = 10.0) -> None:
    """Waits until `condition` holds; fails naming `what` after `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        held = condition()
        if not isinstance(held, bool):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        await asyncio.sleep(0.005)
