"""The load of the soak: everything that could leave something behind, in closed loops, as fast as it goes."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pulsing as pul

ASKERS = 16
LARGE = (100_000, 1_000_000, 5_000_000)


class Load:
    """All kinds of traffic from one loop to some actors.

    Args:
        system: The node that calls.
        cls: Class of the actors, to spawn more of them.
        targets: Actors, of this node and others.
        done: Counts what succeeded, by kind.
        errors: Counts what must not happen, by text.
        kinds: Which kinds of traffic: names of methods.
    """

    def __init__(
        self,
        system: Any,
        cls: Any,
        targets: list[Any],
        done: dict[str, int],
        errors: dict[str, int],
        kinds: Sequence[str],
    ) -> None:
        self.system = system
        self.cls = cls
        self.targets = targets
        self.done = done
        self.errors = errors
        self.kinds = kinds
        # Of each node's own: two loads must not claim the same names.
        self.dice = random.Random(str(system.node_id))

    def start(self) -> list["asyncio.Task[None]"]:
        """Starts the load; `end` takes what is returned."""
        running: list[Callable[[Any], Awaitable[None]]] = []
        for name in self.kinds:
            running += [getattr(self, name)] * (ASKERS if name == "ask" else 1)
        return [asyncio.create_task(self.again(kind), name=kind.__name__) for kind in running]

    async def again(self, kind: Callable[[Any], Awaitable[None]]) -> None:
        """One kind of traffic, for ever."""
        while True:
            for target in self.targets:
                try:
                    await kind(target)
                except Exception as error:  # noqa: BLE001 - counted, and the soak fails
                    text = f"{kind.__name__}: {type(error).__name__}: {error}"[:200]
                    self.errors[text] = self.errors.get(text, 0) + 1
                    # Whatever is broken must not fill the memory with reports.
                    await asyncio.sleep(0.1)

    def count(self, kind: str, times: int = 1) -> None:
        """So much is done."""
        self.done[kind] = self.done.get(kind, 0) + times

    async def ask(self, target: Any) -> None:
        """Plain and coroutine methods."""
        for number in range(50):
            method = target.echo if number % 2 else target.echo_async
            value = {"number": number, "text": "x" * self.dice.randrange(200)}
            assert await method(value) == value
        self.count("asks", 50)

    async def tell(self, target: Any) -> None:
        """Tells, and an ask so that they do not run ahead for ever."""
        for number in range(50):
            await target.note.tell(number)
        await target.echo(None)
        self.count("tells", 50)
        await asyncio.sleep(0.01)

    async def large(self, target: Any) -> None:
        """Bytes of many pages."""
        sent = bytes(self.dice.choice(LARGE))
        assert len(await target.echo(sent)) == len(sent)
        self.count("large messages")
        await asyncio.sleep(0.02)

    async def stream_whole(self, target: Any) -> None:
        """A stream to its end."""
        got = 0
        async for _ in target.items(300):
            got += 1
        assert got == 300
        self.count("streams read whole")

    async def stream_broken_off(self, target: Any) -> None:
        """Streams that are closed early."""
        method = target.items if self.dice.random() < 0.5 else target.items_sync
        stream = aiter(method(100_000))
        for _ in range(self.dice.randrange(1, 100)):
            await anext(stream)
        await stream.aclose()
        self.count("streams broken off")

    async def stream_dropped(self, target: Any) -> None:
        """Streams that nobody closes."""
        async for _ in target.items(100_000):
            if self.dice.random() < 0.1:
                break
        self.count("streams dropped")
        await asyncio.sleep(0.01)

    async def cancelled(self, target: Any) -> None:
        """Callers that are cancelled while they wait."""
        calls = [asyncio.create_task(call(target.slow(30.0))) for _ in range(10)]
        try:
            await asyncio.sleep(self.dice.random() * 0.01)
        finally:
            for task in calls:
                task.cancel()
            await asyncio.wait(calls)
        assert all(task.cancelled() for task in calls)
        self.count("calls cancelled", 10)

    async def late(self, target: Any) -> None:
        """Deadlines that pass."""
        with contextlib.suppress(pul.PulsingTimeoutError):
            await target.options(timeout=0.01).slow(30.0)
            raise AssertionError("a call of 30 s ended within 0.01 s")
        self.count("deadlines passed")

    async def failing(self, target: Any) -> None:
        """Handlers that raise."""
        with contextlib.suppress(KeyError):
            await target.fail()
            raise AssertionError("a failing method answered")
        self.count("errors raised")
        await asyncio.sleep(0.005)

    async def churn(self, target: Any) -> None:
        """Actors that come and go, here and on the target's node, some with a name."""
        name = f"churn-{self.dice.getrandbits(60):x}" if self.dice.random() < 0.3 else None
        place = "local" if target.is_local() else target.node_id
        actor = await self.cls.spawn(system=self.system, name=name, placement=place)
        try:
            assert await actor.echo(1) == 1
        finally:
            await actor.leave()
        self.count("actors spawned and stopped")


async def call(coroutine: Any) -> Any:
    """A call as a coroutine of its own."""
    return await coroutine


async def end(running: list["asyncio.Task[None]"]) -> None:
    """Ends a load in the middle of what it does."""
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
