"""Engines of a few lines, and what tests of a Worker by itself need beside them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pulsing.core import actor_system
from pulsing.exceptions import PulsingActorError
from pulsing.serving.worker import Delta, GenerateRequest, Usage, Worker


class Echo(Worker):
    """The smallest engine there is."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        words = request.last_text.split()
        for word in words:
            yield Delta(word + " ")
        yield Delta(finish_reason="stop", usage=Usage(len(words), len(words)))


class Gate(Worker):
    """An engine whose requests wait for a word of the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__("gate", **options)
        self.go = asyncio.Event()
        self.started: list[str] = []
        self.closed: list[str] = []
        self.engine_closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        name = request.messages[-1]["content"]
        self.started.append(name)
        try:
            yield Delta("begun ")
            await self.go.wait()
            yield Delta("done", finish_reason="stop")
        finally:
            self.closed.append(name)

    def close(self) -> None:
        self.engine_closed = True


def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
    async def inside() -> None:
        system = await actor_system("127.0.0.1:0")
        try:
            await asyncio.wait_for(scenario(system), 60)
        finally:
            await system.shutdown()

    asyncio.run(inside())


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


async def ready(worker: Worker) -> None:
    await until(lambda: worker.state == "ready")


def text(answer: list[Any]) -> str:
    return "".join(delta.text for delta in answer)


def http_error(error: PulsingActorError) -> tuple[int, dict[str, Any]]:
    return error.code, json.loads(error.data)


async def instances(system: Any, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await system.get_named_instances(name)
    return found
