"""Streams as arguments, R6, R7, R11, R15: the same on one loop, between nodes, and with every value copied."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from runtime_util import cluster, collect, eventually, run

import pulsing as pul
from pulsing.core import ActorProxy, ActorRef, Message, StreamMessage
from pulsing.core._streams import WINDOW
from pulsing.exceptions import (
    CallCancelledError,
    DeadlockError,
    PulsingActorError,
    PulsingRuntimeError,
    PulsingTimeoutError,
)


class CallerError(Exception):
    """What a caller's generator raises."""


class Feed:
    """Generators that tell how far they came and whether they were closed."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    async def items(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                self.made += 1
                yield i
        finally:
            self.closed += 1

    def counted(self, n: int) -> Iterator[int]:
        try:
            for i in range(n):
                self.made += 1
                yield i
        finally:
            self.closed += 1

    async def broken(self) -> AsyncIterator[int]:
        try:
            yield 1
            raise CallerError("in the middle")
        finally:
            self.closed += 1

    async def silent(self) -> AsyncIterator[int]:
        try:
            self.made += 1
            yield 0
            await asyncio.sleep(60)
        finally:
            self.closed += 1


@pul.remote
class Taker:
    def __init__(self) -> None:
        self.kept: Any = None
        self.task: asyncio.Task[Any] | None = None
        self.got: list[Any] = []
        self.peer: ActorProxy | None = None

    async def total(self, *streams: AsyncIterator[int], more: AsyncIterator[int] | None = None) -> int:
        total = 0
        for one in [*streams, *([more] if more is not None else [])]:
            async for n in one:
                total += n
        return total

    async def first(self, stream: Any) -> int:
        async for n in stream:
            return int(n)
        return -1

    async def first_closed(self, stream: Any) -> int:
        async with stream:
            n = await anext(stream)
        assert [left async for left in stream] == []
        return int(n)

    async def ignore(self, stream: Any) -> str:
        return "not read"

    async def keep(self, stream: Any) -> int:
        self.kept = stream
        return int(await anext(stream))

    async def read_on(self) -> list[int]:
        return [n async for n in self.kept]

    async def catch(self, stream: Any) -> tuple[list[int], str, str]:
        got: list[int] = []
        try:
            await collect(stream, got)
        except CallerError as error:
            return got, type(error).__name__, str(error)
        return got, "", ""

    async def through(self, stream: Any) -> list[int]:
        return [n async for n in stream]

    async def fail(self, stream: Any) -> None:
        await anext(stream)
        raise ValueError("the callee fails")

    async def hang(self, stream: Any) -> None:
        await anext(stream)
        await asyncio.sleep(60)

    async def double(self, stream: Any) -> AsyncIterator[int]:
        async for n in stream:
            yield 2 * n

    def back(self, stream: Any) -> Any:
        return stream

    def add_up(self, stream: Any) -> int:
        return sum(stream)

    @pul.blocking
    def add_up_in_thread(self, stream: Any) -> int:
        return sum(stream)

    async def numbers(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield i
        finally:
            self.got.append("closed")

    async def get(self) -> list[Any]:
        return self.got

    @pul.serial
    async def slow_total(self, stream: Any) -> int:
        return await self.total(stream)

    @pul.serial
    async def own(self) -> int:
        return 1

    @pul.serial
    async def ask_peer(self) -> int:
        assert self.peer is not None
        peer = self.peer

        async def answers() -> AsyncIterator[int]:
            yield 1
            yield await peer.own()

        return int(await peer.slow_total(answers()))

    def meet(self, peer: ActorProxy) -> None:
        self.peer = peer


class Receiver(pul.Actor):
    async def receive(self, msg: Any) -> Any:
        if isinstance(msg, Message):
            return msg.msg_type, [n async for n in msg.stream_reader()]
        return [n async for n in msg]


@asynccontextmanager
async def taker(
    where: str, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[ActorProxy, list[pul.ActorSystem]]]:
    """A proxy of a Taker on the first of the systems; the last one calls."""
    if where == "copied":
        monkeypatch.setenv("PULSING_DEBUG_COPY", "1")
    async with cluster(2 if where == "remote" else 1, **settings) as systems:
        await Taker.spawn(system=systems[0], name="taker")
        proxy = await Taker.resolve("taker", system=systems[-1], timeout=5)
        yield proxy, systems
        # Whatever happened: nothing stays behind at the caller.
        await eventually("no source is left", lambda: not any(len(desk) for desk in systems[-1].desks.values()))


def seen_from(system: pul.ActorSystem, proxy: ActorProxy) -> ActorProxy:
    """The same actor, called by `system`."""
    return ActorProxy(ActorRef(system, proxy.node_id, proxy.actor_id))


everywhere = pytest.mark.parametrize("where", ["local", "remote", "copied"])


@everywhere
def test_r6_iterators_of_every_kind_stream_to_the_callee(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            assert await one.total(feed.items(500)) == sum(range(500))
            assert await one.total(feed.counted(500)) == sum(range(500))
            assert await one.total(feed.items(3), feed.counted(4), more=feed.items(5)) == 3 + 6 + 10
            assert feed.closed == 5
            # The items of another call, awaited or not, and one's own stream handed on.
            assert await one.total(await one.numbers(10)) == 45
            assert await one.total(one.numbers(10)) == 45
            assert await one.total(one.double(feed.items(4))) == 12
            assert [n async for n in one.back(feed.items(200))] == list(range(200))

    run(main())


@everywhere
def test_r6_a_stream_is_a_message_too(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (_, systems):
            host = await systems[0].spawn(Receiver())
            for ref in (host, seen_from(systems[-1], host.as_any()).ref):
                assert await ref.ask(Feed().items(3)) == [0, 1, 2]
                message, writer = StreamMessage.create("Numbers")
                for n in range(5):
                    await writer.write(n)
                writer.close()
                assert await ref.ask(message) == ("Numbers", [0, 1, 2, 3, 4])

    run(main())


@everywhere
def test_r6_a_slow_callee_suspends_the_callers_generator(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            call = asyncio.create_task(one.options(timeout=30).hang(feed.items(100_000)))
            await eventually("the first item is made", lambda: feed.made > 0)
            await one.get()
            assert feed.made <= 2 * WINDOW + 2
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert feed.closed == 1

    run(main())


@everywhere
@pytest.mark.parametrize("method", ["first", "first_closed", "ignore"])
@pytest.mark.parametrize("kind", ["items", "counted"])
def test_r6_leaving_the_loop_at_the_callee_runs_the_callers_finally(
    where: str, method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            stream = getattr(feed, kind)(1_000_000)
            next_one = next(stream) if kind == "counted" else await anext(stream)
            assert next_one == 0
            await getattr(one, method)(stream)
            # Not soon after: by the time the call has returned.
            assert feed.closed == 1

    run(main())


@everywhere
def test_r6_aclose_at_the_callee_ends_a_generator_that_waits(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @pul.remote
    class Closer:
        async def close_and_wait(self, stream: Any, release: Any) -> int:
            n = int(await anext(stream))
            await stream.aclose()
            async for _ in release:
                pass
            return n

    async def main() -> None:
        async with taker(where, monkeypatch) as (_, systems):
            feed = Feed()
            one = seen_from(systems[-1], await Closer.spawn(system=systems[0]))
            closed_in_time = False

            async def release() -> AsyncIterator[int]:
                nonlocal closed_in_time
                yield 0
                # The call still runs when the first stream's finally does.
                await eventually("the silent generator is closed", lambda: feed.closed == 1)
                closed_in_time = True

            assert await one.close_and_wait(feed.silent(), release()) == 0
            assert closed_in_time

    run(main())


@everywhere
def test_r7_an_error_in_the_callers_generator_arrives_typed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            assert tuple(await one.catch(feed.broken())) == ([1], "CallerError", "in the middle")
            # Not caught there, it comes back as it went.
            with pytest.raises(CallerError, match="in the middle"):
                await one.through(feed.broken())
            assert feed.closed == 2

    run(main())


@everywhere
def test_r1_every_end_of_the_call_closes_its_streams(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, systems):
            feed = Feed()
            with pytest.raises(ValueError, match="callee fails"):
                await one.fail(feed.silent())
            assert feed.closed == 1
            with pytest.raises(PulsingTimeoutError):
                await one.options(timeout=0.2).hang(feed.silent())
            assert feed.closed == 2
            with pytest.raises(AttributeError):
                await one.as_any().nothing_of_this_name(feed.items(3))
            # Answered, while the callee holds on to the stream.
            assert await one.keep(feed.items(1_000_000)) == 0
            assert feed.closed == 3
            with pytest.raises(CallCancelledError, match="is over"):
                await one.read_on()
            unread = feed.items(3)
            assert await one.ignore(unread) == "not read"
            assert [n async for n in unread] == []
            call = asyncio.create_task(one.hang(feed.silent()))
            made = feed.made
            await eventually("it is being read", lambda: feed.made > made)
            await systems[0].stop("taker", 0.0)
            with pytest.raises(pul.ActorStoppedError):
                await call
            assert feed.closed == 4

    run(main())


@everywhere
def test_r6_both_directions_stream_at_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            assert [n async for n in one.double(feed.items(1000))] == [2 * n for n in range(1000)]
            # In lockstep: each question waits for the answer before it.
            answered = asyncio.Semaphore(1)

            async def questions() -> AsyncIterator[int]:
                try:
                    for n in range(20):
                        await answered.acquire()
                        yield n
                finally:
                    feed.closed += 1

            got = []
            async for n in one.double(questions()):
                got.append(n)
                answered.release()
            assert got == [2 * n for n in range(20)]
            assert feed.closed == 2
            # Who leaves the answers closes the questions.
            answers = await one.double(feed.items(1_000_000))
            assert await anext(answers) == 0
            await answers.aclose()
            await eventually("the questions are closed", lambda: feed.closed == 3)
            answers = await one.double(feed.items(1_000_000))
            assert await anext(answers) == 0
            del answers
            gc.collect()
            await eventually("dropped answers close the questions", lambda: feed.closed == 4)

    run(main())


@everywhere
def test_r12_blocking_methods_read_with_for(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            assert await one.add_up_in_thread(feed.items(500)) == sum(range(500))
            assert await one.add_up_in_thread(feed.counted(500)) == sum(range(500))
            with pytest.raises(CallerError):
                await one.add_up_in_thread(feed.broken())
            # A sync method on the loop cannot wait, and says so; it need not for what is made on the spot.
            with pytest.raises(TypeError, match=r"@pul\.blocking"):
                await one.add_up(feed.items(3))
            if where == "local":
                assert await one.add_up(feed.counted(4)) == 6
            else:
                with pytest.raises(TypeError, match=r"@pul\.blocking"):
                    await one.add_up(feed.counted(4))

    run(main())


def test_r15_items_pass_by_reference_on_one_loop() -> None:
    @pul.remote
    class Same:
        async def which(self, stream: Any) -> int:
            return id(await anext(stream))

    async def main() -> None:
        async with cluster(1) as systems:
            thing = object()

            async def things() -> AsyncIterator[object]:
                yield thing

            assert await (await Same.spawn(system=systems[0])).which(things()) == id(thing)

    run(main())


@everywhere
def test_a_stream_is_read_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @pul.remote
    class Twice:
        async def read(self, stream: Any, again: Any) -> tuple[list[int], str]:
            first = [n async for n in stream]
            try:
                await anext(again)
            except (PulsingRuntimeError, StopAsyncIteration) as error:
                return first, type(error).__name__
            return first, ""

    async def main() -> None:
        async with taker(where, monkeypatch) as (_, systems):
            feed = Feed()
            stream = feed.items(3)
            got = await seen_from(systems[-1], await Twice.spawn(system=systems[0])).read(stream, stream)
            assert tuple(got) == ([0, 1, 2], "StopAsyncIteration")

    run(main())


@everywhere
def test_tell_refuses_streams_in_words(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            tells: list[Callable[[], Any]] = [
                lambda: one.total.tell(feed.items(3)),
                lambda: one.tell("total", more=feed.counted(3)),
                lambda: one.ref.tell(feed.items(3)),
            ]
            for tell in tells:
                with pytest.raises(TypeError, match="tell cannot stream argument"):
                    await tell()
            assert feed.made == 0

    run(main())


def test_r11_a_generator_that_calls_its_busy_reader_is_a_deadlock() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            here = await Taker.spawn(system=systems[1])
            for system in systems:
                peer = await Taker.spawn(system=system)
                await here.meet(seen_from(systems[1], peer))
                with pytest.raises((DeadlockError, PulsingActorError), match="deadlock"):
                    await here.options(timeout=20).ask_peer()

    run(main())


@everywhere
def test_a_stream_inside_an_object_fails_at_send_with_its_path(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch) as (one, _):
            feed = Feed()
            if where == "local":
                # By reference, like all else (R15).
                assert await one.ignore({"a": [feed.items(3)]}) == "not read"
                return
            for wrong, path in [
                ({"a": [1, feed.items(3)]}, r"argument 0\['a'\]\[1\]"),
                ([feed.counted(3)], r"argument 0\[0\]"),
                ((await one.numbers(3),), r"argument 0\[0\]"),
            ]:
                with pytest.raises(TypeError, match=path + ".*travels as an argument of its own"):
                    await one.ignore(wrong)
            # Refused before it begins, and never awaited then.
            call = one.numbers(3)
            with pytest.raises(TypeError, match=r"argument 0\[0\] to .*travels as an argument of its own"):
                await one.ignore([call])
            call.close()
            with pytest.raises(TypeError, match=r"argument 'more'\.inner"):
                await one.total(more=Holder(feed.items(3)))

    run(main())


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


@everywhere
def test_r5_a_stream_that_brings_nothing_fails_at_its_reader(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taker(where, monkeypatch, stream_idle=0.1) as (one, _):
            feed = Feed()
            with pytest.raises(PulsingTimeoutError, match="stream"):
                await one.through(feed.silent())
            assert feed.closed == 1

    run(main())
