"""The actor that the soak puts under load. A module of its own, so that it travels by name."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pulsing as pul

PAST = 4_400
"""Actors that have ended: a node remembers how the last 4,096 did, and which 1,024 names it withdrew last."""

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

    async def grow_old(self) -> None:
        """Gives this node as much of a past as it remembers: what fills up to a bound is no leak."""
        system = _systems[asyncio.get_running_loop()]
        for number in range(PAST):
            name = f"past-{system.node_id}-{number}" if number % 4 == 0 else None
            actor = await Target.spawn(system=system, name=name)
            await system.stop(actor)

    def leave(self) -> None:
        """Stops itself, once it has answered."""
        self.leaving = asyncio.create_task(_systems[asyncio.get_running_loop()].stop(self.actor_id))
