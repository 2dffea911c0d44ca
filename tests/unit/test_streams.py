"""Streams inside one process: R5, R6."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from runtime_util import cluster, collect, eventually, local_system, run

import pulsing as pul
from pulsing.core import Message, StreamMessage, _streams
from pulsing.exceptions import ActorStoppedError, PulsingActorError, PulsingRuntimeError, PulsingTimeoutError


@pul.remote
class Source:
    def __init__(self) -> None:
        self.made = 0
        self.ended = 0

    async def numbers(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                self.made += 1
                yield i
        finally:
            self.ended += 1

    def counted(self, n: int) -> Iterator[int]:
        try:
            for i in range(n):
                self.made += 1
                yield i
        finally:
            self.ended += 1

    @pul.blocking
    def threaded(self, n: int) -> Iterator[int]:
        yield from range(n)

    async def returned(self, n: int) -> AsyncIterator[int]:
        return self.numbers(n)  # type: ignore[return-value]

    async def broken(self) -> AsyncIterator[int]:
        yield 1
        raise ValueError("in the middle")

    async def silent(self) -> AsyncIterator[int]:
        try:
            await asyncio.sleep(60)
            yield 1
        finally:
            self.ended += 1

    async def state(self) -> tuple[int, int]:
        return self.made, self.ended


def test_every_kind_of_generator_streams() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Source.spawn(system=system)
            for method in (one.numbers, one.counted, one.threaded, one.returned):
                assert [n async for n in method(200)] == list(range(200))
                assert [n async for n in await method(3)] == [0, 1, 2]
            with pytest.raises(TypeError, match="state answered with a tuple"):
                async for _ in one.state():
                    pass

    run(main())


def test_an_error_in_the_middle_comes_after_the_items_before_it() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Source.spawn(system=system)
            got: list[int] = []
            with pytest.raises(ValueError, match="in the middle"):
                await collect(one.broken(), got)
            assert got == [1]

    run(main())


def test_a_slow_consumer_suspends_the_producer() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Source.spawn(system=system)
            stream = await one.numbers(10_000)
            assert await anext(stream) == 0
            for _ in range(20):
                await asyncio.sleep(0)
            made, ended = await one.state()
            assert made <= _streams.WINDOW + 1
            assert ended == 0
            await stream.aclose()

    run(main())


@pytest.mark.parametrize("method", ["numbers", "counted"])
def test_leaving_the_loop_runs_the_producers_finally(method: str) -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Source.spawn(system=system)

            async def ended() -> bool:
                return bool((await one.state())[1] == 1)

            async for n in getattr(one, method)(10_000):
                if n == 3:
                    break
            await eventually("the producer's finally runs", ended)
            stream = await getattr(one, method)(10_000)
            assert await anext(stream) == 0
            await stream.aclose()
            assert (await one.state())[1] == 2
            assert [n async for n in stream] == []

    run(main())


def test_aclose_ends_a_producer_that_waits() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Source.spawn(system=system)
            async with await one.silent():
                pass
            assert (await one.state())[1] == 1

    run(main())


@pytest.mark.parametrize("size", [1, 2], ids=["one node", "two nodes"])
def test_r5_an_idle_stream_fails_instead_of_ending(size: int) -> None:
    async def main() -> None:
        async with cluster(size, default_timeout=5.0, stream_idle=0.1) as systems:
            await Source.spawn(system=systems[0], name="source")
            one = await Source.resolve("source", system=systems[-1], timeout=5)
            with pytest.raises(PulsingTimeoutError, match=r"within 0\.1 s.*idle limit"):
                async for _ in one.silent():
                    pass

            async def ended() -> bool:
                return bool((await one.options(timeout=5).state())[1] == 1)

            await eventually("the producer is cancelled", ended)

    run(main())


def test_a_stream_outlives_the_deadline_of_its_call() -> None:
    @pul.remote
    class Slow:
        async def items(self) -> AsyncIterator[int]:
            for n in range(4):
                await asyncio.sleep(0.03)
                yield n

    async def main() -> None:
        async with local_system(default_timeout=0.05) as system:
            one = await Slow.spawn(system=system)
            assert [n async for n in one.items()] == [0, 1, 2, 3]

    run(main())


def test_a_stopped_actor_fails_its_streams() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Source.spawn(system=system)
            stream = await one.silent()
            await system.kill(one)
            with pytest.raises(ActorStoppedError):
                await anext(stream)

    run(main())


def test_stream_messages_carry_their_type_and_errors() -> None:
    class Writer(pul.Actor):
        async def receive(self, msg: Any) -> Any:
            if msg == "gone":
                return await self.gone
            message, writer = StreamMessage.create("Numbers", buffer_size=2)

            async def write() -> None:
                for n in range(100):
                    await writer.write(n)
                if msg == "fail":
                    writer.error("it broke")
                writer.close()

            self.gone = asyncio.create_task(write())
            return message

    async def main() -> None:
        async with local_system() as system:
            ref = await system.spawn(Writer())
            answer = await ref.ask("ok")
            assert isinstance(answer, Message)
            assert answer.is_stream
            assert answer.msg_type == "Numbers"
            assert [n async for n in answer] == list(range(100))
            failing = await ref.ask("fail")
            with pytest.raises(PulsingActorError, match="it broke"):
                assert [n async for n in failing.stream_reader()] == []
            await (await ref.ask("ok")).stream_reader().aclose()
            with pytest.raises(PulsingRuntimeError, match="has gone"):
                await ref.ask("gone")
            with pytest.raises(PulsingRuntimeError, match="not a stream"):
                Message("Plain").stream_reader()
            with pytest.raises(ValueError, match="buffer_size=0"):
                StreamMessage.create("x", 0)

    run(main())
