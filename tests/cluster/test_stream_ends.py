"""How streams end, on one loop and between nodes: R1, R5, R6."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from runtime_util import cluster, collect, eventually, run

import pulsing as pul
from pulsing.core import ActorProxy, ActorRef
from pulsing.exceptions import CallCancelledError


@pul.remote
class Source:
    def __init__(self) -> None:
        self.made = 0
        self.ended = 0
        self.items: list[Any] = []
        self.gate = asyncio.Event()
        self.held = threading.Event()

    async def asynchronous(self) -> AsyncIterator[int]:
        try:
            while True:
                yield self.made
                self.made += 1
        finally:
            self.ended += 1

    def synchronous(self) -> Iterator[int]:
        try:
            while True:
                yield self.made
                self.made += 1
        finally:
            self.ended += 1

    @pul.blocking
    def threaded(self) -> Iterator[int]:
        try:
            while True:
                yield self.made
                self.made += 1
        finally:
            self.ended += 1

    @pul.blocking
    def stuck(self) -> Iterator[int]:
        try:
            yield 0
            self.made += 1
            self.held.wait(30)
            yield 1
        finally:
            self.ended += 1

    async def waiting(self) -> AsyncIterator[int]:
        try:
            self.made += 1
            yield 0
            await asyncio.sleep(600)
        finally:
            self.ended += 1

    async def after_the_gate(self) -> AsyncIterator[int]:
        try:
            yield 0
            await self.gate.wait()
            while True:
                yield 1
        finally:
            self.ended += 1

    async def ticking(self) -> AsyncIterator[int]:
        n = 0
        try:
            while True:
                yield n
                n += 1
                await asyncio.sleep(0)
        finally:
            self.ended += 1

    async def kept(self) -> AsyncIterator[Any]:
        try:
            for item in self.items:
                yield item
                await asyncio.sleep(0)
        finally:
            self.ended += 1


@asynccontextmanager
async def source(where: str) -> AsyncIterator[tuple[ActorProxy, Any]]:
    """A proxy, and the instance behind it."""
    async with cluster(2 if where == "remote" else 1) as systems:
        one = await Source.spawn(system=systems[0])
        cell = systems[0].cell(one.actor_id)
        assert cell is not None
        yield ActorProxy(ActorRef(systems[-1], one.node_id, one.actor_id)), cell.instance


everywhere = pytest.mark.parametrize("where", ["local", "remote"])


@everywhere
@pytest.mark.parametrize("method", ["asynchronous", "synchronous", "threaded", "waiting"])
@pytest.mark.parametrize("how", ["aclose", "break", "cancel", "with"])
def test_r6_giving_up_runs_the_producers_finally_promptly(where: str, method: str, how: str) -> None:
    async def main() -> None:
        async with source(where) as (one, instance):
            if how == "break":
                async for _ in getattr(one, method)():
                    break
            elif how == "cancel":

                async def consume() -> None:
                    async for _ in getattr(one, method)():
                        await asyncio.sleep(600)

                task = asyncio.create_task(consume())
                await eventually("it produces", lambda: instance.made > 0)
                task.cancel()
                await asyncio.wait([task])
            else:
                stream = await getattr(one, method)()
                if how == "with":
                    async with stream:
                        assert await anext(stream) == 0
                else:
                    assert await anext(stream) == 0
                    await stream.aclose()
                # On one loop not soon after, but by then; only a thread cannot be cut short.
                if where == "local" and method != "threaded":
                    assert instance.ended == 1
            await eventually("the producer's finally runs", lambda: instance.ended == 1)
            assert instance.made < 1000

    run(main())


@everywhere
def test_r6_a_thread_that_makes_an_item_is_waited_for_before_its_generator_is_closed(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with source(where) as (one, instance):
            stream = await one.stuck()
            assert await anext(stream) == 0
            await eventually("the thread makes the next item", lambda: instance.made == 1)
            closing = asyncio.create_task(stream.aclose())
            await asyncio.sleep(0)
            assert instance.ended == 0
            instance.held.set()
            await closing
            await eventually("the generator is closed", lambda: instance.ended == 1)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert not caplog.records


def test_r6_a_producer_that_never_waits_stops_when_its_reader_is_dropped() -> None:
    async def main() -> None:
        async with source("local") as (one, instance):
            stream = await one.after_the_gate()
            assert await anext(stream) == 0
            # The producer is awake before it hears that nobody reads.
            instance.gate.set()
            del stream
            await eventually("the producer's finally runs", lambda: instance.ended == 1)

    run(main())


@everywhere
def test_r1_cancelling_a_consumer_while_items_arrive_ends_it_after_a_whole_prefix(where: str) -> None:
    async def main() -> None:
        async with source(where) as (one, instance):
            for turns in range(0, 60, 7):
                got: list[int] = []
                task = asyncio.create_task(collect(one.ticking(), got))
                await eventually("items arrive", lambda got=got: len(got) > 3)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert got == list(range(len(got)))
            await eventually("every producer has ended", lambda: instance.ended == 9)

    run(main())


class Trap:
    """Does something while it is pickled."""

    def __init__(self, spring: Callable[[], None]) -> None:
        self.spring = spring

    def __reduce__(self) -> Any:
        self.spring()
        return int, (7,)


class OddError(Exception):
    """Raised while an item is pickled."""


def test_r1_whatever_happens_while_an_item_is_serialised_the_stream_ends_once(caplog: pytest.LogCaptureFixture) -> None:
    def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    def fail() -> None:
        raise OddError("while pickled")

    async def main() -> None:
        async with source("remote") as (one, instance):
            # The producer's own task is cancelled.
            got: list[Any] = []
            instance.items = [1, Trap(cancel), 3]
            with pytest.raises(CallCancelledError):
                await collect(one.kept(), got)
            assert got == [1, 7]
            # The item refuses.
            got.clear()
            instance.items = [1, Trap(fail), 3]
            with pytest.raises(TypeError, match="OddError: while pickled"):
                await collect(one.kept(), got)
            assert got == [1]
            # The consumer goes.
            readers: list[Any] = []

            def leave() -> None:
                readers[0].cancel()

            # Beyond the window, so that the consumer has begun by then.
            instance.items = [*[1] * 100, Trap(leave), 3]
            stream = await one.kept()
            readers.append(stream)
            got = [item async for item in stream]
            assert got == [1] * len(got)
            await eventually("every producer has ended", lambda: instance.ended == 3)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert not caplog.records
