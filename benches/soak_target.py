"""The actor that the soak puts under load. A module of its own, so that it travels by name."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pulsing as pul

_systems: dict[asyncio.AbstractEventLoop, Any] = {}


def lives_on(system: Any) -> None:
    """Tells actors which node the running loop has."""
    _systems[asyncio.get_running_loop()] = system


@pul.remote
class Target:
    """What is put under load."""

    def __init__(self) -> None:
        self.told = 0
        self.leaving: asyncio.Task[None] | None = None

    def on_start(self, actor_id: Any) -> None:
        """Who this is."""
        self.actor_id = actor_id

    def echo(self, value: Any) -> Any:
        """Answers on the spot."""
        return value

    async def echo_async(self, value: Any) -> Any:
        """Answers after a turn of the loop."""
        await asyncio.sleep(0)
        return value

    async def slow(self, seconds: float) -> None:
        """Answers too late for most."""
        await asyncio.sleep(seconds)

    def note(self, _value: Any) -> None:
        """Is told."""
        self.told += 1

    def fail(self) -> None:
        """Raises."""
        raise KeyError("as asked")

    async def items(self, count: int) -> AsyncIterator[dict[str, Any]]:
        """A stream."""
        for index in range(count):
            yield {"index": index, "text": "token"}

    def items_sync(self, count: int) -> Any:
        """The same of a plain generator."""
        yield from range(count)

    def leave(self) -> None:
        """Stops itself, once it has answered."""
        self.leaving = asyncio.create_task(_systems[asyncio.get_running_loop()].stop(self.actor_id))
