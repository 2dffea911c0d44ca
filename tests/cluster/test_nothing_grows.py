"""What has ended leaves nothing behind, of whatever kind it was: Python's side of it.

The other side is in `crates/pulsing-core/tests/leaks.rs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from runtime_util import cluster, eventually, run

import pulsing as pul
from pulsing import _core

TIMES = 40


@pul.remote
class Target:
    def echo(self, value: Any) -> Any:
        return value

    async def turn(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def hang(self) -> None:
        await asyncio.Event().wait()

    def fail(self) -> None:
        raise KeyError("as asked")

    def note(self, value: Any) -> None: ...

    async def items(self, count: int) -> AsyncIterator[int]:
        for one in range(count):
            yield one

    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])


async def numbers(count: int) -> AsyncIterator[int]:
    for one in range(count):
        yield one


class Scene:
    """Two nodes, and one actor to be asked from either."""

    def __init__(self, here: pul.ActorSystem, there: pul.ActorSystem, target: Any) -> None:
        self.here = here
        self.there = there
        self.target = target

    async def ask(self, number: int) -> None:
        assert await self.target.echo(number) == number
        assert await self.target.turn(number) == number

    async def tell(self, number: int) -> None:
        await self.target.note.tell(number)
        await self.target.echo(None)

    async def fail(self, _: int) -> None:
        with pytest.raises(KeyError):
            await self.target.fail()

    async def large(self, _: int) -> None:
        assert len(await self.target.echo(bytes(200_000))) == 200_000

    async def deadline(self, _: int) -> None:
        with pytest.raises(pul.PulsingTimeoutError):
            await self.target.options(timeout=0.005).hang()

    async def cancel(self, number: int) -> None:
        async def call() -> None:
            await self.target.hang()

        task = asyncio.create_task(call())
        for _ in range(number % 5):
            await asyncio.sleep(0.0005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def stream(self, _: int) -> None:
        assert [item async for item in self.target.items(20)] == list(range(20))

    async def stream_closed(self, _: int) -> None:
        stream = aiter(self.target.items(1000))
        await anext(stream)
        await stream.aclose()

    async def stream_dropped(self, _: int) -> None:
        async for _ in self.target.items(1000):
            break

    async def iterator(self, number: int) -> None:
        assert await self.target.total(numbers(number)) == sum(range(number))

    async def spawn(self, number: int) -> None:
        place = "local" if number % 2 else self.here.node_id
        actor = await Target.spawn(system=self.there, placement=place)
        assert await actor.echo(1) == 1
        await self.there.stop(actor)

    async def name(self, number: int) -> None:
        actor = await Target.spawn(system=self.here, name=f"name-{number % 3}", unique=True)
        far = await Target.resolve(f"name-{number % 3}", system=self.there, timeout=5)
        assert await far.echo(1) == 1
        await self.here.stop(actor)
        await eventually("gone", lambda: not self.there.core.instances(f"name-{number % 3}"))

    async def no_name(self, number: int) -> None:
        with pytest.raises(pul.NameNotFoundError):
            await self.there.resolve(f"none-{number}", timeout=0.001)

    async def watch(self, _: int) -> None:
        actor = await Target.spawn(system=self.here)
        watch = pul.watch(actor)
        await self.here.stop(actor)
        assert (await watch).reason == "stopped"

    async def watch_closed(self, _: int) -> None:
        async with pul.watch(self.target):
            pass

    async def watch_name(self, number: int) -> None:
        async with self.there.watch_name(f"watched-{number}"):
            pass

    async def watch_names(self, _: int) -> None:
        close = await self.there.watch_names(lambda: None)
        close()


KINDS = [name for name in vars(Scene) if not name.startswith("_")]


def blocks() -> int:
    gc.collect()
    # It keeps the names of the last 4,096 attributes that were looked up, and those of a call are unpickled strings.
    clear = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    clear()
    return sys.getallocatedblocks()


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_ended_leaves_nothing_behind(kind: str, where: str) -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            actor = await Target.spawn(system=here, name="target")
            far = await Target.resolve("target", system=there, timeout=5)
            scene = Scene(here, there, actor if where == "here" else far)
            once: Callable[[int], Awaitable[None]] = getattr(scene, kind)
            tables: dict[str, Callable[[], int]] = {
                "tokens": lambda: len(here._bridge.handlers),
                "deadlines": lambda: len(here._bridge.timers),
                "cells": lambda: len(here._cells) + len(there._cells),
                "names": lambda: len(here._names) + len(there._names),
                "ends": lambda: len(here._ends) + len(there._ends),
                "tasks": lambda: len(here._tasks) + len(there._tasks),
                "tasks of the loop": lambda: len(asyncio.all_tasks()),
            }
            tables["tasks of the runtime"] = _core.runtime_tasks
            # Caches fill, and what the interpreter has seen often enough it specialises.
            settled = blocks()
            for _ in range(10):
                for number in range(TIMES):
                    await once(number)
                before, settled = settled, blocks()
                if settled - before < TIMES // 4:
                    break
            sizes = {name: size() for name, size in tables.items()}
            for number in range(2 * TIMES):
                await once(number)

            def more() -> dict[str, int]:
                return {name: size() - sizes[name] for name, size in tables.items() if size() > sizes[name] + 2}

            await eventually(f"no table has more than {sizes}", lambda: not more())
            # One block of the allocator an operation would be 80.
            await eventually("what was allocated is freed", lambda: blocks() - settled < TIMES)

    run(main())
